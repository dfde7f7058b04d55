"""Report of a calibration: what it found, as values and as JSON in `kv_calibration.json`.

Nothing here measures, and nothing here is needed to use the scales.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from typing import Any, get_args, get_origin, get_type_hints

from ..errors import ScaleError
from ..utils.text import format_value

REPORT_FILE = "kv_calibration.json"
# What a key of `SideStatistics.error` starts with when the scales are dynamic.
DYNAMIC = "dynamic "


@dataclass(frozen=True)
class SideStatistics:
    """K or V of one layer; shares and errors are those of held-out text."""

    # Per KV head: the largest magnitude in the text that was calibrated on, or measured.
    amax: tuple[float, ...]
    saturated: float  # the share beyond what rounds to the largest code
    underflow: float  # the share that is not 0 and becomes 0
    # Relative RMS error by format under these scales, and after `DYNAMIC` under dynamic scales.
    error: dict[str, float]


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
    kl: float  # mean KL divergence of the next token's distribution, in nats
    kl_max: float  # the largest at one token
    top1: float  # share of tokens at which the most likely next token is the same
    perplexity: float  # of the text
    tokens: int  # how many were scored


@dataclass(frozen=True)
class CalibrationReport:
    """What a calibration found; a measurement of scales from elsewhere is one too."""

    model: str  # what it is called
    dtype: str  # the format of the cache that shares and quality are of, or "plan": by layer
    granularity: str  # tensor, head, channel or token; several, joined by "/", when layers differ
    margin: float  # what the scales were multiplied by
    texts: int  # how many were calibrated on
    tokens: int  # of those texts
    held_out_tokens: int  # of the text that shares and errors are of, which no scale has seen
    seconds: float  # how long it took
    date: str  # as ISO 8601 writes it
    versions: dict[str, str]  # package -> version
    hardware: dict[str, object]  # what it ran on
    scales_digest: str  # of the scales that this is about
    centers: str  # one sentence: which centers were tried and chosen
    layers: dict[int, LayerStatistics]
    quality: tuple[QualityRow, ...]
    # The same at positions beyond those of the texts, up to the last of which it was measured.
    far_quality: tuple[QualityRow, ...] = ()
    max_position: int | None = None  # None: not measured

    def to_dict(self) -> dict[str, Any]:
        """Return the same as JSON values; raise ScaleError for what `from_dict` would refuse."""
        ordered = replace(self, layers=dict(sorted(self.layers.items())))
        data: dict[str, Any] = json.loads(json.dumps(asdict(ordered)))
        self.from_dict(data, "the report of a calibration")
        return data

    @classmethod
    def from_dict(cls, data: object, what: str) -> "CalibrationReport":
        """Return the report that `to_dict` made JSON of.

        Raises:
            ScaleError: An entry is missing, unknown, of another type, or a number that is not
                finite. The message names the entry, after `what`.
        """
        report: CalibrationReport = _read(cls, data, f"{what}: ")
        return report


def _read(kind: Any, value: Any, what: str) -> Any:
    """Return a value of JSON as the annotation `kind`: a dataclass, a dict, a tuple or a scalar."""
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if type(None) in arguments:
        return None if value is None else _read(arguments[0], value, what)
    if is_dataclass(kind) or origin is dict:
        if not isinstance(value, Mapping):
            raise _malformed("an object", value, what)
        if origin is dict:
            try:
                value = {arguments[0](key): item for key, item in value.items()}
            except ValueError:
                raise _malformed("the indices of layers", list(value), what) from None
            kinds = dict.fromkeys(value, arguments[1])
        else:
            kinds = get_type_hints(kind)
            required = {field.name for field in fields(kind) if field.default is MISSING}
            if value.keys() - kinds.keys() or required - value.keys():
                raise _malformed(f"the entries {', '.join(kinds)}", list(value), what)
        dot = "" if what.endswith(": ") else "."
        items = {n: _read(kinds[n], item, f"{what}{dot}{n}") for n, item in value.items()}
        return items if origin is dict else kind(**items)
    if origin is tuple:
        if not isinstance(value, list):
            raise _malformed("a list", value, what)
        return tuple(_read(arguments[0], v, f"{what}[{i}]") for i, v in enumerate(value))
    if kind is object:
        return json.loads(json.dumps(value))
    types = (int, float) if kind is float else (kind,)
    if type(value) not in types or (kind is float and not abs(value) <= sys.float_info.max):
        expected = "a finite number" if kind is float else kind.__name__
        raise _malformed(expected, value, what)
    return kind(value)


def _malformed(expected: str, value: Any, what: str) -> ScaleError:
    return ScaleError(
        f"{what.removesuffix(': ')}: expected {expected}, got {format_value(value)}; calibrate "
        "again, or delete the report: the scales do not need it"
    )
