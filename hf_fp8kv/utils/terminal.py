"""Formatting of tables and sizes for the terminal."""

from collections.abc import Mapping, Sequence

from rich.console import RenderableType
from rich.filesize import pick_unit_and_suffix
from rich.table import Column, Table
from rich.text import Text


def format_size(size: float) -> str:
    """Return a number of bytes with a binary unit."""
    unit, suffix = pick_unit_and_suffix(int(size), ["B", "KiB", "MiB", "GiB"], 1024)
    return f"{size / unit:.{2 * (unit > 1)}f} {suffix}"


def make_table(rows: Sequence[Mapping[str, object]]) -> RenderableType:
    """Return a table with a column for every key that occurs in a row."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*(Column(name, overflow="fold") for name in names))
    for row in rows:
        cells = (row.get(name, "") for name in names)
        table.add_row(*(Text(f"{x:.4g}" if isinstance(x, float) else str(x)) for x in cells))
    return table
