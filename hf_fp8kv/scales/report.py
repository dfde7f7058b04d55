"""Report of a calibration: what it found, as values and as JSON in `kv_calibration.json`.

Nothing here measures, and nothing here is needed to use the scales.
"""

import math
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

from ..formats import FORMATS
from .report_schema import Rule, from_json, in_range, matches, to_json

REPORT_FILE = "kv_calibration.json"
# What a key of `SideStatistics.error` starts with when the scales are dynamic.
DYNAMIC = "dynamic "


def _is_date(text: str) -> bool:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True


_FORMATS, _KINDS = "|".join(FORMATS), "tensor|head|channel|token"
# Instead of a format: each layer is stored as the plan of the scales says.
PLANNED = "plan"
Magnitude = Annotated[float, in_range("a finite number of at least 0", 0)]
Positive = Annotated[float, in_range("a finite number above 0", math.ulp(0.0))]
Share = Annotated[float, in_range("a number from 0 to 1", 0, 1)]
# A divergence is 0 or more; a mean of differences of logarithms may round to just below it.
Divergence = Annotated[float, in_range("a finite number of at least 0", -1e-6)]
Date = Annotated[str, Rule("a date as ISO 8601 writes it", _is_date)]
Digest = Annotated[str, matches("a sha256 of 64 digits 0-9a-f", "[0-9a-f]{64}")]
FormatName = Annotated[
    str, matches(f"one of {', '.join(FORMATS)}, {PLANNED}", f"{_FORMATS}|{PLANNED}")
]
ErrorName = Annotated[
    str, matches(f"only {', '.join(FORMATS)}, also after {DYNAMIC!r}", f"({DYNAMIC})?({_FORMATS})")
]
Granularities = Annotated[
    str,
    matches("one of tensor, head, channel, token, or several with /", f"({_KINDS})(/({_KINDS}))*"),
]
LayerIndex = Annotated[int, matches("the indices of layers, from 0", "0|[1-9][0-9]{0,5}")]


@dataclass(frozen=True)
class SideStatistics:
    """K or V of one layer; shares and errors are those of held-out text."""

    # Per KV head: the largest magnitude in the text that was calibrated on, or measured.
    amax: Annotated[tuple[Magnitude, ...], Rule("a list with a number for each head", bool)]
    saturated: Share  # beyond what rounds to the largest code
    underflow: Share  # not 0, and becomes 0
    # Relative RMS error by format under these scales, and after `DYNAMIC` under dynamic scales.
    error: dict[ErrorName, Magnitude]


@dataclass(frozen=True)
class LayerStatistics:
    """Both sides of one layer."""

    k: SideStatistics
    v: SideStatistics
    centered: bool  # whether the scales carry a center of K


@dataclass(frozen=True)
class QualityRow:
    """How far one cache moves the predictions for held-out text from the unquantised cache's."""

    # "unquantised", "static fp8_e4m3", "dynamic fp8_e4m3", "scale 1.0 fp8_e4m3", or with a plan
    # "static, the plan" or "dynamic, the plan" instead of the second, or both.
    cache: str
    kl: Divergence  # mean KL divergence of the next token's distribution, in nats
    kl_max: Divergence  # the largest at one token
    top1: Share  # of tokens at which the most likely next token is the same
    perplexity: Positive  # of the text
    tokens: int  # how many were scored


@dataclass(frozen=True)
class CalibrationReport:
    """What a calibration found; a measurement of scales from elsewhere is one too."""

    model: str  # what it is called
    dtype: FormatName  # of the cache that shares and quality are of, or "plan"
    granularity: Granularities  # several, joined by "/", when layers differ
    margin: Positive  # what the scales were multiplied by
    texts: int  # how many were calibrated on
    tokens: int  # of those texts
    held_out_tokens: int  # of the text that shares and errors are of, which no scale has seen
    seconds: Magnitude  # how long it took
    date: Date
    versions: dict[str, str]  # package -> version
    hardware: dict[str, object]  # what it ran on
    scales_digest: Digest  # of the scales that this is about
    centers: str  # one sentence: which centers were tried and chosen
    layers: Annotated[dict[LayerIndex, LayerStatistics], Rule("an object with a layer", bool)]
    quality: tuple[QualityRow, ...]
    # The same at positions beyond those of the texts, up to the last of which it was measured.
    far_quality: tuple[QualityRow, ...] = ()
    max_position: int | None = None  # None: not measured

    def to_dict(self) -> dict[str, Any]:
        """Return the same as JSON values; raise ScaleError for what `from_dict` would refuse."""
        data: dict[str, Any] = to_json(self)
        self.from_dict(data, "the report of a calibration")
        return data

    @classmethod
    def from_dict(cls, data: object, what: str) -> "CalibrationReport":
        """Return the report that `to_dict` made JSON of; messages of a ScaleError name `what`."""
        report: CalibrationReport = from_json(cls, data, f"{what}: ")
        return report
