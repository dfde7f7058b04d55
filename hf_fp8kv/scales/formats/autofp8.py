"""The format "autofp8": checkpoints of AutoFP8, with the `quant_method` "fp8"."""

from collections.abc import Sequence
from dataclasses import replace

from ..checkpoint.config import Config
from ..checkpoint.tensor_names import OUTPUTS, PAIR, SHARED, TensorName
from ..layer_scales import ScaleData
from .tensor_format import QuantizationFormat


class AutoFP8(QuantizationFormat):
    """AutoFP8. Its names are also those of tools that no other format knows."""

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
