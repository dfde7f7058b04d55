"""Reports of `check --kernels` as a person reads them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .check import Row

if TYPE_CHECKING:
    from rich.console import RenderableType

# What the summary shows: the kernels that read pages, for each way to store them.
SUMMARY = {
    f"{operation} {stored} D128{tokens}": (operation, stored)
    for operation, tokens in (("decode", ""), ("extend", " T1024"))
    for stored in ("e4m3 static", "e4m3", "e5m2", "e3m4", "auto")
}
_COLUMNS = ("registers", "spills", "shared", "programs", "rows", "tile", "warps", "per_kib",
            "per_tile", "in_flight")  # fmt: skip


def tables(reports: dict[str, list[Row]]) -> "list[RenderableType]":
    """Return a table per target as a person reads it."""
    from rich.table import Table
    from rich.text import Text

    columns = ("kernel", "variant", "registers", "spills", "shared", "programs", "16-byte",
               "conversions", "per KiB", "verdict")  # fmt: skip
    parts: list[RenderableType] = []
    for name, rows in reports.items():
        table = Table(title=name, title_justify="left")
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            cells = (row.kernel, row.variant, row.registers, row.spills, row.shared, row.programs,
                     row.wide_bytes // 16 if row.loop else "", row.conversions if row.loop else "",
                     row.per_kib or "", "; ".join(row.violations) or "ok")  # fmt: skip
            table.add_row(*(Text(str(cell)) for cell in cells))
        parts.append(table)
    return parts


def summarize(reports: Mapping[str, Sequence[Row]]) -> Iterator[Row]:
    """Yield the rows of the summary: of each operation and format, one of each target."""
    for variant, (operation, _) in SUMMARY.items():
        for rows in reports.values():
            for row in rows:
                if row.variant == variant and row.kernel == operation:
                    yield row


def tabulate_summary(
    reports: Mapping[str, Sequence[Row]], before: Mapping[tuple[str, str, str], Mapping[str, Any]]
) -> "Iterator[RenderableType]":
    """Yield a table per operation.

    `before`: rows of an earlier report, by target, variant and kernel. Where the two differ a cell
    holds both.
    """
    from rich.table import Table

    tables: dict[str, Table] = {}
    for row in summarize(reports):
        operation, stored = SUMMARY[row.variant]
        if operation not in tables:
            tables[operation] = Table(title=operation, title_justify="left")
            for column in ("stored", "target", *_COLUMNS, "verdict"):
                tables[operation].add_column(column.replace("_", " "))
        earlier = before.get((row.target, row.variant, row.kernel), {})
        cells = (_format_change(getattr(row, name), earlier.get(name)) for name in _COLUMNS)
        tables[operation].add_row(
            stored, row.target, *cells, "; ".join(row.violations) or "ok",
            end_section=row.target == list(reports)[-1],
        )  # fmt: skip
    yield from tables.values()


def _format_change(now: object, before: object) -> str:
    return str(now) if before in (None, now) else f"{before} > {now}"
