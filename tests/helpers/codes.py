"""Read and replace the codes in pages, which may be packed."""

from typing import Any

import torch

from hf_fp8kv.formats import FORMATS
from hf_fp8kv.ops import Pages
from hf_fp8kv.ops.page_layout import pack_codes, unpack_codes


def read_codes(pages: Pages, side: str) -> torch.Tensor:
    """Return the codes, or values, of K or V in the first block, `[P, Hkv, S, D]`."""
    region, dtype = _find_region(pages, side)
    return unpack_codes(region, dtype)


def replace_codes(pages: Pages, side: str, index: Any, codes: Any) -> None:
    """Store `codes` in the pages, at `index` of the result of `read_codes`."""
    region, dtype = _find_region(pages, side)
    new_codes = unpack_codes(region, dtype)
    new_codes[index] = codes
    region.copy_(pack_codes(new_codes, dtype))


def _find_region(pages: Pages, side: str) -> tuple[torch.Tensor, torch.dtype]:
    if side == "k":
        return pages.regions["k"], pages.k_dtype
    return pages.regions["v"].mT, pages.v_dtype


def round_up_head_size(head_size: int, format_name: str) -> int:
    return head_size if FORMATS[format_name].bits == 8 else -(-head_size // 4) * 4
