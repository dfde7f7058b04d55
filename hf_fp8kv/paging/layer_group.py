"""Layer groups: layers that share one block table, and the window rule.

A page is freed when its last token has left the window. A call is *long* if it has more tokens than
the pages of a window have room for. During a long call, the previous pages stay until every layer
has stored its tokens, so that the call can be undone. Each layer stores a long call in scratch
pages, which its queries read, and copies the last window from there to the layer's pages.
"""

import weakref
from typing import NamedTuple

import torch

from .. import ops
from ..errors import ConfigError
from ..ops.visibility import find_first_visible
from .block_table import BlockTable, Copies
from .page_allocator import IntArray, PageAllocator, PageBudget
from .page_pool import PagePool


class LongWrite(NamedTuple):
    """Pages of a long call, which has more tokens than the pages of its window have room for.

    Attributes:
        first_page: Logical page of the call's first visible token, an integer or `[B, 1]`, int64.
        old_pages: Pages from `first_page` on before the call, `[B, n]`.
        first_kept_page: First logical page that is kept after the call, of the same type.
        kept_pages: Pages from `first_kept_page` on after the call, `[B, m]`.
    """

    first_page: int | torch.Tensor
    old_pages: IntArray | torch.Tensor
    first_kept_page: int | torch.Tensor
    kept_pages: IntArray | torch.Tensor


class Positions:
    """The positions and pages of a call, or of all stored tokens, shared by the layers of a group.

    The first layer of a call creates this object. Lengths and schedules are computed once per
    device.

    Attributes:
        start: Number of tokens in each sequence before the call.
        num_tokens: Number of new tokens.
        first_position: First position to read, at or before the first visible token.
        stop: Last position to read plus one, the number of tokens after the call.
        version: Version of the block table after the pages of the call were reserved.
        first_kept_page: First logical page that a long call keeps, until all layers have stored it.
            None in other calls.
    """

    def __init__(
        self, table: BlockTable, batch: int, start: int, stop: int, first_position: int
    ) -> None:
        self._table = table
        self._batch = batch
        self.start = start
        self.num_tokens = stop - start
        self.first_position = first_position
        self.stop = stop
        self.version = -1
        self.first_kept_page: int | None = None
        self._lengths: dict[torch.device, torch.Tensor] = {}
        self._schedules: dict[tuple[object, ...], torch.Tensor | None] = {}

    def locate(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block table, `[B, M]`, and `stop` of each sequence, `[B]`, both int32."""
        return self._table.copy_to_device(device), self.get_lengths(device)

    def get_lengths(self, device: torch.device) -> torch.Tensor:
        """Return `stop` of each sequence, `[B]`, int32, on `device`."""
        if device not in self._lengths:
            lengths = torch.full((self._batch,), self.stop, dtype=torch.int32, device=device)
            self._lengths[device] = lengths
        return self._lengths[device]

    @property
    def long_write(self) -> LongWrite | None:
        """The pages of a long call, or None."""
        if (first_kept := self.first_kept_page) is None:
            return None
        rows = self._table.rows
        page_size = self._table.page_size
        first_page = self.first_position // page_size
        old_pages = rows[:, first_page : -(-self.start // page_size)]
        return LongWrite(first_page, old_pages, first_kept, rows[:, first_kept:])

    def find_written_pages(self) -> IntArray:
        """Return the pages that the call writes, ascending, without duplicates."""
        first_kept = (self.first_kept_page or 0) * self._table.page_size
        return self._table.find_pages(max(self.start, first_kept), self.stop)

    def get_schedule(
        self, device: torch.device, num_heads: int, num_rows: int, backend: str
    ) -> torch.Tensor | None:
        """Return the schedule for the positions to read, or None if `backend` has no schedules.

        `num_heads` counts KV heads, and `num_rows` the query rows per KV head. A schedule never
        changes. It is valid for any number of query tokens, and for any window in which no position
        before `first_position` is visible.
        """
        key = (device, num_heads, num_rows, backend)
        if key not in self._schedules:
            self._schedules[key] = ops.create_schedule(
                self._lengths[device],
                1,
                0,
                self.first_position,
                num_heads,
                backend,
                length=self.stop - self.first_position,
                num_query_rows=num_rows,
            )
        return self._schedules[key]


class LayerGroup:
    """Layers that keep the same tokens and share one block table.

    The pages in the table exist in the pool of every layer, under the same numbers.

    Attributes:
        table: The block table.
        budget: The budget of pages.
        window: Number of tokens that a query attends to, including its own. None means all.
        window_pages: Maximum number of pages that a window and the next token of a sequence span.
        page_size: Slots (tokens) per page.
        pools: The pool of each member layer, shared with forks.
        lengths: Number of tokens that each member layer has written. Layers write one by one.
        record_past: Whether pages that have left the window stay until the next crop.
        is_incomplete: Whether an error interrupted a change, so that layers may differ until
            the cache is reset.
        siblings: Weak references to all groups of the cache. They are weak, so that a dropped fork
            frees its pages at once.
        positions: The positions of the last call, which `reserve` returned, or None.
    """

    def __init__(
        self, budget: PageBudget, window: int | None = None, table: BlockTable | None = None
    ) -> None:
        self.table = table or BlockTable(PageAllocator(budget))
        self.budget = budget
        self.page_size = budget.page_size
        self.window = window
        self.pools: list[PagePool] = []
        self.lengths: list[int] = []
        self.record_past = self.is_incomplete = False
        if window is not None:
            self.table.allocator.allocates_exactly = True
            self.window_pages = (window + self.page_size - 2) // self.page_size + 1
        self.positions: Positions | None = None
        self.siblings: list[weakref.ref[LayerGroup]] = []

    def add(self, pool: PagePool) -> int:
        """Add a layer, and return its index in `lengths`."""
        self.pools.append(pool)
        self.lengths.append(0)
        return len(self.lengths) - 1

    @property
    def capacity(self) -> int:
        """Number of pages that the pool of each layer needs."""
        return self.table.allocator.capacity

    @property
    def length(self) -> int:
        """Number of tokens in the longest layer."""
        return max(self.lengths, default=0)

    def find_window_start(self, length: int) -> int:
        """Return the first position that is visible to a query at position `length`."""
        return 0 if self.window is None else max(find_first_visible(length, self.window), 0)

    def find_first_kept(self, length: int) -> int:
        """Return the first token in the pages of the last window of `length` tokens."""
        # With a window of 1 the next token attends only to itself, but a page is still kept.
        return min(self.find_window_start(length), length - 1) // self.page_size * self.page_size

    # -- a step ------------------------------------------------------------------------------

    def reserve(self, start: int, stop: int, batch: int) -> Positions:
        """Reserve pages for positions `start` to `stop - 1` in all groups whose length is `start`.

        The first layer of a step reserves pages for all layers, so a step either fits or changes
        nothing.

        Raises:
            OutOfPagesError: The budget would be exceeded. Nothing was changed.
            ConfigError: A token that is visible from `start` was already freed.
        """
        self.check_complete()
        call = self.positions
        if call and (call.start, call.stop, call.version) == (start, stop, self.table.version):
            return call
        other_groups = [group for ref in self.siblings if (group := ref()) and group is not self]
        groups = [self, *(group for group in other_groups if group.length == start)]
        for group in groups:
            group.settle_step()
            first = group.table.first_page * group.page_size
            if not group.length:
                # Free the pages of a first call that was interrupted before a layer stored tokens.
                group.table.clear()
            elif first > group.find_window_start(start):
                raise ConfigError(
                    f"expected all layers with a window of {group.window} to store a call before "
                    f"the next call, got a layer at {start} tokens and a layer at {group.length} "
                    f"tokens, whose window begins at token {first}. Pass each call to all layers"
                )
        spans = [(group, *group._find_step_span(start, stop)) for group in groups]
        num_needed = sum(group.table.count_needed(first, stop, batch) for group, first, *_ in spans)
        if num_needed:
            num_freed = sum(
                group.table.count_freed_before(first_kept) for group, _, first_kept, _ in spans
            )
            self.budget.check(num_needed - num_freed)
        for group, first, first_kept, is_long in spans:
            if not is_long:
                group.table.free_before(first_kept)
                group.shrink()
            # Set before pages are reserved, so that an interrupted long call is undone.
            positions = group.positions = Positions(
                group.table, batch, start, stop, group.find_window_start(start)
            )
            positions.first_kept_page = first // self.page_size if is_long else None
            group.table.reserve(first, stop, batch, group.copy_pages)
            positions.version = group.table.version
        assert self.positions is not None
        return self.positions

    def _find_step_span(self, start: int, stop: int) -> tuple[int, int, bool]:
        """Return the first tokens to reserve and to keep pages for, and whether a call is long."""
        if self.window is not None and not self.record_past:
            num_pages = -(-stop // self.page_size) - self.find_window_start(start) // self.page_size
            # If layers store separate calls, the slowest layer needs its pages, so all are kept.
            if num_pages > self.window_pages and all(
                length in (0, start) for length in self.lengths
            ):
                first_kept = self.find_first_kept(stop)
                return max(start, first_kept), first_kept, True
        return start, self._find_first_needed(keeps_recorded=True), False

    def _find_long_call(self) -> Positions | None:
        """Return the positions of a long call whose previous pages are still kept, or None."""
        call = self.positions
        return call if call and call.start and call.first_kept_page is not None else None

    def finish_step(self) -> None:
        """Free the previous pages if every layer has stored the long call."""
        call = self._find_long_call()
        if call and all(length in (0, call.stop) for length in self.lengths):
            self.table.free_before(self.find_first_kept(call.stop))
            call.first_kept_page = None
            self.shrink(eager=True)

    def settle_step(self) -> None:
        """Finish a long call that all layers have stored, or undo it if no layer has stored it.

        Raise ConfigError if only some of the layers have stored the call.
        """
        self.finish_step()
        if (call := self._find_long_call()) is None:
            return
        if call.stop in self.lengths:
            raise ConfigError(
                f"expected every layer to store the tokens {call.start} to {call.stop - 1}, got "
                f"some layers at {call.stop} and some at {call.start} tokens, under a window of "
                f"{self.window} that has moved on. Reset the cache"
            )
        self.drop_unused_pages()

    def drop_unused_pages(self) -> None:
        """Free the pages after the last token, and end a long call that no layer has stored."""
        call = self._find_long_call()
        length = self.length
        self.table.free_from(length)
        if not length:
            self.clear()
        elif call and length == call.start:
            self.positions = None
            self.shrink(eager=True)

    def find_visible_pages(self, member: int) -> IntArray:
        """Return the pages of `member` that the next call reads, ascending, without duplicates."""
        length = self.lengths[member]
        return self.table.find_pages(self.find_first_kept(length), length)

    def shrink(self, *, eager: bool = False) -> None:
        """Renumber the pages if few of them are in use, unless forks also hold pages.

        With `eager`, a single free page is enough to renumber. After an error all groups are empty.
        """
        allocator = self.table.allocator
        if not (allocator.is_sparse or (eager and allocator.num_held and allocator.num_free)):
            return
        try:
            if (pages := self.table.compact()) is not None:
                for pool in self.pools:
                    if pool.is_allocated:
                        pool.memory.keep_pages(pages)
        except BaseException:  # out of memory or Ctrl-C: some layers still use the old numbers
            for group in filter(None, (ref() for ref in self.siblings)):
                group.clear()
                group.is_incomplete = True
            raise

    def copy_pages(self, copies: Copies) -> None:
        """Copy pages in every pool, which first grows to hold all pages of the table."""
        for pool in self.pools:
            if pool.is_allocated and len(copies[0]):
                pool.memory.grow(self.table.allocator.capacity)
                pool.memory.copy(*copies)

    def _find_first_needed(self, *, keeps_recorded: bool = False) -> int:
        """Return the first token in the pages to keep. 0 means that all pages are kept."""
        keeps_all = self.window is None or (keeps_recorded and self.record_past)
        length = min(filter(None, self.lengths), default=0)
        return self.find_first_kept(length) if length and not keeps_all else 0

    # -- all tokens --------------------------------------------------------------------------

    def crop(self, num_tokens: int, members: list[int] | None = None) -> None:
        """Remove the last `num_tokens` tokens of every layer, or of the layers `members`."""
        self.settle_step()
        cropped_members = range(len(self.lengths)) if members is None else members
        for member in cropped_members:
            self.lengths[member] = max(self.lengths[member] - num_tokens, 0)
        self.drop_unused_pages()
        self.table.free_before(self._find_first_needed())
        self.shrink()

    def find_first_intact(self, member: int, num_stored: int) -> int:
        """Return the first token of a layer with `num_stored` tokens that is still stored."""
        self.settle_step()
        return self.table.first_page * self.page_size

    def check_crop(self, member: int, num_tokens: int, num_stored: int) -> None:
        """Raise ConfigError if the last `num_tokens` tokens of a layer cannot be removed.

        `num_stored` is the layer's number of tokens.
        """
        first_intact = self.find_first_intact(member, num_stored)
        num_left = max(num_stored - num_tokens, 0)
        if num_tokens and num_left and self.find_first_kept(num_left) < first_intact:
            raise ConfigError(
                f"crop: expected to keep a window that is still stored (from token {first_intact} "
                f"on), got {num_tokens} of {num_stored} tokens to remove under a window of "
                f"{self.window}. Call activate_past_recording() before these tokens are written"
            )

    def clear(self) -> None:
        """Remove all tokens. The batch size may then change."""
        self.lengths[:] = [0] * len(self.lengths)
        self.table.clear()
        self.positions = None

    def check_complete(self) -> None:
        """Raise ConfigError if an error interrupted a change of the cache."""
        if self.is_incomplete:
            raise ConfigError(
                "The cache has lost tokens, because an error (such as Ctrl-C or a lack of memory) "
                "interrupted a change. Call cache.reset()"
            )

    def fork(self) -> "LayerGroup":
        """Return a group without layers that shares the pages, in O(pages) and without copies."""
        self.settle_step()
        # The next step must check again which pages are shared.
        self.positions = None
        return LayerGroup(self.budget, self.window, self.table.fork())
