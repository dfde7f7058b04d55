"""Keep K and V exact in models that would round them before they reach a cache.

In a checkpoint that declares a KV cache, compressed-tensors makes each attention module pass K and
V to a wrapper, `QuantizedKVCache`, which rounds them and passes them to the cache of the call. This
package only replaces the wrapper's `forward`. The new `forward` passes K and V unrounded within
`exact_states()`, and to caches that have `takes_exact_states`. For other caches nothing changes.
"""

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..utils.warn_once import warn_once
from .forward_state import forward_pass

ROUNDING_NOTE = (
    "this checkpoint declares a KV cache, for which compressed-tensors rounds K and V to 8 bits "
    "before they reach a cache. An FP8 cache gets them unrounded, because it quantizes them"
)
_PROJECTIONS_NOTE = (
    "this checkpoint declares the outputs of {} as its KV cache, and compressed-tensors rounds "
    "them to 8 bits, so caches and calibration get rounded values. Load a copy that declares the "
    "cache: hf-fp8kv convert OLD COPY --checkpoint OLD --to compressed-tensors --overwrite"
)


def _find_wrapper_class() -> Any:
    """Return the class of the wrappers that round K and V, or None if it is not imported."""
    return getattr(sys.modules.get("compressed_tensors.modeling.kvcache"), "QuantizedKVCache", None)


def patch_kv_wrapper() -> None:
    """Replace the wrapper's `forward` once, if compressed-tensors is imported."""
    wrapper_class = _find_wrapper_class()
    if wrapper_class is None or wrapper_class.forward.__module__ == __name__:
        return
    round_and_store = wrapper_class.forward

    @functools.wraps(round_and_store, assigned=())  # keeps `__module__` of this module
    def forward(self: Any, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        cache = None if self.past_key_values is None else self.past_key_values()
        if not (forward_pass.is_exact or getattr(cache, "takes_exact_states", False)):
            return round_and_store(self, key_states, value_states, *args, **kwargs)
        warn_once(ROUNDING_NOTE)
        self.past_key_values = None
        if cache is None:
            return key_states, value_states
        return cache.update(key_states, value_states, *args, **kwargs)

    wrapper_class.forward = forward


@contextmanager
def exact_states(*, is_engine_step: bool = False) -> Iterator[None]:
    """Keep K and V unrounded in this thread within the `with` block, with any cache or none.

    With `is_engine_step`, a continuous-batching engine runs the model, and no mask is made. The
    engine packs all requests into one row, and its cache has the bounds of each request. A mask
    would cover all tokens of the row.
    """
    patch_kv_wrapper()
    old_flags = forward_pass.is_exact, forward_pass.is_engine_step
    forward_pass.is_exact = True
    forward_pass.is_engine_step = is_engine_step or forward_pass.is_engine_step
    try:
        yield
    finally:
        forward_pass.is_exact, forward_pass.is_engine_step = old_flags


def describe_rounding(model: torch.nn.Module) -> str:
    """Return a note that the model's K and V are rounded before they reach a cache, or "".

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
    wrapper_class = _find_wrapper_class()
    modules = () if wrapper_class is None else model.modules()
    return ROUNDING_NOTE if any(isinstance(module, wrapper_class) for module in modules) else ""


def warn_of_rounding(model: torch.nn.Module) -> None:
    """Log the note of `describe_rounding` once, before the model is used with an FP8 cache."""
    if note := describe_rounding(model):
        warn_once(note)
