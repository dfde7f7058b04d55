"""Formats of checkpoints with scales: the tensor names of each tool, and how it declares a cache.

What the servers read of each is written down in docs/scales.md.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Literal

from ...errors import ScaleError
from ...utils.text import format_value
from ..checkpoint.config import (
    HF_QUANT_CONFIG,
    Config,
    Declaration,
    as_mapping,
    name_format,
    parse_entry,
)
from ..checkpoint.tensor_names import FUSED_OUTPUT, OUTPUTS, PAIR, SHARED, TensorName
from ..layer_scales import ScaleData
from .tensor_format import TensorFormat, to_json

TGI_ENTRY = "kv_cache_torch_dtype"  # of config.json
# ModelOpt's readers read the name as the format.
_PRODUCER = {"name": "modelopt", "version": "0.0.0+hf_fp8kv"}


class Tgi(TensorFormat):
    """Text Generation Inference. Its names are also those of checkpoints that declare nothing.

    It takes every safetensors file in the folder of a model, whatever an index says. Others take
    those of the index, and vLLM stops at a scale that no quantization config announces: so the
    index of a copy does not name them.
    """

    name = "tgi"
    indexed = False
    tensor_names = (replace(PAIR, own_dialect=False, shape=()), replace(SHARED, own_dialect=False))

    def declare(self, config: Config, scales: ScaleData, excluded: Sequence[str]) -> None:
        config[TGI_ENTRY] = "float8_e4m3fn"


class AutoFP8(TensorFormat):
    """AutoFP8, and tools that use its names and belong to no other format."""

    name = "autofp8"
    quant_method = "fp8"
    tensor_names = (
        replace(PAIR, shape=()),
        TensorName(r"(?P<side>[kv])_cache\.scale", "self_attn.{side}_cache.scale", 2),
        OUTPUTS,
        SHARED,
    )

    def declare(self, config: Config, scales: ScaleData, excluded: Sequence[str]) -> None:
        new: Config = {"activation_scheme": "static", "ignored_layers": list(excluded)}
        self.quantization_block(config, new)["kv_cache_scheme"] = "static"


class CompressedTensors(TensorFormat):
    """compressed-tensors, as LLM Compressor writes it, per tensor or per head."""

    name = "compressed-tensors"
    quant_method = "compressed-tensors"
    granularity = "head"
    tensor_names = (replace(PAIR, shape=(1,)), OUTPUTS)

    def recognizes(self, entry: str, method: str) -> bool:
        return method == self.quant_method or (entry == "compression_config" and not method)

    def parse_block(self, where: str, block: Mapping[str, object]) -> list[Declaration]:
        """Parse rotations of K, and the outputs of projections, the cache before its own scheme."""
        declarations: list[Declaration] = []
        transforms = as_mapping(as_mapping(block.get("transform_config")).get("config_groups"))
        for name, scheme in transforms.items():
            declarations += _parse_transform(f"{where}.transform_config.{name}", as_mapping(scheme))
        for name, group in as_mapping(block.get("config_groups")).items():
            if _targets_projections(group):
                declarations += parse_entry(
                    f"{where}.config_groups.{name}.output_activations (kv_cache)",
                    as_mapping(group).get("output_activations"),
                )
        return declarations

    def remove_declaration(self, block: dict[str, object]) -> None:
        groups = block.get("config_groups")
        for name, group in dict(as_mapping(groups)).items():
            if isinstance(groups, dict) and isinstance(group, dict) and _targets_projections(group):
                group.pop("output_activations", None)
                if not group.get("weights") and not group.get("input_activations"):
                    del groups[name]

    def declare(self, config: Config, scales: ScaleData, excluded: Sequence[str]) -> None:
        per_head = any(layer.static[0].ndim for layer in scales.layers.values())
        status = {"format": "dense", "quantization_status": "compressed"}
        block = self.quantization_block(config, {**status, "config_groups": {}, "ignore": []})
        block["kv_cache_scheme"] = {
            "strategy": "attn_head" if per_head else "tensor", "num_bits": 8, "type": "float",
            "symmetric": True, "dynamic": False, "group_size": None,
        }  # fmt: skip
        # vLLM fills in the numbers of heads only beside this entry.
        block.setdefault("config_groups", {})


def _parse_transform(where: str, scheme: Mapping[str, object]) -> list[Declaration]:
    """Return the rotation of K that its scales are made for (R3 of SpinQuant), if this is one."""
    places = scheme.get("apply")
    places = [as_mapping(place) for place in places] if isinstance(places, list) else []
    places = [place for place in places if place.get("location") == "k_cache"]
    kind, size, random = (scheme.get(name) for name in ("type", "head_dim", "randomize"))
    if not places:
        return []
    what = f"{where}: K rotated by type {kind!r}, head_dim {size!r}, randomize {random!r}"
    ignored = any(place.get("ignore") for place in places)
    if kind != "hadamard" or random or type(size) is not int or ignored:
        return [Declaration("refused", what)]
    return [Declaration(what=what, rotated=size)]


def _targets_projections(group: object) -> bool:
    """Return whether a config group names the projections of K or V."""
    targets = as_mapping(group).get("targets")
    targets = list(map(str, targets)) if isinstance(targets, list) else []
    return any("k_proj" in target or "v_proj" in target for target in targets)


class ModelOpt(TensorFormat):
    """NVIDIA's ModelOpt, all of whose methods begin with "modelopt"; it has a second config."""

    name = "modelopt"
    quant_method = "modelopt"
    tensor_names = (
        PAIR,
        TensorName(
            r"(?P<side>[kv])_proj\.(?P=side)_scale", "self_attn.{side}_proj.{side}_scale", 1,
            shape=(),
        ),
        TensorName(r"qk(?:qk)?v_proj\.(?P<side>[kv])_scale", "self_attn.qkv_proj.{side}_scale", 1),
    )  # fmt: skip

    def recognizes(self, entry: str, method: str) -> bool:
        return method.startswith("modelopt")

    def declare(self, config: Config, scales: ScaleData, excluded: Sequence[str]) -> None:
        # Its readers know no algorithm for "none": this one is for no module at all.
        algorithm = {"quant_algo": "FP8", "ignore": ["*"], "config_groups": {}}
        block = self.quantization_block(config, {**algorithm, "producer": _PRODUCER})
        block["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
        for owner in (block, block.get("quantization")):
            if isinstance(owner, dict) and "kv_cache_quant_algo" in owner:
                owner["kv_cache_quant_algo"] = "FP8"

    def config_files(
        self, config: Config, second: Config | None, scales: ScaleData, excluded: Sequence[str]
    ) -> dict[str, bytes]:
        of_weights = second is None or "quantization_config" in config
        files = super().config_files(config, None, scales, excluded) if of_weights else {}
        if second is None:
            block = as_mapping(config.get("quantization_config"))
            inner: object = {
                "quant_algo": block.get("quant_algo"),
                "kv_cache_quant_algo": "FP8",
                "exclude_modules": block.get("ignore", []),
            }
            second = {"producer": _PRODUCER, "quantization": inner}
        second = copy.deepcopy(second)
        inner = second.setdefault("quantization", {})
        if not isinstance(inner, dict):
            raise ScaleError(
                f"{HF_QUANT_CONFIG}: quantization: expected an object, got {format_value(inner)}; "
                "fix the file"
            )
        inner["kv_cache_quant_algo"] = "FP8"
        return {HF_QUANT_CONFIG: to_json(second), **files}


class Quark(TensorFormat):
    """AMD's Quark, which scales the outputs of two projections."""

    name = "quark"
    quant_method = "quark"
    tensor_names = (PAIR, replace(OUTPUTS, shape=()), FUSED_OUTPUT)

    def parse_block(self, where: str, block: Mapping[str, object]) -> list[Declaration]:
        """Parse the list of the projections whose outputs are the cache.

        In its mode "fp8" Quark writes the list, too, but declares the cache as AutoFP8 does.
        """
        group = as_mapping(block.get("export")).get("kv_cache_group")
        if not group or block.get("quant_method") == AutoFP8.quant_method:
            return []
        where += ".export.kv_cache_group"
        patterns = group if isinstance(group, list) else [group]
        entries = {
            **as_mapping(block.get("kv_cache_quant_config")),
            **as_mapping(block.get("layer_quant_config")),
        }
        dynamic = False
        for pattern in map(str, patterns):
            # The pattern itself is an entry, or the layers that it stands for are.
            named = [entry for name, entry in entries.items() if fnmatchcase(str(name), pattern)]
            for entry in named or [None]:
                output = as_mapping(as_mapping(entry).get("output_tensors"))
                dtype, scheme = output.get("dtype"), output.get("qscheme")
                symmetric = output.get("symmetric") is not False
                if (dtype, scheme) != ("fp8_e4m3", "per_tensor") or not symmetric:
                    what = f"{where}: {pattern} with dtype {dtype!r} and qscheme {scheme!r}"
                    four_bits = "fp4" in (dtype, output.get("mx_element_dtype"))
                    size = output.get("group_size") or output.get("block_size")
                    what += f" ({name_format(4, 'float', size)})" if four_bits else ""
                    what += "" if symmetric else " (asymmetric)"
                    return [Declaration("refused", what)]
                dynamic = dynamic or bool(output.get("is_dynamic"))
        remark = "" if block.get("kv_cache_post_rope") else _BEFORE_ROPE
        kind: Literal["dynamic", "static"] = "dynamic" if dynamic else "static"
        return [Declaration(kind, f"{where} = {patterns!r}", remark=remark)]

    def declare(self, config: Config, scales: ScaleData, excluded: Sequence[str]) -> None:
        """Declare the outputs of two projections; what is said of their weights stays."""
        block = self.quantization_block(
            config,
            {
                "quant_mode": "eager_mode",
                "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
                "global_quant_config": dict(_UNQUANTIZED),
                "exclude": list(excluded),
                "layer_type_quant_config": {},
            },
        )
        block["kv_cache_post_rope"] = True
        export, layers = block.setdefault("export", {}), block.get("layer_quant_config") or {}
        if not isinstance(export, dict) or not isinstance(layers, dict):
            raise ScaleError(
                f"quantization_config: expected the objects export and layer_quant_config, got "
                f"{format_value(export)} and {format_value(layers)}; fetch the config again"
            )
        names = ("*k_proj", "*v_proj")
        export |= {"kv_cache_group": list(names), "min_kv_scale": 0.0}
        general = _UNQUANTIZED | dict(as_mapping(block.get("global_quant_config")))
        projections = {
            name: {**general, **(layers.get(name) or {}), "output_tensors": _OUTPUT}
            for name in names
        }
        block["layer_quant_config"] = layers | projections
        block["kv_cache_quant_config"] = projections


_BEFORE_ROPE = (
    "Quark took the scales of K before RoPE, and before the norm of K where there is one "
    "(kv_cache_post_rope): K itself may not fit them, or they may be far too large; export with "
    "kv_cache_post_rope=True, or calibrate"
)
_OUTPUT = {
    "dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": True,
    "ch_axis": None, "group_size": None, "observer_cls": "PerTensorMinMaxObserver",
    "round_method": "half_even", "scale_type": "float",
}  # fmt: skip
_UNQUANTIZED = dict.fromkeys(
    ("weight", "bias", "input_tensors", "output_tensors", "target_device"), None
)
