"""Read a model's attention implementation, and replace it temporarily.

The engines of continuous batching replace it while they run.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager

from ..errors import ConfigError
from ..modeling.model_support import ATTENTION, DETERMINISTIC
from .fp8_paged import ROUNDING, fp8_paged_attention
from .masks import fp8_paged_mask


@contextmanager
def watched_attention(
    model: PreTrainedModel, on_attention: Callable[[Any, Any, Any, Any, dict[str, Any]], None]
) -> Iterator[None]:
    """Run a model with "fp8_paged", and observe the arguments of each layer's attention.

    Args:
        model: A model that uses transformers' attention registry.
        on_attention: Function that is called with each attention module that has a layer index, and
            its query, key, value and keyword arguments.
    """
    name = f"{ATTENTION}_watched"

    @functools.wraps(fp8_paged_attention)
    def watch(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(module, "layer_idx", None) is not None:
            on_attention(module, query, key, value, kwargs)
        return fp8_paged_attention(module, query, key, value, *args, **kwargs)

    AttentionInterface.register(name, watch)
    AttentionMaskInterface.register(name, fp8_paged_mask)
    try:
        with paged_attention(model, name):
            yield
    finally:
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(name, None)


def get_attn_implementations(model: PreTrainedModel) -> dict[str, Any]:
    """Return the attention implementations by sub-config name. The key "" is the model itself."""
    configs = {name: getattr(model.config, name, None) for name in model.config.sub_configs}
    sub_implementations = {
        name: config._attn_implementation for name, config in configs.items() if config is not None
    }
    return {"": model.config._attn_implementation, **sub_implementations}


def set_attn_implementations(model: PreTrainedModel, implementations: dict[str, Any]) -> None:
    """Set the attention implementations that `get_attn_implementations` returned."""
    model.set_attn_implementation(
        {
            name: implementation
            for name, implementation in implementations.items()
            if implementation is not None
        }
    )
    model.config._attn_implementation = implementations  # the method does not accept None


@contextmanager
def eval_mode(model: PreTrainedModel) -> Iterator[None]:
    """Set a model and all of its modules to eval mode within the `with` block.

    Within the block, K and V are not rounded, and deterministic attention is off.
    """
    training_modules = [module for module in model.modules() if module.training]
    roundings = {module: ROUNDING.remove(module) for module in model.modules()}
    deterministic_modules = [module for module in model.modules() if DETERMINISTIC.remove(module)]
    try:
        model.eval()
        yield
    finally:
        for module, rounding in roundings.items():
            if rounding is not None:
                ROUNDING.set(module, rounding)
        for module in deterministic_modules:
            DETERMINISTIC.set(module, True)
        for module in training_modules:
            module.training = True


@contextmanager
def paged_attention(model: PreTrainedModel, name: str = ATTENTION) -> Iterator[None]:
    """Use attention implementation `name` within the `with` block, if the model supports it."""
    if not model._can_set_attn_implementation():
        yield
        return
    old_implementations = get_attn_implementations(model)
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        set_attn_implementations(model, old_implementations)


def find_managers(model: Any) -> list[ContinuousBatchingManager]:
    """Return the running managers of a model, both transformers' managers and `FP8Manager`s."""
    targets = [getattr(thread, "_target", None) for thread in threading.enumerate()]
    owners = [getattr(target, "__self__", None) for target in targets]
    managers = [owner for owner in owners if isinstance(owner, ContinuousBatchingManager)]
    return [manager for manager in managers if manager.model is model]


def check_no_manager(model: Any) -> None:
    """Raise ConfigError while a manager runs, because each step uses the model's attention."""
    if find_managers(model):
        raise ConfigError(
            "expected a model without a running engine, got one with a running "
            "ContinuousBatchingManager, whose attention would change. Call its stop() first"
        )
