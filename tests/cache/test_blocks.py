"""Tests of growing caches, whose pages are in several blocks of memory, with two backends.

The "triton" backend is a stand-in that reads the blocks with the reference. test_machine.py tests
all operations on such caches, and tests/ops/test_kernels_generate.py tests the kernels.
"""

import copy
import weakref
from typing import Any

import pytest
import torch

from hf_fp8kv import FP8PagedCache
from hf_fp8kv.paging import memory_blocks
from tests.cache.public import attend
from tests.cache.test_offloading import (
    HEAD_DIM,
    NUM_HEADS,
    NUM_LAYERS,
    PAGE_SIZE,
    add_tokens,
    make_config,
)
from tests.helpers.assertions import assert_same
from tests.helpers.standin import replace_triton

pytestmark = pytest.mark.text

BATCH_SIZE = 2


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_triton(monkeypatch)
    # A block has one or two pages.
    monkeypatch.setattr(
        memory_blocks, "BLOCK_BYTES", 2 * PAGE_SIZE * NUM_HEADS * (2 * HEAD_DIM + 4)
    )


def make_caches(name: str = "llama", **options: Any) -> list[FP8PagedCache]:
    """Return a cache for each backend."""
    return [
        FP8PagedCache(make_config(name), page_size=PAGE_SIZE, backend=backend, **options)
        for backend in ("triton", "reference")
    ]


@pytest.mark.usefixtures("no_garbage_collection")
def test_handles_keep_their_values_after_a_reset():
    cache, _ = make_caches(prefill="stored")
    key = cache.update(*torch.randn(2, BATCH_SIZE, NUM_HEADS, 30, HEAD_DIM), 0)[0]
    expected = key.dense().clone()
    storage = weakref.ref(key.block.untyped_storage())
    cache.reset()
    assert_same(key.dense(), expected)
    del key
    assert storage() is None


def test_a_copied_layer_has_separate_blocks():
    for backend in ("cpu", "torch"):
        cache = FP8PagedCache(make_config(), page_size=PAGE_SIZE, backend=backend, prefill="stored")
        for _ in range(9 * PAGE_SIZE):
            cache.update(*torch.randn(2, BATCH_SIZE, NUM_HEADS, 1, HEAD_DIM), 0)
        layer = cache.layers[0]
        layer_copy, expected = copy.deepcopy(layer), [layer.keys.dense(), layer.values.dense()]
        cache.update(*torch.randn(2, BATCH_SIZE, NUM_HEADS, 1, HEAD_DIM), 0)
        cache.reset()
        for handle, values in zip((layer_copy.keys, layer_copy.values), expected, strict=True):
            assert_same(handle.dense(), values)


def test_a_reset_cache_accepts_wider_values():
    reset_cache, new_cache = (
        FP8PagedCache(page_size=PAGE_SIZE, backend="cpu", prefill="stored") for _ in range(2)
    )
    key, value = torch.randn(2, BATCH_SIZE, NUM_HEADS, 5, HEAD_DIM)
    reset_cache.update(key, value[..., :0], 0)
    reset_cache.reset()
    actual, expected = (
        cache.update(key, value, 0)[1].dense() for cache in (reset_cache, new_cache)
    )
    assert_same(actual, expected)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_attention_reads_blocks():
    caches = make_caches(prefill="stored")
    add_tokens(caches, 30, 0)
    compiled = torch.compile(attend, backend="aot_eager")
    for _ in range(4):  # the third token needs new pages and a new block
        k, v = torch.randn(2, BATCH_SIZE, NUM_HEADS, 1, HEAD_DIM)
        query = torch.randn(BATCH_SIZE, 2 * NUM_HEADS, 1, HEAD_DIM)
        outputs = [
            attend_function(query, *cache.update(k, v, 0), 0.2)
            for cache, attend_function in zip(caches, (compiled, attend), strict=True)
        ]
        assert_same(*outputs)
        for cache in caches:
            for index in range(1, NUM_LAYERS):
                cache.update(k, v, index)
