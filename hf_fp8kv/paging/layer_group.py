"""Layer groups: layers that share one block table, and the window rule.

A page is freed when its last token has left the window. During a call of more tokens than the
pages of a window have room for, the pages from before the call stay until every layer has stored
its tokens, so that the call can be undone. Each layer stores such a call in scratch pages, which
its queries read, and copies the last window from there to its own pages.
"""

import weakref

import torch

from .. import ops
from ..errors import ConfigError
from ..ops.visibility import first_visible
from .block_table import BlockTable, Copies
from .page_allocator import Ints, PageAllocator, PageBudget
from .page_pool import PagePool


class Step:
    """A call of the layers of a group, each of which gets the same number of tokens.

    The first layer of a step makes it. Lengths and plans are made once per device and kind.

    Attributes:
        start: tokens that each sequence held before.
        stop: tokens that each sequence holds after it.
        batch: the number of sequences.
        version: the version of the block table, once it has the pages of the call.
        kept: the logical page from which on a long call has pages; None: it is not long.
    """

    def __init__(
        self, start: int, stop: int, batch: int, version: int = -1, kept: int | None = None
    ) -> None:
        self.start, self.stop, self.batch, self.version = start, stop, batch, version
        self.kept = kept
        self._lengths: dict[torch.device, torch.Tensor] = {}
        self._plans: dict[tuple[object, ...], torch.Tensor | None] = {}

    def lengths(self, device: torch.device) -> torch.Tensor:
        """Return `stop` for each sequence, `[B]`, int32, on `device`."""
        if (lengths := self._lengths.get(device)) is None:
            lengths = torch.full((self.batch,), self.stop, dtype=torch.int32, device=device)
            self._lengths[device] = lengths
        return lengths

    def plan(
        self, first: int, heads: int, rows: int, device: torch.device, backend: str
    ) -> torch.Tensor | None:
        """Return the plan for positions `first` to `stop - 1`; None: the backend has no plans.

        `heads`: KV heads. `rows`: query rows of each. A plan never changes. It holds for any number
        of query tokens, and for any window that leaves nothing before `first` visible.
        """
        key = (first, heads, rows, device, backend)
        if key not in self._plans:
            size = ops.plan_rows(backend, device, self.batch, heads, self.stop - first, rows)
            plan = None
            if size is not None:
                plan = torch.empty((size, 4), dtype=torch.int32, device=device)
                ops.make_plan(plan, self.lengths(device), 1, 0, first, heads, backend)
            self._plans[key] = plan
        return self._plans[key]


class LayerGroup:
    """One block table for all layers that keep the same tokens.

    The pages that the table names exist in every layer's pool, under the same numbers.

    Attributes:
        table: the block table.
        budget: how many pages may be held.
        window: tokens that a query sees, its own among them; None: all.
        window_pages: the most pages of a sequence that hold a window and the next token.
        page_size: slots per page, in tokens.
        pools: the pool of each member layer; shared with forks.
        lengths: tokens written, for each member layer (they advance one after the other).
        record_past: pages that fell out of the window stay until the next crop.
        siblings: all groups of the cache; weak, so that a dropped fork goes at once, and its pages.
        step: the step that `prepare` was called for last, or None.
        deferred: the slots, and the number of sequences, for which pages are taken when the table
            is used, or None; see `FixedPages.defer`.
    """

    def __init__(
        self, budget: PageBudget, window: int | None = None, table: BlockTable | None = None
    ) -> None:
        self._table = table or BlockTable(PageAllocator(budget))
        self.budget, self.page_size, self.window = budget, budget.page_size, window
        self.pools: list[PagePool] = []
        self.lengths: list[int] = []
        self.record_past = False
        if window is not None:
            self._table.allocator.exact = True
            self.window_pages = (window + self.page_size - 2) // self.page_size + 1
        self.step: Step | None = None
        self.deferred: tuple[int, int] | None = None
        self.siblings: list[weakref.ref[LayerGroup]] = []

    def add(self, pool: PagePool) -> int:
        """Add a layer, and return its place in `lengths`."""
        self.pools.append(pool)
        self.lengths.append(0)
        return len(self.lengths) - 1

    @property
    def table(self) -> BlockTable:
        """The block table, with the pages that compiled code has already used."""
        if self.deferred is not None:
            (slots, batch), self.deferred = self.deferred, None
            self._table.reserve(0, slots, batch)
        return self._table

    @property
    def length(self) -> int:
        """Tokens of the layer that is furthest."""
        return max(self.lengths, default=0)

    def visible_from(self, length: int) -> int:
        """Return the first position that a query at position `length` sees."""
        return 0 if self.window is None else max(first_visible(length, self.window), 0)

    def first_kept(self, length: int) -> int:
        """Return the first token of the pages that hold the last window of `length` tokens."""
        # With a window of 1 the next token sees none of them; a page is kept all the same.
        return min(self.visible_from(length), length - 1) // self.page_size * self.page_size

    # -- a step ------------------------------------------------------------------------------

    def prepare(self, start: int, stop: int, batch: int) -> None:
        """Reserve pages for positions `start` to `stop - 1`, in this and in every other group.

        All or nothing, and for all groups that stand at `start`: the first layer of a step asks
        on behalf of the others, so that a step either fits or changes nothing.

        Raises:
            OutOfPagesError: the budget would be passed; nothing was changed.
            ConfigError: what a token at `start` sees was given back.
        """
        step, version = self.step, self.table.version
        if step and (step.start, step.stop, step.version) == (start, stop, version):
            return
        others = [group for ref in self.siblings if (group := ref()) and group is not self]
        groups = [self, *(group for group in others if group.length == start)]
        for group in groups:
            group.settle()
            if not group.length:
                # Pages of a first call that was interrupted before a layer stored its tokens.
                group.table.clear()
            elif (first := group.table.first * group.page_size) > group.visible_from(start):
                raise ConfigError(
                    f"expected the layers with a window of {group.window} to get each call one "
                    f"after the other, got one at {start} tokens with another at {group.length}, "
                    f"whose window begins at token {first}; give a call to all layers before the "
                    "next one"
                )
        calls = [(group, *group._span(start, stop)) for group in groups]
        if needed := sum(x.table.pages_needed(first, stop, batch) for x, first, *_ in calls):
            freed = sum(group.table.count_releasable(kept) for group, _, kept, _ in calls)
            self.budget.require(needed - freed)
        for group, first, kept, is_long in calls:
            if not is_long:
                group.table.release(kept)
                group.shrink()
            # Before it has pages, so that an interrupted long call is undone.
            step = Step(start, stop, batch, kept=first // self.page_size if is_long else None)
            group.step = step
            group.table.reserve(first, stop, batch, group.copy_pages, granted=True)
            step.version = group.table.version

    def _span(self, start: int, stop: int) -> tuple[int, int, bool]:
        """Return which token of a call has the first page, and which token is kept after it.

        Also return whether the call is long, so that the table frees pages when it ends.
        """
        if self.window is not None and not self.record_past:
            pages = -(-stop // self.page_size) - self.visible_from(start) // self.page_size
            # Layers that advance apart need pages for the slowest: then everything is kept.
            if pages > self.window_pages and all(n in (0, start) for n in self.lengths):
                kept = self.first_kept(stop)
                return max(start, kept), kept, True
        return start, self._first_needed(keep_recorded=True), False

    def _long_step(self) -> Step | None:
        """Return the running long call, for which the pages from before it stay, or None."""
        step = self.step
        return step if step and step.start and step.kept is not None else None

    def finish(self) -> None:
        """Free the pages from before a long call that every layer has stored."""
        step = self._long_step()
        if step and all(n in (0, step.stop) for n in self.lengths):
            self.table.release(self.first_kept(step.stop))
            step.kept = None
            self.shrink(at_once=True)

    def settle(self) -> None:
        """Do what `finish` does, or undo a long call that no layer has stored.

        Raises:
            ConfigError: some layers have stored it, and others have not.
        """
        self.finish()
        if (step := self._long_step()) is None:
            return
        if step.stop in self.lengths:
            raise ConfigError(
                f"expected every layer to store the tokens {step.start} to {step.stop - 1}, got "
                f"some layers at {step.stop} and others at {step.start} tokens, and a window of "
                f"{self.window} that a call as long moves on; reset the cache"
            )
        self.drop_unused()

    def drop_unused(self) -> None:
        """Drop the pages of a step that no layer has stored, or that was undone for all."""
        step, length = self._long_step(), self.length
        self.table.truncate(length)
        if not length:
            self.clear()
        elif step and length == step.start:
            self.step = None
            self.shrink(at_once=True)

    def held_pages(self, member: int) -> Ints:
        """Return the pages of the member's pool that the next call reads, ascending, each once."""
        length = self.lengths[member]
        return self.table.pages_of(self.first_kept(length), length)

    def shrink(self, *, at_once: bool = False) -> None:
        """Renumber the pages, unless forks hold some: if few are held, or `at_once` if any is free.

        After an error no group holds any token.
        """
        allocator = self.table.allocator
        if not (allocator.is_sparse or (at_once and allocator.held and allocator.free)):
            return
        try:
            if (pages := self.table.compact()) is not None:
                for pool in filter(lambda pool: pool.is_allocated, self.pools):
                    pool.memory.keep(pages)
        except BaseException:  # out of memory, Ctrl-C: some layers have the old numbers
            for group in filter(None, (ref() for ref in self.siblings)):
                group.clear()
            raise

    def copy_pages(self, copies: Copies) -> None:
        """Copy pages in every pool, and give each pool room for every page that exists."""
        for pool in self.pools:
            if pool.is_allocated and len(copies[0]):
                pool.memory.grow(self.table.allocator.capacity)
                pool.memory.copy(*copies)

    def _first_needed(self, *, keep_recorded: bool = False) -> int:
        """Return the first token of the pages that are kept, or 0 if all are."""
        if self.window is None:
            return 0
        if not (written := [n for n in self.lengths if n]) or (keep_recorded and self.record_past):
            return 0
        return self.first_kept(min(written))

    # -- all tokens --------------------------------------------------------------------------

    def crop(self, tokens: int, members: list[int] | None = None) -> None:
        """Remove the last `tokens` tokens, in every layer or in `members`."""
        self.settle()
        for i in range(len(self.lengths)) if members is None else members:
            self.lengths[i] = max(self.lengths[i] - tokens, 0)
        self.table.truncate(self.length)
        if not self.length:
            self.clear()
        self.table.release(self._first_needed())
        self.shrink()

    def clear(self) -> None:
        """Drop all tokens; the batch size is free again."""
        self.lengths[:] = [0] * len(self.lengths)
        self.table.clear()
        self.step = None

    def fork(self) -> "LayerGroup":
        """Return a group without layers over the same pages: O(pages), no bytes are copied."""
        self.settle()
        # Whoever writes next must look again at which pages are shared.
        self.step = None
        fork = LayerGroup(self.budget, self.window, self.table.fork())
        fork.record_past = self.record_past
        return fork
