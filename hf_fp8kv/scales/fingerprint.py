"""Fingerprint of the weights that static scales were made for.

K and V move when a model is trained, and scales of before then saturate, or are coarser than they
need to be. A fingerprint is a digest for each layer, of the parameters of its attention: of their
shapes, and of up to 4,096 numbers of each, spread over it. A step of an optimizer changes nearly
all numbers, so that some of these show it; reading them takes milliseconds. They are rounded to
bfloat16, so that a checkpoint has the same fingerprint in float32 and in bfloat16, on any device;
a step that changes none of them there is too small to matter to a scale. Names count from the
attention module on, so that wrappers do not matter.

A layer that is not whole in this process (split over several, on no device) has none: nothing is
said of it.
"""

import hashlib
import logging
from collections.abc import Mapping

import torch

from ..utils.text import format_list
from ..utils.warn_once import warn_once

logger = logging.getLogger(__name__)

_SAMPLE = 4096
_DIGITS = 16
_STALE = (
    "static scales (%s) were made for other weights than %s has now: the attention of %s differs. "
    "%s. Calibrate again (hf_fp8kv.calibrate), or use dynamic scales (scales=None); "
    "scales.made_for(model) tells at any time"
)
_HARM = "What its K and V have grown to since saturates"
_HARM_OF_PLANS = "Nothing saturates, but their plan and centers may suit it no longer"


def fingerprint_weights(model: torch.nn.Module) -> dict[int, str]:
    """Return a digest for each layer whose attention is whole here: 16 hexadecimal digits."""
    if _is_split(model):
        return {}
    attentions: dict[int, list[torch.nn.Module]] = {}
    decoder = getattr(model, "get_decoder", lambda: None)() or model
    for module in decoder.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and not _holds_another(module):
            attentions.setdefault(index, []).append(module)
    digests = {index: _digest(modules) for index, modules in sorted(attentions.items())}
    return {index: digest for index, digest in digests.items() if digest}


def compare_weights(model: torch.nn.Module, fingerprint: Mapping[int, str]) -> list[int] | None:
    """Return the layers whose attention has other weights than a fingerprint says.

    None: nothing can be said, since no layer has both.
    """
    if not fingerprint:
        return None
    found = fingerprint_weights(model)
    both = found.keys() & fingerprint.keys()
    if not both:
        return None
    return sorted(index for index in both if found[index] != fingerprint[index])


def warn_if_stale(model: torch.nn.Module, scales: object) -> None:
    """Warn once where static scales were made for other weights than a model's.

    `scales` without a fingerprint, constants and None say nothing.
    """
    other = compare_weights(model, getattr(scales, "fingerprint", {}))
    if other:
        layers = f"layer{'s' if len(other) > 1 else ''} {format_list(other)}"
        origin = getattr(scales, "origin", "")
        harm = _HARM_OF_PLANS if getattr(scales, "is_dynamic", False) else _HARM
        warn_once(logger, _STALE % (origin, type(model).__name__, layers, harm))


def _is_split(model: torch.nn.Module) -> bool:
    """Return whether transformers has spread the model's parameters over processes."""
    mesh = getattr(model, "_device_mesh", None)
    return mesh is not None and mesh.size() > 1


def _holds_another(module: torch.nn.Module) -> bool:
    """Return whether a module that knows its layer has another one inside, as decoder layers do."""
    inside = list(module.modules())[1:]
    return any(isinstance(getattr(part, "layer_idx", None), int) for part in inside)


def _digest(modules: list[torch.nn.Module]) -> str:
    """Return the digest of modules' parameters; empty if there are none, or not whole here.

    An adapter of PEFT that is still zero changes nothing, and is left out.
    """
    parameters = {
        f"{number}.{name.replace('.base_layer.', '.')}": parameter.detach()
        for number, module in enumerate(modules)
        for name, parameter in module.named_parameters()
    }
    digest = hashlib.sha256()
    for name, parameter in sorted(parameters.items()):
        is_split = hasattr(parameter, "placements")  # a DTensor
        if parameter.is_meta or not parameter.numel() or is_split:
            return ""
        before, is_adapter, after = name.partition(".lora_")
        if is_adapter:
            # lora_A, lora_B and others of the same adapter.
            second = parameters.get(f"{before}.lora_B.{after.partition('.')[2]}")
            if second is not None and not second.any():
                continue
        digest.update(f"{name}{list(parameter.shape)}".encode())
        digest.update(_sample(parameter))
    return digest.hexdigest()[:_DIGITS] if parameters else ""


def _sample(parameter: torch.Tensor) -> bytes:
    """Return numbers of a parameter from its first on, at equal distances, as bytes."""
    flat = parameter.flatten()
    # An odd distance, so that not all of them are in one column.
    part = flat[:: -(-len(flat) // _SAMPLE) | 1]
    if part.is_floating_point():
        part = part.float().bfloat16().view(torch.int16)
    return part.cpu().numpy().tobytes()
