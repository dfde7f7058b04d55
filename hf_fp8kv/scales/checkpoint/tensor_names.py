"""Names of scale tensors in a checkpoint, and the format of each name."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .configs import Declaration

# A tensor belongs to the language model if every part of its path is listed here. Encoders of
# images or audio have the same layer numbers, and encoders and draft heads do not use the cache.
LAYER = (
    r"(?:(?:(?:model|language_model|llm|thinker|transformer|decoder|text_model|gpt_neox|backbone)\.)*"
    r"(?:layers|h)|(?:model\.)?transformer\.blocks)\.(?P<layer>[0-9]{1,9})\."
)
_MODULES = r"(?:self_attn|self_attention|attention|attn|mixer)"
_ATTENTION = _MODULES + r"\.(?:(?:mla_attn|attn)\.)*"
# The start of a name up to the attention module of a layer, which has the scales.
ATTENTION_MODULE = re.compile(f"(?P<path>{LAYER}{_MODULES})\\.")


class ScaleTensor(NamedTuple):
    """A tensor with the name of a scale. The best tensor of a layer sorts first."""

    priority: int
    layer: int
    name: str
    side: str
    format: str


@dataclass(frozen=True)
class TensorName:
    """A tool's name for the tensor of a scale, below the attention module."""

    name: str  # `{side}` stands for k or v. A name without it is for K and V.
    # If two names match in a layer, the lower number is used: 0 for a name in the attention module,
    # 1 of a projection, 2 of a cache, 3 of a projection's output, 4 of K and V together, 5 and 6 of
    # TensorRT-LLM, 7 of the output of one projection for Q, K and V.
    priority: int
    # The first format applies unless the config declares one of the following formats. If the
    # first format is empty, the config must declare a format.
    formats: tuple[str, ...]
    # Some tensors that are not scales also have this name, so the config must declare FP8 scales.
    needs_declaration: bool = False

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        suffix = re.escape(self.name).replace(r"\{side\}", "(?P<side>[kv])", 1)
        return re.compile(LAYER + _ATTENTION + suffix.replace(r"\{side\}", "(?P=side)"))


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
# ModelOpt's FP8_AFFINE: a value for each head and channel that is subtracted before scaling.
BIAS = re.compile(LAYER + _ATTENTION + r"(?P<side>[kv])_proj\.(?P=side)_bias")
# Names of tensors that only caches other than FP8 have.
FOREIGN_NAMES = tuple(
    (re.compile(LAYER + _ATTENTION + suffix), cache)
    for suffix, cache in (
        (r"[kv]_global_scale", "an NVFP4 cache"),
        (r"(?:[kv]_proj\.)?kv_cache_(?:scale|offset)", "an INT8 cache"),
    )
)
ZERO_POINT = re.compile(
    LAYER + _ATTENTION + r"(?:(?:k|v|kv)_zero_point|[kv]_proj\.(?:output|k|v)_zero_point)"
)
# All tensors of an 8-bit or 4-bit cache.
CACHE_PATTERNS = (
    *(name.pattern for name in TENSOR_NAMES), *(pattern for pattern, _ in FOREIGN_NAMES),
    ZERO_POINT, BIAS,
)  # fmt: skip
# Names that look like a scale of K or V, for messages.
LIKELY_SCALE = re.compile(
    r"(?:^|[._])(?:k|v|kv|key|value|qkv|qkqkv|Wqkv|c_attn)(?:_cache|_proj)?[._]"
    r"(?![\w.]*(?:weight|input|activation|pre_quant|bias|norm|zero_point))[\w.]*(?:scales?|scaling_factor|amax)$"
)


def match_tensors(
    names: Iterable[str], declaration: Declaration
) -> tuple[list[ScaleTensor], list[str]]:
    """Return the scales among the names, the best first, and names that only look like scales."""
    scales, unknown_names, dialect = [], [], declaration.dialect
    for name in names:
        for tensor_name in TENSOR_NAMES if ATTENTION_MODULE.match(name) else ():
            format = dialect if dialect in tensor_name.formats else tensor_name.formats[0]
            # An INT8 cache also has these names. They are refused later, with the reason.
            is_refused = tensor_name.needs_declaration and declaration.kind == "none"
            if format and not is_refused and (match := tensor_name.pattern.fullmatch(name)):
                side, layer = match.groupdict().get("side", "kv"), int(match["layer"])
                scales.append(ScaleTensor(tensor_name.priority, layer, name, side, format))
                break
        else:
            if LIKELY_SCALE.search(name):
                unknown_names.append(name)
    return sorted(scales), unknown_names
