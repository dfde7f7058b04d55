"""The engines of transformers' versions: one file for each way in which they lay out their cache.

All that knows private names of `transformers.generation.continuous_batching` is in here. Nothing
of transformers is changed: a stock function that must meet a class of ours where it names one of
its own runs as a copy with other globals (`rebound`), in whichever thread, while every other
caller runs the original.
"""

import importlib
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import transformers
from transformers.generation import continuous_batching
from transformers.generation.continuous_batching import continuous_api

from ...errors import ConfigError

__all__ = ["cache_class", "rebound", "stock_manager", "unknown_engine"]

# The first whose `fits` says so; each has `fits()` and `make(settings)`.
_LAYOUTS = ("flat_tensor", "layer_tensors")


def unknown_engine(what: str) -> ConfigError:
    """The error for a version of transformers whose engine is not known."""
    return ConfigError(
        "expected an engine for continuous batching as in transformers 5.17 to 5.23, got that of "
        f"{transformers.__version__}, which {what}; install one of those versions, or use "
        "generate() with FP8PagedCache"
    )


def rebound(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """Returns a copy of a stock function that meets other objects under some global names.

    Raises:
        ConfigError: the function does not use such a name: another version of transformers.
    """
    # Decorators such as torch.no_grad() leave the function itself there.
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    if not isinstance(function, FunctionType):
        raise unknown_engine(f"has no plain function {function!r}")
    missing = set(names) - set(function.__code__.co_names)
    if missing:
        raise unknown_engine(f"has no {', '.join(sorted(missing))} in {function.__qualname__}")
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def stock_manager() -> type:
    """transformers' own ContinuousBatchingManager."""
    return continuous_api.ContinuousBatchingManager


def layout() -> ModuleType:
    """The module for the engine that is installed. Raises ConfigError."""
    for name in _LAYOUTS:
        if importlib.util.find_spec(f"{__name__}.{name}") is None:
            continue
        module = importlib.import_module(f".{name}", __name__)
        if module.fits():
            return module
    found = ", ".join(sorted(vars(continuous_batching)))
    raise unknown_engine(f"has no layout that is known here ({found})")


def cache_class(settings: Any) -> type:
    """Returns the class of cache for an engine with these settings. Raises ConfigError."""
    made = layout().make(settings)
    assert isinstance(made, type)
    return made
