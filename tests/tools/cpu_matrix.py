"""Run tests under environment variables that change how a CPU rounds.

    python -m tests.tools.cpu_matrix                    the tests marked text, nine settings
    python -m tests.tools.cpu_matrix --all --only 3     all tests under the third setting
    python -m tests.tools.cpu_matrix -- -k quickstart   further arguments go to pytest

Libraries select kernels by the CPU's instruction sets. These variables hide some instruction sets,
so sums run in a different order, as on a different machine. The nine settings contain every pair of
choices.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "build" / "cpu_matrix"
UNSET = "unset"
# Threads alternate along both other axes, so nine settings contain all pairs of choices.
CHOICES = {
    "ONEDNN_MAX_CPU_ISA": (UNSET, "AVX512_CORE", "AVX2"),
    "ATEN_CPU_CAPABILITY": (UNSET, "avx2", "default"),
    "threads": ("1", "2"),
}
Setting = dict[str, str]


def list_settings() -> list[Setting]:
    """Return one setting for each pair of instruction sets."""
    isa_pairs = itertools.product(*list(CHOICES.values())[:2])
    rows = [(*pair, CHOICES["threads"][i % 2]) for i, pair in enumerate(isa_pairs)]
    return [dict(zip(CHOICES, row, strict=True)) for row in rows]


def make_environment(setting: Setting, log_folder: Path) -> dict[str, str]:
    """Return this process's environment, in which the setting replaces the variables of `CHOICES`.

    Each setting has a separate cache, because torch would reuse code compiled for a different one.
    """
    other_variables = {name: value for name, value in os.environ.items() if name not in CHOICES}
    variables = {name: value for name, value in setting.items() if value != UNSET}
    cache = log_folder / "inductor" / "-".join(setting.values())
    return {
        **other_variables, "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "OMP_NUM_THREADS": variables.pop("threads"), **variables,
    }  # fmt: skip


def run_pytest(setting: Setting, arguments: list[str], log: Path) -> tuple[bool, str]:
    """Run pytest under a setting. Return whether all tests pass, and the line of the summary."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    with log.open("w") as file:
        exit_code = subprocess.run(
            command, cwd=ROOT, env=make_environment(setting, log.parent), stdout=file,
            stderr=subprocess.STDOUT, check=False,
        ).returncode  # fmt: skip
    lines = log.read_text().splitlines()
    for line in lines:
        if re.match("(FAILED|ERROR) ", line):
            print("   ", line, flush=True)
    summaries = (line for line in reversed(lines) if re.search(r"\d+ (passed|failed|error)", line))
    return exit_code == 0, next(summaries, f"exit code {exit_code}").strip("= ")


def main() -> int:
    """Run the settings in order. Return the number of settings under which a test failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="run all tests, not only `-m text`")
    parser.add_argument("--only", nargs="+", type=int, help="numbers of the settings to run")
    parser.add_argument("pytest", nargs="*", metavar="-- PYTEST_ARGUMENT", help="passed to pytest")
    options = parser.parse_args()
    LOGS.mkdir(parents=True, exist_ok=True)
    arguments = [*([] if options.all else ["-m", "text"]), *options.pytest]
    num_failed = 0
    for number, setting in enumerate(list_settings(), 1):
        if options.only is not None and number not in options.only:
            continue
        start = time.monotonic()
        has_passed, summary = run_pytest(setting, arguments, LOGS / f"{number:02}.txt")
        num_failed += not has_passed
        name = ", ".join(f"{key}={value}" for key, value in setting.items())
        print(f"{number}: {name}: {summary} ({time.monotonic() - start:.0f} s)", flush=True)
    return num_failed


if __name__ == "__main__":
    sys.exit(main())
