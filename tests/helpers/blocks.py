"""Conversion of pages between one block and several blocks of memory."""

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from hf_fp8kv.ops import Pages
from hf_fp8kv.ops.blocks import list_blocks, locate_pages, put_pages, take_pages


def split_into_blocks(
    pages: Pages, pages_per_block: int = 3, device: torch.device | None = None
) -> Pages:
    """Return the same pages on `device`, in several blocks of `pages_per_block` pages.

    The addresses of the blocks are not in page order.
    """
    rows = _read_pages(pages)
    device = device or pages.table.device
    blocks = [
        torch.empty((len(block_rows), rows.shape[1]), dtype=torch.uint8, device=device)
        for block_rows in rows.split(pages_per_block)
    ]
    if len(blocks) > 2 and blocks[-1].shape == blocks[0].shape:
        blocks[-1], blocks[0] = blocks[0], blocks[-1]
    put_pages(blocks, np.arange(len(rows)), rows.to(device))
    k, v = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (pages.k, pages.v))
    return pages._replace(
        k=k, v=v, block=blocks[0], offsets=locate_pages(blocks), table=pages.table.to(device)
    )


def separate_pages(pages: Pages) -> Pages:
    """Return the same pages in one block, with 48 bytes of 0xFF after each page."""
    rows = _read_pages(pages)
    # These bytes decode to NaN, so a test fails if they are read.
    block = torch.full((len(rows), rows.shape[1] + 48), 0xFF, dtype=torch.uint8)[:, :-48]
    block.copy_(rows)
    return pages._replace(block=block, offsets=locate_pages([block]))


def merge_blocks(pages: Pages) -> Pages:
    """Return the same pages, with the same page numbers, in one block."""
    block = _read_pages(pages)
    return pages._replace(block=block, offsets=locate_pages([block]))


def _read_pages(pages: Pages) -> torch.Tensor:
    """Return the bytes of all pages, `[num_pages, page_bytes]`, uint8."""
    blocks = list_blocks(pages)
    return take_pages(blocks, np.arange(sum(map(len, blocks))))
