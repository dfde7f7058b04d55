"""Snapshots: the contents of a cache, for forks, pickles and files.

A snapshot shares the pages of its cache, which are copied on write. It is restored at most once.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from ..paging.layer_group import LayerGroup
from ..paging.page_allocator import PageBudget
from ..paging.page_pool import PagePool
from .options import CacheOptions
from .turns import Turns


@dataclass(slots=True, eq=False)
class LayerSnapshot:
    """The contents of one paged layer.

    Attributes:
        group: A fork of the layer's group, with the block table.
        length: Number of stored tokens.
        pool: The pages, or None before the first token.
        k_center: Center of K, `[B, Hkv, Dk]`, float32, or None.
        turns: How RoPE turns the keys, or None if it is not known.
        indexer: Tensors of the layer's indexer by name, or None without an indexer.
    """

    group: LayerGroup
    length: int
    pool: PagePool | None = None
    k_center: torch.Tensor | None = None
    turns: Turns | None = None
    indexer: dict[str, torch.Tensor] | None = None


@dataclass(frozen=True, eq=False)
class CacheSnapshot:
    """The contents of a cache.

    Attributes:
        groups: Forks of the groups, without layers.
        layers: Snapshots of paged layers, and the layers of transformers themselves.
        open_ended: Whether layers are added as the model uses them.
        config: The decoder's config, or None in pickles and files.
    """

    options: CacheOptions
    groups: list[LayerGroup]
    layers: list[LayerSnapshot | Any]
    open_ended: bool
    budget: PageBudget
    config: PreTrainedConfig | None = None
