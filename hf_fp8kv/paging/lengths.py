"""The length of a layer, counted on the host or on a device, and the positions of new tokens.

`HostLength` is for growing layers, which allocate pages as tokens arrive. `DeviceLength` is for
preallocated layers, whose steps only write into existing tensors.
"""

from typing import NamedTuple, TypeAlias

import torch

from .. import ops
from ..errors import OutOfPagesError
from .fixed_pages import FixedPages
from .layer_group import LayerGroup, LongWrite, Positions
from .memory_blocks import make_zeros


class FixedPositions(NamedTuple):
    """The positions and pages of a call of a preallocated layer, as in `Positions`.

    Attributes:
        num_tokens: Number of new tokens.
        table: Page number of each logical page, `[B, M]`, int32.
        lengths: Number of stored tokens after the call, `[B]`, int32.
        first_position: First position to read, at or before the first visible token.
        stop: Last position to read plus one, stored or not.
        long_write: The pages of a long call, or None.
    """

    num_tokens: int
    table: torch.Tensor
    lengths: torch.Tensor
    first_position: int
    stop: int
    long_write: LongWrite | None = None

    def locate(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block table and the lengths."""
        return self.table, self.lengths


AnyPositions: TypeAlias = Positions | FixedPositions


class HostLength:
    """The length of a growing layer.

    Attributes:
        group: The group of the layer.
        member: Index of the layer in its group.
    """

    max_tokens = None
    schedule = None  # `Positions` has the schedules

    def __init__(self, group: LayerGroup, member: int) -> None:
        self.group = group
        self.member = member

    @property
    def num_stored(self) -> int:
        """Number of stored tokens, including those that have left the window."""
        return self.group.lengths[self.member]

    @property
    def is_empty(self) -> bool:
        """Whether no token is stored."""
        return not self.group.lengths[self.member]

    def count_stored(self) -> int:
        """Return `num_stored`."""
        return self.num_stored

    def allocate(self, batch: int, device: torch.device) -> None:
        """Allocate nothing, because `reserve` adds pages."""

    def reserve(
        self, num_tokens: int, batch: int, device: torch.device, backend: str, *, is_allocated: bool
    ) -> Positions:
        """Reserve the pages of a call (see `LayerGroup.reserve`)."""
        start = self.group.lengths[self.member]
        return self.group.reserve(start, start + num_tokens, batch)

    def record(self, positions: AnyPositions) -> None:
        """Record that the tokens of a call are stored."""
        self.group.lengths[self.member] += positions.num_tokens

    def set(self, length: int) -> None:
        """Keep the first `length` tokens, and free pages that have left the window."""
        self.group.crop(self.num_stored - length, [self.member])

    def find_stored_positions(self) -> Positions:
        """Return the positions of all tokens that are visible to the next token."""
        table = self.group.table
        stop = self.num_stored
        return Positions(table, table.batch, stop - 1, stop, self.group.find_window_start(stop))


class DeviceLength:
    """The length of a preallocated layer.

    Attributes:
        group: The group of the layer.
        member: Index of the layer in its group.
        is_empty: Whether no token was stored since the start or a reset. The value changes once per
            generation, at the prefill, which is not compiled.
        table: Page number of each logical page, `[B, num_columns]`, int32, at a constant address.
        schedule: Schedule of the group, or None if the backend has no schedules.
    """

    table: torch.Tensor

    def __init__(self, group: FixedPages, member: int) -> None:
        self.group = group
        self.member = member
        self.max_tokens = group.max_tokens
        self.is_empty = True
        # An upper bound on the number of stored tokens, kept on the host for `check_capacity`.
        self._upper_bound = 0
        self.schedule: torch.Tensor | None = None
        # Number of KV heads and backend of the schedule, or None if another layer fills it.
        self._schedule_arguments: tuple[int, str] | None = None

    @property
    def lengths(self) -> torch.Tensor:
        """Number of stored tokens, `[B]`, int32, at a constant address."""
        return self.group.device_lengths[self.member]

    @property
    def num_stored(self) -> int | torch.Tensor:
        """Number of stored tokens: 0, or a tensor `[]` as in transformers' static layers."""
        return 0 if self.is_empty else self.lengths[0]

    def count_stored(self) -> int:
        """Return the number of stored tokens as an integer. This synchronizes with the device."""
        return 0 if self.is_empty else int(self.lengths[0])

    def allocate(self, batch: int, device: torch.device) -> None:
        """Allocate pages, table and lengths for `batch` sequences.

        Raises:
            OutOfPagesError: The budget would be exceeded. Nothing was changed.
        """
        if torch.compiler.is_compiling() and self.group.budget.max_pages is None:
            self.table = self.group.defer_allocation(batch, device)
        else:
            self.table = self.group.allocate(batch, device)
        self.group.device_lengths[self.member] = make_zeros((batch,), torch.int32, device)

    def adopt_table(self, table: torch.Tensor, length: int) -> None:
        """Use `table`, `[B, num_columns]`, whose pages hold `length` tokens per sequence."""
        self.table = table
        self.group.device_lengths[self.member] = make_zeros(
            (len(table),), torch.int32, table.device
        )
        self.set(length)

    def share_schedule(self, num_heads: int, num_rows: int, backend: str) -> list[torch.Tensor]:
        """Use the schedule of the group. Return the tensors with constant addresses."""
        self.schedule, filling_member = self.group.get_schedule(
            self.member, num_heads, num_rows, backend
        )
        self._schedule_arguments = (num_heads, backend) if filling_member == self.member else None
        tensors = (self.table, self.lengths, self.schedule)
        return [tensor for tensor in tensors if tensor is not None]

    def reserve(
        self, num_tokens: int, batch: int, device: torch.device, backend: str, *, is_allocated: bool
    ) -> FixedPositions:
        """Return the positions of a call. Call `allocate` first unless `is_allocated`.

        Raises:
            OutOfPagesError: The first call has more than `max_tokens` tokens, or the budget would
                be exceeded. Nothing was changed.
        """
        if not torch.compiler.is_compiling():
            self.group.check_complete()
            if self.is_empty and num_tokens > self.max_tokens:
                raise OutOfPagesError.for_tokens(self.max_tokens, 0, num_tokens)
        if not is_allocated:
            self.allocate(batch, device)
        if torch.compiler.is_compiling() and backend not in ops.DEVICE_CHECK_BACKENDS:
            new_lengths = ops.advance(self.lengths, num_tokens, self.max_tokens, backend)
        else:
            new_lengths = self.lengths + num_tokens
        ring_size = self.group.ring_size
        long_write = None
        # Maximum number of new tokens for which the ring keeps all tokens that they attend to.
        max_new_tokens = (ring_size - 1) * self.group.page_size - (self.group.window or 0) + 2
        if ring_size and num_tokens > max_new_tokens:
            first, first_kept = map(self._find_first_ring_page, (self.lengths, new_lengths))
            old_pages, kept_pages = map(self._find_ring_pages, (first, first_kept))
            long_write = LongWrite(first, old_pages, first_kept, kept_pages)
        return FixedPositions(num_tokens, self.table, new_lengths, 0, self.max_tokens, long_write)

    def _find_first_ring_page(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return the first logical page in the ring after `lengths` tokens, `[B, 1]`, int64."""
        last_page = torch.div(lengths.long() - 1, self.group.page_size, rounding_mode="floor")
        return (last_page - self.group.ring_size + 1).clamp(min=0)[:, None]

    def _find_ring_pages(self, first_page: torch.Tensor) -> torch.Tensor:
        """Return the ring's pages from logical page `first_page` on, `[B, ring_size]`, int64."""
        column = first_page + torch.arange(self.group.ring_size, device=first_page.device)
        # Clamp, because tokens past the end are not stored, and a GPU cannot raise an error.
        return self.table.long().gather(1, column.clamp(max=self.table.shape[1] - 1))

    def record(self, positions: AnyPositions) -> None:
        """Record that the tokens of a call are stored, and fill the group's schedule."""
        if self.is_empty:
            self.is_empty = False
            if not torch.compiler.is_compiling():
                self._upper_bound = max(self._upper_bound, positions.num_tokens)
        self.lengths.copy_(positions.locate(self.lengths.device)[1])
        self.fill_schedule(positions.num_tokens)

    def fill_schedule(self, num_tokens: int) -> None:
        """Fill the group's schedule for a call of `num_tokens` tokens, if this layer fills it."""
        if self._schedule_arguments is not None and self.schedule is not None:
            ops.fill_schedule(
                self.schedule,
                self.lengths,
                num_tokens,
                self.group.window or 0,
                0,
                *self._schedule_arguments,
            )

    def find_stored_positions(self) -> FixedPositions:
        """Return the pages of all positions, stored or not.

        A ring begins with the window of the next token. Finding its start needs a synchronization.
        """
        first = self.group.find_window_start(self.count_stored()) if self.group.ring_size else 0
        return FixedPositions(1, self.table, self.lengths, first, self.max_tokens)

    def check_capacity(self, num_tokens: int) -> None:
        """Raise OutOfPagesError before a step that exceeds `max_tokens`.

        Reading the length synchronizes, so it is only read if an upper bound on it on the host
        exceeds `max_tokens`.
        """
        if torch.compiler.is_compiling():
            return
        # The first call may be compiled, so its tokens are counted here.
        self._upper_bound = num_tokens + (0 if self.is_empty else self._upper_bound)
        if self._upper_bound > self.max_tokens:
            length = self.count_stored()
            if length + num_tokens > self.max_tokens:
                raise OutOfPagesError.for_tokens(self.max_tokens, length, num_tokens)
            self._upper_bound = length + num_tokens

    def set(self, length: int) -> None:
        """Keep the first `length` tokens."""
        if not length:
            self.group.first_intact.pop(self.member, None)
        self.is_empty = not length
        self._upper_bound = length
        if self.member in self.group.device_lengths:
            self.lengths.fill_(length)

    def update_table(self, device: torch.device) -> bool:
        """Apply a change of the block table or device. Return whether addresses have changed."""
        table = self.group.get_device_table(device)
        if (table.shape, device) == (self.table.shape, self.table.device):
            # Layers of a group share the tensor, so the first layer updates it for all.
            self.table.copy_(table)
            return False
        self.table = table
        self.group.device_lengths[self.member] = make_zeros(
            (len(table),), torch.int32, device
        ).copy_(self.lengths[:1])
        return True
