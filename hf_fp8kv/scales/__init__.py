"""Static scales of K and V, and the file formats that hold them."""

from .checkpoint.configs import describe_kv_scales
from .formats import SCALE_FORMATS, ScaleFormat
from .kv_scales import KVScales
from .layer_scales import Granularity, LayerScales
from .measured_report import ScalesReport

__all__ = [
    "SCALE_FORMATS",
    "Granularity",
    "KVScales",
    "LayerScales",
    "ScaleFormat",
    "ScalesReport",
    "describe_kv_scales",
]
