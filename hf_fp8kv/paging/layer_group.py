"""Layer groups: layers that share one block table, and the window rule.

A page is freed when its last token has left the window. A call is *long* if it has more tokens than
the pages of a window have room for. During a long call, the previous pages stay until every layer
has stored its tokens, so that the call can be undone. Each layer stores such a call in scratch
pages, which its queries read, and copies the last window from there to its own pages.
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
    """A call of the layers of a group, which all get the same number of tokens.

    The first layer of a step creates it. Lengths and work plans are computed once per device and
    shared.

    Attributes:
        start: Number of tokens in each sequence before the step.
        stop: Number of tokens in each sequence after the step.
        batch: Number of sequences.
        version: Version of the block table after the pages of the call were reserved.
        kept: First logical page of a long call, or None if the call is not long.
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
        """Return the work plan for positions `first` to `stop - 1`, or None without plans.

        `heads` is the number of KV heads, and `rows` the number of query rows per KV head. A plan
        never changes. It is valid for any number of query tokens, and for any window in which
        nothing before `first` is visible.
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
    """Layers that keep the same tokens and share one block table.

    The pages in the table exist in the pool of every layer, under the same numbers.

    Attributes:
        table: The block table.
        budget: The budget of pages.
        window: Number of tokens that a query attends to, including its own. None means all.
        window_pages: Maximum number of pages of a sequence that a window and the next token span.
        page_size: Slots (tokens) per page.
        pools: The pool of each member layer, shared with forks.
        lengths: Number of tokens written by each member layer. Layers advance one after another.
        record_past: Whether pages that have left the window stay until the next crop.
        siblings: Weak references to all groups of the cache, so that a dropped fork frees its pages
            at once.
        step: The step of the last call of `prepare`, or None.
        deferred: Number of slots and sequences to allocate when the table is used, or None. See
            `FixedPages.defer`.
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
        """Add a layer, and return its index in `lengths`."""
        self.pools.append(pool)
        self.lengths.append(0)
        return len(self.lengths) - 1

    @property
    def table(self) -> BlockTable:
        """The block table. Pages that compiled code already uses are allocated first."""
        if self.deferred is not None:
            (slots, batch), self.deferred = self.deferred, None
            self._table.reserve(0, slots, batch)
        return self._table

    @property
    def length(self) -> int:
        """Number of tokens in the longest layer."""
        return max(self.lengths, default=0)

    def visible_from(self, length: int) -> int:
        """Return the first position that is visible to a query at position `length`."""
        return 0 if self.window is None else max(first_visible(length, self.window), 0)

    def first_kept(self, length: int) -> int:
        """Return the first token in the pages of the last window of `length` tokens."""
        # With a window of 1 the next token attends to none of them, but a page is still kept.
        return min(self.visible_from(length), length - 1) // self.page_size * self.page_size

    # -- a step ------------------------------------------------------------------------------

    def prepare(self, start: int, stop: int, batch: int) -> None:
        """Reserve pages for positions `start` to `stop - 1` in all groups whose length is `start`.

        The first layer of a step reserves pages for all layers, so a step either fits or changes
        nothing.

        Raises:
            OutOfPagesError: The budget would be exceeded. Nothing was changed.
            ConfigError: A token that is visible from `start` was already freed.
        """
        step, version = self.step, self.table.version
        if step and (step.start, step.stop, step.version) == (start, stop, version):
            return
        other_groups = [group for ref in self.siblings if (group := ref()) and group is not self]
        groups = [self, *(group for group in other_groups if group.length == start)]
        for group in groups:
            group.settle()
            if not group.length:
                # Frees pages of a first call that was interrupted before a layer stored its tokens.
                group.table.clear()
            elif (first := group.table.first * group.page_size) > group.visible_from(start):
                raise ConfigError(
                    f"expected all layers with a window of {group.window} to store a call before "
                    f"the next call, got a layer at {start} tokens while another is at "
                    f"{group.length}, whose window begins at token {first}; pass each call to all "
                    "layers"
                )
        calls = [(group, *group._span(start, stop)) for group in groups]
        if needed := sum(x.table.pages_needed(first, stop, batch) for x, first, *_ in calls):
            freed = sum(group.table.count_releasable(kept) for group, _, kept, _ in calls)
            self.budget.require(needed - freed)
        for group, first, kept, is_long in calls:
            if not is_long:
                group.table.release(kept)
                group.shrink()
            # Set before pages are reserved, so that an interrupted long call is undone.
            step = Step(start, stop, batch, kept=first // self.page_size if is_long else None)
            group.step = step
            group.table.reserve(first, stop, batch, group.copy_pages, granted=True)
            step.version = group.table.version

    def _span(self, start: int, stop: int) -> tuple[int, int, bool]:
        """Return the first token of a call's pages, the first token to keep, and if it is long."""
        if self.window is not None and not self.record_past:
            pages = -(-stop // self.page_size) - self.visible_from(start) // self.page_size
            # If layers advance separately, the slowest layer needs its pages, so all are kept.
            if pages > self.window_pages and all(n in (0, start) for n in self.lengths):
                kept = self.first_kept(stop)
                return max(start, kept), kept, True
        return start, self._first_needed(keep_recorded=True), False

    def _long_step(self) -> Step | None:
        """Return the step of a running long call, whose previous pages are still kept, or None."""
        step = self.step
        return step if step and step.start and step.kept is not None else None

    def finish(self) -> None:
        """Free the previous pages after every layer has stored a long call."""
        step = self._long_step()
        if step and all(n in (0, step.stop) for n in self.lengths):
            self.table.release(self.first_kept(step.stop))
            step.kept = None
            self.shrink(at_once=True)

    def settle(self) -> None:
        """Finish a long call that all layers have stored, or undo one that no layer has stored.

        Raises:
            ConfigError: Only some of the layers have stored it.
        """
        self.finish()
        if (step := self._long_step()) is None:
            return
        if step.stop in self.lengths:
            raise ConfigError(
                f"expected every layer to store the tokens {step.start} to {step.stop - 1}, got "
                f"some layers at {step.stop} and others at {step.start} tokens, under a window of "
                f"{self.window} that has moved on; reset the cache"
            )
        self.drop_unused()

    def drop_unused(self) -> None:
        """Free the pages of a step that no layer has stored, or that was undone for all layers."""
        step, length = self._long_step(), self.length
        self.table.truncate(length)
        if not length:
            self.clear()
        elif step and length == step.start:
            self.step = None
            self.shrink(at_once=True)

    def held_pages(self, member: int) -> Ints:
        """Return the member's pages that the next call reads, ascending and without duplicates."""
        length = self.lengths[member]
        return self.table.pages_of(self.first_kept(length), length)

    def shrink(self, *, at_once: bool = False) -> None:
        """Renumber the pages if few are held, unless forks hold some.

        With `at_once`, any free page suffices. After an error all groups are empty.
        """
        allocator = self.table.allocator
        if not (allocator.is_sparse or (at_once and allocator.held and allocator.num_free)):
            return
        try:
            if (pages := self.table.compact()) is not None:
                for pool in filter(lambda pool: pool.is_allocated, self.pools):
                    pool.memory.keep(pages)
        except BaseException:  # out of memory or Ctrl-C: some layers still use the old numbers
            for group in filter(None, (ref() for ref in self.siblings)):
                group.clear()
            raise

    def copy_pages(self, copies: Copies) -> None:
        """Copy pages in every pool, after growing it to hold all pages."""
        for pool in self.pools:
            if pool.is_allocated and len(copies[0]):
                pool.memory.grow(self.table.allocator.capacity)
                pool.memory.copy(*copies)

    def _first_needed(self, *, keep_recorded: bool = False) -> int:
        """Return the first token in the pages to keep, or 0 to keep all."""
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
        """Remove all tokens. The batch size may then change."""
        self.lengths[:] = [0] * len(self.lengths)
        self.table.clear()
        self.step = None

    def fork(self) -> "LayerGroup":
        """Return a group without layers that shares the pages, in O(pages), without copies."""
        self.settle()
        # The next step must check again which pages are shared.
        self.step = None
        fork = LayerGroup(self.budget, self.window, self.table.fork())
        fork.record_past = self.record_past
        return fork
