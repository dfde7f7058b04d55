"""Layout of a page: where its bytes are in memory that an engine planned and allocated."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from ..cache.options import CacheOptions
from ..errors import ConfigError
from ..formats import LayerPlan
from ..ops import Pages, StoredSide
from .config import LayerStorage


class LayerPages(NamedTuple):
    """The pages of a layer, or of all layers, without a block table."""

    k: StoredSide
    v: StoredSide
    token_scales: torch.Tensor | None
    addresses: torch.Tensor | None = None  # as in `Pages`

    def with_table(self, table: torch.Tensor) -> Pages:
        """Return the pages of sequences that have a block table, `[B, M]`, int32."""
        return Pages(self.k, self.v, self.token_scales, table, self.addresses)

    def stored_as(self, storage: LayerStorage) -> "LayerPages":
        """Return the same pages with the plan and the static scales of a layer."""
        k, v = (
            side._replace(static_scale=scale, format=plan.format, rotated=plan.rotated)
            for side, scale, plan in zip(
                (self.k, self.v), (storage.k, storage.v), storage.plan, strict=True
            )
        )
        return self._replace(k=k, v=v)

    def from_page(self, first: int) -> "LayerPages":
        """Return the pages from `first` on: page `n` is then what was page `n + first`."""

        k, v = (side._replace(codes=side.codes[first:]) for side in (self.k, self.v))
        scales = None if self.token_scales is None else self.token_scales[first:]
        return LayerPages(k, v, scales)

    def tensors(self) -> list[torch.Tensor]:
        """Return the codes and dynamic scales, each with the pages first."""
        tensors = (self.k.codes, self.v.codes, self.token_scales)
        return [x for x in tensors if x is not None]


@dataclass(frozen=True)
class PageLayout:
    """One page: `slots` tokens of one layer, for all KV heads of this process.

    Layers may be stored in other 8-bit plans, which take the same bytes: `LayerPages.stored_as`.
    """

    heads: int  # Hkv
    dim: int  # D, of K and of V
    slots: int  # tokens per page, S
    plan: LayerPlan  # of the first layer; all others have the same sides in "auto"
    dtype: torch.dtype  # the model's: what "auto" stores
    dynamic: bool  # whether some layer has a scale per token and head

    @classmethod
    def of(
        cls, options: CacheOptions, layers: int, heads: int, dim: int, slots: int,
        dtype: torch.dtype,
    ) -> "PageLayout":  # fmt: skip
        """Return the layout for what a user chose, and a model's and an engine's sizes.

        Raises:
            ConfigError: pages of layers would not have the same size, or a size that cannot be.
        """
        if slots & (slots - 1) or not 8 <= slots <= 1024:
            raise ConfigError(
                "the engine's page size: expected a power of two from 8 to 1024 tokens, got "
                f"{slots}; set ContinuousBatchingConfig(page_size=...), or block_size"
            )
        plans = [options.layer_plan(index) for index in range(layers)]
        for index, plan in enumerate(plans):
            if [side.is_auto for side in plan] != [side.is_auto for side in plans[0]]:
                raise ConfigError(
                    "plan: expected 'auto' for K, or V, of all layers or of none, since an "
                    f"engine's pages have one size, got {plans[0]} for layer 0 and {plan} for "
                    f"layer {index}; store all of them in 8 bits"
                )
        return cls(heads, dim, slots, plans[0], dtype, options.dynamic_scales)

    def _parts(self) -> Iterator[tuple[tuple[int, ...], torch.dtype] | None]:
        """Yield shape and dtype of a page's K, V, and dynamic scales (None: there are none)."""
        heads, dim, slots = self.heads, self.dim, self.slots
        shapes = (heads, slots, dim), (heads, dim, slots)
        for side, shape in zip(self.plan, shapes, strict=True):
            yield shape, self.dtype if side.is_auto else torch.uint8
        has_scales = self.dynamic and not all(side.is_auto for side in self.plan)
        yield ((heads, slots, 2), torch.bfloat16) if has_scales else None

    @property
    def bytes_per_page(self) -> int:
        """Bytes of a page, its dynamic scales among them."""
        return sum(prod(part[0]) * part[1].itemsize for part in self._parts() if part is not None)

    def carve(self, memory: torch.Tensor) -> LayerPages:
        """Return the pages in `memory`, `[bytes]`, uint8, contiguous.

        All pages' K come first, then all V, then the scales: so each is a tensor without gaps, as
        the operations want it. The engine only ever counts in pages, and never looks inside.
        """
        pages = memory.numel() // self.bytes_per_page
        tensors: list[Any] = []
        start = 0
        for part in self._parts():
            if part is None:
                tensors.append(None)
                continue
            shape, dtype = part
            stop = start + pages * prod(shape) * dtype.itemsize
            tensors.append(memory[start:stop].view(dtype).view(pages, *shape))
            start = stop
        k, v, token_scales = tensors
        return LayerPages(
            StoredSide(k, None, None, self.plan.k.format, self.dim, self.plan.k.rotated),
            StoredSide(v, None, None, self.plan.v.format, self.dim, self.plan.v.rotated),
            token_scales,
        )


class BlockRows:
    """Blocks of pages as rows of bytes: what an engine copies when it forks or offloads requests.

    It has the two methods of a `[blocks, bytes]` tensor that engines use for it.
    """

    def __init__(self, pages: LayerPages, pages_per_block: int) -> None:
        self._parts = [
            x.view(torch.uint8).view(len(x) // pages_per_block, -1) for x in pages.tensors()
        ]
        self.device = pages.k.codes.device

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return sum(part.shape[1] for part in self._parts)

    def index_select(self, dim: int, index: torch.Tensor) -> torch.Tensor:
        """Return a copy of the rows `index`, `[n, bytes]`, uint8."""
        return torch.cat([part.index_select(dim, index) for part in self._parts], 1)

    def index_copy_(self, dim: int, index: torch.Tensor, rows: torch.Tensor) -> "BlockRows":
        """Copy `rows`, `[n, bytes]`, uint8, to the rows `index`."""
        widths = [part.shape[1] for part in self._parts]
        for part, columns in zip(self._parts, rows.split(widths, 1), strict=True):
            part.index_copy_(dim, index, columns)
        return self
