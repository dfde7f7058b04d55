"""The bytes of a page: where its K, its V and its dynamic scales are."""

import functools
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from .pages import Pages

# What addresses are multiples of: the bytes that a GPU's thread loads at once.
_ALIGNMENT = 16


@dataclass(frozen=True)
class PageBytes:
    """Where in a page's bytes its parts are.

    Attributes:
        parts: of each part its name, shape, dtype and first byte: "k" `[Hkv, S, Dk]`, "v"
            `[Hkv, Dv, S]`, and "token_scales" `[Hkv, S, 2]`, if there are any.
        size: bytes of a page.
    """

    parts: tuple[tuple[str, tuple[int, ...], torch.dtype, int], ...]
    size: int

    def first_byte(self, name: str) -> int:
        """Return where a part begins; 0 for one that is not there."""
        return next((first for part, _, _, first in self.parts if part == name), 0)

    def split(self, block: Tensor) -> dict[str, Tensor]:
        """Return the parts of all pages of a block, `[n, ...]`: views."""
        return {
            name: block[:, first : first + prod(shape) * dtype.itemsize]
            .view(dtype)
            .view(len(block), *shape)
            for name, shape, dtype, first in self.parts
        }


@functools.cache
def page_bytes(
    heads: int, slots: int, k_dim: int, v_dim: int, k_dtype: torch.dtype, v_dtype: torch.dtype,
    has_scales: bool,
) -> PageBytes:  # fmt: skip
    """Return the layout of a page of these sizes; dtypes are those of codes."""
    parts = [("k", (heads, slots, k_dim), k_dtype), ("v", (heads, v_dim, slots), v_dtype)]
    if has_scales:
        parts.append(("token_scales", (heads, slots, 2), torch.bfloat16))
    placed, end = [], 0
    for name, shape, dtype in parts:
        placed.append((name, shape, dtype, end))
        end += -(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return PageBytes(tuple(placed), end)


def layout_of(pages: Pages) -> PageBytes:
    """Return the layout of the pages."""
    k, v = pages.k, pages.v
    return page_bytes(
        pages.heads, pages.page_size, k.head_dim, v.head_dim, k.codes.dtype, v.codes.dtype,
        pages.token_scales is not None,
    )  # fmt: skip
