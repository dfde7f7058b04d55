"""How many tokens a layer holds, and where new tokens go: counted on the host, or on a device.

`HostLength` is for layers that take pages as tokens come. `DeviceLength` is for layers of the
preallocated form, whose steps only write into tensors that exist.
"""

from typing import NamedTuple

import torch

from .. import ops
from ..errors import ConfigError, OutOfPagesError
from .blocks import zeros
from .fixed_pages import FixedPages
from .layer_group import LayerGroup, Step
from .page_allocator import Ints


class LongWrite(NamedTuple):
    """Pages of a call that is longer than the pages of its window have room for.

    Attributes:
        first: the logical page with the first token that the call sees: a number, or `[B]`, int64.
        old: `[B, n]`, the pages from `first` on, before the call.
        kept: the logical page from which on tokens are stored for good; like `first`.
        own: `[B, m]`, the pages from `kept` on, after the call.
        skipped: on an empty layer, tokens before `kept`.
    """

    first: int | torch.Tensor
    old: Ints | torch.Tensor
    kept: int | torch.Tensor
    own: Ints | torch.Tensor
    skipped: int


class Call(NamedTuple):
    """Where the new tokens of a layer go.

    Attributes:
        tokens: their number.
        table: `[B, M]`, int32, the page of each logical page.
        lengths: `[B]`, int32, tokens stored after the call.
        start: position of the first stored token that the call sees, or one before it.
        stop: one past the last position that has a column.
        step: the step of a growing layer.
        long: not None if the window's pages have no room for the call.
    """

    tokens: int
    table: torch.Tensor
    lengths: torch.Tensor
    start: int
    stop: int
    step: Step | None = None
    long: LongWrite | None = None


class HostLength:
    """The tokens of a growing layer.

    Attributes:
        group: the group of the layer.
        member: its place there.
    """

    room = None

    def __init__(self, group: LayerGroup, member: int) -> None:
        self.group, self.member = group, member

    @property
    def stored(self) -> int:
        """Tokens stored, those behind the window among them."""
        return self.group.lengths[self.member]

    @property
    def is_empty(self) -> bool:
        """Whether no token was stored."""
        return not self.group.lengths[self.member]

    def on_host(self) -> int:
        """Return `stored`."""
        return self.stored

    def take(self, batch: int, device: torch.device) -> int:
        """Return how many pages a pool needs now."""
        return self.group.table.allocator.capacity

    def reserve(self, tokens: int, batch: int) -> None:
        """Take the pages of a call; see `LayerGroup.prepare`."""
        start = self.stored
        self.group.prepare(start, start + tokens, batch)

    def begin(self, tokens: int, device: torch.device, backend: str) -> Call:
        """Return where the tokens of a call go, after `reserve`."""
        group, start = self.group, self.stored
        table, stop = group.table, start + tokens
        step = group.step
        assert step is not None
        seen, size = group.visible_from(start), group.page_size
        long = None
        if (kept := step.kept) is not None:
            first = seen // size
            old, own = table.rows[:, first : -(-start // size)], table.rows[:, kept:]
            long = LongWrite(first, old, kept, own, kept * size)
        lengths = step.lengths(device)
        return Call(tokens, table.on_device(device), lengths, seen, stop, step, long)

    def end(self, call: Call) -> None:
        """Note that the tokens of a call are stored."""
        self.group.lengths[self.member] += call.tokens

    def plan(self, call: Call, heads: int, rows: int, backend: str) -> torch.Tensor | None:
        """Return the plan of a call with `rows` query rows of each of `heads` KV heads, or None."""
        assert call.step is not None
        return call.step.plan(call.start, heads, rows, call.table.device, backend)

    def check_crop(self, tokens: int, stored: int) -> None:
        """Raise ConfigError if `tokens` cannot be removed; change nothing."""
        self.group.settle()
        _check_crop(self.group, tokens, stored, self.group.table.first * self.group.page_size)

    def set(self, length: int) -> None:
        """Hold the first `length` tokens, and free pages behind the window."""
        self.group.crop(self.stored - length, [self.member])

    def written(self, device: torch.device) -> Call:
        """Return where all tokens are that are not behind the window of the next one."""
        group, stop, table = self.group, self.stored, self.group.table
        step, first = Step(stop, stop, table.batch, table.version), group.visible_from(stop)
        return Call(1, table.on_device(device), step.lengths(device), first, stop, step)


class DeviceLength:
    """The tokens of a preallocated layer.

    Attributes:
        fixed: the pages of the layer's group.
        group: the group of the layer.
        member: its place there.
        is_empty: whether no token was stored since the start or a reset. It changes once per
            generation, at the prefill, which is not compiled.
        table: `[B, columns]`, int32, at an address that stays.
    """

    table: torch.Tensor

    def __init__(self, fixed: FixedPages, member: int) -> None:
        self.fixed, self.group, self.member = fixed, fixed.group, member
        self.room = fixed.room
        self.is_empty = True
        # An upper bound of the tokens stored, on the host; see `check_room`.
        self._most = 0
        self._plan: torch.Tensor | None = None
        # The KV heads and the backend of the plan, if this layer fills it.
        self._fills: tuple[int, str] | None = None

    @property
    def lengths(self) -> torch.Tensor:
        """`[B]`, int32, at an address that stays."""
        return self.fixed.lengths[self.member]

    @lengths.setter
    def lengths(self, lengths: torch.Tensor) -> None:
        self.fixed.lengths[self.member] = lengths

    @property
    def stored(self) -> int | torch.Tensor:
        """Tokens stored: a tensor `[]` once there are any, as in transformers' static layers."""
        return 0 if self.is_empty else self.lengths[0]

    def on_host(self) -> int:
        """Return the tokens stored as a number; waits for the device."""
        return 0 if self.is_empty else int(self.lengths[0])

    def take(self, batch: int, device: torch.device) -> int:
        """Take the pages of `batch` sequences, the table and the lengths; return the pages.

        Raises:
            OutOfPagesError: the budget would be passed; nothing was changed.
        """
        if torch.compiler.is_compiling() and self.group.budget.max_pages is None:
            self.table, pages = self.fixed.defer(batch, device)
        else:
            self.table, pages = self.fixed.take(batch, device)
        self.lengths = zeros((batch,), torch.int32, device)
        return pages

    def share_plan(self, heads: int, rows: int, backend: str) -> list[torch.Tensor]:
        """Take the plan of the group; return what stays at its address."""
        self._plan, leader = self.fixed.plan(self.member, self.lengths, heads, rows, backend)
        self._fills = (heads, backend) if leader == self.member else None
        tensors = (self.table, self.lengths, self._plan)
        return [tensor for tensor in tensors if tensor is not None]

    def reserve(self, tokens: int, batch: int) -> None:
        """Raise OutOfPagesError for the first call of a layer if it has no room for it."""
        if self.is_empty and tokens > self.room:
            raise OutOfPagesError.of_tokens(self.room, 0, tokens)

    def begin(self, tokens: int, device: torch.device, backend: str) -> Call:
        """Return where the tokens of a call go."""
        after = ops.advance(self.lengths, tokens, self.room, backend)
        ring, size = self.fixed.ring, self.group.page_size
        long = None
        # The most tokens that leave all that the first of them sees in the ring.
        most = (ring - 1) * size - (self.group.window or 0) + 2
        if ring and tokens > most:
            first, kept = (self._first_in_ring(lengths) for lengths in (self.lengths, after))
            # On an empty layer only the last pages of these tokens will ever be read.
            skipped = max((tokens - 1) // size - ring + 1, 0) * size
            long = LongWrite(first, self._in_ring(first), kept, self._in_ring(kept), skipped)
        return Call(tokens, self.table, after, 0, self.room, long=long)

    def _first_in_ring(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return the first logical page in the ring after `lengths` tokens: `[B]`, int64."""
        last = torch.div(lengths.long() - 1, self.group.page_size, rounding_mode="floor")
        return (last - self.fixed.ring + 1).clamp(min=0)

    def _in_ring(self, first: torch.Tensor) -> torch.Tensor:
        """Return the pages of the ring from logical page `first` on, `[B, ring]`, int64."""
        logical = first[:, None] + torch.arange(self.fixed.ring, device=first.device)
        # Past the end there is nothing to be written on a GPU, where nothing raises.
        return self.table.long().gather(1, logical.clamp(max=self.table.shape[1] - 1))

    def end(self, call: Call) -> None:
        """Note that the tokens of a call are stored, and fill the group's plan for it."""
        if self.is_empty:
            self.is_empty = False
            if not torch.compiler.is_compiling():
                self._most = max(self._most, call.tokens)
        self.lengths.copy_(call.lengths)
        self.fill_plan(call.tokens)

    def fill_plan(self, tokens: int) -> None:
        """Fill the group's plan for `tokens` that were stored, if this layer does that."""
        if self._fills is not None and self._plan is not None:
            window = self.group.window or 0
            ops.make_plan(self._plan, self.lengths, tokens, window, 0, *self._fills)

    def plan(self, call: Call, heads: int, rows: int, backend: str) -> torch.Tensor | None:
        """Return the group's plan, or None if the backend has none."""
        return self._plan

    def written(self, device: torch.device) -> Call:
        """Return where all positions are, stored or not; a ring begins with the next token's.

        For a ring this waits for the device.
        """
        first = self.group.visible_from(self.on_host()) if self.fixed.ring else 0
        return Call(1, self.table, self.lengths, first, self.room)

    def check_room(self, tokens: int) -> None:
        """Raise OutOfPagesError before a step that cannot be stored.

        On a CPU the write itself raises. Elsewhere it cannot, and reading the length waits for the
        device, so it is read only when an upper bound kept on the host says that it may matter.
        """
        if torch.compiler.is_compiling():
            return
        if self.is_empty:
            self._most = tokens  # the first call may be compiled
            return
        if self.lengths.is_cpu:
            return
        self._most += tokens
        if self._most > self.room:
            length = self.on_host()
            if length + tokens > self.room:
                raise OutOfPagesError.of_tokens(self.room, length, tokens)
            self._most = length + tokens

    def check_crop(self, tokens: int, stored: int) -> None:
        """Raise ConfigError if `tokens` cannot be removed from `stored`; change nothing."""
        lost = self.fixed.note_stored(self.member, stored)
        _check_crop(self.group, tokens, stored, lost)

    def set(self, length: int) -> None:
        """Hold the first `length` tokens."""
        if not length:
            self.fixed.lost.pop(self.member, None)
        self.is_empty, self._most = not length, length
        if self.member in self.fixed.lengths:
            self.lengths.fill_(length)

    def follow_table(self) -> bool:
        """Follow a change of the block table; return whether addresses have changed."""
        table, device = self.fixed.table_on(self.lengths.device), self.lengths.device
        if table.shape == self.table.shape:
            # Layers of a group share the tensor: the first one brings the new content.
            self.table.copy_(table)
            return False
        self.table = table
        if len(table) != len(self.lengths):
            self.lengths = zeros((len(table),), torch.int32, device).copy_(self.lengths[:1])
        return True

    def move(self, device: torch.device) -> None:
        """Move the table and the lengths to `device`, to new addresses."""
        self.table = self.fixed.table_on(device)
        self.lengths = zeros(tuple(self.lengths.shape), torch.int32, device).copy_(self.lengths)


def _check_crop(group: LayerGroup, tokens: int, stored: int, lost: int) -> None:
    """Raise ConfigError if `tokens` of `stored` cannot be removed; `lost`: the first one left."""
    left = max(stored - tokens, 0)
    if tokens and left and group.first_kept(left) < lost:
        raise ConfigError(
            f"crop: expected to go back at most to what the window still holds (token {lost} on), "
            f"got {tokens} tokens to remove from {stored} under a window of {group.window}; call "
            "activate_past_recording() before these tokens are written"
        )
