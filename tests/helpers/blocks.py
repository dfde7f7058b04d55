"""Conversion of pages between one block and several blocks of memory."""

import numpy as np
import torch

from hf_fp8kv.ops import Pages, StoredSide
from hf_fp8kv.ops.blocks import blocks_of, locate_pages, put_pages, take_pages


def in_blocks(pages: Pages, size: int = 3, device: torch.device | None = None) -> Pages:
    """Return the same pages on `device`, in blocks of `size` pages with unordered addresses."""
    rows, device = _rows(pages), device or pages.table.device
    width = rows.shape[1]
    # Bytes between pages decode to NaN, so that no test passes if they are read.
    blocks = [
        torch.full((min(size, len(rows) - start), width), 0xFF, dtype=torch.uint8, device=device)
        for start in range(0, len(rows), size)
    ]
    if len(blocks) > 2 and blocks[-1].shape == blocks[0].shape:
        blocks[-1], blocks[0] = blocks[0], blocks[-1]
    put_pages(blocks, np.arange(len(rows)), rows.to(device))
    k, v = (
        StoredSide(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in side))
        for side in (pages.k, pages.v)
    )
    return pages._replace(
        k=k, v=v, block=blocks[0], offsets=locate_pages(blocks), table=pages.table.to(device)
    )


def between_others(pages: Pages) -> Pages:
    """Return the same pages in one block, with other bytes between them."""
    rows = _rows(pages)
    block = torch.full((len(rows), rows.shape[1] + 48), 0xFF, dtype=torch.uint8)[:, :-48]
    block.copy_(rows)
    return pages._replace(block=block, offsets=locate_pages([block]))


def in_one_block(pages: Pages) -> Pages:
    """Return the same pages, with the same numbers, in one block."""
    return pages._replace(block=(block := _rows(pages)), offsets=locate_pages([block]))


def _rows(pages: Pages) -> torch.Tensor:
    blocks = blocks_of(pages)
    return take_pages(blocks, np.arange(sum(map(len, blocks))))
