"""Layers with a window hold no more than the window after calls of any length."""

import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import Gemma3TextConfig
from transformers.cache_utils import DynamicCache

from hf_fp8kv import ConfigError, FP8PagedCache
from hf_fp8kv.attention.fp8_paged import fp8_paged_attention
from hf_fp8kv.cache.paged_tensor import densify
from hf_fp8kv.errors import OutOfPagesError
from hf_fp8kv.paging.page_allocator import PageAllocator
from tests.cache.public import OutOfMemory, tensors_in
from tests.helpers.assertions import assert_same
from tests.helpers.grids import pairwise

WINDOW, PAGE, BATCH, ROOM = 20, 8, 2, 200
# The most pages of 8 tokens for a window of 20.
MAX_PAGES = 4
LAYERS = 3
EXACT = {"dtype": "auto", "page_size": PAGE}
# Bytes of a page of K and V in float32, with 2 heads of size 4.
PAGE_BYTES = PAGE * 2 * 2 * 4 * 4
# Tokens of each call. A call of more than a few tokens does not fit next to the window.
PLANS = {
    "long-first": [100, 1, 1],
    "chunks": [5, 60, 1, 30, 2, 1, 1],
    "edges": [20, 21, 19, 4, 1],
    "one-by-one": [1] * 30 + [40, 1, 1],
    "window-minus-one": [19, 1, 19, 24, 25, 1],
}
# Grid: Each plan once. `prefill` decides what a first call reads, so "long-first" has both values.
plans = pytest.mark.parametrize(
    ("plan", "prefill"),
    [
        ("long-first", "exact"), ("long-first", "stored"), ("chunks", "stored"),
        ("edges", "exact"), ("one-by-one", "stored"), ("window-minus-one", "exact"),
    ],
)  # fmt: skip


def config(window: int = WINDOW) -> Any:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3TextConfig(
        num_hidden_layers=LAYERS, layer_types=types, sliding_window=window, head_dim=4,
        num_key_value_heads=2, num_attention_heads=2, hidden_size=8,
    )  # fmt: skip


def new_cache(**keywords: Any) -> FP8PagedCache:
    return FP8PagedCache(config(), **{**EXACT, **keywords})


def feed(caches: list[Any], tokens: int, seed: int) -> list[list[torch.Tensor]]:
    """Store the same tokens in all layers and caches, and return dense K and V of each cache."""
    x = torch.randn(BATCH, 2, tokens, 4, generator=torch.Generator().manual_seed(seed))
    outputs: list[list[torch.Tensor]] = []
    for cache in caches:
        pairs = [cache.update(x + layer, layer - x, layer) for layer in range(LAYERS)]
        outputs.append([densify(side) for pair in pairs for side in pair])
    return outputs


def check(cache: FP8PagedCache) -> None:
    """Assert that the layers with a window use no more memory than they need."""
    for layer in cache.layers:
        if layer.is_sliding:
            assert layer.store.memory_footprint()["pages"] <= MAX_PAGES * BATCH * PAGE_BYTES


def assert_same_layers(
    actual: FP8PagedCache, expected: FP8PagedCache, layers: Any = range(LAYERS)
) -> None:
    """Assert that the next token attends to the same tokens in these layers."""
    length = expected.host_length()
    assert actual.host_length() == length
    for layer, other in ((actual.layers[i], expected.layers[i]) for i in layers):
        for side in ("keys", "values"):
            first = max(length - WINDOW + 1, 0) if layer.is_sliding else 0
            cache_pair = [getattr(x, side) for x in (layer, other)]
            parts = [x.dense()[:, :, first - x.start : length - x.start] for x in cache_pair]
            assert_same(*parts, side)


@plans
def test_windows_match_transformers(plan: str, prefill: str, tmp_path: Path) -> None:
    """Growing and preallocated caches return the keys and values of a DynamicCache."""
    ring, growing = new_cache(prefill=prefill, max_cache_len=ROOM), new_cache(prefill=prefill)
    stock, length = DynamicCache(config=config()), 0
    for seed, tokens in enumerate(PLANS[plan]):
        outputs = feed([ring, growing, stock], tokens, seed)
        length += tokens
        for ring_output, growing_output, expected in zip(*outputs, strict=True):
            assert_same(growing_output, expected, f"call {seed}")
            first = length - expected.shape[2]
            assert_same(ring_output[:, :, first:length], expected, f"call {seed}")
        assert growing.get_mask_sizes(3, 0) == stock.get_mask_sizes(3, 0)
        check(growing)
        check(ring)
        for cache in (ring, growing, stock):
            cache.reorder_cache(torch.tensor([1, 0] if seed % 2 else [1, 1]))
        assert_same_layers(ring, growing)
    ring.save(tmp_path / "ring.safetensors")
    for twin in (ring.fork(), FP8PagedCache.load(tmp_path / "ring.safetensors")):
        other = growing.fork()
        for tokens in (3, 50, 1):
            assert_same_layers(twin, other)
            feed([twin, other], tokens, 99)
        check(twin)
        assert_same_layers(twin, other)


@pytest.mark.parametrize("room", [None, ROOM])
def test_attention_without_a_window_argument_uses_the_window_of_the_layer(room: int | None) -> None:
    """Pages also hold some tokens that have left the window."""
    stored, query = new_cache(max_cache_len=room), torch.randn(BATCH, 2, 1, 4)
    feed([stored], 37, 0)
    x = torch.randn(BATCH, 2, 1, 4)
    handles = stored.update(x, -x, 0)
    module = torch.nn.Module().eval()
    module.is_causal = True
    actual, _ = fp8_paged_attention(module, query, *handles, None)
    visible = [side.dense()[:, :, 38 - WINDOW - side.start : 38 - side.start] for side in handles]
    expected = scaled_dot_product_attention(query, *visible)
    torch.testing.assert_close(actual, expected.transpose(1, 2))


def test_a_ring_may_be_saved_during_a_step(tmp_path: Path) -> None:
    """Only the first layer has stored the tokens of a call."""
    ring = new_cache(max_cache_len=ROOM)
    feed([ring], 60, 0)
    x = torch.randn(BATCH, 2, 30, 4)
    ring.update(x, -x, 0)
    twin = FP8PagedCache.load(ring.save(tmp_path / "ring.safetensors"))
    for index in (1, 2):
        for cache in (ring, twin):
            cache.update(x, -x, index)
    assert_same_layers(twin, ring)


def test_addresses_of_a_ring_stay() -> None:
    ring = new_cache(max_cache_len=ROOM)
    feed([ring], 1, 0)
    before = [tensor.data_ptr() for tensor in tensors_in(ring)]
    for seed, tokens in enumerate((30, 1, 70, 2)):
        feed([ring], tokens, seed)
    ring.reorder_cache(torch.tensor([0, 0]))
    ring.crop(-1)
    ring.reset()
    feed([ring], 90, 7)
    assert [tensor.data_ptr() for tensor in tensors_in(ring)] == before


@pytest.mark.parametrize("length", [30, 100, 101, 103])
def test_a_ring_may_be_cropped_to_its_first_complete_page(length: int) -> None:
    """Crops in one or more steps are refused if they need a token that was overwritten."""
    intact = max((length - 1) // PAGE - MAX_PAGES + 1, 0) * PAGE
    max_crop = length - (intact + WINDOW - 1) if intact else length
    cache = new_cache(max_cache_len=ROOM)
    feed([cache], length, 0)
    if intact:
        with pytest.raises(ConfigError, match=f"token {intact} on"):
            cache.crop(-max_crop - 1)
        assert cache.host_length() == length
    for _ in range(min(max_crop, 3)):
        cache.crop(-1)
    growing = new_cache()
    growing.activate_past_recording()
    feed([growing], length, 0)
    growing.crop(-min(max_crop, 3))
    assert_same_layers(cache, growing)
    if intact:
        with pytest.raises(ConfigError, match=f"token {intact} on"):
            cache.fork().crop(-max_crop)
    cache.crop(-length)
    feed([cache], 9, 1)
    cache.crop(-8)
    assert cache.host_length() == 1


@pytest.mark.parametrize("at", [0, 10, 30, 77])
def test_a_ring_that_records_the_past_keeps_all_tokens(at: int) -> None:
    cache, growing = new_cache(max_cache_len=ROOM), new_cache()
    for each in (cache, growing):
        if at:
            feed([each], at, 0)
        each.activate_past_recording()
    for seed in range(20):
        feed([cache, growing], 2 if seed % 9 else 17, seed)
    for each in (cache, growing):
        each.crop(-60)
    assert_same_layers(cache, growing)
    assert_same_layers(cache.fork(), growing)


def test_recording_does_not_restore_tokens_that_a_ring_has_lost(tmp_path: Path) -> None:
    full_first = config()
    full_first.layer_types = ["full_attention", "sliding_attention", "sliding_attention"]
    cache, other = (FP8PagedCache(full_first, **EXACT, max_cache_len=room) for room in (ROOM, None))
    other.activate_past_recording()
    feed([cache, other], 77, 0)
    cache.activate_past_recording()
    feed([cache, other], 20, 1)
    cache.save(tmp_path / "one.safetensors")
    for each in (cache, cache.fork(), FP8PagedCache.load(tmp_path / "one.safetensors")):
        with pytest.raises(ConfigError, match="token 48 on"):
            each.crop(-60)
        assert {int(layer.get_seq_length()) for layer in each.layers} == {97}
        each.crop(-30)
    other.crop(-30)
    assert_same_layers(cache, other)


def test_layers_of_a_ring_may_be_emptied_one_by_one() -> None:
    cache, fresh = new_cache(max_cache_len=ROOM), new_cache()
    feed([cache], 100, 0)
    for layer in cache.layers:
        layer.crop(-100)
    feed([cache, fresh], 9, 1)
    assert_same_layers(cache.fork(), fresh)
    cache.crop(-3)
    fresh.crop(-3)
    assert_same_layers(cache, fresh)


def test_a_crop_frees_recorded_tokens() -> None:
    cache = new_cache()
    feed([cache], ROOM, 0)
    with pytest.raises(ConfigError, match="activate_past_recording"):
        cache.crop(-WINDOW)
    cache.reset()
    cache.activate_past_recording()
    feed([cache], ROOM, 0)
    used = cache.layers[0].store.memory_footprint()["used"]
    assert used == ROOM // PAGE * BATCH * PAGE_BYTES
    cache.crop(-1)
    check(cache)


def test_a_long_call_that_a_later_layer_refuses_changes_nothing() -> None:
    cache, other = new_cache(), new_cache()
    feed([cache, other], 33, 0)
    before = [cache.layers[i].store.memory_footprint() for i in (0, 2)]
    x = torch.ones(BATCH, 2, 50, 4)
    for last in range(1, LAYERS):
        for layer in range(last):
            cache.update(x, x, layer)
        with pytest.raises(ConfigError):
            cache.update(x[..., :3], x, last)
        assert_same_layers(cache, other)
        assert [cache.layers[i].store.memory_footprint() for i in (0, 2)] == before
    feed([cache, other], 50, 1)
    assert_same_layers(cache, other)
    check(cache)


def test_a_long_call_that_stops_at_a_layer_is_reported() -> None:
    cache = new_cache()
    feed([cache], 33, 0)
    x = torch.ones(BATCH, 2, 50, 4)
    cache.update(x, x, 0)  # the other layer with this window is never called
    for call in (lambda: cache.update(x, x, 0), cache.fork, lambda: cache.crop(-1)):
        with pytest.raises(ConfigError, match=r"tokens 33 to 82.*reset the cache"):
            call()
    cache.reset()
    feed([cache], 50, 1)
    check(cache)
    cache.reset()
    for _ in range(2):
        cache.update(x, x, 0)
    with pytest.raises(ConfigError, match="pass each call to all layers"):
        cache.update(x, x, 2)


def test_a_reset_during_a_long_call_does_not_change_forks() -> None:
    cache, fresh = new_cache(), new_cache()
    feed([cache, fresh], 33, 0)
    fork = cache.fork()
    x = torch.ones(BATCH, 2, 50, 4)
    cache.update(x, x, 0)
    cache.reset()
    for tokens in (1, 60):
        assert_same_layers(fork, fresh)
        feed([fork, fresh], tokens, 1)
    assert_same_layers(fork, fresh)


def test_a_first_call_without_memory_can_be_reset() -> None:
    for at in itertools.count(1):
        cache, fresh = new_cache(), new_cache()
        x = torch.ones(BATCH, 2, 100, 4)
        try:
            with OutOfMemory(at, PAGE_BYTES):
                cache.update(x, x, 0)
            break
        except MemoryError:
            cache.reset()
        feed([cache, fresh], 5, 0)
        assert_same_layers(cache, fresh)
        check(cache)
    assert at > 1


# Grid: A pairwise cover.
@pytest.mark.parametrize(
    ("window", "room", "prefill"),
    pairwise([1, 2, PAGE - 1, PAGE, PAGE + 1, PAGE + 2], [None, ROOM], ["exact", "stored"]),
)
def test_windows_of_about_a_page(window: int, room: int | None, prefill: str) -> None:
    keywords: dict[str, Any] = {**EXACT, "prefill": prefill}
    cache = FP8PagedCache(config(window), max_cache_len=room, **keywords)
    whole = FP8PagedCache(config(ROOM), **keywords)
    length = 0
    for seed, tokens in enumerate((16, 1, 7, 24, 8, 1, 3, 9)):
        outputs, expected = feed([cache, whole], tokens, seed)
        start, length = length, length + tokens
        for layer, (actual, expected_side) in enumerate(zip(outputs, expected, strict=True)):
            first = 0 if layer in (2, 3) else max(start - window + 1, 0)
            stop = length if room and actual.shape[2] == ROOM else actual.shape[2]
            begin = stop - (length - first)
            assert_same(actual[:, :, begin:stop], expected_side[:, :, first:], f"call {seed}")


@pytest.mark.parametrize("writer", [0, 1], ids=["the-original", "the-fork"])
def test_long_calls_do_not_change_forks(writer: int) -> None:
    cache_pair = [new_cache(), new_cache()]
    feed(cache_pair, 33, 0)
    forks = [cache_pair[0], cache_pair[0].fork()]
    feed([forks[writer], cache_pair[1]], 50, 1)
    assert_same_layers(forks[writer], cache_pair[1])
    fresh = new_cache()
    feed([fresh], 33, 0)
    assert_same_layers(forks[1 - writer], fresh)
    feed([forks[1 - writer], fresh], 1, 2)
    assert_same_layers(forks[1 - writer], fresh)


@pytest.mark.parametrize("room", [None, ROOM])
def test_no_token_outside_the_window_is_read(room: int | None) -> None:
    """Tokens before the window may be NaN, whether their page is freed or not."""
    pair = [new_cache(dtype="fp8_e4m3", max_cache_len=room) for _ in range(2)]
    for seed, tokens in enumerate([60, *[1] * 10, 9, 50, *[1] * 10]):
        x = torch.randn(BATCH, 2, tokens, 4, generator=torch.Generator().manual_seed(seed))
        for cache in pair:
            for layer in range(LAYERS):
                cache.update(x, x, layer)
            if not seed:
                x[:, :, : 60 - WINDOW] = torch.nan
        assert_same_layers(*pair, layers=(0, 2))


# Memory is freed.


def test_memory_is_freed_when_a_quarter_is_in_use() -> None:
    cache, other = FP8PagedCache(**EXACT), FP8PagedCache(**EXACT)  # without windows
    feed([cache, other], 320, 0)
    full, sizes = cache.memory_footprint().pages_bytes, []
    for _ in range(16):
        cache.crop(-10)
        sizes.append(cache.memory_footprint().pages_bytes)
    assert sizes == [full] * 16, "half is in use"
    cache.crop(-100)
    other.crop(-260)
    assert cache.memory_footprint().pages_bytes == LAYERS * -(-60 // PAGE) * BATCH * PAGE_BYTES
    # Alternating growth and crops moves no pages.
    feed([cache, other], 10, 1)
    addresses = {cache.layers[1].keys.block.data_ptr()}
    for step in range(20):
        feed([cache, other], 9, step)
        cache.crop(-8)
        other.crop(-8)
        addresses.add(cache.layers[1].keys.block.data_ptr())
    assert len(addresses) <= 2
    assert_same_layers(cache, other)


def test_memory_waits_for_forks_that_hold_pages() -> None:
    cache = new_cache()
    feed([cache], 160, 0)
    fork = cache.fork()
    cache.crop(-160)
    feed([cache], 9, 1)
    full = cache.layers[1].store.memory_footprint()["pages"]
    assert full >= 160 // PAGE * BATCH * PAGE_BYTES
    del fork
    # The next allocation of a page frees the pages of the fork.
    feed([cache], 8, 2)
    assert cache.layers[1].store.memory_footprint()["pages"] < full // 2
    other = new_cache()
    feed([other], 9, 1)
    feed([other], 8, 2)
    assert_same_layers(cache, other)


def test_selecting_a_sequence_frees_memory() -> None:
    cache = new_cache()
    feed([cache], 100, 0)
    cache.batch_repeat_interleave(4)
    x = torch.ones(4 * BATCH, 2, 80, 4)
    for layer in range(LAYERS):
        cache.update(x, x, layer)
    full = cache.memory_footprint().pages_bytes
    cache.batch_select_indices(torch.tensor([3]))
    assert cache.memory_footprint().pages_bytes < full / 3


# Layers with different lengths, budgets and refused calls. Layers 0 and 2 have a window.


def states(tokens: int, batch: int = BATCH, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, 2, tokens, 4, generator=torch.Generator().manual_seed(seed))


def store(cache: FP8PagedCache, x: torch.Tensor, layers: Any = range(LAYERS)) -> None:
    for layer in layers:
        cache.update(x, -x, layer)


def assert_last(cache: FP8PagedCache, x: torch.Tensor, layer: int = 0) -> None:
    """Assert that a layer holds the last window of `x`."""
    keys, stop = cache.layers[layer].keys, x.shape[2]
    assert int(cache.layers[layer].get_seq_length()) == stop
    first = max(stop - WINDOW + 1, 0)
    span = slice(first - keys.start, stop - keys.start)
    assert_same(keys.dense()[:, :, span], x[:, :, first:])


def test_long_calls_stay_within_the_budget() -> None:
    types, whole = ["sliding_attention"] * LAYERS, states(262)
    sliding = Gemma3TextConfig(**{**config().to_dict(), "layer_types": types})
    cache = FP8PagedCache(sliding, **EXACT, max_pages=BATCH * MAX_PAGES)
    for start, stop in itertools.pairwise((0, 20, 50, 110, 111, 262)):
        store(cache, whole[:, :, start:stop])
        assert_last(cache, whole[:, :, :stop])
    assert cache.budget.num_held <= BATCH * MAX_PAGES


@pytest.mark.parametrize("ahead", [1, 0], ids=["full", "sliding"])
def test_a_copy_during_a_step_has_the_pages_of_each_layer(ahead: int, tmp_path: Path) -> None:
    cache = new_cache(max_cache_len=ROOM, prefill="stored")
    x, y = states(30), states(40, seed=1)
    store(cache, x)
    store(cache, y, [ahead])
    copies = [cache.fork(), pickle.loads(pickle.dumps(cache))]
    copies.append(FP8PagedCache.load(cache.save(tmp_path / "cache.safetensors")))
    for each in (*copies, cache):
        assert_last(each, torch.cat([x, y], 2) if ahead == 0 else x, 0)
        assert_last(each, x, 2)
    cache.layers[2].crop(-1)
    assert_last(cache, x[:, :, :-1], 2)


def test_each_ring_refuses_a_crop_by_its_length() -> None:
    whole = states(96)
    for change in (lambda cache: cache.layers[0].reset(), lambda cache: cache.layers[0].crop(-100)):
        cache = new_cache(max_cache_len=ROOM, prefill="stored")
        store(cache, whole)
        cache.crop(-12)
        change(cache)
        with pytest.raises(ConfigError, match="token 64 on"):
            cache.layers[2].crop(-8)
        assert_last(cache, whole[:, :, :84], 2)
    cache = new_cache(max_cache_len=ROOM, prefill="stored")
    store(cache, whole, [0, 1])
    store(cache, whole[:, :, :57], [2])
    with pytest.raises(ConfigError, match="token 32 on"):
        cache.crop(-10)
    with pytest.raises(ConfigError, match="the same number of tokens"):
        cache.activate_past_recording()
    assert not cache.layers[0].record_past
    assert_last(cache, whole, 0), assert_last(cache, whole[:, :, :57], 2)


def test_a_ring_that_recorded_its_past_may_be_forked() -> None:
    cache, x = new_cache(max_cache_len=ROOM, prefill="stored"), states(30)
    cache.activate_past_recording()
    store(cache, x)
    for layer in cache.layers:
        layer.record_past = False
    assert_last(cache.fork(), x), assert_last(cache, x)


@pytest.mark.parametrize("change", ["batch_repeat_interleave", "activate_past_recording"])
def test_a_change_beyond_the_budget_changes_nothing(change: str) -> None:
    cache = new_cache(max_cache_len=64, max_pages=BATCH * (MAX_PAGES + 8), prefill="stored")
    x = states(41)
    store(cache, x[:, :, :40])
    with pytest.raises(OutOfPagesError):
        getattr(cache, change)(*([2] if change == "batch_repeat_interleave" else []))
    assert not cache.layers[0].record_past
    store(cache, x[:, :, 40:])
    assert_last(cache, x)


def test_a_refused_step_keeps_the_recorded_past() -> None:
    cache, x = new_cache(), states(60)
    cache.activate_past_recording()
    store(cache, x)
    before = cache.memory_footprint()
    store(cache, x[:, :, :1], [0, 1])
    with pytest.raises(ConfigError):
        cache.update(x[:, :, :1, :3], x[:, :, :1, :3], 2)
    assert cache.memory_footprint() == before
    cache.crop(-40)
    assert_last(cache, x[:, :, :20])


@pytest.mark.parametrize("form", [{}, {"max_cache_len": ROOM}], ids=["growing", "preallocated"])
def test_a_reset_after_an_interrupted_allocation(
    form: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, x, calls = new_cache(**form), states(100), itertools.count()
    if not form:
        store(cache, states(30))
    allocate = PageAllocator.allocate

    def interrupted(self: PageAllocator, *arguments: Any, **keywords: Any) -> Any:
        pages = allocate(self, *arguments, **keywords)
        if next(calls) == len(form):  # before the pages are counted
            self.references[pages] = 0
            raise KeyboardInterrupt
        return pages

    monkeypatch.setattr(PageAllocator, "allocate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store(cache, x)
    cache.reset()
    for batch in (BATCH, 3):
        x = states(100, batch)
        store(cache, x)
        store(cache, x[:, :, :50])
        assert_last(cache, torch.cat([x, x[:, :, :50]], 2))
        cache = new_cache(**form)
