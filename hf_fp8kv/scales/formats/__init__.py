"""The registry of the formats in which scales are written, and read from separate files."""

from .base import ScaleFormat
from .checkpoints import AutoFP8, CompressedTensors, ModelOpt, Quark, Tgi
from .separate_files import HfFp8kv, VllmJson

__all__ = ["SCALE_FORMATS", "ScaleFormat"]

SCALE_FORMATS: dict[str, ScaleFormat] = {
    format.name: format
    for format in (
        VllmJson(),
        Tgi(),
        CompressedTensors(),
        AutoFP8(),
        ModelOpt(),
        Quark(),
        HfFp8kv(),
    )
}
