"""Making vLLM know our dtypes and attention, by the means that its version has."""

from typing import Any

from .dtypes import DTYPES

_CPU_BACKEND = "hf_fp8kv.vllm.cpu.PagedCPUBackend"


def register_dtypes(version: str) -> None:
    """Register all dtypes, and the attention of the CPU platform."""
    _extend_literal()
    _register_cpu_attention()


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


def _register_cpu_attention() -> None:
    """Put ours in place of the CPU's attention, to which it hands every other dtype over.

    vLLM's CPU platform accepts no other name than CPU_ATTN.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, _CPU_BACKEND)
