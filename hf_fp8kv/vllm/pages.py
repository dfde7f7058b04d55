"""vLLM's blocks as pages: each block is a page, and all of its bytes are in the block.

vLLM clears, copies, offloads and sends blocks as runs of bytes, and groups of layers lie over each
other in one pool. So K, V and scales of a block stay together: `ops.page_layout`.
"""

import torch

from ..errors import ConfigError
from ..ops import Pages
from ..serving.layout import EnginePages


def check_block_size(slots: int) -> None:
    """Raise ConfigError for blocks of a number of tokens that pages cannot have."""
    if slots & (slots - 1) or not 16 <= slots <= 1024:
        raise ConfigError(
            f"--block-size: expected a power of two from 16 to 1024 tokens, got blocks of {slots}; "
            "use --block-size 64"
        )


def view_pages(kv_cache: torch.Tensor, kind: EnginePages) -> Pages:
    """Return the pages that are in one layer's part of vLLM's pool.

    `kv_cache` is `[P, Hkv, S, C]`, of one byte each, C bytes a token and head: vLLM's view, without
    gaps in a block.

    Raises:
        ConfigError: blocks of a layout that cannot be pages.
    """
    size = kv_cache[:1].numel()
    if kind.bytes_per_page != size or not kv_cache[:1].is_contiguous():
        raise ConfigError(
            f"expected blocks of {kind.bytes_per_page} bytes without gaps, got {size} in strides "
            f"{kv_cache.stride()}; leave VLLM_KV_CACHE_LAYOUT out"
        )
    block = kv_cache.view(torch.uint8).as_strided((len(kv_cache), size), (kv_cache.stride(0), 1))
    return kind.view(block)
