"""TensorFormat: scales as tensors of a checkpoint, which its config declares."""

import copy
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import save as to_safetensors

from ...errors import ScaleError
from ...utils.files import read_json
from ...utils.text import format_list
from ..checkpoint.checkpoint import FIRST_FILE, INDEX_FILE, ONLY_FILE, Checkpoint
from ..checkpoint.config import HF_QUANT_CONFIG, Config, as_mapping, nested_configs
from ..checkpoint.read_tensors import read_tensors
from ..checkpoint.tensor_names import ATTENTION_MODULE
from ..layer_scales import LayerScales, ScaleData
from ..request import Request
from .base import ScaleFormat

SCALES_FILE = "model-kv-scales.safetensors"


def to_json(data: object) -> bytes:
    """Return the bytes of a JSON file."""
    return json.dumps(data, indent=2).encode() + b"\n"


def with_own_file(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with the tensors of our file of scales, also without an index."""
    names = checkpoint.folder.header(SCALES_FILE) or ()
    return replace(checkpoint, not_indexed=dict.fromkeys(names, SCALES_FILE))


class TensorFormat(ScaleFormat):
    """Scales as tensors of a checkpoint."""

    indexed: ClassVar[bool] = True  # whether the index of a copy of a checkpoint names the scales

    def declare(self, config: Config, scales: ScaleData, excluded: Sequence[str]) -> None:
        """Add the entries that declare the scales to a `config.json`; the other entries stay.

        `excluded` are the modules of a checkpoint whose weights are not quantized. ScaleError is
        raised if the weights are quantized by another tool.
        """
        raise NotImplementedError(self.name)

    def read(self, checkpoint: Checkpoint, request: Request) -> ScaleData | None:
        scale_tensors = checkpoint.scale_tensors
        if not scale_tensors or scale_tensors[0].tensor_name.format != self.name:
            return None
        if request.strict and checkpoint.folder.path("config.json") is None:
            raise ScaleError(
                f"{checkpoint.origin}: expected a config.json beside the checkpoint, found none: "
                "it says whether the scales are of FP8; add it, or pass strict=False (--lenient)"
            )
        return read_tensors(checkpoint, checkpoint.files, request)

    def files(
        self, scales: ScaleData, tp_size: int = 1, checkpoint: Checkpoint | None = None
    ) -> dict[str, bytes]:
        weights = {} if checkpoint is None else checkpoint.files
        config, metadata = _minimal_config(scales), Config()
        second: Config | None = None
        modules, size = None, 0
        if checkpoint is not None and (weights or checkpoint.config):
            config = copy.deepcopy(checkpoint.config)
            path, index = (checkpoint.folder.path(n) for n in (HF_QUANT_CONFIG, INDEX_FILE))
            second = None if path is None else read_json(path, unique=False)
            metadata = {} if index is None else dict(as_mapping(read_json(index).get("metadata")))
        if checkpoint is not None and weights:
            modules = _attention_modules(checkpoint, scales.layers)
            paths = [checkpoint.folder.path(file) for file in {*weights.values()}]
            size = sum(_count_bytes(path, weights) for path in paths if path)
        tensors = self.tensors(scales.layers, modules)
        listed = tensors if self.indexed or not weights else {}
        metadata["total_size"] = size + sum(tensor.nbytes for tensor in listed.values())
        weight_map = {n: FIRST_FILE if f == ONLY_FILE else f for n, f in weights.items()}
        weight_map |= dict.fromkeys(listed, SCALES_FILE)
        return {
            SCALES_FILE: to_safetensors(tensors, {"format": "pt"}),
            INDEX_FILE: to_json({"metadata": metadata, "weight_map": weight_map}),
            **self.config_files(config, second, scales, _modules_with_weights(weights)),
        }

    def config_files(
        self, config: Config, second: Config | None, scales: ScaleData, excluded: Sequence[str]
    ) -> dict[str, bytes]:
        """Return the configs that declare the scales; `second` is a `hf_quant_config.json`."""
        if self.quant_method and second is not None and "quantization_config" not in config:
            # The weights are quantized by this second config alone: another in the first one
            # would say something else of them.
            raise ScaleError(
                f"format {self.name!r}: expected unquantized weights, got "
                f"{HF_QUANT_CONFIG}; choose modelopt, or a format that declares none, such as tgi"
            )
        self.declare(config, scales, excluded)
        return {"config.json": to_json(config)}

    def tensors(
        self, layers: Mapping[int, LayerScales], modules: Mapping[int, str] | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of a checkpoint, float32, by their names.

        `modules` are the attention modules of the layers; None: they have their usual names.
        """
        tensors = {}
        for index, layer in layers.items():
            for known in self.tensor_names:
                for side, scale in zip("kv", layer.static, strict=True):
                    if known.shape is not None:
                        module, tail = known.name.format(side=side).split(".", 1)
                        path = (
                            f"model.layers.{index}.{module}" if modules is None else modules[index]
                        )
                        shape = (-1, 1, 1) if scale.ndim else known.shape
                        tensors[f"{path}.{tail}"] = scale.reshape(shape).clone()
        return tensors

    def quantization_block(self, config: Config, new: Config) -> Config:
        """Return the quantization config of the weights; raise ScaleError for another tool's.

        Where there is none, `new` becomes one, with the tool's `quant_method`: the entries of one
        that quantizes nothing but the cache.
        """
        for owner in (config, *(inner for _, inner in nested_configs("", config))):
            for entry in ("quantization_config", "compression_config"):
                block = owner.get(entry) if isinstance(owner, dict) else None
                if not isinstance(block, dict) or not block:
                    continue
                method = str(block.get("quant_method") or "").lower()
                if not self.recognizes(entry, method):
                    raise ScaleError(
                        f"format {self.name!r}: expected unquantized weights, or the quant_method "
                        f"{self.quant_method!r}, got {method or entry!r}; a config has one, choose "
                        "a format that needs none, such as tgi"
                    )
                return block
        block = {"quant_method": self.quant_method, **new}
        config["quantization_config"] = block
        return block


def _minimal_config(scales: ScaleData) -> Config:
    """Return the entries of a `config.json` that the scales alone can fill in."""
    config: Config = {"model_type": scales.model_type} if scales.model_type else {}
    if sorted(scales.layers) == list(range(len(scales.layers))):
        config["num_hidden_layers"] = len(scales.layers)
    heads = {k.shape[0] for k, _ in (s.static for s in scales.layers.values()) if k.ndim}
    if len(heads) == 1:
        config["num_key_value_heads"] = heads.pop()
    return config


def _attention_modules(checkpoint: Checkpoint, layers: Collection[int]) -> dict[int, str]:
    """Return the attention module of each layer, by the names of its weights."""
    paths: dict[int, set[str]] = {}
    for name in checkpoint.files:
        match = ATTENTION_MODULE.match(name)
        if match is not None:
            paths.setdefault(int(match["layer"]), set()).add(match["path"])
    for index in layers:
        if len(paths.get(index, ())) != 1:
            raise ScaleError(
                f"{checkpoint.origin}: expected one attention module in layer {index}, got "
                f"{format_list(sorted(paths.get(index, ()))) or 'none'}; use this model's scales"
            )
    return {index: paths[index].pop() for index in layers}


def _modules_with_weights(files: Iterable[str]) -> list[str]:
    """Return the modules with a weight, and those that hold experts, as some readers name them."""
    modules = {name.removesuffix(".weight") for name in files if name.endswith(".weight")}
    experts = {name.split(".experts.")[0] + ".experts" for name in files if ".experts." in name}
    return sorted(modules | experts)


def _count_bytes(path: Path, names: Collection[str]) -> int:
    """Return the bytes of those of the tensors that are in a safetensors file."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    spans = [header[name]["data_offsets"] for name in header.keys() & names]
    return sum(stop - start for start, stop in spans)
