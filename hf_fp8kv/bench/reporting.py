"""Compute statistics and build tables for the benchmarks."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch.utils._pytree import tree_leaves

from ..cache.cache import FP8PagedCache

if TYPE_CHECKING:
    from rich.table import Table


def compute_quartiles(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Return the median, and the first and third quartiles, which are None for a single value."""
    if len(values) == 1:
        return values[0], None, None
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return statistics.median(values), low, high


def make_row(
    measure: str,
    cache: str,
    values: Sequence[float],
    unit: str,
    *,
    context: int | None = None,
    baseline: str | None = None,
) -> dict[str, Any]:
    """Return a row of a result, with the median of the values and their quartiles.

    Args:
        measure: Name of the measured quantity.
        cache: Name of the measured cache.
        values: A value of each turn, or a single value.
        unit: Unit of the values.
        context: Number of tokens in the cache.
        baseline: Name of the cache that ratios are relative to.
    """
    median, low, high = compute_quartiles(values)
    return {
        "measure": measure,
        "cache": cache,
        "context": context,
        "against": baseline,
        "value": median,
        "unit": unit,
        "low": low,
        "high": high,
    }


def format_number(value: float | None) -> str:
    """Return three significant digits, or an integer if 100 <= |value| < 1e6, or "-" for None."""
    if value is None:
        return "-"
    return f"{value:.0f}" if 100 <= abs(value) < 1e6 else f"{value:.3g}"


def build_table(
    columns: Mapping[str, Literal["left", "right"]],
    rows: Iterable[Sequence[str]],
    *,
    grouped: bool = False,
    **options: Any,
) -> "Table":
    """Return a table for a terminal.

    Args:
        columns: Alignment of each column by its heading. Left-aligned text wraps if needed.
        rows: Cells of each row, without markup.
        grouped: Whether rows with the same first cell form a section, which shows the cell once.
        options: Title, caption and other arguments of `rich.table.Table`.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(**options)
    for name, alignment in columns.items():
        is_number = alignment == "right"
        overflow: Literal["ellipsis", "fold"] = "ellipsis" if is_number else "fold"
        table.add_column(name, justify=alignment, no_wrap=is_number, overflow=overflow)
    previous_cell: str | None = None
    for first_cell, *cells in rows:
        is_repeated = grouped and first_cell == previous_cell
        if grouped and not is_repeated and previous_cell is not None:
            table.add_section()
        table.add_row(*map(Text, ("" if is_repeated else first_cell, *cells)))
        previous_cell = first_cell
    return table


def build_rows_table(rows: Iterable[Mapping[str, Any]], **options: Any) -> "Table":
    """Return a terminal table of rows from `make_row`."""
    columns: dict[str, Literal["left", "right"]] = {
        "measure": "left",
        "cache": "left",
        "tokens": "right",
        "median": "right",
        "quartiles": "right",
        "baseline": "left",
    }
    cells = (
        (
            row["measure"],
            row["cache"],
            str(row["context"] or ""),
            f"{format_number(row['value'])} {row['unit']}",
            ""
            if row["low"] is None
            else f"{format_number(row['low'])} - {format_number(row['high'])}",
            row["against"] or "",
        )
        for row in rows
    )
    return build_table(columns, cells, grouped=True, **options)


def count_bytes(cache: Any) -> int:
    """Return the number of bytes in a cache of this package or of transformers."""
    if isinstance(cache, FP8PagedCache):
        return cache.memory_footprint().total_bytes
    return sum(getattr(x, "nbytes", 0) for x in {*tree_leaves([*map(vars, cache.layers)])})
