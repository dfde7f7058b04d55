"""Allocation and reference counts of page numbers, and the limit that a cache shares.

All allocators of a cache share a `PageBudget`.
"""

import weakref
from typing import Any

import numpy as np

from ..errors import OutOfPagesError

NO_PAGE = -1
# A pool grows by at least this number of tokens, and by at least its size divided by
# `GROWTH_DIVISOR`. Growth leaves at most 64 tokens or 4% of the pool unused.
GROWTH_TOKENS = 64
GROWTH_DIVISOR = 32
# Pages are renumbered and memory is freed when at most one page in `SHRINK_DIVISOR` is held.
SHRINK_DIVISOR = 4

IntArray = np.ndarray[Any, np.dtype[np.int32]]


class PageBudget:
    """A limit on the number of pages in use, over all allocators that share this budget.

    Attributes:
        page_size: Slots (tokens) per page.
        max_pages: Maximum number of pages in use. None means no limit.
        fetched_bytes: Number of bytes that offloading has copied to the device.
        returned_bytes: Number of bytes that offloading has copied back to host memory.
    """

    def __init__(self, page_size: int, max_pages: int | None = None) -> None:
        self.page_size = page_size
        self.max_pages = max_pages
        self.fetched_bytes = self.returned_bytes = 0
        self.allocators: weakref.WeakSet[PageAllocator] = weakref.WeakSet()

    @property
    def num_held(self) -> int:
        """Number of pages in use."""
        return sum(allocator.num_held for allocator in self.allocators)

    def check(self, num_pages: int) -> None:
        """Raise OutOfPagesError if `num_pages` additional pages would exceed the budget."""
        if self.max_pages is not None and self.num_held + num_pages > self.max_pages:
            raise OutOfPagesError(
                f"expected at most {self.max_pages} pages of {self.page_size} tokens (max_pages), "
                f"got a call that needs {num_pages} more with {self.num_held} in use. Raise "
                "max_pages, drop a fork, or crop or reset the cache",
                needed=num_pages,
                available=self.max_pages - self.num_held,
            )


class PageAllocator:
    """The existing page numbers, and the number of block table entries that refer to each."""

    def __init__(self, budget: PageBudget) -> None:
        self.budget = budget
        self.page_size = budget.page_size
        budget.allocators.add(self)
        self.reference_counts: IntArray = np.zeros(0, np.int32)
        self._free: list[int] = []
        self._orphans: list[IntArray] = []
        self.tables: weakref.WeakSet[Any] = weakref.WeakSet()  # all block tables with these pages
        # Whether only the requested pages are created, because the table will soon stop growing.
        self.allocates_exactly = False

    @property
    def capacity(self) -> int:
        """Number of existing pages, in use or free. A pool has at least this number."""
        return len(self.reference_counts)

    @property
    def num_free(self) -> int:
        """Number of existing pages that no block table holds."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Number of pages that at least one block table holds."""
        self.free_orphans()
        # Counted from references, because an interrupt (Ctrl-C) may lose a free page's number.
        return int(np.count_nonzero(self.reference_counts))

    @property
    def is_sparse(self) -> bool:
        """Whether so few pages are in use that they should be renumbered."""
        if self.allocates_exactly:  # a long call with a window leaves half of its pages free
            return 0 < self.num_held * 2 <= self.capacity
        is_low = 0 < self.num_held * SHRINK_DIVISOR <= self.capacity
        return is_low and self.num_free * self.page_size > GROWTH_TOKENS

    def allocate(self, num_pages: int) -> IntArray:
        """Return `num_pages` page numbers, each with one reference. The caller checks the budget.

        New pages are created in steps if needed.
        """
        num_missing = num_pages - self.num_free
        if num_missing > 0:
            min_growth = max(GROWTH_TOKENS // self.page_size, self.capacity // GROWTH_DIVISOR)
            growth = max(num_missing + num_missing // GROWTH_DIVISOR, min_growth)
            num_added = num_missing if self.allocates_exactly else growth
            if self.budget.max_pages is not None:
                num_added = min(num_added, self.budget.max_pages - self.capacity)
            self._add_pages(max(num_added, num_missing))
        pages = np.array([self._free.pop() for _ in range(num_pages)], np.int32)
        self.reference_counts[pages] = 1
        return pages

    def renumber(self, pages: IntArray) -> None:
        """Number the pages from 0 in the order of `pages`, which must be all pages in use.

        Free pages are removed.
        """
        assert len(pages) == self.num_held, f"{self.num_held} pages are held, {len(pages)} are kept"
        self._free = []
        self.reference_counts = self.reference_counts[pages]

    def _add_pages(self, num_pages: int) -> None:
        first_page = self.capacity
        self.reference_counts = np.pad(self.reference_counts, (0, num_pages))
        # Lowest numbers are allocated first, so that pages of a sequence stay close together.
        self._free[:0] = range(first_page + num_pages - 1, first_page - 1, -1)

    def share(self, pages: IntArray) -> None:
        """Add a reference to the page of each entry of `pages`, except NO_PAGE."""
        np.add.at(self.reference_counts, pages[pages != NO_PAGE], 1)

    def free(self, pages: IntArray) -> None:
        """Remove a reference to the page of each entry. Pages without references become free."""
        released_pages = pages[pages != NO_PAGE]
        np.subtract.at(self.reference_counts, released_pages, 1)
        freed_pages = set(released_pages[self.reference_counts[released_pages] == 0].tolist())
        self._free.extend(sorted(freed_pages, reverse=True))

    def recount(self) -> None:
        """Count all references again, because an interrupted call may have lost some."""
        self.free_orphans()
        counts = np.zeros_like(self.reference_counts)
        for table in self.tables:
            pages = table.get_used_rows()
            np.add.at(counts, pages[pages != NO_PAGE], 1)
        # In one assignment, so that no interrupt comes in between.
        self.reference_counts, self._free = counts, np.flatnonzero(counts == 0)[::-1].tolist()

    def abandon(self, pages: IntArray) -> None:
        """Let `free_orphans` free the pages of a table that was garbage-collected.

        The garbage collector may run while another table changes reference counts.
        """
        self._orphans.append(pages)

    def free_orphans(self) -> None:
        """Free the pages of garbage-collected tables."""
        while self._orphans:
            self.free(self._orphans.pop())
