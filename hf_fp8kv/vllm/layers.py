"""Attention of vLLM's layers over pages in vLLM's pool, shared by all platforms."""

from functools import partial
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.config import VllmConfig, get_current_vllm_config, get_layers_from_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionImpl, AttentionMetadataBuilder, AttentionType

from ..cache.options import check_supported_page_size
from ..errors import ConfigError
from ..ops import AttentionSpec, choose_backend
from ..serving.attend import StoredLayer
from ..serving.config import make_layer_storage
from .connectors import check_connector
from .scheduler_step import StepMetadata, is_decoding, make_masked_decode_work, plan_step
from .specs import customize_backend
from .storage import check_scales, count_slot_bytes, make_layout, read_options, view_pages


def refuse_unsupported(dtype_name: str, attn_type: str, alibi_slopes: object, config: Any) -> None:
    """Raise ConfigError for attention that pages do not support. `config` is a VllmConfig."""
    _refuse_features(
        dtype_name,
        (f"attention of type {attn_type!r}", attn_type != "decoder"),
        ("ALiBi", alibi_slopes is not None),
        ("attention that is not causal", config.attention_config.use_non_causal),
        # With this option, host copies of a step's sizes may not have arrived from the device.
        ("--kv-sharing-fast-prefill", config.cache_config.kv_sharing_fast_prefill),
    )
    if (transfer := config.kv_transfer_config) is not None:
        check_connector(transfer.kv_connector, transfer.kv_connector_extra_config)


def refuse_spec(dtype_name: str, spec: Any) -> None:
    """Raise ConfigError if vLLM's spec of a layer's cache does not fit pages."""
    _refuse_features(
        dtype_name,
        # Other specs have pages in which a token has no slot, or to which vLLM itself writes.
        (f"pages of type {type(spec).__name__}", type(spec).__name__ not in _SUPPORTED_SPECS),
        ("attention that is not causal", getattr(spec, "non_causal", False)),
        ("values whose size differs from keys", spec.head_size != spec.head_size_v),
    )


def _refuse_features(dtype_name: str, *features: tuple[str, bool]) -> None:
    for feature, is_present in features:
        if is_present:
            raise ConfigError(
                f"--kv-cache-dtype {dtype_name}: expected attention that FP8 pages support, got "
                f"{feature}. Serve this model with --kv-cache-dtype auto"
            )


# vLLM's specs for pages in which each token has a slot.
_SUPPORTED_SPECS = ("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")


class PagedImpl(AttentionImpl):  # type: ignore[misc]
    """Attention of one layer over pages."""

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
        config = get_current_vllm_config()
        refuse_unsupported(kv_cache_dtype, attn_type, alibi_slopes, config)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.kv_cache_dtype = kv_cache_dtype
        self.sliding_window = sliding_window or 0
        self.softcap = logits_soft_cap or 0.0
        self.sinks = sinks
        self.shares_pages = kv_sharing_target_layer_name is not None
        # The options are read here, so that invalid options fail before the weights are loaded.
        self.options = read_options(
            kv_cache_dtype,
            config.additional_config,
            config.model_config.model,
            tp_rank=get_tensor_model_parallel_rank(),
            tp_size=get_tensor_model_parallel_world_size(),
            revision=config.model_config.revision,
            engine=config.instance_id,
        )
        text_config = config.model_config.hf_text_config
        # Calibration of a model that reads images stores the type of the whole model.
        hf_configs = (text_config, config.model_config.hf_config)
        model_types = [part.model_type for part in hf_configs if hasattr(part, "model_type")]
        check_scales(self.options, text_config.num_hidden_layers, model_types)
        # vLLM's layers by name, which do not contain the layer of this object yet.
        self._layers = config.compilation_config.static_forward_context
        self._viewed_tensor: torch.Tensor | None = None  # the tensor that `_stored_layer` views

    def bind(self, index: int, dtype: torch.dtype, device: torch.device) -> None:
        """Set the storage of layer `index` of a model of this dtype, on the device of the pool."""
        options = self.options
        if device.type != "cpu" and options.backend not in ("auto", "triton"):
            # CUDA graphs are padded with rows without a request, which only Triton's kernels skip.
            raise ConfigError(
                f"--additional-config hf_fp8kv.backend: expected triton on a GPU, got "
                f"{options.backend!r}. Omit the backend"
            )
        self._storage = make_layer_storage(
            options, index, self.num_kv_heads, self.head_size, device
        )
        self._backend = choose_backend(options.backend, device)
        self._make_layout = partial(
            make_layout, options, index, self.num_kv_heads, self.head_size, dtype=dtype
        )

    def view_stored_layer(self, kv_cache: torch.Tensor) -> StoredLayer:
        """Return the layer with its pages, which are views of this tensor of vLLM's pool."""
        if self._viewed_tensor is not kv_cache:
            layout = self._make_layout(page_size=kv_cache.shape[2])
            pages = view_pages(kv_cache, layout)
            self._stored_layer = StoredLayer(pages, self._storage, layout, self._backend)
            self._viewed_tensor = kv_cache
        return self._stored_layer

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Set the size of this layer's slots, which vLLM then reads from the layer's backend.

        `act_dtype` is the dtype of the model.
        """
        slot_bytes: dict[Any, int] = {}  # by layer
        for name, layer in self._layers.items():
            if (
                isinstance(layer, Attention)
                and layer.kv_cache_dtype == self.kv_cache_dtype
                and layer.attn_type == AttentionType.DECODER
                and layer.kv_sharing_target_layer_name is None
            ):
                index = extract_layer_index(name)
                slot_bytes[layer] = count_slot_bytes(
                    self.options, index, layer.head_size, act_dtype
                )
        has_several_windows = len({layer.sliding_window for layer in slot_bytes}) > 1
        for layer, num_bytes in slot_bytes.items():
            backend_class = layer.attn_backend
            # The class has the attribute if weights are loaded again.
            if layer.impl is self and not hasattr(backend_class, "slot"):
                all_bytes = set(slot_bytes.values()) if has_several_windows else {num_bytes}
                layer.attn_backend = customize_backend(
                    backend_class, num_bytes, frozenset(all_bytes)
                )

    def do_kv_cache_update(self, *_: Any) -> None:
        """Do nothing, because `forward` stores keys and values and attends in one call."""

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
        """Store keys and values `[N, Hkv, D]`, and write attention of `[N, Hq, D]` to `output`."""
        if attn_metadata is None:  # while vLLM measures memory
            return output
        assert output_scale is None  # this class does not declare support for scaled outputs
        assert output_block_scale is None
        spec = AttentionSpec(
            self.scale,
            True,
            self.sliding_window,
            self.softcap,
            self.sinks,
            deterministic=envs.VLLM_BATCH_INVARIANT,
        )
        # A layer that shares the pages of another layer stores nothing.
        keys, values = (
            None if states is None or self.shares_pages else states.transpose(0, 1)[None]
            for states in (key, value)
        )
        out = output.view(1, *query.shape)
        stored_layer = self.view_stored_layer(kv_cache)
        stored_layer.attend(
            query.transpose(0, 1)[None], keys, values, attn_metadata.work, spec, out
        )
        return output


class PagedBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Builds the metadata of a step for a group of layers, without synchronizing with a GPU."""

    # Whether decode steps consist of device tensors only, so that CUDA graphs can capture them.
    _supports_cuda_graphs: ClassVar[bool] = False

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any
    ) -> None:
        # In a class with two bases, `super()` would be vLLM's builder for its own kernels.
        AttentionMetadataBuilder.__init__(self, kv_cache_spec, layer_names, vllm_config, device)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        self._dtype_name = next(iter(layers.values())).kv_cache_dtype
        refuse_spec(self._dtype_name, kv_cache_spec)
        check_supported_page_size(kv_cache_spec.block_size, "--block-size", "Use --block-size 64")
        dtype = vllm_config.model_config.dtype
        for name, layer in layers.items():
            # A layer that reads the pages of another layer has the same storage.
            owner = layer.kv_sharing_target_layer_name or name
            layer.impl.bind(extract_layer_index(owner), dtype, torch.device(device))

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> StepMetadata:
        """Return the metadata of a step, which makes its operations."""
        metadata = common_attn_metadata
        block_size = self.kv_cache_spec.block_size
        _refuse_features(
            self._dtype_name, ("attention that is not causal", metadata.causal is not True)
        )
        num_requests = metadata.num_reqs
        lengths = metadata.seq_lens[:num_requests].to(torch.int32)
        table = metadata.block_table_tensor[:num_requests]
        slot_mapping = metadata.slot_mapping
        starts = metadata.query_start_loc_cpu[: num_requests + 1].numpy()
        if self._supports_cuda_graphs and is_decoding(starts):
            make_work = partial(make_masked_decode_work, lengths, table, slot_mapping, block_size)
            return StepMetadata(make_work)
        # The step is planned now, because vLLM writes the next step to the same host memory.
        work = plan_step(
            starts, lengths, table, slot_mapping, block_size, max_length=metadata.max_seq_len
        )
        return StepMetadata(lambda: work)
