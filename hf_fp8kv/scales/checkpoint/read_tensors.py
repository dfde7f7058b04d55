"""Select the scales among a checkpoint's tensors by name, check them, and pair them by layer."""

import logging
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

import torch
from safetensors import safe_open

from ...errors import ScaleError
from ...formats import AUTO, FORMATS, LayerPlan
from ...formats.rotation import compute_rotation_block
from ...utils.files import PICKLE_SUFFIXES, convert_read_errors
from ...utils.text import format_list
from ..layer_scales import FLOAT_DTYPES, LayerScales, ScaleData, make_scalar
from ..read_options import ReadOptions
from .checkpoint import JSON_FILE, KV_FILE, Checkpoint
from .configs import find_cached_layers, find_head_counts, find_text_config
from .tensor_names import (
    ATTENTION_PATTERN,
    BIAS_PATTERN,
    FOREIGN_PATTERNS,
    LAYER_REGEX,
    LIKELY_SCALE_PATTERN,
    TENSOR_NAMES,
    ZERO_POINT_PATTERN,
    ScaleTensor,
    match_tensors,
)

logger = logging.getLogger(__name__)


def read_tensors(checkpoint: Checkpoint, read_options: ReadOptions) -> ScaleData:
    """Return the scales among the tensors of a checkpoint. Raise ScaleError if there are none."""
    origin = checkpoint.origin
    config = checkpoint.config
    declaration = checkpoint.declaration
    if declaration.kind == "unsupported":
        raise ScaleError(
            f"{origin}: expected scales of an FP8 cache (static, symmetric, per tensor or "
            f"per head), got {declaration.description}. Pass scales=None for dynamic scales"
        )
    if declaration.kind == "dynamic":
        raise ScaleError(
            f"{origin}: expected a config that declares static scales, got "
            f"{declaration.description}, which needs no scales. Pass scales=None for dynamic "
            "scales, or fix the config"
        )
    scale_tensors, unknown_names = match_tensors(checkpoint.tensor_files, declaration)
    if not scale_tensors:
        raise _make_no_scales_error(checkpoint)
    if declaration.remark:
        logger.warning("%s: %s", origin, declaration.remark)
    if declaration.kind == "none":
        reason = "the config declares no KV cache" if config else "no config.json"
        logger.warning("%s: %s. Its KV scales are read as float8_e4m3fn", origin, reason)
    _check_foreign_tensors(checkpoint)
    layers = _pair_sides(checkpoint, scale_tensors)
    _add_biases(checkpoint, layers)
    if all(bool((scale == 1).all()) for layer in layers.values() for scale in layer.static):
        logger.warning(
            "%s: every KV scale is exactly 1.0, the value that tools write without calibration",
            origin,
        )
    ignored_names = [name for name in unknown_names if re.match(LAYER_REGEX, name)]
    if ignored_names:
        logger.warning(
            "%s: ignored tensors that look like scales: %s", origin, format_list(ignored_names)
        )
    model_type = config.get("model_type")
    layers = _add_unquantized_layers(checkpoint, layers)
    layers = read_options.select_layers(layers, config, origin)
    layers = _add_rotation(checkpoint, layers, scale_tensors)
    return ScaleData(
        layers,
        scale_tensors[0].dialect,
        model_type if isinstance(model_type, str) else None,
        origin,
    )


def _check_foreign_tensors(checkpoint: Checkpoint) -> None:
    """Refuse tensors of INT8 and NVFP4 caches, and zero points other than zero."""
    for name in checkpoint.tensor_files:
        for pattern, cache in FOREIGN_PATTERNS.items():
            if pattern.fullmatch(name):
                raise ScaleError(
                    f"{checkpoint.origin}: expected scales of an FP8 cache, got {name}, which "
                    f"belongs to {cache}. Pass scales=None for dynamic scales"
                )
    zero_point_names = filter(ZERO_POINT_PATTERN.fullmatch, checkpoint.tensor_files)
    for name, zero_point in _load_tensors(checkpoint, zero_point_names).items():
        if bool(zero_point.ne(0).any()):
            raise ScaleError(
                f"{checkpoint.origin}: {name}: expected a zero point of 0, got a different value. "
                "Asymmetric scales cannot be used"
            )


def _load_tensors(checkpoint: Checkpoint, names: Iterable[str]) -> dict[str, torch.Tensor]:
    names_by_file = defaultdict(list)
    for name in names:
        names_by_file[checkpoint.tensor_files[name]].append(name)
    tensors: dict[str, torch.Tensor] = {}
    for file_name, tensor_names in names_by_file.items():
        path = checkpoint.folder.find_file(file_name)
        if path is None:
            raise ScaleError(
                f"{checkpoint.origin}: expected the file {file_name}, which has scales according "
                "to the index, got none. Fetch it"
            )
        with convert_read_errors(path, "a safetensors file"), safe_open(path, "pt") as file:
            if missing_names := sorted(set(tensor_names).difference(file.keys())):
                raise ScaleError(
                    f"{path}: expected the tensor {missing_names[0]}, which the index lists here, "
                    "got none. Fetch the file again"
                )
            tensors |= {name: file.get_tensor(name) for name in tensor_names}
    return tensors


def _reshape_scale(checkpoint: Checkpoint, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a scale as float32, `[]`, or `[heads, 1]` if each head has a scale."""
    shape = list(tensor.shape)
    head_counts = find_head_counts(checkpoint.config)
    if tensor.dtype not in FLOAT_DTYPES:
        raise ScaleError(
            f"{checkpoint.origin}: {name}: expected one of {format_list(FLOAT_DTYPES)}, got "
            f"{tensor.dtype}. These are not scales of an FP8 cache"
        )
    is_single = all(size == 1 for size in shape)
    is_per_head = shape[1:] in ([1], [1, 1]) or (len(shape) == 1 and bool(head_counts))
    has_valid_heads = is_per_head and shape[0] > 0 and shape[0] in (head_counts or shape[:1])
    if not is_single and not has_valid_heads:
        raise ScaleError(
            f"{checkpoint.origin}: {name}: expected one number, or the shape [heads] or [heads, 1, "
            f"1] with the heads in config.json ({sorted(head_counts)}), got {shape}. Use this "
            "model's scales, calibrated per tensor or per head"
        )
    return tensor.float().reshape(() if is_single else (-1, 1))


def _add_biases(checkpoint: Checkpoint, layers: dict[int, LayerScales]) -> None:
    """Add the biases of ModelOpt's FP8_AFFINE, `[1, heads or 1, 1, D or 1]`.

    K's bias is its center. V is stored with its bias, so its scales are enlarged. If |V - bias| is
    at most 448 * scale, |V| is at most 448 * (scale + |bias| / 448).
    """
    matches = list(filter(None, map(BIAS_PATTERN.fullmatch, checkpoint.tensor_files)))
    tensors = _load_tensors(checkpoint, (match[0] for match in matches))
    for match in matches:
        tensor = tensors[match[0]]
        index = int(match["layer"])
        if index not in layers:
            raise ScaleError(
                f"{checkpoint.origin}: expected a scale for the layer of {match[0]}, got none. "
                "Export the checkpoint again"
            )
        layer = layers[index]
        shape = list(tensor.shape) or [1, 1, 1, 1]
        scale_head_counts = {len(scale) for scale in layer.static if scale.ndim} - {1}
        known_counts = scale_head_counts or find_head_counts(checkpoint.config) or shape[1:2]
        head_counts = {1, *known_counts}
        if tensor.dtype not in FLOAT_DTYPES or shape[::2] != [1, 1] or shape[1] not in head_counts:
            raise ScaleError(
                f"{checkpoint.origin}: {match[0]}: expected floats of the shape [1, heads, 1, D] "
                f"with heads in {sorted(head_counts)}, got {tensor.dtype} "
                f"{list(tensor.shape)}. Export per head and channel"
            )
        bias = tensor.float().reshape(shape[1::2])
        if match["side"] == "k":
            layers[index] = replace(layer, k_center=bias)
        else:
            layers[index] = replace(layer, v=layer.static[1] + bias.abs() / FORMATS["fp8_e4m3"].max)


def _add_rotation(
    checkpoint: Checkpoint, layers: dict[int, LayerScales], scale_tensors: list[ScaleTensor]
) -> dict[int, LayerScales]:
    rotations = checkpoint.declaration.rotations
    config = find_text_config(checkpoint.config)
    if not rotations:
        return layers
    head_dim = config.get("head_dim")
    if head_dim is None:
        hidden_size = config.get("hidden_size")
        num_heads = config.get("num_attention_heads")
        head_dim = (
            hidden_size // num_heads
            if isinstance(hidden_size, int) and isinstance(num_heads, int) and num_heads > 0
            else 0
        )
    block_size = compute_rotation_block(head_dim) if isinstance(head_dim, int) else 0
    for name in (each.name for each in scale_tensors if each.layer_index in layers):
        path = re.sub(ATTENTION_PATTERN.pattern + ".*", r"\g<path>", name)
        with convert_read_errors(checkpoint.origin, "targets of a rotation"):
            sizes = {size for size, target in rotations if _is_target(path, target)}
        if sizes != {block_size}:
            raise ScaleError(
                f"{checkpoint.origin}: expected K rotated in blocks of {block_size}, the largest "
                f"for heads of {head_dim!r}, got {format_list(sizes) or 'no rotation'} for {path}. "
                "Pass scales=None for dynamic scales, or calibrate"
            )
    plan = LayerPlan.parse("fp8_e4m3 rotated", "fp8_e4m3")
    return {index: replace(layer, plan=plan) for index, layer in layers.items()}


def _add_unquantized_layers(
    checkpoint: Checkpoint, layers: dict[int, LayerScales]
) -> dict[int, LayerScales]:
    """Add the layers that a declaration of quantized layers leaves out, in the model's dtype."""
    names = checkpoint.declaration.quantized_layers
    quantized = {int(match["layer"]) for name in names if (match := re.match(LAYER_REGEX, name))}
    cached_layers = find_cached_layers(checkpoint.origin, checkpoint.config) or ()
    unquantized = set(cached_layers) - quantized if quantized else set()
    if wrong_layers := format_list(sorted(unquantized & layers.keys())):
        raise ScaleError(
            f"{checkpoint.origin}: expected no scales of layers that are not quantized according "
            f"to {checkpoint.declaration.description}, got layers {wrong_layers}. Fix the config"
        )
    if not unquantized:
        return layers
    unquantized_layer = LayerScales(
        make_scalar(1.0),
        make_scalar(1.0),
        source=f"{checkpoint.origin}, not quantized",
        plan=LayerPlan.parse(AUTO, AUTO),
    )
    plan = LayerPlan.parse("fp8_e4m3", "fp8_e4m3")
    return dict.fromkeys(unquantized, unquantized_layer) | {
        index: replace(layer_scales, plan=plan) for index, layer_scales in layers.items()
    }


def _is_target(path: str, target: str) -> bool:
    """Return whether a target of compressed-tensors matches a module: a path, regex or class."""
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), path) is not None
    return target == path or target.endswith("Attention")


def _pair_sides(checkpoint: Checkpoint, scale_tensors: list[ScaleTensor]) -> dict[int, LayerScales]:
    """Return the scales of K and V of each layer, in the unit of E4M3FN. Log each remark once.

    K and V come from the first priority that has both. If none has both, each comes from the first
    priority that has it.
    """
    factor = 0.5 if checkpoint.declaration.is_fnuz else 1.0
    tensors = _load_tensors(checkpoint, (scale_tensor.name for scale_tensor in scale_tensors))
    scales = {
        name: _reshape_scale(checkpoint, name, tensor) * factor for name, tensor in tensors.items()
    }
    # Names of tensors by priority and side, for each layer.
    layer_names: dict[int, dict[tuple[int, str], str]] = defaultdict(dict)
    kv_names: dict[int, str] = {}  # the first name for both K and V, by layer
    for priority, index, name, tensor_sides, _ in scale_tensors:
        if tensor_sides == "kv":
            kv_names.setdefault(index, name)
        for side in tensor_sides:
            first_name = layer_names[index].setdefault((priority, side), name)
            # Neither of two differing tensors can be preferred.
            if first_name != name and not torch.equal(scales[name], scales[first_name]):
                raise ScaleError(
                    f"{checkpoint.origin}: expected one scale for {side.upper()} of layer "
                    f"{index}, got {first_name} and {name}, which differ. Delete {first_name} or "
                    f"{name}"
                )
    remarks: dict[str, list[int]] = defaultdict(list)
    layers = {}
    for index, candidates in layer_names.items():
        # Iterate in reverse, so that the first priority of each side wins.
        best_names = {side: name for (_, side), name in reversed(candidates.items())}
        complete_priorities = [
            priority
            for priority, side in candidates
            if side == "k" and (priority, "v") in candidates
        ]
        if complete_priorities:
            best_names = {side: candidates[complete_priorities[0], side] for side in "kv"}
        elif len(best_names) == 1:
            (side,) = best_names
            remarks[f"only {side.upper()} has a scale, which is used for K and V"].append(index)
            best_names = dict.fromkeys("kv", best_names[side])
        k_name = best_names["k"]
        v_name = best_names["v"]
        k, v = scales[k_name], scales[v_name]
        kv_name = kv_names.get(index, k_name)
        if kv_name not in (k_name, v_name) and scales[kv_name].max() != max(k.max(), v.max()):
            remarks[
                "kv_scale differs from the larger of the K and V scales, and is ignored"
            ].append(index)
        source_names = ", ".join(dict.fromkeys((k_name, v_name)))
        source = f"{checkpoint.origin}/{checkpoint.tensor_files[k_name]}: {source_names}"
        layers[index] = LayerScales(k, v, source=source)
    for remark, indices in remarks.items():
        logger.warning("%s: %s (layers %s)", checkpoint.origin, remark, format_list(indices))
    return layers


def _make_no_scales_error(checkpoint: Checkpoint) -> ScaleError:
    names = ", ".join(name.template.replace("{side}", "{k,v}") for name in TENSOR_NAMES)
    likely_names = format_list(
        name for name in checkpoint.tensor_files if LIKELY_SCALE_PATTERN.search(name)
    )
    got = f"got only {likely_names}, which no format has" if likely_names else "got none"
    pickles = chain.from_iterable(map(checkpoint.folder.list_files, PICKLE_SUFFIXES))
    if pickle_names := format_list(pickles):
        got += f" (pickles are never loaded: {pickle_names})"
    declaration = checkpoint.declaration
    server_note = (
        ", so servers use 1.0" if declaration.kind == "static" and not likely_names else ""
    )
    return ScaleError(
        f"{checkpoint.origin}: expected {KV_FILE}, {JSON_FILE}, or scale tensors such as "
        f"self_attn.{names} in the layers of the language model, {got}. The config declares "
        f"{declaration.description}{server_note}. Pass scales=None for dynamic scales, or calibrate"
    )
