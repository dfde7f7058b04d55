"""An FP8 paged KV cache for Hugging Face transformers.

Importing registers the name "fp8_paged" in transformers' attention and mask registries, and changes
nothing else.
"""

import importlib as _importlib
from types import ModuleType as _Module

from .attention.check_model import ModelReport, check_model
from .attention.fp8_paged import register
from .cache.cache import FP8PagedCache
from .cache.ds_mla import from_ds_mla, to_ds_mla
from .cache.prefix_store import PrefixStore, StoreUsage
from .calibration import calibrate, choose_plan
from .enabling import disable, enable
from .errors import BackendError, ConfigError, Fp8KVError, OutOfPagesError, ScaleError
from .formats import LayerPlan, SidePlan
from .modeling.tensor_parallel import tensor_parallel
from .scales import KVScales, LayerScales
from .scales.kv_scales import StoragePlan

__all__ = [
    "BackendError",
    "ConfigError",
    "FP8PagedCache",
    "Fp8KVError",
    "KVScales",
    "LayerPlan",
    "LayerScales",
    "ModelReport",
    "OutOfPagesError",
    "PrefixStore",
    "ScaleError",
    "SidePlan",
    "StoragePlan",
    "StoreUsage",
    "calibrate",
    "check_model",
    "choose_plan",
    "disable",
    "enable",
    "from_ds_mla",
    "register",
    "tensor_parallel",
    "to_ds_mla",
]

register()


def __getattr__(name: str) -> _Module:
    """Import `hf_fp8kv.serving` lazily; it depends on transformers' continuous-batching engine."""
    if name == "serving":
        return _importlib.import_module(f"{__name__}.serving")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
