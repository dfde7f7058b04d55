"""Register the plugin's dtypes and attention in vLLM, depending on its version."""

import functools
from typing import Any

import torch

from .dtypes import DTYPES


def register_dtypes() -> None:
    """Register all dtypes, the attention for CPUs and GPUs, and the names of stored blocks."""
    from vllm.config import cache

    if hasattr(cache, "register_kv_cache_dtype"):
        _register_handlers(cache)
    else:
        _extend_literal()
    _register_attention()
    _rename_models()


def _register_handlers(cache: Any) -> None:
    """Register the names of all dtypes with the hook of vLLM 0.33."""
    from vllm.v1.kv_cache_interface import KVQuantMode

    for name in DTYPES:
        if cache.get_kv_cache_dtype_handler(name) is None:
            cache.register_kv_cache_dtype(name)(_make_handler_class(name, KVQuantMode.NONE))


def _make_handler_class(dtype_name: str, mode: Any) -> type:
    """Return a class with the interface of `KVCacheDTypeHandler`.

    `mode` must be NONE, because no kernel of vLLM reads these bytes. CUSTOM would be wrong, because
    in 0.33.0 its value 12 is also the value of OCTAVE_K3V4, so vLLM would treat it as that format.
    """

    class Handler:
        name = dtype_name

        def torch_dtype(self) -> torch.dtype:
            return torch.uint8

        def quant_mode(self) -> Any:
            return mode

    return Handler


def _extend_literal() -> None:
    """Add the names of all dtypes to the fixed list of vLLM 0.32, which has no hook to extend it.

    The list is a `Literal`, whose members vLLM reads when it parses the command line and selects an
    attention backend. Pydantic has copied them into the validator of `CacheConfig`, which is
    therefore rebuilt.
    """
    from pydantic.dataclasses import rebuild_dataclass
    from vllm.config import cache
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

    literal: Any = cache.CacheDType
    missing_names = tuple(name for name in DTYPES if name not in literal.__args__)
    if missing_names:
        literal.__args__ += missing_names
        rebuild_dataclass(cache.CacheConfig, force=True)
    STR_DTYPE_TO_TORCH_DTYPE.update(dict.fromkeys(DTYPES, torch.uint8))


def _register_attention() -> None:
    """Register `select.py` as vLLM's attention on CPUs, and a new name for GPUs.

    vLLM's CPU platform only accepts the names of its own attention backends.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name in ("CPU_ATTN", "CPU_MLA", "AMX_MLA"):
        if hasattr(AttentionBackendEnum, name):
            register_backend(AttentionBackendEnum[name], f"hf_fp8kv.vllm.select.{name}")
    if not hasattr(AttentionBackendEnum, "HF_FP8KV"):
        register_backend("HF_FP8KV", "hf_fp8kv.vllm.gpu.PagedGPUBackend")


@functools.cache  # a second call would rename twice
def _rename_models() -> None:
    """Make vLLM's factory add a fingerprint of the stored bytes to the model name.

    Connectors receive this name.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    create_connector = KVConnectorFactory.create_connector

    def create_renamed(config: Any, role: Any, kv_cache_config: Any) -> Any:
        from .connectors import rename_model

        return create_connector(rename_model(config, kv_cache_config), role, kv_cache_config)

    KVConnectorFactory.create_connector = staticmethod(create_renamed)
