"""The formats in which scales can be saved, by name."""

from .base import ScaleFormat
from .checkpoints import AutoFP8, CompressedTensors, ModelOpt, Quark, Tgi
from .separate_files import HfFp8kv, VllmJson

__all__ = ["SCALE_FORMATS", "ScaleFormat"]

SCALE_FORMATS: dict[str, ScaleFormat] = {
    scale_format.name: scale_format
    for scale_format in (
        VllmJson(),
        Tgi(),
        CompressedTensors(),
        AutoFP8(),
        ModelOpt(),
        Quark(),
        HfFp8kv(),
    )
}
