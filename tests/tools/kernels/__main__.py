"""Compile the kernels for GPUs, and report registers, memory, instructions and violated rules.

    make kernels KERNELS_ARGS="--target sm_90 --summary"

No GPU is needed. The exit code is 1 if a kernel does not compile or violates a rule.
"""

import argparse
import itertools
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from hf_fp8kv.utils.terminal import build_table

from .check import Row, check_targets
from .rules import MAX_SHARED_BYTES
from .variants import list_variants

# The decode and extend kernels with head size 128, for each storage format.
SUMMARY_VARIANTS = [
    template.format(formats)
    for template in ("decode {} D128", "extend {} D128 T1024")
    for formats in ("e4m3 static", "e4m3", "e5m2", "e3m4", "auto")
]
# `check.make_row` explains the columns.
COLUMNS = ("registers", "spills", "shared", "programs", "rows", "tile", "warps", "wide_bytes",
           "conversions", "per_kib", "per_tile",
           "hgmma", "hmma", "ldsm", "cycles")  # fmt: skip


def read_rows(path: str) -> dict[tuple[str, ...], Any]:
    """Return the rows of an earlier report, keyed by target, variant and kernel."""
    rows = itertools.chain(*json.loads(Path(path).read_text())["targets"].values())
    return {(row["target"], row["variant"], row["kernel"]): row for row in rows}


def make_cells(row: Row, old_rows: dict[tuple[str, ...], Any]) -> list[str]:
    """Return the cells of a row. A cell shows both values if the value in `old_rows` differs."""
    old_row = old_rows.get((row["target"], row["variant"], row["kernel"]), row)
    pairs = [(str(old_row.get(name, "")), str(row.get(name, ""))) for name in COLUMNS]
    cells = [new if old == new else f"{old} -> {new}" for old, new in pairs]
    verdict = "; ".join(row["violations"]) or "ok"
    return [row["variant"], row["kernel"], row["target"], *cells, verdict]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("tests.tools.kernels", description=__doc__.split("\n\n")[0])
    all_names = [variant.name for variant in list_variants()]
    parser.add_argument("--target", nargs="+", action="extend", choices=MAX_SHARED_BYTES,
                        help="GPUs to compile for (default: all)")  # fmt: skip
    parser.add_argument("--variant", nargs="+", action="extend", choices=all_names, metavar="NAME",
                        default=[], help="variants to compile (default: all)")  # fmt: skip
    parser.add_argument("--summary", action="store_true", help="decode and extend, head size 128")
    parser.add_argument("--before", type=read_rows, default={}, metavar="FILE",
                        help="report of a run with --json, to show changes")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print a JSON object, not a table")
    options = parser.parse_args(arguments)
    variants = SUMMARY_VARIANTS if options.summary else options.variant
    target_rows = check_targets(options.target or list(MAX_SHARED_BYTES), variants)
    rows = list(itertools.chain(*target_rows.values()))
    if options.json:
        print(json.dumps({"triton": version("triton"), "targets": target_rows}))
    else:
        rows.sort(key=lambda row: ([*all_names, ""].index(row["variant"]), row["kernel"]))
        columns = ["variant", "kernel", "target", *COLUMNS, "verdict"]
        headers = {column.replace("_", " "): "left" for column in columns}
        table = build_table(headers, [make_cells(row, options.before) for row in rows])
        Console(width=None if sys.stdout.isatty() else 250).print(table)
    return int(any(row["violations"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
