"""Statistics, numbers and tables that the suites share."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ..cache.cache import FP8PagedCache
from ..utils.tensors import collect_tensors

if TYPE_CHECKING:
    from rich.table import Table


def quartiles(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Return the median and the first and third quartile; of one value, no quartiles."""
    if len(values) == 1:
        return values[0], None, None
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return statistics.median(values), low, high


def format_number(value: float | None) -> str:
    """Return three digits without an exponent, or "-" for None."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def format_target(target: float | None) -> str:
    """Return what a number must not pass, "" for None."""
    return "" if target is None else f"≤ {target:g}"


def build_table(
    columns: Mapping[str, Literal["left", "right"]],
    rows: Iterable[Sequence[str]],
    *,
    grouped: bool = False,
    **options: Any,
) -> "Table":
    """Return a table for a terminal.

    Args:
        columns: their heads and on which side the cells stand.
        rows: the cells.
        grouped: rows with the same first cell are one section, which shows that cell once.
        options: title, caption and so on, as `rich.table.Table` takes them.
    """
    from rich.table import Table

    table = Table(**options)
    for name, side in columns.items():
        table.add_column(name, justify=side, no_wrap=side == "right")
    previous: str | None = None
    for first, *cells in rows:
        repeated = grouped and first == previous
        if grouped and not repeated and previous is not None:
            table.add_section()
        table.add_row("" if repeated else first, *cells)
        previous = first
    return table


def count_bytes(cache: Any) -> int:
    """Return the bytes that a cache of this package or of transformers holds."""
    if isinstance(cache, FP8PagedCache):
        return cache.memory_footprint()["total"]
    tensors = {id(t): t for layer in cache.layers for t in collect_tensors(vars(layer))}
    return sum(t.numel() * t.element_size() for t in tensors.values())
