"""An FP8 paged KV cache for Hugging Face transformers.

Importing the package registers the name "fp8_paged" in transformers' attention and mask registries,
and changes nothing else in transformers.
"""

import importlib as _importlib
import typing as _typing

from .attention.check_model import ModelReport, check_model
from .attention.fp8_paged import register as _register
from .cache import plans as _plans
from .cache.cache import FP8PagedCache, MemoryFootprint
from .calibration import calibrate, choose_plan
from .calibration.plan_choice import resolve_plan as _resolve_plan
from .enabling import Summary, disable, enable, summary
from .errors import BackendError, ConfigError, FP8KVError, OutOfPagesError, ScaleError
from .formats import LayerPlan, SidePlan
from .modeling.tensor_parallel import tensor_parallel
from .prefix.store import PrefixStore, StoreUsage
from .scales import KVScales, LayerScales
from .scales.kv_scales import StoragePlan
from .utils.demo_model import demo_model_path
from .utils.environment import find_version as _find_version

if _typing.TYPE_CHECKING:
    from .server import make_application

__all__ = [
    "BackendError",
    "ConfigError",
    "FP8KVError",
    "FP8PagedCache",
    "KVScales",
    "LayerPlan",
    "LayerScales",
    "MemoryFootprint",
    "ModelReport",
    "OutOfPagesError",
    "PrefixStore",
    "ScaleError",
    "SidePlan",
    "StoragePlan",
    "StoreUsage",
    "Summary",
    "calibrate",
    "check_model",
    "choose_plan",
    "demo_model_path",
    "disable",
    "enable",
    "make_application",
    "summary",
    "tensor_parallel",
]

__version__ = _find_version("hf-fp8kv")

_register()
# `cache` must not import `calibration`, which has the function that chooses plans.
_plans.resolve_plan = _resolve_plan


def __getattr__(name: str) -> _typing.Any:
    """Lazily import `hf_fp8kv.serving` and `make_application`, which need transformers' engine."""
    if name == "serving":
        return _importlib.import_module(f"{__name__}.serving")
    if name == "make_application":
        return _importlib.import_module(f"{__name__}.server").make_application
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
