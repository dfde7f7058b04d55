"""How the scale tensors of every dialect are called: the one table of names.

A reader goes from a tensor's name to a row (`matched`), a writer from a row to a name (`Row.name`).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from .config import Declaration

__all__ = [
    "FOREIGN",
    "LAYER",
    "LIKELY",
    "MODULE",
    "ROWS",
    "ZERO_POINT",
    "Hit",
    "Row",
    "matched",
    "written",
]

# A tensor belongs to the language model when every part of its path is one of these: a tower for
# images or audio has the same layer numbers, and an encoder or a draft head has none of our cache.
LAYER = (
    r"(?:(?:(?:model|language_model|llm|thinker|transformer|decoder|text_model|gpt_neox|backbone)\.)*"
    r"(?:layers|h)|(?:model\.)?transformer\.blocks)\.(?P<layer>[0-9]{1,9})\."
)
_MODULES = r"(?:self_attn|self_attention|attention|attn|mixer)"
_ATTENTION = _MODULES + r"\.(?:(?:mla_attn|attn)\.)*"
# The start of a name up to the attention module of a layer, where a writer puts its scales.
MODULE = re.compile(f"(?P<path>{LAYER}{_MODULES})\\.")


@dataclass(frozen=True)
class Row:
    """One dialect's name for a scale.

    Attributes:
        format: what `KVScales.format` then says.
        tail: a regex for what follows the attention module; its group `side` is k, v or kv.
        name: the same for a writer: what follows the layer, with a place for `{side}`.
        rank: of two rows that match in one layer, the lower rank is used.
        dialects: the dialects of a config under which the row is valid; empty: all.
        declared: the name is common to other numbers, so only a config that declares static FP8
            scales makes it valid.
        shape: the shape of one number in a file that a writer makes; None: the row is only read.
    """

    format: str
    tail: str
    name: str
    rank: int
    dialects: tuple[str, ...] = ()
    declared: bool = False
    shape: tuple[int, ...] | None = None
    pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pattern", re.compile(LAYER + _ATTENTION + self.tail))


_PAIR, _SHARED = r"(?P<side>[kv])_scale", r"(?P<side>kv)_scale"
_PROJECTION = r"(?P<side>[kv])_proj\.(?P=side)_scale"
_OUTPUT = r"(?P<side>[kv])_proj\.output_scale"
ROWS = (
    Row(
        "compressed-tensors",
        _PAIR,
        "self_attn.{side}_scale",
        0,
        ("compressed-tensors",),
        shape=(1,),
    ),
    Row("autofp8", _PAIR, "self_attn.{side}_scale", 0, ("autofp8",), shape=()),
    Row("quark", _PAIR, "self_attn.{side}_scale", 0, ("quark",)),
    Row("modelopt", _PAIR, "self_attn.{side}_scale", 0, ("modelopt",)),
    Row("tgi", _PAIR, "self_attn.{side}_scale", 0, shape=()),
    Row("modelopt", _PROJECTION, "self_attn.{side}_proj.{side}_scale", 1, shape=()),
    Row("modelopt", r"qk(?:qk)?v_proj\.(?P<side>[kv])_scale", "self_attn.qkv_proj.{side}_scale", 1),
    Row("autofp8", r"(?P<side>[kv])_cache\.scale", "self_attn.{side}_cache.scale", 2),
    Row("quark", _OUTPUT, "self_attn.{side}_proj.output_scale", 3, ("quark",), True, ()),
    Row("autofp8", _OUTPUT, "self_attn.{side}_proj.output_scale", 3, ("autofp8",), True),
    Row(
        "compressed-tensors",
        _OUTPUT,
        "self_attn.{side}_proj.output_scale",
        3,
        ("compressed-tensors",),
        True,
    ),
    Row("autofp8", _SHARED, "self_attn.kv_scale", 4, ("autofp8",)),
    Row("tgi", _SHARED, "self_attn.kv_scale", 4),
    Row(
        "trtllm",
        r"(?P<side>[kv])_cache_scaling_factor",
        "attention.{side}_cache_scaling_factor",
        5,
        declared=True,
        shape=(1,),
    ),
    Row(
        "trtllm",
        r"(?P<side>kv)_cache_scaling_factor",
        "attention.kv_cache_scaling_factor",
        6,
        declared=True,
        shape=(1,),
    ),
)
# Names that say that the scales beside them are not those of an FP8 cache.
FOREIGN = tuple(
    (re.compile(LAYER + _ATTENTION + tail), what)
    for tail, what in (
        (r"[kv]_global_scale", "an NVFP4 cache"),
        (r"[kv]_proj\.[kv]_bias", "an affine NVFP4 cache"),
        (r"(?:[kv]_proj\.)?kv_cache_(?:scale|offset)", "an INT8 cache"),
    )
)
ZERO_POINT = re.compile(
    LAYER + _ATTENTION + r"(?:(?:k|v|kv)_zero_point|[kv]_proj\.(?:output|k|v)_zero_point)"
)
# What somebody may have meant as a scale of K or V, for the messages.
LIKELY = re.compile(
    r"(?:^|[._])(?:k|v|kv|key|value|qkv|qkqkv)(?:_cache|_proj)?[._]"
    r"(?![\w.]*(?:weight|input|bias|norm|zero_point))[\w.]*(?:scales?|scaling_factor|amax)$"
)


@dataclass(frozen=True)
class Hit:
    """A tensor that a row takes."""

    row: Row
    layer: int
    side: str
    name: str


def matched(names: Iterable[str], declared: Declaration) -> tuple[list[Hit], list[str]]:
    """The tensors that a row takes, best rank first, and those that only look like scales."""
    hits, unknown = [], []
    for name in names:
        for row in ROWS:
            if row.dialects and declared.dialect not in row.dialects:
                continue
            # An INT8 cache has these names too: it is taken here, and refused with its reason.
            if row.declared and declared.kind == "none":
                continue
            match = row.pattern.fullmatch(name)
            if match is not None:
                hits.append(Hit(row, int(match["layer"]), match["side"], name))
                break
        else:
            if LIKELY.search(name):
                unknown.append(name)
    return sorted(hits, key=lambda hit: (hit.row.rank, hit.layer, hit.name)), unknown


def written(format: str) -> dict[str, Row]:
    """The rows that a writer of the format uses, by their sides: "k" and "v", and "kv"."""
    rows = [row for row in ROWS if row.format == format and row.shape is not None]
    return {side: row for row in rows for side in (("k", "v") if "{side}" in row.name else ("kv",))}
