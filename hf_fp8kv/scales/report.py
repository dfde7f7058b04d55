"""What a calibration found, as values, and the same as JSON in `kv_calibration.json`.

Nothing here measures, and nothing here is needed to use the scales.
"""

import re
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from ..formats import FORMATS
from .report_schema import Read, built, count, flag, json_object, named, number, refused, text

__all__ = [
    "DYNAMIC",
    "REPORT_FILE",
    "CalibrationReport",
    "LayerStatistics",
    "QualityRow",
    "SideStatistics",
]

REPORT_FILE = "kv_calibration.json"
# What a key of `SideStatistics.error` starts with when the scales are dynamic.
DYNAMIC = "dynamic "

# A divergence is 0 or more; a mean of differences of logarithms may round to just below it.
_LOWEST_KL = -1e-6
_GRANULARITIES = ("tensor", "head", "channel")
_LAYER = re.compile(r"0|[1-9][0-9]{0,5}")


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

    amax: tuple[float, ...]
    saturated: float
    underflow: float
    error: dict[str, float]


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
    center_gain: float | None


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
    kl: float
    kl_max: float
    top1: float
    perplexity: float
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
    dtype: str
    granularity: str
    margin: float
    texts: int
    tokens: int
    held_out_tokens: int
    seconds: float
    date: str
    versions: dict[str, str]
    hardware: dict[str, object]
    scales_digest: str
    centers: str
    layers: dict[int, LayerStatistics]
    quality: tuple[QualityRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the same as JSON values, which `from_dict` reads back exactly.

        Raises:
            ScaleError: a value that `from_dict` would refuse: what is written can be read.
        """
        data = asdict(self)
        data["layers"] = {str(index): layer for index, layer in sorted(data["layers"].items())}
        for layer in data["layers"].values():
            for side in ("k", "v"):
                layer[side]["amax"] = list(layer[side]["amax"])
        data["quality"] = list(data["quality"])
        self.from_dict(data, "the report of a calibration")
        return data

    @classmethod
    def from_dict(cls, data: object, what: str) -> "CalibrationReport":
        """Returns the report that `to_dict` made JSON of.

        Args:
            data: what the JSON holds.
            what: the file, for messages.

        Raises:
            ScaleError: anything that a report cannot hold; the message names the entry.
        """
        try:
            return built(cls, _REPORT, data, f"{what}: ")
        except RecursionError as error:
            raise refused("JSON of a few levels", "endless ones", what) from error


def _format(value: object, what: str) -> str:
    if not isinstance(value, str) or value not in FORMATS:
        raise refused(f"one of {', '.join(FORMATS)}", value, what)
    return value


def _granularity(value: object, what: str) -> str:
    if not isinstance(value, str) or not set(value.split("/")) <= set(_GRANULARITIES):
        raise refused(f"one of {', '.join(_GRANULARITIES)}, or several with /", value, what)
    return value


def _date(value: object, what: str) -> str:
    date = text(value, what)
    try:
        datetime.fromisoformat(date)
    except ValueError as error:
        raise refused("a date as ISO 8601 writes it", value, what) from error
    return date


def _digest(value: object, what: str) -> str:
    if not isinstance(value, str) or re.fullmatch("[0-9a-f]{64}", value) is None:
        raise refused("a sha256 of 64 digits 0-9a-f", value, what)
    return value


def _versions(value: object, what: str) -> dict[str, str]:
    return {name: text(part, f"{what}.{name}") for name, part in named(value, what).items()}


def _amax(value: object, what: str) -> tuple[float, ...]:
    if not isinstance(value, list) or not value:
        raise refused("a list with a number for each head", value, what)
    return tuple(_MAGNITUDE(amax, f"{what}[{head}]") for head, amax in enumerate(value))


def _error(value: object, what: str) -> dict[str, float]:
    errors = {}
    for name, error in named(value, what).items():
        if name.removeprefix(DYNAMIC) not in FORMATS:
            raise refused(f"only {', '.join(FORMATS)}, also after {DYNAMIC!r}", name, what)
        errors[name] = _MAGNITUDE(error, f"{what}.{name}")
    return errors


def _side(value: object, what: str) -> SideStatistics:
    return built(SideStatistics, _SIDE, value, f"{what}.")


def _gain(value: object, what: str) -> float | None:
    return None if value is None else float(_MAGNITUDE(value, what))


def _layers(value: object, what: str) -> dict[int, LayerStatistics]:
    layers = named(value, what)
    if not layers:
        raise refused("at least one layer", value, what)
    for index in layers:
        if _LAYER.fullmatch(index) is None:
            raise refused("the indices of layers, from 0", index, what)
    return {
        int(index): built(LayerStatistics, _LAYER_ENTRIES, layers[index], f"{what}.{index}.")
        for index in sorted(layers, key=int)
    }


def _quality(value: object, what: str) -> tuple[QualityRow, ...]:
    if not isinstance(value, list):
        raise refused("a list", value, what)
    return tuple(
        built(QualityRow, _QUALITY, row, f"{what}[{index}].") for index, row in enumerate(value)
    )


_MAGNITUDE, _SHARE = number(0), number(0, 1)
_SIDE: dict[str, Read] = {
    "amax": _amax, "saturated": _SHARE, "underflow": _SHARE, "error": _error,
}  # fmt: skip
_LAYER_ENTRIES: dict[str, Read] = {
    "k": _side, "v": _side, "centered": flag, "center_gain": _gain,
}  # fmt: skip
_QUALITY: dict[str, Read] = {
    "cache": text, "kl": number(_LOWEST_KL), "kl_max": number(_LOWEST_KL), "top1": _SHARE,
    "perplexity": number(0, above=True), "tokens": count,
}  # fmt: skip
_REPORT: dict[str, Read] = {
    "model": text, "dtype": _format, "granularity": _granularity,
    "margin": number(0, above=True), "texts": count, "tokens": count,
    "held_out_tokens": count, "seconds": _MAGNITUDE, "date": _date, "versions": _versions,
    "hardware": json_object, "scales_digest": _digest, "centers": text, "layers": _layers,
    "quality": _quality,
}  # fmt: skip
