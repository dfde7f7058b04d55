"""Static scales of K and V, and the file formats that hold them."""

from .checkpoint.configs import describe_kv_scales
from .formats import SCALE_FORMATS, ScaleFormat
from .kv_scales import KVScales
from .layer_scales import Granularity, LayerScales

__all__ = [
    "SCALE_FORMATS",
    "Granularity",
    "KVScales",
    "LayerScales",
    "ScaleFormat",
    "describe_kv_scales",
]
