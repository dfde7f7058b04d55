"""Identify a model by a digest of the weights, config and settings that K and V depend on."""

from functools import partial
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig

from ..errors import ConfigError
from ..utils.digests import compute_digest, digest_sampled_weights, digest_weights
from .model_support import DETERMINISTIC, find_varying_rope

# Packages whose hooks and replaced methods are accepted: the digest covers all their effects.
_ACCEPTED_PACKAGES = (
    "accelerate.hooks",
    "compressed_tensors",
    "hf_fp8kv",
    "peft",
    "transformers",
    "torch.nn.utils",
)
# Methods, and the packages that may replace them. PEFT's versions of the last two add tokens.
_PACKAGES_BY_METHOD: dict[str, tuple[str, ...]] = {
    "forward": _ACCEPTED_PACKAGES,
    "_old_forward": _ACCEPTED_PACKAGES,
    "_prefill": ("hf_fp8kv",),
    "prepare_inputs_for_generation": ("hf_fp8kv",),
}
# Attributes of PEFT's adapters that change while a model is used, and are not weights.
ADAPTER_FIELDS = (
    "active_adapters",
    "disable_adapters",
    "merged_adapters",
    "scaling",
    "lora_variant",
)
# Config fields that do not affect outputs: the fields of every config, and ids of special tokens.
_NEUTRAL_FIELDS = {*PreTrainedConfig().to_dict(), "use_cache"}
_NEUTRAL_SUFFIXES = ("bos_token_id", "eos_token_id", "pad_token_id")


def identify_model(model: Any) -> str:
    """Return a digest of the weights and of `describe_model`: 64 hexadecimal digits.

    Raises:
        ConfigError: Some weights are not in this process, or a hook or a replaced method may change
            hidden states or tokens.
    """
    _check_hooks(model)
    return compute_digest(describe_model(model), digest_weights(model))


def sample_model(model: Any) -> str:
    """Return a digest of the config, the adapters and 8 values of each weight.

    Copies of a model have the same digest. A change of other values does not change it. Frequencies
    of RoPE are ignored if the model itself changes them.
    """
    ignored_suffixes = ("inv_freq",) if find_varying_rope(model.config) else ()
    return compute_digest(
        _describe_adapters(model), digest_sampled_weights(model, ignored_suffixes)
    )


def describe_model(model: Any) -> dict[str, object]:
    """Return everything that `identify_model` covers, except the weights."""
    device = model.device.type
    uses_autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return {
        "class": type(model).__qualname__,
        "deterministic": DETERMINISTIC.is_set(model),
        "attention": str(model.config._attn_implementation),
        "transformers": transformers.__version__,
        "device": device,
        "autocast": uses_autocast and str(torch.get_autocast_dtype(device)),
        **_describe_adapters(model),
    }


def _describe_adapters(model: Any) -> dict[str, object]:
    """Return the config of a model, and the settings of its adapters."""
    adapters = [(name, _describe_adapter(module)) for name, module in model.named_modules()]
    # The adapter of each sequence, which PEFT passes in hooks (`adapter_names`).
    hook_arguments = []
    for name, module in model.named_modules():
        hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, partial)]
        hook_arguments += [
            (name, getattr(hook.func, "__qualname__", ""), hook.args, hook.keywords)
            for hook in hooks
        ]
    return {
        "config": {
            name: setting
            for name, setting in model.config.to_dict().items()
            if name not in _NEUTRAL_FIELDS and not name.endswith(_NEUTRAL_SUFFIXES)
        },
        "adapters": [(name, adapter) for name, adapter in adapters if adapter],
        "arguments": hook_arguments,
    }


def _describe_adapter(module: Any) -> dict[str, object]:
    """Return the attributes of a module that affect an adapter of PEFT and are not weights."""
    attributes = {name: getattr(module, name, None) for name in ADAPTER_FIELDS}
    # For example the indices of FourierFT and SHiRA, and the order of the rotations of HRA.
    # Wrappers of whole models have a `peft_config`, and repeat it in each layer.
    if type(module).__module__.startswith("peft.tuners.") and not hasattr(module, "peft_config"):
        attributes |= {name: setting for name, setting in vars(module).items() if name[0] != "_"}
    return {
        name: setting
        for name, setting in attributes.items()
        if setting is not None and name not in ("training", "kwargs")
    }


def _check_hooks(model: Any) -> None:
    """Raise ConfigError if a hook or a replaced method may change hidden states or tokens."""
    registry = torch.nn.modules.module  # has the hooks of all modules
    hooks = [*registry._global_forward_pre_hooks.values(), *registry._global_forward_hooks.values()]
    for name, module in model.named_modules():
        attributes = vars(module)
        accelerate_hook = attributes.get("_hf_hook")
        hooks += [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        hooks += getattr(accelerate_hook, "hooks", [accelerate_hook])
        refused_functions = [
            hook
            for hook in hooks
            if hook is not None and not _is_defined_in(hook, _ACCEPTED_PACKAGES)
        ]
        for method, packages in _PACKAGES_BY_METHOD.items():
            function = _unwrap(attributes.get(method))
            stock_method = getattr(type(module), method.removeprefix("_old_"), None)
            is_stock = function is None or getattr(function, "__func__", None) is stock_method
            if not is_stock and not _is_defined_in(function, packages):
                refused_functions.append(function)
        if refused_functions:
            got = getattr(refused_functions[0], "__qualname__", type(refused_functions[0]).__name__)
            raise ConfigError(
                "prefix_store: expected no hook and no replaced method, which may change hidden "
                f"states or tokens, got {got} in {name or 'the model'}. Remove it, or leave "
                "prefix_store out"
            )
        hooks.clear()


def _is_defined_in(function: Any, packages: tuple[str, ...]) -> bool:
    """Return whether one of the packages defines a function, or the class of a callable object."""
    while isinstance(function, partial):
        function = function.func
    # The globals are read, because functools.wraps copies `__module__` but not the globals.
    namespace = getattr(function, "__globals__", {"__name__": type(function).__module__})
    return f"{namespace.get('__name__')}.".startswith(tuple(f"{name}." for name in packages))


def _unwrap(function: Any) -> Any:
    """Return the function inside torch.compile, torch.no_grad, torch.inference_mode or hf_fp8kv."""
    if _is_defined_in(function, ("torch._dynamo", "torch.utils._contextlib", "hf_fp8kv")):
        for name in ("_torchdynamo_orig_callable", "__wrapped__", "old_attribute"):
            if (wrapped := getattr(function, name, None)) is not None:
                return _unwrap(wrapped)
    return function
