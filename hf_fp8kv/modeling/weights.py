"""Identity of a model: a digest of all that its keys and values depend on, beside the tokens.

Every byte of every parameter and buffer is hashed, once: the digest is kept for as long as torch's
version counters, addresses and shapes say that nothing was written. A change through `.data`, or in
inference mode, is not counted by torch: a few numbers of each tensor are compared, too, which a
merged adapter or other weights change. An edit of single numbers there is not seen.
"""

import hashlib
import json
import os
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import transformers

from ..errors import ConfigError

# Hooks and replaced methods of these libraries do only what the digest covers.
_COVERED = (
    "accelerate.hooks",
    "compressed_tensors",
    "hf_fp8kv",
    "peft",
    "transformers",
    "torch.nn.utils",
)
# What adapters of PEFT say about themselves outside of their weights.
_ADAPTERS = ("active_adapters", "disable_adapters", "merged_adapters", "scaling", "lora_variant")
# Of a config, what changes no number.
_NAMES = ("_name_or_path", "transformers_version", "architectures", "use_cache", "dtype")

_known: weakref.WeakKeyDictionary[Any, tuple[object, str]] = weakref.WeakKeyDictionary()


def identify_model(model: Any) -> str:
    """Return a digest of weights, config, class and library: 64 hexadecimal digits.

    The first call reads all weights (0.5 GB/s and more a thread); later ones compare counters.

    Raises:
        ConfigError: Weights are not whole in this process, or other code changes hidden states.
    """
    _check_code(model)
    config = {name: x for name, x in model.config.to_dict().items() if name not in _NAMES}
    device = model.device.type
    autocast = torch.is_autocast_enabled(device) and str(torch.get_autocast_dtype(device))
    # "arguments": PEFT passes on which adapter is for which text (`adapter_names`) in such hooks.
    facts = {
        "rules": 2,  # Rule 1 also stored pages of prompt tuning, hooks and replaced methods.
        "weights": digest_weights(model),
        "config": config,
        "class": type(model).__qualname__,
        "attention": str(model.config._attn_implementation),
        "transformers": transformers.__version__,
        "device": device,
        "autocast": autocast,
        "adapters": [
            (name, part, str(value))
            for name, module in model.named_modules()
            for part in _ADAPTERS
            if (value := getattr(module, part, None)) is not None
        ],
        "arguments": [
            (name, getattr(hook.func, "__qualname__", ""), hook.args, hook.keywords)
            for name, module in model.named_modules()
            for hook in module._forward_pre_hooks.values()
            if isinstance(hook, partial)
        ],
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _check_code(model: Any) -> None:
    """Raise ConfigError if a hook or a replaced `forward` may change hidden states."""
    shared = torch.nn.modules.module
    found = [*shared._global_forward_pre_hooks.values(), *shared._global_forward_hooks.values()]
    for name, module in model.named_modules():
        own, stock = vars(module), type(module).forward
        found += [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        found += getattr(own.get("_hf_hook"), "hooks", [own.get("_hf_hook")])  # accelerate's
        forwards = [_unwrap(own.get(name)) for name in ("forward", "_old_forward")]
        found += [code for code in forwards if getattr(code, "__func__", None) is not stock]
        for code in found:
            if code is not None and not _is_of(code, _COVERED):
                raise ConfigError(
                    "prefix_store: expected no hook and no replaced forward, which may change "
                    f"hidden states, got {getattr(code, '__qualname__', type(code).__name__)} in "
                    f"{name or 'the model'}; remove it, or leave prefix_store out"
                )
        found.clear()


def _is_of(function: Any, packages: tuple[str, ...]) -> bool:
    """Return whether one of the packages defines a function, or the class of a callable object."""
    while isinstance(function, partial):
        function = function.func
    # functools.wraps copies `__module__`, but not the globals.
    names = getattr(function, "__globals__", {"__name__": type(function).__module__})
    return f"{names.get('__name__')}.".startswith(tuple(f"{name}." for name in packages))


def _unwrap(function: Any) -> Any:
    """Return the function inside torch.compile, torch.no_grad and torch.inference_mode."""
    while _is_of(function, ("torch._dynamo", "torch.utils._contextlib")):
        wrapped = getattr(function, "__wrapped__", None)
        inner = getattr(function, "_torchdynamo_orig_callable", wrapped)
        if inner is None:
            break
        function = inner
    return function


def digest_weights(model: Any) -> str:
    """Return the digest of all parameters and buffers, which is kept until they change.

    Raises:
        ConfigError: Weights are not whole in this process.
    """
    tensors = dict(_tensors(model))
    state = tuple((name, *_state(tensor)) for name, tensor in tensors.items()), _sample(tensors)
    known = _known.get(model)
    if known is not None and known[0] == state:
        return known[1]
    for name, tensor in tensors.items():
        if tensor.is_meta or hasattr(tensor, "placements"):
            raise ConfigError(
                f"prefix_store: expected all weights in this process, got {name!r} on no device, "
                "or as a part; leave prefix_store out where weights are offloaded or split"
            )
    # Hashing lets go of Python's lock.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(_digest, tensors.values()))
    digest = hashlib.sha256()
    for name, part in zip(tensors, digests, strict=True):
        digest.update(name.encode() + b"\0" + part)
    _known[model] = (state, digest.hexdigest())
    return digest.hexdigest()


def _state(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what changes when a tensor is replaced or written to."""
    version = -1 if tensor.is_inference() else tensor._version
    return id(tensor), tensor.data_ptr(), version, tensor.shape, tensor.dtype


def _sample(tensors: dict[str, torch.Tensor]) -> bytes:
    """Return a few numbers of each tensor; one wait for each device."""
    parts: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors.values():
        if not tensor.is_meta and type(tensor) in (torch.Tensor, torch.nn.Parameter):
            some = tensor.detach()[tuple(slice(n // 5, None, n // 3 + 1) for n in tensor.shape)]
            some = some.reshape(-1).contiguous().view(torch.uint8)
            parts.setdefault(tensor.device, []).append(some)
    return b"".join(torch.cat(part).cpu().numpy().tobytes() for part in parts.values())


def _digest(tensor: torch.Tensor) -> bytes:
    """Return the digest of a tensor's dtype, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype}{list(tensor.shape)}".encode())
    if tensor.numel():
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(flat.numpy().data)
    return digest.digest()
