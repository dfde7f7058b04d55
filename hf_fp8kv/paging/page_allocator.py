"""Allocation and reference counts of page numbers. No bytes are involved.

All allocators of a cache share a `PageBudget`.
"""

import weakref
from typing import Any

import numpy as np

from ..errors import OutOfPagesError

NO_PAGE = -1
# A pool grows by at least this number of tokens and by at least 1/32 of its size, so that at most 4
# % or 64 tokens are unused.
GROWTH_TOKENS = 64
GROWTH_SHARE = 32
# Pages are renumbered and memory is freed when at most one page in this number is held.
SHRINK_SHARE = 4

Ints = np.ndarray[Any, np.dtype[np.int32]]


class PageBudget:
    """The maximum number of pages in use, over all allocators that share this budget.

    Attributes:
        page_size: Slots (tokens) per page.
        max_pages: Maximum number of pages in use. None means no limit.
        fetched: Bytes copied to the device so far, with offloading.
        returned: Bytes copied back to host memory so far.
    """

    def __init__(self, page_size: int, max_pages: int | None = None) -> None:
        self.page_size = page_size
        self.max_pages = max_pages
        self.fetched = self.returned = 0
        self.allocators: weakref.WeakSet[PageAllocator] = weakref.WeakSet()

    @property
    def held(self) -> int:
        """Number of pages in use."""
        return sum(allocator.held for allocator in self.allocators)

    def require(self, pages: int) -> None:
        """Raise OutOfPagesError if `pages` additional pages would exceed the budget."""
        if self.max_pages is not None and self.held + pages > self.max_pages:
            raise OutOfPagesError(
                f"expected at most {self.max_pages} pages of {self.page_size} tokens (max_pages), "
                f"got a call that needs {pages} more with {self.held} in use; raise max_pages, "
                "drop a fork, crop or reset the cache",
                needed=pages,
                available=self.max_pages - self.held,
            )


class PageAllocator:
    """The existing page numbers, and how many entries of block tables refer to each."""

    def __init__(self, budget: PageBudget) -> None:
        self.budget, self.page_size = budget, budget.page_size
        budget.allocators.add(self)
        self.references: Ints = np.zeros(0, np.int32)
        self._free: list[int] = []
        self._orphans: list[Ints] = []
        # Whether only the required number of pages is created, for tables that stop growing early.
        self.exact = False

    @property
    def capacity(self) -> int:
        """Number of existing pages, in use or free. A pool has at least this number."""
        return len(self.references)

    @property
    def num_free(self) -> int:
        """Number of existing pages that no block table holds."""
        return len(self._free)

    @property
    def held(self) -> int:
        """Number of pages that at least one block table holds."""
        self.free_orphans()
        # Counted from references, because an interrupt may lose the number of a free page.
        return int(np.count_nonzero(self.references))

    @property
    def is_sparse(self) -> bool:
        """Whether few enough pages are in use that renumbering pays."""
        if self.exact:  # a long call with a window leaves half of its pages free
            return 0 < self.held * 2 <= self.capacity
        is_low = 0 < self.held * SHRINK_SHARE <= self.capacity
        return is_low and self.num_free * self.page_size > GROWTH_TOKENS

    def allocate(self, pages: int, *, granted: bool = False) -> Ints:
        """Return `pages` page numbers, each with one reference.

        New pages are created in steps if needed. With `granted` the budget is not checked: the
        caller did so, and will free other pages.
        """
        if not granted:
            self.budget.require(pages)
        missing = pages - self.num_free
        if missing > 0:
            step = max(GROWTH_TOKENS // self.page_size, self.capacity // GROWTH_SHARE)
            added = missing if self.exact else max(missing + missing // GROWTH_SHARE, step)
            if self.budget.max_pages is not None:
                added = min(added, self.budget.max_pages - self.capacity)
            self._extend(max(added, missing))
        numbers = np.array([self._free.pop() for _ in range(pages)], np.int32)
        self.references[numbers] = 1
        return numbers

    def renumber(self, pages: Ints) -> None:
        """Renumber `pages`, which are all pages in use, from 0. Free pages cease to exist."""
        assert len(pages) == self.held, f"{self.held} pages are held, {len(pages)} are kept"
        self._free, self.references = [], self.references[pages]

    def _extend(self, pages: int) -> None:
        first = self.capacity
        self.references = np.concatenate([self.references, np.zeros(pages, np.int32)])
        # Lowest numbers are allocated first, so that pages of a sequence stay close together.
        self._free[:0] = range(first + pages - 1, first - 1, -1)

    def share(self, pages: Ints) -> None:
        """Add a reference for each entry of `pages`, except NO_PAGE."""
        np.add.at(self.references, pages[pages != NO_PAGE], 1)

    def free(self, pages: Ints) -> None:
        """Remove a reference for each entry. Pages without references become free."""
        held = pages[pages != NO_PAGE]
        np.subtract.at(self.references, held, 1)
        freed = set(held[self.references[held] == 0].tolist())
        self._free.extend(sorted(freed, reverse=True))

    def abandon(self, pages: Ints) -> None:
        """Let `free_orphans` free the pages of a table that was collected.

        The garbage collector may run while another table changes counts.
        """
        self._orphans.append(pages)

    def free_orphans(self) -> None:
        """Free the pages of collected tables."""
        while self._orphans:
            self.free(self._orphans.pop())
