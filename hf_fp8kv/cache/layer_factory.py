"""Layer factory: the layers of a cache, made for a config, as a model asks, or from a snapshot."""

import weakref
from collections.abc import Collection
from typing import Any

from transformers import PreTrainedConfig
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from ..errors import ScaleError
from ..modeling.layer_specs import layers_named, layers_of
from ..modeling.tensor_parallel import kv_heads
from ..paging.block_table import PageBudget
from ..paging.layer_group import LayerGroup
from ..paging.page_pool import PagePool
from ..scales import KVScales
from .layer import FP8PagedLayer, PagedLayerBase
from .options import CacheOptions
from .preallocated_layer import FP8PagedPreallocatedLayer
from .snapshot import CacheSnapshot

__all__ = ["LayerFactory"]

# Exactly these kinds are replaced by paged layers: a subclass keeps more than K and V.
_REPLACED = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)


class LayerFactory:
    """Makes the layers of one cache, and the groups that its paged layers share.

    Attributes:
        options: what the user chose.
        config: the decoder's config, or None.
        budget: what the pages of all groups count against.
        groups: one group of layers, with one block table, for each window; None: no window.
    """

    def __init__(
        self, options: CacheOptions, config: PreTrainedConfig | None, budget: PageBudget
    ) -> None:
        self.options, self.config, self.budget = options, config, budget
        self.groups: dict[int | None, LayerGroup] = {}

    def new_layer(
        self, index: int, window: int | None, pool: PagePool | None = None
    ) -> PagedLayerBase:
        """Return a paged layer, in the group of its window.

        Args:
            index: its number in the model.
            window: tokens that a query sees; None: all.
            pool: the pages of a fork; None: the layer has its own.
        """
        if window not in self.groups:
            self.groups[window] = LayerGroup(self.budget, window)
            self._link_groups()
        group = self.groups[window]
        heads = None
        if self.options.tp_size > 1 and self.config is not None:
            heads = kv_heads(self.config, index)
        if self.options.is_preallocated:
            return FP8PagedPreallocatedLayer(index, self.options, group, heads, self.config)
        return FP8PagedLayer(index, self.options, group, heads, pool)

    def layers_for(self, config: PreTrainedConfig, skip_layers: Collection[int | str]) -> list[Any]:
        """Return the layers of a model: paged ones, and transformers' own where it needs others.

        Raises:
            ConfigError: `skip_layers` names layers that the model does not have.
            ScaleError: there are static scales, but not for every paged layer.
        """
        layers, windows = layers_of(config, self.options.max_cache_len)
        skipped = layers_named(skip_layers, config, layers)
        for index, (layer, window) in enumerate(zip(layers, windows, strict=True)):
            if index not in skipped and type(layer) in _REPLACED:
                layers[index] = self.new_layer(index, window)
            elif type(layer) is StaticSlidingWindowLayer and (room := self.options.max_cache_len):
                # Masks are made once for all layers with a window: in the paged ones' width.
                layers[index] = StaticLayer(room)
        if self.options.is_preallocated:
            _match_widths(layers)
        self._check_scales([x.index for x in layers if isinstance(x, PagedLayerBase)])
        return layers

    def restore_layers(self, snapshot: CacheSnapshot) -> list[Any]:
        """Return layers that hold what `snapshot` does.

        Pages are shared; the preallocated form has copies of its own.
        """
        copies = self.options.is_preallocated
        shares = not copies and any(group.table.count for group in snapshot.groups)
        for held in snapshot.groups:
            if shares:
                self.groups[held.window] = LayerGroup.from_snapshot(held)
            else:
                self.groups[held.window] = LayerGroup(self.budget, held.window)
                self.groups[held.window].record_past = held.record_past
        self._link_groups()
        stock = iter(snapshot.stock_layers)
        layers: list[Any] = []
        for state in snapshot.layers:
            if state is None:
                layers.append(next(stock))
                continue
            layer = self.new_layer(state.index, state.group.window, state.pool if shares else None)
            if shares or copies:
                layer.restore(state)
            layers.append(layer)
        if copies:
            _match_widths(layers)
        return layers

    def _link_groups(self) -> None:
        siblings = [weakref.ref(group) for group in self.groups.values()]
        for group in self.groups.values():
            group.siblings = siblings

    def _check_scales(self, paged: list[int]) -> None:
        scales = self.options.scales
        if isinstance(scales, KVScales):
            missing = [index for index in paged if index not in scales.layers]
            if missing:
                raise ScaleError(
                    f"scales ({scales.origin}): expected scales for every paged layer, got none "
                    f"for layers {missing}; use the scales of this very model, or keep these "
                    "layers out with skip_layers"
                )


def _match_widths(layers: list[Any]) -> None:
    """Make the prefill of preallocated layers as wide as that of transformers' static layers.

    Those are as wide at the prefill as later, and all layers share their masks.
    """
    if any(isinstance(layer, StaticLayer) for layer in layers):
        for layer in layers:
            if isinstance(layer, FP8PagedPreallocatedLayer):
                layer.config = None
