"""The report of measured scales, and the protection of a plan, as dataclasses."""

import json
import sys
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..errors import ScaleError
from ..utils.text import format_value

# Prefix of the keys of `SideStatistics.error` for dynamic scales.
DYNAMIC = "dynamic "
_ADVICE = "Choose the plan again (hf_fp8kv.choose_plan)"


@dataclass(frozen=True)
class SideStatistics:
    """Statistics of K or V of one layer on a text."""

    amax: tuple[float, ...]  # largest magnitude of each KV head
    saturated: float  # share of values that are too large to round to the largest code
    underflow: float  # share of values other than 0 that become 0
    # Relative RMS error by format under these scales, and with `DYNAMIC` under dynamic scales.
    error: dict[str, float]


@dataclass(frozen=True)
class LayerStatistics:
    """Statistics of K and V of one layer."""

    k: SideStatistics
    v: SideStatistics


@dataclass(frozen=True)
class QualityRow:
    """Comparison of a cache with the unquantized cache, by predictions."""

    # "unquantized", "static fp8_e4m3", "dynamic fp8_e4m3" or "scale 1.0 fp8_e4m3". With a plan,
    # "static, the plan" and "dynamic, the plan" replace the second.
    cache: str
    kl: float  # mean KL divergence of the next token's distribution, in nats
    kl_max: float  # largest KL divergence of a token
    top1: float  # share of tokens with the same most likely next token
    perplexity: float  # perplexity of the text
    tokens: int  # number of scored tokens


@dataclass(frozen=True)
class Protection:
    """The sides that keep 16 bits, and the loss with and without them after a stored prompt.

    Losses are mean KL divergences from the unquantized cache, in nats, on random tokens.
    """

    kl: float  # loss with the plan
    unprotected_kl: float  # loss with the same plan, if no layer is protected
    extra_bytes: float  # share of bytes that protection adds to a cache of 4,096 tokens
    sides: tuple[str, ...] = ()  # protected sides, such as "K of layer 0", in the order of choice

    @classmethod
    def from_dict(cls, data: object, label: str) -> "Protection":
        """Return the protection of JSON values from `asdict`. Raise ScaleError if they are invalid.

        The message of the error starts with `label`.
        """
        names = [field.name for field in fields(cls)]
        if not isinstance(data, dict) or data.keys() != set(names):
            rule = f"an object with the entries {', '.join(names)}"
            raise ScaleError(f"{label}: expected {rule}, got {format_value(data)}. {_ADVICE}")
        sides = data["sides"]
        if not isinstance(sides, list) or not all(isinstance(side, str) for side in sides):
            rule = "a list of names"
            raise ScaleError(
                f"{label}.sides: expected {rule}, got {format_value(sides)}. {_ADVICE}"
            )
        for name in names[:-1]:
            value = data[name]
            # Compare before converting, because an integer may be too large for a float.
            if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
                rule = f"expected a finite number, got {format_value(value)}"
                raise ScaleError(f"{label}.{name}: {rule}. {_ADVICE}")
        kl, unprotected_kl, extra_bytes = (float(data[name]) for name in names[:-1])
        return cls(kl, unprotected_kl, extra_bytes, tuple(sides))

    def __str__(self) -> str:
        text = f"KL after a stored prompt {self.kl:.1e}"
        sides = f"{', '.join(self.sides)} in 16 bits, {self.extra_bytes:+.1%} bytes"
        protected = f", {self.unprotected_kl:.1e} without protection ({sides})"
        return text + protected * bool(self.sides)


@dataclass(frozen=True)
class ScalesReport:
    """Results of `measure` for scales on a text."""

    model: str  # name of the model
    dtype: str  # format of the cache for shares and quality, or "plan" if layers differ
    granularity: str  # tensor, head, channel or token, joined by "/" if layers differ
    tokens: int  # number of tokens of the text
    seconds: float  # duration of the run
    date: str  # ISO 8601
    versions: dict[str, str]  # package -> version
    hardware: dict[str, object]
    scales_digest: str  # digest of the measured scales
    layers: dict[int, LayerStatistics]
    quality: tuple[QualityRow, ...]  # empty if the model's predictions cannot be compared

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        data: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return data
