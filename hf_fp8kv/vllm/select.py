"""Select the attention class on a CPU: vLLM's class, or the plugin's class for its dtypes.

vLLM's enum of backends names attributes of this module, and vLLM reads them when it creates a
model. If the cache's dtype is not one of the plugin's, the attributes are vLLM's own classes, and
vLLM uses nothing else of the plugin. Otherwise, CPU_ATTN is the plugin's class, and attention over
latents (MLA) raises an error. vLLM would read the stored bytes as its own, because it does not
check whether MLA supports a dtype.
"""

from typing import Any

from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from ..errors import ConfigError
from .dtypes import DTYPES

_BACKEND_NAMES = ("CPU_ATTN", "CPU_MLA", "AMX_MLA")


def __getattr__(name: str) -> Any:
    """Return vLLM's class (the value of its enum) or the plugin's.

    Raise ConfigError for MLA and for batch invariance.
    """
    if name not in _BACKEND_NAMES:
        raise AttributeError(name)
    config = get_current_vllm_config_or_none()
    if config is None or config.cache_config.cache_dtype not in DTYPES:
        return resolve_obj_by_qualname(AttentionBackendEnum[name].value)
    if name != "CPU_ATTN":
        raise ConfigError(
            f"--kv-cache-dtype {config.cache_config.cache_dtype}: expected a model with keys and "
            "values, got a model with latents (MLA). Serve it with --kv-cache-dtype auto"
        )
    if envs.VLLM_BATCH_INVARIANT:
        raise ConfigError(
            "VLLM_BATCH_INVARIANT: expected a GPU, got a CPU, on which vLLM's own operations "
            "depend on the batch. Unset it, or use hf_fp8kv.enable(model, deterministic=True)"
        )
    from .cpu import PagedCPUBackend

    return PagedCPUBackend
