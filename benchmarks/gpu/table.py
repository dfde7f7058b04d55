"""Tables of the GPU suite for a terminal."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from hf_fp8kv.bench.reporting import build_table
from hf_fp8kv.bench.reporting import format_number as number

from .results import Row

if TYPE_CHECKING:
    from rich.console import RenderableType

# Columns of a table besides the first.
WIDEST = 7
RIGHT: Literal["right"] = "right"


def format_table(result: dict[str, Any]) -> "RenderableType":
    """Return what `run_gpu_suite` found: a table for each section, and the goals last."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for name, (cell, title) in _TABLES.items():
        if rows := [row for row in result["rows"] if row["section"] == name]:
            parts += _pivot(title, rows, cell)
    if tried := [row for row in result["rows"] if "parameters" in row]:
        parts.append(_experiments(tried))
    parts += [_failures(result), _goals(result)]
    top = result["ceilings"]
    text = (
        f"{result['hardware'].get('gpu', result['settings']['device'])}: reads "
        f"{number(top['read_gb_per_s'])} GB/s, copies {number(top['copy_gb_per_s'])} GB/s (read "
        f"and written), bf16 matmul {number(top['matmul_tflops'])} TFLOP/s; all measured in this "
        f"run, {result['date']}"
    )
    if result["settings"]["dry"]:
        text = "DRY RUN: tiny shapes, nothing here is a measurement. " + text
    return Group(*parts, Text(text))


def _attention(row: Row) -> str:
    """Return microseconds, and the share of the read bandwidth."""
    share = f" {100 * row['of_read']:.0f}%" if "of_read" in row else ""
    return number(row["us"]) + share


def _layer(row: Row) -> str:
    return f"{number(row['us'])} {number(row.get('launches'))}"


def _rate(row: Row) -> str:
    return f"{number(row['us'])} {number(row.get('tflops'))}"


def _write(row: Row) -> str:
    rate = f" {number(row.get('gb_per_s'))}" if row["us"] > 50 else ""
    return number(row["us"]) + rate


def _peak(row: Row) -> str:
    return number(row["peak_bytes"] / 2**30 if row.get("peak_bytes") else None)


def _end(row: Row) -> str:
    return f"{number(row['tokens_per_s'])} {row['cache_bytes'] / 2**30:.2f} {_peak(row)}"


def _offloaded(row: Row) -> str:
    beside = number(row["beside_bytes"] / 2**30 if row.get("beside_bytes") else None)
    return f"{number(row['tokens_per_s'])} {row['cache_bytes'] / 2**30:.2f} {beside}"


def _served(row: Row) -> str:
    return f"{number(row['tokens_per_s'])} {_peak(row)} {row['planned_tokens'] // 1000}k"


# section -> what a cell shows, and the title of the table
_TABLES: dict[str, tuple[Callable[[Row], str], str]] = {
    "write": (_write, "write, one layer: us (and GB/s)"),
    "decode": (
        _attention,
        "decode, one layer: us, and the share of the read bandwidth that K and V are read at",
    ),
    "layer": (_layer, "one layer of a decode step, write and attention: us, launches"),
    "latent": (
        _attention,
        "latents (MLA), a layer of a decode step, and attention alone (kernel): us, and the share "
        "of the read bandwidth that what is stored, and in a step the projection, is read at",
    ),
    "others": (_attention, "decode, other heads and attention: the same"),
    "other kernels": (_attention, "decode, kernels of others: the same"),
    "extend": (_rate, "new tokens over stored ones, one layer: us, TFLOP/s"),
    "serving": (
        _served,
        "continuous batching: tokens/s, GiB at the peak, tokens that would fit into 40 GiB",
    ),
    "end to end": (_end, "generate(): tokens/s, GiB of cache, GiB at the peak"),
    "offloaded": (
        _offloaded,
        "generate(), layers in host memory: tokens/s, GiB of cache in both memories, GiB of the "
        "device at the peak beside the weights",
    ),
}


def _pivot(title: str, rows: list[Row], cell: Callable[[Row], str]) -> "list[RenderableType]":
    """Return tables with a row for each case and a column for each contender, WIDEST at a time."""
    names = list(dict.fromkeys(row["name"] for row in rows))
    cells = {(row["case"], row["name"]): row for row in rows}
    size: dict[str, tuple[int, int]] = {}
    for row in rows:
        own = row.get("batch", 0), row.get("read", 0)
        size[row["case"]] = max(own, size.get(row["case"], own))

    def format_cell(row: Row | None) -> str:
        return "" if row is None else "failed" if "failed" in row else cell(row)

    tables: list[RenderableType] = []
    for first in range(0, len(names), WIDEST):
        some = names[first : first + WIDEST]
        cases = [case for case in size if any((case, name) in cells for name in some)]
        columns = dict.fromkeys([name.replace(" ", "\n") for name in some], RIGHT)
        body = [
            [case, *(format_cell(cells.get((case, name))) for name in some)]
            for case in sorted(cases, key=size.__getitem__)
        ]
        again = f"{title} (more)" if first else title
        tables.append(build_table({"": "left", **columns}, body, **_style(again)))
    return tables


def _experiments(rows: list[Row]) -> "RenderableType":
    """Return what the table of launch parameters gives, and the best that was found."""
    cells = []
    for key in dict.fromkeys((row["case"], row["kind"]) for row in rows):
        good = [row for row in rows if (row["case"], row["kind"]) == key and "failed" not in row]
        if good:
            usual = [row for row in good if not row["parameters"]]
            best = min(good, key=lambda row: float(row["us"]))
            cells.append([
                *key, _attention(usual[0]) if usual else "-", _attention(best),
                best["name"].split(": ")[1], str(len(good)),
            ])  # fmt: skip
    columns = ("", "stored as", "as it is", "best", "with", "attempts")
    style = _style("launch parameters of decode: us")
    return build_table(dict.fromkeys(columns, "left"), cells, **style)


def _style(title: str) -> dict[str, Any]:
    from rich.box import SIMPLE_HEAD

    return {
        "title": f"\n{title}",
        "title_justify": "left",
        "pad_edge": False,
        "box": SIMPLE_HEAD,
        "show_edge": False,
    }


def _failures(result: dict[str, Any]) -> "RenderableType":
    from rich.text import Text

    lines = [
        f"failed: {row['section']}, {row['case']}, {row['name']}: {row['failed']}"
        for row in result["rows"]
        if "failed" in row
    ]
    # A broken kernel fails in every case in the same way.
    lines = lines if len(lines) <= 20 else [*lines[:20], f"... {len(lines) - 20} more in the JSON"]
    notes = {
        (row["section"], row["name"], row["note"]): None for row in result["rows"] if "note" in row
    }
    lines += [f"note: {section}, {name}: {note}" for section, name, note in notes]
    for section in result["sections"]:
        if section["error"]:
            lines.append(f"section {section['name']} ended early: {section['error'][-500:]}")
        elif section["seconds"] is None:
            lines.append(f"not measured, or not all of it: {section['name']}: the run was ended")
        lines += [f"not measured: {text}" for text in _group_skipped(section["skipped"])]
    return Text("\n".join(lines))


def _group_skipped(skipped: list[str]) -> list[str]:
    """Return what was skipped, one line for each section, case and reason."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for text in skipped:
        place, _, why = text.rpartition(": ")
        case, _, name = place.rpartition(", ")
        grouped.setdefault((case, why), []).append(name)
    places = ((case, " / ".join(names), why) for (case, why), names in grouped.items())
    return [": ".join(filter(None, [", ".join(filter(None, p[:2])), p[2]])) for p in places]


def _goals(result: dict[str, Any]) -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    rows = [
        [
            row["what"], f"{row['sign']} {row['bound']:g}", number(row["worst"]), row["where"],
            number(row["best"]), str(row["cases"]), row["state"],
        ]
        for row in result["goals"]
    ]  # fmt: skip
    columns = ("goal", "worst", "in", "best", "cases", "")
    style = _style("goals: met, missed or not measured; the worst case of each counts")
    table = build_table({"": "left", **dict.fromkeys(columns, "right")}, rows, **style)
    reasons: dict[str, list[str]] = {}
    for row in filter(lambda row: row["why"], result["goals"]):
        reasons.setdefault(f"{row['state']}, {row['why']}", []).append(row["what"])
    why = [f"{reason}: {'; '.join(names)}" for reason, names in reasons.items()]
    return Group(table, Text("\n".join(why)))
