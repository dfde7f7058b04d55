"""What a config.json says of KV scales that were written: the counterpart of `sources.config`."""

import copy
from collections.abc import Sequence

from ...errors import ScaleError
from ...utils.text import format_value
from .config import nested_configs

__all__ = ["HF_QUANT_CONFIG", "METHODS", "declared", "declared_beside"]

HF_QUANT_CONFIG = "hf_quant_config.json"
# The `quant_method` of the formats that are declared in a quantisation config.
METHODS = {
    "compressed-tensors": "compressed-tensors",
    "autofp8": "fp8",
    "modelopt": "modelopt",
    "quark": "quark",
}
_SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "group_size": None}
_OUTPUT = {
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
_PROJECTIONS = ("*k_proj", "*v_proj")
Config = dict[str, object]


def declared(format: str, config: Config, *, per_head: bool, excluded: Sequence[str]) -> Config:
    """The config with the entries that declare scales of this format; the other entries stay.

    Args:
        format: the format of the scales.
        config: a `config.json`.
        per_head: whether the scales are per head.
        excluded: the modules of a checkpoint whose weights are not quantised.

    Raises:
        ScaleError: when the weights are quantised by another tool than that of the format.
    """
    config = copy.deepcopy(config)
    if format == "tgi":
        config["kv_cache_torch_dtype"] = "float8_e4m3fn"
    if format == "trtllm":
        config["quantization"] = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    if format not in METHODS:
        return config
    block = _existing(format, config)
    if block is None:
        block = _new(format, excluded)
        config["quantization_config"] = block
    if format == "quark":
        _declare_quark(block)
    elif format == "autofp8":
        block["kv_cache_scheme"] = "static"
    elif format == "modelopt":
        block["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
        for owner in (block, block.get("quantization")):
            if isinstance(owner, dict) and "kv_cache_quant_algo" in owner:
                owner["kv_cache_quant_algo"] = "FP8"
    else:
        block["kv_cache_scheme"] = {"strategy": "attn_head" if per_head else "tensor", **_SCHEME}
        # vLLM fills in the numbers of heads only beside this entry.
        block.setdefault("config_groups", {})
    return config


def declared_beside(second: Config | None, config: Config) -> Config:
    """ModelOpt's second config, `hf_quant_config.json`, with the entry for the cache.

    Args:
        second: the one that there was, or None.
        config: the `config.json`, as `declared` gives it.
    """
    if second is not None:
        second = copy.deepcopy(second)
        inner = second.setdefault("quantization", {})
        if not isinstance(inner, dict):
            raise ScaleError(
                f"{HF_QUANT_CONFIG}: quantization: expected an object, got {format_value(inner)}; "
                "fetch the file again"
            )
        inner["kv_cache_quant_algo"] = "FP8"
        return second
    block = config.get("quantization_config")
    block = block if isinstance(block, dict) else {}
    quantization = {
        "quant_algo": block.get("quant_algo"),
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": block.get("ignore", []),
    }
    return {"producer": _PRODUCER, "quantization": quantization}


# Readers take the name for that of the format.
_PRODUCER = {"name": "modelopt", "version": "0.0.0+hf_fp8kv"}


def _existing(format: str, config: Config) -> Config | None:
    """The quantisation config of the weights, which has to be of the format's own tool."""
    owners = [config, *(owner for _, owner in nested_configs("", config))]
    for owner in owners:
        for entry in ("quantization_config", "compression_config"):
            block = owner.get(entry) if isinstance(owner, dict) else None
            if not isinstance(block, dict) or not block:
                continue
            method = str(block.get("quant_method") or "").lower()
            if entry == "compression_config":
                method = method or "compressed-tensors"
            if not (method == METHODS[format] or (format, method[:8]) == ("modelopt", "modelopt")):
                raise ScaleError(
                    f"format {format!r}: expected weights that are not quantised, or with the "
                    f"quant_method {METHODS[format]!r}, got {method!r}, and a checkpoint has one; "
                    "choose tgi, vllm-json or hf_fp8kv, which need none"
                )
            return block
    return None


def _new(format: str, excluded: Sequence[str]) -> Config:
    """The quantisation config of a checkpoint of which only the cache is quantised."""
    block: Config = {"quant_method": METHODS[format]}
    if format == "compressed-tensors":
        status = {"format": "dense", "quantization_status": "compressed"}
        return {**block, **status, "config_groups": {}, "ignore": []}
    if format == "autofp8":
        return {**block, "activation_scheme": "static", "ignored_layers": list(excluded)}
    if format == "modelopt":
        # Its readers know no algorithm for "none": this one is for no module at all.
        algo = {"quant_algo": "FP8", "ignore": ["*"], "config_groups": {}}
        return {**block, **algo, "producer": _PRODUCER}
    nothing = {"weight": None, "bias": None, "input_tensors": None, "output_tensors": None}
    return {
        **block,
        "quant_mode": "eager_mode",
        "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
        "global_quant_config": nothing,
        "exclude": list(excluded),
        "kv_cache_post_rope": False,
    }


def _declare_quark(block: Config) -> None:
    """Quark's scales are of the outputs of two projections; their weights stay as they are."""
    export, layers = block.setdefault("export", {}), block.get("layer_quant_config") or {}
    if not isinstance(export, dict) or not isinstance(layers, dict):
        raise ScaleError(
            f"quantization_config: expected the objects export and layer_quant_config, got "
            f"{format_value(export)} and {format_value(layers)}; fetch the config again"
        )
    export |= {"kv_cache_group": list(_PROJECTIONS), "min_kv_scale": 0.0}
    general = block.get("global_quant_config")
    general = general if isinstance(general, dict) else {}
    entries = {p: {**general, **(layers.get(p) or {}), "output_tensors": dict(_OUTPUT)}
               for p in _PROJECTIONS}  # fmt: skip
    block["layer_quant_config"] = {**layers, **entries}
    block["kv_cache_quant_config"] = {p: {"output_tensors": dict(_OUTPUT)} for p in _PROJECTIONS}
