"""The format "quark": checkpoints of AMD's Quark, whose scales are of two projections' outputs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Literal

from ...errors import ScaleError
from ...utils.text import format_value
from ..checkpoint.config import Config, Declaration, as_mapping, name_format
from ..checkpoint.tensor_names import FUSED_OUTPUT, OUTPUTS, PAIR
from ..layer_scales import ScaleData
from .autofp8 import AutoFP8
from .tensor_format import QuantizationFormat

_PROJECTIONS = ("*k_proj", "*v_proj")
_BEFORE_ROPE = (
    "Quark took the scales of K before RoPE, and before the norm of K where there is one "
    "(kv_cache_post_rope): K itself may not fit them, or they may be far too large; export with "
    "kv_cache_post_rope=True, or calibrate"
)
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
_UNQUANTIZED = dict.fromkeys(
    ("weight", "bias", "input_tensors", "output_tensors", "target_device"), None
)


class Quark(QuantizationFormat):
    """Quark."""

    name = "quark"
    quant_method = "quark"
    tensor_names = (PAIR, replace(OUTPUTS, shape=()), FUSED_OUTPUT)

    def recognizes(self, entry: str, method: str) -> bool:
        return method == self.quant_method

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
        export |= {"kv_cache_group": list(_PROJECTIONS), "min_kv_scale": 0.0}
        general = _UNQUANTIZED | dict(as_mapping(block.get("global_quant_config")))
        projections = {
            projection: {**general, **(layers.get(projection) or {}), "output_tensors": _OUTPUT}
            for projection in _PROJECTIONS
        }
        block["layer_quant_config"] = layers | projections
        block["kv_cache_quant_config"] = projections
