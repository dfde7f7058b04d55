"""The paged layers of a cache: their creation, and operations on all of them."""

import weakref
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

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
from ..modeling.exact_states import patch_kv_wrapper
from ..modeling.forward_state import MaskRequest, forward_pass
from ..modeling.layer_specs import (
    build_stock_layers,
    find_kv_sizes,
    find_skipped_layers,
    release_states,
    reuses_kv,
)
from ..modeling.model_support import ATTENTION, has_cross_layers
from ..modeling.tensor_parallel import check_divides, count_heads, count_kv_heads
from ..paging.fixed_pages import FixedPages
from ..paging.layer_group import LayerGroup
from ..paging.lengths import DeviceLength, HostLength
from ..paging.page_allocator import PageBudget
from ..paging.page_pool import PagePool
from ..scales import KVScales
from ..utils.digests import digest_sampled_weights
from .encoding import Encoding
from .indexers import INDEXED_CLASSES, IndexerLayer, get_indexer_tensors
from .layer import FP8PagedIndexedLayer, FP8PagedLayer
from .options import CacheOptions

# Only these exact classes are replaced by paged layers. Other subclasses store more than K and V.
_REPLACED_CLASSES = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
    *INDEXED_CLASSES,
)


class PagedLayers:
    """The paged layers of one cache, in groups that share a block table.

    Attributes:
        groups: Layer groups by window. The key None is the group without a window.
        fixed_groups: The groups of a preallocated cache, otherwise empty.
        layers: The paged layers, in the order of the model.
        is_open_ended: Whether layers are added as the model uses them.
        num_changes: Number of operations other than steps that may have changed the layers.
    """

    def __init__(
        self, options: CacheOptions, config: PreTrainedConfig | None, budget: PageBudget
    ) -> None:
        self.options = options
        self.config = config
        self.budget = budget
        self.groups: dict[int | None, LayerGroup] = {}
        self.fixed_groups: list[FixedPages] = []
        self.layers: list[FP8PagedLayer] = []
        self.is_open_ended = config is None
        self._has_cross_layers = config is not None and has_cross_layers(config)
        self._siblings: list[weakref.ref[LayerGroup]] = []  # references to all groups
        # Index and number of new tokens of each layer that the current step has written.
        self._step_layers: list[tuple[int, int]] = []
        # The layers of the previous step. Empty if it cannot be compared with the current step.
        self._last_layers: list[tuple[int, int]] = []
        self._has_mask_request = self._is_model_step = False
        # The attention module of the first layer, which `check_module` compares.
        self._module: weakref.ref[torch.nn.Module] | None = None
        self._has_stock_layers = False  # whether some layers are transformers'
        self._has_static_layers = False  # whether transformers' static layers share the masks
        self._attention: str | None = None  # the model's attention in the current step
        # The lengths of growing layers while they are preallocated (see `reserve`).
        self._growing_lengths: list[HostLength] = []
        self.num_changes = 0
        patch_kv_wrapper()

    # -- creation of layers ------------------------------------------------------------------

    def add_layer(
        self,
        index: int,
        window: int | None,
        pool: PagePool | None = None,
        *,
        has_indexer: bool = False,
        source: FP8PagedLayer | None = None,
    ) -> FP8PagedLayer:
        """Create a paged layer, add it to the group of its window, and return it.

        Args:
            index: Index of the layer in the model.
            window: Size of the sliding window, or None.
            pool: Pages that a fork shares, or None for new pages.
            has_indexer: Whether the layer has an indexer.
            source: The layer that this layer copies, or None.
        """
        group = self._get_group(window)
        num_kv_heads = None
        num_query_heads = 0
        num_processes = self.options.tensor_parallel.size
        if source is not None:  # transformers takes microseconds to read a config
            num_query_heads = source.num_query_heads
            num_kv_heads = source.encoding.num_model_heads
        elif self.config is not None:
            num_query_heads = (count_heads(self.config, index) or 0) // num_processes
            num_kv_heads = count_kv_heads(self.config, index) if num_processes > 1 else None
        encoding = Encoding(index, self.options, num_kv_heads)
        pool = pool or self.options.make_pool(encoding.plan, self.budget, index)
        member = group.add(pool)
        length = (
            DeviceLength(group, member)
            if isinstance(group, FixedPages)
            else HostLength(group, member)
        )
        indexer = IndexerLayer(length.max_tokens) if has_indexer else None  # type: ignore[arg-type]
        layer_class = FP8PagedIndexedLayer if has_indexer else FP8PagedLayer
        layer = layer_class(encoding, length, pool, num_query_heads, indexer, self.config)
        self.layers.append(layer)
        self.layers[len(self.layers) - 2].next_layer = weakref.ref(layer)
        layer.next_layer = weakref.ref(self.layers[0])
        return layer

    def _get_group(self, window: int | None) -> LayerGroup:
        if window not in self.groups:
            max_tokens = self.options.max_cache_len
            self.add_group(
                LayerGroup(self.budget, window)
                if max_tokens is None
                else FixedPages(self.budget, window, max_tokens)
            )
        return self.groups[window]

    def add_group(self, group: LayerGroup) -> None:
        """Add a group without layers, which may have pages."""
        self.groups[group.window] = group
        if isinstance(group, FixedPages):
            self.fixed_groups.append(group)
        self._siblings.append(weakref.ref(group))
        group.siblings = self._siblings

    def build_layers(self, skip_layers: Collection[int | str]) -> list[Any]:
        """Return a layer for each layer of the config: paged if possible, otherwise transformers'.

        Return an empty list without a config.

        Raises:
            ConfigError: An option needs a config, or does not fit it.
            ScaleError: The scales belong to another model.
        """
        config = self.config
        if config is None:
            if skip_layers or self.options.is_preallocated:
                name = "skip_layers" if skip_layers else "max_cache_len"
                raise ConfigError(
                    f"{name}: expected a config with layers, got None. Pass the model"
                )
            return []
        if self.options.tensor_parallel.size > 1:
            check_divides(config, self.options.tensor_parallel.size)
        layers, windows = build_stock_layers(config, self.options.max_cache_len)
        skipped_layers = find_skipped_layers(skip_layers, config, layers)
        for index, (layer, window) in enumerate(zip(layers, windows, strict=True)):
            max_tokens = self.options.max_cache_len
            shares_kv = reuses_kv(config, index)
            if index not in skipped_layers and type(layer) in _REPLACED_CLASSES and not shares_kv:
                layers[index] = self.add_layer(
                    index, window, has_indexer=isinstance(layer, INDEXED_CLASSES)
                )
            elif shares_kv and max_tokens is not None:
                layers[index] = IndexerLayer(max_tokens)
            elif type(layer) is StaticSlidingWindowLayer and max_tokens is not None:
                # All layers with a window share a mask, in the width of the paged layers.
                layers[index] = StaticLayer(max_tokens)
        self._match_widths(layers)
        self.options.check_layers([layer.index for layer in self.layers], len(layers))
        scales = self.options.scales
        if isinstance(scales, KVScales):
            for layer in self.layers:
                if sizes := find_kv_sizes(config, layer.index):
                    num_heads = sizes[0] // self.options.tensor_parallel.size
                    self.options.expand_scales(scales, layer.index, num_heads, *sizes[1:])
        return layers

    def merge_layers(self, stock_layers: Sequence[Any]) -> list[Any]:
        """Return the paged layers and transformers' `stock_layers`, in the order of the model."""
        layers = list(stock_layers)
        for layer in self.layers:
            layers.insert(layer.index, layer)
        self._match_widths(layers)
        return layers

    def fork(self) -> "PagedLayers":
        """Return growing layers that share the pages of these layers, without copies.

        If no layer has tokens, the fork gets new pages.
        """
        self.unreserve()
        self.check_complete()
        lengths = self.read_lengths()
        has_pages = self.fixed_groups or any(
            group.table.num_columns for group in self.groups.values()
        )
        groups = {window: group.fork() for window, group in self.groups.items() if has_pages}
        fork = self._make_copy(self.budget, groups)
        for layer, source, length in zip(fork.layers, self.layers, lengths, strict=True):
            layer.restore(length, get_indexer_tensors(source.indexer))
        return fork

    def to_preallocated(self) -> "PagedLayers":
        """Return preallocated layers with copies of these layers' pages, and a separate budget."""
        copy = self._make_copy(self.options.make_budget(), {})
        # Copy pages only after all layers exist, because a preallocated layer allocates pages in
        # every group, and the layers of a group determine the number of its pages.
        for layer, source in zip(copy.layers, self.layers, strict=True):
            layer.copy_from(source)
        return copy

    def _make_copy(self, budget: PageBudget, groups: dict[int | None, LayerGroup]) -> "PagedLayers":
        """Return new layers like these layers, with the same pools if `groups` is not empty."""
        copy = PagedLayers(self.options, self.config, budget)
        copy.is_open_ended = self.is_open_ended
        copy._module = self._module
        copy._step_layers = list(self._step_layers)
        copy._is_model_step = self._is_model_step
        for group in groups.values():
            copy.add_group(group)
        for window, group in self.groups.items():
            copy._get_group(window).record_past = group.record_past
        for layer in self.layers:
            pool = layer.pool if groups and layer.pool.is_allocated else None
            copy.add_layer(
                layer.index,
                layer.group.window,
                pool,
                has_indexer=layer.indexer is not None,
                source=layer,
            )
        return copy

    def _match_widths(self, layers: list[Any]) -> None:
        """Make prefill masks of preallocated layers as wide as transformers' static layers need.

        Static layers use masks of the same width in every call, and all layers share masks.
        """
        self._has_stock_layers = len(layers) > len(self.layers)
        self._has_static_layers = any(isinstance(layer, StaticLayer) for layer in layers)
        if self._has_static_layers:
            for layer in self.layers:
                layer.config = None

    # -- operations on all layers ------------------------------------------------------------

    @property
    def batch(self) -> int:
        """Number of sequences, 0 before the first token."""
        return max((group.table.batch for group in self.groups.values()), default=0)

    def read_lengths(self) -> list[int]:
        """Return the number of tokens in each layer. A preallocated cache synchronizes."""
        if not self.fixed_groups:
            return [layer.length.count_stored() for layer in self.layers]
        lengths = {group.window: group.read_lengths() for group in self.fixed_groups}
        return [lengths[layer.group.window].get(layer.length.member, 0) for layer in self.layers]

    def make_mask_request(self, num_tokens: int, num_columns: int, start: int) -> MaskRequest:
        """Return this cache's request for a mask of these sizes.

        Raise OutOfPagesError if the step exceeds `max_cache_len`, which static layers do not check.
        """
        for group in self.groups.values():
            group.check_complete()
        self._has_mask_request = True
        if self._has_static_layers and self.layers:
            self.layers[0].length.check_capacity(num_tokens)  # type: ignore[union-attr]
        max_tokens = self.layers[0].length.max_tokens if self.layers else self.options.max_cache_len
        is_empty = not self.layers or self.layers[0].length.is_empty
        reads_pages = not is_empty or self.options.prefill == "stored"
        # Static layers of transformers return columns without tokens, which only a mask hides.
        is_preallocated = reads_pages and num_columns == max_tokens and not self._has_static_layers
        return MaskRequest(
            sizes=(num_tokens, num_columns, start),
            is_preallocated=is_preallocated,
            is_growing=max_tokens is None,
            is_stored=reads_pages,
        )

    # -- steps at constant addresses ---------------------------------------------------------

    def reserve(self, max_tokens: int) -> None:
        """Make growing layers preallocated until `unreserve`, so that a step changes no address.

        No bytes are copied: the layers keep their pools and block tables, which get pages for
        `max_tokens` tokens per sequence. All layers must have the same number of tokens.

        Raises:
            OutOfPagesError: The budget would be exceeded. The layers keep growing.
        """
        length = self.read_lengths()[0]
        batch = self.batch
        for group in self.groups.values():
            group.settle_step()
        self.budget.check(
            sum(
                group.table.count_needed(length, max_tokens, batch)
                for group in self.groups.values()
            )
        )
        reserved = dict[int | None, FixedPages]()
        tables = dict[int | None, torch.Tensor]()
        for window, group in self.groups.items():
            group.table.reserve(length, max_tokens, batch, group.copy_pages)
            reserved[window] = FixedPages(self.budget, window, max_tokens, group.table)
            # Pages before the window are freed and never read, but need a valid number.
            device = self.layers[0].encoding.device
            tables[window] = reserved[window].get_device_table(device).clamp(min=0)
        for layer in self.layers:
            assert isinstance(layer.length, HostLength)
            self._growing_lengths.append(layer.length)
            window = layer.group.window
            fixed_pages = reserved[window]
            device_length = DeviceLength(fixed_pages, fixed_pages.add(layer.pool))
            device_length.adopt_table(tables[window], length)
            layer.set_length(device_length)
            layer.is_compileable = True

    def unreserve(self) -> bool:
        """Undo `reserve`, and free the pages without tokens. Return whether layers were reserved.

        This synchronizes with the device. Every operation that changes the layers other than by a
        step calls this method first.
        """
        self.num_changes += 1
        if not self._growing_lengths:
            return False
        lengths = self.read_lengths()
        # After an interrupted `reserve`, only the first layers are preallocated.
        members = zip(self._growing_lengths, self.layers, lengths, strict=False)
        for host_length, layer, length in members:
            host_length.group.lengths[host_length.member] = length
            layer.set_length(host_length)
            layer.is_compileable = False
        self._growing_lengths.clear()
        for group in self.groups.values():
            group.positions = None
            group.crop(0)
        return True

    def check_crop(self, num_tokens: int) -> None:
        """Raise ConfigError if `crop` would need tokens that have left a window."""
        self.unreserve()
        self.check_complete()
        # Lengths are read only if a window may have lost tokens, because this may synchronize.
        if not self.fixed_groups or any(
            group.ring_size or group.first_intact for group in self.fixed_groups
        ):
            for layer, length in zip(self.layers, self.read_lengths(), strict=True):
                layer.group.check_crop(layer.length.member, num_tokens, length)

    def crop(self, num_tokens: int) -> None:
        """Remove the last `num_tokens` tokens, and free the pages that no other token needs.

        Raise OutOfPagesError, and change nothing, if a preallocated cache would exceed its budget.
        """
        self.unreserve()
        if not self.fixed_groups:
            for group in self.groups.values():
                group.crop(num_tokens)
            self._free_empty_pools()
        elif num_tokens:
            new_lengths = [max(length - num_tokens, 0) for length in self.read_lengths()]
            # The layer with the fewest tokens is the first to write into a page.
            shortest = min(new_lengths, default=0)
            page_counts = [
                group.count_new_pages(slice(None), shortest) for group in self.fixed_groups
            ]
            self.budget.check(sum(page_counts))
            for layer, length in zip(self.layers, new_lengths, strict=True):
                layer.crop_to(length)
            self._unshare_pages(shortest)

    def end_layer(self, index: int, num_tokens: int, keys: torch.Tensor) -> bool:
        """Record that layer `index` has stored its new tokens, and returns `keys` to the model.

        Return whether the model's attention is flex attention.

        After the last layer, free the pages that were kept in case a layer raises an error.
        """
        if not self._step_layers or index <= self._step_layers[-1][0]:
            self._begin_step()
        self._step_layers.append((index, num_tokens))
        if self._last_layers and self._last_layers[-1][0] < index:
            self._refuse_interrupted([])
        if self.layers:
            if index == self.layers[0].index and self._attention == ATTENTION:
                forward_pass.first_layer = weakref.ref(self), weakref.ref(keys)
            if index == self.layers[-1].index:
                for group in self.groups.values():
                    group.finish_step()
        return self._attention == "flex_attention"

    def _begin_step(self) -> None:
        """Prepare for the layers of a new step.

        If a model runs two steps, the second step reaches a later layer than the first only if an
        error interrupted the first step. Without masks, layers may be updated in any order. Layers
        with cross-attention only store images.
        """
        was_model_step = self._is_model_step and not self._has_cross_layers
        self._is_model_step = self._has_mask_request
        self._has_mask_request = False
        is_comparable = was_model_step and self._is_model_step and self.layers
        self._last_layers = self._step_layers if is_comparable else []
        self._step_layers = []
        # The attention is read once per step, because a read takes 2 us.
        self._attention = getattr(self.config, "_attn_implementation", None)

    def check_module(self, module: torch.nn.Module) -> None:
        """Raise ConfigError if the weights of the first attention module differ from before.

        The attention function calls this after the first layer has stored its tokens. The step is
        then undone, if possible. In an empty cache, `module` is recorded.
        """
        last_module = None if self._module is None else self._module()
        if module is last_module:
            return
        num_tokens = self._step_layers[-1][1]
        if (
            last_module is None
            or self.layers[0].length.count_stored() == num_tokens  # this is the first step
            or digest_sampled_weights(module) == digest_sampled_weights(last_module)
        ):
            self._module = weakref.ref(module)
            return
        self.undo_step(self.layers[0].index + 1, num_tokens)
        raise ConfigError(
            "expected the model that has filled this cache, got a model with different weights. A "
            "cache belongs to one model. Create a new FP8PagedCache"
        )

    def undo_first_layer(self) -> None:
        """Undo a step whose first paged layer has stored its tokens, if possible."""
        if self._step_layers and not self._has_stock_layers:
            index, num_tokens = self._step_layers[-1]
            self.undo_step(index + 1, num_tokens)

    def undo_step(self, index: int, num_tokens: int) -> None:
        """Remove the tokens of layers before `index` in a failed step, if the cache is growing."""
        if self.options.is_preallocated:
            return
        self.unreserve()
        if self._step_layers and self._step_layers[-1][0] < index:  # not of the previous step
            num_removed = {
                layer_index: num_new
                for layer_index, num_new in self._step_layers
                if num_new == num_tokens
            }
            for layer in self.layers:
                layer.group.lengths[layer.length.member] -= num_removed.get(layer.index, 0)
            self._step_layers = self._last_layers
            self._last_layers = []
        self._free_unused_pages()

    def _free_unused_pages(self) -> None:
        for group in self.groups.values():
            group.table.allocator.recount()
            group.drop_unused_pages()
        self._free_empty_pools()

    def _refuse_interrupted(self, last_layers: list[tuple[int, int]]) -> NoReturn:
        """Raise ConfigError, and remove the tokens of interrupted steps first, if possible.

        `last_layers` are the layers of the last step that remains, if it is known. All layers keep
        the tokens of the layer with the fewest tokens before the current step.
        """
        self.unreserve()
        num_removed = dict(self._step_layers)
        self._step_layers = last_layers
        self._last_layers = []
        length = min(
            layer.length.count_stored() - num_removed.get(layer.index, 0) for layer in self.layers
        )
        has_lost_window = length > 0 and any(
            group.find_first_kept(length) < group.table.first_page * group.page_size
            for group in self.groups.values()
        )
        if self.fixed_groups or self._has_stock_layers or has_lost_window:
            self.mark_incomplete()
        for group in self.groups.values():
            group.check_complete()
        for layer in self.layers:
            layer.group.lengths[layer.length.member] = length
        self._free_unused_pages()
        raise ConfigError(
            "An error (such as Ctrl-C) interrupted the last call between two layers. The tokens of "
            f"that call were removed, and the cache has {length} tokens. Call the model again with "
            "all tokens that follow"
        )

    def mark_incomplete(self) -> None:
        """Refuse new tokens until the next reset."""
        for group in self.groups.values():
            group.is_incomplete = True

    def check_complete(self) -> None:
        """Raise ConfigError if an error has interrupted a change or the last step."""
        last_layers = self._last_layers
        if self._step_layers and last_layers and last_layers[-1][0] > self._step_layers[-1][0]:
            self._refuse_interrupted(last_layers)
        for group in self.groups.values():
            group.check_complete()

    def reset(self) -> None:
        """Remove all tokens. A preallocated cache keeps its addresses."""
        self.unreserve()
        was_incomplete = any(group.is_incomplete for group in self.groups.values())
        for group in self.groups.values():
            group.is_incomplete = False
            group.table.allocator.recount()
        self._step_layers.clear()
        self._is_model_step = False
        self._last_layers = []
        for layer in self.layers:
            layer.assigned.clear()
        if not self.fixed_groups:
            for group in self.groups.values():
                group.clear()
            self._free_empty_pools()
            return
        for layer in self.layers:
            layer.crop_to(0)
        num_pages = sum(group.pages_per_sequence for group in self.fixed_groups) * self.batch
        exceeds_budget = self.budget.max_pages is not None and num_pages > self.budget.max_pages
        batches = {group.table.batch for group in self.groups.values()}
        if was_incomplete or exceeds_budget or len(batches) > 1:
            # Sequences share pages and the budget has no room for separate pages, or an interrupted
            # call changed some of the layers.
            self.release()
            return
        # Sequences that were copied from one beam get separate pages again.
        for group in self.groups.values():
            group.table.free_from(0)
        self._unshare_pages(0)

    def release(self) -> None:
        """Free the memory of empty preallocated layers. The next call allocates it again."""
        for layer in self.layers:
            layer.pool.memory.free()
            if layer.indexer is not None:
                release_states(layer.indexer)
        for group in self.fixed_groups:
            group.clear()
            group.allocated_pages = 0

    def select(self, sequences: torch.Tensor) -> None:
        """Replace sequence `i` with `sequences[i]`. This moves page numbers, not contents.

        Raises:
            ConfigError: An index is out of range. Nothing was changed.
            OutOfPagesError: A preallocated cache would exceed its budget. Nothing was changed.
        """
        self.check_complete()
        self.unreserve()
        batch = self.batch
        if not batch:
            return
        is_index = not (sequences.is_floating_point() or sequences.is_complex())
        rows = sequences.cpu().numpy().astype(np.int64)
        if not is_index or rows.ndim != 1 or not len(rows) or rows.min() < 0 or rows.max() >= batch:
            raise ConfigError(
                f"expected indices of sequences from 0 to {batch - 1}, got {sequences.tolist()}"
            )
        lengths = self.read_lengths() if self.fixed_groups else [0]
        if self.fixed_groups:
            page_counts = [group.count_new_pages(rows, min(lengths)) for group in self.fixed_groups]
            self.budget.check(max(sum(page_counts), 0))
        for group in self.groups.values():
            group.settle_step()
            table = group.table
            if self.fixed_groups:
                # Empty pages are not shared, so each sequence gets new pages.
                table.free_from(max(lengths))
            if table.batch:
                table.replace_rows(table.rows[rows], table.first_page)
        for layer in self.layers:
            if layer.indexer is not None:
                layer.indexer.reorder_cache(sequences.long())
        if self.fixed_groups:
            self._unshare_pages(min(lengths))
        else:
            for group in self.groups.values():
                group.shrink()

    def memory_footprint(self) -> Counter[str]:
        """Return bytes by kind: `pages`, `scales`, `tables`, `host`, `used`, `other`."""
        sizes = Counter(pages=0, scales=0, tables=0, host=0, used=0, other=0)
        for layer in self.layers:
            sizes.update(layer.memory_footprint())
        for group in self.groups.values():
            sizes["tables"] += group.table.nbytes
        return sizes

    def _unshare_pages(self, length: int) -> None:
        """Give each sequence of a preallocated cache separate pages for tokens from `length` on."""
        for group in self.fixed_groups:
            group.unshare(length)
        for layer in self.layers:
            layer.update_table()

    def _free_empty_pools(self) -> None:
        """Drop removed tokens of indexers, and free the memory of pools without pages."""
        for layer in self.layers:
            layer.trim_indexer(layer.length.count_stored())
            if not layer.group.table.allocator.num_held:
                layer.pool.memory.free()
        for group in self.groups.values():
            if not group.table.allocator.num_held:
                group.table.compact()
