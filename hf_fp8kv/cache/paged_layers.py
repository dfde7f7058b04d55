"""The paged layers of a cache: their creation, and operations on all of them."""

import weakref
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from ..errors import ConfigError
from ..modeling.exact_states import pass_exact_states
from ..modeling.layer_specs import build_stock_layers, find_layers, shares_keys
from ..modeling.step import MaskRequest
from ..modeling.tensor_parallel import check_divides, count_heads, kv_heads
from ..paging.fixed_pages import FixedPages
from ..paging.layer_group import LayerGroup
from ..paging.lengths import DeviceLength, HostLength
from ..paging.page_allocator import PageBudget
from ..paging.page_pool import PagePool
from .centers import FirstTokens
from .encoding import Encoding
from .indexers import INDEXED, Indexer
from .layer import FP8PagedIndexedLayer, FP8PagedLayer
from .layer_store import LayerStore
from .options import CacheOptions
from .rope_rotation import RopeRotation

# Only these exact classes are replaced by paged layers. Other subclasses store more than K and V.
_PLAIN = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)
_REPLACED = (*_PLAIN, *INDEXED)


class PagedLayers:
    """The paged layers of one cache, in groups that share a block table.

    Attributes:
        groups: Layer groups by window. The key None is the group without a window.
        fixed: The groups of a preallocated cache, otherwise empty.
        layers: The paged layers, in the order of the model.
        stores: The stores of these layers.
        first_tokens: Padding at the start of the cache's sequences.
        open_ended: Whether layers are added as the model uses them.
    """

    def __init__(
        self, options: CacheOptions, config: PreTrainedConfig | None, budget: PageBudget
    ) -> None:
        self.options, self.config, self.budget = options, config, budget
        self.groups: dict[int | None, LayerGroup] = {}
        self.fixed: list[FixedPages] = []
        self.layers: list[FP8PagedLayer] = []
        self.stores: list[LayerStore] = []
        self.first_tokens = FirstTokens()
        self.open_ended = config is None
        self._siblings: list[weakref.ref[LayerGroup]] = []  # all groups
        # Layers that the current step has written, with their number of tokens.
        self._step: list[tuple[int, int]] = []
        self._under_flex = False  # in the current step
        pass_exact_states()

    # -- creation of layers ------------------------------------------------------------------

    def new_layer(
        self, index: int, window: int | None, pool: PagePool | None = None,
        rope: RopeRotation | None = None, *, indexed: bool = False,
    ) -> FP8PagedLayer:  # fmt: skip
        """Create a paged layer, add it to the group of its window, and return it.

        Args:
            index: Index of the layer in the model.
            window: Size of the sliding window, or None.
            pool: Pages that a fork shares, or None for new pages.
            rope: Rotation of the keys by RoPE, or None if it is not known.
            indexed: Whether the layer has an indexer.
        """
        group = self._group(window)
        heads, of_queries, size = None, 0, self.options.tensor_parallel.size
        if self.config is not None:
            of_queries = (count_heads(self.config, index) or 0) // size
            heads = kv_heads(self.config, index) if size > 1 else None
        encoding = Encoding(index, self.options, self.first_tokens, heads, rope)
        pool = pool or self.options.new_pool(encoding.plan, self.budget, index)
        member = group.add(pool)
        length = (
            DeviceLength(group, member)
            if isinstance(group, FixedPages)
            else HostLength(group, member)
        )
        indexer = Indexer(length.room) if indexed else None  # type: ignore[arg-type]
        store = LayerStore(encoding, length, pool, of_queries, indexer)
        kind = FP8PagedIndexedLayer if indexed else FP8PagedLayer
        layer = kind(self.options, store, self.config)
        self.layers.append(layer)
        self.stores.append(store)
        self.stores[len(self.stores) - 2].following = weakref.ref(store)
        store.following = weakref.ref(self.stores[0])
        return layer

    def _group(self, window: int | None) -> LayerGroup:
        if window not in self.groups:
            room = self.options.max_cache_len
            self.add_group(
                LayerGroup(self.budget, window)
                if room is None
                else FixedPages(self.budget, window, room)
            )
        return self.groups[window]

    def add_group(self, group: LayerGroup) -> None:
        """Add a group without layers, which may have pages."""
        self.groups[group.window] = group
        if isinstance(group, FixedPages):
            self.fixed.append(group)
        self._siblings.append(weakref.ref(group))
        group.siblings = self._siblings

    def layers_for(self, skip_layers: Collection[int | str]) -> list[Any]:
        """Return a layer for each layer of the config: paged if possible, otherwise transformers'.

        Without a config the list is empty.

        Raises:
            ConfigError: An option needs a config, or does not fit it.
            ScaleError: The scales belong to a different model.
        """
        config = self.config
        if config is None:
            if skip_layers:
                raise ConfigError(
                    "skip_layers: expected a config, which lists the layers, got None; pass one"
                )
            if self.options.is_preallocated:
                raise ConfigError(
                    "max_cache_len: expected a config, which lists the layers to preallocate, got "
                    "None; pass one"
                )
            return []
        if self.options.tensor_parallel.size > 1:
            check_divides(config, self.options.tensor_parallel.size)
        layers, windows = build_stock_layers(config, self.options.max_cache_len)
        find_rope = RopeRotation.from_config(config)
        skipped = find_layers(skip_layers, config, layers)
        for index, (layer, window) in enumerate(zip(layers, windows, strict=True)):
            room, reads_keys = self.options.max_cache_len, shares_keys(config, index)
            if index not in skipped and type(layer) in _REPLACED and not reads_keys:
                rope, indexed = find_rope(index), isinstance(layer, INDEXED)
                layers[index] = self.new_layer(index, window, rope=rope, indexed=indexed)
            elif reads_keys and room is not None:
                layers[index] = Indexer(room)
            elif type(layer) is StaticSlidingWindowLayer and room is not None:
                # All layers with a window share a mask, in the width of the paged layers.
                layers[index] = StaticLayer(room)
        _match_widths(layers)
        self.options.check_layers([layer.index for layer in self.layers], len(layers))
        return layers

    def with_stock(self, stock: Sequence[Any]) -> list[Any]:
        """Return paged layers and `stock`, the layers of transformers, in the model's order."""
        paged, others = {layer.index: layer for layer in self.layers}, iter(stock)
        count = len(paged) + len(stock)
        layers = [paged[i] if i in paged else next(others) for i in range(count)]
        _match_widths(layers)
        return layers

    def fork(self) -> "PagedLayers":
        """Return growing layers that share the pages of these layers, without copies.

        Layers without tokens share nothing.
        """
        lengths = self.host_lengths()
        shares = self.options.is_preallocated or any(x.table.count for x in self.groups.values())
        groups = {window: group.fork() for window, group in self.groups.items() if shares}
        twin = self._twin(self.budget, groups)
        for store, source, length in zip(twin.stores, self.stores, lengths, strict=True):
            store.fork_from(source, length)
        return twin

    def preallocated(self) -> "PagedLayers":
        """Return preallocated layers with copies of these layers' pages, and a separate budget."""
        twin = self._twin(self.options.new_budget(), {})
        # Only after all layers exist, because a preallocated layer allocates pages in every group,
        # and the layers of a group determine how many it needs.
        for store, source in zip(twin.stores, self.stores, strict=True):
            store.copy_from(source)
        return twin

    def _twin(self, budget: PageBudget, groups: dict[int | None, LayerGroup]) -> "PagedLayers":
        """Return new layers like these, with the same pools if `groups` are given."""
        twin = PagedLayers(self.options, self.config, budget)
        twin.open_ended = self.open_ended
        for group in groups.values():
            twin.add_group(group)
        for window, group in self.groups.items():
            twin._group(window).record_past = group.record_past
        for store in self.stores:
            index, rope = store.encoding.index, store.encoding.rope
            pool = store.pool if groups and store.is_initialized else None
            indexed = store.indexer is not None
            twin.new_layer(index, store.group.window, pool, rope, indexed=indexed)
        return twin

    # -- operations on all layers ------------------------------------------------------------

    @property
    def batch(self) -> int:
        """Number of sequences, 0 before the first token."""
        return max((group.table.batch for group in self.groups.values()), default=0)

    def host_lengths(self) -> list[int]:
        """Return the number of tokens in each layer. Synchronizes if the cache is preallocated."""
        if not self.fixed:
            return [store.length.on_host() for store in self.stores]
        stored = {fixed.window: fixed.stored() for fixed in self.fixed}
        return [stored[x.group.window].get(x.length.member, 0) for x in self.stores]

    def mask_request(self, tokens: int, columns: int, start: int) -> MaskRequest:
        """Return the request of this cache for a mask of these sizes."""
        options, is_empty = self.options, not self.stores or self.stores[0].length.is_empty
        observes = options.first_call_centers and self.first_tokens.observes(tokens, is_empty)
        # Transformers' layers with a window have fewer columns, which they shift.
        is_stored = not is_empty or options.prefill == "stored"
        preallocated = is_stored and columns == options.max_cache_len
        observer = self.first_tokens if observes else None
        growing = not options.is_preallocated
        return MaskRequest((tokens, columns, start), preallocated, growing, is_stored, observer)

    def check_crop(self, tokens: int) -> None:
        """Raise ConfigError if `crop` would need tokens that have left a window."""
        # Reading the lengths of a preallocated cache synchronizes with the device.
        if not self.fixed or any(fixed.ring or fixed.lost for fixed in self.fixed):
            for store, length in zip(self.stores, self.host_lengths(), strict=True):
                store.length.check_crop(tokens, length)

    def crop(self, tokens: int) -> None:
        """Remove the last `tokens` tokens, and free pages that are no longer needed.

        Raises:
            OutOfPagesError: A preallocated cache would exceed its budget. Nothing was changed.
        """
        self.first_tokens.observed = None
        if not self.fixed:
            for group in self.groups.values():
                group.crop(tokens)
            self._free_empty()
        elif tokens:
            kept = [max(length - tokens, 0) for length in self.host_lengths()]
            longest = max(kept, default=0)
            self.budget.require(sum(x.count_for(slice(None), longest) for x in self.fixed))
            for store, length in zip(self.stores, kept, strict=True):
                store.crop_to(length)
            self._unshare(longest)

    def end_layer(self, index: int, tokens: int) -> bool:
        """Record that layer `index` has stored `tokens` tokens, and return `is_under_flex()`.

        After the last layer, free the pages that were kept in case that a layer rejects the step.
        """
        if not self._step or index <= self._step[-1][0]:
            self._step.clear()
            self._under_flex = self.is_under_flex()  # once per step, because it takes 2 us
        self._step.append((index, tokens))
        if self.layers and index == self.layers[-1].index:
            self.first_tokens.end_call()
            for group in self.groups.values():
                group.finish()
        return self._under_flex

    def is_under_flex(self) -> bool:
        """Return whether the model's attention is flex attention."""
        return getattr(self.config, "_attn_implementation", None) == "flex_attention"

    def undo_step(self, index: int, tokens: int) -> None:
        """Remove the tokens of layers before `index` in a failed step, if the cache is growing."""
        if self.options.is_preallocated:
            return
        written = self._step if self._step and self._step[-1][0] < index else []
        self._step = []
        for store in self.stores:
            if (store.encoding.index, tokens) in written:
                store.group.lengths[store.length.member] -= tokens
        for group in self.groups.values():
            group.drop_unused()
        self._free_empty()

    def reset(self) -> None:
        """Remove all tokens. A preallocated cache keeps its addresses."""
        self.first_tokens.observed = None
        for layer in self.layers:
            layer.assigned.clear()
        if not self.fixed:
            for group in self.groups.values():
                group.clear()
            self._free_empty()
            return
        for store in self.stores:
            store.crop_to(0)
        needed, most = sum(x.count for x in self.fixed) * self.batch, self.budget.max_pages
        is_over = most is not None and needed > most
        if is_over or len({group.table.batch for group in self.groups.values()}) > 1:
            # Sequences share pages and the budget has no room for separate pages, or an interrupted
            # call changed some of the groups. All memory is allocated again.
            for store in self.stores:
                store.release_memory()
            for fixed in self.fixed:
                fixed.clear()
                fixed.allocated = 0
            return
        # Sequences that were copied from one beam get separate pages again.
        for group in self.groups.values():
            group.table.truncate(0)
        self._unshare(0)

    def select(self, sequences: torch.Tensor) -> None:
        """Replace sequence `i` by sequence `sequences[i]`. This moves page numbers, not contents.

        Raises:
            ConfigError: An index is out of range. Nothing was changed.
            OutOfPagesError: A preallocated cache would exceed its budget. Nothing was changed.
        """
        batch = self.batch
        if not batch:
            return
        rows = sequences.cpu().numpy().astype(np.int64)
        if rows.ndim != 1 or not len(rows) or rows.min() < 0 or rows.max() >= batch:
            raise ConfigError(
                f"expected indices of sequences from 0 to {batch - 1}, got {rows.tolist()}"
            )
        length = max(self.host_lengths(), default=0) if self.fixed else 0
        if self.fixed:
            additional = [fixed.count_for(rows, length) for fixed in self.fixed]
            self.budget.require(max(sum(additional), 0))
        for group in self.groups.values():
            group.settle()
            table = group.table
            if self.fixed:
                # Empty pages are not shared: each sequence gets new ones.
                table.truncate(length)
            if table.batch:
                table.replace_rows(table.rows[rows], table.first)
        for store in self.stores:
            store.encoding.select(sequences)
            if store.indexer is not None:
                store.indexer.reorder_cache(sequences.long())
        if self.fixed:
            self._unshare(length)
        else:
            for group in self.groups.values():
                group.shrink()

    def memory_footprint(self) -> Counter[str]:
        """Return bytes by kind: `pages`, `scales`, `tables`, `host`, `used`, `other`."""
        sizes = Counter(pages=0, scales=0, tables=0, host=0, used=0, other=0)
        for store in self.stores:
            sizes.update(store.memory_footprint())
        for group in self.groups.values():
            sizes["tables"] += group.table.nbytes
        return sizes

    def _unshare(self, length: int) -> None:
        """Give each sequence of a preallocated cache separate pages from `length` on."""
        if self.batch:
            for fixed in self.fixed:
                fixed.unshare(length)
        for store in self.stores:
            store.follow_table()

    def _free_empty(self) -> None:
        """Free the centers of layers without tokens, and the memory of pools without pages."""
        for store in self.stores:
            store.drop_removed(store.length.on_host())
            if store.pool.is_allocated and not store.group.table.allocator.held:
                store.release_memory()
        for group in self.groups.values():
            if not group.table.allocator.held:
                group.table.compact()


def _match_widths(layers: list[Any]) -> None:
    """Make prefill masks of preallocated layers as wide as transformers' static layers need.

    Static layers use the same width in every call, and all layers share their masks.
    """
    if any(isinstance(layer, StaticLayer) for layer in layers):
        for layer in layers:
            if isinstance(layer, FP8PagedLayer):
                layer.config = None
