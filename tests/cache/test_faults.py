"""Tests in which each allocation of an operation fails once, as in SQLite's tests.

Afterwards a cache is as before or after the operation, or refuses new tokens until it is reset. No
page is lost.
"""

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hf_fp8kv import ConfigError, FP8PagedCache
from hf_fp8kv.cache.paged_tensor import PagedKV
from tests.helpers.assertions import assert_same
from tests.helpers.faults import MEMORY_ERRORS, MEMORY_FUNCTIONS, Faults, Place
from tests.helpers.tiny_models import build_model

PAGE_SIZE, BATCH, NUM_HEADS, HEAD_DIM = 8, 2, 2, 16
OPTIONS: dict[str, dict[str, Any]] = {
    "growing": {},
    # Pages that have left the window are kept.
    "recorded": {"dtype": "fp8"},
    "recorded offloaded": {"offloading": True},
    "budget": {"max_pages": 200, "dtype": "int8", "prefill": "stored"},
    "preallocated": {"max_cache_len": 96},
    "offloaded": {"offloading": True},
    "skipped": {"skip_layers": [0]},
    "skipped preallocated": {"skip_layers": [0], "max_cache_len": 96},
}
CONFIG = build_model("gemma3_text")[0].config  # a layer with a window of 8, and a full layer
Snapshot = tuple[list[int], list[torch.Tensor]]


def add_tokens(
    cache: FP8PagedCache, num_tokens: int, seed: int, batch: int = BATCH
) -> list[torch.Tensor]:
    """Store tokens in every layer, and return the keys that the last query attends to."""
    generator = torch.Generator().manual_seed(seed)
    all_stored = []
    keys = []
    for index in range(len(cache.layers)):
        cache.get_mask_sizes(num_tokens, index)
        states = torch.randn(batch, NUM_HEADS, num_tokens, HEAD_DIM, generator=generator)
        all_stored.append(cache.update(states, -states, index)[0])
    for index, (layer, stored) in enumerate(zip(cache.layers, all_stored, strict=True)):
        length, start = int(layer.get_seq_length()), getattr(stored, "start", 0)
        dense = stored.dense() if isinstance(stored, PagedKV) else stored
        if isinstance(stored, PagedKV) or dense.shape[2] > length:  # not of a sliding stock layer
            dense = dense[:, :, : length - start]
        keys.append(dense[:, :, -8:].clone() if index == 0 else dense.clone())
    return keys


def make_cache(kind: str) -> FP8PagedCache:
    cache = FP8PagedCache(CONFIG, page_size=PAGE_SIZE, **OPTIONS[kind])
    if "recorded" in kind:
        cache.activate_past_recording()
    return cache


def make_filled_cache(kind: str) -> FP8PagedCache:
    cache = make_cache(kind)
    add_tokens(cache, 61, 1)
    add_tokens(cache, 1, 2)
    return cache


OPERATIONS: dict[str, Callable[[FP8PagedCache], Any]] = {
    "first step": lambda cache: add_tokens(cache, 30, 3),
    "step": lambda cache: add_tokens(cache, 1, 3),
    "steps": lambda cache: [add_tokens(cache, 1, seed) for seed in range(4, 8)],
    "long step": lambda cache: add_tokens(cache, 30, 3),
    "crop": lambda cache: cache.crop(-1),
    "crop most": lambda cache: cache.crop(-60),
    "reset": lambda cache: cache.reset(),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "fork": lambda cache: add_tokens(cache.fork(), 1, 3),
    "footprint": lambda cache: cache.memory_footprint(),
}


def count_lost_pages(cache: FP8PagedCache) -> int:
    """Return the number of pages that are counted as used, but in no block table of the cache."""
    groups = cache.groups.values()
    held = sum(group.table.allocator.num_held for group in groups)
    pages = [set(group.table.get_used_rows().ravel().tolist()) for group in groups]
    return held - sum(map(len, pages))


def describe(cache: FP8PagedCache) -> Snapshot:
    fork = cache.fork()
    lengths = [int(layer.get_seq_length()) for layer in cache.layers]
    return lengths, add_tokens(fork, 1, 9, cache._paged.batch or BATCH)


def is_same(snapshot: Snapshot, expected: Snapshot) -> bool:
    return snapshot[0] == expected[0] and all(map(torch.equal, snapshot[1], expected[1]))


def check_fault(kind: str, name: str, faults: Faults, place: Place) -> None:
    """Let an operation fail at `place`, and compare the cache with caches without a failure."""
    operation = OPERATIONS[name]
    make = make_cache if name == "first step" else make_filled_cache
    cache, before, after = make(kind), make(kind), make(kind)
    operation(after)
    fork = cache.fork() if name == "steps" else None
    caches = [cache]
    error = faults.run(lambda: operation(caches[0]), place)
    if error is None:
        return  # the package has handled the error, or keeps the result of an earlier operation
    try:
        snapshot, refusal = describe(cache), ""
    except ConfigError as config_error:
        snapshot, refusal = None, str(config_error)
    if snapshot is None:
        assert "reset" in refusal, (place, refusal)
    elif name != "steps":  # which may end after any step
        assert any(is_same(snapshot, describe(other)) for other in (before, after)), place
    if fork is not None:
        assert is_same(describe(fork), describe(before)), place
        del fork
    cache.reset()
    new_cache = make_cache(kind)
    for num_tokens in (20, 1):
        keys, expected = add_tokens(cache, num_tokens, 5), add_tokens(new_cache, num_tokens, 5)
        for layer, (actual, expected_keys) in enumerate(zip(keys, expected, strict=True)):
            assert_same(actual, expected_keys, (place, layer))
    assert count_lost_pages(cache) == 0, place
    assert cache.budget.num_held == new_cache.budget.num_held, place
    # All memory is freed with the cache.
    pools = [weakref.ref(store.pool) for store in cache._paged.stores]
    caches.clear()
    del cache
    if any(pool() is not None for pool in pools):
        gc.collect()
    assert all(pool() is None for pool in pools), place


def iterate_places(kind: str, name: str, faults: Faults) -> Iterator[Place]:
    cache = make_cache(kind) if name == "first step" else make_filled_cache(kind)
    fork = cache.fork() if name == "steps" else None
    faults.run(lambda: OPERATIONS[name](cache))
    del fork
    yield from list(faults.places)


# Only recorded windows can be cropped far. A skipped layer with a window cannot be cropped.
CASES = [
    (kind, name) for kind, name in itertools.product(OPTIONS, OPERATIONS)
    if not (name == "crop most" and "recorded" not in kind)
    and not (name == "crop" and "skipped" in kind)
]  # fmt: skip


def check_places(cases: list[tuple[str, str]], stride: int) -> set[Place]:
    """Let every `stride`-th call fail with each error, and return the places."""
    places: set[Place] = set()
    for kind, name in cases:
        for number, make_error in enumerate(MEMORY_ERRORS):
            faults = Faults(MEMORY_FUNCTIONS, make_error)
            for place in itertools.islice(iterate_places(kind, name, faults), number, None, stride):
                check_fault(kind, name, faults, place)
                places.add(place)
    return places


def test_some_failed_allocations_leave_a_usable_cache() -> None:
    cases = [
        ("growing", "first step"),
        ("growing", "step"),
        ("preallocated", "select"),
        ("offloaded", "steps"),
        ("recorded", "crop most"),
        ("recorded offloaded", "crop most"),
    ]
    assert len(check_places(cases, 60)) > 10


@pytest.mark.full
def test_each_failed_allocation_leaves_a_usable_cache() -> None:
    assert len(check_places(CASES, len(MEMORY_ERRORS))) >= 300
