"""The block table: the page of each token. It holds page numbers, not bytes.

A `BlockTable` lists the pages of every sequence of a batch, in order. As in transformers' caches,
all sequences of a batch have the same number of tokens, including padding. Forks of a table share
an allocator.

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
"""Pages to copy before the destinations are listed, `(sources, destinations)`."""
_VERSIONS = itertools.count()


class BlockTable:
    """The pages of each sequence of a batch, in order.

    A page is counted before it is listed, and removed from the list before its count decreases. An
    exception at any line, such as KeyboardInterrupt, can therefore lose a free page, but never
    gives a page to two owners.

    Attributes:
        rows: Page numbers, `[B, count]`, int32. Columns from `first` on are in use.
        first: First logical page in use. Earlier pages have left the window.
        version: Number that changes with `rows`, unique over all tables.
        page_size: Slots (tokens) per page.
    """

    def __init__(self, allocator: PageAllocator) -> None:
        self.allocator, self.page_size = allocator, allocator.page_size
        self.first = 0
        # Results of `pages_of` by columns, and copies of the rows by device.
        self._pages_found: dict[tuple[int, int], Ints] = {}
        self._copies: dict[torch.device, torch.Tensor] = {}
        self.rows: Ints = np.full((0, 0), NO_PAGE, np.int32)
        self._change()

    def _change(self) -> None:
        """Drop everything that was derived from the rows, which are about to change."""
        self.version = next(_VERSIONS)
        self._pages_found.clear()
        self._copies.clear()

    def __del__(self) -> None:
        # Frees the pages of a fork that is collected. At exit, required modules may be gone.
        if hasattr(self, "rows") and not sys.is_finalizing():
            self.allocator.abandon(self.used().ravel())

    @property
    def batch(self) -> int:
        """Number of sequences, 0 before the first `reserve`."""
        return len(self.rows)

    @property
    def count(self) -> int:
        """The last logical page in use plus one."""
        return int(self.rows.shape[1])

    def used(self) -> Ints:
        """Return a view of the part of `rows` that is in use, `[B, count - first]`."""
        return self.rows[:, self.first :]

    def pages_of(self, start: int, stop: int) -> Ints:
        """Return the pages in use of tokens `start` to `stop - 1`, ascending, without duplicates.

        The result is cached until the rows change.
        """
        span = max(start // self.page_size, self.first), self._pages(stop)
        if span not in self._pages_found:
            self._pages_found[span] = np.unique(self.rows[:, span[0] : span[1]])
        return self._pages_found[span]

    def on_device(self, device: torch.device, columns: Ints | None = None) -> torch.Tensor:
        """Return a copy of the rows on `device`, `[B, n]`, int32, cached until the rows change.

        `columns` selects columns, and must be the same in every call. None means all.
        """
        if device not in self._copies:
            # `take`, because indexing would return a column-major copy, and kernels need rows.
            rows = self.rows if columns is None else self.rows.take(columns, 1)
            self._copies[device] = upload(rows.copy(), device)
        return self._copies[device]

    @property
    def nbytes(self) -> int:
        """Size of the rows and of their copies, in bytes."""
        return self.rows.nbytes + sum(copy.nbytes for copy in self._copies.values())

    def pages_needed(self, start: int, stop: int, batch: int) -> int:
        """Return the number of pages that `reserve` would allocate."""
        count = max(0, self._pages(stop) - max(self.count, start // self.page_size)) * batch
        return count + len(self._shared(start, stop))

    def reserve(
        self,
        start: int,
        stop: int,
        batch: int,
        copy: Callable[[Copies], None] | None = None,
        *,
        granted: bool = False,
    ) -> None:
        """Give each token from `start` to `stop - 1` a page that only its sequence holds.

        Logical pages between `count` and `start` get no page.

        Args:
            start: First token, with `start // page_size >= first`.
            stop: Last token plus one.
            batch: Number of sequences. The first call sets it until `clear`.
            copy: Function that copies pages which are shared so far.
            granted: As in `PageAllocator.allocate`.

        Raises:
            OutOfPagesError: The budget would be exceeded. Nothing was changed.
        """
        assert self.batch in (0, batch), (self.batch, batch)
        begin = max(self.count, start // self.page_size)
        columns = max(0, self._pages(stop) - begin)
        shared = self._shared(start, stop)
        if columns == 0 and not shared:
            return
        numbers = self.allocator.allocate(columns * batch + len(shared), granted=granted)
        index = tuple(np.array(shared, np.int64).reshape(-1, 2).T)
        sources, copies_of_shared = self.rows[index], numbers[columns * batch :]
        try:
            if copy is not None:
                copy((sources, copies_of_shared))
        except BaseException:
            self.allocator.free(numbers)
            raise
        self._change()
        self.rows[index] = copies_of_shared
        self.allocator.free(sources)
        if columns:
            # Sequence by sequence, so that the pages of each sequence are adjacent.
            new_rows = numbers[: columns * batch].reshape(batch, columns)
            blank = np.full((batch, begin - self.count), NO_PAGE, np.int32)
            if self.first == self.count:
                self.first = begin
            old_rows = self.rows.reshape(batch, -1)  # also if the table is empty
            self.rows = np.concatenate([old_rows, blank, new_rows], axis=1)

    def truncate(self, length: int) -> None:
        """Free the pages without tokens below `length`."""
        count = max(self._pages(length), self.first)
        if count < self.count:
            dropped = self.rows[:, count:]
            self._change()
            self.rows = self.rows[:, :count]
            self.allocator.free(dropped)

    def count_releasable(self, token: int) -> int:
        """Return the number of pages that `release` would free."""
        first = min(token // self.page_size, self.count)
        if first <= self.first:
            return 0
        numbers, listed = np.unique(self.rows[:, self.first : first], return_counts=True)
        return int((self.allocator.references[numbers] == listed).sum())

    def compact(self) -> Ints | None:
        """Renumber the pages from 0, and return the old number of each.

        Returns None and changes nothing if another table also holds pages.
        """
        allocator = self.allocator
        used = self.used()
        if int(allocator.references.sum()) != used.size:
            return None
        pages, indices = np.unique(used, return_inverse=True)
        self._change()
        used[:] = indices.reshape(used.shape)
        allocator.renumber(pages)
        return pages

    def release(self, token: int) -> None:
        """Free the pages that only have tokens before `token`."""
        first = min(token // self.page_size, self.count)
        if first > self.first:
            behind = self.rows[:, self.first : first]
            dropped = behind.copy()
            self._change()
            self.first = first
            behind[:] = NO_PAGE
            self.allocator.free(dropped)

    def replace_rows(self, rows: Ints, first: int) -> None:
        """Replace the rows. Columns of the new rows from `first` on are in use.

        Pages that were listed before are shared, not copied.
        """
        old_pages = self.used()
        self.allocator.share(rows[:, first:])
        self._change()
        self.rows, self.first = rows, first
        self.allocator.free(old_pages)

    def fork(self) -> "BlockTable":
        """Return a table that shares all pages with this one."""
        fork = BlockTable(self.allocator)
        fork.replace_rows(self.rows.copy(), self.first)
        return fork

    def clear(self) -> None:
        """Free all pages. The batch size may then change."""
        self.replace_rows(np.full((0, 0), NO_PAGE, np.int32), 0)

    def _pages(self, length: int) -> int:
        return -(-length // self.page_size)

    def _shared(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the entries `(sequence, logical page)` to write whose page has another holder.

        If only sequences of this table share a page, the last of them keeps it.
        """
        self.allocator.free_orphans()
        first, last = start // self.page_size, self._pages(stop)
        references, entries, counts = self.allocator.references, [], Counter[int]()
        pages = self.rows[:, first:last]
        if (references[pages] > 1).any():
            for column, pages_of_column in enumerate(pages.T.tolist(), first):
                for row, page in enumerate(pages_of_column):
                    counts[page] += 1
                    if references[page] > counts[page]:
                        entries.append((row, column))
        return entries
