"""The base classes of formats of static scales: their properties and files.

Scales that a format cannot hold are reduced, so that no additional value saturates.
"""

import copy
import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import save as to_safetensors

from ...errors import ScaleError
from ...formats import FORMATS
from ...utils.files import read_json
from ...utils.text import format_list
from ..checkpoint.checkpoint import FIRST_FILE, INDEX_FILE, SCALES_SHARD, SINGLE_FILE, Checkpoint
from ..checkpoint.configs import HF_QUANT_CONFIG, Config, as_mapping, find_dialect, iterate_configs
from ..checkpoint.tensor_names import ATTENTION_PATTERN
from ..layer_scales import Granularity, LayerScales, ScaleData


def to_json(data: object) -> bytes:
    """Return the bytes of a JSON file."""
    return json.dumps(data, indent=2).encode() + b"\n"


def make_index(old_index: Path | None, weight_map: Mapping[str, str]) -> bytes:
    """Return an index with the metadata of `old_index`, except counts, which no loader reads."""
    metadata = {} if old_index is None else as_mapping(read_json(old_index).get("metadata"))
    metadata = {name: value for name, value in metadata.items() if not name.startswith("total_")}
    return to_json({"metadata": metadata, "weight_map": weight_map})


class ScaleFormat:
    """A format of static scales. Scales that it cannot hold are reduced before writing."""

    name: ClassVar[str]
    granularity: ClassVar[Granularity] = "tensor"  # the finest granularity of the format
    is_lossless: ClassVar[bool] = False  # whether files hold all scales, centers and plans
    has_separate_sides: ClassVar[bool] = True  # whether K and V have separate scales
    holds_ranks: ClassVar[bool] = False  # whether tensor-parallel ranks have separate scales

    def make_files(
        self, scales: ScaleData, tp_size: int = 1, checkpoint: Checkpoint | None = None
    ) -> dict[str, bytes]:
        """Return the content of each file for scales from `reduce_scales`, in the order of writing.

        The files replace files of the same name in a checkpoint, or are added to it.
        """
        raise NotImplementedError(self.name)

    def describe_gaps(self, scales: ScaleData, checkpoint: Checkpoint | None = None) -> list[str]:
        """Return sentences about the facts that readers need but the files lack."""
        return []


class TensorFormat(ScaleFormat):
    """Scales as tensors of a checkpoint, which its config declares."""

    quant_method: ClassVar[str] = ""  # method in the config that declares the scales
    tensor_name: ClassVar[str] = "{side}_scale"  # relative to the attention module
    shape: ClassVar[tuple[int, ...]] = ()  # shape of the tensor of a single scale
    is_indexed: ClassVar[bool] = True  # whether the index of a checkpoint's copy lists the scales

    def declare(self, config: Config, scales: ScaleData, excluded: Sequence[str]) -> None:
        """Add the entries that declare the scales to a `config.json`. Other entries are kept.

        `excluded` names the modules of a checkpoint whose weights are not quantized. Raise
        ScaleError if another tool has quantized the weights.
        """
        raise NotImplementedError(self.name)

    def make_files(
        self, scales: ScaleData, tp_size: int = 1, checkpoint: Checkpoint | None = None
    ) -> dict[str, bytes]:
        tensor_files = {} if checkpoint is None else checkpoint.tensor_files
        modules = {index: f"model.layers.{index}.self_attn" for index in scales.layers}
        config: Config = {"model_type": scales.model_type} if scales.model_type else {}
        modelopt_config = None
        index_path = None
        if checkpoint is not None and (tensor_files or checkpoint.config):
            config = copy.deepcopy(checkpoint.config)
            modelopt_config = copy.deepcopy(checkpoint.modelopt_config)
            index_path = checkpoint.folder.find_file(INDEX_FILE)
        else:  # add the entries that follow from the scales
            if sorted(scales.layers) == list(range(len(scales.layers))):
                config["num_hidden_layers"] = len(scales.layers)
            head_counts = {
                len(layer.static[0]) for layer in scales.layers.values() if layer.static[0].ndim
            }
            if len(head_counts) == 1:
                config["num_key_value_heads"] = head_counts.pop()
        if checkpoint is not None and tensor_files:
            modules = _find_attention_modules(checkpoint, scales.layers)
        tensors = {}
        for index, layer in scales.layers.items():
            for side, scale in zip("kv", layer.static, strict=True):
                name = f"{modules[index]}.{self.tensor_name.format(side=side)}"
                tensors[name] = scale.reshape((-1, 1, 1) if scale.ndim else self.shape).clone()
        excluded = {
            name.removesuffix(".weight") for name in tensor_files if name.endswith(".weight")
        }
        # Some readers use the names of the modules with experts.
        excluded |= {
            name.split(".experts.")[0] + ".experts" for name in tensor_files if ".experts." in name
        }
        weight_map = {
            name: FIRST_FILE if file_name == SINGLE_FILE else file_name
            for name, file_name in tensor_files.items()
        }
        if self.is_indexed or not tensor_files:
            weight_map |= dict.fromkeys(tensors, SCALES_SHARD)
        return {
            SCALES_SHARD: to_safetensors(tensors, {"format": "pt"}),
            INDEX_FILE: make_index(index_path, weight_map),
            **self.make_configs(config, modelopt_config, scales, sorted(excluded)),
        }

    def make_configs(
        self,
        config: Config,
        modelopt_config: Config | None,
        scales: ScaleData,
        excluded: Sequence[str],
    ) -> dict[str, bytes]:
        """Return the configs that declare the scales.

        `modelopt_config` is the content of `hf_quant_config.json`, if the checkpoint has this file.
        """
        if (
            self.quant_method
            and modelopt_config is not None
            and "quantization_config" not in config
        ):
            # Only hf_quant_config.json describes the quantized weights. An entry in config.json
            # would contradict it.
            raise ScaleError(
                f"format {self.name!r}: expected unquantized weights, got "
                f"{HF_QUANT_CONFIG}. Choose modelopt, or a format without quant_method, such as tgi"
            )
        self.declare(config, scales, excluded)
        return {"config.json": to_json(config)}

    def find_or_add_quant_config(self, config: Config, new_entries: Config) -> Config:
        """Return the quantization config of the weights, or add a config for the cache only.

        The added config has `quant_method` and `new_entries`. Raise ScaleError for any other tool.
        """
        for _, entries in iterate_configs(config):
            for entry_name in ("quantization_config", "compression_config"):
                quant_config = entries.get(entry_name)
                if not isinstance(quant_config, dict) or not quant_config:
                    continue
                if find_dialect(entry_name, quant_config) != self.name:
                    raise ScaleError(
                        f"format {self.name!r}: expected unquantized weights, or the quant_method "
                        f"{self.quant_method!r}, got "
                        f"{quant_config.get('quant_method') or entry_name!r}. "
                        "Choose a format without quant_method, such as tgi"
                    )
                return quant_config
        quant_config = {"quant_method": self.quant_method, **new_entries}
        config["quantization_config"] = quant_config
        return quant_config


def reduce_scales(scales: ScaleData, scale_format: ScaleFormat) -> tuple[ScaleData, list[str]]:
    """Return scales that the format can hold, and sentences about the losses.

    The largest scale is kept. A center that is left out enlarges the scales of K.

    Raises:
        ScaleError: The scales are dynamic or for rotated values, or some layers are not quantized.
            No server reads such scales.
    """
    if scale_format.is_lossless:
        return scales, []
    plans = (scales.plan or {}).items()
    rotated_layers = format_list(index for index, plan in plans if plan.k.rotated or plan.v.rotated)
    auto_layers = format_list(index for index, plan in plans if plan.k.is_auto or plan.v.is_auto)
    if rotated_layers or auto_layers or scales.is_dynamic:
        if rotated_layers:
            scaled_values = f"rotated values in layers {rotated_layers}"
        elif auto_layers:
            scaled_values = f"unquantized layers {auto_layers}"
        else:
            scaled_values = "each token"
        raise ScaleError(
            f"format {scale_format.name!r}: expected scales of unchanged K and V, got scales for "
            f"{scaled_values} ({scales.origin}). Readers of the format cannot store these. "
            "Save as 'hf_fp8kv', or calibrate without a plan"
        )
    loss_layers: dict[str, list[int]] = defaultdict(list)
    loss_layers["the formats of the plan are left out, servers store E4M3"] = list(
        scales.plan or ()
    )
    static_scales: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    head_counts: dict[int, int] = {}
    for index, layer in scales.layers.items():
        k, v = layer.static
        if layer.k_center is not None:  # |K| <= max * scale + |center|
            loss_layers["K's scales are enlarged by the centers, which are left out"].append(index)
            headroom = layer.k_center.abs() / FORMATS["fp8_e4m3"].max
            k = k + (headroom if k.ndim else headroom.max())
        static_scales[index] = k, v
        head_counts[index] = max(len(scale) if scale.ndim else 1 for scale in (k, v))
    # A layer with one scale gets the heads of the remaining layers, because all share a strategy.
    distinct_counts = set(head_counts.values()) - {1}
    default_count = max(distinct_counts) if len(distinct_counts) == 1 else 0
    is_per_head = scale_format.granularity == "head" and (
        default_count > 0 or 1 not in head_counts.values()
    )
    layers = {}
    for index, kv in static_scales.items():
        k, v = (
            scale.amax(1, keepdim=True) if scale.ndim and is_per_head else scale.max()
            for scale in kv
        )
        if is_per_head:
            num_heads = max(head_counts[index], default_count)
            k, v = (scale.expand(num_heads, 1).clone() for scale in (k, v))
        for scale, reduced_scale in zip(kv, (k, v), strict=True):
            if scale.ndim and (scale != reduced_scale).any():
                unit = "head" if is_per_head else "layer"
                loss_layers[f"the largest scale of each {unit} is written"].append(index)
        if not scale_format.has_separate_sides:
            if (k != v).any():
                loss_layers["K and V share the larger scale"].append(index)
            k = v = torch.maximum(k, v)
        layers[index] = LayerScales(k, v, source=scales.layers[index].source)
    losses = [
        f"{loss} (layers {format_list(dict.fromkeys(indices))})"
        for loss, indices in loss_layers.items()
        if indices
    ]
    return replace(scales, layers=layers), losses


def _find_attention_modules(
    checkpoint: Checkpoint, layer_indices: Collection[int]
) -> dict[int, str]:
    module_paths: dict[int, set[str]] = defaultdict(set)
    matches = filter(None, map(ATTENTION_PATTERN.match, checkpoint.tensor_files))
    for match in matches:
        module_paths[int(match["layer"])].add(match["path"])
    for index in layer_indices:
        if len(module_paths[index]) != 1:
            raise ScaleError(
                f"{checkpoint.origin}: expected one attention module in layer {index}, got "
                f"{format_list(sorted(module_paths[index])) or 'none'}. Use this model's scales"
            )
    return {index: module_paths[index].pop() for index in layer_indices}
