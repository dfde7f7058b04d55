"""Tests of the pages of one layer: shapes, growth, copies and sizes."""

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_fp8kv import FP8PagedCache, ops
from hf_fp8kv.cache.encoding import Encoding
from hf_fp8kv.formats import LayerPlan, SidePlan
from hf_fp8kv.paging import memory_blocks
from hf_fp8kv.paging.page_allocator import PageAllocator, PageBudget
from hf_fp8kv.paging.page_pool import PagePool
from tests.helpers.assertions import assert_same
from tests.helpers.counting import BytesWritten
from tests.helpers.grids import pairwise

PAGE_SIZE = 16
NUM_HEADS = 2
K_DIM = 5
V_DIM = 3


def make_states(
    dtype: torch.dtype, num_heads: int = NUM_HEADS, dims: tuple[int, int] = (K_DIM, V_DIM)
) -> list[torch.Tensor]:
    """Return the key and the value of one token."""
    return [torch.ones(1, num_heads, 1, dim, dtype=dtype) for dim in dims]


def make_pool(
    key: str = "fp8_e4m3",
    value: str = "fp8_e4m3",
    num_pages: int = 4,
    *,
    is_dynamic: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | None = None,
    single_block: bool = False,
) -> PagePool:
    pool = PagePool(PAGE_SIZE, LayerPlan(SidePlan(key), SidePlan(value)), is_dynamic)
    states = [x.to(device) for x in make_states(dtype)]
    pool.allocate(*states, num_pages, single_block=single_block)
    return pool


@pytest.fixture(autouse=True)
def _limit_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit blocks to one to three pages."""
    monkeypatch.setattr(memory_blocks, "BLOCK_BYTES", 1200)


for_each_layout = pytest.mark.parametrize("single_block", [True, False], ids=["single", "several"])


def read_pages(pool: PagePool) -> dict[str, torch.Tensor]:
    """Return copies of all pages, by the name of the tensor."""
    return pool.layout.split(pool.memory.take(np.arange(len(pool.memory))))


def fill_pool(pool: PagePool) -> dict[str, torch.Tensor]:
    """Fill all pages with random values, and return copies of them by the name of the tensor."""
    rows = pool.memory.take(np.arange(len(pool.memory)))
    for tensor in pool.layout.split(rows).values():
        tensor.copy_(torch.randint(1, 250, tensor.shape))
    pool.memory.put(np.arange(len(rows)), rows)
    return read_pages(pool)


def list_addresses(pool: PagePool) -> list[int]:
    return [block.data_ptr() for block in pool.blocks.tensors]


def assert_holds(pool: PagePool, expected: dict[str, torch.Tensor]) -> None:
    """Assert that the first pages equal `expected`, and that all other pages are zero."""
    actual = read_pages(pool)
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        num_pages = len(expected[name])
        assert_same(tensor[:num_pages].cpu(), expected[name].cpu(), name)
        assert not tensor[num_pages:].any(), name


# Each case has the formats of K and V, whether scales are dynamic, and the names of tensors. A pool
# treats all formats of 8 bits in the same way.
CASES = {
    "8 bits": ("fp8_e4m3", "fp8_e5m2", True, "k v token_scales"),
    "8 bits, static": ("int8", "fp8_e4m3", False, "k v"),
    "auto keys": ("auto", "fp8_e4m3", True, "k v token_scales"),
    "auto values, static": ("fp8_e4m3", "auto", False, "k v"),
    "auto": ("auto", "auto", True, "k v"),
}
for_each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
# The dtype determines the size of "auto" values, and the layout determines all offsets.
SHAPE_CASES = pairwise(
    list(CASES.values()), [torch.bfloat16, torch.float16, torch.float32], [False, True]
)


@pytest.mark.parametrize(("case", "dtype", "single_block"), SHAPE_CASES)
def test_pages_have_the_expected_shapes_dtypes_and_bytes(case, dtype, device, single_block):
    key, value, is_dynamic, names = case
    pool = make_pool(
        key, value, 7, is_dynamic=is_dynamic, dtype=dtype, device=device, single_block=single_block
    )
    pages = read_pages(pool)
    assert " ".join(pages) == names
    assert pages["k"].shape == (7, NUM_HEADS, PAGE_SIZE, K_DIM)
    assert pages["v"].shape == (7, NUM_HEADS, V_DIM, PAGE_SIZE), "V is stored transposed"
    assert pages["k"].dtype == pool.stored_k_dtype == (dtype if key == "auto" else torch.uint8)
    assert pages["v"].dtype == pool.stored_v_dtype == (dtype if value == "auto" else torch.uint8)
    if "token_scales" in pages:
        assert pages["token_scales"].shape == (7, NUM_HEADS, PAGE_SIZE, 2)
        assert pages["token_scales"].dtype == torch.bfloat16
    assert all(tensor.device.type == device.type for tensor in pages.values())
    assert not any(tensor.any() for tensor in pages.values()), "new pages are zero"
    assert (len(pool.memory), pool.is_allocated) == (7, True)
    page_bytes = sum(tensor[:1].nbytes for tensor in pages.values())
    assert page_bytes <= pool.layout.size < page_bytes + 48
    footprint = pool.memory_footprint()
    assert footprint["pages"] + footprint["scales"] == 7 * pool.layout.size


@for_each_layout
@for_each_case
def test_growing_keeps_all_pages_and_zeroes_new_pages(case, device, single_block):
    pool = PagePool(PAGE_SIZE, LayerPlan(SidePlan("auto"), SidePlan("auto")), True)
    assert (len(pool.memory), pool.is_allocated) == (0, False)
    key, value, is_dynamic, _ = case
    options = {"is_dynamic": is_dynamic, "device": device, "single_block": single_block}
    pool = make_pool(key, value, 0, **options)
    pool.memory.grow(3)
    old_pages, addresses = fill_pool(pool), list_addresses(pool)
    for num_pages in (0, 2, 3):  # a pool never shrinks, and stays in place
        pool.memory.grow(num_pages)
        assert len(pool.memory) == 3
        assert list_addresses(pool) == addresses
    pool.memory.grow(8)
    assert len(pool.memory) == 8
    assert single_block or list_addresses(pool)[: len(addresses)] == addresses, "a block was moved"
    assert_holds(pool, old_pages)


class Allocations(TorchDispatchMode):
    """Records bytes of zeroed tensors: the largest tensor, the current total, and the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.max_bytes = self.current_bytes = self.peak_bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor) and "zeros" in str(function):
            num_bytes = output.untyped_storage().nbytes()
            self.max_bytes = max(self.max_bytes, num_bytes)
            self.current_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.current_bytes)
            weakref.finalize(output.untyped_storage(), self._count_freed, num_bytes)
        return output

    def _count_freed(self, num_bytes: int) -> None:
        self.current_bytes -= num_bytes


def test_growing_allocates_one_block_at_a_time(monkeypatch):
    page_bytes = make_pool().layout.size
    monkeypatch.setattr(memory_blocks, "BLOCK_BYTES", 8 * page_bytes)
    allocator = PageAllocator(PageBudget(PAGE_SIZE))
    with Allocations() as allocations, BytesWritten() as counter:
        pool = make_pool(num_pages=0)
        for _ in range(300):
            allocator.allocate(1)
            pool.memory.grow(allocator.capacity)
            # Each growth writes an address of 8 bytes per page.
            assert allocations.current_bytes == len(pool.memory) * page_bytes
    assert allocations.max_bytes <= 8 * page_bytes
    assert allocations.peak_bytes == len(pool.memory) * page_bytes
    assert len(pool.memory) <= 300 * 33 // 32 + 4
    address_bytes = 8 * len(pool.memory) * 300
    assert counter.total <= len(pool.memory) * page_bytes + address_bytes, "bytes were moved"
    # Compaction also allocates one block at a time, and frees the old blocks.
    with allocations:
        allocations.max_bytes = 0
        pool.memory.keep_pages(np.arange(0, 300, 5, dtype=np.int32))
    assert allocations.max_bytes <= 8 * page_bytes
    assert allocations.current_bytes == 60 * page_bytes


@pytest.mark.gpu
def test_a_move_to_the_cpu_waits_for_the_copy():
    pool = PagePool(64, LayerPlan(SidePlan("fp8"), SidePlan("fp8")), False)
    states = torch.ones(1, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    pool.allocate(states, states, 2048)
    x = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    # The copy to the CPU waits for this work on the GPU. A read on the CPU would not wait.
    for _ in range(20):
        x = x @ x.clamp(-1, 1)
    pool.blocks.tensors[0].fill_(7)
    pool.memory.move(torch.device("cpu"))
    assert int(pool.blocks.tensors[0].min()) == 7


# -- cached pages ----------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[PagePool], None]] = {
    "nothing": lambda pool: None,
    "grow": lambda pool: pool.memory.grow(40),
    "keep": lambda pool: pool.memory.keep_pages(np.array([1, 3])),
    "free": lambda pool: pool.memory.free(),
}


def make_encoding(plan: tuple[str, str], k_scale: Any, v_scale: Any, k_center: Any) -> Encoding:
    encoding = Encoding(0, FP8PagedCache(plan=plan).options)
    encoding.k_scale, encoding.v_scale, encoding.k_center = k_scale, v_scale, k_center
    return encoding


@for_each_layout
@pytest.mark.parametrize("change", CHANGES)
def test_cached_pages_have_the_current_tensors(change, single_block):
    """Cached `Pages` contain the current addresses, and keep no freed block alive."""
    pool = make_pool("auto", "auto", single_block=single_block, dtype=torch.float32)
    table = torch.tensor([[1, 0]], dtype=torch.int32)
    scales = torch.ones(NUM_HEADS, K_DIM), torch.ones(NUM_HEADS, V_DIM)
    encoding = make_encoding(("auto", "auto"), *scales, torch.zeros(NUM_HEADS, K_DIM))
    first_pages = encoding.make_pages(pool, table)
    old_pages, old_block = fill_pool(pool), weakref.ref(pool.blocks.tensors[0].untyped_storage())
    del first_pages
    CHANGES[change](pool)
    is_kept = change == "nothing" or (change == "grow" and not single_block)
    assert (old_block() is not None) == is_kept
    if not pool.is_allocated:
        return
    listed_keys = old_pages["k"][[3, 1] if change == "keep" else [1, 0]]
    lengths = torch.tensor([2 * PAGE_SIZE], dtype=torch.int32)
    for _ in range(2):
        pages = encoding.make_pages(pool, table)
        dense = ops.gather(pages, lengths, "k", 0, 2 * PAGE_SIZE, torch.float32, False, "reference")
        assert_same(dense[0], listed_keys.transpose(0, 1).flatten(1, 2))
    # If tensors change, the `Pages` change.
    new_tensors = tuple(x + 1 for x in (*scales, encoding.k_center))
    encoding.k_scale, encoding.v_scale, encoding.k_center = new_tensors
    pages = encoding.make_pages(pool, other_table := table.flip(1))
    tensors = pages.table, pages.k.static_scale, pages.v.static_scale, pages.k.center
    assert all(x is y for x, y in zip(tensors, (other_table, *new_tensors), strict=True))
    pages = make_encoding(("fp8_e4m3", "int8"), *new_tensors).make_pages(pool, other_table)
    assert (pages.k.format, pages.v.format) == ("fp8_e4m3", "int8")


# -- copies from another pool -------------------------------------------------------------------
