"""Tests of pages in blocks of memory: offsets and lifetime.

In test_ops.py and test_kernels_*.py, each backend reads and writes blocks.
"""

import weakref

import pytest
import torch

from hf_fp8kv.ops.blocks import locate_pages
from hf_fp8kv.ops.page_layout import make_page_layout


@pytest.mark.usefixtures("no_garbage_collection")
def test_offsets_keep_their_blocks_alive():
    blocks = [torch.zeros(2, 64, dtype=torch.uint8) for _ in range(3)]
    references = [weakref.ref(block.untyped_storage()) for block in blocks]
    offsets = locate_pages(blocks)
    block_offsets = torch.tensor([block.data_ptr() - blocks[0].data_ptr() for block in blocks])
    assert torch.equal(offsets.view(3, 2), block_offsets[:, None] + torch.tensor([0, 64]))
    del blocks
    assert all(reference() is not None for reference in references)
    del offsets
    assert not any(reference() for reference in references), "blocks wait for the garbage collector"


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
