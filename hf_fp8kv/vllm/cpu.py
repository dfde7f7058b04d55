"""Attention on vLLM's CPU platform: our pages for our dtypes, vLLM's own for every other one."""

from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig, get_current_vllm_config, get_layers_from_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionImpl, AttentionMetadataBuilder, AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from .dtypes import DTYPES
from .layers import BoundLayer, bind_layers, refuse_unsupported
from .specs import customize
from .step import plan_step
from .storage import read_storage


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


class PagedCPUImpl(AttentionImpl):  # type: ignore[misc]
    """The attention of one layer. For another dtype than ours an instance is vLLM's own."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an attention of ours, or vLLM's."""
        given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        kind = given.get("attn_type") or AttentionType.DECODER
        if given["kv_cache_dtype"] not in DTYPES or kind in _WITHOUT_CACHE:
            return CPUAttentionBackendImpl(*args, **kwargs)
        return super().__new__(cls)

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        refuse_unsupported(kv_cache_dtype, attn_type, alibi_slopes)
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.scale, self.kv_cache_dtype = float(scale), kv_cache_dtype
        self.sliding_window, self.softcap = sliding_window or 0, logits_soft_cap or 0.0
        self.sinks, self.shares = sinks, kv_sharing_target_layer_name is not None
        config = get_current_vllm_config()
        # Here already, so that what cannot be is refused before weights are loaded.
        self.model = read_storage(
            kv_cache_dtype, config.additional_config, config.model_config.model,
            get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size(),
        )  # fmt: skip
        self.bound: BoundLayer | None = None

    def do_kv_cache_update(self, *_: Any) -> None:
        """Do nothing: `forward` stores keys and values and attends in one call."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store keys and values `[N, Hkv, D]`; write the attention of `[N, Hq, D]` to `output`."""
        if attn_metadata is None:  # while vLLM measures memory
            return output
        assert output_scale is None  # this kind of attention does not say that it can scale
        assert output_block_scale is None
        assert self.bound is not None
        if self.shares:
            key = value = None
        self.bound.attend(
            query, key, value, kv_cache, attn_metadata.work, output,
            scaling=self.scale, softcap=self.softcap, sinks=self.sinks, reach=self.sliding_window,
        )  # fmt: skip
        return output


class PagedMetadata:
    """The operations of a step, for a group of layers."""

    def __init__(self, work: Any) -> None:
        self.work = work


class PagedCPUBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
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

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        bind_layers(layers, vllm_config, kv_cache_spec.block_size, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> PagedMetadata:
        """Return the operations of a step."""
        common = common_attn_metadata
        requests = common.num_reqs
        lengths = common.seq_lens[:requests].to(torch.int32)
        starts = common.query_start_loc_cpu[: requests + 1].numpy()
        return PagedMetadata(
            plan_step(
                starts, lengths, common.block_table_tensor[:requests], common.slot_mapping,
                self.kv_cache_spec.block_size, int(lengths.max()) if requests else 0,
            )
        )  # fmt: skip


# What vLLM passes by position to an attention of a layer.
_ARGUMENTS = (
    "num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window",
    "kv_cache_dtype", "logits_soft_cap", "attn_type", "kv_sharing_target_layer_name",
)  # fmt: skip
_WITHOUT_CACHE = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
