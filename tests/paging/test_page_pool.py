"""Tests of the pages of one layer: growth without copies, and a move to host memory."""

import numpy as np
import pytest
import torch

from hf_fp8kv.formats import LayerPlan, SidePlan
from hf_fp8kv.paging import memory_blocks
from hf_fp8kv.paging.page_allocator import PageAllocator, PageBudget
from hf_fp8kv.paging.page_pool import PagePool
from tests.helpers.counting import WrittenBytesCounter

PAGE_SIZE = 16


def test_growing_allocates_one_block_at_a_time(monkeypatch):
    pool = PagePool(PAGE_SIZE, LayerPlan(SidePlan("fp8"), SidePlan("fp8")), True)
    pool.allocate(*torch.ones(2, 1, 2, 1, 5), 0)
    page_bytes = pool.layout.size
    monkeypatch.setattr(memory_blocks, "BLOCK_BYTES", 8 * page_bytes)
    allocator = PageAllocator(PageBudget(PAGE_SIZE))
    with WrittenBytesCounter() as counter:
        for _ in range(300):
            allocator.allocate(1)
            pool.memory.grow(allocator.capacity)
    num_pages = len(pool.memory)
    assert num_pages <= 300 * 33 // 32 + 4
    # Each growth writes an address of 8 bytes per page.
    assert counter.num_bytes <= num_pages * page_bytes + 8 * num_pages * 300, "bytes were moved"
    for num_kept in (num_pages, 60):
        block_bytes = [block.nbytes for block in pool.blocks.tensors]
        assert max(block_bytes) <= 8 * page_bytes
        assert sum(block_bytes) == num_kept * page_bytes
        pool.memory.keep_pages(np.arange(0, 300, 5, dtype=np.int32))


@pytest.mark.gpu
def test_a_move_to_the_cpu_waits_for_the_copy():
    pool = PagePool(64, LayerPlan(SidePlan("fp8"), SidePlan("fp8")), False)
    states = torch.ones(1, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    pool.allocate(states, states, 2048)
    product = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    # The copy to the CPU waits for this work on the GPU. A read on the CPU would not wait.
    for _ in range(20):
        product = product @ product.clamp(-1, 1)
    pool.blocks.tensors[0].fill_(7)
    pool.memory.move(torch.device("cpu"))
    assert int(pool.blocks.tensors[0].min()) == 7
