"""Pages of preallocated caches: all are allocated at once, and the pages of a window are a ring."""

import numpy as np
import torch

from .. import ops
from ..errors import ConfigError
from ..ops.blocks import IntArray
from .block_table import BlockTable
from .layer_group import LayerGroup
from .page_allocator import NO_PAGE, PageBudget


class FixedPages(LayerGroup):
    """A layer group of a preallocated cache.

    The block table on the host lists the pages of a ring: logical page `i` of a sequence is in
    column `i % ring_size`. On a device the table has a column for each logical page.

    With the `table` of a growing group, which has reserved pages for `max_tokens` tokens, this
    object gives its layers constant addresses for some steps (see `PagedLayers.reserve`).

    Attributes:
        max_tokens: Maximum number of tokens in a sequence.
        num_columns: Number of logical pages per sequence.
        allocated_pages: Number of allocated pages per sequence, 0 until pages are allocated.
        device_lengths: Length of each member that was called, `[B]`, int32, at constant addresses.
        deferred_allocation: Number of slots per sequence, and of sequences, to allocate when the
            table is used (see `defer_allocation`), or None.
        first_intact: First token of each member that the ring has certainly not overwritten.
    """

    def __init__(
        self,
        budget: PageBudget,
        window: int | None,
        max_tokens: int,
        table: BlockTable | None = None,
    ) -> None:
        self.deferred_allocation: tuple[int, int] | None = None
        super().__init__(budget, window, table)
        self.max_tokens = max_tokens
        self.num_columns = -(-max_tokens // self.page_size)
        self.allocated_pages = 0
        self.device_lengths: dict[int, torch.Tensor] = {}
        self.first_intact: dict[int, int] = {}
        # Schedules by size, each with the member that fills it.
        self._schedules: dict[tuple[object, ...], tuple[torch.Tensor | None, int]] = {}
        if table is None:
            self.table.allocator.allocates_exactly = True
        else:
            self.allocated_pages = self.num_columns  # the pages of a growing group are not a ring

    @property
    def table(self) -> BlockTable:
        """The block table. Pages that compiled code already uses are allocated first."""
        if self.deferred_allocation is not None:
            num_slots, batch = self.deferred_allocation
            self.deferred_allocation = None
            self._table.reserve(0, num_slots, batch)
        return self._table

    @table.setter
    def table(self, table: BlockTable) -> None:
        self._table = table

    @property
    def capacity(self) -> int:
        """Number of pages of each layer, allocated or deferred."""
        if self.deferred_allocation is not None:
            num_slots, batch = self.deferred_allocation
            return num_slots // self.page_size * batch
        return self._table.allocator.capacity

    @property
    def pages_per_sequence(self) -> int:
        """Number of pages per sequence, for `max_tokens` tokens or for a window."""
        if self.allocated_pages or self.window is None or self.record_past:
            return self.allocated_pages or self.num_columns
        return min(self.num_columns, self.window_pages)

    @property
    def num_slots(self) -> int:
        """Number of slots per sequence, in all of its pages."""
        return self.pages_per_sequence * self.page_size

    @property
    def ring_size(self) -> int:
        """Number of pages per sequence if they form a ring, or 0 if all tokens are kept."""
        num_pages = self.pages_per_sequence
        return num_pages if num_pages < self.num_columns else 0

    @torch.compiler.disable(
        reason="a budget (max_pages) is counted in Python. For fullgraph=True leave it out, or "
        "make the first call, or early_initialization(), outside compiled code"
    )  # type: ignore[untyped-decorator]
    def allocate(self, batch: int, device: torch.device) -> torch.Tensor:
        """Allocate all pages of every group of the cache. Return the table `[B, num_columns]`.

        Raises:
            OutOfPagesError: The budget would be exceeded. Nothing was changed.
        """
        siblings = [ref() for ref in self.siblings]
        groups = [group for group in siblings if isinstance(group, FixedPages)]
        self.budget.check(
            sum(group.table.count_needed(0, group.num_slots, batch) for group in groups)
        )
        for group in groups:
            group.table.reserve(0, group.num_slots, batch, group.copy_pages)
            group.allocated_pages = group.pages_per_sequence
        return self.get_device_table(device)

    def defer_allocation(self, batch: int, device: torch.device) -> torch.Tensor:
        """Return the result of `allocate`, and allocate when the block table is used on the host.

        This is for compiled regions, which cannot count pages and only return tensors.
        """
        num_pages = self.allocated_pages = self.pages_per_sequence
        self.deferred_allocation = num_pages * self.page_size, batch
        first_page = torch.arange(0, batch * num_pages, num_pages, dtype=torch.int32, device=device)
        column = torch.arange(self.num_columns, dtype=torch.int32, device=device) % num_pages
        return first_page[:, None] + column

    def get_device_table(self, device: torch.device) -> torch.Tensor:
        """Return the page number of each logical page, `[B, num_columns]`, int32, on `device`."""
        columns = np.arange(self.num_columns, dtype=np.int32)
        return self.table.copy_to_device(device, columns % (self.ring_size or len(columns)))

    def get_schedule(
        self, member: int, num_heads: int, num_rows: int, backend: str
    ) -> tuple[torch.Tensor | None, int]:
        """Return the schedule for `num_rows` query rows per KV head, and the member that fills it.

        The schedule has a constant address, and is None for a backend without schedules. The first
        member that calls this method fills the schedule in each step. A schedule assigns all
        positions for any lengths, so an outdated schedule is less balanced but still correct.
        """
        lengths = self.device_lengths[member]
        key = (len(lengths), lengths.device, num_heads, num_rows)
        if key not in self._schedules:
            # Later steps may run outside inference mode.
            with torch.inference_mode(False), torch.no_grad():
                schedule = ops.create_schedule(
                    lengths, 1, self.window or 0, 0, num_heads, backend, num_query_rows=num_rows
                )
            self._schedules[key] = schedule, member
        return self._schedules[key]

    def unshare(self, length: int) -> None:
        """Give each sequence separate pages for tokens from `length` on. The budget has room."""
        start = 0 if self.ring_size else length
        if self.table.batch:  # after an interrupt the group may have no pages
            self.table.reserve(start, self.num_slots, self.table.batch, self.copy_pages)

    def count_new_pages(self, rows: IntArray | slice, length: int) -> int:
        """Return the number of pages that are added if `rows` are selected and then unshared."""
        num_kept = 0 if self.ring_size else length // self.page_size  # columns that stay shared
        shared = self.table.rows[rows, :num_kept]
        num_pages = len(np.unique(shared)) + len(shared) * (self.pages_per_sequence - num_kept)
        return num_pages - len(np.unique(self.table.get_used_rows()))

    def unroll_ring(self) -> None:
        """Replace the ring with pages for all tokens, in order.

        Raises:
            ConfigError: Layers have different lengths, and some exceed the ring.
            OutOfPagesError: The budget would be exceeded. Nothing was changed.
        """
        ring_size = self.ring_size
        table = self.table
        page_size = self.page_size
        if not ring_size:
            return
        member_lengths = self.read_lengths()
        lengths = set(member_lengths.values()) - {0}
        length = max(lengths, default=0)
        if len(lengths) > 1 and length > ring_size * page_size:
            raise ConfigError(
                "activate_past_recording: expected layers that hold the same number of tokens, got "
                f"{sorted(lengths)} under a window of {self.window}. Call it earlier"
            )
        start, stop = ring_size * page_size, self.num_columns * page_size
        self.budget.check(table.count_needed(start, stop, table.batch))
        table.reserve(start, stop, table.batch)
        for member, member_length in member_lengths.items():
            self.find_first_intact(member, member_length)
        stop_page = -(-length // page_size)
        for column in range(max(stop_page - ring_size, ring_size), stop_page):
            columns = [column, column % ring_size]
            table.rows[:, columns] = table.rows[:, columns[::-1]]
        self.allocated_pages = self.num_columns

    def read_lengths(self) -> dict[int, int]:
        """Return the number of tokens of each member that was called, by member. Synchronizes."""
        if not self.device_lengths:
            return {}
        tensors = [lengths[:1] for lengths in self.device_lengths.values()]
        lengths = torch.cat([tensor.to(tensors[0].device) for tensor in tensors]).tolist()
        return dict(zip(self.device_lengths, lengths, strict=True))

    def find_first_intact(self, member: int, num_stored: int) -> int:
        """Update `first_intact` of a member that has `num_stored` tokens, and return it."""
        first_intact = self.first_intact.get(member, 0)
        ring_size = self.ring_size
        if ring_size:
            first_page = max(num_stored - 1, 0) // self.page_size - ring_size + 1
            first_intact = max(first_intact, first_page * self.page_size)
        self.first_intact[member] = first_intact
        return first_intact

    def fork(self) -> LayerGroup:
        """Return a growing group whose table lists the logical pages in order, not as a ring."""
        fork = super().fork()
        lengths = self.read_lengths()
        first_intact = max([0, *map(self.find_first_intact, lengths, lengths.values())])
        length = max(lengths.values(), default=0)
        table = fork.table
        first_page = first_intact // self.page_size
        stop_page = -(-length // self.page_size)
        rows = np.full((table.batch, stop_page), NO_PAGE, np.int32)
        columns = np.arange(first_page, stop_page) % max(table.num_columns, 1)
        rows[:, first_page:] = table.rows[:, columns]
        table.replace_rows(rows, first_page)
        return fork
