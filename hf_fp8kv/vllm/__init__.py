"""Plugin for FP8 pages in vLLM. The entry point `vllm.general_plugins` loads it in each process.

vllm serve MODEL --kv-cache-dtype hf_fp8kv_e3m4

`dtypes.py` defines the names, `registration.py` registers them in vLLM, and `cpu.py` and `gpu.py`
implement attention. Importing this module does not import vLLM. No other package depends on vLLM.
"""

import importlib.util
import logging

from . import versions
from .dtypes import DTYPES

__all__ = ["DTYPES", "register"]

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the dtypes of `DTYPES` and their attention in vLLM. Further calls change nothing.

    Nothing is registered if vLLM is missing or its version was never tested. No error is raised,
    because after an error in a plugin vLLM would not start, even with its own dtypes.
    """
    if importlib.util.find_spec("vllm") is None:
        return
    version = versions.find_installed_version()
    if not versions.is_supported(version):
        logger.warning("%s", versions.format_unsupported_version(version))
        return
    from .registration import register_dtypes

    try:
        register_dtypes()
    except Exception:  # vLLM can still serve its own dtypes
        logger.exception("%s", versions.format_registration_error(version))
