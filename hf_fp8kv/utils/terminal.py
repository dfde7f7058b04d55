"""Terminal output: tables and sizes in bytes."""

from collections.abc import Mapping, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text


def format_size(size: float) -> str:
    """Return a number of bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def make_table(rows: Sequence[Mapping[str, object]]) -> RenderableType:
    """Return a table with a column for every key that occurs in a row."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table()
    for name in names:
        table.add_column(name, overflow="fold")
    for row in rows:
        cells = (row.get(name, "") for name in names)
        table.add_row(*(Text(f"{x:.4g}" if isinstance(x, float) else str(x)) for x in cells))
    return table
