"""Keep K and V exact in models that would round them before they reach a cache.

In a checkpoint that declares a KV cache, compressed-tensors makes each attention module pass K and
V to a `QuantizedKVCache`, which rounds them and passes them to the cache of the call. The `forward`
of that wrapper is the only function that this package replaces. In each call, the replacement
checks the cache: K and V stay unrounded if the cache has `takes_exact_states`, and within
`exact_states()`. For all other caches nothing changes.
"""

import functools
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..utils.warn_once import warn_once
from .step import step

logger = logging.getLogger(__name__)

NOTE = (
    "this checkpoint declares a KV cache, for which compressed-tensors rounds K and V to 8 bits "
    "before they reach a cache. An FP8 cache gets them unrounded, because it quantizes them"
)
_PROJECTIONS_NOTE = (
    "this checkpoint declares the outputs of {} as its KV cache, and compressed-tensors rounds "
    "them to 8 bits, so caches and calibration get rounded values. Load a copy that declares the "
    "cache: hf-fp8kv convert OLD COPY --checkpoint OLD --to compressed-tensors --overwrite"
)


def _find_wrapper_class() -> Any:
    """Return the class of the modules that round K and V, or None if it is not imported."""
    return getattr(sys.modules.get("compressed_tensors.modeling.kvcache"), "QuantizedKVCache", None)


def pass_exact_states() -> None:
    """Replace `forward` of the wrapper class with a function that checks the cache, if imported."""
    wrapper = _find_wrapper_class()
    if wrapper is None or wrapper.forward.__module__ == __name__:
        return
    round_and_store = wrapper.forward

    @functools.wraps(round_and_store, assigned=())  # keep the name of this module
    def forward(self: Any, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        cache = None if self.past_key_values is None else self.past_key_values()
        if not (step.is_exact or getattr(cache, "takes_exact_states", False)):
            return round_and_store(self, key_states, value_states, *args, **kwargs)
        warn_once(logger, NOTE)
        self.past_key_values = None
        if cache is None:
            return key_states, value_states
        return cache.update(key_states, value_states, *args, **kwargs)

    wrapper.forward = forward


@contextmanager
def exact_states(*, engine: bool = False) -> Iterator[None]:
    """Keep K and V unrounded in this thread within the `with` block, with any cache or none.

    `engine` means that a continuous-batching engine runs a step. It packs requests into one row,
    and its cache has the bounds of each request. A mask, which would cover all tokens of the step,
    is not needed and not made.
    """
    pass_exact_states()
    old_flags = step.is_exact, step.is_engine
    step.is_exact, step.is_engine = True, engine or step.is_engine
    try:
        yield
    finally:
        step.is_exact, step.is_engine = old_flags


def rounding_note(model: torch.nn.Module) -> str:
    """Return a note about a model whose K and V are rounded outside caches, or "".

    Old checkpoints declare outputs of projections instead of a KV cache. The projections round
    these outputs themselves, which this package cannot prevent.
    """
    projections = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if name.endswith(("k_proj", "v_proj"))
        and getattr(getattr(module, "quantization_scheme", None), "output_activations", None)
    }
    if projections:
        return _PROJECTIONS_NOTE.format(" and ".join(sorted(projections)))
    wrapper = _find_wrapper_class()
    is_wrapped = wrapper is not None and any(isinstance(x, wrapper) for x in model.modules())
    return NOTE if is_wrapped else ""


def warn_of_rounding(model: torch.nn.Module) -> None:
    """Log the `rounding_note` of a model once, before it is used with an FP8 cache."""
    if note := rounding_note(model):
        warn_once(logger, note)
