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

# Alignment of the regions, in bytes. A GPU thread loads this number of bytes at once.
_ALIGNMENT = 16


@dataclass(frozen=True)
class PageLayout:
    """The regions of a page, and their positions in its bytes.

    Attributes:
        regions: Name, shape and dtype of each region: "k" `[Hkv, S, Dk]`, "v" `[Hkv, Dv, S]`, and
            "token_scales" `[Hkv, S, 2]` if there are dynamic scales. V is transposed because sm_80
            to sm_90 and gfx942 cannot load 8-bit data transposed.
        offsets: Offset of each region in a page, in bytes.
        size: Size of a page, in bytes.
    """

    regions: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    offsets: Mapping[str, int]
    size: int

    def split(self, block: Tensor) -> dict[str, Tensor]:
        """Return views of the regions of all pages of a block `[n, bytes]`, each `[n, ...]`."""
        return {
            name: block[:, self.offsets[name] : self.offsets[name] + prod(shape) * dtype.itemsize]
            .view(dtype)
            .view(len(block), *shape)
            for name, shape, dtype in self.regions
        }


def make_page_layout(
    num_heads: int,
    page_size: int,
    k_dim: int,
    v_dim: int,
    k_dtype: torch.dtype,
    v_dtype: torch.dtype,
    has_scales: bool,
) -> PageLayout:
    """Return the layout of a page for these sizes and dtypes of codes."""
    # Dynamo ignores `functools.cache`, and warns about it.
    is_compiling = torch.compiler.is_compiling()
    compute: Any = _compute_layout.__wrapped__ if is_compiling else _compute_layout
    layout: PageLayout = compute(num_heads, page_size, k_dim, v_dim, k_dtype, v_dtype, has_scales)
    return layout


@functools.cache
def _compute_layout(
    num_heads: int,
    page_size: int,
    k_dim: int,
    v_dim: int,
    k_dtype: torch.dtype,
    v_dtype: torch.dtype,
    has_scales: bool,
) -> PageLayout:
    k_shape = (num_heads, page_size, k_dim)
    v_shape = (num_heads, v_dim, page_size)
    regions = [("k", k_shape, k_dtype), ("v", v_shape, v_dtype)]
    if has_scales:
        regions.append(("token_scales", (num_heads, page_size, 2), torch.bfloat16))
    offsets = {}
    end = 0
    for name, shape, dtype in regions:
        offsets[name] = end
        end += -(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return PageLayout(tuple(regions), offsets, end)
