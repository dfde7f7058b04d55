"""Making vLLM know our dtypes and attention, by the means that its version has."""

from typing import Any

import torch

from .dtypes import DTYPES, CacheDType

_CPU_BACKENDS = "hf_fp8kv.vllm.select"
_GPU_NAME, _GPU_BACKEND = "HF_FP8KV", "hf_fp8kv.vllm.gpu.PagedGPUBackend"


def register_dtypes() -> None:
    """Register all dtypes, the attention of the CPU platform, and that for GPUs."""
    from vllm.config import cache

    if hasattr(cache, "register_kv_cache_dtype"):
        _register_handlers(cache)
    else:
        _extend_literal()
    _register_attention()


def _register_handlers(cache: Any) -> None:
    """Register our names by the hook of vLLM 0.33."""
    from vllm.v1.kv_cache_interface import KVQuantMode

    for name, dtype in DTYPES.items():
        if cache.get_kv_cache_dtype_handler(name) is None:
            cache.register_kv_cache_dtype(name)(_make_handler(dtype, KVQuantMode.NONE))


def _make_handler(dtype: CacheDType, mode: Any) -> type:
    """Return a class as `KVCacheDTypeHandler` says.

    `mode`: which of vLLM's own kernels understand the bytes. NONE of them does. Not CUSTOM, which
    in 0.33.0 has the number of a format of vLLM's (12, OCTAVE_K3V4) and is taken for that.
    """

    class Handler:
        name = dtype.name

        def torch_dtype(self) -> torch.dtype:
            return dtype.torch_dtype

        def quant_mode(self) -> Any:
            return mode

    return Handler


def _extend_literal() -> None:
    """Add our names to those of vLLM 0.32, which has a closed list and no hook to extend it.

    The list is one `Literal`: vLLM reads its members where it parses the command line and where it
    selects an attention. Pydantic has copied them into the validator of a config, which is built
    again. Since 0.33 vLLM itself has `register_kv_cache_dtype`.
    """
    from pydantic.dataclasses import rebuild_dataclass
    from vllm.config import cache
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

    literal: Any = cache.CacheDType
    missing = tuple(name for name in DTYPES if name not in literal.__args__)
    if missing:
        literal.__args__ += missing
        rebuild_dataclass(cache.CacheConfig, force=True)
    for name, dtype in DTYPES.items():
        STR_DTYPE_TO_TORCH_DTYPE[name] = dtype.torch_dtype


def _register_attention() -> None:
    """Have `select.py` asked which attention a CPU has; for GPUs there is a name of its own.

    vLLM's CPU platform accepts no names but those of its own attention.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name in ("CPU_ATTN", "CPU_MLA", "AMX_MLA"):
        if hasattr(AttentionBackendEnum, name):
            register_backend(AttentionBackendEnum[name], f"{_CPU_BACKENDS}.{name}")
    if not hasattr(AttentionBackendEnum, _GPU_NAME):
        register_backend(_GPU_NAME, _GPU_BACKEND)
