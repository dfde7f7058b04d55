"""`LayerStore`: the pages of one layer, with its encoding and its length."""

import weakref

import numpy as np
import torch

from .. import ops
from ..ops import Pages
from ..ops.blocks import locate_pages
from ..paging.lengths import Call, DeviceLength, HostLength, LongWrite
from ..paging.offloading import Tiers
from ..paging.page_pool import PagePool
from .encoding import Encoding
from .indexers import Indexer, held_by
from .paged_tensor import PagedKV, make_handles


class LayerStore:
    """The stored keys and values of one layer.

    Attributes:
        encoding: How K and V are stored.
        length: Number of stored tokens, and the positions of new tokens.
        pool: The pages, shared with forks.
        query_heads: Number of query heads of this process, or 0 if it is not known.
        indexer: Keys of the layer's indexer, or None.
        following: Weak reference to the layer that computes next. The first layer follows the last.
    """

    def __init__(
        self,
        encoding: Encoding,
        length: HostLength | DeviceLength,
        pool: PagePool,
        query_heads: int = 0,
        indexer: Indexer | None = None,
    ) -> None:
        self.encoding, self.length, self.group = encoding, length, length.group
        self.pool, self.query_heads, self.indexer = pool, query_heads, indexer
        self._ready = False
        self.following: weakref.ref[LayerStore] = weakref.ref(self)

    @property
    def is_initialized(self) -> bool:
        """Whether the pool is allocated. A fork may have freed it."""
        return self._ready and self.pool.is_allocated

    def allocate(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Allocate the pool for tokens of these shapes, after `Encoding.prepare`.

        Raises:
            OutOfPagesError: A preallocated cache would exceed its budget.
        """
        batch, is_fixed = key.shape[0], self.length.room is not None
        pages = self.length.allocate(batch, self.encoding.device)
        if not self.pool.is_allocated:
            self.pool.allocate(key, value, pages, single_block=is_fixed)
        if is_fixed:
            self.encoding.fix_center(batch, self.pool.heads, self.pool.k_dim)
        self._ready = True
        self.keep_addresses()

    def keep_addresses(self) -> None:
        """Use the group's work plan, and mark constant addresses for torch.compile."""
        if not isinstance(self.length, DeviceLength):
            return
        rows, backend = self._query_rows(1), self.encoding.backend
        step = self.length.share_plan(self.pool.heads, rows, backend)
        if not torch.compiler.is_compiling():
            pages = self.encoding.record(self.pool, self.length.table)
            for tensor in (pages.block, pages.offsets, *step, *self.encoding.tensors()):
                torch._dynamo.mark_static_address(tensor)

    # -- tokens ------------------------------------------------------------------------------

    def write(self, key: torch.Tensor, value: torch.Tensor, *, reads: bool) -> tuple[Pages, Call]:
        """Store new tokens. Return the call, and the pages that its queries read if `reads`."""
        encoding, room = self.encoding, self.length.room
        call = self.length.begin(key.shape[2], encoding.device, encoding.backend)
        long, pages = call.long, encoding.record(self.pool, call.table)
        if long is not None and reads:
            pages = self._write_long(key, value, call, long, pages)
        else:
            if long is not None:  # only the last pages of these tokens will ever be read
                size, kept = pages.page_size, long.own.shape[1]
                skipped = max(-(-call.tokens // size) - kept, 0) * size
                key, value = key[:, :, skipped:], value[:, :, skipped:]
            if isinstance(memory := self.pool.memory, Tiers):
                memory.written(self.group.table.pages_of(call.stop - key.shape[2], call.stop))
            ops.write(pages, key, value, call.lengths, encoding.backend, room)
        self.length.end(call)
        return pages, call

    def _write_long(
        self, key: torch.Tensor, value: torch.Tensor, call: Call, long: LongWrite, pages: Pages
    ) -> Pages:
        """Store a long call in scratch pages, and copy the last window to the layer's pages.

        Return the scratch pages, which hold the old window followed by the new tokens.
        """
        (batch, old), kept = long.old.shape, long.own.shape[1]
        room = old + -(-call.tokens // pages.page_size)
        block = pages.block.new_zeros((batch, room, pages.block.shape[1]))
        if old:
            rows = self.pool.blocks.take(long.old.reshape(-1))
            block[:, :old] = rows.unflatten(0, (batch, old))
        device = block.device
        # Other positions have no scratch page. They are not visible to any query.
        column = torch.arange(call.table.shape[1], device=device) - long.first
        sequence = torch.arange(batch, device=device)[:, None]
        table = (sequence * room + column.clamp(0, room - 1)).int()
        scratch = block.flatten(0, 1)
        pages = pages._replace(block=scratch, table=table, offsets=locate_pages([scratch]))
        ops.write(pages, key, value, call.lengths, self.encoding.backend, self.length.room)
        column = torch.arange(kept, device=device) + (long.kept - long.first)
        self.pool.memory.put(long.own.reshape(-1), block[sequence, column].flatten(0, 1))
        return pages

    def handles(self, pages: Pages, call: Call) -> tuple[PagedKV, PagedKV]:
        """Return handles on the keys and values of a call."""
        encoding, is_fixed = self.encoding, self.length.room is not None
        rows, backend = self._query_rows(call.tokens), encoding.backend
        plan = self.length.plan(call, self.pool.heads, rows, backend)
        window = self.group.window or 0
        span = (call.start, call.stop, window, is_fixed, backend)
        dtypes = self.pool.dtype, self.pool.v_dtype
        return make_handles(pages, call.lengths, plan, dtypes, *span)

    def _query_rows(self, tokens: int) -> int:
        """Return the number of query rows per KV head, a lower bound if heads are not known."""
        return max(1, self.query_heads // self.pool.heads) * tokens

    def stored(self) -> tuple[PagedKV, PagedKV] | None:
        """Return handles on all stored tokens that are visible to the next token, or None.

        For a preallocated layer they cover all positions, stored or not, after the first call. For
        a ring they begin with the first token that is visible to the next one, for which this
        synchronizes.
        """
        if not self.is_initialized or (self.length.room is None and self.length.is_empty):
            return None
        self.bring_pages()
        call = self.length.written(self.encoding.device)
        return self.handles(self.encoding.record(self.pool, call.table), call)

    def crop_to(self, length: int) -> None:
        """Keep the first `length` tokens of this layer."""
        self.length.set(length)
        self.drop_removed(length)

    def drop_removed(self, length: int) -> None:
        """Drop centers and indexer keys of removed tokens. `length` tokens are left."""
        if not length and self.length.room is None:
            self.encoding.k_center = None
        if self.indexer is not None:
            self.indexer.trim(length)

    def follow_table(self) -> None:
        """Apply a change of a preallocated group's block table or device, in place if possible."""
        if isinstance(self.length, DeviceLength) and self.is_initialized:
            offsets, device = self.pool.blocks.offsets, self.encoding.device
            self.pool.memory.grow(self.group.table.allocator.capacity)
            if self.length.follow_table(device) or self.pool.blocks.offsets is not offsets:
                self.keep_addresses()

    def bring_pages(self) -> None:
        """Move stored pages to the layer's device, and start to fetch the next layer's pages."""
        memory = self.pool.memory
        if isinstance(memory, Tiers):
            following = self.following() or self
            next_memory = following.pool.memory
            assert isinstance(next_memory, Tiers)
            held, next_held = (x.group.held_pages(x.length.member) for x in (self, following))
            memory.budget.use(memory, held, next_memory, next_held)
        elif memory.tensors[0].device != self.encoding.device:
            self.move_bytes(self.encoding.device)

    def move_bytes(self, device: torch.device) -> None:
        """Move pages and indexer keys to `device`."""
        if self.pool.is_allocated:
            self.pool.memory.move(device)
        if self.indexer is not None:
            self.indexer.move(device)

    def move_to(self, device: torch.device) -> None:
        """Move the layer to `device`, on which the model computes it.

        A cache from a file is on a single device, but the model's layers may be on several.
        """
        self.pool.device, encoding = device, self.encoding
        if isinstance(self.pool.memory, Tiers):
            self.pool.memory.device = device
        # These tensors are later written in inference mode and outside it.
        with torch.inference_mode(False), torch.no_grad():
            encoding.prepare(*self.pool.empty_tokens(1))
            if encoding.k_center is not None:
                encoding.k_center = encoding.k_center.to(device)
            self.move_bytes(device)
            self.follow_table()

    def release_memory(self) -> None:
        """Free the pool's memory. Only for a layer without tokens and forks."""
        self.pool.memory.free()
        self._ready = False
        self.encoding.clear()

    def fork_from(self, source: "LayerStore", length: int) -> None:
        """Take over the first `length` tokens of a layer, whose pool this new growing layer has."""
        indexer = held_by(source.indexer) if source.indexer is not None and length else {}
        if "indexer_keys" in indexer:
            indexer["indexer_keys"] = indexer["indexer_keys"][:, :length]
        self.restore(length, source.encoding.k_center, indexer)

    def restore(
        self, length: int, center: torch.Tensor | None, indexer: dict[str, torch.Tensor]
    ) -> None:
        """Set the contents of a new growing layer, except the table and the pages.

        Args:
            length: Number of stored tokens.
            center: Center of K, `[B, Hkv, Dk]`, float32, or None.
            indexer: Tensors of the layer's indexer by name, which are copied.
        """
        self.group.lengths[self.length.member] = length
        if self.indexer is not None:
            self.indexer.hold(indexer)
        if self.pool.is_allocated:
            self.encoding.prepare(*self.pool.empty_tokens(self.group.table.batch))
            self.encoding.k_center, self._ready = center, True

    def copy_from(self, source: "LayerStore") -> None:
        """Copy the contents of a growing layer to this new preallocated layer.

        Each sequence gets separate pages.
        """
        length, pool, table = self.length, source.pool, source.group.table
        assert isinstance(length, DeviceLength)
        if self.indexer is not None and source.indexer is not None:
            self.indexer.hold(held_by(source.indexer))
        if not source.is_initialized:
            return
        tokens = pool.empty_tokens(table.batch)
        self.encoding.prepare(*tokens)
        self.allocate(*tokens)
        # A ring only has room for the last pages.
        group = length.group
        first = max(table.first, table.count - (group.ring or table.count))
        group.lost[length.member] = first * table.page_size
        own_pages = length.table[:, first : table.count].long().reshape(-1)
        rows = pool.memory.take(table.rows[:, first : table.count].reshape(-1))
        self.pool.memory.put(own_pages, rows.to(own_pages.device))
        if source.encoding.k_center is not None:
            self.encoding.set_center(source.encoding.k_center)
        length.set(source.length.on_host())
        length.fill_plan(1)

    def memory_footprint(self) -> dict[str, int]:
        """Return bytes by kind: `pages`, `scales`, `tables`, `used`, `host` and `other`."""
        indexer = {} if self.indexer is None else held_by(self.indexer)
        other = sum(tensor.nbytes for tensor in indexer.values())
        if not self.is_initialized:
            return {"other": other}
        sizes = {"other": other, **self.pool.memory_footprint()}
        sizes["scales"] += sum(tensor.nbytes for tensor in self.encoding.tensors())
        used = len(np.unique(self.group.table.used()))
        if isinstance(self.length, DeviceLength):
            used = len(self.pool.memory)  # every page belongs to a sequence
            sizes["tables"] += self.length.lengths.nbytes
        return {**sizes, "used": used * self.pool.layout.size}
