"""The format "quark": checkpoints of AMD's Quark, whose scales are of two projections' outputs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from ...errors import ScaleError
from ...utils.text import format_value
from ..checkpoint.config import Config, Declaration, as_mapping
from ..checkpoint.tensor_names import OUTPUTS, PAIR
from ..layer_scales import ScaleData
from .tensor_format import QuantizationFormat

_PROJECTIONS = ("*k_proj", "*v_proj")
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
_UNQUANTIZED = {"weight": None, "bias": None, "input_tensors": None, "output_tensors": None}


class Quark(QuantizationFormat):
    """Quark."""

    name = "quark"
    quant_method = "quark"
    tensor_names = (PAIR, replace(OUTPUTS, shape=()))

    def recognizes(self, entry: str, method: str) -> bool:
        return method == self.quant_method

    def parse_block(self, where: str, block: Mapping[str, object]) -> list[Declaration]:
        """Parse the list of the projections whose outputs are the cache."""
        group = as_mapping(block.get("export")).get("kv_cache_group")
        if not group:
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
                    what += "" if symmetric else " (asymmetric)"
                    return [Declaration("refused", what)]
                dynamic = dynamic or bool(output.get("is_dynamic"))
        return [Declaration("dynamic" if dynamic else "static", f"{where} = {patterns!r}")]

    def declare(self, config: Config, scales: ScaleData, excluded: Sequence[str]) -> None:
        """Declare the outputs of two projections; what is said of their weights stays."""
        block = self.quantization_block(
            config,
            {
                "quant_mode": "eager_mode",
                "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
                "global_quant_config": dict(_UNQUANTIZED),
                "exclude": list(excluded),
                "kv_cache_post_rope": False,
            },
        )
        export, layers = block.setdefault("export", {}), block.get("layer_quant_config") or {}
        if not isinstance(export, dict) or not isinstance(layers, dict):
            raise ScaleError(
                f"quantization_config: expected the objects export and layer_quant_config, got "
                f"{format_value(export)} and {format_value(layers)}; fetch the config again"
            )
        export |= {"kv_cache_group": list(_PROJECTIONS), "min_kv_scale": 0.0}
        general = as_mapping(block.get("global_quant_config"))
        block["layer_quant_config"] = layers | {
            projection: {**general, **(layers.get(projection) or {}), "output_tensors": _OUTPUT}
            for projection in _PROJECTIONS
        }
        block["kv_cache_quant_config"] = {p: {"output_tensors": _OUTPUT} for p in _PROJECTIONS}
