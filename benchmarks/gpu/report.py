"""Format a result: a table for each section, and the problems."""

from collections import Counter
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hf_fp8kv.utils.terminal import build_table, format_number

from .record import Row

# Maximum number of contenders (columns) in a table.
MAX_COLUMNS = 7
# Maximum number of failures that are listed. A broken kernel fails in the same way in every case.
MAX_FAILURES = 20
# Fields in each cell of a section's table.
TABLE_FIELDS = {
    "write": ("us", "gb_per_s"),
    "decode": ("us", "of_read"),
    "layer": ("us", "launches"),
    "latent": ("us", "of_read"),
    "other kernels": ("us", "of_read"),
    "extend": ("us", "tflops"),
    "end to end": (
        "tokens_per_s", "low_per_s", "high_per_s", "late_per_s", "first_ms", "full_speed_s",
        "cache_bytes", "peak_bytes",
    ),
    "offloaded": ("tokens_per_s", "cache_bytes", "beside_bytes"),
}  # fmt: skip
FIELD_LABELS = {
    "gb_per_s": "GB/s", "of_read": "share of the read bandwidth", "tflops": "TFLOP/s",
    "tokens_per_s": "tokens/s", "low_per_s": "lower quartile", "high_per_s": "upper quartile",
    "late_per_s": "tokens/s with a late stop check", "first_ms": "ms to the first token",
    "full_speed_s": "s to full speed", "peak_bytes": "peak GiB", "cache_bytes": "cache GiB",
    "beside_bytes": "peak GiB of the device without weights",
}  # fmt: skip


def format_tables(result: dict[str, Any]) -> RenderableType:
    """Return the tables of a result, the problems, and a line about the device."""
    tables: list[RenderableType] = []
    for name, fields in TABLE_FIELDS.items():
        title = f"{name}: {', '.join(FIELD_LABELS.get(field, field) for field in fields)}"
        rows = [row for row in result["rows"] if row["section"] == name]
        tables += _make_tables(title, fields, rows)
    rates = {name: format_number(rate) for name, rate in result["ceilings"].items()}
    device_line = (
        f"{result['hardware'].get('gpu', result['settings']['device'])}: reads "
        f"{rates['read_gb_per_s']} GB/s, copies {rates['copy_gb_per_s']} GB/s (read and written), "
        f"bf16 matmul {rates['matmul_tflops']} TFLOP/s, all measured in this run, {result['date']}"
    )
    if result["settings"]["dry"]:
        device_line = f"DRY RUN: tiny shapes, nothing here is a measurement. {device_line}"
    return Group(*tables, _format_problems(result), Text(device_line))


def _format_cell(row: Row | None, fields: tuple[str, ...]) -> str:
    """Return the `fields` of a row in the units of `FIELD_LABELS`, separated by spaces."""
    if row is None or "failed" in row:
        return "" if row is None else "failed"
    return " ".join(_format_value(field, row.get(field)) for field in fields)


def _format_value(field: str, value: float | None) -> str:
    if value is not None and field.startswith("of_"):
        return f"{value:.0%}"
    if value is not None and field.endswith("_bytes"):
        return f"{value / 2**30:.2f}"
    return format_number(value)


def _make_tables(title: str, fields: tuple[str, ...], rows: list[Row]) -> list[Table]:
    """Return tables with a row for each case, and a column for each of `MAX_COLUMNS` contenders."""
    all_names = list(dict.fromkeys(row["name"] for row in rows))
    rows_by_key = {(row["case"], row["name"]): row for row in rows}
    tables = []
    for start in range(0, len(all_names), MAX_COLUMNS):
        names = all_names[start : start + MAX_COLUMNS]
        table_rows = []
        for case in dict.fromkeys(row["case"] for row in rows if row["name"] in names):
            cells = [_format_cell(rows_by_key.get((case, name)), fields) for name in names]
            table_rows.append([case, *cells])
        tables.append(build_table(
            {"": "left", **{name.replace(" ", "\n"): "right" for name in names}}, table_rows,
            title=f"\n{title} (more)" if start else f"\n{title}", title_justify="left",
            pad_edge=False, box=SIMPLE_HEAD, show_edge=False,
        ))  # fmt: skip
    return tables


def _format_problems(result: dict[str, Any]) -> Text:
    """Return lines on failed rows, rows with a note, and skipped or incomplete sections."""
    lines = [
        f"failed: {row['section']}, {row['case']}, {row['name']}: {row['failed']}"
        for row in result["rows"]
        if "failed" in row
    ]
    if len(lines) > MAX_FAILURES:
        lines[MAX_FAILURES:] = [f"... {len(lines) - MAX_FAILURES} more in the JSON"]
    # A set lists the same note of several cases once.
    lines += sorted({
        f"note: {row['section']}, {row['name']}: {row['note']}"
        for row in result["rows"] if "note" in row
    })  # fmt: skip
    for section in result["sections"]:
        if section["error"]:
            lines.append(f"section {section['name']} ended early: {section['error'][-500:]}")
        elif section["seconds"] is None:
            lines.append(f"section {section['name']} is missing or incomplete: the run ended")
        # List each reason once, with its first case.
        messages = section["skipped"]
        reason_counts = Counter(message.rpartition(": ")[2] for message in messages)
        for reason, count in reason_counts.items():
            first_message = next(message for message in messages if message.endswith(reason))
            suffix = f" (and {count - 1} more in the JSON)" if count > 1 else ""
            lines.append(f"not measured: {first_message}{suffix}")
    return Text("\n".join(lines))
