"""What was measured, as tables that fit a terminal."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["format_table"]

Row = dict[str, Any]


def format_table(result: dict[str, Any]) -> "RenderableType":
    """Returns what `run_gpu_suite` found: a table for each section, and the targets last."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for name, cell in _CELLS.items():
        rows = [row for row in result["rows"] if row["section"] == name]
        if rows:
            parts.append(_pivot(name, rows, cell))
    if tried := [row for row in result["rows"] if "parameters" in row]:
        parts.append(_experiments(tried))
    parts += [_failures(result), _targets(result)]
    top = result["ceilings"]
    text = (
        f"{result['hardware'].get('gpu', result['settings']['device'])}: reads "
        f"{_number(top['read_gb_per_s'])} GB/s, copies {_number(top['copy_gb_per_s'])} GB/s (read "
        f"and written), bf16 matmul {_number(top['matmul_tflops'])} TFLOP/s; all measured in this "
        f"run, {result['date']}"
    )
    if result["settings"]["dry"]:
        text = "DRY RUN: tiny shapes, nothing here is a measurement. " + text
    return Group(*parts, Text(text))


def _attention(row: Row) -> str:
    """Microseconds, and the share of the read bandwidth."""
    share = f" {100 * row['of_read']:.0f}%" if "of_read" in row else ""
    return _number(row["us"]) + share


def _rate(row: Row) -> str:
    return f"{_number(row['us'])} {_number(row.get('tflops'))}"


def _write(row: Row) -> str:
    return (
        f"{_number(row['us'])} {_number(row.get('gb_per_s'))}"
        if row["us"] > 50
        else _number(row["us"])
    )


def _end(row: Row) -> str:
    peak = row["peak_bytes"] / 2**30 if row.get("peak_bytes") else None
    return f"{_number(row['tokens_per_s'])} {row['cache_bytes'] / 2**30:.2f} {_number(peak)}"


def _served(row: Row) -> str:
    peak = row["peak_bytes"] / 2**30 if row.get("peak_bytes") else None
    return f"{_number(row['tokens_per_s'])} {_number(peak)} {row['planned_tokens'] // 1000}k"


def _ceiling(row: Row) -> str:
    return f"{_number(row.get('gb_per_s', row.get('tflops')))}"


# section -> what a cell shows
_CELLS: dict[str, Callable[[Row], str]] = {
    "write": _write, "decode": _attention, "others": _attention, "extend": _rate,
    "serving": _served, "end to end": _end,
}  # fmt: skip
_TITLES = {
    "write": "write, one layer: us (and GB/s)",
    "decode": "decode, one layer: us, and the share of the read bandwidth that K and V are read at",
    "others": "decode, other heads and attention: the same",
    "extend": "new tokens over stored ones, one layer: us, TFLOP/s",
    "serving": "continuous batching: tokens/s, GiB at the peak, tokens that would fit into 40 GiB",
    "end to end": "generate(): tokens/s, GiB of cache, GiB at the peak",
}


def _pivot(section: str, rows: list[Row], cell: Callable[[Row], str]) -> "RenderableType":
    """A row for each case, a column for each contender."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    names = list(dict.fromkeys(row["name"] for row in rows))
    cells = {(row["case"], row["name"]): row for row in rows}
    table = Table(
        title="\n" + _TITLES[section],
        title_justify="left",
        pad_edge=False,
        box=SIMPLE_HEAD,
        show_edge=False,
    )
    table.add_column("")
    for name in names:
        table.add_column(name.replace(" ", "\n", 1), justify="right", no_wrap=True)
    size: dict[str, tuple[int, int]] = {}
    for row in rows:
        own = row.get("batch", 0), row.get("read", 0)
        size[row["case"]] = max(own, size.get(row["case"], own))
    for case in sorted(size, key=size.__getitem__):
        found = [cells.get((case, name)) for name in names]
        table.add_row(
            case, *("" if r is None else "failed" if "failed" in r else cell(r) for r in found)
        )
    return table


def _experiments(rows: list[Row]) -> "RenderableType":
    """What the table of launch parameters gives, and the best that was found."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        title="\nlaunch parameters of decode: us", title_justify="left", pad_edge=False,
        box=SIMPLE_HEAD, show_edge=False,
    )  # fmt: skip
    for name in ("", "stored as", "as it is", "best", "with", "attempts"):
        table.add_column(name)
    for key in dict.fromkeys((row["case"], row["kind"]) for row in rows):
        found = [row for row in rows if (row["case"], row["kind"]) == key and "failed" not in row]
        if found:
            usual = [row for row in found if not row["parameters"]]
            best = min(found, key=lambda row: float(row["us"]))
            table.add_row(
                *key, _attention(usual[0]) if usual else "-", _attention(best),
                best["name"].split(": ")[1], str(len(found)),
            )  # fmt: skip
    return table


def _failures(result: dict[str, Any]) -> "RenderableType":
    from rich.text import Text

    lines = [
        f"failed: {row['section']}, {row['case']}, {row['name']}: {row['failed']}"
        for row in result["rows"] if "failed" in row
    ]  # fmt: skip
    for section in result["sections"]:
        if section["error"]:
            lines.append(f"section {section['name']} ended early: {section['error'][-500:]}")
        if section["skipped"]:
            several = section["skipped"]
            more = f" and {len(several) - 3} more" if len(several) > 3 else ""
            lines.append(f"not measured: {'; '.join(several[:3])}{more}")
    # A broken kernel fails in every case in the same way.
    shown = lines if len(lines) <= 20 else [*lines[:20], f"... {len(lines) - 20} more in the JSON"]
    return Text("\n".join(shown))


def _targets(result: dict[str, Any]) -> "RenderableType":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        title="\ntargets, worst case of each", title_justify="left", pad_edge=False, box=SIMPLE_HEAD
    )
    for name in ("", "target", "worst", "best", "cases", "met"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for row in result["targets"]:
        met = "not measured" if row["met"] is None else "yes" if row["met"] else "NO"
        best, cases = row.get("best"), str(row.get("cases", 0))
        table.add_row(row["what"], row["target"], _number(row["value"]), _number(best), cases, met)
    return table


def _number(value: float | None) -> str:
    """Three digits, and no exponent."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
