"""Passage: how the tokens of a long call get through a window that has no room for them."""

import numpy as np
import torch

from ..ops.blocks import upload
from .block_table import BlockTable, Copies
from .page_allocator import NO_PAGE, Ints
from .page_pool import PagePool


class Passage:
    """A call with more tokens than the pages of a window have room for.

    For each layer, one at a time, what the call attends to is put together in scratch pages: the
    old window and the new tokens. The last window of it goes to the layer's own pages.

    Attributes:
        start: tokens stored before the call.
        stop: tokens stored after it.
        table: the block table before the call, kept until every layer has stored its tokens; None:
            nothing was stored.
        pools: what was each member's pool before the call, of those that have stored their tokens.
        rows: `[B, columns]`, int32, the block table of the scratch pages.
        room: scratch pages.
        filled: pages to copy from the old pool to the scratch pages.
        kept: pages to copy from the scratch pages to the new pool.
    """

    rows: Ints
    room: int
    filled: Copies
    kept: Copies

    def __init__(self, start: int, stop: int, table: BlockTable | None = None) -> None:
        self.start, self.stop, self.table = start, stop, table
        self.pools: dict[int, PagePool] = {}
        self._laid_out = -1
        self._rows_on: dict[torch.device, torch.Tensor] = {}

    def lay_out(self, table: BlockTable, visible_from: int) -> None:
        """Number the scratch pages, which hold tokens from `visible_from` on; once per table.

        `table` holds the last window of the tokens after the call.
        """
        if self._laid_out == table.version:
            return
        first, columns = visible_from // table.page_size, table.count
        width = columns - first
        self.room = table.batch * width
        numbers = np.arange(self.room, dtype=np.int32).reshape(table.batch, width)
        self.rows = np.full((table.batch, columns), NO_PAGE, np.int32)
        self.rows[:, first:] = numbers
        old: Ints = np.zeros((table.batch, 0), np.int32)
        if self.table is not None:
            old = self.table.rows[:, first : self.table.count]
        self.filled = old.ravel(), numbers[:, : old.shape[1]].ravel()
        self.kept = self.rows[:, table.first :].ravel(), table.used().ravel()
        self._rows_on.clear()
        self._laid_out = table.version

    def open(self, pool: PagePool) -> PagePool:
        """Return the scratch pages of one layer, which hold the old window; `pool` is its own."""
        scratch = pool.scratch(self.room)
        scratch.copy(self.filled, pool)
        return scratch

    def rows_on(self, device: torch.device) -> torch.Tensor:
        """Return `rows` on `device`."""
        rows = self._rows_on.get(device)
        if rows is None:
            rows = self._rows_on[device] = upload(self.rows, device)
        return rows
