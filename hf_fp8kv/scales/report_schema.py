"""How an entry of a report's JSON is read, with the error that names it."""

import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..errors import ScaleError
from ..utils.text import format_value

__all__ = [
    "Read", "built", "count", "flag", "json_object", "named", "number", "refused", "text",
]  # fmt: skip

T = TypeVar("T")
# Takes what the JSON holds and the entry's name.
Read = Callable[[object, str], Any]


def refused(expected: str, value: object, what: str) -> ScaleError:
    """Returns the error for an entry that is malformed."""
    return ScaleError(
        f"{what.rstrip(':. ')}: expected {expected}, got {format_value(value)}; calibrate again, "
        "or delete the report: the scales do not need it"
    )


def built(cls: type[T], entries: Mapping[str, Read], data: object, what: str) -> T:
    """Returns the dataclass whose fields are the entries of `data`, all of them and no other.

    Args:
        cls: the dataclass.
        entries: how each field is read.
        data: what the JSON holds.
        what: what the names of the entries are put behind: "layers.0.k.".
    """
    if not isinstance(data, Mapping):
        raise refused(f"an object with {', '.join(entries)}", data, what)
    for name in entries:
        if name not in data:
            raise refused(f"the entry {name}", list(data), what)
    for name in data:
        if name not in entries:
            raise refused(f"only {', '.join(entries)}", name, what)
    return cls(**{name: read(data[name], f"{what}{name}") for name, read in entries.items()})


def number(low: float | None = None, high: float | None = None, *, above: bool = False) -> Read:
    """Reads a finite number from `low` to `high`; with `above`, `low` itself is too little."""
    expected = "a finite number"
    if high is not None:
        expected = f"a number from {low:g} to {high:g}"
    elif low is not None:
        expected += f" above {low:g}" if above else f" of at least {low:g}"

    def read(value: object, what: str) -> float:
        largest = sys.float_info.max if high is None else high
        smallest = -sys.float_info.max if low is None else low
        # Compared before it is converted: an integer may be too large for a float. NaN is neither.
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and smallest <= value <= largest
            and not (above and value == low)
        ):
            return float(value)
        raise refused(expected, value, what)

    return read


def count(value: object, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise refused("an integer of at least 0", value, what)
    return value


def flag(value: object, what: str) -> bool:
    if not isinstance(value, bool):
        raise refused("true or false", value, what)
    return value


def text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise refused("text", value, what)
    return value


def named(value: object, what: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise refused("an object with names", value, what)
    return value


def json_object(value: object, what: str) -> dict[str, object]:
    """Reads an object of whatever JSON can hold."""
    return {name: _json_value(part, f"{what}.{name}") for name, part in named(value, what).items()}


def _json_value(value: object, what: str) -> object:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return number()(value, what)
    if isinstance(value, list):
        return [_json_value(part, f"{what}[{i}]") for i, part in enumerate(value)]
    if isinstance(value, Mapping):
        return json_object(value, what)
    raise refused("a value that JSON can hold", value, what)
