"""Format values on one line for messages."""

import difflib
from collections.abc import Iterable
from itertools import islice


def format_list(values: Iterable[object], max_values: int = 8) -> str:
    """Return the first `max_values` values, separated by commas, and "..." if there are more."""
    texts = [str(value) for value in islice(values, max_values + 1)]
    return ", ".join(texts[:max_values]) + (", ..." if len(texts) > max_values else "")


def format_value(value: object, max_length: int = 120) -> str:
    """Return the repr of a value. More than `max_length` characters are replaced by "..."."""
    text = repr(value)
    return text if len(text) <= max_length else f"{text[:max_length]}..."


def suggest(name: str, names: Iterable[str]) -> str:
    """Return a sentence with the most similar of `names`, or ""."""
    matches = difflib.get_close_matches(name, list(names), 1)
    return f" Did you mean {matches[0]!r}?" if matches else ""
