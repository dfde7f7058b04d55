"""Compute statistics of the benchmarks, and build their tables."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch.utils._pytree import tree_leaves

from ..cache.cache import FP8PagedCache
from ..utils.terminal import build_table, format_number

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
        values: One value per turn, or a single value.
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
