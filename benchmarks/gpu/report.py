"""Format a result: a table for each section, the failures, and the goals."""

from collections import Counter
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hf_fp8kv.bench.reporting import build_table
from hf_fp8kv.bench.reporting import format_number as number

from .goals import Row

# Maximum number of contenders next to each other.
MAX_COLUMNS = 7
# Number of failures that are listed. A broken kernel fails in every case in the same way.
MAX_FAILURES = 20
# Section: the fields in a cell of its table.
TABLES = {
    "write": ("us", "gb_per_s"),
    "decode": ("us", "of_read"),
    "layer": ("us", "launches"),
    "latent": ("us", "of_read"),
    "others": ("us", "of_read"),
    "other kernels": ("us", "of_read"),
    "extend": ("us", "tflops"),
    "serving": ("tokens_per_s", "peak_bytes", "planned_tokens"),
    "end to end": ("tokens_per_s", "first_ms", "cache_bytes", "peak_bytes"),
    "offloaded": ("tokens_per_s", "cache_bytes", "beside_bytes"),
}
LABELS = {
    "gb_per_s": "GB/s", "of_read": "share of the read bandwidth", "tflops": "TFLOP/s",
    "tokens_per_s": "tokens/s", "first_ms": "ms to the first token",
    "peak_bytes": "GiB at the peak", "cache_bytes": "GiB of cache",
    "planned_tokens": "tokens that fit into 40 GiB",
    "beside_bytes": "GiB of the device at the peak without the weights",
}  # fmt: skip


def format_tables(result: dict[str, Any]) -> RenderableType:
    """Return the tables of a result, the failures, the goals, and a line on the device."""
    parts: list[RenderableType] = []
    for name, fields in TABLES.items():
        title = f"{name}: {', '.join(LABELS.get(field, field) for field in fields)}"
        parts += _pivot(title, fields, [row for row in result["rows"] if row["section"] == name])
    if tried := [row for row in result["rows"] if "parameters" in row]:
        parts.append(_experiments(tried))
    top = result["ceilings"]
    text = (
        f"{result['hardware'].get('gpu', result['settings']['device'])}: reads "
        f"{number(top['read_gb_per_s'])} GB/s, copies {number(top['copy_gb_per_s'])} GB/s (read "
        f"and written), bf16 matmul {number(top['matmul_tflops'])} TFLOP/s, all measured in this "
        f"run, {result['date']}"
    )
    if result["settings"]["dry"]:
        text = "DRY RUN: tiny shapes, nothing here is a measurement. " + text
    return Group(*parts, Text("\n".join(_failures(result))), *_goals(result), Text(text))


def _cell(row: Row | None, fields: tuple[str, ...]) -> str:
    if row is None or "failed" in row:
        return "" if row is None else "failed"
    texts = []
    for field in fields:
        value = row.get(field)
        if value is not None and field.startswith("of_"):
            texts.append(f"{100 * value:.0f}%")
        elif value is not None and field.endswith("_bytes"):
            texts.append(f"{value / 2**30:.2f}")
        elif value is not None and field == "planned_tokens":
            texts.append(f"{value // 1000}k")
        else:
            texts.append(number(value))
    return " ".join(texts)


def _pivot(title: str, fields: tuple[str, ...], rows: list[Row]) -> list[Table]:
    """Return tables with a row for each case, and a column for each of `MAX_COLUMNS` contenders."""
    names = list(dict.fromkeys(row["name"] for row in rows))
    cells = {(row["case"], row["name"]): row for row in rows}
    tables = []
    for first in range(0, len(names), MAX_COLUMNS):
        group = names[first : first + MAX_COLUMNS]
        body = [
            [case, *(_cell(cells.get((case, name)), fields) for name in group)]
            for case in dict.fromkeys(row["case"] for row in rows)
            if any((case, name) in cells for name in group)
        ]
        heads = [name.replace(" ", "\n") for name in group]
        tables.append(_table(f"{title} (more)" if first else title, ["", *heads], body))
    return tables


def _experiments(rows: list[Row]) -> Table:
    """Return the default and the best launch parameters for each case and format."""
    body = []
    for key in dict.fromkeys((row["case"], row["kind"]) for row in rows):
        good = [row for row in rows if (row["case"], row["kind"]) == key and "failed" not in row]
        if good:
            default = next((row for row in good if not row["parameters"]), None)
            best = min(good, key=lambda row: float(row["us"]))
            times = (_cell(row, ("us", "of_read")) for row in (default, best))
            body.append([*key, *times, best["name"].split(": ")[1], str(len(good))])
    columns = ["", "stored as", "default", "best", "with", "attempts"]
    return _table("launch parameters of decode: us, share of the read bandwidth", columns, body)


def _table(title: str, columns: list[str], body: list[list[str]]) -> Table:
    sides = {name: "left" if place == 0 else "right" for place, name in enumerate(columns)}
    return build_table(
        sides, body, title=f"\n{title}", title_justify="left", pad_edge=False, box=SIMPLE_HEAD,
        show_edge=False,
    )  # fmt: skip


def _failures(result: dict[str, Any]) -> list[str]:
    lines = [
        f"failed: {row['section']}, {row['case']}, {row['name']}: {row['failed']}"
        for row in result["rows"]
        if "failed" in row
    ]
    if len(lines) > MAX_FAILURES:
        lines[MAX_FAILURES:] = [f"... {len(lines) - MAX_FAILURES} more in the JSON"]
    notes = {
        (row["section"], row["name"], row["note"]): None for row in result["rows"] if "note" in row
    }
    lines += [f"note: {section}, {name}: {note}" for section, name, note in notes]
    for section in result["sections"]:
        if section["error"]:
            lines.append(f"section {section['name']} ended early: {section['error'][-500:]}")
        elif section["seconds"] is None:
            lines.append(f"not measured, or only in part: {section['name']}: the run ended")
        # One line for each reason.
        reasons = Counter(text.rpartition(": ")[2] for text in section["skipped"])
        for reason, count in reasons.items():
            first = next(text for text in section["skipped"] if text.endswith(reason))
            suffix = f" (and {count - 1} more in the JSON)" if count > 1 else ""
            lines.append(f"not measured: {first}{suffix}")
    return lines


def _where(goal: dict[str, Any]) -> str:
    share = goal.get("of_datasheet")  # results of older versions have none
    return goal["where"] + (f" ({100 * share:.0f}% of the datasheet's)" if share else "")


def _goals(result: dict[str, Any]) -> tuple[Table, Text]:
    body = [
        [
            goal["what"], f"{goal['sign']} {goal['bound']:g}", number(goal["worst"]),
            _where(goal), number(goal["best"]), str(goal["cases"]), goal["state"],
        ]
        for goal in result["goals"]
    ]  # fmt: skip
    columns = ["", "goal", "worst", "in", "best", "cases", "state"]
    reasons: dict[str, list[str]] = {}
    for goal in result["goals"]:
        if goal["why"]:
            reasons.setdefault(f"{goal['state']}, {goal['why']}", []).append(goal["what"])
    lines = [f"{reason}: {', '.join(names)}" for reason, names in reasons.items()]
    return _table("goals: the worst case counts", columns, body), Text("\n".join(lines))
