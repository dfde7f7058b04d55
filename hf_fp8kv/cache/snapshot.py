"""Snapshots: what a cache holds, as forks, pickles and files take it and give it back.

A snapshot shares the pages of its cache, which are copied on write, and is restored at most once.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from ..paging.block_table import PageBudget
from ..paging.layer_group import GroupSnapshot
from ..paging.page_pool import PagePool
from .options import CacheOptions


class LayerSetup(NamedTuple):
    """What a layer looked up for its first tokens.

    Attributes:
        dtype: of the keys of the model.
        v_dtype: of the values.
        device: where the layer computes.
        backend: a key of `ops.BACKENDS`.
        k_static_scale: `[Hkv, Dk]`, float32, or None.
        v_static_scale: `[Hkv, Dv]`, float32, or None.
        scale_center: K's center `[Hkv, Dk]` among the static scales, float32, or None.
    """

    dtype: torch.dtype
    v_dtype: torch.dtype
    device: torch.device
    backend: str
    k_static_scale: torch.Tensor | None
    v_static_scale: torch.Tensor | None
    scale_center: torch.Tensor | None


@dataclass(slots=True, eq=False)
class LayerSnapshot:
    """What one paged layer holds.

    Attributes:
        index: the layer's number in the model.
        group: which page of the pool holds which token.
        length: tokens stored; a tensor `[]` on the device in the preallocated form.
        pool: the bytes; None before the first token.
        k_center: `[B, Hkv, Dk]`, float32, or None.
        setup: None: to be looked up.
    """

    index: int
    group: GroupSnapshot
    length: int | torch.Tensor
    pool: PagePool | None = None
    k_center: torch.Tensor | None = None
    setup: LayerSetup | None = None


@dataclass(frozen=True, eq=False)
class CacheSnapshot:
    """What a cache holds.

    Attributes:
        options: what the user chose.
        groups: one for each block table.
        layers: the paged layers; None: the next of `stock_layers`.
        stock_layers: transformers' own layers.
        open_ended: whether layers are added as the model asks.
        budget: what the pages count against.
        config: the decoder's config; None in pickles and files.
    """

    options: CacheOptions
    groups: list[GroupSnapshot]
    layers: list[LayerSnapshot | None]
    stock_layers: list[Any]
    open_ended: bool
    budget: PageBudget
    config: PreTrainedConfig | None = None
