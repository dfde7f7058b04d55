"""Run tests under environment variables that change how a CPU rounds.

    python -m tests.tools.cpu_matrix                    the tests marked text, nine settings
    python -m tests.tools.cpu_matrix --all --only 3     all tests under the third setting
    python -m tests.tools.cpu_matrix -- -k quickstart   further arguments go to pytest

Libraries select kernels by the CPU's instruction sets. Two of the variables hide instruction sets
and one sets the number of threads, so sums run in a different order, as on another machine. The
nine settings contain every pair of choices.
"""

import argparse
import itertools
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
UNSET = "unset"
# Threads alternate along both other axes, so nine settings contain all pairs of choices.
CHOICES = {
    "ONEDNN_MAX_CPU_ISA": (UNSET, "AVX512_CORE", "AVX2"),
    "ATEN_CPU_CAPABILITY": (UNSET, "avx2", "default"),
    "OMP_NUM_THREADS": ("1", "2"),
}


def list_settings() -> list[dict[str, str]]:
    """Return one setting for each pair of instruction sets."""
    onednn_isas, aten_isas, thread_counts = CHOICES.values()
    isa_pairs = itertools.product(onednn_isas, aten_isas)
    rows = [(*pair, threads) for pair, threads in zip(isa_pairs, itertools.cycle(thread_counts))]
    return [dict(zip(CHOICES, row, strict=True)) for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="run all tests, not only `-m text`")
    parser.add_argument("--only", nargs="+", type=int, help="numbers of the settings to run")
    parser.add_argument("pytest", nargs="*", metavar="-- PYTEST_ARGUMENT", help="passed to pytest")
    options = parser.parse_args()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    if not options.all:
        command += ["-m", "text"]
    other_variables = {name: value for name, value in os.environ.items() if name not in CHOICES}
    exit_codes = []
    for number, setting in enumerate(list_settings(), 1):
        if options.only is None or number in options.only:
            print(f"== {number}: {setting}", flush=True)
            variables = {name: value for name, value in setting.items() if value != UNSET}
            # torch would reuse code that was compiled under other settings.
            cache = str(ROOT / "build" / "cpu_matrix" / "-".join(setting.values()))
            environment = {**other_variables, **variables, "TORCHINDUCTOR_CACHE_DIR": cache}
            process = subprocess.run([*command, *options.pytest], cwd=ROOT, env=environment)
            exit_codes.append(process.returncode)
    return sum(code != 0 for code in exit_codes)


if __name__ == "__main__":
    sys.exit(main())
