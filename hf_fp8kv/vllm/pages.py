"""View vLLM's blocks as pages with the layout of `ops.page_layout`.

vLLM clears, copies, offloads and sends blocks as contiguous bytes, and groups of layers share one
pool. K, V and scales of a page must therefore be in the same block.
"""

import torch

from ..errors import ConfigError
from ..ops import Pages
from ..serving.layout import EngineLayout


def check_block_size(block_size: int) -> None:
    """Raise ConfigError for a number of tokens per block that pages do not support."""
    if block_size & (block_size - 1) or not 16 <= block_size <= 1024:
        raise ConfigError(
            f"--block-size: expected a power of two from 16 to 1024 tokens, got {block_size}. "
            "Use --block-size 64"
        )


def view_pages(kv_cache: torch.Tensor, layout: EngineLayout) -> Pages:
    """Return the pages in one layer's part of vLLM's pool.

    `kv_cache` is vLLM's view `[P, Hkv, S, C]` with elements of one byte, and C bytes per token and
    head. Each block must be contiguous.

    Raises:
        ConfigError: The layout of the blocks does not fit pages.
    """
    num_bytes = kv_cache[:1].numel()
    if layout.bytes_per_page != num_bytes or not kv_cache[:1].is_contiguous():
        raise ConfigError(
            f"expected blocks of {layout.bytes_per_page} bytes without gaps, got {num_bytes} in "
            f"strides {kv_cache.stride()}. Unset VLLM_KV_CACHE_LAYOUT"
        )
    shape, strides = (len(kv_cache), num_bytes), (kv_cache.stride(0), 1)
    return layout.view_block(kv_cache.view(torch.uint8).as_strided(shape, strides))
