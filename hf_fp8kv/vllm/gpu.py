"""Attention on GPUs, as vLLM's HF_FP8KV: our Triton kernels over vLLM's blocks.

    vllm serve MODEL --kv-cache-dtype hf_fp8kv_e3m4 --attention-backend HF_FP8KV

This has never run: vLLM on a GPU was not at hand. Its kernels are compiled and interpreted in our
tests, and the code around them is what runs on a CPU. CUDA graphs hold steps that only decode
whole, and else the model around attention (vLLM's FULL_AND_PIECEWISE), since prompts are split on
the host into sets of about the same length.
"""

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport
from vllm.v1.kv_cache_layout import KVCacheLayout

from .dtypes import DTYPES
from .layers import PagedBuilder, PagedImpl
from .specs import customize

NAME = "HF_FP8KV"
# Tokens of a block: a power of two, of which 64 is what kernels are tuned for.
_BLOCK_SIZES = (16, 32, 64, 128, 256, 512, 1024)
_PREFERRED = 64


class PagedGPUBuilder(PagedBuilder):
    """What prepares a step."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )
    _holds_graphs: ClassVar[bool] = True


class PagedGPUBackend(AttentionBackend):  # type: ignore[misc]
    """What vLLM selects by `--attention-backend HF_FP8KV`."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(DTYPES)
    # Writing and reading a step are one call.
    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_name() -> str:
        """Return the name under which it is registered."""
        return NAME

    @staticmethod
    def get_impl_cls() -> type[PagedImpl]:
        """Return what makes the attention of a layer."""
        return PagedImpl

    @staticmethod
    def get_builder_cls() -> type[PagedGPUBuilder]:
        """Return what prepares a step."""
        return PagedGPUBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Return the tokens that a page may have."""
        return list(_BLOCK_SIZES)

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Return the tokens of a block where nobody asks for others."""
        return _PREFERRED

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Return the spec with the bytes of our slots."""
        return customize(spec)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return the layouts in which the bytes of a layer's block are side by side."""
        return (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)

    @classmethod
    def supports_sink(cls) -> bool:
        """Return True: one more logit per head."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Return True: kernels begin at the first visible page."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Return False: steps are planned from the tokens of requests on the host."""
        return False

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """Return True: of a checkpoint that has some."""
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Return whether kernels fit: GPUs before sm_80 have too little shared memory."""
        return bool(capability >= (8, 0))
