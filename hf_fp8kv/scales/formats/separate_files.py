"""Formats with separate files of scales: "hf_fp8kv", and "vllm-json", `kv_cache_scales.json`."""

import json
import logging
import re
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as to_safetensors

from ...errors import ScaleError
from ...formats import LayerPlan
from ...utils.files import convert_read_errors, parse_index, parse_metadata
from ...utils.text import format_list, format_value
from ..checkpoint.checkpoint import JSON_FILE, KV_FILE, Checkpoint
from ..checkpoint.configs import Config
from ..layer_scales import LayerScales, ScaleData, make_scalar, parse_constant
from ..protection import Protection
from ..read_options import ReadOptions
from .base import ScaleFormat, to_json

logger = logging.getLogger(__name__)

# The key of the file's metadata, which is a JSON object, and the entries that all files have.
METADATA_KEY = "hf_fp8kv"
_COMMON_METADATA = {"version": 1, "dtype": "float8_e4m3fn"}


class HfFp8kv(ScaleFormat):
    """The format of this package, which holds every granularity and the centers exactly.

    A folder that contains `KV_FILE` is never read as a checkpoint. In a folder with weights, the
    file is in the subfolder `KV_FOLDER`.
    """

    name = "hf_fp8kv"
    granularity = "channel"
    is_lossless = True

    def make_files(
        self, scales: ScaleData, tp_size: int = 1, checkpoint: Checkpoint | None = None
    ) -> dict[str, bytes]:
        metadata: dict[str, object] = {
            **_COMMON_METADATA,
            "model_type": scales.model_type,
            "origin": scales.origin,
            "read_as": scales.format,
            "weights_digest": scales.weights_digest,
        }
        if scales.plan is not None:
            metadata["plan"] = {index: list(map(str, plan)) for index, plan in scales.plan.items()}
        if scales.protection is not None:
            metadata["protection"] = asdict(scales.protection)
        tensors: dict[str, torch.Tensor] = {}
        for index, layer in scales.layers.items():
            layer_tensors = {"k_scale": layer.k, "v_scale": layer.v, "k_center": layer.k_center}
            tensors |= {
                f"layers.{index}.{name}": tensor.clone()
                for name, tensor in layer_tensors.items()
                if tensor is not None
            }
        return {KV_FILE: to_safetensors(tensors, {METADATA_KEY: json.dumps(metadata)})}


def parse_kv_scales(contents: bytes, path: str) -> ScaleData:
    """Return the scales in the contents of a file in the format "hf_fp8kv"."""
    with convert_read_errors(path, "a file of scales as save_pretrained writes it"):
        tensors = from_safetensors(contents)
        metadata = json.loads(parse_metadata(contents)[METADATA_KEY])
        if metadata | _COMMON_METADATA != metadata:
            raise ScaleError(
                f"{path}: expected {_COMMON_METADATA}, got {metadata.get('version')!r} and "
                f"{metadata.get('dtype')!r}. Update hf_fp8kv"
            )
        model_type = metadata["model_type"]
        if not isinstance(model_type, str | None):
            raise TypeError(f"expected a string or null as model_type, got {model_type!r}")
        entries = metadata.get("plan", {})
        plans = {parse_index(index): LayerPlan.parse(*sides) for index, sides in entries.items()}
        tensors_by_layer: dict[int, dict[str, torch.Tensor]] = {index: {} for index in plans}
        for name, tensor in tensors.items():
            prefix, index, suffix = name.split(".")
            if prefix != "layers":
                raise ValueError(f"expected names such as layers.0.k_scale, got {name!r}")
            tensors_by_layer.setdefault(parse_index(index), {})[suffix] = tensor
        layers = {
            index: LayerScales(
                layer_tensors.pop("k_scale", None),
                layer_tensors.pop("v_scale", None),
                layer_tensors.pop("k_center", None),
                f"{path}: layers.{index}",
                plans.get(index),
                **layer_tensors,  # an error for other names
            )
            for index, layer_tensors in tensors_by_layer.items()
        }
        if (weights_digest := metadata.get("weights_digest")) is not None:
            bytes.fromhex(weights_digest)  # raises an error for invalid digits
        entry = metadata.get("protection")
        protection = None if entry is None else Protection.from_dict(entry)
        return ScaleData(
            layers,
            HfFp8kv.name,
            model_type,
            path,
            weights_digest=weights_digest,
            protection=protection,
        )


class VllmJson(ScaleFormat):
    """vLLM's `quantization_param_path`: one number for both K and V of each layer and rank."""

    name = "vllm-json"
    has_separate_sides = False
    holds_ranks = True

    def make_files(
        self, scales: ScaleData, tp_size: int = 1, checkpoint: Checkpoint | None = None
    ) -> dict[str, bytes]:
        layers = scales.layers
        model_type = scales.model_type
        if checkpoint is not None and isinstance(checkpoint.config.get("model_type"), str):
            # Readers compare it with the model type of the checkpoint.
            model_type = str(checkpoint.config["model_type"])
        if sorted(layers) != list(range(len(layers))):
            raise ScaleError(
                f"format {self.name!r}: expected the layers 0 to {len(layers) - 1}, got "
                f"{format_list(sorted(layers))}. Readers of the format refuse a file with gaps"
            )
        scale_by_layer = {str(index): layer.static[0].item() for index, layer in layers.items()}
        ranks = dict.fromkeys(map(str, range(tp_size)), scale_by_layer)
        content = {
            "model_type": model_type,
            "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": ranks},
        }
        return {JSON_FILE: to_json(content)}

    def describe_gaps(self, scales: ScaleData, checkpoint: Checkpoint | None = None) -> list[str]:
        config = {} if checkpoint is None else checkpoint.config
        if scales.model_type or isinstance(config.get("model_type"), str):
            return []
        return ["model_type is unknown and written as null, which vLLM and SGLang refuse"]


def parse_json(path: Path, data: Config, read_options: ReadOptions, config: Config) -> ScaleData:
    """Return the scales of a `kv_cache_scales.json`. `config` is the config.json next to it."""
    cache_entry = data.get("kv_cache")
    if not isinstance(cache_entry, dict):
        raise ScaleError(
            f"{path}: expected an object 'kv_cache' with 'dtype' and 'scaling_factor', got "
            f"{format_list(data) or 'nothing'}. This is not a {JSON_FILE}"
        )
    if cache_entry.get("dtype") != "float8_e4m3fn":
        raise ScaleError(
            f"{path}: kv_cache.dtype: expected 'float8_e4m3fn', got "
            f"{format_value(cache_entry.get('dtype'))}. Scales of other formats cannot be used"
        )
    model_type = data.get("model_type")
    if not isinstance(model_type, str | None) or ("model_type" not in data and read_options.strict):
        raise ScaleError(
            f"{path}: model_type: expected a string or null, got {format_value(model_type)}. "
            "Add it, or pass strict=False (--lenient)"
        )
    config_type = config.get("model_type")
    if model_type is not None and config_type not in (None, model_type):
        message = f"{path}: expected scales of a {config_type!r} model, got {model_type!r}"
        if read_options.strict:
            raise ScaleError(
                f"{message}. Use this model's scales, or pass strict=False (--lenient)"
            )
        logger.warning("%s", message)
    ranks = _parse_ranks(path, cache_entry.get("scaling_factor"))
    if all(scales == ranks[0] for scales in ranks.values()):
        ranks = {0: ranks[0]}

    def read_rank(rank: int) -> ScaleData:
        layers = {
            index: LayerScales(
                make_scalar(scale), make_scalar(scale), source=f"{path}: layer {index}"
            )
            for index, scale in ranks[rank].items()
        }
        return ScaleData(layers, VllmJson.name, model_type, str(path))

    merged_scales = read_options.merge_ranks(path, len(ranks), read_rank)
    # Readers of the format refuse a file with more or fewer layers.
    layers = read_options.select_layers(merged_scales.layers, config, str(path), exact=True)
    return replace(merged_scales, layers=layers)


def _parse_ranks(path: Path, factors: object) -> dict[int, dict[int, float]]:
    """Return the scale of each layer, by rank, from the entry `scaling_factor`."""
    ranks: dict[int, dict[int, float]] = {}
    entry = f"{path}: kv_cache.scaling_factor"
    # Old files have "rank0" instead of "0".
    for rank, entries in _parse_keys(entry, factors, "rank", "(?:rank)?").items():
        ranks[rank] = {}
        for layer, value in _parse_keys(f"{path}: rank {rank}", entries, "layer").items():
            label = f"{path}: rank {rank}, layer {layer}"
            if isinstance(value, str):
                with convert_read_errors(label, "a number"):
                    value = float(value)
            ranks[rank][layer] = parse_constant(value, label)
    if sorted(ranks) != list(range(len(ranks))):
        raise ScaleError(
            f"{path}: expected the ranks 0 to {len(ranks) - 1}, got {format_list(sorted(ranks))}. "
            "Add the missing rank"
        )
    for rank, scales in ranks.items():
        if set(scales) != set(ranks[0]):
            raise ScaleError(
                f"{path}: expected the same layers for every rank, got {len(ranks[0])} layers for "
                f"rank 0 and {len(scales)} for rank {rank}. Calibrate again"
            )
    return ranks


def _parse_keys(label: str, entries: object, kind: str, prefix: str = "") -> dict[int, object]:
    """Return the entries of a JSON object by the numbers in their keys, each at most once."""
    if not isinstance(entries, dict) or not entries:
        raise ScaleError(
            f"{label}: expected an object of {kind}s, got {format_value(entries)}. "
            'An example of kv_cache.scaling_factor is {"0": {"0": 0.02}}'
        )
    values_by_number: dict[int, object] = {}
    for key, value in entries.items():
        match = re.fullmatch(prefix + r"([0-9]{1,9})", key)
        if match is None or int(match[1]) in values_by_number:
            raise ScaleError(
                f"{label}: expected every {kind} once, with a key such as '0', got "
                f"{format_value(key)}. Rename or delete it"
            )
        values_by_number[int(match[1])] = value
    return values_by_number
