"""Declaration: what a config says of the scales of its KV cache."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from .config import as_mapping

__all__ = ["Declaration", "parse_entry"]

_STATIC = ("static", "fp8", "fp8_e4m3", "fp8_e4m3fn", "float8_e4m3", "float8_e4m3fn")
_FNUZ = ("fp8_e4m3fnuz", "float8_e4m3fnuz")
_UNQUANTIZED = ("", "auto", "none", "bf16", "fp16", "bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Declaration:
    """What a config says of the scales of its KV cache.

    Attributes:
        kind: "none": nothing; "static": FP8 scales in the checkpoint; "dynamic": FP8, and no
            scales in the checkpoint; "refused": scales of another kind than FP8.
        what: the entry and its value, for messages.
        dialect: the format whose tensor names to expect.
        fnuz: the scales are made for E4M3FNUZ: twice those for E4M3FN.
    """

    kind: Literal["none", "static", "dynamic", "refused"] = "none"
    what: str = "nothing about a KV cache"
    dialect: str = ""
    fnuz: bool = False


def parse_entry(where: str, value: object) -> list[Declaration]:
    """Return what one entry declares, a scheme or a word for one; an empty list for nothing."""
    value = getattr(value, "value", value)
    scheme = as_mapping(value)
    if scheme:
        return [_parse_scheme(where, scheme)]
    if value is None or value == {}:
        return []
    what = f"{where} = {value!r}"
    if not isinstance(value, str | torch.dtype):
        return [Declaration("refused", what)]
    word = str(value).lower().removeprefix("torch.")
    if word in _UNQUANTIZED:
        return []
    if word in _STATIC or word in _FNUZ:
        return [Declaration("static", what, fnuz=word in _FNUZ)]
    return [Declaration("dynamic" if word == "dynamic" else "refused", what)]


def _parse_scheme(where: str, scheme: Mapping[str, object]) -> Declaration:
    def entry(name: str, default: object = None) -> object:
        value = scheme.get(name, default)
        return getattr(value, "value", value)

    # The defaults are those of compressed-tensors.
    bits, number, strategy = entry("num_bits", 8), entry("type", "int"), entry("strategy")
    symmetric, dynamic = entry("symmetric", True), entry("dynamic", False)
    what = (
        f"{where}: {bits}-bit {number}, strategy {strategy or 'tensor'}, "
        f"{'symmetric' if symmetric else 'asymmetric'}, {'dynamic' if dynamic else 'static'}"
    )
    if (bits, number) != (8, "float") or not symmetric:
        return Declaration("refused", what)
    if strategy not in (None, "tensor", "attn_head"):
        return Declaration("refused", what)
    return Declaration("dynamic" if dynamic else "static", what)
