"""Names of scale tensors in a checkpoint, and the dialects that use each name."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .configs import Declaration

# A tensor belongs to the language model if every part of its path is listed here. The layers of
# image and audio encoders have the same numbers. Encoders and draft heads do not use the cache.
LAYER_REGEX = (
    r"(?:(?:(?:model|language_model|llm|thinker|transformer|decoder|text_model|gpt_neox|backbone)\.)*"
    r"(?:layers|h)|(?:model\.)?transformer\.blocks)\.(?P<layer>[0-9]{1,9})\."
)
_MODULE_REGEX = r"(?:self_attn|self_attention|attention|attn|mixer)"
# The part of a name before the name of a scale.
_PREFIX_REGEX = LAYER_REGEX + _MODULE_REGEX + r"\.(?:(?:mla_attn|attn)\.)*"
# The start of a name up to the attention module of a layer, which has the scales.
ATTENTION_PATTERN = re.compile(f"(?P<path>{LAYER_REGEX}{_MODULE_REGEX})\\.")


class ScaleTensor(NamedTuple):
    """A tensor whose name denotes a scale. In sorted order, preferred names come first."""

    priority: int
    layer_index: int
    name: str
    sides: str  # "k", "v" or "kv"
    dialect: str


@dataclass(frozen=True)
class TensorName:
    """A tool's name for the tensor of a scale, below the attention module."""

    template: str  # `{side}` stands for k or v. A template without it is for both K and V.
    # If two names match in a layer, the lower number is used: 0 on the attention module, 1 on a
    # projection, 2 on a cache, 3 on a projection's output, 4 for both K and V, 5 and 6 for
    # TensorRT-LLM, 7 on the output of one projection for Q, K and V.
    priority: int
    # The first dialect applies unless the config declares one of the dialects after it. If the
    # first dialect is empty, the config must declare a dialect.
    dialects: tuple[str, ...]
    # Other tensors may also have this name, so the config must declare scales of an FP8 cache.
    needs_declaration: bool = False

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        suffix = re.escape(self.template).replace(r"\{side\}", "(?P<side>[kv])", 1)
        return re.compile(_PREFIX_REGEX + suffix.replace(r"\{side\}", "(?P=side)"))


TENSOR_NAMES = (
    TensorName("{side}_scale", 0, ("tgi", "autofp8", "compressed-tensors", "modelopt", "quark")),
    TensorName("{side}_proj.{side}_scale", 1, ("modelopt",)),
    TensorName("qkv_proj.{side}_scale", 1, ("modelopt",)),
    TensorName("qkqkv_proj.{side}_scale", 1, ("modelopt",)),
    TensorName("{side}_cache.scale", 2, ("autofp8",)),
    TensorName("{side}_proj.output_scale", 3, ("", "autofp8", "compressed-tensors", "quark"), True),
    TensorName("kv_scale", 4, ("tgi", "autofp8")),
    TensorName("{side}_cache_scaling_factor", 5, ("trtllm",), True),
    TensorName("kv_cache_scaling_factor", 6, ("trtllm",), True),
    *(
        TensorName(f"{projection}.output_scale", 7, ("", "quark"), True)
        for projection in ("qkv", "qkv_proj", "query_key_value", "Wqkv", "c_attn")
    ),
)
# Biases of ModelOpt's FP8_AFFINE: values for each head and channel, subtracted before scaling.
BIAS_PATTERN = re.compile(_PREFIX_REGEX + r"(?P<side>[kv])_proj\.(?P=side)_bias")
# Names of tensors that exist only in checkpoints with a cache that is not FP8.
FOREIGN_PATTERNS = {
    re.compile(_PREFIX_REGEX + r"[kv]_global_scale"): "an NVFP4 cache",
    re.compile(_PREFIX_REGEX + r"(?:[kv]_proj\.)?kv_cache_(?:scale|offset)"): "an INT8 cache",
}
ZERO_POINT_PATTERN = re.compile(
    _PREFIX_REGEX + r"(?:(?:k|v|kv)_zero_point|[kv]_proj\.(?:output|k|v)_zero_point)"
)
# Names of all tensors of an 8-bit or 4-bit cache.
CACHE_PATTERNS = (
    *(name.pattern for name in TENSOR_NAMES),
    *FOREIGN_PATTERNS,
    ZERO_POINT_PATTERN,
    BIAS_PATTERN,
)
# Names that look like a scale of K or V, for messages.
LIKELY_SCALE_PATTERN = re.compile(
    r"(?:^|[._])(?:k|v|kv|key|value|qkv|qkqkv|Wqkv|c_attn)(?:_cache|_proj)?[._]"
    r"(?![\w.]*(?:weight|input|activation|pre_quant|bias|norm|zero_point))[\w.]*(?:scales?|scaling_factor|amax)$"
)


def match_tensors(
    names: Iterable[str], declaration: Declaration
) -> tuple[list[ScaleTensor], list[str]]:
    """Return the scales among the names, in sorted order, and names that only look like scales."""
    scales: list[ScaleTensor] = []
    unknown_names: list[str] = []
    for name in names:
        candidates = TENSOR_NAMES if ATTENTION_PATTERN.match(name) else ()
        for tensor_name in candidates:
            dialect = (
                declaration.dialect
                if declaration.dialect in tensor_name.dialects
                else tensor_name.dialects[0]
            )
            # The names also match for an INT8 cache, which is refused later, with the reason.
            is_ambiguous = tensor_name.needs_declaration and declaration.kind == "none"
            if dialect and not is_ambiguous and (match := tensor_name.pattern.fullmatch(name)):
                sides = match.groupdict().get("side", "kv")
                index = int(match["layer"])
                scales.append(ScaleTensor(tensor_name.priority, index, name, sides, dialect))
                break
        else:
            if LIKELY_SCALE_PATTERN.search(name):
                unknown_names.append(name)
    return sorted(scales), unknown_names
