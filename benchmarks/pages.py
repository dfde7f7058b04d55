"""Make pages of given codes, for benchmarks and tests."""

import torch
from torch import Tensor

from hf_fp8kv.ops import Pages, StoredSide
from hf_fp8kv.ops.blocks import locate_pages
from hf_fp8kv.ops.page_layout import make_page_layout


def pack_pages(
    k: StoredSide, k_codes: Tensor, v: StoredSide, v_codes: Tensor, token_scales: Tensor | None,
    table: Tensor,
) -> Pages:  # fmt: skip
    """Copy codes `[P, Hkv, S, Dk]` and `[P, Hkv, Dv, S]`, and dynamic scales, into new pages."""
    num_pages, num_heads, page_size, _ = map(int, k_codes.shape)
    has_scales = token_scales is not None
    layout = make_page_layout(
        num_heads, page_size, k.head_dim, v.head_dim, k_codes.dtype, v_codes.dtype, has_scales
    )
    block = k_codes.new_zeros((num_pages, layout.size), dtype=torch.uint8)
    for name, region in layout.split(block).items():
        codes = {"k": k_codes, "v": v_codes, "token_scales": token_scales}[name]
        assert codes is not None
        region.copy_(codes)
    return Pages(
        k, v, block, table, locate_pages([block]), num_heads, page_size, k_codes.dtype,
        v_codes.dtype, has_scales,
    )  # fmt: skip
