"""vLLM's attention over latents (MLA) on a CPU, by the names of its enum; our dtypes are refused.

That attention would take our dtypes for numbers of one byte, and vLLM asks nobody whether it knows
them. So the enum names this module, of which each attribute is vLLM's own class.
"""

from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from ..errors import ConfigError
from .dtypes import DTYPES

NAMES = ("CPU_MLA", "AMX_MLA")


def __getattr__(name: str) -> Any:
    """Return vLLM's class, which is the enum's value; raise ConfigError for a dtype of ours."""
    if name not in NAMES:
        raise AttributeError(name)
    config = get_current_vllm_config_or_none()
    if config is not None and config.cache_config.cache_dtype in DTYPES:
        raise ConfigError(
            f"--kv-cache-dtype {config.cache_config.cache_dtype}: expected a model with keys and "
            "values, got one with latents (MLA); serve it with --kv-cache-dtype auto"
        )
    return resolve_obj_by_qualname(AttentionBackendEnum[name].value)
