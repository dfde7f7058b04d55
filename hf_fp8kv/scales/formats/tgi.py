"""The format "tgi": scales beside the attention, as Text Generation Inference reads them."""

from collections.abc import Sequence
from dataclasses import replace

from ..checkpoint.config import Config
from ..checkpoint.tensor_names import PAIR, SHARED
from ..layer_scales import ScaleData
from .tensor_format import TensorFormat


class Tgi(TensorFormat):
    """Text Generation Inference. Its names are also those of checkpoints that declare nothing."""

    name = "tgi"
    tensor_names = (replace(PAIR, own_dialect=False, shape=()), replace(SHARED, own_dialect=False))

    def declare(self, config: Config, scales: ScaleData, excluded: Sequence[str]) -> None:
        config["kv_cache_torch_dtype"] = "float8_e4m3fn"
