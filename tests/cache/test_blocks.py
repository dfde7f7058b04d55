"""A growing cache whose pages are in blocks of memory, against a cache with one tensor of pages.

The "triton" backend is a stand-in here that reads the blocks with the reference. The kernels run in
tests/ops/test_kernels_generate.py.
"""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_fp8kv import FP8PagedCache
from hf_fp8kv.cache.paged_tensor import densify
from hf_fp8kv.paging import page_pool
from tests.cache.public import attend
from tests.helpers.assertions import assert_same
from tests.helpers.counting import BytesWritten
from tests.helpers.standin import triton_standin
from tests.helpers.tiny_models import causal_config

pytestmark = pytest.mark.text

PAGE, HEADS, DIM, BATCH, LAYERS = 8, 2, 16, 2, 2
OPTIONS = [
    {},
    {"dtype": "fp8_e4m3", "scales": 0.02},
    {"key_dtype": "auto", "value_dtype": "fp8_e5m2"},
    {"dtype": "auto", "prefill": "stored"},
]
Cache = FP8PagedCache


@pytest.fixture(autouse=True)
def _blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_standin(monkeypatch)
    # One or two pages in a block.
    monkeypatch.setattr(page_pool, "BLOCK_BYTES", 2 * PAGE * HEADS * (2 * DIM + 4))


def pair(name: str = "llama", **options: Any) -> list[Cache]:
    """Return a cache with blocks, and the same cache without."""
    return [
        Cache(causal_config(name), page_size=PAGE, backend=backend, **options)
        for backend in ("triton", "reference")
    ]


def feed(caches: list[Cache], tokens: int, seed: int) -> None:
    """Give all caches the same tokens, and compare what attention would read."""
    for index in range(LAYERS):
        generator = torch.Generator().manual_seed(100 * seed + index)
        k, v = torch.randn(2, BATCH, HEADS, tokens, DIM, generator=generator)
        found = [[densify(x) for x in cache.update(k, 3 * v, index)] for cache in caches]
        for x, y in zip(*found, strict=True):
            assert_same(x, y)


def assert_same_content(one: Cache, other: Cache) -> None:
    assert one.get_seq_length() == other.get_seq_length()
    for layer, plain in zip(one.layers, other.layers, strict=True):
        assert_same(densify(layer.keys), densify(plain.keys))
        assert_same(densify(layer.values), densify(plain.values))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_growth_forks_and_copies_on_write(options):
    caches = pair(**options)
    feed(caches, 21, 0)
    for step in range(10):
        feed(caches, 1, 1 + step)
    for make in (Cache.fork, copy.deepcopy, copy.copy):
        twins = [make(cache) for cache in caches]
        for step in range(5):
            feed(twins, 2, 50 + step)
            feed(caches, 1, 70 + step)
        assert_same_content(*twins)
        assert_same_content(*caches)


def test_growth_and_forks_copy_no_full_page():
    """A pool in one tensor is copied when it grows; blocks are not."""
    caches = pair(dtype="fp8_e4m3", scales=0.02, prefill="stored")
    feed(caches, 50 * PAGE, 0)
    written = []
    for cache in caches:
        with BytesWritten() as counted:
            twin = cache.fork()
            for step in range(6 * PAGE):
                for index in range(LAYERS):
                    k = torch.full((BATCH, HEADS, 1, DIM), step / 8)
                    twin.update(k, k, index)
        written.append(counted.total)
    held = caches[0].memory_footprint()["used"]
    assert written[0] < held < written[1]


def test_going_back_growing_again_and_shrinking():
    caches = pair()
    feed(caches, 150, 0)
    full = caches[0].memory_footprint()["pages"]
    for seed, (removed, added) in enumerate([(5, 9), (20, 30), (140, 1), (10, 70)]):
        for cache in caches:
            cache.crop(-removed)
        assert_same_content(*caches)
        if removed == 140:
            assert caches[0].memory_footprint()["pages"] < full / 2, "memory is freed"
        feed(caches, added, 1 + seed)
    for seed, order in enumerate(([1, 0], [1, 1])):
        for cache in caches:
            cache.reorder_cache(torch.tensor(order))
        feed(caches, 3, 9 + seed)
    for cache in caches:
        cache.reset()
    feed(caches, 40, 20)
    assert_same_content(*caches)


@pytest.mark.parametrize("tokens", [100, 7, 1])
def test_windows_and_long_calls(tokens):
    caches = pair("gemma3_text")
    for seed, count in enumerate([30, 1, 1, tokens, 1, 50, 1]):
        feed(caches, count, seed)
        forks = [cache.fork() for cache in caches]
        feed(forks, 2, 90 + seed)
    assert_same_content(*caches)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_files_and_pickles_of_either_layout(options, tmp_path):
    caches = pair(**options)
    feed(caches, 21, 0)
    for step in range(20):
        feed(caches, 1, 1 + step)
    loads: dict[str, Callable[[Cache, Path], Cache]] = {
        "file": lambda cache, path: Cache.load(cache.save(path)),
        "pickle": lambda cache, _: pickle.loads(pickle.dumps(cache)),
    }
    for name, load in loads.items():
        twins = [load(c, tmp_path / f"{name}{i}") for i, c in enumerate(caches)]
        assert_same_content(*twins)
        assert_same_content(twins[0], caches[1])
        feed(twins, 12, 40)
        assert_same_content(*twins)
    files = [(tmp_path / f"file{i}").read_bytes() for i in range(2)]
    assert abs(len(files[0]) - len(files[1])) < 32, "only the name of the backend differs"


def test_to_the_cpu_s_memory_and_back():
    caches = pair()
    feed(caches, 41, 0)
    for layer in caches[0].layers:
        layer.offload()
    feed(caches, 30, 1)
    assert_same_content(*caches)


def test_a_preallocated_cache():
    caches = pair(max_cache_len=60)
    feed(caches, 21, 0)
    feed(caches, 3, 1)
    assert_same_content(*caches)


def test_handles_keep_what_they_show():
    cache, _ = pair(prefill="stored")
    key = cache.update(*torch.randn(2, BATCH, HEADS, 30, DIM), 0)[0]
    shown = key.dense().clone()
    storage = weakref.ref(key.k_codes.untyped_storage())
    cache.reset()
    assert_same(key.dense(), shown)
    gc.disable()
    try:
        del key
        assert storage() is None
    finally:
        gc.enable()


def test_bytes_are_accounted_for():
    caches = pair()
    feed(caches, 41, 0)
    found, expected = (cache.memory_footprint() for cache in caches)
    for name in ("pages", "scales", "used", "tokens"):
        assert found[name] == expected[name], name
    assert found["tables"] > expected["tables"], "addresses of the blocks"


def test_compiled_attention_reads_blocks():
    caches = pair(prefill="stored")
    feed(caches, 30, 0)
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager")
    for _ in range(10):
        k, v = torch.randn(2, BATCH, HEADS, 1, DIM)
        query = torch.randn(BATCH, 2 * HEADS, 1, DIM)
        found = [
            run(query, *cache.update(k, v, 0), 0.2)
            for cache, run in zip(caches, (compiled, attend), strict=True)
        ]
        assert_same(*found)
        for cache in caches:
            cache.update(k, v, 1)
    torch._dynamo.reset()
