"""Pages in blocks of memory, made of pages in one tensor, and back."""

import torch

from hf_fp8kv.ops import Pages
from hf_fp8kv.ops.blocks import address_pages, take_pages
from hf_fp8kv.ops.page_bytes import layout_of


def in_blocks(pages: Pages, size: int = 3, device: torch.device | None = None) -> Pages:
    """The same pages in blocks of `size` pages, in no order of their addresses, and on `device`."""
    layout, count = layout_of(pages), len(pages.k.codes)
    device = device or pages.table.device
    # What is between pages is never to be read as a number.
    blocks = [
        torch.full((min(size, count - start), layout.size), 0xFF, dtype=torch.uint8, device=device)
        for start in range(0, count, size)
    ]
    if len(blocks) > 2:
        one, other = len(blocks) - 1, 0
        if blocks[one].shape == blocks[other].shape:
            blocks[one], blocks[other] = blocks[other], blocks[one]
    start = 0
    for block in blocks:
        stop = start + len(block)
        parts = layout.split(block)
        parts["k"].copy_(pages.k.codes[start:stop])
        parts["v"].copy_(pages.v.codes[start:stop])
        if pages.token_scales is not None:
            parts["token_scales"].copy_(pages.token_scales[start:stop])
        start = stop
    return _shaped_as(pages, blocks[0])._replace(
        addresses=address_pages(blocks), table=pages.table.to(device)
    )


def _shaped_as(pages: Pages, block: torch.Tensor) -> Pages:
    parts = layout_of(pages).split(block)
    return pages._replace(
        k=pages.k._replace(codes=parts["k"]),
        v=pages.v._replace(codes=parts["v"]),
        token_scales=parts.get("token_scales"),
    )


def in_one_tensor(pages: Pages) -> Pages:
    """The same pages, by the same numbers, without blocks."""
    assert pages.addresses is not None
    blocks = vars(pages.addresses)["blocks"]
    count = sum(len(block) for block in blocks)
    rows = take_pages(blocks, torch.arange(count).numpy())
    whole = _shaped_as(pages, rows)
    return whole._replace(
        k=whole.k._replace(codes=whole.k.codes.contiguous()),
        v=whole.v._replace(codes=whole.v.codes.contiguous()),
        token_scales=None if whole.token_scales is None else whole.token_scales.contiguous(),
        addresses=None,
    )
