"""One layer of the preallocated form: fixed addresses for torch.compile and CUDA graphs.

Everything is taken at the first call: the pages of `max_cache_len` tokens, or of a window, and the
whole block table. A step then only writes into tensors that exist. What changes which page holds
what (reorder, crop) happens between steps and in place.
"""

from typing import Any

import torch

from .. import ops
from ..errors import ConfigError, OutOfPagesError
from ..modeling.model_support import ATTENTION
from ..ops import Pages
from ..ops.blocks import locate_pages
from ..paging.page_pool import zeros
from ..paging.preallocated_group import PreallocatedGroup
from ..paging.shared_lengths import SharedLengths
from .centers import FirstTokens
from .layer import PagedLayerBase, parse_crop, refuse_export
from .options import CacheOptions
from .paged_tensor import PagedKV
from .snapshot import LayerSnapshot


class FP8PagedPreallocatedLayer(PagedLayerBase):
    """A layer with room for `max_cache_len` tokens per sequence, at fixed addresses.

    A sliding layer has room for its window: the block table names the same pages over and over. A
    call of more tokens than fit beside the window attends to scratch pages, and leaves the last
    window in the layer's own.

    Attributes:
        shared: the lengths of all layers of the cache.
        place: the layer's number there.
        config: the model's config, which says which attention is used; or None.
        table: `[B, M]`, int32, the group's block table on the layer's device.
        plan: the group's plan (`LayerGroup.shared_plan`), or None.
        fills_plan: whether this layer fills it at each step.
    """

    is_compileable = True
    group: PreallocatedGroup
    table: torch.Tensor
    plan: torch.Tensor | None
    fills_plan = False

    def __init__(
        self,
        index: int,
        options: CacheOptions,
        group: PreallocatedGroup,
        first_tokens: FirstTokens,
        shared: SharedLengths,
        whole_heads: int | None = None,
        config: Any = None,
    ) -> None:
        super().__init__(index, options, group, first_tokens, whole_heads)
        self.config = config
        self.shared, self.place = shared, shared.add()
        assert options.max_cache_len is not None
        self.max_cache_len = options.max_cache_len
        # Whether nothing was written since the start or a reset. It changes once per generate
        # call, at the prefill, which is not compiled.
        self.is_empty = True
        # An upper bound of the tokens stored, on the host; see `_check_room`.
        self._max_written = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate all pages, the block table and the lengths, at addresses that stay.

        Raises what `FP8PagedLayer.lazy_initialization` does, and OutOfPagesError.
        """
        self._prepare_scales(key_states, value_states)
        batch = key_states.shape[0]
        if torch.compiler.is_compiling() and self.options.max_pages is None:
            self.table, pages = self.group.defer(self.max_cache_len, batch, self.device)
        else:
            self.table, pages = _preallocate(self.group, self.max_cache_len, batch, self.device)
        self.pool.allocate(key_states, value_states, pages, in_one=True)
        self.shared.place(self.place, batch, self.device)
        if self._scale_center is not None or self.storage.k.centered:
            shape = (batch, self.pool.heads, self.pool.k_dim)
            self.k_center = zeros(shape, torch.float32, self.device)
        self.batch_size = batch
        self._ready = True
        self._share_plan()

    def _share_plan(self) -> None:
        """Take the group's plan, and tell torch.compile which addresses stay."""
        self.plan, self.fills_plan = self.group.shared_plan(
            self.member, self.lengths, self.pool.heads, self.query_rows, self.backend
        )
        if torch.compiler.is_compiling():
            return
        pages = self._pages(self.table)
        step = (self.table, self.plan, *self.shared.tensors(self.place))
        scales = (self.k_static_scale, self.v_static_scale, self.k_center)
        for tensor in (pages.block, pages.offsets, *step, *scales):
            if tensor is not None:
                torch._dynamo.mark_static_address(tensor)

    @property
    def lengths(self) -> torch.Tensor:
        """The tokens stored, `[B]`, int32; not to be written into."""
        return self.shared.of(self.place)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new tokens, and return the keys and values to attend to.

        As `FP8PagedLayer.update`. Tokens past `max_cache_len` raise OutOfPagesError on a CPU, in a
        compiled step too; on other devices they are not stored, and the next step raises whose mask
        is not made inside of a compiled region (generate() makes it outside).
        """
        if not torch.compiler.is_compiling():
            self._check_tokens(key_states, value_states)
            if self.is_empty and key_states.shape[2] > self.max_cache_len:
                raise OutOfPagesError.of_tokens(self.max_cache_len, 0, key_states.shape[2])
            if self.is_initialized and key_states.device != self.device:
                self.move_to(key_states.device)
            self._bring_pages()
        refuse_export()
        key, value = key_states.detach(), value_states.detach()
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        was_empty = self.is_empty
        if was_empty:
            center = self._first_center(key)
            if center is not None and self.k_center is not None:
                self.k_center.copy_(center)
            self.is_empty = False
            if not torch.compiler.is_compiling():
                self._max_written = max(self._max_written, key.shape[2])
        elif self.k_center is not None and self.first_tokens.told is not None:
            center = self.first_tokens.complete(self.k_center, key, self.turns)
            self.k_center.copy_(center)
        attends_fresh = was_empty and self.options.prefill == "exact"
        pages = self._store(key, value, is_read=not attends_fresh)
        if attends_fresh:
            if self._attends_pages():
                return key_states, value_states
            return self._pad(key_states), self._pad(value_states)
        return self._view(pages)

    def _store(self, key: torch.Tensor, value: torch.Tensor, *, is_read: bool) -> Pages:
        """Store tokens; return pages with what they see if that `is_read`."""
        tokens, pages, ring = key.shape[2], self._pages(self.table), self.group.ring
        first, target = 0, pages
        lengths = self.shared.after(self.place, tokens, self.max_cache_len, self.backend)
        passes = ring > 0 and tokens > self.group.tokens_at_once
        if passes and is_read:
            begin = self._first_in_ring(self.lengths)
            target = self._make_scratch(pages, begin, tokens)
        elif passes:
            # The cache is empty: only the last pages of these tokens will ever be read.
            first = max((tokens - 1) // pages.page_size - ring + 1, 0) * pages.page_size
        ops.write(
            target, key[:, :, first:], value[:, :, first:], lengths, self.backend,
            self.max_cache_len,
        )  # fmt: skip
        self.shared.advance(self.place, tokens, lengths)
        if passes and is_read:
            end = self._first_in_ring(lengths)
            kept = target.block.unflatten(0, (len(lengths), -1))
            index = (end - begin)[:, None] + torch.arange(ring, device=end.device)
            rows = torch.arange(len(lengths), device=end.device)[:, None]
            own = self._ring_pages(end).flatten()
            pages.block.index_copy_(0, own, kept[rows, index].flatten(0, 1))
        self.fill_plan(tokens)
        return target

    def _first_in_ring(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return the first logical page in the ring after `lengths` tokens: `[B]`, int64."""
        last = torch.div(lengths.long() - 1, self.pool.page_size, rounding_mode="floor")
        return (last - self.group.ring + 1).clamp(min=0)

    def _ring_pages(self, first: torch.Tensor) -> torch.Tensor:
        """Return the pages of the ring from logical page `first` on, `[B, ring]`, int64."""
        logical = first[:, None] + torch.arange(self.group.ring, device=first.device)
        # Past the end there is nothing to be written on a GPU, where nothing raises.
        return self.table.long().gather(1, logical.clamp(max=self.table.shape[1] - 1))

    def _make_scratch(self, pages: Pages, first: torch.Tensor, tokens: int) -> Pages:
        """Return pages with the content of the ring and room for `tokens` more.

        `first`, `[B]`, is the first logical page of the ring.
        """
        ring = self.group.ring
        batch, room = len(first), ring + -(-tokens // pages.page_size)
        scratch = pages.block.new_zeros((batch, room, pages.block.shape[1]))
        scratch[:, :ring] = pages.block[self._ring_pages(first)]
        # Other positions have no page here; no query sees them.
        column = torch.arange(self.table.shape[1], device=first.device) - first[:, None]
        start = torch.arange(batch, device=first.device)[:, None] * room
        table = (start + column.clamp(0, room - 1)).int()
        block = scratch.flatten(0, 1)
        return pages._replace(block=block, table=table, offsets=locate_pages([block]))

    def fill_plan(self, tokens: int) -> None:
        """Fill the group's plan for `tokens` that were stored, if this layer is to."""
        if self.fills_plan:
            assert self.plan is not None
            window, heads = self.group.window or 0, self.pool.heads
            ops.make_plan(self.plan, self.lengths, tokens, window, 0, heads, self.backend)

    def _view(self, pages: Pages) -> tuple[PagedKV, PagedKV]:
        return self._handles(pages, self.lengths, self.plan, 0, self.max_cache_len)

    def _attends_pages(self) -> bool:
        """Whether the model's attention is "fp8_paged", which at the prefill takes short keys."""
        return getattr(self.config, "_attn_implementation", None) == ATTENTION

    def _pad(self, fresh: torch.Tensor) -> torch.Tensor:
        """Return fresh keys or values in the width of every other call, as StaticCache does."""
        padding = self.max_cache_len - fresh.shape[2]
        return torch.nn.functional.pad(fresh, (0, 0, 0, padding))

    def stored(self) -> tuple[PagedKV, PagedKV] | None:
        """Return handles on all positions, stored or not, or None before the first call.

        Those of a ring begin with what the next token sees; that waits for the device.
        """
        if not self.is_initialized:
            return None
        pages = self._pages(self.table)
        if not self.group.ring:
            return self._view(pages)
        first = self.group.visible_from(self.host_length())
        return self._handles(pages, self.lengths, self.plan, first, self.max_cache_len)

    def get_seq_length(self) -> Any:
        """Return the tokens stored: a tensor `[]` once there are any (as StaticLayer), else 0."""
        return 0 if self.is_empty else self.lengths[0]

    def host_length(self) -> int:
        """Return the tokens stored as a number; waits for the device."""
        return 0 if self.is_empty else int(self.lengths[0])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the columns of the mask, and the position of the first."""
        if self.is_empty and self.options.prefill == "exact" and self._attends_pages():
            return query_length, 0
        self._check_room(query_length)
        return self.max_cache_len, 0

    def _check_room(self, tokens: int) -> None:
        """Raise OutOfPagesError before a step that cannot be stored.

        On a CPU the write itself raises. Elsewhere it cannot, and reading the length waits for the
        device, so it is read only when an upper bound kept on the host says that it may matter.
        """
        if torch.compiler.is_compiling() or not self.is_initialized or self.lengths.is_cpu:
            return
        self._max_written += tokens
        if self._max_written > self.max_cache_len:
            length = self.host_length()
            if length + tokens > self.max_cache_len:
                raise OutOfPagesError.of_tokens(self.max_cache_len, length, tokens)
            self._max_written = length + tokens

    def get_max_length(self) -> int:
        """Return how many tokens there is room for."""
        return self.max_cache_len

    def note_length(self, length: int) -> None:
        """Follow a length that was set, not advanced by a step."""
        if not length and not self.is_empty:
            self.group.lost = 0
        self.is_empty, self._max_written = not length, length

    def _set_length(self, length: int) -> None:
        self.shared.set_one(self.place, length)
        self.note_length(length)

    def reset(self) -> None:
        """Remove all tokens; addresses stay."""
        if not self.is_empty:
            self._set_length(0)

    def activate_past_recording(self) -> None:
        """Keep all tokens from now on; a ring becomes room for all, at new addresses."""
        super().activate_past_recording()
        if self.is_initialized:
            self.group.unroll(self.host_length())
            self.refresh(self.batch_size)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens, in place.

        After `reorder_cache`, crop the whole cache, not one layer: pages of sequences that then
        part ways must be copied for all layers at once.

        Raises what `FP8PagedLayer.crop` does.
        """
        tokens = parse_crop(tokens_to_remove)
        if tokens and self.is_initialized:
            length = self.host_length()
            self.group.check_crop_from(tokens, length)
            self._set_length(max(length - tokens, 0))

    def refresh(self, batch: int) -> None:
        """Follow a change of the group's block table, in place where the batch is the same."""
        if not self.is_initialized:
            return
        block = self.pool.block
        self.pool.grow(self.group.table.allocator.capacity)
        table = self.group.table_on(self.device)
        if table.shape == self.table.shape and self.pool.block is block:
            # Layers of a group share the tensor: the first one brings the new content.
            self.table.copy_(table)
        else:
            self.table = table
            self.batch_size = batch
            self._share_plan()

    def move_to(self, device: torch.device) -> None:
        """Move what the layer holds to `device`, to new addresses."""
        super().move_to(device)
        self.shared.move(self.place, device)
        self.table = self.group.table_on(device)
        self._share_plan()

    def replace(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Raise ConfigError: the length is a matter of the whole cache."""
        raise ConfigError(
            "expected a growing cache where layer.keys and layer.values are assigned, got a "
            "preallocated one; leave max_cache_len out"
        )

    def select_rows(self, sequences: torch.Tensor) -> None:
        """Select sequences `[B']` of what this layer alone holds: the center."""
        if self.k_center is not None:
            selected = self.k_center[sequences.to(self.k_center.device)]
            if len(selected) == len(self.k_center):
                self.k_center.copy_(selected)
            else:
                self.k_center = selected

    def restore(self, snapshot: LayerSnapshot) -> None:
        """Take a copy of what a layer held; each sequence gets pages of its own."""
        if snapshot.pool is None:
            return
        stored = snapshot.group.table
        self.lazy_initialization(*snapshot.pool.empty_tokens(stored.batch))
        # A ring has no room for more than the last pages.
        first = max(stored.first, stored.count - (self.group.ring or stored.count))
        rows = stored.rows[:, first : stored.count]
        self.group.lost = first * self.pool.page_size
        pages = self.table[:, first : stored.count].long().reshape(-1)
        sources = snapshot.pool.take_rows(rows.reshape(-1))
        self.pool.block[pages] = sources.to(self.pool.block.device)
        if self.k_center is not None and snapshot.k_center is not None:
            self.k_center.copy_(snapshot.k_center)

    def pages_in_use(self) -> int:
        """Return all pages of the pool: each has its place in a sequence."""
        return self.pool.pages


@torch.compiler.disable(
    reason="a budget (max_pages) is counted in Python; for fullgraph=True leave it out, or make "
    "the first call, or early_initialization(), outside of compiled code"
)  # type: ignore[untyped-decorator]
def _preallocate(
    group: PreallocatedGroup, tokens: int, batch: int, device: torch.device
) -> tuple[torch.Tensor, int]:
    group.preallocate(tokens, batch)
    return group.table_on(device), group.table.allocator.capacity
