"""The report of a calibration as dataclasses, and as JSON in `kv_calibration.json`.

Scales can be used without a report.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from typing import Any, get_args, get_origin, get_type_hints

from ..errors import ScaleError
from ..utils.text import format_value

REPORT_FILE = "kv_calibration.json"
# Prefix of the keys of `SideStatistics.error` for dynamic scales.
DYNAMIC = "dynamic "


@dataclass(frozen=True)
class SideStatistics:
    """Statistics of K or V of one layer. Shares and errors are measured on held-out text."""

    amax: tuple[float, ...]  # largest magnitude of each KV head in the calibrated or measured text
    saturated: float  # share of values that are too large to round to the largest code
    underflow: float  # share of values other than 0 that become 0
    # Relative RMS error by format under these scales, and with `DYNAMIC` under dynamic scales.
    error: dict[str, float]


@dataclass(frozen=True)
class LayerStatistics:
    """Statistics of K and V of one layer."""

    k: SideStatistics
    v: SideStatistics
    centered: bool  # whether the scales have a center of K


@dataclass(frozen=True)
class QualityRow:
    """Comparison of a cache with the unquantized cache, by predictions on held-out text."""

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
    """The effect of storing a prompt before it is read, and the layers that are protected from it.

    Losses are mean KL divergences from the unquantized cache, in nats, on random tokens.
    """

    kl: float  # loss with the plan
    unprotected_kl: float  # loss with the same plan, if no layer is protected
    extra_bytes: float  # share of bytes that protection adds to a cache of 4,096 tokens
    sides: tuple[str, ...] = ()  # protected sides, such as "K of layer 0", in the order of choice

    def __str__(self) -> str:
        text = f"KL after a stored prompt {self.kl:.1e}"
        sides = f"{', '.join(self.sides)} in 16 bits, {self.extra_bytes:+.1%} bytes"
        protected = f", {self.unprotected_kl:.1e} without protection ({sides})"
        return text + protected * bool(self.sides)


@dataclass(frozen=True)
class CalibrationReport:
    """Results of a calibration, or of a measurement of existing scales."""

    model: str  # name of the model
    dtype: str  # format of the cache for shares and quality, or "plan" if layers differ
    granularity: str  # tensor, head, channel or token, joined by "/" if layers differ
    margin: float  # factor by which scales were enlarged
    texts: int  # number of texts of the calibration
    tokens: int  # number of tokens in these texts
    held_out_tokens: int  # number of tokens for shares and errors, which were not calibrated on
    seconds: float  # duration of the run
    date: str  # ISO 8601
    versions: dict[str, str]  # package -> version
    hardware: dict[str, object]
    scales_digest: str  # digest of the measured scales
    centers: str  # a sentence about the centers that were tested and chosen
    layers: dict[int, LayerStatistics]
    quality: tuple[QualityRow, ...]
    far_quality: tuple[QualityRow, ...] = ()  # quality at far positions, up to `max_position`
    max_position: int | None = None  # None means that far positions were not measured

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values. Raise ScaleError if `from_dict` would refuse it."""
        report = replace(self, layers=dict(sorted(self.layers.items())))
        data: dict[str, Any] = json.loads(json.dumps(asdict(report)))
        self.from_dict(data, "the report of a calibration")
        return data

    @classmethod
    def from_dict(cls, data: object, label: str) -> "CalibrationReport":
        """Return the report of JSON values from `to_dict`.

        Raises:
            ScaleError: An entry is missing, unknown, or has a wrong type, or a number is not
                finite. The message starts with `label` and has the name of the entry.
        """
        report: CalibrationReport = convert_json(cls, data, f"{label}: ")
        return report


def convert_json(annotation: Any, value: Any, label: str) -> Any:
    """Convert a JSON value to the type `annotation`: a dataclass, a dict, a tuple or a scalar."""
    origin, arguments = get_origin(annotation) or annotation, get_args(annotation)
    if type(None) in arguments:
        return None if value is None else convert_json(arguments[0], value, label)
    if is_dataclass(annotation) or origin is dict:
        if not isinstance(value, Mapping):
            raise _make_error("an object", value, label)
        if origin is dict:
            try:
                value = {arguments[0](key): x for key, x in value.items()}
            except ValueError:
                raise _make_error("the indices of layers", list(value), label) from None
            annotations = dict.fromkeys(value, arguments[1])
        else:
            annotations = get_type_hints(annotation)
            required = {field.name for field in fields(annotation) if field.default is MISSING}
            if value.keys() - annotations.keys() or required - value.keys():
                raise _make_error(f"the entries {', '.join(annotations)}", list(value), label)
        dot = "" if label.endswith(": ") else "."
        entries = {n: convert_json(annotations[n], x, f"{label}{dot}{n}") for n, x in value.items()}
        return entries if origin is dict else annotation(**entries)
    if origin is tuple:
        if not isinstance(value, list):
            raise _make_error("a list", value, label)
        return tuple(convert_json(arguments[0], x, f"{label}[{i}]") for i, x in enumerate(value))
    if annotation is object:
        return json.loads(json.dumps(value))
    types = (int, float) if annotation is float else (annotation,)
    if type(value) not in types or (annotation is float and not abs(value) <= sys.float_info.max):
        expected = "a finite number" if annotation is float else annotation.__name__
        raise _make_error(expected, value, label)
    return annotation(value)


def _make_error(expected: str, value: Any, label: str) -> ScaleError:
    return ScaleError(
        f"{label.removesuffix(': ')}: expected {expected}, got {format_value(value)}. Calibrate "
        "again, or delete the report, which the scales do not need"
    )
