"""Pages with given codes, for tests and benchmarks of the operations."""

import torch
from torch import Tensor

from hf_fp8kv.formats import SidePlan
from hf_fp8kv.ops import Pages, StoredSide
from hf_fp8kv.ops.blocks import locate_pages
from hf_fp8kv.ops.page_layout import make_page_layout, pack_codes


def pack_pages(
    k: StoredSide,
    k_codes: Tensor,
    v: StoredSide,
    v_codes: Tensor,
    token_scales: Tensor | None,
    table: Tensor,
) -> Pages:
    """Copy codes `[P, Hkv, S, Dk]` and `[P, Hkv, Dv, S]`, and dynamic scales, into new pages."""
    num_pages, num_heads, page_size, _ = map(int, k_codes.shape)
    k_dtype = SidePlan(k.format).find_dtype(k_codes.dtype)
    v_dtype = SidePlan(v.format).find_dtype(v_codes.dtype)
    has_scales = token_scales is not None
    layout = make_page_layout(
        num_heads, page_size, k.head_dim, v.head_dim, k_dtype, v_dtype, has_scales
    )
    block = k_codes.new_zeros((num_pages, layout.size), dtype=torch.uint8)
    regions = layout.split(block)
    regions["k"].copy_(pack_codes(k_codes, k_dtype))
    regions["v"].copy_(pack_codes(v_codes.mT, v_dtype).mT)
    if token_scales is not None:
        regions["token_scales"].copy_(token_scales)
    return Pages(
        k,
        v,
        block=block,
        table=table,
        offsets=locate_pages([block]),
        num_heads=num_heads,
        page_size=page_size,
        k_dtype=k_dtype,
        v_dtype=v_dtype,
        has_scales=has_scales,
    )
