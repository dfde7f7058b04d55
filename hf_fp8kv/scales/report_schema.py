"""Schema of a report's JSON: the annotations of its dataclasses say what each entry holds."""

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from ..errors import ScaleError
from ..utils.text import format_value


@dataclass(frozen=True)
class Rule:
    """What a value must be besides its type, as `Annotated[type, Rule(...)]`."""

    expected: str  # the value in words, for messages
    holds: Callable[[Any], bool]  # of a value of the right type, or of the text of a dict's key


def in_range(expected: str, low: float, high: float = sys.float_info.max) -> Rule:
    """Return the rule for a number from `low` to `high`, in words `expected`; NaN is none."""
    return Rule(expected, lambda value: low <= value <= high)


def matches(expected: str, pattern: str) -> Rule:
    """Return the rule for text that matches a regex, in words `expected`."""
    return Rule(expected, lambda text: re.fullmatch(pattern, text) is not None)


_TYPES: dict[Any, tuple[Any, Rule]] = {
    str: (str, Rule("text", lambda _: True)),
    bool: (bool, Rule("true or false", lambda _: True)),
    int: (int, in_range("an integer of at least 0", 0)),
    float: (int | float, in_range("a finite number", -sys.float_info.max)),
    tuple: (list, Rule("a list", lambda _: True)),
    dict: (Mapping, Rule("an object with names", lambda _: True)),
}


def to_json(value: Any) -> Any:
    """Return a dataclass as the values that JSON holds; keys that are integers are sorted."""
    if is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value and all(isinstance(key, int) for key in value):
        return {str(key): to_json(value[key]) for key in sorted(value)}
    return {key: to_json(item) for key, item in value.items()}


def from_json(kind: Any, value: Any, what: str) -> Any:
    """Return the value of an annotation that JSON holds.

    A dataclass has all entries but those with a default, and no other.
    `kind` is a dataclass, str, bool, int, float, object, or a tuple, dict or `| None` of these. A
    ScaleError names the entry, `what` or one below it.
    """
    rule: Rule | None = None
    if get_origin(kind) is Annotated:
        kind, rule = get_args(kind)
    if is_dataclass(kind):
        return _read_dataclass(kind, value, what)
    if kind is object:
        return _copy_json(value, what)
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if type(None) in arguments:
        return None if value is None else from_json(arguments[0], value, what)
    json_type, general = _TYPES[origin]
    rule = rule or general
    is_type = isinstance(value, json_type) and (kind is bool or not isinstance(value, bool))
    if origin is dict and is_type:
        is_type = all(isinstance(name, str) for name in value)
    if not is_type or not rule.holds(value):
        raise _malformed(rule.expected, value, what)
    if origin is tuple:
        return tuple(from_json(arguments[0], v, f"{what}[{i}]") for i, v in enumerate(value))
    if origin is dict:
        return _read_dict(arguments[0], arguments[1], value, what)
    return float(value) if kind is float else value


def _read_dataclass(kind: Any, value: Any, what: str) -> Any:
    kinds = get_type_hints(kind, include_extras=True)
    if not isinstance(value, Mapping):
        raise _malformed(f"an object with {', '.join(kinds)}", value, what)
    optional = {field.name for field in fields(kind) if field.default is not MISSING}
    for name in kinds:
        if name not in value and name not in optional:
            raise _malformed(f"the entry {name}", list(value), what)
    for name in value:
        if name not in kinds:
            raise _malformed(f"only {', '.join(kinds)}", name, what)
    known = {name: of for name, of in kinds.items() if name in value}
    return kind(**{n: from_json(k, value[n], _join(what, n)) for n, k in known.items()})


def _read_dict(key: Any, item: Any, value: Mapping[Any, Any], what: str) -> Any:
    key_type, rule = get_args(key) if get_origin(key) is Annotated else (key, _TYPES[key][1])
    for name in value:
        if not rule.holds(name):
            raise _malformed(rule.expected, name, what)
    names = sorted(value, key=int) if key_type is int else value
    return {key_type(name): from_json(item, value[name], _join(what, name)) for name in names}


def _copy_json(value: Any, what: str) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise _malformed("a value that JSON can hold", value, what) from error


def _join(what: str, name: str) -> str:
    return f"{what}{name}" if what.endswith(": ") else f"{what}.{name}"


def _malformed(expected: str, value: Any, what: str) -> ScaleError:
    return ScaleError(
        f"{what.removesuffix(': ')}: expected {expected}, got {format_value(value)}; calibrate "
        "again, or delete the report: the scales do not need it"
    )
