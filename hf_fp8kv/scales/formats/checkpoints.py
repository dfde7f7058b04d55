"""The formats of checkpoints with scales: each tool's tensor names and declaration of a cache.

docs/scales.md lists the entries that servers read.
"""

from collections.abc import Sequence

from ...errors import ScaleError
from ...utils.text import format_value
from ..checkpoint.configs import (
    HF_QUANT_CONFIG,
    LAYER_ENTRIES,
    TGI_ENTRY,
    Config,
    as_mapping,
    pop_entries,
)
from ..layer_scales import ScaleData
from .base import TensorFormat, to_json

# Readers of ModelOpt's format identify it by this name.
_PRODUCER = {"name": "modelopt", "version": "0.0.0+hf_fp8kv"}


class Tgi(TensorFormat):
    """Text Generation Inference. Checkpoints without a declaration also have its tensor names.

    TGI reads every safetensors file in the folder of a model, even without an index. Other servers
    read only the files of the index, and vLLM refuses scales without a quantization config. The
    index of a copy therefore leaves out the scales.
    """

    name = "tgi"
    is_indexed = False

    def declare(self, config: Config, scales: ScaleData, excluded: Sequence[str]) -> None:
        config[TGI_ENTRY] = "float8_e4m3fn"


class AutoFP8(TensorFormat):
    """AutoFP8, and tools without a separate format that use its names."""

    name = "autofp8"
    quant_method = "fp8"

    def declare(self, config: Config, scales: ScaleData, excluded: Sequence[str]) -> None:
        entries: Config = {"activation_scheme": "static", "ignored_layers": list(excluded)}
        self.find_or_add_quant_config(config, entries)["kv_cache_scheme"] = "static"


class CompressedTensors(TensorFormat):
    """compressed-tensors, as LLM Compressor writes it, per tensor or per head."""

    name = "compressed-tensors"
    quant_method = "compressed-tensors"
    shape = (1,)
    granularity = "head"

    def declare(self, config: Config, scales: ScaleData, excluded: Sequence[str]) -> None:
        is_per_head = any(layer.static[0].ndim for layer in scales.layers.values())
        entries = {"format": "dense", "quantization_status": "compressed"}
        quant_config = self.find_or_add_quant_config(
            config, {**entries, "config_groups": {}, "ignore": []}
        )
        quant_config["kv_cache_scheme"] = {
            "strategy": "attn_head" if is_per_head else "tensor",
            "num_bits": 8,
            "type": "float",
            "symmetric": True,
            "dynamic": False,
            "group_size": None,
        }
        # vLLM fills in the numbers of heads only if this entry exists.
        quant_config.setdefault("config_groups", {})


class ModelOpt(TensorFormat):
    """NVIDIA's ModelOpt. Its `quant_method` begins with "modelopt". It also has a second config."""

    name = "modelopt"
    quant_method = "modelopt"
    tensor_name = "{side}_proj.{side}_scale"

    def declare(self, config: Config, scales: ScaleData, excluded: Sequence[str]) -> None:
        # The format has no name for unquantized weights, so "ignore" excludes every module.
        algorithm = {"quant_algo": "FP8", "ignore": ["*"], "config_groups": {}}
        quant_config = self.find_or_add_quant_config(config, {**algorithm, "producer": _PRODUCER})
        quant_config["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
        for entries in (quant_config, quant_config.get("quantization")):
            if isinstance(entries, dict) and "kv_cache_quant_algo" in entries:
                entries["kv_cache_quant_algo"] = "FP8"

    def make_configs(
        self,
        config: Config,
        modelopt_config: Config | None,
        scales: ScaleData,
        excluded: Sequence[str],
    ) -> dict[str, bytes]:
        declares_in_config = modelopt_config is None or "quantization_config" in config
        files = super().make_configs(config, None, scales, excluded) if declares_in_config else {}
        if modelopt_config is None:
            quant_config = as_mapping(config.get("quantization_config"))
            new_entries = {
                "quant_algo": quant_config.get("quant_algo"),
                "exclude_modules": quant_config.get("ignore", []),
            }
            modelopt_config = {"producer": _PRODUCER, "quantization": new_entries}
        quantization = modelopt_config.setdefault("quantization", {})
        if not isinstance(quantization, dict):
            raise ScaleError(
                f"{HF_QUANT_CONFIG}: quantization: expected an object, got "
                f"{format_value(quantization)}. Fix the file"
            )
        pop_entries(quantization, LAYER_ENTRIES)
        quantization["kv_cache_quant_algo"] = "FP8"
        return {HF_QUANT_CONFIG: to_json(modelopt_config), **files}


class Quark(TensorFormat):
    """AMD's Quark, which stores scales of the outputs of the K and V projections."""

    name = "quark"
    quant_method = "quark"
    tensor_name = "{side}_proj.output_scale"

    def declare(self, config: Config, scales: ScaleData, excluded: Sequence[str]) -> None:
        entries: Config = {
            "quant_mode": "eager_mode",
            "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
            "global_quant_config": dict(_UNQUANTIZED_CONFIG),
            "exclude": list(excluded),
            "layer_type_quant_config": {},
        }
        quant_config = self.find_or_add_quant_config(config, entries)
        quant_config["kv_cache_post_rope"] = True
        export = quant_config.setdefault("export", {})
        layer_configs = quant_config.get("layer_quant_config") or {}
        if not isinstance(export, dict) or not isinstance(layer_configs, dict):
            raise ScaleError(
                f"quantization_config: expected the objects export and layer_quant_config, got "
                f"{format_value(export)} and {format_value(layer_configs)}. Fetch the config again"
            )
        patterns = ("*k_proj", "*v_proj")
        export |= {"kv_cache_group": list(patterns), "min_kv_scale": 0.0}
        defaults = _UNQUANTIZED_CONFIG | dict(as_mapping(quant_config.get("global_quant_config")))
        projections = {
            pattern: {
                **defaults,
                **(layer_configs.get(pattern) or {}),
                "output_tensors": _OUTPUT_CONFIG,
            }
            for pattern in patterns
        }
        quant_config["layer_quant_config"] = layer_configs | projections
        quant_config["kv_cache_quant_config"] = projections


_OUTPUT_CONFIG = {
    "dtype": "fp8_e4m3",
    "qscheme": "per_tensor",
    "is_dynamic": False,
    "symmetric": True,
    "ch_axis": None,
    "group_size": None,
    "observer_cls": "PerTensorMinMaxObserver",
    "round_method": "half_even",
    "scale_type": "float",
}
_UNQUANTIZED_CONFIG = dict.fromkeys(
    ("weight", "bias", "input_tensors", "output_tensors", "target_device"), None
)
