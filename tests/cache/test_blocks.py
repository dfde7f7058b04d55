"""A growing cache whose pages are in blocks, as on a GPU, against one with a tensor for all pages.

"triton" is the reference here, which reads the blocks; tests/ops/test_kernels_generate.py has the
kernels.
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

from hf_fp8kv import FP8PagedCache, ops
from hf_fp8kv.attention.fp8_paged import fp8_paged_attention
from hf_fp8kv.bench.contenders import AttentionLayer
from hf_fp8kv.cache.paged_tensor import densify, pages_of
from hf_fp8kv.paging import page_pool
from tests.helpers.assertions import assert_same
from tests.helpers.standin import triton_standin
from tests.helpers.tiny_models import tiny

pytestmark = pytest.mark.text

PAGE, HEADS, DIM, BATCH = 8, 2, 16, 2
# A page is 8 * 2 * (16 + 16 + 4) bytes and more in "auto": at most two or one in a block.
BLOCK = 2 * PAGE * HEADS * (2 * DIM + 4)
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
    monkeypatch.setattr(page_pool, "BLOCK_BYTES", BLOCK)


def pair(name: str = "gqa", **options: Any) -> list[Cache]:
    """The same cache with blocks and without."""
    model, _ = tiny(name)
    return [
        Cache(model.config, page_size=PAGE, backend=backend, **options)
        for backend in ("triton", "reference")
    ]


def feed(caches: list[Cache], tokens: int, seed: int) -> None:
    """Gives both the same tokens, and compares what attention would see and what is stored."""
    for index in range(len(caches[0].layers)):
        layer = caches[0].layers[index]
        generator = torch.Generator().manual_seed(100 * seed + index)
        heads, dim = HEADS, DIM
        if layer.is_initialized:
            heads, dim = layer.pool.heads, layer.pool.k_dim
        k, v = torch.randn(2, BATCH, heads, tokens, dim, generator=generator)
        found = [[densify(x) for x in cache.update(k, 3 * v, index)] for cache in caches]
        for x, y in zip(*found, strict=True):
            assert_same(x, y)
    assert_same_content(*caches)


def assert_same_content(one: Cache, other: Cache) -> None:
    assert one.get_seq_length() == other.get_seq_length()
    for layer, plain in zip(one.layers, other.layers, strict=True):
        if layer.keys is None:
            assert plain.keys is None
            continue
        assert_same(densify(layer.keys), densify(plain.keys))
        assert_same(densify(layer.values), densify(plain.values))


def blocks(cache: Cache, layer: int = 0) -> list[torch.Tensor]:
    pool = cache.paged_layers[layer].pool
    assert pool.in_blocks
    return list(pool._blocks)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_growth_forks_and_copies_on_write(options):
    caches = pair(**options)
    feed(caches, 21, 0)
    first = blocks(caches[0])
    before = [block.clone() for block in first]
    assert len(first) > 1
    for step in range(30):
        feed(caches, 1, 1 + step)
    grown = blocks(caches[0])
    assert len(grown) > len(first)
    # Block by block the same memory, and every full page of it as it was.
    assert [b.data_ptr() for b in grown[: len(first)]] == [b.data_ptr() for b in first]
    full = [0, 1, 3, 4]
    assert_same(torch.cat(first)[full], torch.cat(before)[full])
    for make in (Cache.fork, copy.deepcopy, copy.copy):
        twins = [make(cache) for cache in caches]
        assert blocks(twins[0])[0].data_ptr() == grown[0].data_ptr(), "pages are shared"
        for step in range(12):
            feed(twins, 1, 50 + step)
            feed(caches, 1, 70 + step)
        assert_same_content(*twins)
        assert_same_content(*caches)
    grown = blocks(caches[0])
    assert grown[0].data_ptr() == first[0].data_ptr()


def test_going_back_growing_again_and_shrinking():
    caches = pair()
    feed(caches, 150, 0)
    many = len(blocks(caches[0]))
    for seed, (removed, added) in enumerate([(5, 9), (20, 30), (140, 1), (10, 70)]):
        for cache in caches:
            cache.crop(-removed)
        assert_same_content(*caches)
        if removed == 140:
            assert len(blocks(caches[0])) < many // 2, "bytes go back"
        feed(caches, added, 1 + seed)
    orders = [torch.tensor([1, 0]), torch.tensor([1, 1])]
    for seed, order in enumerate(orders):
        for cache in caches:
            cache.reorder_cache(order)
        feed(caches, 3, 9 + seed)
    for cache in caches:
        cache.reset()
    feed(caches, 40, 20)


@pytest.mark.parametrize("tokens", [100, 7, 1])
def test_windows_and_long_calls(tokens):
    caches = pair("sliding_and_full")
    for seed, count in enumerate([30, 1, 1, tokens, 1, 50, 1]):
        feed(caches, count, seed)
        forks = [cache.fork() for cache in caches]
        feed(forks, 2, 90 + seed)


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
        assert len(blocks(twins[0])) > 2
        assert max(len(block) for block in blocks(twins[0])) <= 2
        assert_same_content(*twins)
        assert_same_content(twins[0], caches[1])
        feed(twins, 12, 40)
    files = [(tmp_path / f"file{i}").read_bytes() for i in range(2)]
    assert abs(len(files[0]) - len(files[1])) < 32, "they differ in the backend's name only"


def test_a_cache_that_was_read_to_the_cpu_gets_blocks_where_its_model_is(monkeypatch):
    caches = pair()
    feed(caches, 41, 0)
    loaded = pickle.loads(pickle.dumps(caches[1]))
    layer = loaded.paged_layers[0]
    assert layer.pool.addresses is None
    monkeypatch.setattr(ops, "reads_blocks", lambda backend, device: True)
    for one in loaded.paged_layers:
        one.move_to(torch.device("cpu"))
        assert one.pool.in_blocks
    assert_same_content(loaded, caches[0])
    feed([loaded, caches[0]], 9, 1)


def test_to_the_cpu_s_memory_and_back():
    caches = pair()
    feed(caches, 41, 0)
    for layer in caches[0].paged_layers:
        layer.offload()
    feed(caches, 30, 1)


def test_preallocated_caches_have_one_tensor_and_take_pages_from_blocks():
    caches = pair(max_cache_len=60)
    feed(caches, 21, 0)
    feed(caches, 3, 1)
    assert all(layer.pool.addresses is None for layer in caches[0].paged_layers)
    assert pages_of(caches[0].layers[0].keys).addresses is None


def test_handles_keep_what_they_show():
    cache, _ = pair(prefill="stored")
    key = cache.update(*torch.randn(2, BATCH, HEADS, 30, DIM), 0)[0]
    shown = key.dense().clone()
    storages = [weakref.ref(block.untyped_storage()) for block in blocks(cache)]
    cache.reset()
    assert_same(key.dense(), shown)
    gc.disable()
    try:
        del key
        assert not any(ref() for ref in storages)
    finally:
        gc.enable()


def test_bytes_are_accounted_for():
    with_blocks, plain = pair()
    feed([with_blocks, plain], 41, 0)
    found, expected = with_blocks.memory_footprint(), plain.memory_footprint()
    for name in ("pages", "scales", "used", "tokens"):
        assert found[name] == expected[name], name
    held = sum(b.nbytes for i in range(len(with_blocks.layers)) for b in blocks(with_blocks, i))
    assert found["pages"] + found["scales"] == held + sum(
        x.nbytes
        for layer in with_blocks.paged_layers
        for x in (layer.k_static_scale, layer.v_static_scale, layer.k_center)
        if x is not None
    )
    addresses = [layer.pool.addresses for layer in with_blocks.paged_layers]
    assert found["tables"] - expected["tables"] == sum(x.nbytes for x in addresses)


def test_compiled_attention_reads_blocks():
    caches = pair(prefill="stored")
    feed(caches, 30, 0)
    layer = AttentionLayer(2)
    torch._dynamo.reset()
    attend = torch.compile(fp8_paged_attention, backend="aot_eager")
    for _ in range(12):
        k, v = torch.randn(2, BATCH, HEADS, 1, DIM)
        query = torch.randn(BATCH, 2 * HEADS, 1, DIM)
        found = [
            run(layer, query, *cache.update(k, v, 0), None, scaling=0.2)[0]
            for cache, run in zip(caches, (attend, fp8_paged_attention), strict=True)
        ]
        assert_same(*found)
        for cache in caches:
            cache.update(k, v, 1)
    assert len(blocks(caches[0])) > 5
    torch._dynamo.reset()
