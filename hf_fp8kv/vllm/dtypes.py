"""The values of `--kv-cache-dtype`, each of which determines the number of bytes per token.

vLLM's scheduler, connectors and workers identify a cache's dtype only by this name. The name
therefore shows whether slots have room for dynamic scales. Pages do not contain static scales. The
prefix "hf_fp8kv" distinguishes these formats from vLLM's own "fp8_e4m3".
"""

from dataclasses import dataclass

from ..formats import FORMATS


@dataclass(frozen=True)
class CacheDType:
    """A value of `--kv-cache-dtype`.

    Attributes:
        format: Format of K and V, a key of `FORMATS`. None means the format of the scales, or the
            default.
        is_dynamic: Whether each token and head has dynamic scales.
    """

    format: str | None
    is_dynamic: bool


def _make_dtypes() -> dict[str, CacheDType]:
    """Return the values of the option by name: each format, with dynamic and static scales."""
    dtypes = {}
    for format_name in (None, *FORMATS):
        if format_name == "fp8_e4m3fnuz":
            continue  # as precise as E4M3, and only read from checkpoints for AMD's GPUs
        for is_dynamic in (True, False):
            suffix = "" if format_name is None else "_" + format_name.removeprefix("fp8_")
            name = f"hf_fp8kv{suffix}" if is_dynamic else f"hf_fp8kv{suffix}_static"
            dtypes[name] = CacheDType(format_name, is_dynamic)
    return dtypes


DTYPES = _make_dtypes()
