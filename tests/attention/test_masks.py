"""Tests of masks: which patterns get compact masks, and the agreement with transformers' masks."""

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig
from transformers import masking_utils as hf
from transformers.cache_utils import StaticCache

from benchmarks.layers import AttentionLayer
from hf_fp8kv import ConfigError, FP8PagedCache
from hf_fp8kv.attention.compact import CompactMask, make_compact
from hf_fp8kv.attention.fp8_paged import fp8_paged_attention
from hf_fp8kv.attention.masks import find_window, fp8_paged_mask, make_complete
from hf_fp8kv.ops import explain_backends
from hf_fp8kv.ops.visibility import find_mask_bounds
from tests.helpers.assertions import assert_same
from tests.helpers.grids import pairwise
from tests.helpers.tiny_models import build_model, build_variant, make_prompt

CAPACITY = 64
pytestmark = [
    pytest.mark.text,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
]

# Mask functions of transformers, with the window that the cache recognizes, or None.
PATTERNS: dict[str, tuple[Callable[..., Any], int | None]] = {
    "causal": (hf.causal_mask_function, 0),
    "window": (hf.sliding_window_causal_mask_function(7), 7),
    "chunks": (hf.chunked_causal_mask_function(4, torch.tensor([0, 3])), None),
    "blocks": (
        hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(torch.zeros(2, CAPACITY).int())),
        None,
    ),
    "a bidirectional window": (hf.sliding_window_bidirectional_mask_function(4), None),
    "a custom function": (lambda batch, head, query, key: key <= query, None),
    "a custom part": (
        hf.and_masks(hf.causal_mask_function, lambda batch, head, query, key: key < query + head),
        None,
    ),
    "a window alone": (hf.sliding_window_overlay(5), None),
    "a window twice": (
        hf.and_masks(hf.sliding_window_overlay(9), hf.sliding_window_causal_mask_function(6)), 6
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PATTERNS)
def test_causal_patterns_and_their_windows_are_recognized(name: str) -> None:
    pattern, window = PATTERNS[name]
    assert find_window(pattern) == window


# Each row masks 12 tokens, and 0 hides a token. The rows hide no token, tokens on the left, on the
# right or in the middle, most tokens, and all tokens.
MASK_ROWS = torch.tensor(
    [
        [1] * 12, [0] * 3 + [1] * 9, [1] * 9 + [0] * 3, [0, 1, 1, 0, 1] + [1] * 7,
        [0, 0, 1, 0] + [1] * 7 + [0], [0] * 11 + [1], [0] * 12,
    ]
)  # fmt: skip


@pytest.mark.parametrize("start", [0, 5])
def test_bounds_match_the_visible_tokens(start: int) -> None:
    bounds = find_mask_bounds(MASK_ROWS.bool(), start)
    positions = torch.arange(start, start + 12)
    for is_visible, (first_visible, hidden_stop) in zip(MASK_ROWS.bool(), bounds, strict=True):
        assert first_visible == min(positions[is_visible].tolist(), default=start + 12)
        assert hidden_stop == max(positions[~is_visible].tolist(), default=start - 1) + 1


def make_cache(num_tokens: int, capacity: int | None) -> FP8PagedCache:
    """Return a cache with `num_tokens` tokens for each row of `MASK_ROWS`."""
    config = LlamaConfig(num_hidden_layers=1)
    cache = FP8PagedCache(config, max_cache_len=capacity, prefill="stored")
    if num_tokens:
        cache.update(*torch.randn(2, len(MASK_ROWS), 1, num_tokens, 8), 0)
    return cache


def make_arguments(cache: Any, num_tokens: int, pattern: Any, token_mask: torch.Tensor) -> tuple:
    """Return the arguments that transformers passes to a mask function, with a cache's sizes."""
    offset = cache.get_query_offset(0)
    num_columns, start = cache.get_mask_sizes(num_tokens, 0)
    return len(MASK_ROWS), num_tokens, num_columns, offset, start, pattern, token_mask


# All pairs of a window, a number of new tokens and sizes of the mask and the cache.
@pytest.mark.parametrize(
    ("window", "num_tokens", "sizes"),
    pairwise([0, 4], [1, 5, 12], [(12, 12), (12, 16), (12, 31), (12, 40), (8, 31), (20, 31)]),
    ids=str,
)
def test_a_compact_mask_matches_the_complete_mask(
    window: int, num_tokens: int, sizes: tuple[int, int]
) -> None:
    """A preallocated cache contains 12 tokens, which include the new tokens."""
    num_columns, capacity = sizes
    num_added = max(num_columns - 12, 0)
    token_mask = torch.nn.functional.pad(MASK_ROWS, (0, num_added), value=1)[:, :num_columns].bool()
    pattern = hf.sliding_window_causal_mask_function(window) if window else hf.causal_mask_function
    arguments = make_arguments(
        make_cache(12 - num_tokens, capacity), num_tokens, pattern, token_mask
    )
    mask = fp8_paged_mask(*arguments, config=LlamaConfig())
    assert isinstance(mask, CompactMask)
    query, key = (torch.zeros(len(MASK_ROWS), 1, n, 8) for n in (num_tokens, capacity))
    expected = hf.sdpa_mask(*arguments, allow_is_causal_skip=False)
    assert_same(make_complete(mask, query, key, window, True), expected)
    assert_same(mask & True, expected, "as any tensor")
    visible = torch.nn.functional.pad(token_mask, (0, max(capacity - num_columns, 0)))[:, :capacity]
    visible[:, 12:] = True  # not stored yet
    assert_same(mask.bounds, find_mask_bounds(visible, 0))
    assert mask.lengths.tolist() == [12] * len(MASK_ROWS)


def test_a_request_applies_to_one_mask_of_one_cache() -> None:
    """Other masks are complete, because they may be for another cache."""
    token_mask = MASK_ROWS.bool()
    pattern = hf.causal_mask_function
    cache, larger_cache = (make_cache(9, capacity) for capacity in (31, 40))

    def make_masks(*all_arguments: Any) -> list[Any]:
        return [fp8_paged_mask(*arguments, config=LlamaConfig()) for arguments in all_arguments]

    masks = make_masks(
        make_arguments(cache, 3, pattern, token_mask),
        make_arguments(larger_cache, 3, pattern, token_mask),
    )
    assert [isinstance(mask, CompactMask) for mask in masks] == [False, False], "different cache"
    arguments = make_arguments(cache, 3, pattern, token_mask)
    executor = ThreadPoolExecutor(1)
    (other_mask,) = executor.submit(make_masks, arguments).result()
    assert not isinstance(other_mask, CompactMask), "the request of another thread"
    make_arguments(larger_cache, 3, pattern, token_mask)
    for _ in range(2):
        executor.submit(make_arguments, cache, 3, pattern, token_mask).result()
        masks = executor.submit(make_masks, arguments, arguments).result()
        assert [isinstance(mask, CompactMask) for mask in masks] == [True, False], "for one mask"
    for mask in masks:
        assert_same(mask & True, other_mask)
    with pytest.raises(ConfigError, match="over all 12 tokens"):
        make_masks(make_arguments(make_cache(9, None), 3, pattern, token_mask[:, :-1]))


def test_a_compact_mask_behaves_as_the_complete_mask() -> None:
    pattern = hf.sliding_window_causal_mask_function(4)
    arguments = make_arguments(make_cache(9, 31), 3, pattern, MASK_ROWS.bool())
    mask = fp8_paged_mask(*arguments, config=LlamaConfig())
    expected = hf.sdpa_mask(*arguments, allow_is_causal_skip=False)
    assert isinstance(mask, CompactMask)
    assert (mask.shape, mask.dtype, mask.device) == (expected.shape, torch.bool, expected.device)
    operations: tuple[Callable[[Any], torch.Tensor], ...] = (
        lambda x: x[:, :, -1:, :20], lambda x: ~x, lambda x: x.to(torch.float16), copy.deepcopy,
        lambda x: torch.where(x, 0.0, -1.0), lambda x: torch.cat([x, x], -1),
        lambda x: pickle.loads(pickle.dumps(x)),
    )  # fmt: skip
    for operation in operations:
        assert_same(operation(mask), operation(expected))
    with pytest.raises(ConfigError, match="writes into it"):
        mask.logical_not_()
    with pytest.raises(ConfigError, match="writes into it"):
        mask[0, 0] = True
    assert_same(mask & True, expected)
    mask_on_meta = mask.to("meta")
    tensors = (mask_on_meta, mask_on_meta.token_mask, mask_on_meta.bounds, mask_on_meta.lengths)
    assert all(tensor.device.type == "meta" for tensor in tensors)
    assert (mask_on_meta.shape, mask_on_meta.window) == (mask.shape, 4)
    assert mask_on_meta.token_mask.dtype == torch.uint8
    assert mask.to("cpu", torch.bool) is mask


@pytest.mark.parametrize(
    ("num_columns", "first_token"), [(13, 0), (13, 3), (5, 20), (48, 0), (32, 0)]
)
def test_a_mask_serves_only_its_tokens(num_columns: int, first_token: int) -> None:
    """A mask of all tokens also serves a window."""
    is_token = torch.rand(2, num_columns) > 0.4
    mask = make_compact(is_token, first_token, num_columns, 0, 1)
    assert_same(mask.bounds, find_mask_bounds(is_token, first_token))
    for start, stop in [(0, 48), (0, 32), (20, 25), (3, 16), (0, 13), (40, 69), (7, 71)]:
        if first_token <= start and stop <= first_token + num_columns:
            expected = is_token[:, start - first_token : stop - first_token]
            assert_same(mask.get_columns(start, stop)[:, 0, 0].bool(), expected)
            assert_same(mask.make_complete(start, stop, 0)[:, 0, 0], expected)
        else:
            with pytest.raises(ConfigError, match=f"covers the tokens {start} to {stop - 1}"):
                mask.get_columns(start, stop)


@torch.no_grad()
@pytest.mark.usefixtures("fresh_compiler")
def test_masks_are_created_in_compiled_code() -> None:
    """The caller compiles `forward`, and passes five tokens after a padded prompt."""
    model, inputs = build_variant("sliding_and_full", attn_implementation="fp8_paged")
    mask_shapes: list[Any] = []  # shapes of the 8-bit arguments of each call of attention

    def record_masks(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        for node in graph.graph.nodes:
            if ".attend" in str(node.target):
                tensors = [getattr(arg, "meta", {}).get("example_value") for arg in node.args]
                mask_shapes.append(
                    [x.shape for x in tensors if x is not None and x.dtype == torch.uint8]
                )
        return graph.forward

    step = torch.compile(model.forward, fullgraph=True, dynamic=False, backend=record_masks)
    length = inputs["input_ids"].shape[1]
    new_columns = (torch.arange(CAPACITY - length) < 5).long().expand(2, -1)
    positions = torch.arange(length, length + 5).expand(2, -1)
    step_inputs = {
        "input_ids": make_prompt(5, tokens=5, pad=0)["input_ids"], "position_ids": positions,
        "attention_mask": torch.cat([inputs["attention_mask"], new_columns], 1),
    }  # fmt: skip
    logits = []
    for forward in (model.forward, step):
        cache = FP8PagedCache(model.config, dtype="auto", page_size=8, max_cache_len=CAPACITY)
        model(**inputs, past_key_values=cache)
        logits.append(forward(**step_inputs, past_key_values=cache).logits)
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    # A complete mask would have a row for each of the five queries.
    assert mask_shapes
    assert all((2, 1, 1, CAPACITY) in shapes for shapes in mask_shapes)


def continue_prompt(model: Any, inputs: Any, cache: Any, **keywords: Any) -> torch.Tensor:
    """Return the logits of three tokens that follow a padded prompt in the cache."""
    model(**inputs, past_key_values=cache)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 3), value=1)
    next_ids = make_prompt(1, tokens=3, pad=0)["input_ids"]
    return model(next_ids, attention_mask=mask, past_key_values=cache, **keywords).logits


@torch.no_grad()
def test_a_stock_static_cache_has_complete_masks() -> None:
    model, inputs = build_variant("gqa", attn_implementation="fp8_paged")
    stock_model, _ = build_variant("gqa", attn_implementation="sdpa")
    actual, expected = (
        continue_prompt(each_model, inputs, StaticCache(model.config, max_cache_len=CAPACITY))
        for each_model in (model, stock_model)
    )
    assert_same(actual, expected)


@torch.no_grad()
@pytest.mark.parametrize("name", ["gqa", "sliding_and_full"])
def test_compact_masks_apply_to_dense_keys(name: str) -> None:
    """Calls that return attention weights read dense keys."""
    stock_model, inputs = build_variant(name, attn_implementation="eager")
    model, _ = build_variant(name, attn_implementation="fp8_paged")
    expected = continue_prompt(
        stock_model, inputs, DynamicCache(config=model.config), output_attentions=True
    )
    cache = FP8PagedCache(
        model.config, dtype="auto", page_size=8, max_cache_len=CAPACITY, prefill="stored"
    )
    actual = continue_prompt(model, inputs, cache, output_attentions=True)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


# Arguments that do not fit a call of 8 queries of 4 heads over 3 sequences of 72 tokens, with 2 KV
# heads of size 16: the name of the argument, a pattern for the error, and the tensor.
MISMATCHES: list[tuple[str, str, torch.Tensor]] = [
    *(
        ("query", "query", torch.zeros(shape))
        for shape in ((1, 4, 8, 16), (3, 3, 8, 16), (3, 4, 8, 8), (3, 4, 0, 16))
    ),
    *(
        ("attention_mask", "mask", torch.zeros(shape))
        for shape in ((2, 1, 8, 72), (3, 1, 2, 72), (3, 3, 8, 72), (3, 1, 8, 71), (3, 8, 72))
    ),
    ("attention_mask", "mask", torch.ones(3, 1, 8, 72, dtype=torch.int64)),
    ("attention_mask", "mask", make_compact(torch.ones(2, 72, dtype=torch.bool), 0, 72, 0, 8)),
    ("position_bias", "bias|mask", torch.zeros(1, 2, 8, 72)),
    ("position_bias", "bias|mask", torch.zeros(1, 4, 8, 64)),
    ("query", "query", torch.zeros(3, 4, 8, 16, device="meta")),
    ("attention_mask", "mask", torch.zeros(3, 1, 8, 72, device="meta")),
    ("s_aux", "sinks", torch.zeros(4, device="meta")),
    ("s_aux", "sinks", torch.zeros(1)),
]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("capacity", [None, CAPACITY + 8])
def test_sizes_that_do_not_match_the_cache_are_refused(backend: str, capacity: int | None) -> None:
    if reason := explain_backends()[backend]:
        pytest.skip(reason)
    config = build_variant("gqa")[0].config
    cache = FP8PagedCache(config, backend=backend, prefill="stored", max_cache_len=capacity)
    key, value = cache.update(torch.randn(3, 2, 72, 16), torch.randn(3, 2, 72, 16), 0)
    module = AttentionLayer(num_groups=2)
    arguments = {"query": torch.randn(3, 4, 8, 16), "attention_mask": torch.zeros(3, 1, 8, 72)}
    expected, _ = fp8_paged_attention(module, key=key, value=value, **arguments)
    for name, pattern, tensor in MISMATCHES:
        with pytest.raises(ConfigError, match=pattern):
            fp8_paged_attention(module, key=key, value=value, **{**arguments, name: tensor})
    assert_same(fp8_paged_attention(module, key=key, value=value, **arguments)[0], expected)


def test_a_window_may_be_only_in_the_mask() -> None:
    """Doge passes no window to attention, and the layers of the cache have no window."""
    model, model_inputs = build_model("doge", sliding_window=4, attn_implementation="sdpa")
    options = {
        **model_inputs, "attention_mask": torch.ones_like(model_inputs["input_ids"]),
        "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None,
    }  # fmt: skip
    answers = []
    for name in ("sdpa", "fp8_paged"):
        model.set_attn_implementation(name)
        answers.append(model.generate(**options, past_key_values=DynamicCache()))
    assert_same(*answers)
