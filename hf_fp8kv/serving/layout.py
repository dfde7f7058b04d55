"""Where the bytes of a page are, in memory that an engine planned and allocated."""

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from ..cache.options import CacheOptions
from ..errors import ConfigError
from ..formats import AUTO

__all__ = ["BlockRows", "PageLayout", "Stored"]


class Stored(NamedTuple):
    """The stored keys and values of every page of an engine; each tensor has the pages first.

    Attributes:
        k: `[P, Hkv, S, D]`, uint8 codes, or the model's dtype for "auto".
        v: `[P, Hkv, D, S]`, the same for V.
        k_token_scales: `[P, Hkv, S]`, bfloat16, or None: dynamic scales of K.
        v_token_scales: `[P, Hkv, S]`, bfloat16, or None: those of V.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_token_scales: torch.Tensor | None
    v_token_scales: torch.Tensor | None

    def from_page(self, first: int) -> "Stored":
        """The same pages without the first ones: page `n` is then what was page `n + first`."""
        return Stored(*(None if x is None else x[first:] for x in self))  # type: ignore[arg-type]

    def tensors(self) -> list[torch.Tensor]:
        """Those that are there."""
        return [x for x in self if x is not None]


@dataclass(frozen=True)
class PageLayout:
    """One page: `slots` tokens of one layer, for all KV heads of this process.

    Attributes:
        heads: Hkv.
        dim: D, of K and of V.
        slots: tokens per page, S.
        key_format: a key of `FORMATS`, or "auto".
        value_format: the same for V.
        dtype: the model's: what "auto" stores.
        dynamic: whether some layer has a scale per token and head.
    """

    heads: int
    dim: int
    slots: int
    key_format: str
    value_format: str
    dtype: torch.dtype
    dynamic: bool

    @classmethod
    def of(
        cls, options: CacheOptions, heads: int, dim: int, slots: int, dtype: torch.dtype
    ) -> "PageLayout":
        """The layout for what a user chose, and an engine's sizes. Raises ConfigError."""
        if slots & (slots - 1) or not 8 <= slots <= 1024:
            raise ConfigError(
                "the engine's page size: expected a power of two from 8 to 1024 tokens, got "
                f"{slots}; set ContinuousBatchingConfig(page_size=...), or block_size"
            )
        return cls(
            heads, dim, slots, options.key_format, options.value_format, dtype,
            options.dynamic_scales,
        )  # fmt: skip

    def _parts(self) -> Iterator[tuple[tuple[int, ...], torch.dtype] | None]:
        """Shape and dtype of a page's K, V, and their scales (None: there are none)."""
        heads, dim, slots = self.heads, self.dim, self.slots
        formats = (self.key_format, self.value_format)
        for name, shape in zip(formats, ((heads, slots, dim), (heads, dim, slots)), strict=True):
            yield shape, self.dtype if name == AUTO else torch.uint8
        for name in formats:
            yield ((heads, slots), torch.bfloat16) if self.dynamic and name != AUTO else None

    @property
    def bytes_per_page(self) -> int:
        """Bytes of a page, its dynamic scales among them."""
        return sum(prod(part[0]) * part[1].itemsize for part in self._parts() if part is not None)

    def carve(self, memory: torch.Tensor) -> Stored:
        """Returns the pages in `memory`.

        All pages' K come first, then all V, then the scales: so each is a tensor without gaps, as
        the operations want it. The engine only ever counts in pages, and never looks inside.

        Args:
            memory: `[bytes]`, uint8, contiguous.
        """
        pages = memory.numel() // self.bytes_per_page
        found: list[torch.Tensor | None] = []
        at = 0
        for part in self._parts():
            if part is None:
                found.append(None)
                continue
            shape, dtype = part
            size = pages * prod(shape) * dtype.itemsize
            found.append(memory[at : at + size].view(dtype).view(pages, *shape))
            at += size
        return Stored(*found)  # type: ignore[arg-type]


class BlockRows:
    """Blocks of pages as rows of bytes: what an engine copies when it forks or offloads requests.

    It has the two methods of a `[blocks, bytes]` tensor that engines use for it.
    """

    def __init__(self, stored: Stored, pages_per_block: int) -> None:
        self._parts = [_bytes(x, pages_per_block) for x in stored.tensors()]
        self.device = stored.k.device

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return sum(part.shape[1] for part in self._parts)

    def columns(self, start: int, stop: int) -> "BlockRows":
        """The bytes `start` to `stop - 1` of every row."""
        found = copy(self)
        found._parts = []
        at = 0
        for part in self._parts:
            first, last = max(start - at, 0), min(stop - at, part.shape[1])
            if first < last:
                found._parts.append(part[:, first:last])
            at += part.shape[1]
        return found

    def index_select(self, dim: int, index: torch.Tensor) -> torch.Tensor:
        """Returns the rows `index`, `[n, bytes]`, uint8."""
        return torch.cat([part.index_select(dim, index) for part in self._parts], 1)

    def index_copy_(self, dim: int, index: torch.Tensor, rows: torch.Tensor) -> "BlockRows":
        """The rows `index` are then `rows`, `[n, bytes]`, uint8."""
        at = 0
        for part in self._parts:
            part.index_copy_(dim, index, rows[:, at : at + part.shape[1]])
            at += part.shape[1]
        return self


def _bytes(x: torch.Tensor, pages_per_block: int) -> torch.Tensor:
    return x.view(torch.uint8).view(len(x) // pages_per_block, -1)
