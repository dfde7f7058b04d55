"""Padding has no say in a center: each sequence's is the one that it has without the batch."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_fp8kv import FP8PagedCache, enable
from hf_fp8kv.cache.centers import FirstTokens
from tests.helpers.assertions import assert_same
from tests.helpers.tiny_models import build, tiny

pytestmark = pytest.mark.text

WIDTH = 45
# Nothing that a first call may decide otherwise.
CENTERED: dict[str, Any] = {"dtype": "fp8_e3m4", "center_keys": True}
# First and last token of each sequence in a padded batch.
SPANS = {
    "left": [(0, 45), (40, 45), (9, 45), (44, 45)],
    "right": [(0, 45), (0, 5), (0, 36), (0, 1)],
    "both": [(3, 44), (1, 4), (2, 40), (40, 42)],
}
spans_of = pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
rooms = pytest.mark.parametrize("room", [None, 64], ids=["", "preallocated"])


def model_of(name: str = "qwen2") -> PreTrainedModel:
    """A model whose keys have a bias, so that the center of one without padding is far from 0."""
    return tiny(name, attn_implementation="fp8_paged", key_bias=10.0)[0]


def new_cache(model: PreTrainedModel, room: int | None = None, **keywords: Any) -> FP8PagedCache:
    keywords = {**CENTERED, **keywords}
    return FP8PagedCache(model.config, page_size=8, max_cache_len=room, **keywords)


def pad(spans: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    """A batch with tokens at `spans`; padding is one token, at position 0, as in `generate`."""
    ids = torch.randint(4, 90, (len(spans), WIDTH), generator=torch.Generator().manual_seed(1))
    mask = torch.zeros_like(ids)
    for row, (start, stop) in zip(mask, spans, strict=True):
        row[start:stop] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0) * mask
    return {"input_ids": ids.where(mask > 0, 3), "attention_mask": mask, "position_ids": positions}


def centers(cache: FP8PagedCache) -> torch.Tensor:
    """`[layers, B, Hkv, D]`."""
    return torch.stack([layer.k_center.clone() for layer in cache.paged_layers])


def alone(model: PreTrainedModel, row: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """The centers of a text by itself: `[layers, Hkv, D]`."""
    cache = new_cache(model)
    model(row[None, start:stop], past_key_values=cache)
    return centers(cache)[:, 0]


def assert_centers(got: torch.Tensor, expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(got, torch.stack(expected, 1), rtol=1e-4, atol=1e-4)


@spans_of
@rooms
@pytest.mark.parametrize("name", ["qwen2", "sliding_and_full", "gemma3_text"])
@torch.no_grad()
def test_a_center_is_that_of_the_text_alone(
    name: str, room: int | None, spans: list[tuple[int, int]]
) -> None:
    model, batch, cache = model_of(name), pad(spans), None
    cache = new_cache(model, room)
    model(**batch, past_key_values=cache)
    rows = zip(batch["input_ids"], spans, strict=True)
    assert_centers(centers(cache), [alone(model, row, *span) for row, span in rows])


@pytest.mark.parametrize("name", ["gqa", "softcap", "sinks"])
@pytest.mark.parametrize("prefill", ["exact", "stored"])
@torch.no_grad()
def test_other_ways_to_attend(name: str, prefill: str) -> None:
    model, batch = model_of(name), pad(SPANS["both"])
    cache = new_cache(model, prefill=prefill, center_keys=True)
    model(**batch, past_key_values=cache)
    # What "stored" rounds is in the second layer's keys.
    of_first = centers(cache)[:1]
    rows = zip(batch["input_ids"], SPANS["both"], strict=True)
    assert_centers(of_first, [alone(model, row, *span)[:1] for row, span in rows])


@torch.no_grad()
def test_without_a_config() -> None:
    model, batch = model_of(), pad(SPANS["left"])
    cache, other = FP8PagedCache(page_size=8, **CENTERED), new_cache(model)
    for each in (cache, other):
        model(**batch, past_key_values=each)
    # How keys turn is not known then.
    turns = other.paged_layers[0].turns
    assert turns is not None
    assert_same(turns.steady(centers(cache)), centers(other))


@pytest.mark.parametrize("chunks", [(16, 16, 13), (41, 1, 3), (1, 43, 1)], ids=str)
@pytest.mark.parametrize("name", ["qwen2", "sliding_and_full"])
@rooms
@torch.no_grad()
def test_a_sequence_begins_with_its_first_token(
    name: str, room: int | None, chunks: tuple[int, ...]
) -> None:
    """In chunks, of which the first ones are nothing but padding for some."""
    model, spans = model_of(name), [(0, 45), (40, 45), (9, 45), (20, 45)]
    batch, cache = pad(spans), new_cache(model, room)
    expected: list[Any] = [None] * len(spans)
    stop = 0
    for count in chunks:
        start, stop = stop, stop + count
        part = {key: batch[key][:, start:stop] for key in ("input_ids", "position_ids")}
        mask = batch["attention_mask"][:, :stop]
        model(**part, attention_mask=mask, past_key_values=cache)
        for row, (first, _) in enumerate(spans):
            if expected[row] is None and first < stop:
                expected[row] = alone(model, batch["input_ids"][row], first, stop)
        known = [row for row, center in enumerate(expected) if center is not None]
        got, of_texts = centers(cache)[:, known], torch.stack([expected[row] for row in known], 1)
        torch.testing.assert_close(got[0], of_texts[0], rtol=1e-4, atol=1e-4)
        # What later chunks of the batch attend to is stored in 8 bits.
        assert (got - of_texts).abs().max() < 0.02 * of_texts.abs().max()
    assert None not in expected


@torch.no_grad()
def test_compiled_first_calls() -> None:
    torch._dynamo.reset()
    model, batch = model_of(), pad([(0, 45), (40, 45), (9, 45), (20, 44)])
    found = []
    for forward in (torch.compile(model, fullgraph=True, backend="eager"), model):
        cache = new_cache(model, 64)
        for start, stop in ((0, 22), (22, 45)):
            part = {key: batch[key][:, start:stop] for key in ("input_ids", "position_ids")}
            mask = batch["attention_mask"][:, :stop]
            forward(**part, attention_mask=mask, past_key_values=cache)
            found.append(centers(cache))
    torch.testing.assert_close(found[:2], found[2:], rtol=1e-5, atol=1e-5)


@rooms
@torch.no_grad()
def test_beams(room: int | None) -> None:
    model, batch = model_of(), pad(SPANS["left"])
    del batch["position_ids"]
    cache = new_cache(model, room)
    how: dict[str, Any] = {"num_beams": 2, "do_sample": False, "max_new_tokens": 4}
    model.generate(**batch, past_key_values=cache, **how)
    rows = zip(batch["input_ids"], SPANS["left"], strict=True)
    expected = [alone(model, row, *span) for row, span in rows for _ in range(2)]
    assert_centers(centers(cache), expected)


@rooms
@torch.no_grad()
def test_what_is_read_after_a_late_center(room: int | None) -> None:
    """Tokens of a sequence are stored with the center that they are read with; forks, too."""
    model, batch = model_of(), pad([(0, 45), (20, 45)])
    exact = new_cache(model, dtype="auto", center_keys=None)
    caches = [new_cache(model, room)]
    for start, stop in ((0, 16), (16, 30), (30, 45)):
        part = {key: batch[key][:, start:stop] for key in ("input_ids", "position_ids")}
        mask = batch["attention_mask"][:, :stop]
        for cache in (exact, *caches):
            model(**part, attention_mask=mask, past_key_values=cache)
        caches.append(caches[-1].fork())
    for cache in caches:
        count = cache.host_length()
        keys, expected = (
            each.layers[0].keys.dense()[1, :, 20 : min(count, 45)] for each in (cache, exact)
        )
        assert count in (16, 30, 45)
        assert (keys - expected).abs().max() < 0.03 * expected.abs().max()


@rooms
@torch.no_grad()
def test_a_mask_that_hides_what_is_stored(room: int | None) -> None:
    """It changes no center that something was stored with."""
    model, batch = model_of(), pad([(0, 45), (20, 45)])
    cache = new_cache(model, room)
    before = []
    for start, stop in ((0, 30), (30, 45)):
        part = {key: batch[key][:, start:stop] for key in ("input_ids", "position_ids")}
        mask = batch["attention_mask"][:, :stop].clone()
        mask[0, : min(start, 25)] = 0
        mask[1, :start] = 0
        model(**part, attention_mask=mask, past_key_values=cache)
        before.append(centers(cache))
    assert_same(*before)


@torch.no_grad()
def test_masks_are_looked_into_until_all_sequences_have_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    take = FirstTokens.take

    def spy(self: FirstTokens, mask: Any, start: Any, tokens: int) -> None:
        seen.append(tokens)
        take(self, mask, start, tokens)

    monkeypatch.setattr(FirstTokens, "take", spy)
    model, batch = model_of(), pad(SPANS["left"])
    del batch["position_ids"]
    how: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    cache = new_cache(model)
    text = model.generate(**batch, past_key_values=cache, **how)
    assert seen == [WIDTH]
    for _ in range(3):
        text = torch.cat([text, text[:, -5:]], 1)
        more = text.shape[1] - WIDTH
        mask = torch.nn.functional.pad(batch["attention_mask"], (0, more), value=1)
        text = model.generate(text, attention_mask=mask, past_key_values=cache, **how)
        # The last token of an answer is not stored.
        assert seen == [WIDTH, 6]
    model.generate(**batch, past_key_values=new_cache(model, dtype="fp8", center_keys=None), **how)
    assert seen == [WIDTH, 6]


@rooms
@torch.no_grad()
def test_a_mask_is_for_one_call(room: int | None) -> None:
    """What is stored without a mask, after a reset, is taken as it is."""
    model, batch = model_of(), pad(SPANS["right"])
    cache = new_cache(model, room)
    model(**batch, past_key_values=cache)
    layer: Any = cache.layers[0]
    shape = (len(batch["input_ids"]), layer.pool.heads, WIDTH, layer.pool.k_dim)
    k = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    for empty in (cache.reset, lambda: cache.crop(-WIDTH)):
        empty()
        cache.update(k, k, 0)
        torch.testing.assert_close(layer.k_center, layer.turns.steady(k[:, :, -32:].mean(2)))


@torch.no_grad()
def test_a_cache_that_is_not_answered() -> None:
    """Under another attention; the next mask of "fp8_paged" is that of another cache."""
    batch, model = pad(SPANS["left"]), model_of()
    other = tiny("qwen2", attn_implementation="sdpa", key_bias=10.0)[0]
    unanswered, cache = new_cache(other), new_cache(model)
    other(**batch, past_key_values=unanswered)
    before = centers(unanswered)
    model(**batch, past_key_values=cache)
    rows = zip(batch["input_ids"], SPANS["left"], strict=True)
    assert_centers(centers(cache), [alone(model, row, *span) for row, span in rows])
    more = {**batch, "attention_mask": torch.ones(4, 2 * WIDTH)}
    other(**more, past_key_values=unanswered)
    assert_same(centers(unanswered), before)


@rooms
@torch.no_grad()
def test_enable_knows_the_mask_under_any_attention(room: int | None) -> None:
    model = tiny("qwen2", attn_implementation="sdpa", key_bias=10.0)[0]
    batch = pad(SPANS["left"])
    del batch["position_ids"]
    enable(model, max_cache_len=room, **CENTERED)
    model.set_attn_implementation("sdpa")
    how: dict[str, Any] = {"num_beams": 2, "do_sample": False, "max_new_tokens": 4}
    cache = model.generate(**batch, return_dict_in_generate=True, **how).past_key_values
    rows = zip(batch["input_ids"], SPANS["left"], strict=True)
    expected = [alone(model, row, *span) for row, span in rows for _ in range(2)]
    assert_centers(centers(cache), expected)


@torch.no_grad()
def test_padding_of_an_encoder() -> None:
    model, inputs = build("seq2seq/bart")
    how: dict[str, Any] = {"do_sample": False, "max_new_tokens": 3, "return_dict_in_generate": True}
    ids = inputs["input_ids"]
    mask = torch.zeros_like(ids)
    mask[0], mask[1, :4] = 1, 1
    enable(model)
    caches = [
        model.generate(input_ids=part, attention_mask=of_part, **how).past_key_values
        for part, of_part in ((ids, mask), (ids[:1], mask[:1]), (ids[1:, :4], mask[1:, :4]))
    ]
    both, *rows = [centers(cache.cross_attention_cache) for cache in caches]
    assert_centers(both, [row[:, 0] for row in rows])
