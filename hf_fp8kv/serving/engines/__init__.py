"""The engines of transformers' versions: one file for each way in which they lay out their cache.

All that knows private names of `transformers.generation.continuous_batching` is in here. Nothing
of transformers is changed: a stock function that must meet a class of ours where it names one of
its own runs as a copy with other globals (`rebind_globals`), in whichever thread, while every other
caller runs the original.
"""

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import transformers
from transformers.generation import continuous_batching
from transformers.generation.continuous_batching import cache, continuous_api

from ...errors import ConfigError

__all__ = ["cache_class", "rebind_globals", "stock_manager", "unsupported_engine"]

# A module of the engine that only one layout has, and the file here for it, with `make(settings)`.
_LAYOUTS = {"cache_allocators": "flat_tensor", "cache_manager": "layer_tensors"}


def unsupported_engine(what: str) -> ConfigError:
    """The error for a version of transformers whose engine is not known."""
    return ConfigError(
        "expected an engine for continuous batching as in transformers 5.17 to 5.23, got that of "
        f"{transformers.__version__}, which {what}; install one of those versions, or use "
        "generate() with FP8PagedCache"
    )


def rebind_globals(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """Returns a copy of a stock function that meets other objects under some global names.

    Raises:
        ConfigError: the function does not use such a name: another version of transformers.
    """
    # Decorators such as torch.no_grad() leave the function itself there.
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    if not isinstance(function, FunctionType):
        raise unsupported_engine(f"has no plain function {function!r}")
    missing = set(names) - set(function.__code__.co_names)
    if missing:
        raise unsupported_engine(f"has no {', '.join(sorted(missing))} in {function.__qualname__}")
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def stock_manager() -> Any:
    """transformers' own ContinuousBatchingManager, the class."""
    return continuous_api.ContinuousBatchingManager


def layout() -> ModuleType:
    """The module for the engine that is installed. Raises ConfigError."""
    package = continuous_batching.__name__
    found = [name for name in _LAYOUTS if importlib.util.find_spec(f"{package}.{name}")]
    if len(found) != 1:
        names = sorted(part.name for part in pkgutil.iter_modules(continuous_batching.__path__))
        seen = " and ".join(found) or f"neither {' nor '.join(_LAYOUTS)} in {', '.join(names)}"
        raise unsupported_engine(f"has {seen}")
    # What will be rebind_globals when an engine is made: better to know now than in its thread.
    rebind_globals(stock_manager()._create_batch_processor, PagedAttentionCache=None)
    rebind_globals(cache.PagedAttentionCache.__init__, PagedAttentionMemoryHandler=None)
    try:
        return importlib.import_module(f".{_LAYOUTS[found[0]]}", __name__)
    except (ImportError, AttributeError) as error:
        raise unsupported_engine(f"lacks a part that is needed: {error}") from error


def cache_class(settings: Any) -> Any:
    """Returns the class of cache for an engine with these settings. Raises ConfigError."""
    return layout().make(settings)
