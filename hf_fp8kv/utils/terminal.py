"""Tables and sizes as a person reads them on a terminal."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["readable_size", "rows_table"]


def readable_size(amount: float) -> str:
    """Returns a number of bytes as a person reads it."""
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.2f} {unit}"
        amount /= 1024
    return f"{amount:.2f} GiB"


def rows_table(rows: Sequence[Mapping[str, object]]) -> "RenderableType":
    """Returns a table with a column for every key that a row has."""
    from rich.table import Table
    from rich.text import Text

    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table()
    for name in names:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(row.get(name, ""))) for name in names))
    return table


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
