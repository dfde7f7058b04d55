"""transformers' continuous batching engine on this package's pages.

Only `serving.engines` uses private names of `transformers.generation.continuous_batching`. It does
not patch transformers. A stock function that must use a class of this package runs as a copy with
rebound globals (`rebind_globals`). All other callers, in any thread, run the original.
"""

import importlib
import inspect
import os
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import transformers
from transformers.generation.continuous_batching import cache, continuous_api

from ...errors import ConfigError

_cache_module: Any = cache
StockCache: Any = cache.PagedAttentionCache
StockManager: Any = continuous_api.ContinuousBatchingManager
StockMixin: Any = continuous_api.ContinuousMixin
# Methods of the engine's allocators that hash blocks.
HASHING_METHODS = ("match_prefix_blocks", "mark_complete_blocks")
# The default key of the hash, random in each process.
PROCESS_KEY = os.urandom(16)
# Keyword of `add_request`, and name of the salt in a request's `logit_processor_kwargs`.
SALT_KEY = "cache_salt"


def make_engine_error(reason: str) -> ConfigError:
    """Return the error for a version of transformers whose engine is not supported."""
    return ConfigError(
        "expected the continuous batching engine of transformers 5.18 to 5.24, got version "
        f"{transformers.__version__}, whose engine {reason}. Install one of these versions, or use "
        "generate() with FP8PagedCache"
    )


def rebind_globals(function: Callable[..., Any], **replacements: Any) -> Callable[..., Any]:
    """Return a copy of a stock function in which `replacements` replace global names.

    Raises:
        ConfigError: The function does not use one of the names in this version of transformers.
    """
    function = inspect.unwrap(function)  # removes decorators such as torch.no_grad()
    if not isinstance(function, FunctionType):
        raise make_engine_error(f"has {function!r}, which is not a plain function")
    if missing_names := set(replacements) - set(function.__code__.co_names):
        raise make_engine_error(
            f"has no {', '.join(sorted(missing_names))} in {function.__qualname__}"
        )
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **replacements},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def order_streams(inputs: Any) -> None:
    """In each step, make an engine's streams wait until the preparing thread has filled the inputs.

    `inputs` are the engine's static tensors (ContinuousBatchingIOs). transformers fills them on the
    thread's current stream, and copies to them or reads them on separate streams that do not wait
    (5.18 to 5.24). A late fill would erase the lengths or the block table of a step.
    """
    get_model_kwargs = inputs.get_model_kwargs

    def wait_and_get(*args: Any, **kwargs: Any) -> Any:
        for name in ("h2d_stream", "compute_stream"):
            stream = getattr(inputs, name, None)
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(stream.device))
        return get_model_kwargs(*args, **kwargs)

    inputs.get_model_kwargs = wait_and_get


def make_cache_class(serving_config: Any, identity: str = "", hash_key: bytes = PROCESS_KEY) -> Any:
    """Return a subclass of the engine's cache, with this ServingConfig and this `identity`.

    The identity is a digest of everything that the stored bytes depend on, except the tokens.
    `hash_key` is the key of the hash that identifies blocks.

    Raises:
        ConfigError: The engine of this version of transformers is not supported.
    """
    # Managers and engines rebind these names later, in a thread. Here the caller gets the errors.
    rebind_globals(StockMixin.init_continuous_batching, ContinuousBatchingManager=None)
    rebind_globals(StockManager._create_batch_processor, PagedAttentionCache=None)
    rebind_globals(StockCache.__init__, PagedAttentionMemoryHandler=None)
    try:
        for name in HASHING_METHODS:
            method = getattr(_cache_module.FullAttentionCacheAllocator, name)
            rebind_globals(method, compute_block_hash=None)
        base_class = importlib.import_module(".flat_tensor", __name__).Cache
    except (ImportError, AttributeError) as error:
        raise make_engine_error(f"lacks a required name: {error}") from error
    members = {"serving_config": serving_config, "identity": identity, "hash_key": hash_key}
    return type("Cache", (base_class,), members)
