"""Blocks of memory for the pages of a pool."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from ..formats import LayerPlan
from ..ops import Pages
from ..ops.blocks import IntArray, locate_pages, put_pages, take_pages

# Maximum size of a block in bytes, unless a page is larger or a pool has a single block.
BLOCK_BYTES = 16 << 20

_NO_OFFSETS = torch.empty(0, dtype=torch.int64, device="cpu")


class Blocks:
    """Blocks of memory, `[n, page_bytes]`, uint8. Pages are numbered from 0 across all blocks.

    Attributes:
        page_bytes: Size of a page, in bytes.
        tensors: The blocks: an empty list before `allocate`, and an empty block for 0 pages.
        offsets: Offsets of the pages, `[P]`, int64 (see `locate_pages`).
        is_single_block: Whether all pages stay in one block, as compiled code requires.
        is_pinned: Whether blocks are in pinned host memory.
        cached_plan_and_pages: A storage plan and the `Pages` made for it, or None. The `Pages`
            keep the blocks alive, and are dropped when the blocks are replaced.
    """

    tensors: list[torch.Tensor]
    cached_plan_and_pages: tuple[LayerPlan, Pages] | None

    def __init__(self) -> None:
        self.is_single_block = self.is_pinned = False
        self.free()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "cached_plan_and_pages": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.is_allocated:
            self._set_blocks(self.tensors)  # the copied blocks have new addresses

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def is_allocated(self) -> bool:
        """Whether blocks exist, possibly with 0 pages."""
        # `bool` of a list would break the graph of a compiled step with torch 2.11.
        return len(self.tensors) > 0

    def allocate(
        self,
        page_bytes: int,
        num_pages: int,
        device: torch.device,
        *,
        is_single_block: bool = False,
        is_pinned: bool = False,
    ) -> None:
        """Allocate `num_pages` zeroed pages of `page_bytes` bytes."""
        self.page_bytes = page_bytes
        self.is_single_block = is_single_block
        self.is_pinned = is_pinned
        self._set_blocks(self._allocate(num_pages, device))

    def free(self) -> None:
        """Free the memory. `allocate` may be called again."""
        self.tensors = []
        self.offsets = _NO_OFFSETS
        self.cached_plan_and_pages = None

    def _set_blocks(self, tensors: list[torch.Tensor]) -> None:
        offsets = locate_pages(tensors)
        # No call happens between these assignments, so an interrupt cannot separate them.
        self.tensors = tensors
        self.offsets = offsets
        self.cached_plan_and_pages = None

    def _allocate(self, num_pages: int, device: torch.device) -> list[torch.Tensor]:
        is_single_block = self.is_single_block or not num_pages
        spans = [slice(0, num_pages)] if is_single_block else self._split_pages(num_pages)
        return [
            make_zeros(
                (span.stop - span.start, self.page_bytes),
                torch.uint8,
                device,
                is_pinned=self.is_pinned,
            )
            for span in spans
        ]

    def _split_pages(self, num_pages: int) -> list[slice]:
        """Split `num_pages` pages into slices of at most `BLOCK_BYTES`, or of one page."""
        step = max(1, BLOCK_BYTES // self.page_bytes)
        return [slice(start, min(start + step, num_pages)) for start in range(0, num_pages, step)]

    def grow(self, num_pages: int) -> None:
        """Make room for `num_pages` pages. New pages are zero.

        A block is added and no data moves, unless all pages must be in one block.
        """
        num_added = num_pages - len(self)
        if num_added > 0 and self.is_single_block:
            self.keep_pages(np.arange(num_pages))
        elif num_added > 0:
            old_blocks = [block for block in self.tensors if len(block)]
            self._set_blocks([*old_blocks, *self._allocate(num_added, self.tensors[0].device)])

    def take(self, pages: IntArray | torch.Tensor) -> torch.Tensor:
        """Return copies of pages, `[n, bytes]`. `pages` may be a tensor if there is one block."""
        return take_pages(self.tensors, pages)

    def put(self, pages: IntArray | torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows that `take` returned to `pages`."""
        put_pages(self.tensors, pages, rows)

    def copy(
        self, sources: IntArray, targets: IntArray, target_blocks: list[torch.Tensor] | None = None
    ) -> None:
        """Copy pages to `target_blocks`, or to pages of this object that are not sources."""
        for span in self._split_pages(len(sources)):
            put_pages(target_blocks or self.tensors, targets[span], self.take(sources[span]))

    def copy_from(self, source: "Blocks", pages: IntArray, *, blocking: bool) -> None:
        """Copy the pages with the numbers `pages`, ascending, from `source`.

        `source` may be on another device. With `blocking`, the copies are complete on return.
        """
        target_starts, source_starts = (
            np.cumsum([0, *map(len, blocks.tensors)]) for blocks in (self, source)
        )
        is_block_start = np.bincount(np.concatenate([target_starts, source_starts])) > 0
        is_run_end = (np.diff(pages) != 1) | is_block_start[pages[1:]]
        for run in np.split(pages, np.flatnonzero(is_run_end) + 1):
            target_index, source_index = (
                np.searchsorted(starts, run[0], side="right") - 1
                for starts in (target_starts, source_starts)
            )
            target_start = run[0] - target_starts[target_index]
            source_start = run[0] - source_starts[source_index]
            target_rows = self.tensors[target_index][target_start : target_start + len(run)]
            source_rows = source.tensors[source_index][source_start : source_start + len(run)]
            target_rows.copy_(source_rows, non_blocking=not blocking)

    def keep_pages(self, pages: IntArray) -> None:
        """Keep only `pages`, ascending, and renumber them from 0.

        Pages that do not exist become zero. Old blocks are replaced only after the new blocks are
        filled, so an exception changes nothing.
        """
        existing = pages[pages < len(self)]
        block_stops = np.cumsum([len(block) for block in self.tensors])
        whole_blocks = [
            block
            for block, stop in zip(self.tensors, block_stops, strict=True)
            if np.isin(np.arange(stop - len(block), stop), existing).all()
        ]
        if not self.is_single_block and sum(map(len, whole_blocks)) == len(existing) == len(pages):
            self._set_blocks(whole_blocks)  # moves no data
            return
        blocks = self._allocate(len(pages), self.tensors[0].device)
        self.copy(existing, np.arange(len(existing)), blocks)
        self._set_blocks(blocks)

    @torch.inference_mode(False)
    def move(self, device: torch.device) -> None:
        """Move all pages to `device`."""
        if self.tensors[0].device != device:
            # A non-blocking copy to the CPU could return before the data has arrived.
            is_async = device.type != "cpu"
            self._set_blocks([block.to(device, non_blocking=is_async) for block in self.tensors])

    @torch.inference_mode(False)
    def pin(self) -> None:
        """Move all pages to pinned memory."""
        if not self.is_pinned:
            self._set_blocks([block.pin_memory() for block in self.tensors])
            self.is_pinned = True


def make_zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, is_pinned: bool = False
) -> torch.Tensor:
    """Return zeros that can be written in inference mode and outside it."""
    # Leave inference mode only if it is on, because leaving it takes longer than zeroing a page.
    must_leave = torch.compiler.is_compiling() or torch.is_inference_mode_enabled()
    with torch.inference_mode(False) if must_leave else nullcontext():
        return torch.zeros(shape, dtype=dtype, device=device, pin_memory=is_pinned)
