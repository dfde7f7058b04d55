"""Layers with a window keep the window and no more, whatever the calls are like."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig
from transformers.cache_utils import DynamicCache

from hf_fp8kv import ConfigError, FP8PagedCache
from hf_fp8kv.cache.paged_tensor import densify
from tests.helpers.assertions import assert_same

WINDOW, PAGE, BATCH, ROOM = 20, 8, 2, 200
# A window of 20 tokens is in up to 4 pages of 8.
MOST = 4
LAYERS = 3
EXACT = {"dtype": "auto", "page_size": PAGE}
# Tokens of each call. A call of more than a few tokens has no room beside the window.
PLANS = {
    "long-first": [100, 1, 1],
    "chunks": [5, 60, 1, 30, 2, 1, 1],
    "edges": [20, 21, 19, 4, 1],
    "one-by-one": [1] * 30 + [40, 1, 1],
    "a-window-less-one": [19, 1, 19, 24, 25, 1],
}
plans = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
prefills = pytest.mark.parametrize("prefill", ["exact", "stored"])


def config() -> Any:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3TextConfig(
        num_hidden_layers=LAYERS, layer_types=types, sliding_window=WINDOW, head_dim=4,
        num_key_value_heads=2, num_attention_heads=2, hidden_size=8,
    )  # fmt: skip


def narrow(window: int) -> Any:
    one = config()
    one.sliding_window = window
    return one


def cache(**keywords: Any) -> FP8PagedCache:
    return FP8PagedCache(config(), **{**EXACT, **keywords})


def feed(caches: list[Any], tokens: int, seed: int) -> list[list[torch.Tensor]]:
    """The same tokens in every layer of each cache; returns what each cache gave, dense."""
    x = torch.randn(BATCH, 2, tokens, 4, generator=torch.Generator().manual_seed(seed))
    found: list[list[torch.Tensor]] = []
    for one in caches:
        pairs = [one.update(x + layer, layer - x, layer) for layer in range(LAYERS)]
        found.append([densify(side) for pair in pairs for side in pair])
    return found


def check(one: FP8PagedCache) -> None:
    """Counts agree, and a window has no more room than it needs."""
    for group in one.groups.values():
        group.table.check()
        if group.window is not None:
            assert group.table.allocator.capacity <= MOST * BATCH
            assert all(pool.pages <= MOST * BATCH for pool in group.pools)
    held = sum(group.table.allocator.held for group in one.groups.values())
    assert one.budget.held == held


def assert_same_layers(found: FP8PagedCache, expected: FP8PagedCache) -> None:
    """What the next token sees is the same in every layer."""
    length = expected.host_length()
    assert found.host_length() == length
    for layer, other in zip(found.layers, expected.layers, strict=True):
        for side in ("keys", "values"):
            first = max(length - WINDOW + 1, 0) if layer.is_sliding else 0
            both = [getattr(x, side) for x in (layer, other)]
            parts = [x.dense()[:, :, first - x.start : length - x.start] for x in both]
            assert_same(*parts, side)


@plans
@prefills
def test_a_growing_window_is_that_of_transformers(plan: list[int], prefill: str) -> None:
    ours, stock = cache(prefill=prefill), DynamicCache(config=config())
    for seed, tokens in enumerate(plan):
        found, expected = feed([ours, stock], tokens, seed)
        for shown, whole in zip(found, expected, strict=True):
            assert_same(shown, whole, f"call {seed}")
        check(ours)


@plans
@prefills
def test_a_ring_holds_the_window(plan: list[int], prefill: str, tmp_path: Path) -> None:
    ring, growing = cache(prefill=prefill, max_cache_len=ROOM), cache(prefill=prefill)
    length = 0
    for seed, tokens in enumerate(plan):
        found, expected = feed([ring, growing], tokens, seed)
        length += tokens
        for shown, wanted in zip(found, expected, strict=True):
            first = length - wanted.shape[2]
            assert_same(shown[:, :, first:length], wanted, f"call {seed}")
        check(ring)
        for one in (ring, growing):
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


def test_addresses_of_a_ring_stay() -> None:
    ring = cache(max_cache_len=ROOM)
    feed([ring], 1, 0)

    def addresses() -> list[int]:
        tensors = [t for x in ring.layers for t in (*x.pool.tensors().values(), x.table, x.lengths)]
        return [t.data_ptr() for t in tensors]

    before = addresses()
    for seed, tokens in enumerate((30, 1, 70, 2)):
        feed([ring], tokens, seed)
    ring.reorder_cache(torch.tensor([0, 0]))
    ring.crop(-1)
    ring.reset()
    feed([ring], 90, 7)
    assert addresses() == before


@pytest.mark.parametrize("length", [30, 100, 101, 103])
def test_a_ring_goes_back_as_far_as_its_pages(length: int) -> None:
    """Up to the first token that later ones have overwritten, also in several steps."""
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
        assert {layer.host_length() for layer in each.layers} == {97}
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
    one.activate_past_recording()
    feed([one], ROOM, 0)
    assert one.groups[WINDOW].table.allocator.capacity == ROOM // PAGE * BATCH
    one.crop(-1)
    check(one)


def test_a_long_call_that_a_later_layer_refuses_leaves_no_trace() -> None:
    one, other = cache(), cache()
    feed([one, other], 33, 0)
    before = one.budget.held, [pool.pages for pool in one.groups[WINDOW].pools]
    x = torch.ones(BATCH, 2, 50, 4)
    for last in range(1, LAYERS):
        for layer in range(last):
            one.update(x, x, layer)
        with pytest.raises(ConfigError):
            one.update(x[..., :3], x, last)
        assert_same_layers(one, other)
        assert (one.budget.held, [pool.pages for pool in one.groups[WINDOW].pools]) == before
    feed([one, other], 50, 1)
    assert_same_layers(one, other)
    check(one)


def test_a_long_call_that_was_left_in_the_middle_is_told() -> None:
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


def test_a_first_call_that_stored_nothing_is_forgotten() -> None:
    one, fresh = cache(), cache()
    one.groups[WINDOW].prepare(0, 100, BATCH)  # and then, say, memory ran out
    feed([one, fresh], 5, 0)
    assert_same_layers(one, fresh)
    check(one)


def test_layers_that_get_their_calls_one_by_one_are_told() -> None:
    one = cache()
    x = torch.ones(BATCH, 2, 30, 4)
    one.update(x, x, 0)
    one.update(x, x, 0)
    with pytest.raises(ConfigError, match="to all layers before the next"):
        one.update(x, x, 2)


@prefills
@pytest.mark.parametrize("room", [None, ROOM])
@pytest.mark.parametrize("window", [1, 2, PAGE - 1, PAGE, PAGE + 1, PAGE + 2])
def test_windows_of_about_a_page(window: int, room: int | None, prefill: str) -> None:
    keywords: dict[str, Any] = {**EXACT, "prefill": prefill}
    one = FP8PagedCache(narrow(window), max_cache_len=room, **keywords)
    whole = FP8PagedCache(narrow(ROOM), **keywords)
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
    both = [cache(), cache()]
    feed(both, 33, 0)
    forks = [both[0], both[0].fork()]
    feed([forks[writer], both[1]], 50, 1)
    assert_same_layers(forks[writer], both[1])
    fresh = cache()
    feed([fresh], 33, 0)
    assert_same_layers(forks[1 - writer], fresh)
    feed([forks[1 - writer], fresh], 1, 2)
    assert_same_layers(forks[1 - writer], fresh)
    tables = [fork.groups[WINDOW].table for fork in forks]
    assert tables[0].allocator is not tables[1].allocator
    for table in tables:
        table.check()
    held = {a: a.held for fork in forks for g in fork.groups.values() for a in [g.table.allocator]}
    assert forks[0].budget.held == sum(held.values())


def test_no_page_outside_the_window_is_read() -> None:
    """Pages behind the window may hold anything, NaN too, whether given back or not yet."""
    one, other = (FP8PagedCache(config(), page_size=PAGE, dtype="fp8_e4m3") for _ in range(2))
    spoiled = 0
    for seed, tokens in enumerate([100, *[1] * 10, 9, 50, *[1] * 10]):
        group = one.groups[WINDOW]
        seen = group.table.rows[:, group.visible_from(group.length) // PAGE : group.table.count]
        unseen = sorted(set(range(group.table.allocator.capacity)) - set(seen.flat))
        spoiled += len(unseen)
        for pool, page in itertools.product(group.pools, unseen):
            for tensor in pool.tensors().values():
                tensor[page] = 127 if tensor.dtype == torch.uint8 else torch.nan
        for found, expected in zip(*feed([one, other], tokens, seed), strict=True):
            assert_same(found, expected)
    assert spoiled


# Bytes go back.


def test_bytes_go_back_when_a_quarter_is_left() -> None:
    one, other = FP8PagedCache(**EXACT), FP8PagedCache(**EXACT)  # without windows
    feed([one, other], 320, 0)
    pool, sizes = one.layers[1].pool, []
    full = pool.pages
    for _ in range(16):
        one.crop(-10)
        sizes.append(pool.pages)
    assert sizes == [full] * 16, "half is in use"
    one.crop(-100)
    other.crop(-260)
    assert pool.pages == one.groups[None].table.allocator.capacity == -(-60 // PAGE) * BATCH
    # No storm: going back and forth moves nothing.
    feed([one, other], 10, 1)
    addresses = {one.layers[1].pool.k.data_ptr()}
    for step in range(20):
        feed([one, other], 9, step)
        one.crop(-8)
        other.crop(-8)
        addresses.add(one.layers[1].pool.k.data_ptr())
    assert len(addresses) <= 2
    assert_same_layers(one, other)


def test_bytes_wait_for_forks_that_hold_pages() -> None:
    one = cache(max_pages=None)
    feed([one], 160, 0)
    fork = one.fork()
    one.crop(-160)
    feed([one], 9, 1)
    full = one.layers[1].pool.pages
    assert full >= 160 // PAGE * BATCH
    assert fork.layers[1].pool is one.layers[1].pool
    del fork
    # The next page that is taken finds that the others are gone.
    feed([one], 8, 2)
    assert one.layers[1].pool.pages < full // 2
    other = cache()
    feed([other], 9, 1)
    feed([other], 8, 2)
    assert_same_layers(one, other)


def test_selecting_one_of_many_sequences_gives_bytes_back() -> None:
    one = cache()
    feed([one], 100, 0)
    one.batch_repeat_interleave(4)
    x = torch.ones(4 * BATCH, 2, 80, 4)
    for layer in range(LAYERS):
        one.update(x, x, layer)
    full = one.memory_footprint()["pages"]
    one.batch_select_indices(torch.tensor([3]))
    for group in one.groups.values():
        group.table.check()
    assert one.memory_footprint()["pages"] < full / 3
