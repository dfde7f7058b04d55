"""vLLM's blocks as pages: each block is a page, and all of its bytes are in the block.

vLLM clears, copies, offloads and sends blocks as runs of bytes, and groups of layers lie over each
other in one pool. So K, V and scales of a block stay together: `ops.page_bytes`.
"""

import torch

from ..errors import ConfigError
from ..formats import LayerPlan
from ..ops import StoredSide
from ..ops.blocks import address_pages
from ..ops.page_bytes import page_bytes
from ..serving.layout import LayerPages


def check_block_size(slots: int) -> None:
    """Raise ConfigError for blocks of a number of tokens that pages cannot have."""
    if slots & (slots - 1) or not 16 <= slots <= 1024:
        raise ConfigError(
            f"--block-size: expected a power of two from 16 to 1024 tokens, got blocks of {slots}; "
            "use --block-size 64"
        )


def view_pages(
    kv_cache: torch.Tensor, dim: int, plan: LayerPlan, *, dynamic: bool, backend: str
) -> LayerPages:
    """Return the pages that are in one layer's part of vLLM's pool.

    Args:
        kv_cache: `[P, Hkv, S, C]`, of one byte each, C bytes a token and head: vLLM's view, without
            gaps in a block.
        dim: D, of K and of V.
        plan: of the layer; scales come with `LayerPages.stored_as`.
        dynamic: whether slots have scales.
        backend: which operations will read them, a key of `BACKENDS`.

    Raises:
        ConfigError: blocks of a layout that cannot be pages.
    """
    blocks, heads, slots, _ = kv_cache.shape
    layout = page_bytes(heads, slots, dim, dim, torch.uint8, torch.uint8, dynamic)
    size = kv_cache[:1].numel()
    if layout.size != size or not kv_cache[:1].is_contiguous():
        raise ConfigError(
            f"expected blocks of {layout.size} bytes without gaps, got {size} in strides "
            f"{kv_cache.stride()}; leave VLLM_KV_CACHE_LAYOUT out"
        )
    memory = kv_cache.view(torch.uint8).as_strided((blocks, size), (kv_cache.stride(0), 1))
    parts = layout.split(memory)
    # The kernels for GPUs know a page by its address, the others by its stride.
    addresses = address_pages([memory]) if backend == "triton" else None
    return LayerPages(
        StoredSide(parts["k"], None, None, plan.k.format, dim, plan.k.rotated),
        StoredSide(parts["v"], None, None, plan.v.format, dim, plan.v.rotated),
        parts.get("token_scales"),
        addresses,
    )
