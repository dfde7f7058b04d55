"""The formats that scales are read from and written in: one file each, and their registry.

A new format is a subclass of `ScaleFormat` in a file here, its line in the registry, and a folder
of what its tool writes in tests/data/scales.
"""

from dataclasses import replace

from .autofp8 import AutoFP8
from .base import ScaleFormat
from .compressed_tensors import CompressedTensors
from .hf_fp8kv import HfFp8kv
from .modelopt import ModelOpt
from .quark import Quark
from .tgi import Tgi
from .trtllm import TensorRT
from .vllm_json import VllmJson

__all__ = ["CHECKPOINT_FORMATS", "OWN_FILES", "SCALE_FORMATS", "TENSOR_NAMES", "ScaleFormat"]

# Of several formats in one folder, the last one here is read.
_FORMATS: tuple[ScaleFormat, ...] = (
    VllmJson(), Tgi(), CompressedTensors(), AutoFP8(), ModelOpt(), Quark(), TensorRT(), HfFp8kv(),
)  # fmt: skip
SCALE_FORMATS = {format.name: format for format in _FORMATS}
CHECKPOINT_FORMATS = tuple(SCALE_FORMATS)
TENSOR_NAMES = sorted(
    (replace(name, format=format.name) for format in _FORMATS for name in format.tensor_names),
    key=lambda name: name.priority,
)
# The files that formats keep scales in apart from weights, what is read first first.
OWN_FILES = tuple(format.own_files[-1] for format in reversed(_FORMATS) if format.own_files)
