"""The block table: the page numbers of each sequence, in order.

As in transformers' caches, all sequences of a batch have the same number of tokens, including
padding. Forks of a table share an allocator.

    logical page     0   1   2   3              tokens 0 .. S-1 are in logical page 0
    sequence 0       -1  7   3   9              three pages in use (first_page = 1)
    sequence 1       -1  7   3   4              two of them shared with sequence 0
"""

import itertools
import sys
from collections import Counter
from collections.abc import Callable

import numpy as np

# `np.unique` imports this module in its first call, and never ends if a deleted cache is measured
# during that import.
import numpy.ma
import torch

from ..ops.blocks import upload
from .page_allocator import NO_PAGE, IntArray, PageAllocator

# `(sources, targets)`: pages to copy before the table lists the targets.
Copies = tuple[IntArray, IntArray]
_VERSIONS = itertools.count()


class BlockTable:
    """The pages of each sequence of a batch, in order.

    The reference count of a page is increased before the page is listed, and decreased after the
    page is removed from the list. An exception at any line, such as KeyboardInterrupt, can
    therefore lose a page until `PageAllocator.recount`, but never gives a page to two owners.

    Attributes:
        rows: Page numbers, `[B, num_columns]`, int32. Columns from `first_page` on are in use.
        first_page: First logical page in use. Earlier pages have left the window.
        version: Number that changes with `rows`, unique over all tables.
        page_size: Slots (tokens) per page.
    """

    def __init__(self, allocator: PageAllocator) -> None:
        self.allocator = allocator
        self.page_size = allocator.page_size
        self.first_page = 0
        # Results of `find_pages` by range of columns, and copies of the rows by device.
        self._page_cache: dict[tuple[int, int], IntArray] = {}
        self._device_copies: dict[torch.device, torch.Tensor] = {}
        self.rows: IntArray = np.full((0, 0), NO_PAGE, np.int32)
        self._mark_changed()
        allocator.tables.add(self)

    def _mark_changed(self) -> None:
        """Drop all data derived from the rows, which are about to change."""
        self.version = next(_VERSIONS)
        self._page_cache.clear()
        self._device_copies.clear()

    def __del__(self) -> None:
        # Free the pages of a garbage-collected fork. At exit, required modules may be gone.
        if hasattr(self, "rows") and not sys.is_finalizing():
            self.allocator.abandon(self.get_used_rows().ravel())

    @property
    def batch(self) -> int:
        """Number of sequences, 0 before the first `reserve`."""
        return len(self.rows)

    @property
    def num_columns(self) -> int:
        """Number of logical pages per sequence, including those before `first_page`."""
        return int(self.rows.shape[1])

    def get_used_rows(self) -> IntArray:
        """Return a view of the columns in use, `[B, num_columns - first_page]`."""
        return self.rows[:, self.first_page :]

    def find_pages(self, start: int, stop: int) -> IntArray:
        """Return the pages in use for tokens `start` to `stop - 1`, ascending, without duplicates.

        The result is cached until the rows change.
        """
        span = max(start // self.page_size, self.first_page), self._count_pages(stop)
        if span not in self._page_cache:
            self._page_cache[span] = np.unique(self.rows[:, span[0] : span[1]])
        return self._page_cache[span]

    def copy_to_device(self, device: torch.device, columns: IntArray | None = None) -> torch.Tensor:
        """Return a copy of the rows on `device`, `[B, n]`, int32, cached until the rows change.

        `columns` selects columns, and must be the same in every call. None means all.
        """
        if device not in self._device_copies:
            # Use `take`, because indexing would return a column-major copy, and kernels need rows.
            rows = self.rows if columns is None else self.rows.take(columns, 1)
            self._device_copies[device] = upload(rows.copy(), device)
        return self._device_copies[device]

    @property
    def nbytes(self) -> int:
        """Size of the rows and of their copies, in bytes."""
        return self.rows.nbytes + sum(rows.nbytes for rows in self._device_copies.values())

    def count_needed(self, start: int, stop: int, batch: int) -> int:
        """Return the number of pages that `reserve` would allocate."""
        num_new_columns = self._count_pages(stop) - max(self.num_columns, start // self.page_size)
        return max(num_new_columns, 0) * batch + len(self._find_entries_to_copy(start, stop))

    def reserve(
        self, start: int, stop: int, batch: int, copy: Callable[[Copies], None] | None = None
    ) -> None:
        """Assign each token from `start` to `stop - 1` a page that only its sequence holds.

        No pages are assigned between the last listed page and `start`. The caller checks the budget
        for `count_needed` pages.

        Args:
            start: First token, with `start // page_size >= first_page`.
            stop: Last token plus one.
            batch: Number of sequences. It must be the same in every call until `clear`.
            copy: Function that copies the shared pages to new pages.
        """
        assert self.batch in (0, batch), (self.batch, batch)
        new_start = max(self.num_columns, start // self.page_size)
        num_new_columns = max(0, self._count_pages(stop) - new_start)
        shared_entries = self._find_entries_to_copy(start, stop)
        if num_new_columns == 0 and not shared_entries:
            return
        num_added = num_new_columns * batch
        new_pages = self.allocator.allocate(num_added + len(shared_entries))
        # An empty list also has two columns.
        entry_rows, entry_columns = np.array(shared_entries, np.int64).reshape(-1, 2).T
        shared_pages = self.rows[entry_rows, entry_columns]
        separate_pages = new_pages[num_added:]
        try:
            if copy is not None:
                copy((shared_pages, separate_pages))
        except BaseException:
            self.allocator.free(new_pages)
            raise
        self._mark_changed()
        self.rows[entry_rows, entry_columns] = separate_pages
        self.allocator.free(shared_pages)
        if num_new_columns:
            # Assign pages sequence by sequence, so that the pages of a sequence are adjacent.
            new_rows = new_pages[:num_added].reshape(batch, num_new_columns)
            gap = np.full((batch, new_start - self.num_columns), NO_PAGE, np.int32)
            if self.first_page == self.num_columns:
                self.first_page = new_start
            old_rows = self.rows.reshape(batch, -1)  # an empty table has 0 rows
            self.rows = np.concatenate([old_rows, gap, new_rows], axis=1)

    def free_from(self, length: int) -> None:
        """Free the pages that only have tokens from `length` on."""
        num_kept = max(self._count_pages(length), self.first_page)
        if num_kept < self.num_columns:
            freed_pages = self.rows[:, num_kept:]
            self._mark_changed()
            self.rows = self.rows[:, :num_kept]
            self.allocator.free(freed_pages)

    def count_freed_before(self, token: int) -> int:
        """Return the number of pages that `free_before` would free."""
        stop = min(token // self.page_size, self.num_columns)
        if stop <= self.first_page:
            return 0
        pages, counts = np.unique(self.rows[:, self.first_page : stop], return_counts=True)
        return int((self.allocator.reference_counts[pages] == counts).sum())

    def compact(self) -> IntArray | None:
        """Renumber the pages from 0, and return the old number of each page.

        If another table also holds pages, return None and change nothing.
        """
        used_rows = self.get_used_rows()
        if int(self.allocator.reference_counts.sum()) != used_rows.size:
            return None
        pages, new_numbers = np.unique(used_rows, return_inverse=True)
        self._mark_changed()
        used_rows[:] = new_numbers.reshape(used_rows.shape)
        self.allocator.renumber(pages)
        return pages

    def free_before(self, token: int) -> None:
        """Free the pages that only have tokens before `token`."""
        first_kept = min(token // self.page_size, self.num_columns)
        if first_kept > self.first_page:
            freed_columns = self.rows[:, self.first_page : first_kept]
            freed_pages = freed_columns.copy()
            self._mark_changed()
            self.first_page = first_kept
            freed_columns[:] = NO_PAGE
            self.allocator.free(freed_pages)

    def replace_rows(self, rows: IntArray, first_page: int) -> None:
        """Replace the rows. Columns of the new rows from `first_page` on are in use.

        Pages that this table or a fork already lists are shared, not copied.
        """
        old_pages = self.get_used_rows()
        self.allocator.share(rows[:, first_page:])
        self._mark_changed()
        # Set both in one assignment, so that no interrupt comes in between.
        self.rows, self.first_page = rows, first_page
        self.allocator.free(old_pages)

    def fork(self) -> "BlockTable":
        """Return a table that shares all pages of this table."""
        fork = BlockTable(self.allocator)
        fork.replace_rows(self.rows.copy(), self.first_page)
        return fork

    def clear(self) -> None:
        """Free all pages. The batch size may then change."""
        self.replace_rows(np.full((0, 0), NO_PAGE, np.int32), 0)

    def _count_pages(self, length: int) -> int:
        return -(-length // self.page_size)

    def _find_entries_to_copy(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the entries `(sequence, logical page)` of tokens `start` to `stop - 1` to copy.

        Their pages are shared. If only rows of this table share a page, the last row keeps it.
        """
        self.allocator.free_orphans()
        first_column = start // self.page_size
        references = self.allocator.reference_counts
        counts = Counter[int]()
        entries: list[tuple[int, int]] = []
        pages = self.rows[:, first_column : self._count_pages(stop)]
        if (references[pages] > 1).any():
            for column, pages_of_column in enumerate(pages.T.tolist(), first_column):
                for row, page in enumerate(pages_of_column):
                    counts[page] += 1
                    if references[page] > counts[page]:
                        entries.append((row, column))
        return entries
