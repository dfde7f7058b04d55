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


_FORMATS, _KINDS = "|".join(FORMATS), "tensor|head|channel"
Magnitude = Annotated[float, in_range("a finite number of at least 0", 0)]
Positive = Annotated[float, in_range("a finite number above 0", math.ulp(0.0))]
Share = Annotated[float, in_range("a number from 0 to 1", 0, 1)]
# A divergence is 0 or more; a mean of differences of logarithms may round to just below it.
Divergence = Annotated[float, in_range("a finite number of at least 0", -1e-6)]
Date = Annotated[str, Rule("a date as ISO 8601 writes it", _is_date)]
Digest = Annotated[str, matches("a sha256 of 64 digits 0-9a-f", "[0-9a-f]{64}")]
FormatName = Annotated[str, matches(f"one of {', '.join(FORMATS)}", _FORMATS)]
ErrorName = Annotated[
    str, matches(f"only {', '.join(FORMATS)}, also after {DYNAMIC!r}", f"({DYNAMIC})?({_FORMATS})")
]
Granularities = Annotated[
    str, matches("one of tensor, head, channel, or several with /", f"({_KINDS})(/({_KINDS}))*")
]
LayerIndex = Annotated[int, matches("the indices of layers, from 0", "0|[1-9][0-9]{0,5}")]


@dataclass(frozen=True)
class SideStatistics:
    """K or V of one layer.

    Attributes:
        amax: per KV head: the largest magnitude in the text that was calibrated on, or measured.
        saturated: share of the numbers of held-out text that saturate under the scales: that are
            beyond what rounds to the largest code.
        underflow: share of its numbers that are not 0 and become 0.
        error: relative RMS error of held-out text: a key of `FORMATS` is that format under these
            scales, and the same key after `DYNAMIC` is that format under dynamic scales.
    """

    amax: Annotated[tuple[Magnitude, ...], Rule("a list with a number for each head", bool)]
    saturated: Share
    underflow: Share
    error: dict[ErrorName, Magnitude]


@dataclass(frozen=True)
class LayerStatistics:
    """Both sides of one layer.

    Attributes:
        k: the keys.
        v: the values.
        centered: whether the scales carry a center of K.
        center_gain: what K's errors cost (see `calibration.choose`) without a center, over that
            with one: above 1, it helps. None: not tried.
    """

    k: SideStatistics
    v: SideStatistics
    centered: bool
    center_gain: Magnitude | None


@dataclass(frozen=True)
class QualityRow:
    """How far one cache moves the predictions for held-out text from the unquantised cache's.

    Attributes:
        cache: "unquantised", "static fp8_e4m3", "dynamic fp8_e4m3" or "scale 1.0 fp8_e4m3".
        kl: mean KL divergence of the next token's distribution, in nats.
        kl_max: the largest at one token.
        top1: share of tokens, 0 to 1, at which the most likely next token is the same.
        perplexity: of the text.
        tokens: how many were scored.
    """

    cache: str
    kl: Divergence
    kl_max: Divergence
    top1: Share
    perplexity: Positive
    tokens: int


@dataclass(frozen=True)
class CalibrationReport:
    """What a calibration found; a measurement of scales from elsewhere is one too.

    Attributes:
        model: what the model is called.
        dtype: the format of the cache that shares and quality are of, a key of `FORMATS`.
        granularity: "tensor", "head" or "channel"; several, joined by "/", when layers differ.
        margin: what the scales were multiplied by.
        texts: how many were calibrated on.
        tokens: of those texts.
        held_out_tokens: of the text that shares and errors are of, which no scale has seen.
        seconds: how long it took.
        date: when, as ISO 8601.
        versions: package -> version.
        hardware: what it ran on; JSON values.
        scales_digest: sha256 of the scales that this is about.
        centers: one sentence: which centers were tried and chosen.
        layers: the layers by their index.
        quality: one row for each cache.
    """

    model: str
    dtype: FormatName
    granularity: Granularities
    margin: Positive
    texts: int
    tokens: int
    held_out_tokens: int
    seconds: Magnitude
    date: Date
    versions: dict[str, str]
    hardware: dict[str, object]
    scales_digest: Digest
    centers: str
    layers: Annotated[dict[LayerIndex, LayerStatistics], Rule("an object with a layer", bool)]
    quality: tuple[QualityRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the same as JSON values, which `from_dict` reads back exactly.

        Raises:
            ScaleError: a value that `from_dict` would refuse: what is written can be read.
        """
        data: dict[str, Any] = to_json(self)
        self.from_dict(data, "the report of a calibration")
        return data

    @classmethod
    def from_dict(cls, data: object, what: str) -> "CalibrationReport":
        """Return the report that `to_dict` made JSON of.

        Args:
            data: what the JSON holds.
            what: the file, for messages.

        Raises:
            ScaleError: anything that a report cannot hold; the message names the entry.
        """
        report: CalibrationReport = from_json(cls, data, f"{what}: ")
        return report
