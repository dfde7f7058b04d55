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
        """Return the registered name."""
        return "HF_FP8KV"

    @staticmethod
    def get_impl_cls() -> type[PagedImpl]:
        """Return the class for the attention of a layer."""
        return PagedImpl

    @staticmethod
    def get_builder_cls() -> type[PagedGPUBuilder]:
        """Return the class that prepares a step."""
        return PagedGPUBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Return the supported numbers of tokens per block."""
        return [16, 32, 64, 128, 256, 512, 1024]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Return the default number of tokens per block."""
        return 64  # kernels are tuned for this number

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return the layouts in which a layer's block is contiguous."""
        return (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)

    @classmethod
    def supports_sink(cls) -> bool:
        """Return True, because kernels support sinks, an extra logit per head."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Return True, because kernels begin at the first visible page."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Return True, because `AttentionSpec.deterministic` is set in this mode of vLLM."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Return False, because steps are planned on the host from the requests' tokens."""
        return False

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """Return True, because static scales of a checkpoint may differ by head."""
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Return whether the GPU has enough shared memory, which requires sm_80 or later."""
        return bool(capability >= (8, 0))
