"""Snapshots: what a cache holds, as forks, pickles and files take it and give it back.

A snapshot shares the pages of its cache, which are copied on write, and is restored at most once.
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
    """What one paged layer holds.

    Attributes:
        group: which page of the pool holds which token: a fork of the layer's group.
        length: tokens stored.
        pool: the bytes; None before the first token.
        k_center: `[B, Hkv, Dk]`, float32, or None.
        turns: how its keys turn, which is read from the config; None: not known.
        indexer: the tensors of its indexer, by name; None: it has none.
    """

    group: LayerGroup
    length: int
    pool: PagePool | None = None
    k_center: torch.Tensor | None = None
    turns: Turns | None = None
    indexer: dict[str, torch.Tensor] | None = None


@dataclass(frozen=True, eq=False)
class CacheSnapshot:
    """What a cache holds.

    Attributes:
        groups: forks without layers, one for each block table.
        layers: what paged layers hold, and transformers' own layers as they are.
        open_ended: whether layers are added as the model asks.
        config: the decoder's config; None in pickles and files.
    """

    options: CacheOptions
    groups: list[LayerGroup]
    layers: list[LayerSnapshot | Any]
    open_ended: bool
    budget: PageBudget
    config: PreTrainedConfig | None = None
