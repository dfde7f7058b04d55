"""Digests that identify weights: of every byte for a prefix store, and of samples otherwise.

A prefix store returns values that were computed earlier, so any changed byte of the weights must be
detected. Scales only depend on weights statistically. An optimizer step changes nearly every value,
so a sample of each tensor detects it within milliseconds.
"""

import hashlib
import json
import os
import re
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ..errors import ConfigError

_known: weakref.WeakKeyDictionary[Any, tuple[object, str]] = weakref.WeakKeyDictionary()


def digest_of(*facts: object) -> str:
    """Return the SHA-256 of values for JSON, which may contain tensors: 64 hexadecimal digits."""
    text = json.dumps(facts, sort_keys=True, default=_describe)
    return hashlib.sha256(text.encode()).hexdigest()


def _describe(value: object) -> str:
    """Return dtype, shape and a digest of the bytes of a tensor, or the text of another value."""
    if not isinstance(value, torch.Tensor):
        return str(value)
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{value.dtype}{list(value.shape)}{hashlib.sha256(flat.numpy().data).hexdigest()}"


def is_whole(tensor: torch.Tensor) -> bool:
    """Return whether this process holds a whole tensor: not on disk, split or empty."""
    return not tensor.is_meta and not hasattr(tensor, "placements") and tensor.numel() > 0


def sample(tensor: torch.Tensor, count: int = 4096) -> torch.Tensor:
    """Return at most `count` values of a tensor at equal distances, from its first value on."""
    flat = tensor.detach().flatten()
    # An odd distance spreads the values over the columns.
    return flat[:: -(-len(flat) // count) | 1].contiguous()


def digest_weights(model: torch.nn.Module) -> str:
    """Return a digest of every byte of all parameters and buffers, cached until they change.

    The first call reads all weights (at least 0.5 GB/s per thread). Later calls compare torch's
    version counters, addresses and shapes. Writes through `.data` or in inference mode do not
    change counters, so later calls also compare 8 values of each tensor. These detect a merged
    adapter or different weights, but may miss an edit of single values.

    Raises:
        ConfigError: Weights are not whole in this process.
    """
    named = model.named_parameters(remove_duplicate=False)
    tensors = dict[str, torch.Tensor]([*named, *model.named_buffers(remove_duplicate=False)])
    samples: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in filter(is_whole, tensors.values()):
        samples.setdefault(tensor.device, []).append(sample(tensor, 8).view(torch.uint8))
    state: list[object] = [torch.cat(part).cpu().numpy().tobytes() for part in samples.values()]
    state += [
        (name, id(x), x.data_ptr(), -1 if x.is_inference() else x._version, x.shape, x.dtype)
        for name, x in tensors.items()
    ]
    if (known := _known.get(model, ("", "")))[0] == state:
        return known[1]
    if elsewhere := [name for name, tensor in tensors.items() if not is_whole(tensor)]:
        raise ConfigError(
            f"prefix_store: expected all weights in this process, got {elsewhere[0]!r} on no "
            "device, or as a part; leave prefix_store out where weights are offloaded or split"
        )
    # Hashing releases Python's lock.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        digest = digest_of(*pool.map(digest_of, tensors.items()))
    _known[model] = (state, digest)
    return digest


def fingerprint_weights(model: torch.nn.Module) -> dict[int, str]:
    """Return a digest for each layer whose attention is completely in this process.

    It covers the shapes and samples of the attention's parameters, rounded to bfloat16 and without
    names. It is therefore the same in float32 and bfloat16, on any device and inside wrappers.
    """
    mesh = getattr(model, "_device_mesh", None)
    if mesh is not None and mesh.size() > 1:  # transformers splits parameters
        return {}
    layers: dict[int, list[torch.nn.Parameter]] = {}
    decoder = getattr(model, "get_decoder", lambda: None)() or model
    for module in decoder.modules():
        parts = [vars(part).get("layer_idx") for part in module.modules()]
        # A decoder layer also has an index, but contains an attention with an index.
        if isinstance(parts[0], int) and sum(isinstance(index, int) for index in parts) == 1:
            layers.setdefault(parts[0], []).extend(_active_parameters(module))
    return {
        index: digest_of([(x.shape, sample(x).float().bfloat16()) for x in parameters])[:16]
        for index, parameters in sorted(layers.items())
        if parameters and all(map(is_whole, parameters))
    }


def _active_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters of a module, without adapters of PEFT that are still zero."""
    named = dict(module.named_parameters())
    # The other parts of an adapter have the same name, except for lora_B.
    second = {x: named.get(re.sub(r"\.lora_\w+", ".lora_B", x)) for x in named if ".lora_" in x}
    zero = {name for name, x in second.items() if x is not None and is_whole(x) and not x.any()}
    return [parameter for name, parameter in named.items() if name not in zero]
