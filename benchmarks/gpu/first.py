"""The first eight minutes on a new GPU: `python -m benchmarks.gpu --first`.

Each step is a process with a time limit. The results are lines of JSON, which are written after
each step: its rows, and its exit code. A run with the same file skips the steps that have an exit
code. Each step also has a log, and sections of the benchmark write their own file after each row.
"""

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.tools.gpu.run import SANITIZER, make_benchmark_command, read_tail, run_python

from .record import Row
from .rival_files import find_rival_files

# Seconds of a section's process in which it imports torch and prints tables.
IMPORT_SECONDS = 20
# Maximum seconds of a step in a dry run.
DRY_SECONDS = 600
CAPTURE_TESTS = "tests/gpu/test_capture.py"
# The two tests in which NaN was seen once.
OFFLOADING_TEST = "tests/gpu/test_on_gpu.py::test_offloaded_layers_give_the_same_tokens"
GRAPHS_TEST = "tests/gpu/test_serving_on_gpu.py::test_decoding_steps_use_graphs"


@dataclass(frozen=True)
class Step:
    """One process: sections of the benchmark, tests, or kernels under a tool."""

    name: str
    seconds: int
    sections: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    num_repetitions: int = 0  # 0 runs each test once, without filled memory
    tool: str = ""  # a tool of compute-sanitizer


# The sum of the seconds is eight minutes.
STEPS = (
    Step("ceilings", 25, ("ceilings",)),
    Step("captured", 45, tests=(CAPTURE_TESTS, "-k", "replays and (medium or gqa or latent)")),
    Step("end to end", 115, ("end to end",)),
    Step("latent", 55, ("latent",)),
    Step("prompts and chunks", 50, ("extend",)),
    Step("rivals", 60, ("decode", "other kernels")),
    Step("offloading in filled memory", 40, tests=(OFFLOADING_TEST, "-k", "medium"),
         num_repetitions=50),
    Step("graphs in filled memory", 40, tests=(GRAPHS_TEST, "-k", "async"), num_repetitions=50),
    Step("racecheck", 25, tool="racecheck"),
    Step("initcheck", 25, tool="initcheck"),
)  # fmt: skip


def run_steps(
    results_file: Path, rival_folder: Path | None, *, is_dry: bool, report: Callable[[str], None]
) -> int:
    """Run all steps that have no exit code in a file of results. Return the largest exit code."""
    results_file = results_file.resolve()
    results_file.parent.mkdir(parents=True, exist_ok=True)
    old_text = results_file.read_text() if results_file.exists() else ""
    entries = [json.loads(line) for line in old_text.splitlines()]
    exit_codes = {entry["step"]: entry["exit_code"] for entry in entries if "exit_code" in entry}
    os.environ.update(find_rival_files(rival_folder) if rival_folder is not None else {})

    def write(step: str, **fields: Any) -> None:
        with results_file.open("a") as file:
            file.write(json.dumps({"step": step, **fields}) + "\n")

    for step in STEPS:
        if step.name in exit_codes:
            report(f"== {step.name}: has exit code {exit_codes[step.name]}")
            continue
        report(f"== {step.name}: up to {step.seconds} s")
        start = time.monotonic()
        exit_codes[step.name], rows = _run_step(step, results_file, is_dry)
        for row in rows:
            write(step.name, row=row)
        write(
            step.name, exit_code=exit_codes[step.name], seconds=round(time.monotonic() - start, 1)
        )
    return max(exit_codes.values())


def _run_step(step: Step, results_file: Path, is_dry: bool) -> tuple[int, list[Row]]:
    if step.tool and not shutil.which(SANITIZER):
        return 0, [{"name": SANITIZER, "note": "not installed"}]
    step_path = results_file.with_name(f"{results_file.stem}-{step.name.replace(' ', '-')}")
    log = step_path.with_suffix(".log")
    rows_file = step_path.with_suffix(".json")
    rows_file.unlink(missing_ok=True)
    limit = DRY_SECONDS if is_dry else step.seconds
    if step.sections:
        arguments = ["--short", "--json", str(rows_file), "--sections", *step.sections]
        arguments += ["--seconds", str(limit - IMPORT_SECONDS)]
        dry_option = ["--dry"] if is_dry else []
        exit_code = run_python([*make_benchmark_command(), *arguments, *dry_option], log, limit)
        return exit_code, _read_sections(rows_file)
    if step.tests:
        os.environ["HF_FP8KV_RESULTS"] = str(rows_file)
        num_repetitions = min(step.num_repetitions, 1) if is_dry else step.num_repetitions
        os.environ["HF_FP8KV_REPEAT"] = str(num_repetitions)
        options = (
            "-q", "-p", "no:cacheprovider", "-p", "tests.tools.gpu.repeated", "-m", "",
            "-W", "ignore", "--tb=short",
        )  # fmt: skip
        exit_code = run_python(["-m", "pytest", *options, *step.tests], log, limit)
        return exit_code, _count_outcomes(rows_file)
    tool = [SANITIZER, "--tool", step.tool, "--error-exitcode", "1"]
    exit_code = run_python(["-W", "ignore", "-m", "tests.tools.gpu.smoke", "six"], log, limit, tool)
    return exit_code, [{"name": step.tool, "summary": read_tail(log, 3).splitlines()}]


def _read_sections(file: Path) -> list[Row]:
    """Return the rows of a result of the benchmark, and a row for each skipped row."""
    if not file.exists():
        return []
    result = json.loads(file.read_text())
    skipped_rows = [
        {"section": section["name"], "name": message.partition(":")[0],
         "note": message.partition(":")[2].strip()}
        for section in result["sections"] for message in section["skipped"]
    ]  # fmt: skip
    return result["rows"] + skipped_rows


def _count_outcomes(file: Path) -> list[Row]:
    """Return a row for each test function, with the numbers of its outcomes."""
    lines = file.read_text().splitlines() if file.exists() else []
    outcomes: dict[str, list[Row]] = {}
    for row in map(json.loads, lines):
        outcomes.setdefault(row["name"].partition("[")[0], []).append(row)
    counted_rows: list[Row] = []
    for name, rows in outcomes.items():
        counts = Counter(row["outcome"] for row in rows)
        messages = sorted({row["message"] for row in rows if row["outcome"] == "failed"})
        counted_rows.append({"name": name, **counts, "messages": messages})
    return counted_rows
