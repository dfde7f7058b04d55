"""Attention on vLLM's CPU platform: our pages for our dtypes, vLLM's own for every other one."""

from typing import Any, ClassVar

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
from .specs import customize


class PagedCPUBackend(CPUAttentionBackend):  # type: ignore[misc]
    """What vLLM asks for as CPU_ATTN."""

    # Writing and reading a step are one call here; the stock attention is called so, too.
    forward_includes_kv_cache_update: bool = False

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        """Return whether a dtype is ours, or one of vLLM's."""
        stock: bool = super().supports_kv_cache_dtype(kv_cache_dtype)
        return kv_cache_dtype in DTYPES or stock

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Return the spec with the bytes of our slots."""
        return customize(super().customize_spec(spec))

    @staticmethod
    def get_impl_cls() -> type["PagedCPUImpl"]:
        """Return what makes the attention of a layer."""
        return PagedCPUImpl

    @staticmethod
    def get_builder_cls() -> type["PagedCPUBuilder"]:
        """Return what prepares a step."""
        return PagedCPUBuilder


class PagedCPUImpl(PagedImpl):
    """The attention of one layer. For another dtype than ours an instance is vLLM's own."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an attention of ours, or vLLM's."""
        given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        kind = given.get("attn_type") or AttentionType.DECODER
        if given["kv_cache_dtype"] not in DTYPES or kind in _WITHOUT_CACHE:
            return CPUAttentionBackendImpl(*args, **kwargs)
        return super().__new__(cls)


class PagedCPUBuilder(PagedBuilder):
    """What prepares a step for a group of layers; for layers that are not ours vLLM's own."""

    _stock: ClassVar[type] = CPUAttentionMetadataBuilder

    def __new__(
        cls, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any
    ) -> Any:
        """Return a builder of ours, or vLLM's."""
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        if not any(isinstance(layer.impl, PagedCPUImpl) for layer in layers.values()):
            return cls._stock(kv_cache_spec, layer_names, vllm_config, device)
        return super().__new__(cls)


# What vLLM passes by position to an attention of a layer.
_ARGUMENTS = (
    "num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window",
    "kv_cache_dtype", "logits_soft_cap", "attn_type", "kv_sharing_target_layer_name",
)  # fmt: skip
_WITHOUT_CACHE = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
