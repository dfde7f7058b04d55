"""Attention of a stored prompt over dense copies of its keys and values, if cuDNN is faster."""

import functools

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .api import gather
from .pages import AttentionSpec, Pages

# Minimum number of tokens of a prompt for which cuDNN is preferred.
_MIN_TOKENS = 512
# Maximum head size for which cuDNN was measured.
_MAX_HEAD_DIM = 128
# Maximum size of the dense copies, in bytes: 65,536 tokens of 8 heads of 128.
_MAX_DENSE_BYTES = 1 << 28


def is_dense_faster(query: Tensor, stop: int, pages: Pages, spec: AttentionSpec) -> bool:
    """Return whether `attend_densely` supports a call and should be faster than reading pages.

    On an H200, cuDNN takes 900 us for 8,192 tokens and 32 heads of 128, and the kernel for pages
    1,487 us. The two gathers, about 20 us each by the bandwidth, were not measured.

    Args:
        query: Queries, `[B, Hq, T, D]`.
        stop: Number of tokens of the longest sequence. If it is T, no sequence may be shorter.
        pages: The stored keys and values.
        spec: Parameters of the attention.
    """
    if query.shape[2] < _MIN_TOKENS or not list_sdpa_backends(query, stop):
        return False
    is_only_causal = spec.causal and not spec.window and spec.mask is None and spec.bias is None
    has_plain_softmax = not spec.softcap and spec.sinks is None
    is_supported = not spec.latent and not spec.deterministic and query.element_size() == 2
    head_dims = pages.k.head_dim, pages.v.head_dim
    num_bytes = len(query) * pages.num_heads * stop * sum(head_dims) * query.element_size()
    fits = max(head_dims) <= _MAX_HEAD_DIM and num_bytes <= _MAX_DENSE_BYTES
    return is_only_causal and has_plain_softmax and is_supported and fits


def attend_densely(
    query: Tensor, pages: Pages, lengths: Tensor, spec: AttentionSpec, *, backend: str
) -> Tensor:
    """Return the causal attention of prompts, `[B, T, Hq, D]`. The arguments are as in `attend`.

    Stored values are rounded to the dtype of the queries, unlike in `attend`.
    """
    num_tokens = query.shape[2]
    keys, values = (
        gather(pages, lengths, side, 0, num_tokens, query.dtype, ragged=False, backend=backend)
        for side in "kv"
    )
    with sdpa_kernel(list_sdpa_backends(query, num_tokens), set_priority=True):
        output = scaled_dot_product_attention(
            query, keys, values, is_causal=True, scale=spec.scaling, enable_gqa=True
        )
    # Under autocast, the result has a different dtype.
    return output.transpose(1, 2).to(query.dtype).contiguous()


def list_sdpa_backends(query: Tensor, num_keys: int) -> list[SDPBackend]:
    """Return the backends to try for a causal prompt, in order. [] means torch's default order.

    torch tries FlashAttention-2 first. On an H100 or H200, cuDNN takes half of its time. On other
    GPUs it is often slower, and with gradients it was not measured.
    """
    is_prompt = _MIN_TOKENS <= query.shape[2] == num_keys
    if torch.compiler.is_compiling() or not is_prompt:
        return []
    if torch.is_grad_enabled() or torch.are_deterministic_algorithms_enabled():
        return []
    enabled = {
        SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled(),
        SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: cuda.math_sdp_enabled(),
    }
    if not enabled[SDPBackend.CUDNN_ATTENTION] or _read_capability(query.device) != (9, 0):
        return []
    return [backend for backend, is_enabled in enabled.items() if is_enabled]


@functools.cache
def _read_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU, and None for any other device."""
    if device.type != "cuda" or torch.version.hip:
        return None
    return torch.cuda.get_device_capability(device)
