"""Padding does not change a center: each sequence has the center that it has outside the batch."""

import functools
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from hf_fp8kv import FP8PagedCache, enable
from hf_fp8kv.cache.rope_rotation import RopeRotation
from tests.cache.public import read_centers
from tests.helpers.assertions import assert_same
from tests.helpers.tiny_models import build, tiny

pytestmark = [pytest.mark.text, pytest.mark.usefixtures("no_gradients")]

WIDTH = 45
CENTERED: dict[str, Any] = {"plan": "fp8_e3m4 centered"}
# First and last token of each sequence in a padded batch.
SPANS = {
    "left": [(0, 45), (40, 45), (9, 45), (44, 45)],
    "right": [(0, 45), (0, 5), (0, 36), (0, 1)],
    "both": [(3, 44), (1, 4), (2, 40), (40, 42)],
}
rooms = pytest.mark.parametrize("room", [None, 64], ids=["", "preallocated"])


@functools.cache
def model_of(name: str = "qwen2", attention: str = "fp8_paged") -> PreTrainedModel:
    """Return a model whose keys have a bias, so that centers are far from 0."""
    return tiny(name, attn_implementation=attention, key_bias=10.0)[0]


def new_cache(model: PreTrainedModel, room: int | None = None, **keywords: Any) -> FP8PagedCache:
    keywords = {**CENTERED, **keywords}
    return FP8PagedCache(model.config, page_size=8, max_cache_len=room, **keywords)


def pad(spans: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    """Return a batch with tokens at `spans`. Padding has position 0, as in `generate`."""
    ids = torch.randint(4, 90, (len(spans), WIDTH), generator=torch.Generator().manual_seed(1))
    mask = torch.zeros_like(ids)
    for row, (start, stop) in zip(mask, spans, strict=True):
        row[start:stop] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0) * mask
    return {"input_ids": ids.where(mask > 0, 3), "attention_mask": mask, "position_ids": positions}


def cut(batch: dict[str, torch.Tensor], start: int, stop: int) -> dict[str, torch.Tensor]:
    """Return the inputs of a call with some of the tokens. Its mask covers all tokens before."""
    first = {"input_ids": start, "attention_mask": 0, "position_ids": start}
    return {key: batch[key][:, first[key] : stop].clone() for key in first}


def centers(cache: FP8PagedCache) -> torch.Tensor:
    """Return the centers of all layers, `[layers, B, Hkv, D]`."""
    return torch.stack([read_centers(cache, layer) for layer in range(len(cache.layers))])


def alone(model: PreTrainedModel, row: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return the centers of a sequence outside the batch, `[layers, Hkv, D]`."""
    cache = new_cache(model)
    model(row[None, start:stop], past_key_values=cache)
    return centers(cache)[:, 0]


def assert_centers(
    actual: torch.Tensor, model: PreTrainedModel, batch: dict[str, torch.Tensor], spans: str
) -> None:
    """Assert that sequences have the centers that they have alone, in the layers of `actual`."""
    rows = zip(batch["input_ids"], SPANS[spans], strict=True)
    expected = torch.stack([alone(model, row, *span) for row, span in rows], 1)
    torch.testing.assert_close(actual, expected[: len(actual)], rtol=1e-4, atol=1e-4)


# Grid: Each model with each padding. Preallocation alternates, since it only stores the center.
@pytest.mark.parametrize(
    ("name", "spans", "room"),
    [
        ("qwen2", "left", None), ("qwen2", "right", 64), ("qwen2", "both", 64),
        ("sliding_and_full", "left", 64), ("sliding_and_full", "right", None),
        ("sliding_and_full", "both", None), ("gemma3_text", "left", None),
        ("gemma3_text", "both", 64),
    ],
)  # fmt: skip
def test_a_center_does_not_depend_on_the_batch(name: str, spans: str, room: int | None) -> None:
    model, batch = model_of(name), pad(SPANS[spans])
    cache = new_cache(model, room)
    model(**batch, past_key_values=cache)
    assert_centers(centers(cache), model, batch, spans)


@pytest.mark.parametrize(
    ("name", "prefill"), [("gqa", "exact"), ("softcap", "stored"), ("sinks", "stored")]
)
def test_centers_with_exact_and_stored_prefill(name: str, prefill: str) -> None:
    model, batch = model_of(name), pad(SPANS["both"])
    cache = new_cache(model, prefill=prefill)
    model(**batch, past_key_values=cache)
    # With "stored", the keys of the second layer depend on rounded keys of the first.
    assert_centers(centers(cache)[:1], model, batch, "both")


def test_centers_without_a_config() -> None:
    model, batch = model_of(), pad(SPANS["left"])
    cache, configured = FP8PagedCache(page_size=8, **CENTERED), new_cache(model)
    for each in (cache, configured):
        model(**batch, past_key_values=each)
    # Without a config, the rotation of the keys by RoPE is unknown.
    rope = RopeRotation.from_config(model.config)(0)
    assert_same(rope.average(centers(cache)), centers(configured))


# Grid: Each chunking, each model and each kind of cache occur twice.
@pytest.mark.parametrize(
    ("name", "chunks", "room"),
    [
        ("qwen2", (16, 16, 13), None), ("qwen2", (41, 1, 3), 64),
        ("sliding_and_full", (16, 16, 13), 64), ("sliding_and_full", (1, 43, 1), None),
    ],
)  # fmt: skip
def test_a_center_starts_at_the_first_token(
    name: str, chunks: tuple[int, ...], room: int | None
) -> None:
    """The first chunks of some sequences are padding only."""
    model, spans = model_of(name), [(0, 45), (40, 45), (9, 45), (20, 45)]
    batch, cache = pad(spans), new_cache(model, room)
    expected: list[Any] = [None] * len(spans)
    stop = 0
    for count in chunks:
        start, stop = stop, stop + count
        model(**cut(batch, start, stop), past_key_values=cache)
        for row, (first, _) in enumerate(spans):
            if expected[row] is None and first < stop:
                expected[row] = alone(model, batch["input_ids"][row], first, stop)
        started = [row for row, center in enumerate(expected) if center is not None]
        actual = centers(cache)[:, started]
        singles = torch.stack([expected[row] for row in started], 1)
        torch.testing.assert_close(actual[0], singles[0], rtol=1e-4, atol=1e-4)
        # Later chunks of the batch attend to 8-bit keys.
        assert (actual - singles).abs().max() < 0.02 * singles.abs().max()
    assert None not in expected


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_first_calls_find_the_center() -> None:
    layers = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    model, _ = tiny("qwen2", attn_implementation="fp8_paged", key_bias=10.0, **layers)
    batch = pad([(0, 45), (40, 45), (9, 45), (20, 44)])
    results = []
    for forward in (torch.compile(model, fullgraph=True, backend="eager"), model):
        cache = new_cache(model, 64)
        for start, stop in ((0, 22), (22, 45)):
            forward(**cut(batch, start, stop), past_key_values=cache)
            results.append(centers(cache))
    torch.testing.assert_close(results[:2], results[2:], rtol=1e-5, atol=1e-5)


@rooms
def test_tokens_are_read_with_the_center_they_were_stored_with(room: int | None) -> None:
    """A sequence that begins in a later chunk gets its center there. Forks keep their center."""
    model, batch = model_of(), pad([(0, 45), (20, 45)])
    exact = new_cache(model, plan="auto")
    caches = [new_cache(model, room)]
    for start, stop in ((0, 16), (16, 30), (30, 45)):
        for cache in (exact, *caches):
            model(**cut(batch, start, stop), past_key_values=cache)
        caches.append(caches[-1].fork())
    for cache in caches:
        count = cache.host_length()
        keys, expected = (
            each.layers[0].keys.dense()[1, :, 20 : min(count, 45)] for each in (cache, exact)
        )
        assert count in (16, 30, 45)
        assert (keys - expected).abs().max() < 0.03 * expected.abs().max()


@rooms
def test_a_mask_that_hides_stored_tokens_changes_no_center(room: int | None) -> None:
    model, batch = model_of(), pad([(0, 45), (20, 45)])
    cache = new_cache(model, room)
    before = []
    for start, stop in ((0, 30), (30, 45)):
        part = cut(batch, start, stop)
        part["attention_mask"][0, : min(start, 25)] = 0
        part["attention_mask"][1, :start] = 0
        model(**part, past_key_values=cache)
        before.append(centers(cache))
    assert_same(*before)


class ValuesRead(TorchDispatchMode):
    """Counts values that Python reads from tensors. Each read waits for a GPU."""

    total = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.total += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_masks_are_not_read_after_all_sequences_have_begun() -> None:
    model, batch = model_of(), pad(SPANS["left"])
    reads = []
    for keywords in (CENTERED, {"dtype": "fp8"}):
        cache = FP8PagedCache(model.config, page_size=8, **keywords)
        model(**batch, past_key_values=cache)
        mask = batch["attention_mask"]
        for _ in range(3):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            with ValuesRead() as read:
                model(torch.ones(4, 1).long(), attention_mask=mask, past_key_values=cache)
            reads.append(read.total)
    assert reads[1:3] == reads[4:6]


@rooms
def test_a_mask_applies_to_one_call(room: int | None) -> None:
    """After a reset, all tokens of a call without a mask count."""
    model, batch = model_of(), pad(SPANS["right"])
    cache = new_cache(model, room)
    model(**batch, past_key_values=cache)
    rope = RopeRotation.from_config(model.config)(0)
    rows, heads, _, dim = cache.layers[0].keys.shape
    k = torch.randn(rows, heads, WIDTH, dim, generator=torch.Generator().manual_seed(2))
    for empty in (cache.reset, lambda: cache.crop(-WIDTH)):
        empty()
        cache.update(k, k, 0)
        torch.testing.assert_close(read_centers(cache), rope.average(k[:, :, -32:].mean(2)))


def test_a_mask_applies_to_one_cache() -> None:
    """A cache with a different attention function requests a mask and receives none."""
    batch, model = pad(SPANS["left"]), model_of()
    sdpa_model = model_of(attention="sdpa")
    maskless, cache = new_cache(sdpa_model), new_cache(model)
    sdpa_model(**batch, past_key_values=maskless)
    before = centers(maskless)
    model(**batch, past_key_values=cache)
    assert_centers(centers(cache), model, batch, "left")
    extra = {**batch, "attention_mask": torch.ones(4, 2 * WIDTH)}
    sdpa_model(**extra, past_key_values=maskless)
    assert_same(centers(maskless), before)


@rooms
def test_enable_passes_the_mask_under_any_attention(room: int | None) -> None:
    model = tiny("qwen2", attn_implementation="sdpa", key_bias=10.0)[0]
    batch = pad(SPANS["left"])
    del batch["position_ids"]
    enable(model, max_cache_len=room, **CENTERED)
    model.set_attn_implementation("sdpa")
    options: dict[str, Any] = {"num_beams": 2, "do_sample": False, "max_new_tokens": 4}
    cache = model.generate(**batch, return_dict_in_generate=True, **options).past_key_values
    actual = centers(cache)
    assert_same(actual[:, ::2], actual[:, 1::2], "two beams of a sequence")
    assert_centers(actual[:, ::2], model, batch, "left")


def test_padding_of_an_encoder_changes_no_center() -> None:
    model, inputs = build("seq2seq/bart")
    how: dict[str, Any] = {"do_sample": False, "max_new_tokens": 3, "return_dict_in_generate": True}
    ids = inputs["input_ids"]
    mask = torch.zeros_like(ids)
    mask[0], mask[1, :4] = 1, 1
    enable(model)
    caches = [
        model.generate(input_ids=part, attention_mask=part_mask, **how).past_key_values
        for part, part_mask in ((ids, mask), (ids[:1], mask[:1]), (ids[1:, :4], mask[1:, :4]))
    ]
    batched, *rows = [centers(cache.cross_attention_cache) for cache in caches]
    torch.testing.assert_close(batched, torch.cat(rows, 1), rtol=1e-4, atol=1e-4)
