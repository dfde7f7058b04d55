"""The format "tgi": scales beside the attention, as Text Generation Inference reads them.

It takes every safetensors file in the folder of a model, whatever an index says. Others take those
of the index, and vLLM stops at a scale that no quantization config announces: so the index of a
copy does not name them.
"""

from collections.abc import Sequence
from dataclasses import replace

from ..checkpoint.config import Config
from ..checkpoint.tensor_names import PAIR, SHARED
from ..layer_scales import ScaleData
from .tensor_format import TensorFormat

TGI_ENTRY = "kv_cache_torch_dtype"  # of config.json


class Tgi(TensorFormat):
    """Text Generation Inference. Its names are also those of checkpoints that declare nothing."""

    name = "tgi"
    indexed = False
    tensor_names = (replace(PAIR, own_dialect=False, shape=()), replace(SHARED, own_dialect=False))

    def declare(self, config: Config, scales: ScaleData, excluded: Sequence[str]) -> None:
        config[TGI_ENTRY] = "float8_e4m3fn"
