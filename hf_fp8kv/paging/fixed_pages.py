"""Pages of the preallocated form: all are taken at once, and the pages of a window are a ring."""

import numpy as np
import torch

from .. import ops
from .blocks import zeros
from .layer_group import LayerGroup


class FixedPages:
    """The pages of a preallocated group.

    The block table on the host lists the pages of a ring. Logical page `i` of a sequence is in its
    column `i % ring`. On a device the table has a column for each logical page.

    Attributes:
        group: the group.
        room: tokens of a sequence that there is room for.
        lost: tokens before this one may be overwritten.
    """

    def __init__(self, group: LayerGroup, room: int) -> None:
        self.group, self.room, self.lost = group, room, 0
        # A plan, the batch it is for, and the member that fills it.
        self._plans: dict[tuple[object, ...], tuple[torch.Tensor, int, int]] = {}
        group.columns = -(-room // group.page_size)
        group.table.allocator.exact = True

    @property
    def ring(self) -> int:
        """Pages of a sequence, if they are fewer than logical pages; 0: all tokens are kept."""
        count = self.group.fixed_pages
        return count if count < self.group.columns else 0

    @property
    def tokens_at_once(self) -> int:
        """The most tokens of a call that leave all that the first of them sees in the ring."""
        assert self.group.window is not None
        return (self.ring - 1) * self.group.page_size - self.group.window + 2

    def take(self, batch: int, device: torch.device) -> tuple[torch.Tensor, int]:
        """Take all pages; return the table `[B, columns]` on `device`, and the number of pages.

        Raises:
            OutOfPagesError: the budget would be passed; nothing was changed.
        """
        self.group.take_all(batch)
        return self.table_on(device), self.group.table.allocator.capacity

    def defer(self, batch: int, device: torch.device) -> tuple[torch.Tensor, int]:
        """Return what `take` does, and take the pages when the block table is used on the host.

        For a compiled region: there pages cannot be counted, and nothing but tensors stays.
        """
        count = self.group.taken = self.group.fixed_pages
        self.group.deferred = batch
        first = torch.arange(0, batch * count, count, dtype=torch.int32, device=device)
        column = torch.arange(self.group.columns, dtype=torch.int32, device=device) % count
        return first[:, None] + column, batch * count

    def table_on(self, device: torch.device) -> torch.Tensor:
        """Return the page of each logical page, `[B, columns]`, int32, on `device`."""
        columns = np.arange(self.group.columns, dtype=np.int32)
        return self.group.table.on_device(device, columns % (self.ring or len(columns)))

    def plan(
        self, member: int, lengths: torch.Tensor, heads: int, rows: int, backend: str
    ) -> tuple[torch.Tensor | None, int]:
        """Return a plan for `rows` query rows per KV head, and the member that fills it.

        It stays at its address. None: the backend has no plans. The first member that calls this
        fills the plan at each step. A plan is a partition of all positions, whichever lengths it
        was made for: one that was not filled again is balanced less well, and as right.
        """
        device, batch, window = lengths.device, len(lengths), self.group.window or 0
        size = ops.plan_rows(backend, device, batch, heads, None, rows)
        if size is None:
            return None, -1
        plan, planned, leader = self._plans.get((device, heads, rows), (None, 0, member))
        if plan is None or planned != batch:
            plan, leader = zeros((size, 4), torch.int32, device), member
            ops.make_plan(plan, lengths, 1, window, 0, heads, backend)
            self._plans[device, heads, rows] = plan, batch, leader
        return plan, leader

    def unshare(self, length: int) -> None:
        """Give each sequence pages of its own for what is written from `length` on."""
        table, start = self.group.table, 0 if self.ring else length
        slots = self.group.fixed_pages * self.group.page_size
        table.reserve(start, slots, table.batch, self.group.copy_pages)

    def unroll(self, length: int) -> None:
        """Keep all tokens from now on, with `length` of them stored.

        Raises:
            OutOfPagesError: the budget would be passed; nothing was changed.
        """
        ring, table, size = self.ring, self.group.table, self.group.page_size
        if not ring:
            return
        self.note_stored(length)
        table.reserve(ring * size, self.group.columns * size, table.batch)
        first, last = self.lost // size, -(-length // size)
        for column in range(max(first, ring), last):
            swapped = [column, column % ring]
            table.rows[:, swapped] = table.rows[:, swapped[::-1]]
        self.group.taken = self.group.columns

    def note_stored(self, length: int) -> None:
        """Follow what the ring has lost when `length` tokens were stored."""
        if ring := self.ring:
            size = self.group.page_size
            last = max(length - 1, 0) // size
            self.lost = max(self.lost, (last - ring + 1) * size)

    def check_crop(self, tokens: int, length: int) -> None:
        """Raise ConfigError if `tokens` cannot be removed from `length`; change nothing."""
        self.note_stored(length)
        self.group.check_crop(tokens, length, self.lost)

    def clear(self) -> None:
        """Forget all tokens; pages that sequences share become each one's own."""
        self.lost = 0
        if self.group.table.is_shared:
            self.group.table.truncate(0)
            self.unshare(0)

    def fork(self, length: int) -> LayerGroup:
        """Return a growing group with a table of the logical pages of `length` tokens."""
        fork = self.group.fork()
        if self.ring:
            self.note_stored(length)
            size = self.group.page_size
            fork.table.unroll(self.lost // size, -(-length // size))
        else:
            fork.table.release(self.lost)
        return fork
