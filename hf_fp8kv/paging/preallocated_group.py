"""Layer groups of the preallocated form: all pages are taken at once, and a window is a ring."""

import numpy as np
import numpy.typing as npt
import torch

from .. import ops
from .block_table import BlockTable
from .layer_group import LayerGroup
from .page_allocator import PageAllocator, PageBudget
from .page_pool import zeros


class PreallocatedGroup(LayerGroup):
    """One block table for all preallocated layers that keep the same tokens.

    With a window the pages of a sequence are a ring: logical page `i` is in column `i % ring` of
    the block table. The layers do not see that: on a device the table has a column for each
    logical page. Lengths are tensors (`SharedLengths`); `lengths` is not used.

    Attributes:
        columns: logical pages of a sequence; 0 before `preallocate`.
        ring: pages of a sequence, fewer than `columns`; 0: all tokens are kept.
        lost: tokens before this one may be overwritten; the layers' tensors say more.
    """

    def __init__(self, budget: PageBudget, window: int | None = None) -> None:
        self._deferred: tuple[int, int] | None = None
        super().__init__(budget, window, BlockTable(PageAllocator(budget)))
        self.table.allocator.exact = True
        self.columns = self.ring = self.lost = 0
        # The buffer, the batch it is for, and the member that fills it.
        self._shared_plans: dict[tuple[object, ...], tuple[torch.Tensor, int, int]] = {}

    @property
    def table(self) -> BlockTable:
        """The block table, after what `defer` put off."""
        if self._deferred is not None:
            arguments, self._deferred = self._deferred, None
            self.preallocate(*arguments)
        return self._table

    @table.setter
    def table(self, table: BlockTable) -> None:
        self._table = table

    @property
    def page_size(self) -> int:
        """Slots per page, in tokens."""
        return self._table.page_size

    def defer(self, tokens: int, batch: int, device: torch.device) -> tuple[torch.Tensor, int]:
        """Return the first table on `device`, and its pages, and `preallocate` later.

        For a compiled region: there pages cannot be counted, and nothing but tensors stays.
        """
        columns = -(-tokens // self.page_size)
        count = -(-self._room(tokens) // self.page_size)
        self.ring = count if count < columns else 0
        self._deferred = tokens, batch
        first = torch.arange(0, batch * count, count, dtype=torch.int32, device=device)
        column = torch.arange(columns, dtype=torch.int32, device=device) % count
        return first[:, None] + column, batch * count

    def preallocate(self, tokens: int, batch: int) -> None:
        """Take the pages of `tokens` per sequence, in this and in every other group of the cache.

        Raises:
            OutOfPagesError: the budget would be passed; nothing was changed.
        """
        siblings = [ref() for ref in self.siblings]
        rooms = [(g, g._room(tokens)) for g in siblings if isinstance(g, PreallocatedGroup)]
        needed = sum(group.table.pages_needed(0, room, batch) for group, room in rooms)
        self.table.allocator.budget.require(needed)
        for group, room in rooms:
            group.table.reserve(0, room, batch, group.copy_pages)
            group.columns = -(-tokens // self.page_size)
            group.ring = group.table.count if group.table.count < group.columns else 0

    def _room(self, tokens: int) -> int:
        """Return the tokens of a sequence that there are pages for: all, or a window's."""
        if self.columns:
            return self.table.count * self.page_size
        if self.window is None or self.record_past:
            return tokens
        return min(tokens, self._window_pages * self.page_size)

    @property
    def tokens_at_once(self) -> int:
        """The most tokens of a call that leave all that the first of them sees in the ring."""
        assert self.window is not None
        return self.ring * self.page_size - self.window - self.page_size + 2

    def unshare(self, length: int) -> None:
        """Give each sequence pages of its own for what is written from `length` on."""
        start = 0 if self.ring else length
        slots = (self.ring or self.columns) * self.page_size
        self.table.reserve(start, slots, self.table.batch, self.copy_pages)

    def unroll(self, length: int) -> None:
        """Keep all tokens from now on, with `length` of them stored.

        Raises:
            OutOfPagesError: the budget would be passed; nothing was changed.
        """
        ring, table = self.ring, self.table
        if not ring:
            return
        table.reserve(ring * self.page_size, self.columns * self.page_size, table.batch)
        self.note_stored(length)
        first, last = self.lost // self.page_size, -(-length // self.page_size)
        for column in range(max(first, ring), last):
            swapped = [column, column % ring]
            table.rows[:, swapped] = table.rows[:, swapped[::-1]]
        self.ring = 0

    def note_stored(self, length: int) -> None:
        """Follow what the ring has lost when `length` tokens were stored."""
        if self.ring:
            last = max(length - 1, 0) // self.page_size
            self.lost = max(self.lost, (last - self.ring + 1) * self.page_size)

    def check_crop_from(self, tokens: int, length: int) -> None:
        """Raise ConfigError if `tokens` cannot be removed from `length`; change nothing."""
        self.note_stored(length)
        self._check_kept(tokens, length, self.lost)

    def clear(self) -> None:
        """Forget all tokens; the pages stay, those that sequences share become each one's own."""
        self.lost = 0
        if self.table.is_shared:
            self.table.truncate(0)
            self.unshare(0)

    def fork_at(self, length: int) -> LayerGroup:
        """Return a group as `fork` does, with a table of the logical pages of `length` tokens."""
        fork = self.fork()
        if self.ring:
            self.note_stored(length)
            fork.table.unroll(self.lost // self.page_size, -(-length // self.page_size))
        else:
            fork.table.release(self.lost)
        return fork

    def _logical_rows(self) -> npt.NDArray[np.int32]:
        # np.take, since indexing would lay the copy out by columns, and kernels want rows.
        return np.take(self.table.rows, np.arange(self.columns) % (self.ring or self.columns), 1)

    def shared_plan(
        self, member: int, lengths: torch.Tensor, heads: int, rows: int, backend: str
    ) -> tuple[torch.Tensor | None, bool]:
        """Return a plan for `rows` query rows per KV head, and whether `member` fills it.

        It stays at its address.

        None: the backend has no plans. The first member that asks for it fills it at each step. A
        plan is a partition of all positions, whichever lengths it was made for: one that was not
        filled again is balanced less well, and as right.
        """
        device, batch = lengths.device, len(lengths)
        size = ops.plan_rows(backend, device, batch, heads, None, rows)
        if size is None:
            return None, False
        plan, planned, leader = self._shared_plans.get((device, heads, rows), (None, 0, member))
        if plan is None or planned != batch:
            plan, leader = zeros((size, 4), torch.int32, device), member
            ops.make_plan(plan, lengths, 1, self.window or 0, 0, heads, backend)
            self._shared_plans[device, heads, rows] = plan, batch, leader
        return plan, leader == member
