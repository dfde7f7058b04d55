"""Tests of centers in padded batches: each sequence has the center that it has alone."""

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
from tests.helpers.tiny_models import build_model, build_variant

pytestmark = [pytest.mark.text, pytest.mark.usefixtures("no_gradients")]

NUM_COLUMNS = 45
CENTERED: dict[str, Any] = {"plan": "fp8_e3m4 centered"}
# Start and stop of each sequence in a padded batch of `NUM_COLUMNS` columns.
SPANS = {
    "left": [(0, 45), (40, 45), (9, 45), (44, 45)],
    "right": [(0, 45), (0, 5), (0, 36), (0, 1)],
    "both": [(3, 44), (1, 4), (2, 40), (40, 42)],
}
for_each_size = pytest.mark.parametrize("max_len", [None, 64], ids=["", "preallocated"])


@functools.cache
def get_model(name: str = "qwen2", attention: str = "fp8_paged") -> PreTrainedModel:
    """Return a model whose keys have a bias, so that centers are far from 0."""
    return build_variant(name, attn_implementation=attention, key_bias=10.0)[0]


def make_cache(model: PreTrainedModel, max_len: int | None = None, **options: Any) -> FP8PagedCache:
    options = {**CENTERED, **options}
    return FP8PagedCache(model.config, page_size=8, max_cache_len=max_len, **options)


def make_batch(spans: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    """Return a batch of sequences at `spans`. Padding has position 0, as in `generate`."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, 90, (len(spans), NUM_COLUMNS), generator=generator)
    mask = torch.zeros_like(ids)
    for row, (start, stop) in zip(mask, spans, strict=True):
        row[start:stop] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0) * mask
    return {"input_ids": ids.where(mask > 0, 3), "attention_mask": mask, "position_ids": positions}


def cut_batch(batch: dict[str, torch.Tensor], start: int, stop: int) -> dict[str, torch.Tensor]:
    """Return the inputs of a call with tokens `start` to `stop - 1`. The mask begins at token 0."""
    starts = {"input_ids": start, "attention_mask": 0, "position_ids": start}
    return {name: batch[name][:, starts[name] : stop].clone() for name in starts}


def read_all_centers(cache: FP8PagedCache) -> torch.Tensor:
    """Return the centers of all layers, `[layers, B, Hkv, D]`."""
    return torch.stack([read_centers(cache, layer) for layer in range(len(cache.layers))])


def compute_centers(model: Any, ids: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return the centers of a sequence that is cached alone, `[layers, Hkv, D]`."""
    cache = make_cache(model)
    model(ids[None, start:stop], past_key_values=cache)
    return read_all_centers(cache)[:, 0]


def assert_centers(
    actual: torch.Tensor, model: PreTrainedModel, batch: dict[str, torch.Tensor], spans: str
) -> None:
    """Assert that centers `[layers, B, Hkv, D]` are the same as for sequences cached alone."""
    rows = zip(batch["input_ids"], SPANS[spans], strict=True)
    expected = torch.stack([compute_centers(model, ids, *span) for ids, span in rows], 1)
    torch.testing.assert_close(actual, expected[: len(actual)], rtol=1e-4, atol=1e-4)


# Growing and preallocated caches alternate, because both compute centers with the same code.
@pytest.mark.parametrize(
    ("name", "spans", "max_len"),
    [
        ("qwen2", "left", None), ("qwen2", "right", 64), ("qwen2", "both", 64),
        ("sliding_and_full", "left", 64), ("sliding_and_full", "right", None),
        ("sliding_and_full", "both", None), ("gemma3_text", "left", None),
        ("gemma3_text", "both", 64),
    ],
)  # fmt: skip
def test_a_center_does_not_depend_on_the_batch(name: str, spans: str, max_len: int | None) -> None:
    model, batch = get_model(name), make_batch(SPANS[spans])
    cache = make_cache(model, max_len)
    model(**batch, past_key_values=cache)
    assert_centers(read_all_centers(cache), model, batch, spans)


@pytest.mark.parametrize(
    ("name", "prefill"), [("gqa", "exact"), ("softcap", "stored"), ("sinks", "stored")]
)
def test_centers_do_not_depend_on_the_prefill_mode(name: str, prefill: str) -> None:
    model, batch = get_model(name), make_batch(SPANS["both"])
    cache = make_cache(model, prefill=prefill)
    model(**batch, past_key_values=cache)
    # With "stored", the keys of the second layer depend on rounded keys of the first.
    assert_centers(read_all_centers(cache)[:1], model, batch, "both")


def test_centers_without_a_config_are_not_averaged() -> None:
    model, batch = get_model(), make_batch(SPANS["left"])
    cache, configured_cache = FP8PagedCache(page_size=8, **CENTERED), make_cache(model)
    for each_cache in (cache, configured_cache):
        model(**batch, past_key_values=each_cache)
    # Without a config, the RoPE rotation is unknown, so the center is not averaged.
    rope = RopeRotation.from_config(model.config)(0)
    assert_same(rope.average(read_all_centers(cache)), read_all_centers(configured_cache))


# Each model and each kind of cache occur twice.
@pytest.mark.parametrize(
    ("name", "chunk_sizes", "max_len"),
    [
        ("qwen2", (16, 16, 13), None), ("qwen2", (41, 1, 3), 64),
        ("sliding_and_full", (16, 16, 13), 64), ("sliding_and_full", (1, 43, 1), None),
    ],
)  # fmt: skip
def test_a_center_starts_at_the_first_token(
    name: str, chunk_sizes: tuple[int, ...], max_len: int | None
) -> None:
    """The first chunks of some sequences contain only padding."""
    model, spans = get_model(name), [(0, 45), (40, 45), (9, 45), (20, 45)]
    batch, cache = make_batch(spans), make_cache(model, max_len)
    expected: list[Any] = [None] * len(spans)
    stop = 0
    for chunk_size in chunk_sizes:
        start, stop = stop, stop + chunk_size
        model(**cut_batch(batch, start, stop), past_key_values=cache)
        for row, (first_token, _) in enumerate(spans):
            if expected[row] is None and first_token < stop:
                expected[row] = compute_centers(model, batch["input_ids"][row], first_token, stop)
        begun_rows = [row for row, center in enumerate(expected) if center is not None]
        actual = read_all_centers(cache)[:, begun_rows]
        expected_centers = torch.stack([expected[row] for row in begun_rows], 1)
        torch.testing.assert_close(actual[0], expected_centers[0], rtol=1e-4, atol=1e-4)
        # Later chunks of the batch attend to 8-bit keys.
        assert (actual - expected_centers).abs().max() < 0.02 * expected_centers.abs().max()
    assert None not in expected


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_first_calls_find_the_center() -> None:
    layers = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    model, _ = build_variant("qwen2", attn_implementation="fp8_paged", key_bias=10.0, **layers)
    batch = make_batch([(0, 45), (40, 45), (9, 45), (20, 44)])
    centers = []
    for forward in (torch.compile(model, fullgraph=True, backend="eager"), model):
        cache = make_cache(model, 64)
        for start, stop in ((0, 22), (22, 45)):
            forward(**cut_batch(batch, start, stop), past_key_values=cache)
            centers.append(read_all_centers(cache))
    torch.testing.assert_close(centers[:2], centers[2:], rtol=1e-5, atol=1e-5)


@for_each_size
def test_tokens_are_read_with_the_center_they_were_stored_with(max_len: int | None) -> None:
    """A sequence that begins in a later chunk gets its center there. Forks keep their centers."""
    model, batch = get_model(), make_batch([(0, 45), (20, 45)])
    exact_cache = make_cache(model, plan="auto")
    caches = [make_cache(model, max_len)]
    for start, stop in ((0, 16), (16, 30), (30, 45)):
        for cache in (exact_cache, *caches):
            model(**cut_batch(batch, start, stop), past_key_values=cache)
        caches.append(caches[-1].fork())
    for cache in caches:
        length = cache.host_length()
        keys, expected = (
            x.layers[0].keys.dense()[1, :, 20 : min(length, 45)] for x in (cache, exact_cache)
        )
        assert length in (16, 30, 45)
        assert (keys - expected).abs().max() < 0.03 * expected.abs().max()


@for_each_size
def test_a_mask_that_hides_stored_tokens_changes_no_center(max_len: int | None) -> None:
    model, batch = get_model(), make_batch([(0, 45), (20, 45)])
    cache = make_cache(model, max_len)
    centers = []
    for start, stop in ((0, 30), (30, 45)):
        inputs = cut_batch(batch, start, stop)
        inputs["attention_mask"][0, : min(start, 25)] = 0
        inputs["attention_mask"][1, :start] = 0
        model(**inputs, past_key_values=cache)
        centers.append(read_all_centers(cache))
    assert_same(*centers)


class ReadCounter(TorchDispatchMode):
    """Counts the values that Python reads from tensors. Each read synchronizes with a GPU."""

    num_reads = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.num_reads += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_masks_are_not_read_after_all_sequences_have_begun() -> None:
    model, batch = get_model(), make_batch(SPANS["left"])
    read_counts = []
    for keywords in (CENTERED, {"dtype": "fp8"}):
        cache = FP8PagedCache(model.config, page_size=8, **keywords)
        model(**batch, past_key_values=cache)
        mask = batch["attention_mask"]
        for _ in range(3):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            with ReadCounter() as counter:
                model(torch.ones(4, 1).long(), attention_mask=mask, past_key_values=cache)
            read_counts.append(counter.num_reads)
    assert read_counts[1:3] == read_counts[4:6], "centers add no reads after the first step"


@for_each_size
def test_a_mask_applies_to_one_call(max_len: int | None) -> None:
    """After a reset, a call without a mask has a center over all tokens."""
    model, batch = get_model(), make_batch(SPANS["right"])
    cache = make_cache(model, max_len)
    model(**batch, past_key_values=cache)
    rope = RopeRotation.from_config(model.config)(0)
    batch_size, num_heads, _, dim = cache.layers[0].keys.shape
    generator = torch.Generator().manual_seed(2)
    k = torch.randn(batch_size, num_heads, NUM_COLUMNS, dim, generator=generator)
    for clear in (cache.reset, lambda: cache.crop(-NUM_COLUMNS)):
        clear()
        cache.update(k, k, 0)
        torch.testing.assert_close(read_centers(cache), rope.average(k[:, :, -32:].mean(2)))


def test_a_mask_applies_to_one_cache() -> None:
    """A cache under a different attention function receives no mask, although it needs one."""
    batch, model = make_batch(SPANS["left"]), get_model()
    sdpa_model = get_model(attention="sdpa")
    sdpa_cache, cache = make_cache(sdpa_model), make_cache(model)
    sdpa_model(**batch, past_key_values=sdpa_cache)
    centers = read_all_centers(sdpa_cache)
    model(**batch, past_key_values=cache)
    assert_centers(read_all_centers(cache), model, batch, "left")
    next_batch = {**batch, "attention_mask": torch.ones(4, 2 * NUM_COLUMNS)}
    sdpa_model(**next_batch, past_key_values=sdpa_cache)
    assert_same(read_all_centers(sdpa_cache), centers)


@for_each_size
def test_enable_passes_the_mask_under_any_attention(max_len: int | None) -> None:
    model = build_variant("qwen2", attn_implementation="sdpa", key_bias=10.0)[0]
    batch = make_batch(SPANS["left"])
    del batch["position_ids"]
    enable(model, max_cache_len=max_len, **CENTERED)
    model.set_attn_implementation("sdpa")
    options: dict[str, Any] = {"num_beams": 2, "do_sample": False, "max_new_tokens": 4}
    cache = model.generate(**batch, return_dict_in_generate=True, **options).past_key_values
    actual = read_all_centers(cache)
    assert_same(actual[:, ::2], actual[:, 1::2], "two beams of a sequence")
    assert_centers(actual[:, ::2], model, batch, "left")


def test_padding_of_an_encoder_changes_no_center() -> None:
    model, inputs = build_model("seq2seq/bart")
    options = {"do_sample": False, "max_new_tokens": 3, "return_dict_in_generate": True}
    ids = inputs["input_ids"]
    mask = torch.zeros_like(ids)
    mask[0], mask[1, :4] = 1, 1
    enable(model)
    caches = [
        model.generate(input_ids=row_ids, attention_mask=row_mask, **options).past_key_values
        for row_ids, row_mask in ((ids, mask), (ids[:1], mask[:1]), (ids[1:, :4], mask[1:, :4]))
    ]
    batched, *rows = [read_all_centers(cache.cross_attention_cache) for cache in caches]
    torch.testing.assert_close(batched, torch.cat(rows, 1), rtol=1e-4, atol=1e-4)
