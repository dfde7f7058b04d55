"""Pages in blocks of memory, for pools that grow: a page is known by its address.

A block is `[n, bytes]`, uint8: whole pages one after the other, each with its K, its V and its
dynamic scales. No block is ever moved or made larger. Kernels read `Pages.addresses`; for code that
needs tensors of pages, `copy_side_by_side` makes some.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .page_bytes import layout_of
from .pages import Pages

Ints = npt.NDArray[np.integer]


def address_pages(blocks: Sequence[Tensor]) -> Tensor:
    """Return the address of each page, `[P]`, int64, on the blocks' device.

    The tensor keeps the blocks alive: whoever has the addresses can read the pages.
    """
    numbers = [block.data_ptr() + block.stride(0) * np.arange(len(block)) for block in blocks]
    addresses = upload(np.concatenate(numbers).astype(np.int64), blocks[0].device)
    vars(addresses)["blocks"] = tuple(blocks)
    return addresses


def upload(numbers: Ints, device: torch.device) -> Tensor:
    """Return the numbers on `device`, without waiting for what runs there.

    They must not change afterwards where `device` is the CPU.
    """
    # Tensors that may be written in inference mode and outside of it alike.
    with torch.inference_mode(False), torch.no_grad():
        tensor = torch.from_numpy(numbers)
        if device.type != "cuda":
            return tensor.to(device)
        # From other memory torch copies after everything that was started before. The allocator of
        # pinned memory does not give it to anybody else before the copy is done.
        return tensor.pin_memory().to(device, non_blocking=True)


def reads_blocks(backend: str, device: torch.device) -> bool:
    """Return whether a pool that grows is made of blocks on `device`, for `backend`.

    On a CPU what is given back is free at once, and kernels there want one tensor.
    """
    return device.type != "meta" and (backend == "triton" or device.type != "cpu")


# -- pages by their numbers ----------------------------------------------------------------------


def take_pages(blocks: Sequence[Tensor], numbers: Ints) -> Tensor:
    """Return copies of the pages `numbers`, `[n, bytes]`."""
    rows = blocks[0].new_empty((len(numbers), blocks[0].shape[1]))
    for block, places, there in _locate(blocks, numbers):
        rows[places] = block[there]
    return rows


def put_pages(blocks: Sequence[Tensor], numbers: Ints, rows: Tensor) -> None:
    """Write `rows`, `[n, bytes]`, to the pages `numbers`."""
    for block, places, there in _locate(blocks, numbers):
        block[there] = rows[places]


def _locate(blocks: Sequence[Tensor], numbers: Ints) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield each block with some of the pages, and their places in `numbers` and in the block."""
    ends = np.cumsum([len(block) for block in blocks])
    which = np.searchsorted(ends, numbers, side="right")
    for i in np.unique(which):
        places = np.flatnonzero(which == i)
        there = numbers[places] - (ends[i] - len(blocks[i]))
        device = blocks[i].device
        yield blocks[i], upload(places, device), upload(there.astype(np.int64), device)


# -- for code that takes tensors of pages --------------------------------------------------------


def copy_side_by_side(pages: Pages, first: int, last: int) -> Pages:
    """Return copies of the logical pages `first` to `last - 1`, without gaps, in a table from 0.

    Pages that there are none of stay without one. Waits for the device.
    """
    numbers = pages.table[:, first:last].cpu().numpy()
    rows = take_pages(_blocks_of(pages), np.maximum(numbers, 0).ravel())
    table = np.where(numbers < 0, -1, np.arange(numbers.size).reshape(numbers.shape))
    parts = {name: part.contiguous() for name, part in layout_of(pages).split(rows).items()}
    return pages._replace(
        k=pages.k._replace(codes=parts["k"]),
        v=pages.v._replace(codes=parts["v"]),
        token_scales=parts.get("token_scales"),
        table=upload(table.astype(np.int32), pages.table.device),
        addresses=None,
    )


def write_back(pages: Pages, first: int, copies: Pages) -> None:
    """Write the copies that `copy_side_by_side` made from logical page `first` on."""
    last = first + copies.table.shape[1]
    numbers = pages.table[:, first:last].cpu().numpy().ravel()
    rows = copies.k.codes.new_zeros((len(numbers), layout_of(pages).size), dtype=torch.uint8)
    tensors = {"k": copies.k.codes, "v": copies.v.codes, "token_scales": copies.token_scales}
    for name, part in layout_of(pages).split(rows).items():
        stored = tensors[name]
        assert stored is not None
        part.copy_(stored)
    exists = np.flatnonzero(numbers >= 0)
    put_pages(_blocks_of(pages), numbers[exists], rows[upload(exists, rows.device)])


def _blocks_of(pages: Pages) -> tuple[Tensor, ...]:
    assert pages.addresses is not None
    blocks: tuple[Tensor, ...] = vars(pages.addresses)["blocks"]
    return blocks
