"""The engine of transformers, with pages of this package.

Only this folder uses private names of `transformers.generation.continuous_batching`. Nothing of
transformers is changed. A stock function that must use a class of this package runs as a copy with
other globals (`rebind_globals`). Every other caller, in any thread, runs the original.
"""

import importlib
from collections.abc import Callable
from types import FunctionType
from typing import Any

import transformers
from transformers.generation.continuous_batching import cache, continuous_api

from ...errors import ConfigError

StockCache: Any = cache.PagedAttentionCache
StockManager: Any = continuous_api.ContinuousBatchingManager
StockMixin: Any = continuous_api.ContinuousMixin


def unsupported_engine(why: str) -> ConfigError:
    """Return the error for a version of transformers whose engine is not supported."""
    return ConfigError(
        "expected an engine for continuous batching as in transformers 5.18 to 5.24, got the one "
        f"of {transformers.__version__}, which {why}; install one of those versions, or use "
        "generate() with FP8PagedCache"
    )


def rebind_globals(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """Return a copy of a stock function in which some global names mean other objects.

    Raises:
        ConfigError: The function does not use such a name in this version of transformers.
    """
    # Decorators such as torch.no_grad() keep the function in this attribute.
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    if not isinstance(function, FunctionType):
        raise unsupported_engine(f"has no plain function {function!r}")
    missing = set(names) - set(function.__code__.co_names)
    if missing:
        raise unsupported_engine(f"has no {', '.join(sorted(missing))} in {function.__qualname__}")
    copy = FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__,
        function.__defaults__, function.__closure__,
    )  # fmt: skip
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def cache_class(config: Any, identity: str = "") -> Any:
    """Return the cache class for an engine with this ServingConfig. Raises ConfigError."""
    # Managers and engines rebind these later. Errors must come now, not in the engine's thread.
    rebind_globals(StockMixin.init_continuous_batching, ContinuousBatchingManager=None)
    rebind_globals(StockManager._create_batch_processor, PagedAttentionCache=None)
    rebind_globals(StockCache.__init__, PagedAttentionMemoryHandler=None)
    try:
        base = importlib.import_module(".flat_tensor", __name__).Cache
    except (ImportError, AttributeError) as error:
        raise unsupported_engine(f"lacks a part that is needed: {error}") from error
    return type("Cache", (base,), {"chosen": config, "identity": identity})
