"""The paged layers of a cache: how they are made, and what is done to all of them at once."""

import sys
import weakref
from collections import Counter
from collections.abc import Collection
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
from ..modeling.tensor_parallel import check_divides, kv_heads, query_heads
from ..paging.layer_group import LayerGroup
from ..paging.page_allocator import PageBudget
from ..paging.page_pool import PagePool
from ..paging.preallocated_group import PreallocatedGroup
from ..paging.shared_lengths import SharedLengths
from .centers import FirstTokens
from .dynamic_layer import FP8PagedLayer
from .indexed import INDEXED, FixedIndexer, FP8PagedIndexedLayer, FP8PagedPreallocatedIndexedLayer
from .layer import PagedLayerBase
from .options import CacheOptions
from .preallocated_layer import FP8PagedPreallocatedLayer
from .snapshot import CacheSnapshot, LayerSnapshot
from .turns import Turns

# Exactly these kinds are replaced by paged layers: another subclass keeps more than K and V.
_PLAIN = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)
_REPLACED = (*_PLAIN, *INDEXED)


class PagedLayers:
    """The paged layers of one cache, and the groups that share a block table.

    Attributes:
        groups: one group of layers, with one block table, for each window; None: no window.
        layers: the paged layers, in the order of the model.
        first_tokens: what is known of padding at the start of each sequence.
        lengths: of the layers of the preallocated form.
    """

    def __init__(
        self, options: CacheOptions, config: PreTrainedConfig | None, budget: PageBudget
    ) -> None:
        self.options, self.config, self.budget = options, config, budget
        self.groups: dict[int | None, LayerGroup] = {}
        self.layers: list[PagedLayerBase] = []
        self.first_tokens = FirstTokens()
        self.lengths = SharedLengths()
        # The layer that was written last, and the tokens it was given.
        self._written = (0, 0)
        # The layer that `is_under_flex` was asked for last, and what it said.
        self._under_flex = (sys.maxsize, False)
        pass_exact_states()

    # -- making layers -----------------------------------------------------------------------

    def new_layer(
        self, index: int, window: int | None, pool: PagePool | None = None,
        turns: Turns | None = None, *, indexed: bool = False,
    ) -> PagedLayerBase:  # fmt: skip
        """Add a paged layer to the group of its window, and return it.

        `pool` holds the pages of a fork; None: the layer has its own. `turns`: None: the config's.
        """
        if window not in self.groups:
            self.groups[window] = self._new_group(window)
            self._link_groups()
        group = self.groups[window]
        heads, size = None, self.options.tensor_parallel.size
        if size > 1 and self.config is not None:
            heads = kv_heads(self.config, index)
        layer: PagedLayerBase
        if isinstance(group, PreallocatedGroup):
            fixed = FP8PagedPreallocatedIndexedLayer if indexed else FP8PagedPreallocatedLayer
            layer = fixed(
                index, self.options, group, self.first_tokens, self.lengths, heads, self.config
            )
        else:
            growing = FP8PagedIndexedLayer if indexed else FP8PagedLayer
            layer = growing(index, self.options, group, self.first_tokens, heads, pool)
        layer.turns = turns or Turns.of(self.config, index)
        if self.config is not None:
            layer.query_heads = (query_heads(self.config, index) or 0) // size
        self.layers.append(layer)
        self.layers[len(self.layers) - 2].following = weakref.ref(layer)
        layer.following = weakref.ref(self.layers[0])
        return layer

    def _new_group(self, window: int | None) -> LayerGroup:
        if self.options.is_preallocated:
            return PreallocatedGroup(self.budget, window)
        return LayerGroup(self.budget, window)

    def _preallocated(self) -> list[PreallocatedGroup]:
        """Return the groups of the preallocated form; in the dynamic form there are none."""
        return [group for group in self.groups.values() if isinstance(group, PreallocatedGroup)]

    def layers_for(self, skip_layers: Collection[int | str]) -> list[Any]:
        """Return the layers that the config describes: paged ones, and transformers' own.

        Without a config there are none yet.
        """
        config = self.config
        if config is None:
            if skip_layers:
                raise ConfigError(
                    "skip_layers expected a config to look the layers up in, got None; pass one"
                )
            if self.options.is_preallocated:
                raise ConfigError(
                    "max_cache_len expected a config, got None: preallocated layers are made "
                    "before the model asks for layers"
                )
            return []
        if self.options.tensor_parallel.size > 1:
            check_divides(config, self.options.tensor_parallel.size)
        layers, windows = build_stock_layers(config, self.options.max_cache_len)
        skipped = find_layers(skip_layers, config, layers)
        for index, (layer, window) in enumerate(zip(layers, windows, strict=True)):
            room, shares = self.options.max_cache_len, shares_keys(config, index)
            if index not in skipped and type(layer) in _REPLACED and not shares:
                indexed = isinstance(layer, INDEXED)
                layers[index] = self.new_layer(index, window, indexed=indexed)
            elif shares and room is not None:
                layers[index] = FixedIndexer(room)
            elif type(layer) is StaticSlidingWindowLayer and room is not None:
                # Masks are made once for all layers with a window: in the paged ones' width.
                layers[index] = StaticLayer(room)
        if self.options.is_preallocated:
            _match_widths(layers)
        self.options.check_layers([layer.index for layer in self.layers], len(layers))
        return layers

    def snapshot(self, layers: list[Any], *, open_ended: bool) -> CacheSnapshot:
        """Return what the layers of the cache hold, transformers' own among them."""
        lengths = self.host_lengths()
        length = max(lengths, default=0)
        groups = {
            window: group.fork_at(length) if isinstance(group, PreallocatedGroup) else group.fork()
            for window, group in self.groups.items()
        }
        states: list[LayerSnapshot | None] = []
        stock = []
        paged = iter(lengths)
        for layer in layers:
            if isinstance(layer, PagedLayerBase):
                states.append(layer.snapshot(groups[layer.sliding_window], next(paged)))
            else:
                states.append(None)
                stock.append(layer)
        return CacheSnapshot(
            self.options, list(groups.values()), states, stock, open_ended, self.budget, self.config
        )

    def restore_layers(self, snapshot: CacheSnapshot) -> list[Any]:
        """Return layers that hold what `snapshot` does.

        Pages are shared; the preallocated form has copies of its own.
        """
        copies = self.options.is_preallocated
        shares = not copies and any(group.table.count for group in snapshot.groups)
        for group in snapshot.groups:
            self.groups[group.window] = group if shares else self._new_group(group.window)
            self.groups[group.window].record_past = group.record_past
        self._link_groups()
        stock = iter(snapshot.stock_layers)
        layers: list[Any] = [
            next(stock) if x is None
            else self.new_layer(
                x.index, x.group.window, x.pool if shares else None, x.turns,
                indexed=x.indexer is not None,
            )
            for x in snapshot.layers
        ]  # fmt: skip
        if shares or copies:
            # Not before all exist: a preallocated layer takes pages in every group, and the layers
            # of a group say that it takes no more than it needs.
            for layer, state in zip(layers, snapshot.layers, strict=True):
                if state is not None:
                    layer.restore(state)
        if copies:
            self._set_lengths([state.length for state in snapshot.layers if state is not None])
            for layer in self._preallocated_layers():
                layer.fill_plan(1)
            _match_widths(layers)
        return layers

    def _link_groups(self) -> None:
        siblings = [weakref.ref(group) for group in self.groups.values()]
        for group in self.groups.values():
            group.siblings = siblings

    # -- all layers at once ------------------------------------------------------------------

    @property
    def batch(self) -> int:
        """Sequences; 0 before the first token."""
        return max((group.table.batch for group in self.groups.values()), default=0)

    def host_lengths(self) -> list[int]:
        """Return the tokens stored in each layer; waits for the device in the preallocated form."""
        if self.options.is_preallocated and not all(layer.is_empty for layer in self.layers):
            return self.lengths.on_host()
        return [layer.host_length() for layer in self.layers]

    def host_length(self) -> int:
        """Return the tokens stored as a number; waits for the device in the preallocated form."""
        return max(self.host_lengths(), default=0)

    def _preallocated_layers(self) -> list[FP8PagedPreallocatedLayer]:
        """Return the layers of the preallocated form; in the dynamic form there are none."""
        return [x for x in self.layers if isinstance(x, FP8PagedPreallocatedLayer)]

    def _set_lengths(self, lengths: list[int]) -> None:
        """Set the tokens stored in each layer of the preallocated form."""
        self.lengths.set(lengths)
        for layer, length in zip(self._preallocated_layers(), lengths, strict=True):
            layer.note_length(length)

    def mask_request(self, tokens: int, columns: int, start: int) -> MaskRequest:
        """Return what the mask function needs from this cache besides these sizes."""
        options, is_empty = self.options, not self.layers or self.layers[0].is_empty
        observes = options.first_call_centers and self.first_tokens.observes(tokens, is_empty)
        # Transformers' own layers with a window keep fewer columns, and shift them.
        is_stored = not is_empty or options.prefill == "stored"
        preallocated = is_stored and columns == options.max_cache_len
        observer = self.first_tokens if observes else None
        growing = not options.is_preallocated
        return MaskRequest((tokens, columns, start), preallocated, growing, observer)

    def check_crop(self, tokens: int) -> None:
        """Raise ConfigError if a window no longer holds what `crop` would go back to."""
        if not self.options.is_preallocated:
            for group in self.groups.values():
                group.check_crop(tokens)
            return
        rings = [group for group in self._preallocated() if group.ring or group.lost]
        length = self.host_length() if rings else 0  # it waits for the device
        for ring in rings:
            ring.check_crop_from(tokens, length)

    def crop(self, tokens: int) -> None:
        """Remove the last `tokens` tokens, and give pages behind the window back."""
        self.first_tokens.told = None
        if not self.options.is_preallocated:
            for group in self.groups.values():
                group.crop(tokens)
            self._free_empty()
            return
        if tokens:
            kept = [max(length - tokens, 0) for length in self.host_lengths()]
            self._set_lengths(kept)
            self._unshare(max(kept, default=0))

    def end_layer(self, index: int, tokens: int) -> None:
        """Note that layer `index` has stored `tokens`.

        After the last one give back what others kept in case that the step is refused.
        """
        self._written = (index, tokens)
        if self.layers and index == self.layers[-1].index:
            self.first_tokens.end_call()
            for group in self.groups.values():
                group.finish_passage()

    def is_under_flex(self, index: int) -> bool:
        """Return whether the attention of layer `index` is flex attention.

        Outside of compiled code the config is asked once per step: its attributes take 2 us.
        """
        last, is_flex = self._under_flex
        is_compiling = torch.compiler.is_compiling()
        if is_compiling or index <= last:
            is_flex = getattr(self.config, "_attn_implementation", None) == "flex_attention"
        if not is_compiling:
            self._under_flex = index, is_flex
        return is_flex

    def undo_step(self, index: int, tokens: int) -> None:
        """Remove what layers before `index` stored in a step of `tokens`; the dynamic form only."""
        for layer in self.layers:
            layer.drop_removed()
        if self.options.is_preallocated or self._written[0] >= index or self._written[1] != tokens:
            return
        self._written = (len(self.layers), 0)
        lengths = [layer.host_length() for layer in self.layers if layer.index == index]
        start = lengths[0] if lengths else self.host_length() - tokens
        for group in self.groups.values():
            members = [
                layer.member
                for layer in self.layers
                if layer.group is group
                and layer.index < index
                and layer.host_length() == start + tokens
            ]
            group.undo(start, tokens, members)
        self._free_empty()

    def reset(self) -> None:
        """Remove all tokens; the addresses of the preallocated form stay."""
        self.first_tokens.told = None
        for layer in self.layers:
            layer.assigned.clear()
        if not self.options.is_preallocated:
            for group in self.groups.values():
                group.clear()
            self._free_empty()
            return
        self._set_lengths([0] * len(self.layers))
        # Sequences that came from one beam: each gets pages of its own again.
        for group in self.groups.values():
            group.clear()
        self._unshare(0)

    def select(self, sequences: torch.Tensor) -> None:
        """Make sequence `i` what sequence `sequences[i]` was; moves page numbers, not bytes.

        Raises:
            ConfigError: numbers of sequences that do not exist; nothing was changed.
        """
        batch = self.batch
        if not batch:
            return
        rows = sequences.cpu().numpy().astype(np.int64)
        if rows.ndim != 1 or not len(rows) or rows.min() < 0 or rows.max() >= batch:
            raise ConfigError(
                f"expected numbers of sequences from 0 to {batch - 1}, got {rows.tolist()}"
            )
        length = self.host_length() if self.options.is_preallocated else 0
        for group in self.groups.values():
            if self.options.is_preallocated:
                # Pages that hold nothing yet are not shared: each sequence gets its own again.
                group.table.truncate(length)
            group.select(rows)
        for layer in self.layers:
            layer.select_rows(sequences)
        if self.options.is_preallocated:
            self.lengths.resize(len(rows))
            self._unshare(length)
        else:
            for group in self.groups.values():
                group.shrink()

    def memory_footprint(self) -> Counter[str]:
        """Return bytes by kind: `pages`, `scales`, `tables`, `host`, `used`, `other`."""
        sizes = Counter(pages=0, scales=0, tables=0, host=0, used=0, other=0)
        for layer in self.layers:
            sizes.update(layer.memory_footprint())
        for group in self.groups.values():
            sizes.update(group.memory_footprint())
        sizes["tables"] += self.lengths.nbytes
        return sizes

    def _unshare(self, length: int) -> None:
        """Give sequences of the preallocated form own pages from `length` on; tell the layers."""
        if self.batch:
            for group in self._preallocated():
                group.unshare(length)
        for layer in self._preallocated_layers():
            layer.refresh(self.batch)

    def _free_empty(self) -> None:
        """Free the centers of layers without tokens, and the memory of pools without pages."""
        for layer in self.layers:
            assert isinstance(layer, FP8PagedLayer)
            layer.pool = layer.group.pools[layer.member]  # another one after an undone passage
            layer.drop_removed()
            if layer.pool.is_allocated and not layer.group.table.allocator.held:
                layer.release_memory()
        for group in self.groups.values():
            if not group.table.allocator.held:
                group.table.allocator.reset()


def _match_widths(layers: list[Any]) -> None:
    """Make the prefill of preallocated layers as wide as that of transformers' static layers.

    Those are as wide at the prefill as later, and all layers share their masks.
    """
    if any(isinstance(layer, StaticLayer) for layer in layers):
        for layer in layers:
            if isinstance(layer, FP8PagedPreallocatedLayer):
                layer.config = None
