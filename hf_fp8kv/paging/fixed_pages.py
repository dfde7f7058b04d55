"""Pages of preallocated caches: all are allocated at once, and the pages of a window are a ring."""

import numpy as np
import torch

from .. import ops
from ..errors import ConfigError
from ..ops.blocks import Ints
from .blocks import zeros
from .layer_group import LayerGroup
from .page_allocator import NO_PAGE, PageBudget


class FixedPages(LayerGroup):
    """A layer group of a preallocated cache.

    The block table on the host lists the pages of a ring: logical page `i` of a sequence is in
    column `i % ring`. On a device the table has a column for each logical page.

    Attributes:
        room: Maximum number of tokens in a sequence.
        columns: Number of logical pages per sequence.
        allocated: Number of allocated pages per sequence, 0 before allocation.
        device_lengths: Number of stored tokens of each member that was called, `[B]`, int32, at
            constant addresses.
        lost: First token of each member that is certainly not overwritten.
    """

    def __init__(self, budget: PageBudget, window: int | None, room: int) -> None:
        super().__init__(budget, window)
        self.room, self.columns, self.allocated = room, -(-room // self.page_size), 0
        self.device_lengths: dict[int, torch.Tensor] = {}
        self.lost: dict[int, int] = {}
        # Work plans, each with the member that fills it.
        self._plans: dict[tuple[object, ...], tuple[torch.Tensor | None, int]] = {}
        self.table.allocator.exact = True

    @property
    def count(self) -> int:
        """Number of pages per sequence, for all tokens or for a window."""
        if self.allocated or self.window is None or self.record_past:
            return self.allocated or self.columns
        return min(self.columns, self.window_pages)

    @property
    def ring(self) -> int:
        """Number of pages per sequence if they form a ring, or 0 if all tokens are kept."""
        return self.count if self.count < self.columns else 0

    @torch.compiler.disable(
        reason="a budget (max_pages) is counted in Python; for fullgraph=True leave it out, or "
        "make the first call, or early_initialization(), outside compiled code"
    )  # type: ignore[untyped-decorator]
    def allocate(self, batch: int, device: torch.device) -> tuple[torch.Tensor, int]:
        """Allocate all pages of every group of the cache.

        Returns:
            The table `[B, columns]` on `device`, and the number of pages of this group.

        Raises:
            OutOfPagesError: The budget would be exceeded. Nothing was changed.
        """
        groups = [x for ref in self.siblings if isinstance(x := ref(), FixedPages)]
        rooms = [(x, x.count * x.page_size) for x in groups]
        needed = sum(x.table.pages_needed(0, room, batch) for x, room in rooms)
        self.budget.require(needed)
        for x, room in rooms:
            x.table.reserve(0, room, batch, x.copy_pages)
            x.allocated = x.count
        return self.table_on(device), self.table.allocator.capacity

    def defer(self, batch: int, device: torch.device) -> tuple[torch.Tensor, int]:
        """Return the result of `allocate`, and allocate when the block table is used on the host.

        For compiled regions, which cannot count pages and only return tensors.
        """
        count = self.allocated = self.count
        self.deferred = count * self.page_size, batch
        first = torch.arange(0, batch * count, count, dtype=torch.int32, device=device)
        column = torch.arange(self.columns, dtype=torch.int32, device=device) % count
        return first[:, None] + column, batch * count

    def table_on(self, device: torch.device) -> torch.Tensor:
        """Return the page number of each logical page, `[B, columns]`, int32, on `device`."""
        columns = np.arange(self.columns, dtype=np.int32)
        return self.table.on_device(device, columns % (self.ring or len(columns)))

    def plan(
        self, member: int, lengths: torch.Tensor, heads: int, rows: int, backend: str
    ) -> tuple[torch.Tensor | None, int]:
        """Return a work plan for `rows` query rows per KV head, and the member that fills it.

        The plan has a constant address, and is None for a backend without plans. The first member
        that calls this fills the plan in each step. A plan assigns all positions for any lengths,
        so an outdated plan is less balanced but still correct.
        """
        key = device, batch, *_ = lengths.device, len(lengths), heads, rows
        if key not in self._plans:
            size, plan = ops.plan_rows(backend, device, batch, heads, None, rows), None
            if size is not None:
                plan = zeros((size, 4), torch.int32, device)
                ops.make_plan(plan, lengths, 1, self.window or 0, 0, heads, backend)
            self._plans[key] = plan, member
        return self._plans[key]

    def unshare(self, length: int) -> None:
        """Give each sequence separate pages for tokens from `length` on."""
        table, start = self.table, 0 if self.ring else length
        if table.batch:  # after an interrupt the group may have no pages
            slots = self.count * self.page_size
            table.reserve(start, slots, table.batch, self.copy_pages)

    def count_for(self, rows: Ints | slice, length: int) -> int:
        """Return the number of additional pages after `select` of these rows and `unshare`."""
        first = 0 if self.ring else length // self.page_size
        kept = self.table.rows[rows, :first]
        pages = len(np.unique(kept)) + len(kept) * (self.count - first)
        return pages - len(np.unique(self.table.used()))

    def unroll(self) -> None:
        """Keep all tokens from now on.

        Raises:
            ConfigError: Layers have different lengths, and some exceed the ring.
            OutOfPagesError: The budget would be exceeded. Nothing was changed.
        """
        ring, table, size = self.ring, self.table, self.page_size
        if not ring:
            return
        stored = self.stored()
        lengths = set(stored.values()) - {0}
        length = max(lengths, default=0)
        if len(lengths) > 1 and length > ring * size:
            raise ConfigError(
                "activate_past_recording: expected layers that hold the same number of tokens, got "
                f"{sorted(lengths)} under a window of {self.window}; call it earlier"
            )
        table.reserve(ring * size, self.columns * size, table.batch)
        for member, number in stored.items():
            self.note_stored(member, number)
        last = -(-length // size)
        for column in range(max(last - ring, ring), last):
            swapped = [column, column % ring]
            table.rows[:, swapped] = table.rows[:, swapped[::-1]]
        self.allocated = self.columns

    def stored(self) -> dict[int, int]:
        """Return the number of tokens of each member that was called. Synchronizes."""
        lengths = [x[:1] for x in self.device_lengths.values()]
        ends = torch.cat([x.to(lengths[0].device) for x in lengths]).tolist() if lengths else []
        return dict(zip(self.device_lengths, ends, strict=True))

    def note_stored(self, member: int, length: int) -> int:
        """Return the first token that the ring still holds when a member has `length` tokens."""
        lost = self.lost.get(member, 0)
        if ring := self.ring:
            size = self.page_size
            lost = max(lost, (max(length - 1, 0) // size - ring + 1) * size)
        self.lost[member] = lost
        return lost

    def fork(self) -> LayerGroup:
        """Return a growing group whose table lists the logical pages of all tokens."""
        fork, size, stored = super().fork(), self.page_size, self.stored()
        lost = max((self.note_stored(member, n) for member, n in stored.items()), default=0)
        length = max(stored.values(), default=0)
        table, first, count = fork.table, lost // size, -(-length // size)
        rows = np.full((table.batch, count), NO_PAGE, np.int32)
        rows[:, first:] = table.rows[:, np.arange(first, count) % max(table.count, 1)]
        table.replace_rows(rows, first)
        return fork
