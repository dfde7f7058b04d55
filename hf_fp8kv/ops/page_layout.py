"""The layout of a page: where the bytes of its K, its V and its dynamic scales are.

Pools, engines' memory and vLLM's blocks lay their pages out so.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

# Parts begin at multiples of this: the bytes that a GPU's thread loads at once.
_ALIGNMENT = 16


@dataclass(frozen=True)
class PageLayout:
    """Where in a page's bytes its parts are.

    Attributes:
        parts: of each part its name, shape and dtype: "k" `[Hkv, S, Dk]`, "v" `[Hkv, Dv, S]`, and
            "token_scales" `[Hkv, S, 2]`, if there are any. V is transposed, since no GPU loads
            8-bit data transposed.
        first: the first byte of each part.
        size: bytes of a page.
    """

    parts: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    first: Mapping[str, int]
    size: int

    def split(self, block: Tensor) -> dict[str, Tensor]:
        """Return the parts of all pages of a block `[n, bytes]`, each `[n, ...]`: views."""
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
    """Return the layout of a page of these sizes, with codes of these dtypes."""
    # The compiler does without memory between calls.
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
