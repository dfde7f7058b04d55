"""Tests of pages in blocks of memory: offsets and lifetime.

In test_ops.py and test_kernels_*.py, each backend reads and writes blocks.
"""

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from hf_fp8kv.ops.blocks import locate_pages, put_pages, take_pages, upload
from hf_fp8kv.ops.page_layout import make_page_layout
from tests.helpers.assertions import assert_same


def test_offsets_keep_their_blocks_alive():
    blocks = [torch.zeros(2, 64, dtype=torch.uint8) for _ in range(3)]
    memory_refs = [weakref.ref(block.untyped_storage()) for block in blocks]
    offsets = locate_pages(blocks)
    assert offsets.tolist() == [
        block.data_ptr() - blocks[0].data_ptr() + 64 * i for block in blocks for i in range(2)
    ]
    del blocks
    gc.disable()
    try:
        assert all(ref() is not None for ref in memory_refs)
        del offsets
        assert not any(ref() for ref in memory_refs), "without waiting for the garbage collector"
    finally:
        gc.enable()


def test_pages_are_read_and_written_by_number():
    blocks = [torch.randint(0, 256, (n, 16)).byte() for n in (3, 1, 4)]
    rows = torch.cat(blocks)
    numbers = np.array([7, 0, 3, 3, 2, 4])
    assert_same(take_pages(blocks, numbers), rows[numbers])
    new_rows = torch.randint(0, 256, (3, 16)).byte()
    rows[[5, 2, 3]] = new_rows
    put_pages(blocks, np.array([5, 2, 3]), new_rows)
    assert_same(torch.cat(blocks), rows)


@pytest.mark.parametrize("sizes", [(2, 16, 5, 3), (8, 64, 128, 128), (1, 8, 1, 1)])
def test_regions_of_a_page_do_not_overlap_and_are_aligned(sizes):
    layout = make_page_layout(*sizes, torch.uint8, torch.bfloat16, True)
    block = torch.zeros(3, layout.size, dtype=torch.uint8)
    for name, region in layout.split(block).items():
        assert layout.offsets[name] % 16 == 0
        region.view(torch.uint8).add_(1)
        assert region.data_ptr() == block.data_ptr() + layout.offsets[name]
    assert block.max() == 1, "a byte is in two regions"
    heads, slots, k_dim, v_dim = sizes
    assert block.sum() == 3 * heads * slots * (k_dim + 2 * v_dim + 4)
    assert layout.size % 16 == 0


def test_numbers_go_to_a_gpu_from_pinned_memory(monkeypatch):
    """A copy from pageable memory would wait for all earlier work."""
    calls: list[Any] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        calls.append("pinned")
        return tensor

    def to(tensor: torch.Tensor, device: torch.device, **options: Any) -> torch.Tensor:
        calls.append((device, options))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to)
    cuda = torch.device("cuda", 0)
    upload(np.arange(3), cuda)
    assert calls == ["pinned", (cuda, {"non_blocking": True})]
