"""`LayerStorage`: the pages of one layer, with the layer's encoding and length."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .. import ops
from ..ops import Pages, api
from ..ops.blocks import locate_pages
from ..paging.layer_group import Positions
from ..paging.lengths import AnyPositions, DeviceLength, HostLength
from ..paging.offloading import OffloadedLayer
from ..paging.page_pool import PagePool
from .encoding import Encoding
from .indexers import IndexerLayer, get_indexer_tensors
from .paged_tensor import PagedKV, make_handles


@dataclass
class DecodeRecord:
    """A decode step of a layer, to repeat for steps that differ only in their values.

    Nearly all host time of a decode step is spent on checks and lookups whose results are the same
    in each step. `LayerStorage.repeat` leaves them out. A record is an attribute of the `Pages`, so
    it is dropped with them.

    Attributes:
        layout: Result of `describe_tokens`.
        version: Version of the block table.
        write: `ops.write` for tokens of this layout and the pages of the record. None until a
            second step reads the same pages, because beams and forks get new pages in each step.
        attention: The recorded call of the attention function on the handles, or None.
    """

    layout: tuple[Any, ...] = ()
    version: int | None = None
    write: Callable[..., None] | None = None
    attention: Any = None


def describe_tokens(key: torch.Tensor, value: torch.Tensor) -> tuple[Any, ...]:
    """Return everything about new tokens that a step depends on, except their values."""
    return (
        key.shape,
        key.stride(),
        key.dtype,
        key.device,
        type(value),
        value.shape,
        value.stride(),
        value.dtype,
        value.device,
    )


class LayerStorage:
    """The stored keys and values of one layer, the base class of `FP8PagedLayer`.

    Attributes:
        encoding: Encoding of K and V.
        length: Number of stored tokens, and the positions of new tokens.
        pool: The pages, shared with forks.
        num_query_heads: Number of query heads in this process, or 0 if it is not known.
        indexer: Keys of the layer's indexer, or None.
        next_layer: Weak reference to the next layer. The last layer refers to the first.
    """

    def __init__(
        self,
        encoding: Encoding,
        length: HostLength | DeviceLength,
        pool: PagePool,
        num_query_heads: int = 0,
        indexer: IndexerLayer | None = None,
    ) -> None:
        self.encoding = encoding
        self.length = length
        self.group = length.group
        self.pool = pool
        self.num_query_heads = num_query_heads
        self.indexer = indexer
        self.next_layer: weakref.ref[LayerStorage] = weakref.ref(self)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the pool for tokens of these shapes.

        Raises:
            ScaleError: The static scales do not fit.
            ConfigError: The split of the model does not match `tensor_parallel`.
            OutOfPagesError: A preallocated cache would exceed its budget.
        """
        self.encoding.prepare(key_states, value_states)
        self.length.allocate(key_states.shape[0], self.encoding.device)
        self._allocate_pool(key_states, value_states)

    def _allocate_pool(self, key: torch.Tensor, value: torch.Tensor) -> None:
        if not self.pool.is_allocated:
            self.pool.allocate(
                key, value, self.group.capacity, is_single_block=self.length.max_tokens is not None
            )
        self.mark_addresses()

    def set_length(self, length: HostLength | DeviceLength) -> None:
        """Replace the length of an initialized layer, which keeps its contents."""
        self.length = length
        self.group = length.group
        self.pool.memory.grow(self.group.capacity)
        if self.indexer is not None:
            self.indexer.set_capacity(length.max_tokens, length.count_stored())
        self.mark_addresses()
        if isinstance(length, DeviceLength):
            length.fill_schedule(1)

    def mark_addresses(self) -> None:
        """Use the group's schedule, and mark constant addresses for torch.compile."""
        if not isinstance(self.length, DeviceLength):
            return
        tensors = self.length.share_schedule(
            self.pool.num_heads, self._count_query_rows(1), self.encoding.backend
        )
        if not torch.compiler.is_compiling():
            pages = self.encoding.make_pages(self.pool, self.length.table)
            for tensor in (
                pages.block,
                pages.offsets,
                *tensors,
                *self.encoding.list_scales_and_center(),
            ):
                torch._dynamo.mark_static_address(tensor)

    # -- tokens ------------------------------------------------------------------------------

    def reserve(self, key: torch.Tensor, value: torch.Tensor) -> AnyPositions:
        """Reserve pages for new tokens, on the device of the model's layer.

        Raises the errors of `lazy_initialization` and of `length.reserve`. The layer then has the
        same tokens.
        """
        encoding = self.encoding
        is_compiling = torch.compiler.is_compiling()
        is_allocated = self.pool.is_allocated
        if not is_allocated:
            encoding.prepare(key, value)
        elif not is_compiling and key.device != encoding.device:
            self.move_to(key.device)
        positions = self.length.reserve(
            key.shape[2], key.shape[0], encoding.device, encoding.backend, is_allocated=is_allocated
        )
        if not is_allocated:
            self._allocate_pool(key, value)
        if not is_compiling:
            self.pool.memory.grow(self.group.capacity)
            self.fetch_pages()
            if isinstance(positions, Positions) and isinstance(self.pool.memory, OffloadedLayer):
                self.pool.memory.mark_written(positions.find_written_pages())
        return positions

    def write_long(
        self, key: torch.Tensor, value: torch.Tensor, positions: AnyPositions, *, reads: bool
    ) -> Pages:
        """Store a long call, and return the pages that its queries read.

        With `reads`, tokens are stored in scratch pages, which hold the previous window, followed
        by the new tokens. The last window is copied to the layer's pages. Otherwise, only the last
        tokens are stored.
        """
        encoding = self.encoding
        long_write = positions.long_write
        assert long_write is not None
        listed_pages, lengths = positions.locate(encoding.device)
        pages = encoding.make_pages(self.pool, listed_pages)
        batch, num_old = long_write.old_pages.shape
        num_kept = long_write.kept_pages.shape[1]
        num_new = -(-positions.num_tokens // pages.page_size)
        if not reads:
            num_skipped = max(num_new - num_kept, 0) * pages.page_size
            key = key[:, :, num_skipped:]
            value = value[:, :, num_skipped:]
            ops.write(pages, key, value, lengths, encoding.backend, self.length.max_tokens)
            return pages
        num_pages = num_old + num_new
        block = pages.block.new_zeros((batch, num_pages, pages.block.shape[1]))
        if num_old:
            old_rows = self.pool.blocks.take(long_write.old_pages.reshape(-1))
            block[:, :num_old] = old_rows.unflatten(0, (batch, num_old))
        device = block.device
        # Earlier positions have no scratch page, because they are not visible to any query.
        columns = torch.arange(listed_pages.shape[1], device=device) - long_write.first_page
        sequence = torch.arange(batch, device=device)[:, None]
        table = (sequence * num_pages + columns.clamp(0, num_pages - 1)).int()
        rows = block.flatten(0, 1)
        scratch_pages = pages._replace(block=rows, table=table, offsets=locate_pages([rows]))
        ops.write(scratch_pages, key, value, lengths, encoding.backend, self.length.max_tokens)
        first_kept = long_write.first_kept_page - long_write.first_page
        kept_columns = torch.arange(num_kept, device=device) + first_kept
        self.pool.memory.put(
            long_write.kept_pages.reshape(-1), block[sequence, kept_columns].flatten(0, 1)
        )
        return scratch_pages

    def make_handles(
        self, pages: Pages, lengths: torch.Tensor, positions: AnyPositions
    ) -> tuple[PagedKV, PagedKV]:
        """Return handles on the keys and values of a call, with `lengths` as in `ops.write`."""
        pool = self.pool
        backend = self.encoding.backend
        if isinstance(positions, Positions):
            num_rows = self._count_query_rows(positions.num_tokens)
            schedule = positions.get_schedule(lengths.device, pool.num_heads, num_rows, backend)
        else:
            schedule = self.length.schedule
        # Positional arguments take less time than keyword arguments.
        return make_handles(
            pages,
            lengths,
            schedule,
            (pool.k_dtype, pool.v_dtype),
            positions.first_position,
            positions.stop,
            self.group.window or 0,
            self.length.max_tokens is not None,
            backend,
        )

    def record(
        self, pages: Pages, key: torch.Tensor, value: torch.Tensor, lengths: torch.Tensor
    ) -> None:
        """Record a decode step of a growing layer, unless something observes or offloads it."""
        if isinstance(self.length, DeviceLength):
            return
        if pages.record is None:
            pages.record = DecodeRecord()
        elif not (isinstance(self.pool.memory, OffloadedLayer) or api.is_observed(key)):
            write = ops.bind("write", self.encoding.backend, pages, key, value, lengths, None)
            pages.record = DecodeRecord(
                describe_tokens(key, value), self.group.table.version, write
            )

    def repeat(
        self, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Store one token per sequence as in the recorded step, and return the handles.

        Return None if the pages have no record, or the step differs from the recorded step. Raise
        the errors of `LayerGroup.reserve`.
        """
        plan_and_pages = self.pool.blocks.cached_plan_and_pages
        if plan_and_pages is None or type(self.length) is not HostLength:
            return None
        pages = plan_and_pages[1]
        record = pages.record
        if record is None or record.write is None:
            return None
        if api.is_observed(key) or record.layout != describe_tokens(key, value):
            return None
        group = self.group
        member = self.length.member
        start = group.lengths[member]
        # The layer may have been emptied, or rows selected, or the record is of a fork's pages. An
        # empty layer returns exact states.
        if not start or group.table.version != record.version:
            return None
        positions = group.reserve(start, start + 1, key.shape[0])
        # The step may have allocated a page.
        if positions.version != record.version:
            return None
        lengths = positions.get_lengths(key.device)
        record.write(pages, key, value, lengths, None)
        handles = self.make_handles(pages, lengths, positions)
        group.lengths[member] = positions.stop
        return handles

    def _count_query_rows(self, num_tokens: int) -> int:
        """Return the number of query rows per KV head, or a lower bound if it is not known."""
        return max(1, self.num_query_heads // self.pool.num_heads) * num_tokens

    def make_stored_handles(self) -> tuple[PagedKV, PagedKV]:
        """Return handles on all stored tokens that are visible to the next token.

        For a preallocated layer, the handles cover all positions, stored or not, after the first
        call. For a ring, they begin with the first visible token, for which this synchronizes.
        """
        self.fetch_pages()
        positions = self.length.find_stored_positions()
        table, lengths = positions.locate(self.encoding.device)
        return self.make_handles(self.encoding.make_pages(self.pool, table), lengths, positions)

    def crop_to(self, length: int) -> None:
        """Keep the first `length` tokens of this layer."""
        self.length.set(length)
        self.trim_indexer(length)

    def trim_indexer(self, length: int) -> None:
        """Keep the indexer keys of the first `length` tokens."""
        if self.indexer is not None:
            self.indexer.trim(length)

    def update_table(self) -> None:
        """Apply a change of a preallocated group's block table or device, in place if possible."""
        if isinstance(self.length, DeviceLength) and self.pool.is_allocated:
            offsets = self.pool.blocks.offsets
            self.pool.memory.grow(self.group.capacity)
            has_moved = self.length.update_table(self.encoding.device)
            if has_moved or self.pool.blocks.offsets is not offsets:
                self.mark_addresses()

    def fetch_pages(self) -> None:
        """Move pages to the layer's device. With offloading, also fetch the next layer's pages."""
        memory = self.pool.memory
        if isinstance(memory, OffloadedLayer):
            next_layer = self.next_layer() or self
            next_memory = next_layer.pool.memory
            assert isinstance(next_memory, OffloadedLayer)
            memory.budget.fetch_layers(
                memory,
                self.group.find_visible_pages(self.length.member),
                next_memory,
                next_layer.group.find_visible_pages(next_layer.length.member),
            )
        elif memory.tensors[0].device != self.encoding.device:
            self.move_memory(self.encoding.device)

    def move_memory(self, device: torch.device) -> None:
        """Move pages and indexer keys to `device`."""
        if self.pool.is_allocated:
            self.pool.memory.move(device)
        if self.indexer is not None:
            self.indexer.move(device)

    def move_to(self, device: torch.device) -> None:
        """Move the layer to `device`, on which the model computes it.

        A cache from a file is on a single device, but the model's layers may be on several devices.
        """
        self.pool.device = device
        if isinstance(self.pool.memory, OffloadedLayer):
            self.pool.memory.device = device
        # These tensors are later written in inference mode and outside it.
        with torch.inference_mode(False), torch.no_grad():
            self.encoding.prepare(*self.pool.make_empty_kv(1))
            self.move_memory(device)
            self.update_table()

    def restore(self, length: int, indexer_tensors: dict[str, torch.Tensor]) -> None:
        """Set the contents of a new growing layer, except the block table and the pages.

        Args:
            length: Number of stored tokens.
            indexer_tensors: Result of `get_indexer_tensors`, whose first tokens are copied.
        """
        self.group.lengths[self.length.member] = length
        if self.indexer is not None and length:
            self.indexer.set_tensors(indexer_tensors, length)
        if self.pool.is_allocated:
            self.encoding.prepare(*self.pool.make_empty_kv(self.group.table.batch))

    def copy_from(self, source: "LayerStorage") -> None:
        """Copy the contents of a growing layer to this new preallocated layer.

        Each sequence gets separate pages.
        """
        length = self.length
        table = source.group.table
        num_stored = source.length.count_stored()
        assert isinstance(length, DeviceLength)
        if not source.pool.is_allocated:
            return
        if self.indexer is not None and num_stored:
            self.indexer.set_tensors(get_indexer_tensors(source.indexer), num_stored)
        self.lazy_initialization(*source.pool.make_empty_kv(table.batch))
        # A ring only holds the last pages.
        group = length.group
        stop = table.num_columns
        start = max(table.first_page, stop - (group.ring_size or stop))
        group.first_intact[length.member] = start * table.page_size
        new_pages = length.table[:, start:stop].long().reshape(-1)
        rows = source.pool.memory.take(table.rows[:, start:stop].reshape(-1))
        self.pool.memory.put(new_pages, rows.to(new_pages.device))
        length.set(num_stored)
        length.fill_schedule(1)

    def memory_footprint(self) -> dict[str, int]:
        """Return bytes by kind: `pages`, `scales`, `tables`, `used`, `host` and `other`.

        A layer without a pool has only `other`.
        """
        indexer_bytes = sum(tensor.nbytes for tensor in get_indexer_tensors(self.indexer).values())
        if not self.pool.is_allocated:
            return {"other": indexer_bytes}
        sizes = {"other": indexer_bytes, **self.pool.memory_footprint()}
        sizes["scales"] += sum(tensor.nbytes for tensor in self.encoding.list_scales_and_center())
        num_used_pages = len(np.unique(self.group.table.get_used_rows()))
        if isinstance(self.length, DeviceLength):
            num_used_pages = len(self.pool.memory)  # every page belongs to a sequence
            sizes["tables"] += self.length.lengths.nbytes
        return {**sizes, "used": num_used_pages * self.pool.layout.size}
