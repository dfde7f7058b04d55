"""Format sizes, numbers and tables for the terminal."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from rich.filesize import pick_unit_and_suffix

if TYPE_CHECKING:
    from rich.table import Table


def format_size(size: float) -> str:
    """Return a number of bytes with a binary unit."""
    unit, suffix = pick_unit_and_suffix(int(size), ["B", "KiB", "MiB", "GiB"], 1024)
    num_decimals = 2 if unit > 1 else 0
    return f"{size / unit:.{num_decimals}f} {suffix}"


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
        rows: Cells of each row. Markup in them is shown as it is.
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
        table.add_row(Text("" if is_repeated else first_cell), *map(Text, cells))
        previous_cell = first_cell
    return table
