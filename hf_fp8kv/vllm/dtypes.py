"""Names of `--kv-cache-dtype`: each says how many bytes a token has, and nothing else has to.

vLLM's scheduler, its connectors and its worker processes know a cache's dtype by this name alone.
So a scale for each token and head, which makes slots larger, is a part of the name; static scales
are not stored in pages. The prefix tells our formats from vLLM's own "fp8_e4m3".
"""

from dataclasses import dataclass

import torch

from ..errors import ConfigError
from ..formats import FORMATS

# Bytes of the two scales, bfloat16, of a token and head.
SCALE_BYTES = 4
_PREFIX = "hf_fp8kv"


@dataclass(frozen=True)
class CacheDType:
    """What a name stands for.

    Attributes:
        name: of `--kv-cache-dtype`.
        format: of K and V, a key of `FORMATS`; None: as the scales say, or the default.
        dynamic: whether each token and head has scales of its own.
    """

    name: str
    format: str | None
    dynamic: bool

    @property
    def torch_dtype(self) -> torch.dtype:
        """What vLLM takes the bytes for.

        Its specs of a cache hold this and not the name, so that it tells where slots have scales.
        """
        return torch.int8 if self.dynamic else torch.uint8

    def slot_bytes(self, k_dim: int, v_dim: int) -> int:
        """Return the bytes of a token and KV head."""
        return k_dim + v_dim + (SCALE_BYTES if self.dynamic else 0)


def _all_dtypes() -> dict[str, CacheDType]:
    dtypes = {}
    for fmt in (None, *FORMATS):
        if fmt == "fp8_e4m3fnuz":
            continue  # what a GPU computes with, of the same precision as E4M3
        for dynamic in (True, False):
            short = "" if fmt is None else "_" + fmt.removeprefix("fp8_")
            name = _PREFIX + short + ("" if dynamic else "_static")
            dtypes[name] = CacheDType(name, fmt, dynamic)
    return dtypes


DTYPES = _all_dtypes()


def find_dtype(name: str) -> CacheDType:
    """Return the dtype of this name; raise ConfigError for another one."""
    if name not in DTYPES:
        raise ConfigError(
            f"--kv-cache-dtype: expected one of {', '.join(DTYPES)}, got {name!r}; choose one"
        )
    return DTYPES[name]
