"""Paged attention over 8-bit keys and values: Triton kernels that write, attend and gather.

Generated from hf_fp8kv. `Pages` describes the stored bytes, and `AttentionSpec` the attention to
compute. `new_pages` allocates empty pages.
"""

import torch

from .formats import AUTO, FORMATS
from .ops.page_layout import make_page_layout
from .ops.pages import AttentionSpec, Pages, StoredSide
from .ops.triton.backend import attend, count_schedule_rows, fill_schedule, gather, write

__all__ = [
    "AUTO",
    "FORMATS",
    "AttentionSpec",
    "Pages",
    "StoredSide",
    "attend",
    "count_schedule_rows",
    "fill_schedule",
    "gather",
    "new_pages",
    "write",
]


def new_pages(
    table: torch.Tensor,
    pages: int,
    heads: int,
    head_dim: int,
    *,
    page_size: int = 64,
    format: str = "fp8_e3m4",
    rotated: bool = False,
) -> Pages:
    """Return empty pages with dynamic scales for one layer.

    `table` is `[B, M]`, int32. Each row holds the page numbers of a sequence, all below `pages`.
    """
    if format not in FORMATS:
        raise ValueError(f"format: expected one of {', '.join(FORMATS)}, got {format!r}")
    code_dtype, side = torch.uint8, StoredSide(None, None, format, head_dim, rotated)
    page_bytes = make_page_layout(
        heads, page_size, head_dim, head_dim, code_dtype, code_dtype, True
    ).size
    block = torch.zeros(pages, page_bytes, dtype=code_dtype, device=table.device)
    offsets = torch.arange(0, pages * page_bytes, page_bytes, device=table.device)
    return Pages(side, side, block, table, offsets, heads, page_size, code_dtype, code_dtype, True)
