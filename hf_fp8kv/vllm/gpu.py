"""The attention backend HF_FP8KV for GPUs, which runs this package's kernels on vLLM's blocks.

    vllm serve MODEL --kv-cache-dtype hf_fp8kv_e3m4 --attention-backend HF_FP8KV

This code has never run on a GPU, because no GPU with vLLM was available. The tests compile and
interpret its kernels, and run the remaining code on a CPU. CUDA graphs capture whole decode steps,
but no attention of other steps (vLLM's FULL_AND_PIECEWISE), because the host groups prompts.
"""

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport
from vllm.v1.kv_cache_layout import KVCacheLayout

from .dtypes import DTYPES
from .layers import PagedBuilder, PagedImpl


class PagedGPUBuilder(PagedBuilder):
    """Builds the metadata of a step on a GPU."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )
    _supports_cuda_graphs: ClassVar[bool] = True


class PagedGPUBackend(AttentionBackend):  # type: ignore[misc]
    """The backend of `--attention-backend HF_FP8KV`."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(DTYPES)
    # `forward` also stores the keys and values of a step.
    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_name() -> str:
        return "HF_FP8KV"

    @staticmethod
    def get_impl_cls() -> type[PagedImpl]:
        return PagedImpl

    @staticmethod
    def get_builder_cls() -> type[PagedGPUBuilder]:
        return PagedGPUBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [16, 32, 64, 128, 256, 512, 1024]  # tokens per block

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return 64  # tokens per block, for which the kernels are tuned

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)  # a layer's block is contiguous

    @classmethod
    def supports_sink(cls) -> bool:
        return True  # sinks are an extra logit per head

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True  # kernels begin at the first visible page

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True  # `forward` sets `AttentionSpec.deterministic` in this mode of vLLM

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # steps are planned on the host from the requests' tokens

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True  # static scales of a checkpoint may differ by head

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability >= (8, 0))  # earlier GPUs have too little shared memory
