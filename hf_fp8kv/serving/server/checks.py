"""Checks of single values in request bodies, and the errors that say what was expected."""

import itertools
import json
from collections.abc import Callable
from typing import Any

from .errors import APIError

# Stop strings of a request: OpenAI's four are too few for tasks of lm_eval.
MAX_STOPS = 16

# Whether a value is valid, and what is expected.
Check = tuple[Callable[[Any], bool], str]


def is_same(a: Any, b: Any) -> bool:
    """Return whether two JSON values are equal; 1 and 1.0 are, 1 and true are not."""
    return (type(a) is type(b) or (is_number(a) and is_number(b))) and bool(a == b)


def is_number(value: Any) -> bool:
    """Return whether a JSON value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _format(value: Any) -> str:
    # In parts: only the first ones of megabytes are made.
    text = "".join(itertools.islice(json.JSONEncoder().iterencode(value), 60))
    return text if len(text) <= 60 else f"{text[:57]}..."


def invalid(name: str, expected: str, value: Any) -> APIError:
    """Return the error of a field with another value than what is expected."""
    return APIError(400, f"{name}: expected {expected}, got {_format(value)}", param=name)


def unsupported(name: str, expected: str, value: Any) -> APIError:
    """Return the error of a field with a value that means what the server does not do."""
    error = invalid(name, expected, value)
    message = f"{error.message}; this server supports nothing else"
    return APIError(400, message, param=name, code="unsupported_parameter")


def check_field(name: str, value: Any, check: Check) -> None:
    """Raise APIError unless a value is valid."""
    is_valid, expected = check
    if not is_valid(value):
        raise invalid(name, expected, value)


def is_integer(value: Any, low: int) -> bool:
    """Return whether a JSON value is an integer of 64 bits, and at least `low`."""
    return type(value) is int and low <= value < 2**63


def integer(low: int) -> Check:
    """Return the check of an integer of at least `low`."""
    return lambda value: is_integer(value, low), f"an integer of at least {low}"


def integer_within(low: int, high: int) -> Check:
    """Return the check of an integer from `low` to `high`."""
    return (
        lambda value: is_integer(value, low) and value <= high,
        f"an integer from {low} to {high}",
    )


def number_within(low: float, high: float) -> Check:
    """Return the check of a number from `low` to `high`; NaN is in no range."""
    return lambda x: is_number(x) and low <= x <= high, f"a number from {low:g} to {high:g}"


def listed(is_valid: Callable[[Any], bool], most: int, expected: str) -> Check:
    """Return the check of a list of at most `most` values."""
    return (
        lambda x: isinstance(x, list) and len(x) <= most and all(map(is_valid, x)),
        f"a list of at most {most} {expected}",
    )


def instance(kind: type, expected: str) -> Check:
    """Return the check of a Python type."""
    return lambda value: isinstance(value, kind), expected


def is_stop(value: Any) -> bool:
    """Return whether a JSON value is a stop of up to 1,024 characters, or a list of MAX_STOPS."""
    stops = [value] if isinstance(value, str) else value
    return (
        isinstance(stops, list)
        and len(stops) <= MAX_STOPS
        and all(isinstance(stop, str) and 0 < len(stop) <= 1024 for stop in stops)
    )


def are_tokens(value: Any) -> bool:
    """Return whether a JSON value is a list of integers of 64 bits, at least 0; of millions, too.

    No loop: others wait meanwhile.
    """
    return isinstance(value, list) and (
        not value
        or (set(map(type, value)) == {int} and is_integer(min(value), 0) and max(value) < 2**63)
    )


def are_end_tokens(value: Any) -> bool:
    """Return whether a JSON value is a token or -1, or a list of them."""
    tokens = value if isinstance(value, list) else [value]
    return len(tokens) <= 128 and all(is_integer(token, -1) for token in tokens)
