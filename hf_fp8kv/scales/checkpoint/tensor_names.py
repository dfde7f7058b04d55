"""Names of scale tensors in a checkpoint: how a format's names are matched and made."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .config import Declaration

# A tensor belongs to the language model when every part of its path is one of these: a tower for
# images or audio has the same layer numbers, and an encoder or a draft head has none of our cache.
LAYER = (
    r"(?:(?:(?:model|language_model|llm|thinker|transformer|decoder|text_model|gpt_neox|backbone)\.)*"
    r"(?:layers|h)|(?:model\.)?transformer\.blocks)\.(?P<layer>[0-9]{1,9})\."
)
_MODULES = r"(?:self_attn|self_attention|attention|attn|mixer)"
_ATTENTION = _MODULES + r"\.(?:(?:mla_attn|attn)\.)*"
# The start of a name up to the attention module of a layer, where a writer puts its scales.
ATTENTION_MODULE = re.compile(f"(?P<path>{LAYER}{_MODULES})\\.")


@dataclass(frozen=True)
class TensorName:
    """What a format calls the tensor of a scale."""

    # A regex for what follows the attention module; its group `side` is k, v or kv, which is also
    # meant without the group.
    tail: str
    name: str  # the same for a writer: what follows the layer, with a place for `{side}`
    # Of two names that match in one layer, the one with the lower number is used: 0 beside the
    # attention, 1 of a projection, 2 of a cache, 3 of a projection's output, 4 of both sides, 5 and
    # 6 of TensorRT-LLM, 7 of the output of one projection for Q, K and V.
    priority: int
    own_dialect: bool = False  # valid only under a config of the format's own tool
    # Other numbers have the name too: only a config that declares static FP8 scales makes it valid.
    needs_declaration: bool = False
    shape: tuple[int, ...] | None = None  # of one number that is written; None: only read
    format: str = ""  # its name, which the registry of formats fills in
    pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pattern", re.compile(LAYER + _ATTENTION + self.tail))


# Names that several formats share, each as the format's own tool writes it.
PAIR = TensorName(r"(?P<side>[kv])_scale", "self_attn.{side}_scale", 0, own_dialect=True)
SHARED = TensorName(r"(?P<side>kv)_scale", "self_attn.kv_scale", 4, own_dialect=True)
OUTPUTS = TensorName(
    r"(?P<side>[kv])_proj\.output_scale", "self_attn.{side}_proj.output_scale", 3, True, True
)
FUSED_OUTPUT = TensorName(
    r"(?:qkv|qkv_proj|query_key_value|Wqkv|c_attn)\.output_scale",
    "self_attn.qkv_proj.output_scale",
    7,
    True,
    True,
)
# ModelOpt's FP8_AFFINE: a number for each head and channel that is subtracted before scaling.
BIAS = re.compile(LAYER + _ATTENTION + r"(?P<side>[kv])_proj\.(?P=side)_bias")
# Names that say that the scales beside them are not those of an FP8 cache.
FOREIGN = tuple(
    (re.compile(LAYER + _ATTENTION + tail), what)
    for tail, what in (
        (r"[kv]_global_scale", "an NVFP4 cache"),
        (r"(?:[kv]_proj\.)?kv_cache_(?:scale|offset)", "an INT8 cache"),
    )
)
ZERO_POINT = re.compile(
    LAYER + _ATTENTION + r"(?:(?:k|v|kv)_zero_point|[kv]_proj\.(?:output|k|v)_zero_point)"
)
# What somebody may have meant as a scale of K or V, for the messages.
LIKELY = re.compile(
    r"(?:^|[._])(?:k|v|kv|key|value|qkv|qkqkv)(?:_cache|_proj)?[._]"
    r"(?![\w.]*(?:weight|input|activation|pre_quant|bias|norm|zero_point))[\w.]*(?:scales?|scaling_factor|amax)$"
)


@dataclass(frozen=True)
class ScaleTensor:
    """A tensor of a checkpoint that is a scale by its name."""

    tensor_name: TensorName
    layer: int
    side: str
    name: str


def match_tensors(
    names: Iterable[str], table: Sequence[TensorName], declaration: Declaration
) -> tuple[list[ScaleTensor], list[str]]:
    """Return the scales among the names, best first, and the names that only look like scales."""
    # A name of the declared tool's own comes before the same name of any tool.
    valid = [
        known
        for known in sorted(table, key=lambda known: not known.own_dialect)
        if not (known.own_dialect and known.format != declaration.dialect)
        # An INT8 cache has these names too: they are taken here, and refused with the reason.
        and not (known.needs_declaration and declaration.kind == "none")
    ]
    scales, unknown = [], []
    for name in names:
        for known in valid:
            match = known.pattern.fullmatch(name)
            if match is not None:
                side = match.groupdict().get("side", "kv")
                scales.append(ScaleTensor(known, int(match["layer"]), side, name))
                break
        else:
            if LIKELY.search(name):
                unknown.append(name)
    return sorted(scales, key=lambda s: (s.tensor_name.priority, s.layer, s.name)), unknown
