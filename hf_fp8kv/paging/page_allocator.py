"""Page allocator: which page numbers exist, and how many places of block tables hold each.

All allocators of a cache share a `PageBudget`. Integers only, no bytes.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..errors import OutOfPagesError

NO_PAGE = -1
# The pool grows by at least this many tokens, and by at least 1/32 of what is held: waste stays
# under 4 %, or 64 tokens.
GROWTH_TOKENS = 64
GROWTH_SHARE = 32
# Pages are renumbered and bytes given back when at most this share of the pages is held.
SHRINK_SHARE = 4

Ints = np.ndarray[Any, np.dtype[np.int32]]


class PageBudget:
    """How many pages all allocators that share it may hold at once.

    Attributes:
        page_size: slots per page, in tokens.
        max_pages: the most pages held at once; None: no limit.
        fetched: bytes that were brought to the device, where pages lie in host memory, too.
        returned: bytes that were brought back.
    """

    def __init__(self, page_size: int, max_pages: int | None = None) -> None:
        self.page_size = page_size
        self.max_pages = max_pages
        self.fetched = self.returned = 0
        self.allocators: weakref.WeakSet[PageAllocator] = weakref.WeakSet()

    @property
    def held(self) -> int:
        """Pages held now."""
        return sum(allocator.held for allocator in self.allocators)

    def require(self, pages: int) -> None:
        """Raise OutOfPagesError if `pages` more would pass the budget; change nothing."""
        if self.max_pages is not None and self.held + pages > self.max_pages:
            raise OutOfPagesError(
                f"expected at most {self.max_pages} pages of {self.page_size} tokens (max_pages), "
                f"got a call that needs {pages} more with {self.held} in use; raise max_pages, "
                "drop a fork, crop or reset the cache",
                needed=pages,
                available=self.max_pages - self.held,
            )


class PageAllocator:
    """The page numbers that exist, and how many places of block tables hold each."""

    def __init__(self, budget: PageBudget) -> None:
        self.budget, self.page_size = budget, budget.page_size
        budget.allocators.add(self)
        self.references: Ints = np.zeros(0, np.int32)
        self._free: list[int] = []
        self._orphans: list[Ints] = []
        self._counting = False
        # Whether pages are made as needed and no more: for a table that does not grow for long.
        self.exact = False

    @property
    def capacity(self) -> int:
        """Pages that exist, held or free: a pool must have at least this many."""
        return len(self.references)

    @property
    def free(self) -> int:
        """Pages that exist and are held by nobody."""
        return len(self._free)

    @property
    def held(self) -> int:
        """Pages held by at least one block table."""
        # Not by the free ones: an interrupt may lose the number of a free page.
        return int(np.count_nonzero(self.references))

    @property
    def is_sparse(self) -> bool:
        """Whether so few pages are held that it is worth renumbering them."""
        if self.exact:  # a long call of a window leaves half of its pages free
            return 0 < self.held * 2 <= self.capacity
        few = 0 < self.held * SHRINK_SHARE <= self.capacity
        return few and self.free * self.page_size > GROWTH_TOKENS

    def take(self, pages: int, *, granted: bool = False) -> Ints:
        """Return `pages` page numbers, each held once; make new ones in steps if needed.

        `granted`: the budget was asked before, and what makes room for these is still held.
        """
        if not granted:
            self.budget.require(pages)
        missing = pages - self.free
        if missing > 0:
            step = max(GROWTH_TOKENS // self.page_size, self.capacity // GROWTH_SHARE)
            more = missing if self.exact else max(missing + missing // GROWTH_SHARE, step)
            if self.budget.max_pages is not None:
                more = min(more, self.budget.max_pages - self.capacity)
            self._extend(max(more, missing))
        numbers = np.array([self._free.pop() for _ in range(pages)], np.int32)
        self.references[numbers] = 1
        return numbers

    def renumber(self, pages: Ints) -> None:
        """Make `pages`, all that are held, pages 0, 1, ...; the free ones are gone."""
        assert len(pages) == self.held, f"{self.held} pages are held, {len(pages)} are kept"
        self._free, self.references = [], self.references[pages]

    def _extend(self, pages: int) -> None:
        first = self.capacity
        self.references = np.concatenate([self.references, np.zeros(pages, np.int32)])
        # Lowest numbers first: the pages of one sequence stay close together.
        self._free[:0] = range(first + pages - 1, first - 1, -1)

    def share(self, pages: Ints) -> None:
        """Count one more holder for each entry of `pages` (NO_PAGE entries are skipped)."""
        np.add.at(self.references, pages[pages != NO_PAGE], 1)

    def drop(self, pages: Ints) -> None:
        """Count one holder less for each entry; a page without a holder is free again."""
        with self.counting():
            held = pages[pages != NO_PAGE]
            np.subtract.at(self.references, held, 1)
            freed = set(held[self.references[held] == 0].tolist())
            self._free.extend(sorted(freed, reverse=True))

    def abandon(self, pages: Ints) -> None:
        """Drop the pages of a table that is gone: now, or after what is being counted.

        The garbage collector may find a table in the middle of another one's work.
        """
        self._orphans.append(pages)
        if not self._counting:
            self._drop_orphans()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Keep tables that go away from changing a count within."""
        outer, self._counting = self._counting, True
        try:
            yield
        finally:
            self._counting = outer
            if not outer:
                self._drop_orphans()

    def _drop_orphans(self) -> None:
        while self._orphans:
            self.drop(self._orphans.pop())
