"""Scales: static scales of K and V, and the files they come in."""

from .formats import CHECKPOINT_FORMATS, SCALE_FORMATS, ScaleFormat
from .kv_scales import KVScales
from .layer_scales import Granularity, LayerScales
from .load import declared_kv_scales
from .report import CalibrationReport

__all__ = [
    "CHECKPOINT_FORMATS",
    "SCALE_FORMATS",
    "CalibrationReport",
    "Granularity",
    "KVScales",
    "LayerScales",
    "ScaleFormat",
    "declared_kv_scales",
]
