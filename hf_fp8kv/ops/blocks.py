"""Pages in blocks of memory. A page is identified by its offset from the first block.

A block is `[n, bytes]`, uint8: consecutive pages in the layout of `page_layout`. A block never
moves or grows. Kernels add a page's offset to the first block's address. Other code indexes the
rows of blocks.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .pages import Pages

IntArray = np.ndarray[Any, np.dtype[np.integer]]


def locate_pages(blocks: Sequence[Tensor]) -> Tensor:
    """Return the distance of each page from the start of the first block, in bytes, `[P]`, int64.

    If there are several blocks, the result keeps them alive.
    """
    first_block = blocks[0]
    if len(blocks) == 1:
        # These offsets contain no addresses, so they stay valid if compiled code copies the block.
        stride = first_block.stride(0)
        return torch.arange(
            0, stride * len(first_block), stride, dtype=torch.int64, device=first_block.device
        )
    block_offsets = [
        block.data_ptr() - first_block.data_ptr() + block.stride(0) * np.arange(len(block))
        for block in blocks
    ]
    offsets = upload(np.concatenate(block_offsets).astype(np.int64), first_block.device)
    vars(offsets)["blocks"] = tuple(blocks)
    return offsets


def upload(integers: IntArray, device: torch.device) -> Tensor:
    """Copy integers to `device` without waiting for work that runs there.

    On the CPU the result shares memory with `integers`, which must not change afterwards.
    """
    # A tensor that is created here can be written both in inference mode and outside it.
    with torch.inference_mode(False), torch.no_grad():
        tensor = torch.from_numpy(integers)
        if device.type != "cuda" or not tensor.numel():
            return tensor.to(device)
        # A copy from pageable memory would wait for all earlier work. The allocator of pinned
        # memory reuses this memory only after the copy has finished.
        return tensor.pin_memory().to(device, non_blocking=True)


def take_pages(blocks: Sequence[Tensor], page_numbers: IntArray | Tensor) -> Tensor:
    """Return copies of pages, `[n, bytes]`. With several blocks, the numbers are an array."""
    if isinstance(page_numbers, Tensor) or len(blocks) == 1:
        (block,) = blocks
        return block.index_select(0, _to_index(page_numbers, block.device))
    rows = blocks[0].new_empty((len(page_numbers), blocks[0].shape[1]))
    for block, entries, block_rows in _find_rows(blocks, page_numbers):
        rows[entries] = block[block_rows]
    return rows


def put_pages(blocks: Sequence[Tensor], page_numbers: IntArray | Tensor, rows: Tensor) -> None:
    """Write `rows`, `[n, bytes]`, to pages. With several blocks, the numbers are an array."""
    if isinstance(page_numbers, Tensor) or len(blocks) == 1:
        (block,) = blocks
        block.index_copy_(0, _to_index(page_numbers, block.device), rows)
        return
    for block, entries, block_rows in _find_rows(blocks, page_numbers):
        block[block_rows] = rows[entries]


def _to_index(integers: IntArray | Tensor, device: torch.device) -> Tensor:
    return integers if isinstance(integers, Tensor) else upload(integers.astype(np.int64), device)


def _find_rows(
    blocks: Sequence[Tensor], page_numbers: IntArray
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield each block with pages, the entries of `page_numbers` in it, and their rows in it."""
    stops = np.cumsum([len(block) for block in blocks])
    block_indices = np.searchsorted(stops, page_numbers, side="right")
    for block_index in np.unique(block_indices):
        block = blocks[block_index]
        entries = np.flatnonzero(block_indices == block_index)
        rows = page_numbers[entries] - (stops[block_index] - len(block))
        yield block, upload(entries, block.device), upload(rows.astype(np.int64), block.device)


def read_rows(pages: Pages, start: int, stop: int) -> Tensor:
    """Return copies of the logical pages `start` to `stop - 1` of each sequence, `[B * n, bytes]`.

    A missing page is read as page 0. With several blocks, this synchronizes with the device.
    """
    page_numbers = pages.table[:, start:stop].clamp(min=0).flatten()
    blocks = list_blocks(pages)
    if len(blocks) == 1:
        return blocks[0].index_select(0, page_numbers)
    return take_pages(blocks, page_numbers.cpu().numpy())


def group_by_block(
    pages: Pages, page_numbers: Tensor, exists: Tensor
) -> Iterator[tuple[Tensor, Tensor, tuple[Tensor, ...]]]:
    """Yield each block with pages, the rows of these pages in the block, and their tokens.

    The tokens are an index of `[B, T]`.

    Args:
        pages: The pages.
        page_numbers: Page number of each token, `[B, T]`.
        exists: Whether each page exists, `[B, T]`, bool. The numbers of missing pages are ignored.

    This synchronizes with the device.
    """
    token_index = exists.nonzero(as_tuple=True)
    existing_pages = page_numbers[token_index].cpu().numpy()
    for block, entries, block_rows in _find_rows(list_blocks(pages), existing_pages):
        yield block, block_rows, tuple(axis[entries] for axis in token_index)


def list_blocks(pages: Pages) -> tuple[Tensor, ...]:
    """Return all blocks of the pages."""
    return getattr(pages.offsets, "blocks", (pages.block,))
