"""What the names of attention on a CPU stand for: vLLM's own classes, but with a dtype of ours.

The enum of vLLM names this module, which is asked when a model is made. So a vLLM that does not use
our dtypes has nothing of ours but this. With one of them CPU_ATTN is ours, and attention over
latents (MLA) is refused: it would take our dtypes for numbers of one byte, and vLLM asks nobody
whether it knows them.
"""

from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from ..errors import ConfigError
from .dtypes import DTYPES

NAMES = ("CPU_ATTN", "CPU_MLA", "AMX_MLA")


def __getattr__(name: str) -> Any:
    """Return a class of vLLM's, which is the enum's value, or ours; raise ConfigError for MLA."""
    if name not in NAMES:
        raise AttributeError(name)
    config = get_current_vllm_config_or_none()
    if config is None or config.cache_config.cache_dtype not in DTYPES:
        return resolve_obj_by_qualname(AttentionBackendEnum[name].value)
    if name != "CPU_ATTN":
        raise ConfigError(
            f"--kv-cache-dtype {config.cache_config.cache_dtype}: expected a model with keys and "
            "values, got one with latents (MLA); serve it with --kv-cache-dtype auto"
        )
    from .cpu import PagedCPUBackend

    return PagedCPUBackend
