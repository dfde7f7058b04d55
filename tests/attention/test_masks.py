"""Masks: patterns that get compact masks, and the agreement with transformers' masks."""

import copy
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, DynamicCache, LlamaConfig
from transformers import masking_utils as stock
from transformers.cache_utils import StaticCache

from hf_fp8kv import ConfigError, FP8PagedCache
from hf_fp8kv.attention.compact import CompactMask, make_compact
from hf_fp8kv.attention.fp8_paged import fp8_paged_attention
from hf_fp8kv.attention.masks import complete_mask, fp8_paged_mask
from hf_fp8kv.attention.patterns import causal_window
from hf_fp8kv.bench.contenders import AttentionLayer
from hf_fp8kv.cache.paged_tensor import PagedKV
from hf_fp8kv.ops import available_backends
from hf_fp8kv.ops.visibility import mask_bounds
from tests.helpers.assertions import assert_same
from tests.helpers.grids import pairwise
from tests.helpers.tiny_models import build, prompt, tiny

GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
ROOM = 64
pytestmark = [
    pytest.mark.text,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
]


PATTERNS: dict[str, tuple[Callable[[], Any], int | None]] = {
    "causal": (lambda: stock.causal_mask_function, 0),
    "window": (lambda: stock.sliding_window_causal_mask_function(7), 7),
    "window of one": (lambda: stock.sliding_window_causal_mask_function(1), 1),
    "chunks": (lambda: stock.chunked_causal_mask_function(4, torch.tensor([0, 3])), None),
    "blocks": (
        lambda: stock.or_masks(
            stock.causal_mask_function, stock.blockwise_overlay(torch.zeros(2, ROOM).int())
        ),
        None,
    ),
    "both ways": (lambda: stock.bidirectional_mask_function, None),
    "a window both ways": (lambda: stock.sliding_window_bidirectional_mask_function(4), None),
    "a function of a caller": (lambda: lambda b, h, q, k: k <= q, None),
    "a part of a caller": (
        lambda: stock.and_masks(stock.causal_mask_function, lambda b, h, q, k: k < q + h),
        None,
    ),
    "a window alone": (lambda: stock.sliding_window_overlay(5), None),
    "a window twice": (
        lambda: stock.and_masks(
            stock.sliding_window_overlay(9), stock.sliding_window_causal_mask_function(6)
        ),
        6,
    ),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_causal_patterns_and_their_windows_are_recognized(name: str) -> None:
    make, window = PATTERNS[name]
    assert causal_window(make()) == window


# Rows of 12 tokens: none hidden, hidden on the left, on the right or in the middle, most, and all.
ROWS = torch.tensor(
    [
        [1] * 12, [0] * 3 + [1] * 9, [1] * 9 + [0] * 3, [0, 1, 1, 0, 1] + [1] * 7,
        [0, 0, 1, 0] + [1] * 7 + [0], [0] * 11 + [1], [0] * 12,
    ]
)  # fmt: skip


@pytest.mark.parametrize("start", [0, 5])
def test_bounds(start: int) -> None:
    for row, (first, hidden) in zip(ROWS.bool(), mask_bounds(ROWS.bool(), start), strict=True):
        positions = torch.arange(start, start + 12)
        visible, hidden_positions = positions[row].tolist(), positions[~row].tolist()
        assert first == min(visible, default=start + 12)
        assert hidden == (max(hidden_positions) + 1 if hidden_positions else start)


def cache_of(tokens: int, room: int | None) -> FP8PagedCache:
    """Return a cache that holds `tokens` tokens for each of `ROWS`."""
    cache = FP8PagedCache(LlamaConfig(num_hidden_layers=1), max_cache_len=room, prefill="stored")
    if tokens:
        cache.update(*torch.randn(2, len(ROWS), 1, tokens, 8), 0)
    return cache


def mask_arguments(cache: Any, tokens: int, function: Any, text: torch.Tensor) -> tuple[Any, ...]:
    """Return the arguments of a mask function as in transformers, with sizes from the cache."""
    offset, (columns, start) = cache.get_query_offset(0), cache.get_mask_sizes(tokens, 0)
    return len(ROWS), tokens, columns, offset, start, function, text


# Grid: All pairs of a window, a number of new tokens and sizes of the mask and the cache.
@pytest.mark.parametrize(
    ("window", "tokens", "sizes"),
    pairwise([0, 4], [1, 5, 12], [(12, 12), (12, 16), (12, 31), (12, 40), (8, 31), (20, 31)]),
    ids=str,
)
def test_a_compact_mask_matches_the_complete_mask(
    window: int, tokens: int, sizes: tuple[int, int]
) -> None:
    """A preallocated cache holds 12 tokens, which include the new tokens."""
    columns, room = sizes
    text = torch.nn.functional.pad(ROWS, (0, max(columns - 12, 0)), value=1)[:, :columns].bool()
    function = (
        stock.sliding_window_causal_mask_function(window) if window else stock.causal_mask_function
    )
    arguments = mask_arguments(cache_of(12 - tokens, room), tokens, function, text)
    mask = fp8_paged_mask(*arguments, config=LlamaConfig())
    assert isinstance(mask, CompactMask)
    query, key = torch.zeros(len(ROWS), 1, tokens, 8), torch.zeros(len(ROWS), 1, room, 8)
    expected = stock.sdpa_mask(*arguments, allow_is_causal_skip=False)
    assert expected is not None
    assert_same(complete_mask(mask, query, key, window, True), expected)
    assert_same(mask & True, expected, "as any tensor")
    visible = torch.nn.functional.pad(text, (0, max(room - columns, 0)))[:, :room]
    visible[:, 12:] = True  # not stored yet
    assert_same(mask.bounds, mask_bounds(visible, 0))
    assert mask.lengths.tolist() == [12] * len(ROWS)


def test_a_request_applies_to_one_mask_of_one_cache() -> None:
    """All other masks are complete, since only a preallocated cache has room after the queries."""
    text, function, config = ROWS.bool(), stock.causal_mask_function, LlamaConfig()
    first, second = cache_of(9, 31), cache_of(9, 40)
    call, stale = (mask_arguments(cache, 3, function, text) for cache in (first, second))
    masks = [fp8_paged_mask(*call, config=config) for call in (call, stale)]
    assert [isinstance(mask, CompactMask) for mask in masks] == [False, False], "different cache"
    call = mask_arguments(first, 3, function, text)
    thread = ThreadPoolExecutor(1)
    other_thread = thread.submit(fp8_paged_mask, *call, config=config).result()
    mask_arguments(second, 3, function, text)
    for _ in range(2):
        thread.submit(mask_arguments, first, 3, function, text).result()
        masks = [thread.submit(fp8_paged_mask, *call, config=config).result() for _ in range(2)]
        assert [isinstance(mask, CompactMask) for mask in masks] == [True, False], "for one mask"
    assert not isinstance(other_thread, CompactMask), "the request of a different thread"
    for mask in (other_thread, *masks):
        assert mask is not None
        assert_same(mask & True, other_thread)
    short = text[:, :-1]
    with pytest.raises(ConfigError, match="over all 12 tokens"):
        fp8_paged_mask(*mask_arguments(cache_of(9, None), 3, function, short), config=config)


def test_a_compact_mask_behaves_as_the_complete_mask() -> None:
    function = stock.sliding_window_causal_mask_function(4)
    call = mask_arguments(cache_of(9, 31), 3, function, ROWS.bool())
    mask = fp8_paged_mask(*call, config=LlamaConfig())
    expected = stock.sdpa_mask(*call, allow_is_causal_skip=False)
    assert isinstance(mask, CompactMask)
    assert expected is not None
    assert (mask.shape, mask.dtype, mask.device) == (expected.shape, torch.bool, expected.device)
    for use in (
        lambda x: x[:, :, -1:, :20], lambda x: ~x, lambda x: x.to(torch.float16), copy.deepcopy,
        lambda x: torch.where(x, 0.0, -1.0), lambda x: torch.cat([x, x], -1),
        lambda x: pickle.loads(pickle.dumps(x)),
    ):  # fmt: skip
        assert_same(use(mask), use(expected))
    for write in (lambda x: x.logical_not_(), lambda x: x.__setitem__((0, 0), True)):
        with pytest.raises(ConfigError, match="writes into it"):
            write(mask)
    assert_same(mask & True, expected)
    mask_on_meta = mask.to("meta")
    assert isinstance(mask_on_meta, CompactMask)
    assert {
        x.device.type
        for x in (mask_on_meta, mask_on_meta.token_mask, mask_on_meta.bounds, mask_on_meta.lengths)
    } == {"meta"}
    assert (mask_on_meta.shape, mask_on_meta.token_mask.dtype, mask_on_meta.window) == (
        mask.shape,
        torch.uint8,
        4,
    )
    assert mask.to("cpu", torch.bool) is mask


def test_a_mask_of_all_tokens_serves_a_window() -> None:
    for length, start in [(12, 3), (12, 5), (16, 1), (33, 17), (40, 39)]:
        text = torch.rand(2, length) > 0.4
        whole = make_compact(text, 0, length, 0, 1)
        cut = make_compact(text[:, start:], start, length - start, 0, 1)
        for mask, first in ((whole, 0), (cut, start)):
            visible = mask.columns(start, length)
            assert_same(visible[:, 0, 0].bool(), text[:, start:], (length, start))
            assert_same(mask.bounds, mask_bounds(text[:, first:], first))
            assert_same(mask.make_complete(start, length, 0)[:, 0, 0], text[:, start:])


@pytest.mark.parametrize(("columns", "first"), [(13, 0), (13, 3), (5, 20), (48, 0), (32, 0)])
def test_a_mask_of_different_tokens_is_refused(columns: int, first: int) -> None:
    mask = make_compact(torch.ones(2, columns, dtype=torch.bool), first, columns, 0, 1)
    for start, stop in [(0, 48), (0, 32), (20, 25), (3, 16), (0, 13), (40, 69), (7, 71)]:
        if first <= start and stop <= first + columns:
            assert mask.columns(start, stop).shape == (2, 1, 1, stop - start)
        else:
            with pytest.raises(ConfigError, match=f"covers the tokens {start} to {stop - 1}"):
                mask.columns(start, stop)


@pytest.fixture
def masks() -> Iterator[list[Any]]:
    """Record the masks that transformers passes to attention over stored pages."""
    recorded: list[Any] = []

    def record(
        module: Any, query: Any, key: Any, value: Any, mask: Any, *rest: Any, **kw: Any
    ) -> Any:
        if isinstance(key, PagedKV):
            recorded.append(mask)
        return fp8_paged_attention(module, query, key, value, mask, *rest, **kw)

    AttentionInterface.register("fp8_paged", record)
    yield recorded
    AttentionInterface.register("fp8_paged", fp8_paged_attention)


def chat(model: Any, cache: Any, **keywords: Any) -> list[torch.Tensor]:
    """Answer two turns: a prompt with padding on the left, and a prompt with a hole."""
    answers = []
    text = prompt()
    for turn in range(2):
        ids = model.generate(**text, past_key_values=cache, **{**GREEDY, **keywords})
        answers.append(ids)
        extra = prompt(turn + 5, tokens=7, pad=0)["input_ids"]
        ids = torch.cat([ids, extra], 1)
        new = ids.shape[1] - text["attention_mask"].shape[1]
        mask = torch.cat([text["attention_mask"], torch.ones(2, new, dtype=torch.long)], 1)
        mask[1, -3] = 0  # a hole in the text
        text = {"input_ids": ids, "attention_mask": mask}
    return answers


# Grid: Each kind of layers, and each way to split a prompt.
@pytest.mark.parametrize(
    ("name", "prefill", "chunks"),
    [
        ("gqa", "exact", {}), ("gqa", "stored", {}),
        ("sliding", "exact", {"prefill_chunk_size": 4}),
        ("sliding", "stored", {}), ("sliding_and_full", "exact", {}),
        ("sliding_and_full", "stored", {"prefill_chunk_size": 4}), ("kv_sharing", "exact", {}),
    ],
)  # fmt: skip
def test_causal_patterns_need_no_complete_mask(
    name: str, prefill: str, chunks: dict[str, Any], masks: list[Any]
) -> None:
    stock_model, _ = tiny(name, attn_implementation="sdpa")
    model, _ = tiny(name, attn_implementation="fp8_paged")
    arguments = {**chunks, "disable_compile": True}
    expected = chat(stock_model, DynamicCache(config=model.config), **arguments)
    options = {"dtype": "auto", "page_size": 8, "max_cache_len": ROOM, "prefill": prefill}
    answers = chat(model, FP8PagedCache(model.config, **options), **arguments)
    for actual, expected_tokens in zip(answers, expected, strict=True):
        assert_same(actual, expected_tokens)
    assert masks
    assert all(isinstance(mask, CompactMask) for mask in masks)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "padded"),
    [
        ("sliding_and_full", True), ("chunked", True),
        pytest.param("gqa", False, marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_masks_are_created_in_compiled_code(name: str, padded: bool) -> None:
    """The caller compiles `forward`, and passes several tokens after the prompt."""
    torch._dynamo.reset()
    model, inputs = tiny(name, attn_implementation="fp8_paged")
    rows: list[int | None] = []

    def record_masks(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        for node in graph.graph.nodes:
            if ".attend" in str(node.target):
                values = [getattr(x, "meta", {}).get("example_value") for x in node.args]
                candidates = [
                    x for x in values if x is not None and x.dtype in (torch.uint8, torch.bool)
                ]
                candidates = [x for x in candidates if x.shape[1] == 1 and x.shape[3] == ROOM]
                rows.append(candidates[0].shape[2] if candidates else None)
        return graph.forward

    step = torch.compile(model.forward, fullgraph=True, dynamic=False, backend=record_masks)
    mask = inputs["attention_mask"] if padded else None
    logits = []
    for forward in (model.forward, step):
        cache = FP8PagedCache(model.config, dtype="auto", page_size=8, max_cache_len=ROOM)
        model(inputs["input_ids"], attention_mask=mask, past_key_values=cache)
        old = inputs["input_ids"].shape[1]
        ids = prompt(5, tokens=5, pad=0)["input_ids"]
        whole = None
        if mask is not None:
            whole = torch.nn.functional.pad(mask, (0, 5), value=1)
            whole = torch.nn.functional.pad(whole, (0, ROOM - old - 5))
        positions = torch.arange(old, old + 5).expand(2, -1)
        out = forward(ids, attention_mask=whole, position_ids=positions, past_key_values=cache)
        logits.append(out.logits)
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    assert rows
    if name == "chunked":
        assert 5 in rows, "complete, since the pattern is not recognized"
    else:
        assert set(rows) == ({1} if padded else {None})


def continued(model: Any, inputs: Any, cache: Any, **keywords: Any) -> torch.Tensor:
    """Return the logits of three tokens after a padded prompt in the cache."""
    model(**inputs, past_key_values=cache)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 3), value=1)
    extra = prompt(1, tokens=3, pad=0)["input_ids"]
    return model(extra, attention_mask=mask, past_key_values=cache, **keywords).logits


def test_a_window_that_only_the_mask_applies() -> None:
    """Doge does not pass the window to attention, and layers of this cache have no window."""
    model, inputs = build("doge", sliding_window=4, attn_implementation="sdpa")
    text = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}
    answers = []
    for name in ("sdpa", "fp8_paged"):
        model.set_attn_implementation(name)
        answers.append(model.generate(**text, past_key_values=DynamicCache(), **GREEDY))
    assert_same(*answers)


@torch.no_grad()
def test_a_stock_static_cache_has_complete_masks() -> None:
    model, inputs = tiny("gqa", attn_implementation="fp8_paged")
    stock_model, _ = tiny("gqa", attn_implementation="sdpa")
    assert_same(*(
        continued(each, inputs, StaticCache(model.config, max_cache_len=ROOM))
        for each in (model, stock_model)
    ))  # fmt: skip
    text = torch.nn.functional.pad(inputs["attention_mask"], (0, 3), value=1).bool()
    offset = torch.tensor([13])
    mask = fp8_paged_mask(
        2, 3, ROOM, offset, 0, stock.causal_mask_function, text, config=model.config
    )
    assert mask is not None
    assert mask.shape == (2, 1, 3, ROOM)


@torch.no_grad()
@pytest.mark.parametrize("name", ["gqa", "sliding_and_full"])
def test_compact_masks_over_dense_keys(name: str) -> None:
    """Calls that return attention weights need dense keys."""
    stock_model, inputs = tiny(name, attn_implementation="eager")
    model, _ = tiny(name, attn_implementation="fp8_paged")
    options = {"dtype": "auto", "page_size": 8, "max_cache_len": ROOM, "prefill": "stored"}
    expected = continued(
        stock_model, inputs, DynamicCache(config=model.config), output_attentions=True
    )
    cache = FP8PagedCache(model.config, **options)
    actual = continued(model, inputs, cache, output_attentions=True)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


# Arguments that do not fit a call of 8 queries of 4 heads over 3 sequences of 72 tokens, with 2 KV
# heads of size 16: the argument, the name in the error, and the tensor.
MISFITS: list[tuple[str, str, torch.Tensor]] = [
    *(
        ("query", "query", torch.zeros(shape))
        for shape in (
            (2, 4, 8, 16), (1, 4, 8, 16), (5, 4, 8, 16), (3, 3, 8, 16), (3, 4, 8, 8),
            (3, 4, 8, 32), (3, 4, 0, 16),
        )
    ),
    *(
        ("attention_mask", "mask", torch.zeros(shape))
        for shape in (
            (2, 1, 8, 72), (3, 1, 2, 72), (3, 3, 8, 72), (3, 1, 8, 71), (3, 8, 72), (8, 72), (72,),
        )
    ),
    ("attention_mask", "mask", torch.ones(2, 1, 8, 72, dtype=torch.bool)),
    ("attention_mask", "mask", torch.ones(3, 3, 8, 72, dtype=torch.bool)),
    ("attention_mask", "mask", torch.ones(3, 1, 8, 72, dtype=torch.int64)),
    ("attention_mask", "mask", torch.ones(3, 72, dtype=torch.uint8)),
    ("attention_mask", "mask", make_compact(torch.ones(2, 72, dtype=torch.bool), 0, 72, 0, 8)),
    *(
        ("position_bias", "bias|mask", torch.zeros(shape))
        for shape in ((1, 2, 8, 72), (1, 4, 3, 72), (2, 4, 8, 72), (1, 4, 8, 64))
    ),
    ("query", "query", torch.zeros(3, 4, 8, 16, device="meta")),
    ("attention_mask", "mask", torch.zeros(3, 1, 8, 72, device="meta")),
    ("s_aux", "sinks", torch.zeros(4, device="meta")),
    ("s_aux", "sinks", torch.zeros(1)),
    ("s_aux", "sinks", torch.zeros(3)),
]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("room", [None, ROOM + 8])
def test_sizes_that_do_not_match_the_cache_are_refused(backend: str, room: int | None) -> None:
    if reason := available_backends()[backend]:
        pytest.skip(reason)
    config = tiny("gqa")[0].config
    cache = FP8PagedCache(config, backend=backend, prefill="stored", max_cache_len=room)
    key, value = cache.update(torch.randn(3, 2, 72, 16), torch.randn(3, 2, 72, 16), 0)
    module = AttentionLayer(groups=2)
    fine = {"query": torch.randn(3, 4, 8, 16), "attention_mask": torch.zeros(3, 1, 8, 72)}
    expected, _ = fp8_paged_attention(module, key=key, value=value, **fine)
    for name, named, x in MISFITS:
        with pytest.raises(ConfigError, match=named):
            fp8_paged_attention(module, key=key, value=value, **{**fine, name: x})
    assert_same(fp8_paged_attention(module, key=key, value=value, **fine)[0], expected)
