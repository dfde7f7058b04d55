"""The layout of a page: for each head its K, its V and its dynamic scales.

Pools, files, the memory of engines, and vLLM's blocks all use this layout. The bytes of a head are
adjacent, so the pages of some heads are slices of the pages of all heads.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..formats import CODE_DTYPES

# Alignment of the regions, in bytes. A GPU thread loads this number of bytes at once.
_ALIGNMENT = 16
# Bits of each packed code in the planes of a vector, the upper bits first.
_PLANES = {CODE_DTYPES[6]: (4, 2), CODE_DTYPES[4]: (4,)}


def count_elements(dim: int, dtype: torch.dtype) -> int:
    """Return the number of elements that store a vector.

    Elements are bytes of codes, or values of a floating dtype.

    Raises:
        ConfigError: The codes do not fill whole bytes.
    """
    planes = _PLANES.get(dtype, (8,))
    if dim % (8 // planes[-1]):
        raise ConfigError(
            f"head size: expected a multiple of {8 // planes[-1]} for {sum(planes)}-bit codes, got "
            f"{dim}. Choose an 8-bit format"
        )
    return dim * sum(planes) // 8


def pack_codes(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bytes that store the codes `[..., D]` of `dtype`, `[..., D * bits / 8]`.

    A plane has some bits of each code, the first plane the upper bits. Byte `i` of its `n` bytes
    has these bits of the channels `i`, `i + n`, and so on, the first channel in the lowest bits.
    """
    if dtype not in _PLANES:
        return codes
    planes = []
    start = 8
    for width in _PLANES[dtype]:
        start -= width
        parts = (codes >> start & (1 << width) - 1).chunk(8 // width, -1)
        planes.append(functools.reduce(lambda packed, part: packed << width | part, parts[::-1]))
    return torch.cat(planes, -1)


def unpack_codes(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the codes that `pack_codes` packed, `[..., D]`."""
    if dtype not in _PLANES:
        return packed
    widths = _PLANES[dtype]
    dim = packed.shape[-1] * 8 // sum(widths)
    codes = packed.new_zeros(())
    start = 8
    planes = packed.split([dim * width // 8 for width in widths], -1)
    for width, plane in zip(widths, planes, strict=True):
        start -= width
        shifted = [plane >> shift & (1 << width) - 1 for shift in range(0, 8, width)]
        codes = codes | torch.cat(shifted, -1) << start
    return codes


@dataclass(frozen=True)
class PageLayout:
    """The regions of a head in a page, and their positions in its bytes.

    Attributes:
        num_heads: Number of KV heads.
        regions: Name, shape and dtype of each region of a head: "k" `[S, Ck]`, "v" `[Cv, S]`, and
            "token_scales" `[S, 2]` if there are dynamic scales. C is `count_elements` of the head
            size. V is transposed because sm_80 to sm_90 and gfx942 cannot load 8-bit data
            transposed.
        offsets: Offset of each region in a head, in bytes.
        head_bytes: Size of a head in a page, in bytes.
    """

    num_heads: int
    regions: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    offsets: Mapping[str, int]
    head_bytes: int

    @property
    def size(self) -> int:
        """Size of a page, in bytes."""
        return self.num_heads * self.head_bytes

    def split(self, block: Tensor) -> dict[str, Tensor]:
        """Return views of the regions of a block's pages, each `[n, Hkv, ...]`."""
        heads = block[:, : self.size].unflatten(1, (self.num_heads, self.head_bytes))
        return {
            name: heads.narrow(2, self.offsets[name], math.prod(shape) * dtype.itemsize)
            .view(dtype)
            .unflatten(2, shape)
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
    compute: Any = _compute_layout.__wrapped__ if torch.compiler.is_compiling() else _compute_layout
    return compute(  # type: ignore[no-any-return]
        num_heads, page_size, k_dim, v_dim, k_dtype, v_dtype, has_scales
    )


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
    k_width = count_elements(k_dim, k_dtype)
    v_width = count_elements(v_dim, v_dtype)
    k_region_dtype, v_region_dtype = (
        torch.uint8 if dtype in _PLANES else dtype for dtype in (k_dtype, v_dtype)
    )
    regions = [
        ("k", (page_size, k_width), k_region_dtype),
        ("v", (v_width, page_size), v_region_dtype),
    ]
    if has_scales:
        regions.append(("token_scales", (page_size, 2), torch.bfloat16))
    offsets = {}
    head_bytes = 0
    for name, shape, dtype in regions:
        offsets[name] = head_bytes
        head_bytes += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return PageLayout(num_heads, tuple(regions), offsets, head_bytes)
