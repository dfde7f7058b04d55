"""The format "tgi": scales beside the attention, as Text Generation Inference reads them."""

from collections.abc import Sequence

from ..checkpoint.config import Config
from ..checkpoint.tensor_names import PAIR, SHARED, TensorName
from .tensor_format import TensorFormat

__all__ = ["Tgi"]


class Tgi(TensorFormat):
    """Text Generation Inference. Its names are also those of checkpoints that declare nothing."""

    name = "tgi"
    tensor_names = (
        TensorName("tgi", PAIR, "self_attn.{side}_scale", 0, shape=()),
        TensorName("tgi", SHARED, "self_attn.kv_scale", 4),
    )

    def declare(self, config: Config, *, per_head: bool, excluded: Sequence[str]) -> None:
        config["kv_cache_torch_dtype"] = "float8_e4m3fn"
