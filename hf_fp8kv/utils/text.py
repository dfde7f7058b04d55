"""Format values on one line for messages."""

from collections.abc import Iterable
from itertools import islice


def format_list(values: Iterable[object], limit: int = 8) -> str:
    """Return the first `limit` values, separated by commas, and "..." if there are more."""
    texts = [str(value) for value in islice(values, limit + 1)]
    return ", ".join(texts[:limit]) + (", ..." if len(texts) > limit else "")


def format_value(value: object, limit: int = 120) -> str:
    """Return the repr of a value, at most `limit` characters of it."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
