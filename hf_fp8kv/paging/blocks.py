"""Blocks: the memory of a pool's pages, to which growing adds."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from ..formats import LayerPlan
from ..ops import Pages
from ..ops.blocks import Ints as Numbers
from ..ops.blocks import locate_pages, put_pages, take_pages

# Bytes of a block, at most, if a page is not larger: what a pool asks memory for at a time.
BLOCK_BYTES = 16 << 20

_NO_OFFSETS = torch.empty(0, dtype=torch.int64, device="cpu")


class Blocks:
    """A list of blocks `[n, bytes]`, uint8, of whole pages, which are numbered from 0.

    Attributes:
        size: bytes of a page.
        tensors: the blocks, one without pages if there are none; empty before `allocate`.
        offsets: `[P]`, int64, see `locate_pages`.
        in_one: whether all pages stay in one block, as compiled code needs them.
        pinned: whether blocks are in pinned memory of the host.
        record: a plan, and the pages as operations take them under it, or None. It keeps blocks
            alive, and is dropped when they are replaced.
    """

    size: int
    tensors: list[torch.Tensor]
    offsets: torch.Tensor
    record: tuple[LayerPlan, Pages] | None

    def __init__(self) -> None:
        self.in_one = self.pinned = False
        self.free()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "record": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.is_allocated:
            self._use(self.tensors)  # copied blocks lie elsewhere

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def is_allocated(self) -> bool:
        """Whether there are pages, which may be 0."""
        # `bool` of a list would break the graph of a compiled step with torch 2.11.
        return len(self.tensors) > 0

    def allocate(
        self, size: int, pages: int, device: torch.device, *, in_one: bool = False,
        pinned: bool = False,
    ) -> None:  # fmt: skip
        """Make `pages` zeroed pages of `size` bytes."""
        self.size, self.in_one, self.pinned = size, in_one, pinned
        self._use(self._new(pages, device))

    def free(self) -> None:
        """Free the bytes; `allocate` brings new ones."""
        self.tensors, self.record = [], None
        self.offsets = _NO_OFFSETS

    def _use(self, tensors: list[torch.Tensor]) -> None:
        offsets = locate_pages(tensors)
        # No call between the three: an interrupt comes before or after all of them.
        self.tensors, self.offsets, self.record = tensors, offsets, None

    def _new(self, pages: int, device: torch.device) -> list[torch.Tensor]:
        sizes = [pages] if self.in_one or not pages else self._cut(pages)
        return [
            zeros((count, self.size), torch.uint8, device, pinned=self.pinned) for count in sizes
        ]

    def _cut(self, pages: int) -> list[int]:
        """Return the sizes of parts of `pages` pages that have at most `BLOCK_BYTES`."""
        most = max(1, BLOCK_BYTES // self.size)
        return [min(most, pages - start) for start in range(0, pages, most)]

    def grow(self, pages: int) -> None:
        """Make room for `pages` pages; the content stays, new pages are zero.

        Another block is added, and no byte moves, unless all pages are in one.
        """
        more = pages - len(self)
        if more > 0 and self.in_one:
            self.keep(np.arange(pages))
        elif more > 0:
            old = [block for block in self.tensors if len(block)]
            self._use([*old, *self._new(more, self.tensors[0].device)])

    def take(self, pages: Numbers | torch.Tensor) -> torch.Tensor:
        """Return copies of pages, `[n, bytes]`; a tensor of numbers only if there is one block."""
        return take_pages(self.tensors, pages)

    def put(self, pages: Numbers | torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows as `take` returns them to pages."""
        put_pages(self.tensors, pages, rows)

    def copy(self, sources: Numbers, destinations: Numbers) -> None:
        """Copy pages; none is both a source and a destination."""
        start = 0
        for count in self._cut(len(sources)):
            part = slice(start, start + count)
            self.put(destinations[part], self.take(sources[part]))
            start += count

    def receive(self, source: "Blocks", pages: Numbers, *, waits: bool) -> None:
        """Copy `pages`, ascending, from where `source`, perhaps elsewhere, has the same numbers.

        `waits`: whether they are there on return.
        """
        starts = [np.cumsum([0, *map(len, x.tensors)]) for x in (self, source)]
        begins = np.bincount(np.concatenate(starts)) > 0
        ends = (np.diff(pages) != 1) | begins[pages[1:]]
        for run in np.split(pages, np.flatnonzero(ends) + 1):
            i, j = (np.searchsorted(first, run[0], side="right") - 1 for first in starts)
            to, of = run[0] - starts[0][i], run[0] - starts[1][j]
            new, old = self.tensors[i][to : to + len(run)], source.tensors[j][of : of + len(run)]
            new.copy_(old, non_blocking=not waits)

    def keep(self, pages: Numbers) -> None:
        """Keep only `pages`, ascending, as pages 0, 1, ...; those that do not exist are zero.

        The old blocks stay until new ones are filled, so an exception changes nothing.
        """
        kept = pages[pages < len(self)]
        ends = np.cumsum([len(block) for block in self.tensors])
        whole = [
            block for block, end in zip(self.tensors, ends, strict=True)
            if np.isin(np.arange(end - len(block), end), kept).all()
        ]  # fmt: skip
        if not self.in_one and sum(map(len, whole)) == len(kept) == len(pages):
            self._use(whole)  # no byte moves
            return
        new, start = self._new(len(pages), self.tensors[0].device), 0
        for count in self._cut(len(kept)):
            some = np.arange(start, start + count)
            put_pages(new, some, self.take(kept[some]))
            start += count
        self._use(new)

    @torch.inference_mode(False)
    def move(self, device: torch.device) -> None:
        """Move all pages to `device`."""
        if self.tensors[0].device != device:
            # Towards the CPU torch would return before the bytes are there.
            waits = device.type == "cpu"
            self._use([block.to(device, non_blocking=not waits) for block in self.tensors])

    @torch.inference_mode(False)
    def pin(self) -> None:
        """Move all pages to pinned memory."""
        if not self.pinned:
            self._use([block.pin_memory() for block in self.tensors])
            self.pinned = True


def zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, pinned: bool = False
) -> torch.Tensor:
    """Return zeros that may be written in inference mode and outside of it alike."""
    # Leaving inference mode takes longer than the zeros of a page, if the code is not compiled.
    leaves = torch.compiler.is_compiling() or torch.is_inference_mode_enabled()
    with torch.inference_mode(False) if leaves else nullcontext():
        return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)
