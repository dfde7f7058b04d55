"""Block table: which page holds which token. Integers only, no bytes.

A `BlockTable` lists, for every sequence of a batch, its pages in order; all sequences of a batch
hold the same number of tokens (padding included), as transformers' caches do. Forks of a table
share an allocator.

    logical page     0   1   2   3              tokens 0 .. S-1 are in logical page 0
    sequence 0       -1  7   3   9              three pages in use (first = 1, count = 4)
    sequence 1       -1  7   3   4              two of them shared with sequence 0
"""

import itertools
import sys
from collections import Counter
from collections.abc import Callable

import numpy as np
import torch

from ..ops.blocks import upload
from .page_allocator import NO_PAGE, Ints, PageAllocator

Copies = tuple[Ints, Ints]
"""Pages to copy, `(sources, destinations)`, before the destinations are listed."""
_VERSIONS = itertools.count()


class BlockTable:
    """The pages of each sequence of a batch, in order.

    A page is counted before it is listed, and unlisted before its count falls. So an exception at
    any line, such as KeyboardInterrupt, may lose a free page but never gives a page to two owners.

    Attributes:
        rows: `[B, count]`, int32; columns from `first` on are in use.
        first: logical pages before this one have fallen out of the window.
        version: changes whenever `rows` changes; no two tables have the same.
        page_size: slots per page, in tokens.
    """

    def __init__(self, allocator: PageAllocator) -> None:
        self.allocator, self.page_size = allocator, allocator.page_size
        self.first = 0
        # What `pages_of` found in the rows, by columns, and copies of the rows on devices.
        self._found: dict[tuple[int, int], Ints] = {}
        self._copies: dict[torch.device, torch.Tensor] = {}
        self.rows: Ints = np.full((0, 0), NO_PAGE, np.int32)
        self._change()

    def _change(self) -> None:
        """Forget what was made of the rows, which are about to change."""
        self.version = next(_VERSIONS)
        self._found.clear()
        self._copies.clear()

    def __del__(self) -> None:
        # A fork that is gone holds nothing. At exit the modules that `clear` needs may be gone too.
        if hasattr(self, "rows") and not sys.is_finalizing():
            self.allocator.abandon(self.used().ravel())

    @property
    def batch(self) -> int:
        """Sequences; 0 before the first `reserve`."""
        return len(self.rows)

    @property
    def count(self) -> int:
        """One past the last logical page in use."""
        return int(self.rows.shape[1])

    def used(self) -> Ints:
        """Return the part of `rows` that is in use, a view: `[B, count - first]`."""
        return self.rows[:, self.first :]

    def pages_of(self, start: int, stop: int) -> Ints:
        """Return the pages of tokens `start` to `stop - 1`, as far as they are in use; ascending.

        Each once; found once per change.
        """
        span = max(start // self.page_size, self.first), self._pages(stop)
        if span not in self._found:
            self._found[span] = np.unique(self.rows[:, span[0] : span[1]])
        return self._found[span]

    def on_device(self, device: torch.device, columns: Ints | None = None) -> torch.Tensor:
        """Return a copy of the rows on `device`, `[B, n]`, int32; made once per change.

        `columns`: which ones, the same at every call; None: all.
        """
        if device not in self._copies:
            # np.take, since indexing would lay the copy out by columns, and kernels want rows.
            rows = self.rows if columns is None else self.rows.take(columns, 1)
            self._copies[device] = upload(rows.copy(), device)
        return self._copies[device]

    @property
    def nbytes(self) -> int:
        """Bytes of the rows and of their copies."""
        return self.rows.nbytes + sum(copy.nbytes for copy in self._copies.values())

    def pages_needed(self, start: int, stop: int, batch: int) -> int:
        """Return how many free pages `reserve` would take; change nothing."""
        new = max(0, self._pages(stop) - max(self.count, start // self.page_size)) * batch
        return new + len(self._shared(start, stop))

    def reserve(
        self,
        start: int,
        stop: int,
        batch: int,
        copy: Callable[[Copies], None] | None = None,
        *,
        granted: bool = False,
    ) -> None:
        """Give every token of `start` to `stop - 1` a page that only its sequence holds.

        `start // page_size >= first`; `batch` is fixed by the first call until `clear`; `granted`
        as in `PageAllocator.take`. `copy` copies the content of pages that are shared so far.
        Logical pages from `count` to before `start` get no page.

        Raises:
            OutOfPagesError: the budget would be passed; nothing was changed.
        """
        assert self.batch in (0, batch), (self.batch, batch)
        with self.allocator.counting():
            begin = max(self.count, start // self.page_size)
            new = max(0, self._pages(stop) - begin)
            shared = self._shared(start, stop)
            if new == 0 and not shared:
                return
            numbers = self.allocator.take(new * batch + len(shared), granted=granted)
            index = tuple(np.array(shared, np.int64).reshape(-1, 2).T)
            sources, own = self.rows[index], numbers[new * batch :]
            try:
                if copy is not None:
                    copy((sources, own))
            except BaseException:
                self.allocator.drop(numbers)
                raise
            self._change()
            self.rows[index] = own
            # No page becomes free here: of its holders at least one stays.
            np.subtract.at(self.allocator.references, sources, 1)
            if new:
                # Sequence by sequence, so that each has its pages side by side.
                more = numbers[: new * batch].reshape(batch, new)
                blank = np.full((batch, begin - self.count), NO_PAGE, np.int32)
                if self.first == self.count:
                    self.first = begin
                old = self.rows.reshape(batch, -1)  # also of an empty table
                self.rows = np.concatenate([old, blank, more], axis=1)

    def truncate(self, length: int) -> None:
        """Drop the pages that hold no token below `length`."""
        count = max(self._pages(length), self.first)
        if count < self.count:
            dropped = self.rows[:, count:]
            self._change()
            self.rows = self.rows[:, :count]
            self.allocator.drop(dropped)

    def count_releasable(self, token: int) -> int:
        """Return how many pages `release` would make free; change nothing."""
        first = min(token // self.page_size, self.count)
        if first <= self.first:
            return 0
        numbers, listed = np.unique(self.rows[:, self.first : first], return_counts=True)
        return int((self.allocator.references[numbers] == listed).sum())

    def compact(self) -> Ints | None:
        """Renumber the pages from 0; return the old number of each.

        None: another table holds pages, which knows them by their numbers; nothing was changed.
        """
        allocator = self.allocator
        with allocator.counting():
            used = self.used()
            if int(allocator.references.sum()) != used.size:
                return None
            pages, places = np.unique(used, return_inverse=True)
            self._change()
            used[:] = places.reshape(used.shape)
            allocator.renumber(pages)
            return pages

    def release(self, token: int) -> None:
        """Drop the pages that hold only tokens before `token`."""
        first = min(token // self.page_size, self.count)
        if first > self.first:
            behind = self.rows[:, self.first : first]
            dropped = behind.copy()
            self._change()
            self.first = first
            behind[:] = NO_PAGE
            self.allocator.drop(dropped)

    def list_instead(self, rows: Ints, first: int) -> None:
        """List the pages of `rows`, whose columns from `first` on are in use, instead.

        Pages that were listed before are shared, not copied.
        """
        old = self.used()
        self.allocator.share(rows[:, first:])
        self._change()
        self.rows, self.first = rows, first
        self.allocator.drop(old)

    def fork(self) -> "BlockTable":
        """Return a table with the same pages, each held once more."""
        fork = BlockTable(self.allocator)
        fork.list_instead(self.rows.copy(), self.first)
        return fork

    def clear(self) -> None:
        """Drop every page; the batch size is free again."""
        self.list_instead(np.full((0, 0), NO_PAGE, np.int32), 0)

    def _pages(self, length: int) -> int:
        return -(-length // self.page_size)

    def _shared(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the places `(sequence, logical page)` to write whose page has another holder.

        Of several sequences that hold a page and nobody else does, the last keeps it.
        """
        first, last = start // self.page_size, self._pages(stop)
        references, places, seen = self.allocator.references, [], Counter[int]()
        pages = self.rows[:, first:last]
        if (references[pages] > 1).any():
            for column, held in enumerate(pages.T.tolist(), first):
                for row, page in enumerate(held):
                    seen[page] += 1
                    if references[page] > seen[page]:
                        places.append((row, column))
        return places
