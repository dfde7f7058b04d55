"""Layer groups: layers that share one block table, and what a model step does to it."""

import weakref

import numpy as np
import numpy.typing as npt
import torch

from .. import ops
from ..errors import ConfigError
from ..ops.blocks import upload
from ..ops.visibility import first_visible
from .block_table import BlockTable, Copies
from .page_allocator import NO_PAGE, Ints, PageAllocator, PageBudget
from .page_pool import PagePool
from .passage import Passage

# A step needs a tensor of lengths on each device, and one plan for each number of KV heads.
_MAX_CACHED = 16


class LayerGroup:
    """One block table for all layers that keep the same tokens.

    The pages that the table names exist in every layer's pool, under the same numbers.

    Attributes:
        table: the block table.
        window: tokens that a query sees, its own among them; None: all.
        pools: the pool of each member layer; shared with forks.
        lengths: tokens written, for each member layer (they advance one after the other).
        record_past: pages that fell out of the window stay until the next crop.
        siblings: all groups of the cache; weak, so that a dropped fork goes at once, and its pages.
    """

    def __init__(
        self, budget: PageBudget, window: int | None = None, table: BlockTable | None = None
    ) -> None:
        self.table = table or BlockTable(PageAllocator(budget))
        self.window = window
        self.pools: list[PagePool] = []
        self.lengths: list[int] = []
        self.record_past = False
        if window is not None:
            self.table.allocator.exact = True
            # Pages per sequence that a window is in, the next token among it, wherever it begins.
            self._window_pages = (window + self.page_size - 2) // self.page_size + 1
        self._passage: Passage | None = None
        self.siblings: list[weakref.ref[LayerGroup]] = []
        self._prepared: tuple[int, int, int] | None = None
        self._device_tables: dict[torch.device, torch.Tensor] = {}
        self._device_tables_version = -1
        self._device_lengths: dict[tuple[torch.device, int, int], torch.Tensor] = {}
        # Of the step up to `_planned`.
        self._plans: dict[tuple[object, ...], torch.Tensor | None] = {}
        self._planned = 0

    def add(self, pool: PagePool) -> int:
        """Add a layer, and return its place in `lengths`."""
        self.pools.append(pool)
        self.lengths.append(0)
        return len(self.lengths) - 1

    @property
    def length(self) -> int:
        """Tokens of the layer that is furthest."""
        return max(self.lengths, default=0)

    @property
    def page_size(self) -> int:
        """Slots per page, in tokens."""
        return self.table.page_size

    def visible_from(self, length: int) -> int:
        """Return the first position that a query at position `length` sees."""
        return 0 if self.window is None else max(first_visible(length, self.window), 0)

    def prepare(self, start: int, stop: int, batch: int) -> None:
        """Reserve pages for positions `start` to `stop - 1`, in this and in every other group.

        All or nothing, and for all groups that stand at `start`: the first layer of a step asks
        on behalf of the others, so that a step either fits or changes nothing.

        Raises:
            OutOfPagesError: the budget would be passed; nothing was changed.
        """
        if self._prepared == (start, stop, self.table.version):
            return
        others = [group for ref in self.siblings if (group := ref()) and group is not self]
        groups = [self, *(group for group in others if group.length == start)]
        for group in groups:
            group.end_passage()
            group._check_held(start)
        demands = [group._demand(start, stop, batch) for group in groups]
        if needed := sum(pages for pages, _ in demands):
            self.table.allocator.budget.require(needed - sum(freed for _, freed in demands))
        for group in groups:
            group._make_room(start, stop, batch)
            group._prepared = (start, stop, group.table.version)

    def _check_held(self, start: int) -> None:
        """Raise ConfigError if what a token at `start` sees was given back."""
        if not self.length:
            # Pages of a first call that was interrupted before a layer stored its tokens.
            self.table.clear()
        elif (first := self.table.first * self.page_size) > self.visible_from(start):
            raise ConfigError(
                f"expected the layers with a window of {self.window} to get each call one after "
                f"the other, got one at {start} tokens with another at {self.length}, whose window "
                f"begins at token {first}; give a call to all layers before the next one"
            )

    def _passes(self, start: int, stop: int) -> bool:
        """Return whether a call is longer than the pages that a window is in have room for.

        All of its tokens then go to scratch pages, and the last window of them is kept.
        """
        if self.window is None or self.record_past:
            return False
        pages = -(-stop // self.page_size) - self.visible_from(start) // self.page_size
        # Layers that advance apart need pages for the slowest: then everything is kept.
        return pages > self._window_pages and all(n in (0, start) for n in self.lengths)

    def _demand(self, start: int, stop: int, batch: int) -> tuple[int, int]:
        """Return how many pages a call takes, and how many it gives back before."""
        table = self.table
        if self._passes(start, stop):
            pages = -(-stop // self.page_size) - self._first_kept(stop) // self.page_size
            return pages * batch, table.count_releasable(table.count * self.page_size)
        freed = table.count_releasable(self.first_needed(keep_recorded=True))
        return table.pages_needed(start, stop, batch), freed

    def _make_room(self, start: int, stop: int, batch: int) -> None:
        kept = start
        if self._passes(start, stop):
            kept = self._first_kept(stop)
            if start:
                self._passage = Passage(start, stop, self.table)
                self._replace_table(BlockTable(PageAllocator(self.table.allocator.budget)))
                self.table.allocator.exact = True
            else:
                self.table.clear()
            self.table.skip(kept)
        else:
            self.release_passed(keep_recorded=True)
            self.shrink()
        self.table.reserve(kept, stop, batch, self.copy_pages, granted=True)

    def _first_kept(self, stop: int) -> int:
        """Return the first token of the pages that hold the last window of `stop` tokens."""
        # With a window of 1 the next token sees none of them; a page is kept all the same.
        return min(self.visible_from(stop), stop - 1) // self.page_size * self.page_size

    def _replace_table(self, table: BlockTable) -> None:
        # Versions go on, since what was made of the old table must not be taken for the new one.
        table.version = self.table.version + 1
        self.table = table

    def passage(self, start: int, stop: int) -> Passage | None:
        """Return how the tokens of a call pass that is longer than the window has room for.

        None: they are all stored. On an empty group the caller may do without the passage.
        """
        if self.table.first * self.page_size <= self.visible_from(start):
            return None
        if (passage := self._passage) is None or (passage.start, passage.stop) != (start, stop):
            assert start == 0, f"a passage from {start} to {stop} was not prepared"
            passage = self._passage = Passage(start, stop)
        passage.lay_out(self.table, self.visible_from(start))
        return passage

    def keep_passed(self, member: int, passage: Passage, scratch: PagePool) -> PagePool:
        """Copy the last window from the scratch pages to the member's pool, and return that.

        It is a new one if the old one holds tokens, which `undo` may want.
        """
        pool = self.pools[member]
        if passage.table is not None:
            passage.pools[member] = pool
            pool = self.pools[member] = pool.like(self.table.allocator.capacity)
        pool.grow(self.table.allocator.capacity)
        pool.copy(passage.kept, scratch)
        return pool

    def finish_passage(self) -> None:
        """Give back what a long call replaced, if every layer has stored its tokens."""
        passage = self._passage
        if passage and (not passage.table or all(n in (0, passage.stop) for n in self.lengths)):
            self._passage = None

    def end_passage(self) -> None:
        """Do what `finish_passage` does, or take a call back that no layer has stored.

        Raises:
            ConfigError: some layers have stored it, and others have not.
        """
        self.finish_passage()
        if (passage := self._passage) is None:
            return
        if not passage.pools:
            self._undo_passage(passage)
        else:
            raise ConfigError(
                f"expected every layer to store the tokens {passage.start} to {passage.stop - 1}, "
                f"got some layers at {passage.stop} and others at {passage.start} tokens, and a "
                f"window of {self.window} that a call as long moves on; reset the cache"
            )

    def _undo_passage(self, passage: Passage) -> None:
        assert passage.table is not None
        for member, pool in passage.pools.items():
            self.pools[member], self.lengths[member] = pool, passage.start
        self._replace_table(passage.table)
        self._passage = None

    def undo(self, start: int, tokens: int, members: list[int]) -> None:
        """Take back a step of `tokens` from `start` that `members` have stored."""
        passage = self._passage
        if passage is not None and passage.table is not None and passage.start == start:
            self._undo_passage(passage)
        else:
            self.crop(tokens, members)

    def held_pages(self, member: int) -> Ints:
        """Return the pages of the member's pool that the next call reads, ascending, each once."""
        passage, length = self._passage, self.lengths[member]
        is_before = passage is not None and passage.start == length and member not in passage.pools
        table = passage.table if passage is not None and is_before else None
        return (table or self.table).pages_of(self._first_kept(length), length)

    def shrink(self) -> None:
        """Renumber the pages if few are held, by no fork; on an error no group holds any token."""
        if not self.table.allocator.is_sparse:
            return
        try:
            if (pages := self.table.compact()) is not None:
                for pool in filter(lambda pool: pool.is_allocated, self.pools):
                    pool.keep(pages)
        except BaseException:  # out of memory, Ctrl-C: some layers have the old numbers
            for group in filter(None, (ref() for ref in self.siblings)):
                group.clear()
            raise

    def copy_pages(self, copies: Copies) -> None:
        """Copy pages in every pool, and give each pool room for every page that exists."""
        for pool in self.pools:
            if pool.is_allocated and len(copies[0]):
                pool.grow(self.table.allocator.capacity)
                pool.copy(copies)

    def release_passed(self, *, keep_recorded: bool = False) -> None:
        """Drop the pages behind the window of the next token."""
        self.table.release(self.first_needed(keep_recorded=keep_recorded))

    def first_needed(self, *, keep_recorded: bool = False) -> int:
        """Return the first token of the pages that are kept, or 0 if all are."""
        if self.window is None:
            return 0
        if not (written := [n for n in self.lengths if n]) or (keep_recorded and self.record_past):
            return 0
        return self._first_kept(min(written))

    def check_crop(self, tokens: int) -> None:
        """Raise ConfigError if `tokens` cannot be removed; change nothing."""
        self.end_passage()
        self._check_kept(tokens, self.length, self.table.first * self.page_size)

    def _check_kept(self, tokens: int, stored: int, lost: int) -> None:
        """Raise ConfigError unless the first of `stored - tokens` that is seen is not `lost`."""
        length = max(stored - tokens, 0)
        if tokens and length and self.visible_from(length) < lost:
            raise ConfigError(
                f"crop: expected to go back at most to what the window still holds (token {lost} "
                f"on), got {tokens} tokens to remove from {stored} under a window of "
                f"{self.window}; call activate_past_recording() before these tokens are written"
            )

    def crop(self, tokens: int, members: list[int] | None = None) -> None:
        """Remove the last `tokens` tokens, in every layer or in `members`."""
        self.end_passage()
        for i in range(len(self.lengths)) if members is None else members:
            self.lengths[i] = max(self.lengths[i] - tokens, 0)
        self.table.truncate(self.length)
        if not self.length:
            self.clear()
        self.release_passed()
        self.shrink()

    def select(self, sequences: npt.NDArray[np.int64]) -> None:
        """Make sequence `i` what sequence `sequences[i]` was."""
        self.end_passage()
        if self.table.batch:
            self.table.select(sequences)

    def clear(self) -> None:
        """Drop all tokens; the batch size is free again."""
        if self._passage is not None and self._passage.table is not None:
            # Forks may hold the pools of before.
            self._undo_passage(self._passage)
        self.lengths[:] = [0] * len(self.lengths)
        self.table.clear()
        self._prepared = self._passage = None

    def fork(self) -> "LayerGroup":
        """Return a group without layers over the same pages: O(pages), no bytes are copied."""
        self.end_passage()
        # Whoever writes next must look again at which pages are shared.
        self._prepared = None
        fork = LayerGroup(self.table.allocator.budget, self.window, self.table.fork())
        fork.record_past = self.record_past
        return fork

    def table_on(self, device: torch.device) -> torch.Tensor:
        """Return the pages in use, `[B, count]`, int32, on `device`; made once per change."""
        if self._device_tables_version != self.table.version:
            self._device_tables.clear()
            self._device_tables_version = self.table.version
        if (table := self._device_tables.get(device)) is None:
            # A copy: the rows change in place later, and a handle may still read this.
            table = self._device_tables[device] = upload(self._logical_rows(), device)
        return table

    def _logical_rows(self) -> npt.NDArray[np.int32]:
        """Return a copy of the page of each logical page, `[B, columns]`."""
        return self.table.rows[:, : self.table.count].copy()

    def lengths_on(self, device: torch.device, length: int) -> torch.Tensor:
        """Return `length` for each sequence, `[B]`, int32, on `device`; made once per step."""
        key = (device, length, self.table.batch)
        if (lengths := self._device_lengths.get(key)) is None:
            if len(self._device_lengths) >= _MAX_CACHED:
                self._device_lengths.clear()
            lengths = torch.full((self.table.batch,), length, dtype=torch.int32, device=device)
            self._device_lengths[key] = lengths
        return lengths

    def plan_on(
        self, device: torch.device, start: int, stop: int, heads: int, rows: int, backend: str
    ) -> torch.Tensor | None:
        """Return the plan for `heads` KV heads and positions `start` to `stop - 1`, on `device`.

        `rows`: query rows of each. None: the backend has no plans. Made once per step, and never
        changed: it holds for any number of query tokens, and for any window that leaves nothing
        before `start` visible.
        """
        key = (device, start, stop, self.table.batch, heads, rows, backend)
        if key not in self._plans:
            if self._planned != stop:
                self._plans.clear()  # those of another step, and the room that goes with them
                self._planned = stop
            size = ops.plan_rows(backend, device, self.table.batch, heads, stop - start, rows)
            plan = None
            if size is not None:
                plan = torch.empty((size, 4), dtype=torch.int32, device=device)
                ops.make_plan(plan, self.lengths_on(device, stop), 1, 0, start, heads, backend)
            self._plans[key] = plan
        return self._plans[key]

    def memory_footprint(self) -> dict[str, int]:
        """Return the bytes of the block table and its copies on devices, as `tables`."""
        copies = sum(tensor.nbytes for tensor in self._device_tables.values())
        return {"tables": self.table.rows.nbytes + copies}

    def check(self) -> None:
        """Raise AssertionError unless the table covers what the layers say they hold."""
        covered = self.table.count * self.page_size
        assert self.length <= covered, f"{self.length} tokens in pages for {covered}"
        used = self.table.used()
        assert (used != NO_PAGE).all()
