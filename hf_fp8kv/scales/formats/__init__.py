"""The formats that scales are written in, and their registry."""

from .base import ScaleFormat
from .checkpoints import AutoFP8, CompressedTensors, ModelOpt, Quark, Tgi
from .hf_fp8kv import HfFp8kv
from .vllm_json import VllmJson

__all__ = ["SCALE_FORMATS", "ScaleFormat"]

SCALE_FORMATS: dict[str, ScaleFormat] = {
    format.name: format
    for format in (
        VllmJson(), Tgi(), CompressedTensors(), AutoFP8(), ModelOpt(), Quark(), HfFp8kv()
    )
}  # fmt: skip
