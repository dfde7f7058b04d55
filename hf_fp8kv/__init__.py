"""An FP8 paged KV cache for Hugging Face transformers.

Importing adds the name "fp8_paged" to transformers' attention and mask registries, and changes
nothing else.
"""

from .attention import register
from .cache import FP8PagedCache
from .errors import BackendError, ConfigError, Fp8KVError, OutOfPagesError, ScaleError
from .scales import KVScales, LayerScales

__all__ = [
    "BackendError",
    "ConfigError",
    "FP8PagedCache",
    "Fp8KVError",
    "KVScales",
    "LayerScales",
    "OutOfPagesError",
    "ScaleError",
    "register",
]

register()
