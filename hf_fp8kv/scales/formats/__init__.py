"""The formats that scales are read from and written in, and their registry.

A new format is a subclass of `ScaleFormat`, its line in the registry, and a folder of what its tool
writes in tests/data/scales.
"""

from dataclasses import replace

from .base import ScaleFormat
from .checkpoints import AutoFP8, CompressedTensors, ModelOpt, Quark, Tgi
from .hf_fp8kv import HfFp8kv
from .trtllm import TensorRT
from .vllm_json import VllmJson

__all__ = ["OWN_FILES", "SCALE_FORMATS", "TENSOR_NAMES", "WRITTEN_FORMATS", "ScaleFormat"]

# Of several formats in one folder, the last one here is read.
_FORMATS: tuple[ScaleFormat, ...] = (
    VllmJson(), Tgi(), CompressedTensors(), AutoFP8(), ModelOpt(), Quark(), TensorRT(), HfFp8kv(),
)  # fmt: skip
SCALE_FORMATS = {format.name: format for format in _FORMATS}
WRITTEN_FORMATS = tuple(name for name, format in SCALE_FORMATS.items() if format.is_written)
TENSOR_NAMES = sorted(
    (replace(name, format=format.name) for format in _FORMATS for name in format.tensor_names),
    key=lambda name: name.priority,
)
# The files that formats keep scales in apart from weights, what is read first first.
OWN_FILES = tuple(format.own_files[-1] for format in reversed(_FORMATS) if format.own_files)
