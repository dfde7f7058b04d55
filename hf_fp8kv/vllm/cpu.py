"""Attention on vLLM's CPU platform: our pages for our dtypes, vLLM's own for every other one."""

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


class PagedCPUImpl(PagedImpl, CPUAttentionBackendImpl):  # type: ignore[misc]
    """The attention of one layer; of one without our dtype or a cache it is vLLM's own.

    It and the builder are both by inheritance, since vLLM derives classes from them: for chunked
    and for bidirectional attention.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        ours = given["kv_cache_dtype"] in DTYPES
        if ours and given.get("attn_type", AttentionType.DECODER) in _WITHOUT_CACHE:
            ours, given["kv_cache_dtype"] = False, "auto"
        self._kind: Any = PagedImpl if ours else CPUAttentionBackendImpl
        self._kind.__init__(self, **given)

    @property
    def is_paged(self) -> bool:
        """Return whether keys and values are in our pages."""
        return self._kind is PagedImpl

    def do_kv_cache_update(self, *args: Any, **kwargs: Any) -> None:
        """Store keys and values, if they are in vLLM's own pages."""
        self._kind.do_kv_cache_update(self, *args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Write the attention to `output`; see `PagedImpl.forward`."""
        result: torch.Tensor = self._kind.forward(self, *args, **kwargs)
        return result


class PagedCPUBuilder(PagedBuilder, CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """What prepares a step for a group of layers; for layers that are not ours as vLLM does it."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any
    ) -> None:
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names).values()
        ours = any(isinstance(x.impl, PagedCPUImpl) and x.impl.is_paged for x in layers)
        self._kind: Any = PagedBuilder if ours else CPUAttentionMetadataBuilder
        self._kind.__init__(self, kv_cache_spec, layer_names, vllm_config, device)

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Return the operations of a step, or vLLM's metadata of it."""
        return self._kind.build(self, *args, **kwargs)


# What vLLM passes by position to an attention of a layer.
_ARGUMENTS = (
    "num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window",
    "kv_cache_dtype", "logits_soft_cap", "attn_type", "kv_sharing_target_layer_name",
)  # fmt: skip
_WITHOUT_CACHE = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
