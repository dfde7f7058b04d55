"""FP8 pages in vLLM: what its entry point `vllm.general_plugins` calls in each of its processes.

    vllm serve MODEL --kv-cache-dtype hf_fp8kv_e3m4

`dtypes.py` has the names, `registration.py` makes vLLM know them, `cpu.py` and `gpu.py` are the
attention. Importing this does not import vLLM, of which nothing else in this package depends.
"""

import importlib.util
import logging

from .dtypes import DTYPES
from .versions import failed_message, installed_version, is_supported, unsupported_message

__all__ = ["DTYPES", "register"]

logger = logging.getLogger(__name__)


def register() -> None:
    """Make vLLM know the dtypes of `DTYPES`, and what stores them; more than once changes nothing.

    Where vLLM is absent, or of another version than those that were tried, nothing is registered:
    vLLM would not start at all if a plugin raised an error, whichever dtype is asked for.
    """
    if importlib.util.find_spec("vllm") is None:
        return
    version = installed_version()
    if not is_supported(version):
        logger.warning("%s", unsupported_message(version))
        return
    from .registration import register_dtypes

    try:
        register_dtypes()
    except Exception:  # whatever a build of vLLM has changed: it may serve something else
        logger.exception("%s", failed_message(version))
