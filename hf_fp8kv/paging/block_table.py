"""Block table: which page holds which token. Integers only, no bytes.

A `PageAllocator` hands out page numbers and counts who holds each. A `BlockTable` lists, for every
sequence of a batch, its pages in order; all sequences of a batch hold the same number of tokens
(padding included), as transformers' caches do. Forks of a table share an allocator. All allocators
of a cache share a `PageBudget`.

    logical page     0   1   2   3   4          tokens 0 .. S-1 are in logical page 0
    sequence 0       7   3   9   -1  -1         three pages in use (first = 0, count = 3)
    sequence 1       7   3   4   -1  -1         two of them shared with sequence 0
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from ..errors import OutOfPagesError

NO_PAGE = -1
# The pool grows by at least this many tokens, and by at least 1/32 of what is held: waste stays
# under 4 % from 8k tokens on, and each byte is moved about 32 times in its life at most.
GROWTH_TOKENS = 256
GROWTH_SHARE = 32

Ints = npt.NDArray[np.int32]
Copies = tuple[Ints, Ints]
"""Pages to copy, `(sources, destinations)`, before the destinations are written."""


class PageBudget:
    """How many pages all allocators that share it may hold at once.

    Attributes:
        page_size: slots per page, in tokens.
        max_pages: the most pages held at once; None: no limit.
        held: pages held now.
    """

    def __init__(self, page_size: int, max_pages: int | None = None) -> None:
        self.page_size = page_size
        self.max_pages = max_pages
        self.held = 0

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
        self.budget = budget
        self.references: Ints = np.zeros(0, np.int32)
        self._free: list[int] = []
        self._orphans: list[Ints] = []
        self._counting = False
        # Whether pages are made as needed and no more: for a table that never grows.
        self.exact = False

    @property
    def page_size(self) -> int:
        """Slots per page, in tokens."""
        return self.budget.page_size

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
        return self.capacity - self.free

    def take(self, pages: int) -> Ints:
        """Return `pages` page numbers, each held once; make new ones in steps if needed."""
        self.budget.require(pages)
        missing = pages - self.free
        if missing > 0:
            step = max(-(-GROWTH_TOKENS // self.page_size), self.capacity // GROWTH_SHARE)
            if self.exact:
                step = 0
            self._extend(missing + step if self.capacity == 0 else max(missing, step))
        numbers = np.array([self._free.pop() for _ in range(pages)], np.int32)
        self.references[numbers] = 1
        self.budget.held += pages
        return numbers

    def reset(self) -> None:
        """Remove every page; only while none is held."""
        assert self.held == 0, f"{self.held} pages are held"
        self.references, self._free = np.zeros(0, np.int32), []

    def _extend(self, pages: int) -> None:
        if self.budget.max_pages is not None:
            pages = min(pages, self.budget.max_pages - self.capacity)
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
            freed = sorted(set(held[self.references[held] == 0].tolist()), reverse=True)
            self._free.extend(freed)
            self.budget.held -= len(freed)

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


class BlockTable:
    """The pages of each sequence of a batch, in order.

    Attributes:
        rows: `[B, columns]`, int32; only columns `first` to `count - 1` are in use.
        first: logical pages before this one have fallen out of the window.
        count: one past the last logical page in use.
        version: changes whenever `rows` changes.
    """

    def __init__(self, allocator: PageAllocator) -> None:
        self.allocator = allocator
        self.rows: Ints = np.full((0, 0), NO_PAGE, np.int32)
        self.first = 0
        self.count = 0
        self.version = 0

    def __del__(self) -> None:
        # A fork that is gone holds nothing. At exit the modules that `clear` needs may be gone too.
        if hasattr(self, "rows") and not sys.is_finalizing():
            self.allocator.abandon(self.used().ravel())

    @property
    def batch(self) -> int:
        """Sequences; 0 before the first `reserve`."""
        return len(self.rows)

    @property
    def page_size(self) -> int:
        """Slots per page, in tokens."""
        return self.allocator.page_size

    @property
    def is_shared(self) -> bool:
        """Whether a page of this table has another holder, here or in a fork."""
        return bool((self.allocator.references[self.used()] > 1).any())

    def used(self) -> Ints:
        """Return the part of `rows` that is in use, a view: `[B, count - first]`."""
        return self.rows[:, self.first : self.count]

    def pages_needed(self, start: int, stop: int, batch: int) -> int:
        """Return how many free pages `reserve` would take; change nothing."""
        new = max(0, self._pages(stop) - self.count) * batch
        return new + len(self._shared(start, stop))

    def reserve(self, start: int, stop: int, batch: int) -> Copies:
        """Give every token of `start` to `stop - 1` a page that only its sequence holds.

        `start // page_size >= first`; `batch` is fixed by the first call until `clear`. Return the
        pages whose content must be copied, `(sources, destinations)`.

        Raises:
            OutOfPagesError: the budget would be passed; nothing was changed.
        """
        assert self.batch in (0, batch), (self.batch, batch)
        with self.allocator.counting():
            return self._reserve(start, stop, batch)

    def _reserve(self, start: int, stop: int, batch: int) -> Copies:
        new = max(0, self._pages(stop) - self.count)
        shared = self._shared(start, stop)
        if new == 0 and not shared:
            return _NO_COPIES
        numbers = self.allocator.take(new * batch + len(shared))
        if self.batch == 0:
            self.rows = np.full((batch, 0), NO_PAGE, np.int32)
        self._widen(self.count + new)
        copies = self._unshare(shared, numbers[new * batch :])
        if new:
            # Sequence by sequence, so that each has its pages side by side.
            self.rows[:, self.count : self.count + new] = numbers[: new * batch].reshape(batch, new)
            self.count += new
        self.version += 1
        return copies

    def truncate(self, length: int) -> None:
        """Drop the pages that hold no token below `length`."""
        count = max(self._pages(length), self.first)
        if count < self.count:
            self.allocator.drop(self.rows[:, count : self.count].ravel())
            self.rows[:, count : self.count] = NO_PAGE
            self.count = count
            self.version += 1

    def count_releasable(self, token: int) -> int:
        """Return how many pages `release` would make free; change nothing."""
        first = min(token // self.page_size, self.count)
        numbers, listed = np.unique(self.rows[:, self.first : first], return_counts=True)
        return int((self.allocator.references[numbers] == listed).sum())

    def release(self, token: int) -> None:
        """Drop the pages that hold only tokens before `token`."""
        first = min(token // self.page_size, self.count)
        if first > self.first:
            self.allocator.drop(self.rows[:, self.first : first].ravel())
            self.rows[:, self.first : first] = NO_PAGE
            self.first = first
            self.version += 1

    def select(self, sequences: npt.NDArray[np.integer]) -> None:
        """Make sequence `i` what sequence `sequences[i]` was; pages are shared, not copied."""
        old = self.used().ravel().copy()
        self.rows = self.rows[sequences]
        self.allocator.share(self.used().ravel())
        self.allocator.drop(old)
        self.version += 1

    def fork(self) -> "BlockTable":
        """Return a table with the same pages, each held once more."""
        fork = BlockTable(self.allocator)
        fork.rows, fork.first, fork.count = self.rows.copy(), self.first, self.count
        self.allocator.share(fork.used().ravel())
        return fork

    @classmethod
    def from_rows(cls, budget: PageBudget, rows: Ints, first: int) -> "BlockTable":
        """Return a table with an allocator of its own.

        `rows`, `[B, n]`, are the pages of logical pages `first` to `first + n - 1`, numbered from 0
        without gaps.

        Raises:
            OutOfPagesError: the budget would be passed.
        """
        table = cls(PageAllocator(budget))
        pages = table.allocator.take(int(rows.max(initial=-1)) + 1)
        table.rows = np.concatenate([np.full((len(rows), first), NO_PAGE, np.int32), rows], axis=1)
        table.first, table.count = first, first + rows.shape[1]
        # `take` counted each page once, the rows may list it more often.
        table.allocator.share(rows.ravel())
        table.allocator.drop(pages)
        return table

    def clear(self) -> None:
        """Drop every page; the batch size is free again."""
        self.allocator.drop(self.used().ravel())
        self.rows = np.full((0, 0), NO_PAGE, np.int32)
        self.first = self.count = 0
        self.version += 1

    def check(self, *others: "BlockTable") -> None:
        """Raise AssertionError with the counts unless allocator and tables agree.

        `others` are all other tables that share the allocator.
        """
        tables = (self, *others)
        references = np.zeros(self.allocator.capacity, np.int64)
        for table in tables:
            used = table.used()
            assert (used >= 0).all(), f"a page in use has no number: {used}"
            assert (table.rows[:, : table.first] == NO_PAGE).all(), "a released page is listed"
            assert (table.rows[:, table.count :] == NO_PAGE).all(), "a page beyond count is listed"
            np.add.at(references, used.ravel(), 1)
        wrong = np.flatnonzero(references != self.allocator.references)
        assert not len(wrong), (
            f"pages {wrong.tolist()} are listed {references[wrong].tolist()} times and counted "
            f"{self.allocator.references[wrong].tolist()} times"
        )
        free = np.flatnonzero(references == 0)
        assert sorted(self.allocator._free) == free.tolist(), (
            f"{len(free)} pages are held by nobody, {self.allocator.free} are listed as free"
        )

    def _pages(self, length: int) -> int:
        return -(-length // self.page_size)

    def _shared(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the places `(sequence, logical page)` to write whose page has another holder.

        Of several sequences that hold a page and nobody else does, the last keeps it.
        """
        first, last = start // self.page_size, min(self._pages(stop), self.count)
        if not (self.allocator.references[self.rows[:, first:last]] > 1).any():
            return []
        left: dict[int, int] = {}
        places = []
        for column in range(first, last):
            for row, page in enumerate(self.rows[:, column].tolist()):
                holders = left.get(page)
                if holders is None:
                    holders = int(self.allocator.references[page])
                if holders > 1:
                    places.append((row, column))
                left[page] = holders - 1
        return places

    def _unshare(self, places: list[tuple[int, int]], numbers: Ints) -> Copies:
        if not places:
            return _NO_COPIES
        index = tuple(np.array(places).T)
        sources = self.rows[index].copy()
        self.rows[index] = numbers
        # No page becomes free here: of its holders at least one stays.
        np.subtract.at(self.allocator.references, sources, 1)
        return sources, numbers

    def _widen(self, columns: int) -> None:
        have = self.rows.shape[1]
        if columns > have:
            # A quarter more, so that a growing sequence seldom moves the table.
            extra = max(columns + columns // 4, 8) - have
            blank = np.full((self.batch, extra), NO_PAGE, np.int32)
            self.rows = np.concatenate([self.rows, blank], axis=1)


_NO_COPIES: Copies = (np.zeros(0, np.int32), np.zeros(0, np.int32))
