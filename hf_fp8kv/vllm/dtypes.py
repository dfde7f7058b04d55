"""The values of `--kv-cache-dtype`, each of which determines the number of bytes per token.

vLLM's scheduler, connectors and workers identify a cache's dtype only by this name. The name
therefore shows whether slots have room for dynamic scales. Pages do not contain static scales. The
prefix "hf_fp8kv" distinguishes these formats from vLLM's own "fp8_e4m3".
"""

from dataclasses import dataclass

import torch

from ..errors import ConfigError
from ..formats import FORMATS

# Size of the two bfloat16 scales of a token and head, in bytes.
SCALE_BYTES = 4
_NAME_PREFIX = "hf_fp8kv"


@dataclass(frozen=True)
class CacheDType:
    """A value of `--kv-cache-dtype`.

    Attributes:
        name: The value itself.
        format: Format of K and V, a key of `FORMATS`. None means the format of the scales, or the
            default.
        is_dynamic: Whether each token and head has dynamic scales.
    """

    name: str
    format: str | None
    is_dynamic: bool

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype that vLLM uses for the bytes.

        vLLM's cache specs contain this dtype instead of the name, so it also shows whether slots
        have scales.
        """
        return torch.int8 if self.is_dynamic else torch.uint8

    def count_slot_bytes(self, k_dim: int, v_dim: int) -> int:
        """Return the number of bytes of a token and KV head, for the head sizes of K and V."""
        return k_dim + v_dim + (SCALE_BYTES if self.is_dynamic else 0)


def _make_dtypes() -> dict[str, CacheDType]:
    dtypes = {}
    for format_name in (None, *FORMATS):
        if format_name == "fp8_e4m3fnuz":
            continue  # a format for AMD's hardware, with the same precision as E4M3
        for is_dynamic in (True, False):
            suffix = "" if format_name is None else "_" + format_name.removeprefix("fp8_")
            name = _NAME_PREFIX + suffix + ("" if is_dynamic else "_static")
            dtypes[name] = CacheDType(name, format_name, is_dynamic)
    return dtypes


DTYPES = _make_dtypes()


def find_dtype(name: str) -> CacheDType:
    """Return the dtype with this name. Raise ConfigError for unknown names."""
    if name not in DTYPES:
        raise ConfigError(
            f"--kv-cache-dtype: expected one of {', '.join(DTYPES)}, got {name!r}. Choose one"
        )
    return DTYPES[name]
