"""Attention on vLLM's CPU platform, by the plugin for its own dtypes, otherwise by vLLM."""

from typing import Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from .dtypes import DTYPES
from .layers import PagedBuilder, PagedImpl


class PagedCPUBackend(CPUAttentionBackend):  # type: ignore[misc]
    """vLLM's backend CPU_ATTN, extended by the plugin's dtypes."""

    # vLLM calls `do_kv_cache_update` before `forward`, as for its own attention on CPUs.
    forward_includes_kv_cache_update: bool = False

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        is_stock_dtype: bool = super().supports_kv_cache_dtype(kv_cache_dtype)
        return kv_cache_dtype in DTYPES or is_stock_dtype

    @staticmethod
    def get_impl_cls() -> type["PagedCPUImpl"]:
        return PagedCPUImpl

    @staticmethod
    def get_builder_cls() -> type["PagedCPUBuilder"]:
        return PagedCPUBuilder


class PagedCPUImpl(PagedImpl, CPUAttentionBackendImpl):  # type: ignore[misc]
    """The attention of a layer. With other dtypes, or without a cache, it is vLLM's attention.

    This class and the builder inherit from both implementations, because vLLM derives classes from
    them for chunked and for bidirectional attention.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        arguments = dict(zip(_POSITIONAL_NAMES, args, strict=False)) | kwargs
        is_paged = arguments["kv_cache_dtype"] in DTYPES
        if is_paged and arguments.get("attn_type", AttentionType.DECODER) in _CACHELESS_TYPES:
            is_paged = False
            arguments["kv_cache_dtype"] = "auto"
        self._base_class: Any = PagedImpl if is_paged else CPUAttentionBackendImpl
        self._base_class.__init__(self, **arguments)

    @property
    def is_paged(self) -> bool:
        """Whether the plugin, not vLLM, stores keys and values."""
        return self._base_class is PagedImpl

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Set the size of this layer's slots, if the plugin stores keys and values."""
        self._base_class.process_weights_after_loading(self, act_dtype)

    def do_kv_cache_update(self, *args: Any, **kwargs: Any) -> None:
        """Store keys and values with vLLM's code. The plugin stores them in `forward` instead."""
        self._base_class.do_kv_cache_update(self, *args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Write the attention to `output`, like `PagedImpl.forward`."""
        output: torch.Tensor = self._base_class.forward(self, *args, **kwargs)
        return output


class PagedCPUBuilder(PagedBuilder, CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """Prepares a step for a group of layers. With vLLM's own dtypes, it is vLLM's builder."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any
    ) -> None:
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names).values()
        is_paged = any(
            isinstance(layer.impl, PagedCPUImpl) and layer.impl.is_paged for layer in layers
        )
        self._base_class: Any = PagedBuilder if is_paged else CPUAttentionMetadataBuilder
        self._base_class.__init__(self, kv_cache_spec, layer_names, vllm_config, device)

    def build(self, *args: Any, **kwargs: Any) -> Any:
        return self._base_class.build(self, *args, **kwargs)


# Names of the arguments that vLLM passes by position to `CPUAttentionBackendImpl`.
_POSITIONAL_NAMES = (
    "num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window",
    "kv_cache_dtype", "logits_soft_cap", "attn_type", "kv_sharing_target_layer_name",
)  # fmt: skip
_CACHELESS_TYPES = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
