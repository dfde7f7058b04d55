"""View vLLM's blocks as pages with the layout of `ops.page_layout`.

vLLM clears, copies, offloads and sends blocks as contiguous bytes, and groups of layers share one
pool. K, V and scales of a page must therefore be in the same block.
"""

import torch

from ..errors import ConfigError
from ..ops import Pages
from ..serving.layout import EngineLayout

BLOCK_SIZES = (16, 32, 64, 128, 256, 512, 1024)  # supported numbers of tokens per block


def check_block_size(block_size: int) -> None:
    """Raise ConfigError unless a block has a power of two from 16 to 1024 tokens."""
    if block_size not in BLOCK_SIZES:
        raise ConfigError(
            f"--block-size: expected a power of two from 16 to 1024 tokens, got {block_size}. "
            "Use --block-size 64"
        )


def view_pages(kv_cache: torch.Tensor, layout: EngineLayout) -> Pages:
    """View one layer's part of vLLM's pool as pages.

    `kv_cache` is vLLM's view of this part, `[P, Hkv, S, C]`. Its elements are bytes, and C is the
    number of bytes of a token and head. Each block must be contiguous, and may end with unused
    bytes.

    Raises:
        ConfigError: The blocks have gaps, or are smaller than pages.
    """
    block_bytes = kv_cache[:1].numel()
    if layout.bytes_per_page > block_bytes or not kv_cache[:1].is_contiguous():
        raise ConfigError(
            f"expected blocks of at least {layout.bytes_per_page} bytes without gaps, got "
            f"{block_bytes} bytes with the strides {kv_cache.stride()}. Unset VLLM_KV_CACHE_LAYOUT"
        )
    shape = (len(kv_cache), block_bytes)
    strides = (kv_cache.stride(0), 1)
    return layout.view_block(kv_cache.view(torch.uint8).as_strided(shape, strides))
