"""The layout of a page: the positions of its K, its V and its dynamic scales.

Pools, the memory of engines, and vLLM's blocks all use this layout.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

# Alignment of the parts, in bytes: a GPU thread loads this number of bytes at once.
_ALIGNMENT = 16


@dataclass(frozen=True)
class PageLayout:
    """Positions of the parts within the bytes of a page.

    Attributes:
        parts: Name, shape and dtype of each part: "k" `[Hkv, S, Dk]`, "v" `[Hkv, Dv, S]`, and
            "token_scales" `[Hkv, S, 2]` if there are dynamic scales. V is transposed because sm_80
            to sm_90 and gfx942 cannot load 8-bit data transposed.
        first: Offset of each part, in bytes.
        size: Size of a page, in bytes.
    """

    parts: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    first: Mapping[str, int]
    size: int

    def split(self, block: Tensor) -> dict[str, Tensor]:
        """Return views of the parts of all pages of a block `[n, bytes]`, each `[n, ...]`."""
        return {
            name: block[:, self.first[name] : self.first[name] + prod(shape) * dtype.itemsize]
            .view(dtype)
            .view(len(block), *shape)
            for name, shape, dtype in self.parts
        }


def page_layout(
    heads: int, slots: int, k_dim: int, v_dim: int, k_dtype: torch.dtype, v_dtype: torch.dtype,
    has_scales: bool,
) -> PageLayout:  # fmt: skip
    """Return the layout of a page with these sizes and dtypes of codes."""
    # Dynamo ignores caches, and warns about them.
    compiles = torch.compiler.is_compiling()
    make: Any = _page_layout.__wrapped__ if compiles else _page_layout
    layout: PageLayout = make(heads, slots, k_dim, v_dim, k_dtype, v_dtype, has_scales)
    return layout


@functools.cache
def _page_layout(
    heads: int, slots: int, k_dim: int, v_dim: int, k_dtype: torch.dtype, v_dtype: torch.dtype,
    has_scales: bool,
) -> PageLayout:  # fmt: skip
    parts = [("k", (heads, slots, k_dim), k_dtype), ("v", (heads, v_dim, slots), v_dtype)]
    if has_scales:
        parts.append(("token_scales", (heads, slots, 2), torch.bfloat16))
    first, end = {}, 0
    for name, shape, dtype in parts:
        first[name] = end
        end += -(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return PageLayout(tuple(parts), first, end)
