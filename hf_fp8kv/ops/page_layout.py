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

# Alignment of the parts, in bytes. A GPU thread loads this number of bytes at once.
_ALIGNMENT = 16


@dataclass(frozen=True)
class PageLayout:
    """The parts of a page, and their positions in its bytes.

    Attributes:
        parts: Name, shape and dtype of each part: "k" `[Hkv, S, Dk]`, "v" `[Hkv, Dv, S]`, and
            "token_scales" `[Hkv, S, 2]` if there are dynamic scales. V is transposed because sm_80
            to sm_90 and gfx942 cannot load 8-bit data transposed.
        offsets: Offset of each part in a page, in bytes.
        size: Size of a page, in bytes.
    """

    parts: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    offsets: Mapping[str, int]
    size: int

    def split(self, block: Tensor) -> dict[str, Tensor]:
        """Return views of the parts of all pages of a block `[n, bytes]`, each `[n, ...]`."""
        return {
            name: block[:, self.offsets[name] : self.offsets[name] + prod(shape) * dtype.itemsize]
            .view(dtype)
            .view(len(block), *shape)
            for name, shape, dtype in self.parts
        }


def page_layout(
    heads: int, slots: int, k_dim: int, v_dim: int, k_dtype: torch.dtype, v_dtype: torch.dtype,
    has_scales: bool,
) -> PageLayout:  # fmt: skip
    """Return the layout of a page for these sizes and dtypes of codes."""
    # Dynamo ignores `functools.cache`, and warns about it.
    is_compiling = torch.compiler.is_compiling()
    make_layout: Any = _make_layout.__wrapped__ if is_compiling else _make_layout
    layout: PageLayout = make_layout(heads, slots, k_dim, v_dim, k_dtype, v_dtype, has_scales)
    return layout


@functools.cache
def _make_layout(
    heads: int, slots: int, k_dim: int, v_dim: int, k_dtype: torch.dtype, v_dtype: torch.dtype,
    has_scales: bool,
) -> PageLayout:  # fmt: skip
    parts = [("k", (heads, slots, k_dim), k_dtype), ("v", (heads, v_dim, slots), v_dtype)]
    if has_scales:
        parts.append(("token_scales", (heads, slots, 2), torch.bfloat16))
    offsets, end = {}, 0
    for name, shape, dtype in parts:
        offsets[name] = end
        end += -(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return PageLayout(tuple(parts), offsets, end)
