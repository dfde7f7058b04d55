"""`FP8PagedLayer`: a layer stored in pages, as transformers' `Cache` expects it."""

import operator
import weakref
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from .. import ops
from ..errors import ConfigError
from ..modeling.model_support import ATTENTION
from ..ops import Pages
from ..ops.blocks import locate_pages
from ..paging.layer_group import LayerGroup
from ..paging.lengths import Call, DeviceLength, HostLength, LongWrite
from ..paging.offloading import OffloadedPool
from ..paging.page_pool import PagePool
from ..utils.tensors import without_grad
from .encoding import Encoding
from .options import CacheOptions
from .paged_tensor import PagedKV, densify, make_handle, make_handles
from .snapshot import LayerSnapshot


class MaskLength(int):
    """The columns of a mask for paged layers: functions that make masks are not given the cache."""


class FP8PagedLayer(CacheLayerMixin):
    """A layer stored in pages.

    With a `HostLength` pages are taken as tokens come, and those that fall out of a window are
    freed. With a `DeviceLength` all memory is taken at the first call, at addresses that stay, for
    torch.compile and CUDA graphs.

    Attributes:
        index: the layer's number in the model.
        encoding: how K and V are stored.
        length: how many tokens are stored, and where.
        pool: the bytes; shared with forks.
        config: the model's config, which says which attention is used; or None.
        query_heads: query heads of this process; 0: not known.
        assigned: what was assigned to `keys` or `values`, until the other one is.
        following: the layer that computes next, weak: layers come in a circle.
    """

    is_croppable = True
    supports_early_init = True

    def __init__(
        self,
        options: CacheOptions,
        encoding: Encoding,
        length: HostLength | DeviceLength,
        pool: PagePool,
        config: PreTrainedConfig | None = None,
        query_heads: int = 0,
    ) -> None:
        # The base class would assign `keys` and `values`, which are properties here.
        self.index, self.options, self.encoding = encoding.index, options, encoding
        self.length, self.group, self.pool = length, length.group, pool
        self.config, self.query_heads = config, query_heads
        self.sliding_window = self.group.window
        self.is_sliding = self.sliding_window is not None
        self.is_compileable = length.room is not None
        self._ready = False
        self.assigned: dict[str, torch.Tensor] = {}
        self.following: weakref.ref[FP8PagedLayer] = weakref.ref(self)

    def __repr__(self) -> str:
        window = "" if self.sliding_window is None else f", window={self.sliding_window}"
        return f"{type(self).__name__}({self.encoding.plan}{window})"

    # -- what transformers calls -------------------------------------------------------------

    # transformers assigns this, `keys` and `values` as attributes; here they follow the pool.
    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Whether shapes are known and there is a pool; a fork may have freed it."""
        return self._ready and self.pool.is_allocated

    @property
    def is_empty(self) -> bool:
        """Whether no token was stored."""
        return self.length.is_empty

    @property
    def record_past(self) -> bool:
        """Whether pages behind the window stay until `crop`."""
        return self.group.record_past

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self.group.record_past = value

    def activate_past_recording(self) -> None:
        """Keep all tokens from now on; a ring becomes room for all, at new addresses."""
        self.group.record_past = True
        if isinstance(self.length, DeviceLength) and self.is_initialized:
            self.length.fixed.unroll(self.length.on_host())
            self.follow_table()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Look up the static scales, and allocate the pool for tokens of these shapes.

        Raises:
            ScaleError: static scales that do not fit. ConfigError: a model that is not split.
            OutOfPagesError: a preallocated cache would pass its budget.
        """
        self.encoding.prepare(key_states, value_states)
        self._allocate(key_states, value_states)

    def _allocate(self, key: torch.Tensor, value: torch.Tensor) -> None:
        batch, is_fixed = key.shape[0], isinstance(self.length, DeviceLength)
        pages = self.length.take(batch, self.encoding.device)
        if not self.pool.is_allocated:
            self.pool.allocate(key, value, pages, in_one=is_fixed)
        if is_fixed:
            self.encoding.fix_center(batch, self.pool.heads, self.pool.k_dim)
        self._ready = True
        self._keep_addresses()

    def _keep_addresses(self) -> None:
        """Take the group's plan, and tell torch.compile which addresses stay."""
        if not isinstance(self.length, DeviceLength):
            return
        rows = self._query_rows(1)
        step = self.length.share_plan(self.pool.heads, rows, self.encoding.backend)
        if not torch.compiler.is_compiling():
            pages = self.encoding.record(self.pool, self.length.table)
            for tensor in (pages.block, pages.offsets, *step, *self.encoding.tensors()):
                torch._dynamo.mark_static_address(tensor)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new tokens, and return the keys and values to attend to.

        Args:
            key_states: `[B, Hkv, T, Dk]`, of the model's dtype.
            value_states: `[B, Hkv, T, Dv]`.

        Returns:
            Handles on stored keys and values; on an empty layer with prefill="exact", the
            arguments themselves, padded to `max_cache_len` if another attention is used.

        Raises:
            ConfigError: tokens of another model or batch.
            ScaleError: static scales that do not fit.
            OutOfPagesError: the budget would be passed. The cache is as it was in each case. Tokens
                past `max_cache_len` raise it on a CPU, also under torch.compile. On other devices
                they are not stored, and the next step raises whose mask is not made inside of a
                compiled region (generate() makes it outside).
        """
        length, encoding, pool = self.length, self.encoding, self.pool
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling:
            check_tokens(self, key_states, value_states)
        elif length.room is None:
            both: tuple[torch.Tensor, torch.Tensor]
            both = _update_uncompiled(self, key_states, value_states)
            return both
        else:
            refuse_export()
        key, value = without_grad(key_states), without_grad(value_states)
        is_first, tokens = length.is_empty, key.shape[2]
        is_new = not self.is_initialized
        if is_new:
            encoding.prepare(key, value)
        elif not is_compiling and key.device != encoding.device:
            self.move_to(key.device)
        if not is_compiling:
            length.reserve(tokens, key.shape[0])
        if is_new:
            self._allocate(key, value)
        if not is_compiling:
            pool.grow(self.group.table.allocator.capacity)
            self.bring_pages()
        encoding.find_center(key, is_first=is_first)
        reads = not is_first or self.options.prefill == "stored"
        call = length.begin(tokens, encoding.device, encoding.backend)
        pages = self._write(key, value, call, reads=reads)
        length.end(call)
        self.fill_plan(tokens)
        if reads:
            return self._handles(pages, call)
        return self._fresh(key_states), self._fresh(value_states)

    def _write(self, key: torch.Tensor, value: torch.Tensor, call: Call, *, reads: bool) -> Pages:
        """Store the tokens of a call; return the pages that it reads if it `reads` any."""
        long, room = call.long, self.length.room
        pages = self.encoding.record(self.pool, call.table)
        if long is not None and reads:
            return self._write_long(key, value, call, long, pages)
        if long is not None:
            key, value = key[:, :, long.skipped :], value[:, :, long.skipped :]
        if room is None:
            stop = call.stop
            self.pool.written(self.group.table, stop - key.shape[2], stop)
        ops.write(pages, key, value, call.lengths, self.encoding.backend, room)
        return pages

    def _write_long(
        self, key: torch.Tensor, value: torch.Tensor, call: Call, long: LongWrite, pages: Pages
    ) -> Pages:
        """Store a long call in scratch pages, and copy the last window to the layer's own.

        Return the scratch pages, in which the old window comes before the new tokens.
        """
        (batch, old), kept = long.old.shape, long.own.shape[1]
        room = old + -(-call.tokens // pages.page_size)
        block = pages.block.new_zeros((batch, room, pages.block.shape[1]))
        if old:
            rows = self.pool.on_device.take_rows(long.old.reshape(-1))
            block[:, :old] = rows.unflatten(0, (batch, old))
        device = block.device
        # Other positions have no page here; no query sees them.
        column = torch.arange(call.table.shape[1], device=device) - _as_column(long.first)
        sequence = torch.arange(batch, device=device)[:, None]
        table = (sequence * room + column.clamp(0, room - 1)).int()
        scratch = block.flatten(0, 1)
        pages = pages._replace(block=scratch, table=table, offsets=locate_pages([scratch]))
        ops.write(pages, key, value, call.lengths, self.encoding.backend, self.length.room)
        column = torch.arange(kept, device=device) + _as_column(long.kept - long.first)
        self.pool.put_rows(long.own.reshape(-1), block[sequence, column].flatten(0, 1))
        return pages

    def _handles(self, pages: Pages, call: Call) -> tuple[PagedKV, PagedKV]:
        """Return handles on what the queries of a call see."""
        encoding, is_fixed = self.encoding, self.length.room is not None
        rows, backend = self._query_rows(call.tokens), encoding.backend
        plan = self.length.plan(call, self.pool.heads, rows, backend)
        window = self.sliding_window or 0
        span = (call.start, call.stop, window, is_fixed, backend)
        dtypes = encoding.dtype, encoding.v_dtype
        if not torch.compiler.is_compiling():
            return make_handles(pages, call.lengths, plan, dtypes, *span)
        return (
            make_handle(pages, call.lengths, plan, "k", dtypes[0], *span),
            make_handle(pages, call.lengths, plan, "v", dtypes[1], *span),
        )

    def _query_rows(self, tokens: int) -> int:
        """Return the query rows of each KV head, as far as is known."""
        return max(1, self.query_heads // self.pool.heads) * tokens

    def _attends_pages(self) -> bool:
        """Return whether the model's attention is "fp8_paged", which takes short keys at first."""
        return getattr(self.config, "_attn_implementation", None) == ATTENTION

    def _fresh(self, states: torch.Tensor) -> torch.Tensor:
        """Return new keys or values, as wide as in every other call if that is what masks are."""
        room = self.length.room
        if room is None or self._attends_pages():
            return states
        return torch.nn.functional.pad(states, (0, 0, 0, room - states.shape[2]))

    def get_seq_length(self) -> Any:
        """Return the tokens seen; in the preallocated form a tensor `[]` once there are any."""
        return self.length.stored

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the columns of the mask, and the position of the first."""
        length = self.length
        if isinstance(length, HostLength):
            start = self.group.visible_from(length.stored)
            columns = length.stored + query_length - start
            return (columns if torch.compiler.is_compiling() else MaskLength(columns)), start
        if length.is_empty and self.options.prefill == "exact" and self._attends_pages():
            return query_length, 0
        length.check_room(query_length)
        return length.room, 0

    def get_max_length(self) -> int:
        """Return the room, or the window of a growing sliding layer, or -1, no maximum."""
        return self.length.room or self.sliding_window or -1

    def reset(self) -> None:
        """Remove all tokens; addresses of the preallocated form stay.

        Memory of a growing layer is freed once no layer and no fork holds pages.
        """
        self.crop_to(0)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens of this layer.

        After `reorder_cache`, crop the whole cache if it is preallocated, not one layer: pages of
        sequences that then part ways must be copied for all layers at once.

        Raises:
            ConfigError: a positive number, or tokens that the window no longer holds.
        """
        tokens, stored = parse_crop(tokens_to_remove), self.length.on_host()
        self.length.check_crop(tokens, stored)
        if tokens or self.length.room is None:
            self.crop_to(max(stored - tokens, 0))

    def crop_to(self, length: int) -> None:
        """Keep the first `length` tokens of this layer."""
        self.length.set(length)
        self.drop_removed(length)

    def _refuse_part(self, *_: Any) -> None:
        """Raise ConfigError: sequences are chosen for the whole cache at once."""
        raise ConfigError(
            "reorder_cache, batch_repeat_interleave and batch_select_indices expected the whole "
            "cache, got one layer: layers share one block table; call them of the cache"
        )

    reorder_cache = batch_repeat_interleave = batch_select_indices = _refuse_part  # type: ignore[assignment]

    def offload(self) -> None:
        """Move the bytes to the CPU's memory."""
        if self.pool.is_allocated:
            self.pool.move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Move the bytes back to the layer's device."""
        if self.pool.is_allocated:
            self.pool.move(self.encoding.device)

    @property
    def keys(self) -> PagedKV | None:
        """The stored keys, as `update` returns them; None before the first token."""
        both = self.stored()
        return None if both is None else both[0]

    @keys.setter
    def keys(self, tokens: torch.Tensor | None) -> None:
        self._assign("k", tokens)

    @property
    def values(self) -> PagedKV | None:
        """The stored values, as `update` returns them; None before the first token."""
        both = self.stored()
        return None if both is None else both[1]

    @values.setter
    def values(self, tokens: torch.Tensor | None) -> None:
        self._assign("v", tokens)

    # -- what the cache calls ----------------------------------------------------------------

    def stored(self) -> tuple[PagedKV, PagedKV] | None:
        """Return handles on all that is stored and not yet behind the window, or None.

        In the preallocated form on all positions, stored or not, once there was a call. Those of a
        ring begin with the first token that the next one sees, for which this waits for the device.
        """
        if not self.is_initialized or (self.length.room is None and self.length.is_empty):
            return None
        self.bring_pages()
        call = self.length.written(self.encoding.device)
        return self._handles(self.encoding.record(self.pool, call.table), call)

    def _assign(self, side: str, tokens: torch.Tensor | None) -> None:
        """Replace what is stored once both sides were assigned, as code for dense layers does."""
        if tokens is None:
            raise ConfigError(
                "expected keys or values [B, Hkv, T, D], got None; call cache.reset()"
            )
        self.assigned[side] = tokens
        if len(self.assigned) == 2:
            key, value = (densify(self.assigned.pop(side)) for side in ("k", "v"))
            self.replace(key, value)

    def replace(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store these tokens instead of all that are stored: at most as many, encoded again.

        If they are the first stored tokens, the others are removed. The plan and the center of the
        first call stay.

        Raises:
            ConfigError: more tokens, or of another kind, a layer with a window, or a preallocated
                one, whose length is a matter of the whole cache.
            OutOfPagesError: pages that are shared with forks do not fit the budget a second time.
        """
        length, group = self.length, self.group
        if isinstance(length, DeviceLength):
            raise ConfigError(
                "expected a growing cache where layer.keys and layer.values are assigned, got a "
                "preallocated one; leave max_cache_len out"
            )
        check_tokens(self, key, value)
        stored, tokens, batch = length.stored, key.shape[2], key.shape[0]
        if group.window is not None or tokens > stored:
            raise ConfigError(
                f"expected at most {stored} keys and values for a layer without a window, got "
                f"{tokens} for {self}; leave layers with a window as they are"
            )
        old = self.stored()
        assert old is not None
        if all(
            torch.equal(one.dense()[:, :, :tokens], new)
            for one, new in zip(old, (key, value), strict=True)
        ):
            self.crop_to(tokens)
            return
        group.prepare(0, tokens, batch)
        center = self.encoding.k_center
        self.crop_to(0)
        length.reserve(tokens, batch)
        self.encoding.k_center = center
        self.pool.grow(group.table.allocator.capacity)
        self.bring_pages()
        call = length.begin(tokens, self.encoding.device, self.encoding.backend)
        self._write(without_grad(key), without_grad(value), call, reads=False)
        length.end(call)

    def drop_removed(self, length: int) -> None:
        """Drop what belongs to tokens that were removed; `length` tokens are left."""
        if not length and self.length.room is None:
            self.encoding.k_center = None

    def select_rows(self, sequences: torch.Tensor) -> None:
        """Select sequences `[B']` of what this layer alone holds."""
        self.encoding.select(sequences)

    def fill_plan(self, tokens: int = 1) -> None:
        """Fill the plan of a preallocated group for a call of `tokens`, if this layer is to."""
        if isinstance(self.length, DeviceLength) and self.is_initialized:
            self.length.fill_plan(tokens, self.pool.heads, self.encoding.backend)

    def follow_table(self) -> None:
        """Follow a change of a preallocated group's block table, in place if it can be."""
        if isinstance(self.length, DeviceLength) and self.is_initialized:
            block = self.pool.block
            self.pool.grow(self.group.table.allocator.capacity)
            if self.length.follow_table() or self.pool.block is not block:
                self._keep_addresses()

    def bring_pages(self) -> None:
        """Move stored tokens to where the layer computes, and start to move the next layer's."""
        pool = self.pool
        if isinstance(pool, OffloadedPool):
            following = self.following() or self
            assert isinstance(following.pool, OffloadedPool)
            held, next_held = (x.group.held_pages(x.length.member) for x in (self, following))
            pool.budget.use(pool, held, following.pool, next_held)
        elif pool.is_allocated and pool.block.device != self.encoding.device:
            self.prefetch()

    def move_to(self, device: torch.device) -> None:
        """Move what the layer holds to `device`, where the model computes this layer.

        A cache from a file is on one device, and the model's layers may be on several.
        """
        self.pool.device = device
        # Written in place later, in inference mode and outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self.encoding.move(device)
            self.prefetch()
            if isinstance(self.length, DeviceLength):
                self.length.move(device)
                self._keep_addresses()

    def release_memory(self) -> None:
        """Free the pool's bytes; only for a layer without tokens and forks."""
        self.pool.free()
        self._ready = False
        self.encoding.clear()

    def snapshot(self, group: LayerGroup, length: int) -> LayerSnapshot:
        """Return what the layer holds, `length` tokens; `group` is a fork of its group."""
        if not self.is_initialized:
            return LayerSnapshot(self.index, group, length, turns=self.encoding.turns)
        return LayerSnapshot(
            self.index, group, length, self.pool, self.encoding.k_center, self.encoding.turns,
            encoding=self.encoding,
        )  # fmt: skip

    def restore(self, snapshot: LayerSnapshot) -> None:
        """Take what a layer held; only for a new layer.

        A growing one is over the same pool. A preallocated one copies it: each sequence gets pages
        of its own, and the cache sets the lengths.
        """
        length, pool = self.length, snapshot.pool
        if isinstance(length, HostLength):
            self.group.lengths[length.member] = snapshot.length
        if pool is None:
            return
        tokens = pool.empty_tokens(snapshot.group.table.batch)
        if isinstance(length, HostLength):
            if snapshot.encoding is None:
                self.encoding.prepare(*tokens)
            else:
                self.encoding.take_over(snapshot.encoding)
            self.encoding.k_center = snapshot.k_center
            self._ready = True
            return
        self.lazy_initialization(*tokens)
        table, fixed = snapshot.group.table, length.fixed
        # A ring has no room for more than the last pages.
        first = max(table.first, table.count - (fixed.ring or table.count))
        fixed.lost = first * table.page_size
        own = length.table[:, first : table.count].long().reshape(-1)
        rows = pool.take_rows(table.rows[:, first : table.count].reshape(-1))
        self.pool.put_rows(own, rows.to(self.pool.block.device))
        if snapshot.k_center is not None:
            self.encoding.set_center(snapshot.k_center)

    def memory_footprint(self) -> dict[str, int]:
        """Return bytes by kind: `pages`, `scales`, `tables`, `used`, and `host` if it is not 0."""
        if not self.is_initialized:
            return {}
        sizes = {"scales": 0, **self.pool.memory_footprint()}
        sizes["scales"] += sum(tensor.nbytes for tensor in self.encoding.tensors())
        used = len(np.unique(self.group.table.used()))
        if isinstance(self.length, DeviceLength):
            used = self.pool.pages  # each has its place in a sequence
            sizes["tables"] += self.length.lengths.nbytes
        return {**sizes, "used": used * self.pool.bytes_per_page()}


def check_tokens(layer: FP8PagedLayer, key: torch.Tensor, value: torch.Tensor) -> None:
    """Raise ConfigError for tokens that a layer cannot take; change nothing."""
    if layer.assigned:
        raise ConfigError(
            "expected both layer.keys and layer.values to be assigned, got "
            f"{'keys' if 'k' in layer.assigned else 'values'} alone; assign the other, too"
        )
    shape, v_shape = key.shape, value.shape
    size, heads, tokens, k_dim = shape if len(shape) == 4 else (0, 0, 0, 0)
    if not tokens or len(v_shape) != 4 or v_shape != (size, heads, tokens, v_shape[3]):
        raise ConfigError(
            "expected keys [B, Hkv, T, Dk] and values [B, Hkv, T, Dv] with T > 0, got "
            f"{tuple(shape)} and {tuple(v_shape)}"
        )
    # Two dtypes are right: under autocast RoPE leaves K in fp32.
    known = layer.is_initialized
    floating = known or (key.is_floating_point() and value.is_floating_point())
    if not floating or key.device != value.device:
        raise ConfigError(
            "expected keys and values of a floating dtype on one device, got "
            f"{key.dtype} on {key.device} and {value.dtype} on {value.device}"
        )
    pool, got = layer.pool, (heads, k_dim, v_shape[3], key.dtype, value.dtype)
    expected = known and (pool.heads, pool.k_dim, pool.v_dim, pool.dtype, pool.v_dtype)
    if known and got != expected:
        raise ConfigError(
            "expected keys and values like the first call's (heads, key size, value size, "
            f"dtypes) = {expected}, got {got}; a cache belongs to one model: make a new "
            "FP8PagedCache for another one"
        )
    batch = layer.group.table.batch
    if batch and size != batch:
        raise ConfigError(
            f"expected {batch} sequences, which the cache holds, got {size}; use "
            "batch_repeat_interleave or batch_select_indices, or a new cache"
        )


def _as_column(page: int | torch.Tensor) -> int | torch.Tensor:
    return page[:, None] if isinstance(page, torch.Tensor) else page


def parse_crop(tokens_to_remove: int) -> int:
    """Return how many tokens `crop` has to remove; transformers passes a number below 1."""
    try:
        tokens_to_remove = operator.index(tokens_to_remove)
    except TypeError:
        raise ConfigError(f"crop: expected a whole number, got {tokens_to_remove!r}") from None
    if tokens_to_remove > 0:
        raise ConfigError(
            f"crop: expected a number of tokens to remove, as 0 or less, got {tokens_to_remove}; "
            "crop(-n) removes the last n tokens"
        )
    return -tokens_to_remove


def refuse_export() -> None:
    """Raise ConfigError where torch.export runs Python with tensors that have no content."""
    if torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling():
        raise ConfigError(
            "expected torch.export with strict=True and a preallocated cache, which the module "
            "holds, got another export of FP8PagedCache; export the model without a cache "
            "(use_cache=False), or compile it with torch.compile"
        )


@torch.compiler.disable(
    reason="a growing FP8PagedCache counts its pages in Python; for fullgraph=True preallocate it: "
    "FP8PagedCache(config, max_cache_len=...)"
)  # type: ignore[untyped-decorator]
def _update_uncompiled(
    layer: FP8PagedLayer, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    refuse_export()
    return layer.update(key, value)
