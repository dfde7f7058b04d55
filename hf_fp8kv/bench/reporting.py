"""Statistics, numbers and tables that the suites share."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from ..cache.cache import FP8PagedCache
from ..calibration.divergence import Scores
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


def report_percents(
    progress: Callable[[str, float], None] | None, total: int
) -> Callable[[str, int], None]:
    """Return what reports progress once per percent of `total` tokens: a report may be a line."""
    done = 0

    def report(what: str, tokens: int) -> None:
        nonlocal done
        before, done = done, done + tokens
        percent = 100 * done // total
        if progress is not None and percent > 100 * before // total:
            progress(f"{percent} %: {what}", done / total)

    return report


def summarize_texts(by_text: Sequence[Scores]) -> dict[str, Any]:
    """Return the fields of `Quality` over all texts, with standard errors over the texts.

    `kl_error` and `top1_error` are None for a single text; `kl_by_text` and `top1_by_text` are the
    means within each.
    """
    result = asdict(Scores.concat(by_text).quality)
    for name in ("kl", "top1"):
        means: list[float] = [getattr(scores.quality, name) for scores in by_text]
        error = statistics.stdev(means) / len(means) ** 0.5 if len(means) > 1 else None
        result |= {f"{name}_error": error, f"{name}_by_text": means}
    return result


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
        return int(cache.memory_footprint()["total"])
    tensors = {id(t): t for layer in cache.layers for t in collect_tensors(vars(layer))}
    return sum(t.numel() * t.element_size() for t in tensors.values())
