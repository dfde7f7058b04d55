"""Pages in blocks of memory: a page is known by its distance from the first block.

A block is `[n, bytes]`, uint8: whole pages one after the other, as `page_layout` lays them out. No
block is ever moved or made larger. Kernels add an offset to the first block's address, other code
takes rows of blocks.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .page_layout import page_layout
from .pages import Pages, StoredSide

Ints = np.ndarray[Any, np.dtype[np.integer]]


def locate_pages(blocks: Sequence[Tensor]) -> Tensor:
    """Return how many bytes after the first block's beginning each page is, `[P]`, int64.

    The offsets of pages in several blocks keep these alive.
    """
    first = blocks[0]
    if len(blocks) == 1:
        # The offsets hold for a copy of the block, which compiled code may put in its place.
        size = first.stride(0)
        return torch.arange(0, size * len(first), size, dtype=torch.int64, device=first.device)
    numbers = [
        block.data_ptr() - first.data_ptr() + block.stride(0) * np.arange(len(block))
        for block in blocks
    ]
    offsets = upload(np.concatenate(numbers).astype(np.int64), first.device)
    vars(offsets)["blocks"] = tuple(blocks)
    return offsets


def upload(numbers: Ints, device: torch.device) -> Tensor:
    """Return the numbers on `device`, without waiting for what runs there.

    They must not change afterwards where `device` is the CPU.
    """
    # Tensors that may be written in inference mode and outside of it alike.
    with torch.inference_mode(False), torch.no_grad():
        tensor = torch.from_numpy(numbers)
        if device.type != "cuda" or not tensor.numel():
            return tensor.to(device)
        # From other memory torch copies after everything that was started before. The allocator of
        # pinned memory does not give it to anybody else before the copy is done.
        return tensor.pin_memory().to(device, non_blocking=True)


# -- pages by their numbers ----------------------------------------------------------------------


def take_pages(blocks: Sequence[Tensor], numbers: Ints | Tensor) -> Tensor:
    """Return copies of the pages `numbers`, `[n, bytes]`; a tensor only if there is one block."""
    if isinstance(numbers, Tensor) or len(blocks) == 1:
        (block,) = blocks
        return block.index_select(0, _as_index(numbers, block.device))
    rows = blocks[0].new_empty((len(numbers), blocks[0].shape[1]))
    for block, places, there in _locate(blocks, numbers):
        rows[places] = block[there]
    return rows


def put_pages(blocks: Sequence[Tensor], numbers: Ints | Tensor, rows: Tensor) -> None:
    """Write `rows`, `[n, bytes]`, to the pages `numbers`; a tensor only if there is one block."""
    if isinstance(numbers, Tensor) or len(blocks) == 1:
        (block,) = blocks
        block.index_copy_(0, _as_index(numbers, block.device), rows)
        return
    for block, places, there in _locate(blocks, numbers):
        block[there] = rows[places]


def _as_index(numbers: Ints | Tensor, device: torch.device) -> Tensor:
    return numbers if isinstance(numbers, Tensor) else upload(numbers.astype(np.int64), device)


def _locate(blocks: Sequence[Tensor], numbers: Ints) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield each block with some of the pages, and their places in `numbers` and in the block."""
    ends = np.cumsum([len(block) for block in blocks])
    which = np.searchsorted(ends, numbers, side="right")
    for i in np.unique(which):
        places = np.flatnonzero(which == i)
        there = numbers[places] - (ends[i] - len(blocks[i]))
        device = blocks[i].device
        yield blocks[i], upload(places, device), upload(there.astype(np.int64), device)


# -- pages of a table ----------------------------------------------------------------------------


def read_rows(pages: Pages, first: int, last: int) -> Tensor:
    """Return copies of the logical pages `first` to `last - 1` of each sequence, `[B * n, bytes]`.

    A missing page is read as page 0. Several blocks make this wait for the device.
    """
    number = pages.table[:, first:last].clamp(min=0).flatten()
    blocks = blocks_of(pages)
    if len(blocks) == 1:
        return blocks[0].index_select(0, number)
    return take_pages(blocks, number.cpu().numpy())


def split_places(
    pages: Pages, number: Tensor, exists: Tensor
) -> Iterator[tuple[Tensor, Tensor, tuple[Tensor, ...]]]:
    """Yield each block that has some of the pages, their numbers there, and which they are.

    `number`, `exists`: `[B, T]`. This waits for a GPU.
    """
    chosen = exists.nonzero(as_tuple=True)
    for block, places, there in _locate(blocks_of(pages), number[chosen].cpu().numpy()):
        yield block, there, tuple(axis[places] for axis in chosen)


def blocks_of(pages: Pages) -> tuple[Tensor, ...]:
    """Return all blocks of the pages."""
    blocks: tuple[Tensor, ...] = vars(pages.offsets).get("blocks", (pages.block,))
    return blocks


def pack_pages(
    k: StoredSide, k_codes: Tensor, v: StoredSide, v_codes: Tensor, token_scales: Tensor | None,
    table: Tensor,
) -> Pages:  # fmt: skip
    """Return pages with copies of codes `[P, Hkv, S, Dk]`, `[P, Hkv, Dv, S]` and dynamic scales."""
    count, heads, slots, _ = map(int, k_codes.shape)
    has_scales = token_scales is not None
    layout = page_layout(
        heads, slots, k.head_dim, v.head_dim, k_codes.dtype, v_codes.dtype, has_scales
    )
    block = k_codes.new_zeros((count, layout.size), dtype=torch.uint8)
    for name, part in layout.split(block).items():
        codes = {"k": k_codes, "v": v_codes, "token_scales": token_scales}[name]
        assert codes is not None
        part.copy_(codes)
    return Pages(
        k, v, block, table, locate_pages([block]), heads, slots, k_codes.dtype, v_codes.dtype,
        has_scales,
    )  # fmt: skip
