"""The format "modelopt": checkpoints of NVIDIA's ModelOpt, which have a second config."""

import copy
from collections.abc import Sequence

from ...errors import ScaleError
from ...utils.text import format_value
from ..checkpoint.config import HF_QUANT_CONFIG, Config, as_mapping
from ..checkpoint.tensor_names import PAIR, TensorName
from ..layer_scales import ScaleData
from .tensor_format import QuantizationFormat, to_json

_PROJECTION = r"(?P<side>[kv])_proj\.(?P=side)_scale"
# Readers take the name for that of the format.
_PRODUCER = {"name": "modelopt", "version": "0.0.0+hf_fp8kv"}


class ModelOpt(QuantizationFormat):
    """ModelOpt, all of whose methods begin with "modelopt"."""

    name = "modelopt"
    quant_method = "modelopt"
    tensor_names = (
        PAIR,
        TensorName(_PROJECTION, "self_attn.{side}_proj.{side}_scale", 1, shape=()),
        TensorName(r"qk(?:qk)?v_proj\.(?P<side>[kv])_scale", "self_attn.qkv_proj.{side}_scale", 1),
    )

    def accepts(self, entry: str, method: str) -> bool:
        return method.startswith("modelopt")

    recognizes = accepts

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
        if second is not None and "quantization_config" not in config:
            return {HF_QUANT_CONFIG: _declare_in_second(second)}
        files = super().config_files(config, None, scales, excluded)
        second_file = _new_second(config) if second is None else _declare_in_second(second)
        return {HF_QUANT_CONFIG: second_file, **files}


def _declare_in_second(second: Config) -> bytes:
    second = copy.deepcopy(second)
    inner = second.setdefault("quantization", {})
    if not isinstance(inner, dict):
        raise ScaleError(
            f"{HF_QUANT_CONFIG}: quantization: expected an object, got {format_value(inner)}; fix "
            "the file"
        )
    inner["kv_cache_quant_algo"] = "FP8"
    return to_json(second)


def _new_second(config: Config) -> bytes:
    block = as_mapping(config.get("quantization_config"))
    quantization = {
        "quant_algo": block.get("quant_algo"),
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": block.get("ignore", []),
    }
    return to_json({"producer": _PRODUCER, "quantization": quantization})
