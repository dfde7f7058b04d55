"""Determine the capabilities of transformers' model classes from their code."""

import functools
import inspect
import re
import sys
from collections.abc import Callable, Collection
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar, cast

import torch
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel

from ..errors import ConfigError
from ..utils.warn_once import warn_once
from .methods import ModelAttribute

# Name of the attention function that reads stored pages.
ATTENTION = "fp8_paged"
# Method of an attention module that expands cached latents to K and V of each head.
EXPAND_METHOD = "expand_kv"
# Set on a deterministic model and on its modules.
DETERMINISTIC = ModelAttribute[bool]("_hf_fp8kv_deterministic")
# Attribute of new keys that holds the cache of a continuous-batching engine.
ENGINE_ATTRIBUTE = "_hf_fp8kv_engine"
# Name of the argument for a cache in `generate()` and `forward`: "cache" since transformers 5.24.
_SIGNATURE = inspect.signature(GenerationMixin.prepare_inputs_for_generation)
CACHE = "cache" if "cache" in _SIGNATURE.parameters else "past_key_values"
# Field of a config. Phi-3 computes all tokens again when a sequence grows past this length.
_REPLACEMENT_FIELD = "original_max_position_embeddings"
# Config fields that hold the number of positions.
_POSITION_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "max_target_positions",
    "max_encoder_position_embeddings",
    "max_decoder_position_embeddings",
)
# Whether no `generate()` of a model that is not enabled uses the caches that are being made.
_are_caches_safe: ContextVar[bool] = ContextVar("_are_caches_safe", default=False)
_Function = TypeVar("_Function", bound=Callable[..., Any])


# Attributes in which wrappers of other packages keep the model.
_WRAPPER_FIELDS = ("module", "pretrained_model", "model")


def unwrap_model(model: Any) -> Any:
    """Return the model inside the wrappers of PEFT and torch.compile, and other objects unchanged.

    Adapters of PEFT are part of the model's layers.
    """
    while not isinstance(model, type):
        if hasattr(model, "get_base_model"):  # the wrapper of torch.compile forwards it
            model = model.get_base_model()
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            break
    return model


def find_base_model(model: Any, method: str = "", attribute: str = "") -> Any:
    """Return `unwrap_model(model)`.

    Raise ConfigError unless it is a model of transformers that has `method`, or `attribute` if it
    is given.
    """
    base = unwrap_model(model)
    if isinstance(base, PreTrainedModel) and hasattr(base, attribute or method or "forward"):
        return base
    inner_names = [
        name for name in _WRAPPER_FIELDS if isinstance(getattr(base, name, None), PreTrainedModel)
    ]
    advice = "Load a model with AutoModelForCausalLM.from_pretrained(...)"
    if inner_names and not isinstance(base, PreTrainedModel):
        advice = f"Pass the model inside it (its attribute {inner_names[0]})"
    rule = f"a PreTrainedModel with {method}()" if method else "a PreTrainedModel"
    got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
    raise ConfigError(f"model: expected {rule}, got {got}. {advice}")


def find_varying_rope(config: Any) -> str | None:
    """Return the type of RoPE if its frequencies depend on the sequence length, otherwise None.

    The RoPE fields of the config, and of its text config, are searched at any depth.
    """
    configs = (config, config.get_text_config(decoder=True))
    fields = ("rope_parameters", "rope_scaling")
    text = str([getattr(source, field, None) for source in configs for field in fields])
    return next((name for name in ("dynamic", "longrope") if repr(name) in text), None)


def changes_rope(config: Any, lengths: Collection[int]) -> bool:
    """Return whether RoPE may have had different frequencies for sequences of these lengths."""
    threshold: int | None = getattr(config, _REPLACEMENT_FIELD, None)
    if threshold is not None:
        return min(lengths) <= threshold < max(lengths)
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):  # of all layers, or of each type of layer
        if isinstance(parameters, dict) and parameters.get("rope_type") in ("dynamic", "longrope"):
            threshold = config.max_position_embeddings
            return max(lengths) > int(parameters.get("original_max_position_embeddings", threshold))
    return False


def get_field(config: Any, name: str) -> Any:
    """Return a field of a config, or None. If layers differ, return the first value."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # raised by transformers if layers have different values
        values = (getattr(layer, name, None) for layer in config.per_layer_config)
        return next((value for value in values if value is not None), None)


def find_max_positions(model: PreTrainedModel) -> int:
    """Return the smallest limit of positions in the config, or `sys.maxsize` without a limit."""
    config = model.config.get_text_config(decoder=True)
    settings = (get_field(config, name) for name in _POSITION_FIELDS)
    limits = (int(limit) for limit in settings if isinstance(limit, int | float) and limit > 1)
    return min(limits, default=sys.maxsize)


def has_cross_layers(config: PreTrainedConfig) -> bool:
    """Return whether some layers of a decoder attend to images instead of tokens (Mllama)."""
    # Each fork of a cache calls this, and `hasattr` takes several microseconds.
    return "cross_attention_layers" in vars(config)


def has_rope(model: PreTrainedModel) -> bool:
    """Return whether the config has RoPE parameters, for all layers or for each layer type."""
    return bool(get_field(model.config.get_text_config(decoder=True), "rope_parameters"))


@functools.cache
def find_model_class(config_class: type) -> type[Any] | None:
    """Return the model class of a config, or None if transformers lists none."""
    import transformers

    mappings = (
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        transformers.MODEL_MAPPING,
    )
    for mapping in mappings:
        if classes := mapping.get(config_class, None):
            return classes[0] if isinstance(classes, tuple) else classes
    return None


# torch.compile and torch.export call this function, which reads source code, without tracing it.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def uses_interface(config_class: type) -> bool:
    """Return whether models with this config use transformers' attention registry."""
    model_class = find_model_class(config_class)
    return model_class is None or bool(model_class._can_set_attn_implementation())


def caches_latents(config: Any) -> bool:
    """Return whether models with this config cache latents, which their attention expands (MLA).

    Attention classes of such models have a method that expands latents. The config alone does not
    show whether a model with custom code caches latents, or how the model expands them.
    """
    if config is None or get_field(config, "kv_lora_rank") is None:
        return False
    config_class: type = type(config)
    model_class = find_model_class(config_class)
    module_name = config_class.__module__.replace("configuration_", "modeling_")
    module = sys.modules.get(module_name if model_class is None else model_class.__module__)
    objects = [] if module is None else list(vars(module).values())
    return any(isinstance(item, type) and hasattr(item, EXPAND_METHOD) for item in objects)


def accepts_argument(cls: type[Any], argument: str) -> bool:
    """Return whether `forward` of a model class has an argument of this name."""
    return argument in inspect.signature(cls.forward).parameters


def find_cache_argument(cls: type[Any]) -> str:
    """Return `forward`'s argument for a cache, or "". Code from the Hub may use the old name."""
    return next((name for name in ("past_key_values", CACHE) if accepts_argument(cls, name)), "")


def with_cache(model: Any, cache: Any) -> dict[str, Any]:
    """Return the keyword arguments that pass a cache to a call of the model."""
    return {find_cache_argument(type(model)) or CACHE: cache, "use_cache": True}


def find_generating_model(model: Any) -> Any:
    """Return the model whose `generate()` creates the cache: the model itself, or a part of it.

    For example, BLIP-2's `generate()` calls the `generate()` of its language model.
    """
    generate = inspect.unwrap(getattr(type(model), "generate", GenerationMixin.generate))
    if generate is inspect.unwrap(GenerationMixin.generate):
        return model
    source = inspect.getsource(generate)
    match = re.search(r"\bself\.(\w+)\.generate\(", source)
    if match is None or "super().generate(" in source:
        return model
    return find_generating_model(getattr(model, match[1]))


def find_refusal(cls: type[Any]) -> str:
    """Return the reason why models of this class cannot use the cache, or ""."""
    if not getattr(cls, "_supports_default_dynamic_cache", lambda: True)():
        return "it needs a special cache class"
    if not find_cache_argument(cls):
        return f"its forward has no argument {CACHE}"
    return ""


def describe_cache_replacement(config: Any) -> str:
    """Return a note if `generate()` of a config's model replaces its cache between two steps."""
    if (num_tokens := getattr(config, _REPLACEMENT_FIELD, None)) is None:
        return ""
    name = getattr(find_model_class(config.__class__), "__name__", "the model")
    return (
        f"without enable(model), generate() of {name} replaces its cache with an unquantized "
        f"DynamicCache after {num_tokens} tokens (`{_REPLACEMENT_FIELD}`)"
    )


def without_replacement_note(function: _Function) -> _Function:
    """Decorate a function that makes caches only for itself or for enabled models.

    `check_config` then does not warn that only an enabled model keeps its cache.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        context = copy_context()
        context.run(_are_caches_safe.set, True)
        return context.run(function, *args, **kwargs)

    return cast("_Function", call)


def check_config(config: Any) -> None:
    """Raise ConfigError unless this is the config of a model that can use the cache.

    Log a warning if only an enabled model keeps its cache.
    """
    config_class: type = type(config)
    if not isinstance(config, PreTrainedConfig):
        raise ConfigError(
            f"config: expected a model, its config or None, got {config_class.__name__}. Write "
            "FP8PagedCache(model)"
        )
    model_class = find_model_class(config_class)
    reason = "" if model_class is None else find_refusal(model_class)
    if set(get_field(config, "layer_types") or ()) == {"linear_attention"}:
        reason = "it has no attention layers"
    elif get_field(config.get_text_config(decoder=True), "num_hidden_layers") is None:
        reason = "it does not list the layers of one decoder"
    if reason:
        raise ConfigError(
            f"expected the config of a model that can use this cache, got {config_class.__name__}: "
            f"{reason}"
        )
    note = describe_cache_replacement(config)
    if note and not _are_caches_safe.get():
        warn_once(f"{note}. Call hf_fp8kv.enable(model)")
