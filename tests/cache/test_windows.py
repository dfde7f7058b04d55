"""Layers with a window hold the window and no more, whatever the lengths of the calls."""

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
# A window of 20 tokens is in up to 4 pages of 8.
MOST = 4
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
    "a-window-less-one": [19, 1, 19, 24, 25, 1],
}
# Grid: each plan once; `prefill` decides what a first call reads, so a long first call has both.
plans = pytest.mark.parametrize(
    ("plan", "prefill"),
    [
        ("long-first", "exact"), ("long-first", "stored"), ("chunks", "stored"),
        ("edges", "exact"), ("one-by-one", "stored"), ("a-window-less-one", "exact"),
    ],
)  # fmt: skip


def config(window: int = WINDOW) -> Any:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3TextConfig(
        num_hidden_layers=LAYERS, layer_types=types, sliding_window=window, head_dim=4,
        num_key_value_heads=2, num_attention_heads=2, hidden_size=8,
    )  # fmt: skip


def cache(**keywords: Any) -> FP8PagedCache:
    return FP8PagedCache(config(), **{**EXACT, **keywords})


def feed(caches: list[Any], tokens: int, seed: int) -> list[list[torch.Tensor]]:
    """Give every layer of all caches the same tokens, and return dense K and V of each cache."""
    x = torch.randn(BATCH, 2, tokens, 4, generator=torch.Generator().manual_seed(seed))
    found: list[list[torch.Tensor]] = []
    for one in caches:
        pairs = [one.update(x + layer, layer - x, layer) for layer in range(LAYERS)]
        found.append([densify(side) for pair in pairs for side in pair])
    return found


def check(one: FP8PagedCache) -> None:
    """Assert that a window has no more memory than it needs."""
    for layer in one.layers:
        if layer.is_sliding:
            assert layer.store.memory_footprint()["pages"] <= MOST * BATCH * PAGE_BYTES


def assert_same_layers(
    found: FP8PagedCache, expected: FP8PagedCache, layers: Any = range(LAYERS)
) -> None:
    """Assert that the next token attends to the same tokens in these layers."""
    length = expected.host_length()
    assert found.host_length() == length
    for layer, other in ((found.layers[i], expected.layers[i]) for i in layers):
        for side in ("keys", "values"):
            first = max(length - WINDOW + 1, 0) if layer.is_sliding else 0
            cache_pair = [getattr(x, side) for x in (layer, other)]
            parts = [x.dense()[:, :, first - x.start : length - x.start] for x in cache_pair]
            assert_same(*parts, side)


@plans
def test_a_window_is_that_of_transformers(plan: str, prefill: str, tmp_path: Path) -> None:
    """In a growing cache and in a ring."""
    ring, growing = cache(prefill=prefill, max_cache_len=ROOM), cache(prefill=prefill)
    stock, length = DynamicCache(config=config()), 0
    for seed, tokens in enumerate(PLANS[plan]):
        found = feed([ring, growing, stock], tokens, seed)
        length += tokens
        for of_ring, shown, wanted in zip(*found, strict=True):
            assert_same(shown, wanted, f"call {seed}")
            first = length - wanted.shape[2]
            assert_same(of_ring[:, :, first:length], wanted, f"call {seed}")
        assert growing.get_mask_sizes(3, 0) == stock.get_mask_sizes(3, 0)
        check(growing)
        check(ring)
        for one in (ring, growing, stock):
            one.reorder_cache(torch.tensor([1, 0] if seed % 2 else [1, 1]))
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
def test_attention_that_names_no_window_has_that_of_the_layer(room: int | None) -> None:
    """Pages also hold some tokens that have left the window."""
    stored, query = cache(max_cache_len=room), torch.randn(BATCH, 2, 1, 4)
    feed([stored], 37, 0)
    x = torch.randn(BATCH, 2, 1, 4)
    handles = stored.update(x, -x, 0)
    module = torch.nn.Module().eval()
    module.is_causal = True
    found, _ = fp8_paged_attention(module, query, *handles, None)
    visible = [side.dense()[:, :, 38 - WINDOW - side.start : 38 - side.start] for side in handles]
    torch.testing.assert_close(found, scaled_dot_product_attention(query, *visible).transpose(1, 2))


def test_a_ring_is_saved_within_a_step(tmp_path: Path) -> None:
    """The first layer has the tokens of a call, and the later layers do not have them yet."""
    ring = cache(max_cache_len=ROOM)
    feed([ring], 60, 0)
    x = torch.randn(BATCH, 2, 30, 4)
    ring.update(x, -x, 0)
    twin = FP8PagedCache.load(ring.save(tmp_path / "ring.safetensors"))
    for index in (1, 2):
        for one in (ring, twin):
            one.update(x, -x, index)
    assert_same_layers(twin, ring)


def test_addresses_of_a_ring_stay() -> None:
    ring = cache(max_cache_len=ROOM)
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
def test_a_ring_goes_back_as_far_as_its_pages(length: int) -> None:
    """Up to the first token that later tokens have overwritten, in one or several steps."""
    intact = max((length - 1) // PAGE - MOST + 1, 0) * PAGE
    most = length - (intact + WINDOW - 1) if intact else length
    one = cache(max_cache_len=ROOM)
    feed([one], length, 0)
    if intact:
        with pytest.raises(ConfigError, match=f"token {intact} on"):
            one.crop(-most - 1)
        assert one.host_length() == length
    for _ in range(min(most, 3)):
        one.crop(-1)
    growing = cache()
    growing.activate_past_recording()
    feed([growing], length, 0)
    growing.crop(-min(most, 3))
    assert_same_layers(one, growing)
    if intact:
        with pytest.raises(ConfigError, match=f"token {intact} on"):
            one.fork().crop(-most)
    one.crop(-length)
    feed([one], 9, 1)
    one.crop(-8)
    assert one.host_length() == 1


@pytest.mark.parametrize("at", [0, 10, 30, 77])
def test_a_ring_that_records_the_past_keeps_all(at: int) -> None:
    one, growing = cache(max_cache_len=ROOM), cache()
    for each in (one, growing):
        if at:
            feed([each], at, 0)
        each.activate_past_recording()
    for seed in range(20):
        feed([one, growing], 2 if seed % 9 else 17, seed)
    for each in (one, growing):
        each.crop(-60)
    assert_same_layers(one, growing)
    assert_same_layers(one.fork(), growing)


def test_recording_brings_nothing_back_that_a_ring_has_lost(tmp_path: Path) -> None:
    full_first = config()
    full_first.layer_types = ["full_attention", "sliding_attention", "sliding_attention"]
    one, other = (FP8PagedCache(full_first, **EXACT, max_cache_len=room) for room in (ROOM, None))
    other.activate_past_recording()
    feed([one, other], 77, 0)
    one.activate_past_recording()
    feed([one, other], 20, 1)
    one.save(tmp_path / "one.safetensors")
    for each in (one, one.fork(), FP8PagedCache.load(tmp_path / "one.safetensors")):
        with pytest.raises(ConfigError, match="token 48 on"):
            each.crop(-60)
        assert {int(layer.get_seq_length()) for layer in each.layers} == {97}
        each.crop(-30)
    other.crop(-30)
    assert_same_layers(one, other)


def test_layers_of_a_ring_that_are_emptied_one_by_one() -> None:
    one, fresh = cache(max_cache_len=ROOM), cache()
    feed([one], 100, 0)
    for layer in one.layers:
        layer.crop(-100)
    feed([one, fresh], 9, 1)
    assert_same_layers(one.fork(), fresh)
    one.crop(-3)
    fresh.crop(-3)
    assert_same_layers(one, fresh)


def test_recorded_tokens_go_with_the_crop() -> None:
    one = cache()
    feed([one], ROOM, 0)
    with pytest.raises(ConfigError, match="activate_past_recording"):
        one.crop(-WINDOW)
    one.reset()
    one.activate_past_recording()
    feed([one], ROOM, 0)
    used = one.layers[0].store.memory_footprint()["used"]
    assert used == ROOM // PAGE * BATCH * PAGE_BYTES
    one.crop(-1)
    check(one)


def test_a_long_call_that_a_later_layer_refuses_leaves_no_trace() -> None:
    one, other = cache(), cache()
    feed([one, other], 33, 0)
    before = [one.layers[i].store.memory_footprint() for i in (0, 2)]
    x = torch.ones(BATCH, 2, 50, 4)
    for last in range(1, LAYERS):
        for layer in range(last):
            one.update(x, x, layer)
        with pytest.raises(ConfigError):
            one.update(x[..., :3], x, last)
        assert_same_layers(one, other)
        assert [one.layers[i].store.memory_footprint() for i in (0, 2)] == before
    feed([one, other], 50, 1)
    assert_same_layers(one, other)
    check(one)


def test_a_long_call_that_stops_at_a_layer_is_reported() -> None:
    one = cache()
    feed([one], 33, 0)
    x = torch.ones(BATCH, 2, 50, 4)
    one.update(x, x, 0)  # the other layer with this window is never called
    for call in (lambda: one.update(x, x, 0), one.fork, lambda: one.crop(-1)):
        with pytest.raises(ConfigError, match=r"tokens 33 to 82.*reset the cache"):
            call()
    one.reset()
    feed([one], 50, 1)
    check(one)
    one.reset()
    for _ in range(2):
        one.update(x, x, 0)
    with pytest.raises(ConfigError, match="pass each call to all layers"):
        one.update(x, x, 2)


def test_a_reset_in_the_middle_of_a_long_call_leaves_forks_alone() -> None:
    one, fresh = cache(), cache()
    feed([one, fresh], 33, 0)
    fork = one.fork()
    x = torch.ones(BATCH, 2, 50, 4)
    one.update(x, x, 0)
    one.reset()
    for tokens in (1, 60):
        assert_same_layers(fork, fresh)
        feed([fork, fresh], tokens, 1)
    assert_same_layers(fork, fresh)


def test_a_first_call_without_memory_is_forgotten() -> None:
    for at in itertools.count(1):
        one, fresh = cache(), cache()
        x = torch.ones(BATCH, 2, 100, 4)
        try:
            with OutOfMemory(at, PAGE_BYTES):
                one.update(x, x, 0)
            break
        except MemoryError:
            one.reset()
        feed([one, fresh], 5, 0)
        assert_same_layers(one, fresh)
        check(one)
    assert at > 1


# Grid: a pairwise cover.
@pytest.mark.parametrize(
    ("window", "room", "prefill"),
    pairwise([1, 2, PAGE - 1, PAGE, PAGE + 1, PAGE + 2], [None, ROOM], ["exact", "stored"]),
)
def test_windows_of_about_a_page(window: int, room: int | None, prefill: str) -> None:
    keywords: dict[str, Any] = {**EXACT, "prefill": prefill}
    one = FP8PagedCache(config(window), max_cache_len=room, **keywords)
    whole = FP8PagedCache(config(ROOM), **keywords)
    length = 0
    for seed, tokens in enumerate((16, 1, 7, 24, 8, 1, 3, 9)):
        found, expected = feed([one, whole], tokens, seed)
        start, length = length, length + tokens
        for layer, (shown, wanted) in enumerate(zip(found, expected, strict=True)):
            first = 0 if layer in (2, 3) else max(start - window + 1, 0)
            stop = length if room and shown.shape[2] == ROOM else shown.shape[2]
            begin = stop - (length - first)
            assert_same(shown[:, :, begin:stop], wanted[:, :, first:], f"call {seed}")


@pytest.mark.parametrize("writer", [0, 1], ids=["the-original", "the-fork"])
def test_forks_are_left_alone_by_long_calls(writer: int) -> None:
    cache_pair = [cache(), cache()]
    feed(cache_pair, 33, 0)
    forks = [cache_pair[0], cache_pair[0].fork()]
    feed([forks[writer], cache_pair[1]], 50, 1)
    assert_same_layers(forks[writer], cache_pair[1])
    fresh = cache()
    feed([fresh], 33, 0)
    assert_same_layers(forks[1 - writer], fresh)
    feed([forks[1 - writer], fresh], 1, 2)
    assert_same_layers(forks[1 - writer], fresh)


@pytest.mark.parametrize("room", [None, ROOM])
def test_no_token_outside_the_window_is_read(room: int | None) -> None:
    """Tokens before the window may be NaN, whether their page is freed or not."""
    pair = [cache(dtype="fp8_e4m3", max_cache_len=room) for _ in range(2)]
    for seed, tokens in enumerate([60, *[1] * 10, 9, 50, *[1] * 10]):
        x = torch.randn(BATCH, 2, tokens, 4, generator=torch.Generator().manual_seed(seed))
        for one in pair:
            for layer in range(LAYERS):
                one.update(x, x, layer)
            if not seed:
                x[:, :, : 60 - WINDOW] = torch.nan
        assert_same_layers(*pair, layers=(0, 2))


# Memory is freed.


def test_memory_is_freed_when_a_quarter_is_in_use() -> None:
    one, other = FP8PagedCache(**EXACT), FP8PagedCache(**EXACT)  # without windows
    feed([one, other], 320, 0)
    full, sizes = one.memory_footprint().pages_bytes, []
    for _ in range(16):
        one.crop(-10)
        sizes.append(one.memory_footprint().pages_bytes)
    assert sizes == [full] * 16, "half is in use"
    one.crop(-100)
    other.crop(-260)
    assert one.memory_footprint().pages_bytes == LAYERS * -(-60 // PAGE) * BATCH * PAGE_BYTES
    # Going back and forth moves no pages.
    feed([one, other], 10, 1)
    addresses = {one.layers[1].keys.block.data_ptr()}
    for step in range(20):
        feed([one, other], 9, step)
        one.crop(-8)
        other.crop(-8)
        addresses.add(one.layers[1].keys.block.data_ptr())
    assert len(addresses) <= 2
    assert_same_layers(one, other)


def test_memory_waits_for_forks_that_hold_pages() -> None:
    one = cache()
    feed([one], 160, 0)
    fork = one.fork()
    one.crop(-160)
    feed([one], 9, 1)
    full = one.layers[1].store.memory_footprint()["pages"]
    assert full >= 160 // PAGE * BATCH * PAGE_BYTES
    del fork
    # The next allocation of a page frees the pages of the fork.
    feed([one], 8, 2)
    assert one.layers[1].store.memory_footprint()["pages"] < full // 2
    other = cache()
    feed([other], 9, 1)
    feed([other], 8, 2)
    assert_same_layers(one, other)


def test_selecting_one_of_many_sequences_frees_memory() -> None:
    one = cache()
    feed([one], 100, 0)
    one.batch_repeat_interleave(4)
    x = torch.ones(4 * BATCH, 2, 80, 4)
    for layer in range(LAYERS):
        one.update(x, x, layer)
    full = one.memory_footprint().pages_bytes
    one.batch_select_indices(torch.tensor([3]))
    assert one.memory_footprint().pages_bytes < full / 3


# Layers that stand at different lengths, budgets and refusals. Sliding layers are 0 and 2.


def states(tokens: int, batch: int = BATCH, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, 2, tokens, 4, generator=torch.Generator().manual_seed(seed))


def store(one: FP8PagedCache, x: torch.Tensor, layers: Any = range(LAYERS)) -> None:
    for layer in layers:
        one.update(x, -x, layer)


def assert_last(one: FP8PagedCache, x: torch.Tensor, layer: int = 0) -> None:
    """Assert that a layer holds the last window of `x`."""
    keys, stop = one.layers[layer].keys, x.shape[2]
    assert int(one.layers[layer].get_seq_length()) == stop
    first = max(stop - WINDOW + 1, 0)
    span = slice(first - keys.start, stop - keys.start)
    assert_same(keys.dense()[:, :, span], x[:, :, first:])


def test_long_calls_take_no_more_than_the_budget() -> None:
    types, whole = ["sliding_attention"] * LAYERS, states(262)
    sliding = Gemma3TextConfig(**{**config().to_dict(), "layer_types": types})
    one = FP8PagedCache(sliding, **EXACT, max_pages=BATCH * MOST)
    for start, stop in itertools.pairwise((0, 20, 50, 110, 111, 262)):
        store(one, whole[:, :, start:stop])
        assert_last(one, whole[:, :, :stop])
    assert one.budget.held <= BATCH * MOST


@pytest.mark.parametrize("ahead", [1, 0], ids=["full", "sliding"])
def test_a_copy_within_a_step_has_the_pages_of_each_layer(ahead: int, tmp_path: Path) -> None:
    one = cache(max_cache_len=ROOM, prefill="stored")
    x, y = states(30), states(40, seed=1)
    store(one, x)
    store(one, y, [ahead])
    copies = [one.fork(), pickle.loads(pickle.dumps(one))]
    copies.append(FP8PagedCache.load(one.save(tmp_path / "cache.safetensors")))
    for each in (*copies, one):
        assert_last(each, torch.cat([x, y], 2) if ahead == 0 else x, 0)
        assert_last(each, x, 2)
    one.layers[2].crop(-1)
    assert_last(one, x[:, :, :-1], 2)


def test_each_ring_refuses_a_crop_by_its_own_length() -> None:
    whole = states(96)
    for change in (lambda one: one.layers[0].reset(), lambda one: one.layers[0].crop(-100)):
        one = cache(max_cache_len=ROOM, prefill="stored")
        store(one, whole)
        one.crop(-12)
        change(one)
        with pytest.raises(ConfigError, match="token 64 on"):
            one.layers[2].crop(-8)
        assert_last(one, whole[:, :, :84], 2)
    one = cache(max_cache_len=ROOM, prefill="stored")
    store(one, whole, [0, 1])
    store(one, whole[:, :, :57], [2])
    with pytest.raises(ConfigError, match="token 32 on"):
        one.crop(-10)
    with pytest.raises(ConfigError, match="the same number of tokens"):
        one.activate_past_recording()
    assert not one.layers[0].record_past
    assert_last(one, whole, 0), assert_last(one, whole[:, :, :57], 2)


def test_a_fork_of_a_ring_that_recorded_its_past() -> None:
    one, x = cache(max_cache_len=ROOM, prefill="stored"), states(30)
    one.activate_past_recording()
    store(one, x)
    for layer in one.layers:
        layer.record_past = False
    assert_last(one.fork(), x), assert_last(one, x)


@pytest.mark.parametrize("change", ["batch_repeat_interleave", "activate_past_recording"])
def test_a_change_that_passes_the_budget_changes_nothing(change: str) -> None:
    one = cache(max_cache_len=64, max_pages=BATCH * (MOST + 8), prefill="stored")
    x = states(41)
    store(one, x[:, :, :40])
    with pytest.raises(OutOfPagesError):
        getattr(one, change)(*([2] if change == "batch_repeat_interleave" else []))
    assert not one.layers[0].record_past
    store(one, x[:, :, 40:])
    assert_last(one, x)


def test_a_refused_step_keeps_the_recorded_past() -> None:
    one, x = cache(), states(60)
    one.activate_past_recording()
    store(one, x)
    before = one.memory_footprint()
    store(one, x[:, :, :1], [0, 1])
    with pytest.raises(ConfigError):
        one.update(x[:, :, :1, :3], x[:, :, :1, :3], 2)
    assert one.memory_footprint() == before
    one.crop(-40)
    assert_last(one, x[:, :, :20])


@pytest.mark.parametrize("form", [{}, {"max_cache_len": ROOM}], ids=["growing", "preallocated"])
def test_a_reset_after_an_interrupt_while_pages_are_taken(
    form: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, x, calls = cache(**form), states(100), itertools.count()
    if not form:
        store(one, states(30))
    allocate = PageAllocator.allocate

    def interrupted(self: PageAllocator, *arguments: Any, **keywords: Any) -> Any:
        numbers = allocate(self, *arguments, **keywords)
        if next(calls) == len(form):  # before the numbers are counted
            self.references[numbers] = 0
            raise KeyboardInterrupt
        return numbers

    monkeypatch.setattr(PageAllocator, "allocate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store(one, x)
    one.reset()
    for batch in (BATCH, 3):
        x = states(100, batch)
        store(one, x)
        store(one, x[:, :, :50])
        assert_last(one, torch.cat([x, x[:, :, :50]], 2))
        one = cache(**form)
