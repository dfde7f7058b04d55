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

from ..formats import SidePlan
from .page_layout import make_page_layout, pack_codes
from .pages import Pages, StoredSide

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
    # The tensor can then be written both in inference mode and outside it.
    with torch.inference_mode(False), torch.no_grad():
        tensor = torch.from_numpy(integers)
        if device.type != "cuda" or not tensor.numel():
            return tensor.to(device)
        # A copy from pageable memory would wait for all earlier work. The allocator of pinned
        # memory reuses this memory only after the copy has finished.
        return tensor.pin_memory().to(device, non_blocking=True)


def take_pages(blocks: Sequence[Tensor], numbers: IntArray | Tensor) -> Tensor:
    """Return copies of pages, `[n, bytes]`. `numbers` is an array if there are several blocks."""
    if isinstance(numbers, Tensor) or len(blocks) == 1:
        (block,) = blocks
        return block.index_select(0, _to_index(numbers, block.device))
    rows = blocks[0].new_empty((len(numbers), blocks[0].shape[1]))
    for block, indices, row_indices in _find_rows(blocks, numbers):
        rows[indices] = block[row_indices]
    return rows


def put_pages(blocks: Sequence[Tensor], numbers: IntArray | Tensor, rows: Tensor) -> None:
    """Write `rows`, `[n, bytes]`, to pages. `numbers` is an array if there are several blocks."""
    if isinstance(numbers, Tensor) or len(blocks) == 1:
        (block,) = blocks
        block.index_copy_(0, _to_index(numbers, block.device), rows)
        return
    for block, indices, row_indices in _find_rows(blocks, numbers):
        block[row_indices] = rows[indices]


def _to_index(numbers: IntArray | Tensor, device: torch.device) -> Tensor:
    return numbers if isinstance(numbers, Tensor) else upload(numbers.astype(np.int64), device)


def _find_rows(
    blocks: Sequence[Tensor], numbers: IntArray
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield each block with pages, and the indices of its pages in `numbers` and in the block."""
    ends = np.cumsum([len(block) for block in blocks])
    block_numbers = np.searchsorted(ends, numbers, side="right")
    for i in np.unique(block_numbers):
        indices = np.flatnonzero(block_numbers == i)
        row_indices = numbers[indices] - (ends[i] - len(blocks[i]))
        device = blocks[i].device
        yield blocks[i], upload(indices, device), upload(row_indices.astype(np.int64), device)


def read_rows(pages: Pages, start: int, stop: int) -> Tensor:
    """Return copies of the logical pages `start` to `stop - 1` of each sequence, `[B * n, bytes]`.

    A missing page is read as page 0. With several blocks, this synchronizes with the device.
    """
    numbers = pages.table[:, start:stop].clamp(min=0).flatten()
    blocks = list_blocks(pages)
    if len(blocks) == 1:
        return blocks[0].index_select(0, numbers)
    return take_pages(blocks, numbers.cpu().numpy())


def group_by_block(
    pages: Pages, numbers: Tensor, exists: Tensor
) -> Iterator[tuple[Tensor, Tensor, tuple[Tensor, ...]]]:
    """Yield each block with pages, and the pages' indices in the block and in `[B, T]`.

    Args:
        pages: The pages.
        numbers: Page numbers, `[B, T]`.
        exists: Whether each page exists, `[B, T]`, bool. The numbers of missing pages are ignored.

    This synchronizes with the device.
    """
    token_index = exists.nonzero(as_tuple=True)
    existing_pages = numbers[token_index].cpu().numpy()
    for block, indices, row_indices in _find_rows(list_blocks(pages), existing_pages):
        yield block, row_indices, tuple(axis[indices] for axis in token_index)


def list_blocks(pages: Pages) -> tuple[Tensor, ...]:
    """Return all blocks of the pages."""
    blocks: tuple[Tensor, ...] = getattr(pages.offsets, "blocks", (pages.block,))
    return blocks


def pack_pages(
    k: StoredSide,
    k_codes: Tensor,
    v: StoredSide,
    v_codes: Tensor,
    token_scales: Tensor | None,
    table: Tensor,
) -> Pages:
    """Copy codes `[P, Hkv, S, Dk]` and `[P, Hkv, Dv, S]`, and dynamic scales, into new pages."""
    num_pages, num_heads, page_size, _ = map(int, k_codes.shape)
    k_dtype = SidePlan(k.format).find_dtype(k_codes.dtype)
    v_dtype = SidePlan(v.format).find_dtype(v_codes.dtype)
    has_scales = token_scales is not None
    layout = make_page_layout(
        num_heads, page_size, k.head_dim, v.head_dim, k_dtype, v_dtype, has_scales
    )
    block = k_codes.new_zeros((num_pages, layout.size), dtype=torch.uint8)
    regions = layout.split(block)
    regions["k"].copy_(pack_codes(k_codes, k_dtype))
    regions["v"].copy_(pack_codes(v_codes.mT, v_dtype).mT)
    if token_scales is not None:
        regions["token_scales"].copy_(token_scales)
    return Pages(
        k, v, block, table, locate_pages([block]), num_heads, page_size, k_dtype, v_dtype,
        has_scales,
    )  # fmt: skip
