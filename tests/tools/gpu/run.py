"""`make gpu` runs the tests that need a GPU, and the benchmark, within nine minutes.

The parts of a run are a smoke test, compute-sanitizer, the tests of the kernels, the benchmark, and
all other GPU tests, in this order. Each part has a time limit, and the logs name the tests that did
not finish. Logs and gpu.json go to the folder `--out`. The last line of the output is a JSON
object. The exit code is the tests' exit code, or the benchmark's if the tests pass. Without a GPU
nothing runs, and the exit code is 0. In a dry run, the limit of each part is half an hour.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]
# Time limit of each part in seconds. With SHUTDOWN_SECONDS for each part and IMPORT_SECONDS for
# torch's import, the sum is at most TOTAL_SECONDS.
LIMITS = {
    "smoke": 25, "memcheck": 60, "racecheck": 55, "kernels": 70, "benchmark": 225, "table": 14,
    "gpu": 44,
}  # fmt: skip
SHUTDOWN_SECONDS = 5
IMPORT_SECONDS = 12
TOTAL_SECONDS = 540
SANITIZER = "compute-sanitizer"
GRACE_SECONDS = 15  # time that the benchmark may run past the limit that it gets
DRY_SECONDS = 1800  # limit of each part in a dry run
# Exit code of a part that exceeds its limit. The command `timeout` uses the same code.
TIMEOUT_CODE = 124
NO_TESTS_CODE = 5  # exit code of pytest if it selects no test
PYTEST_OPTIONS = [
    "-q", "-rfE", "--tb=short", "-p", "no:cacheprovider", "-p", "tests.tools.gpu.unfinished",
    # A GPU machine may have other versions of packages than the tests were written for.
    *("-W", "ignore::UserWarning", "-W", "ignore::DeprecationWarning"),
    *("-W", "ignore::FutureWarning"),
    # If a kernel hangs, the log shows the stack of its test.
    *("-o", "faulthandler_timeout=60", "--durations=5"),
]  # fmt: skip
INTERPRETED_BENCHMARK_SCRIPT = """
from tests.helpers.interpreter import repair
repair()
from benchmarks.gpu.__main__ import main
raise SystemExit(main())
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="output folder")
    parser.add_argument("--seconds", type=float, help="time limit of the benchmark")
    parser.add_argument("--dry", action="store_true", help="run tiny shapes, on any machine")
    parser.add_argument("tests", nargs="*", help="tests to run instead of the kernel tests")
    options = parser.parse_args()
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    if gpu is None and not options.dry:
        print("No GPU: torch finds none, so nothing was run.", flush=True)
        print(json.dumps({"gpu": None}), flush=True)
        return 0
    # Parts run in the repository's folder, so paths must not be relative to the current folder.
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for name in (*(f"{part}.log" for part in LIMITS), "gpu.json", "gpu.json.new"):
        (out / name).unlink(missing_ok=True)
    limits = dict.fromkeys(LIMITS, DRY_SECONDS) if options.dry else LIMITS
    if options.dry and gpu is None:
        # Kernels run in Triton's interpreter, with the repairs of the tests.
        os.environ["TRITON_INTERPRET"] = "1"

    def run_smoke(name: str, *tool: str) -> int:
        sizes = ["tiny"] if tool else []
        command = ["-W", "ignore", "-m", "tests.tools.gpu.smoke", *sizes]
        return run_part(name, command, out, limits[name], tool)

    def run_tests(name: str, *arguments: str) -> int:
        command = ["-m", "pytest", *PYTEST_OPTIONS, *arguments]
        if importlib.util.find_spec("xdist"):
            # Compiling on the CPU takes most of the time.
            command += ["-n", str(min(os.cpu_count() or 1, 14))]
        exit_code = run_part(name, command, out, limits[name])
        return 0 if exit_code == NO_TESTS_CODE else exit_code

    exit_codes = [run_smoke("smoke")]
    if shutil.which(SANITIZER):
        for check in ("memcheck", "racecheck"):
            exit_codes.append(run_smoke(check, SANITIZER, "--tool", check, "--error-exitcode", "1"))
    kernel_tests = sorted(str(path) for path in ROOT.glob("tests/ops/test_kernels_*.py"))
    exit_codes.append(run_tests("kernels", *(options.tests or kernel_tests)))
    benchmark_code = run_benchmark(options, out, limits)
    exit_codes.append(run_tests("gpu", "-m", "gpu", *(f"--ignore={path}" for path in kernel_tests)))
    report = {"gpu": gpu, "tests_exit_code": max(exit_codes), "benchmark_exit_code": benchmark_code}
    print(json.dumps(read_summary(out / "gpu.json") | report), flush=True)
    return max(exit_codes) or benchmark_code


def run_python(command: list[str], log: Path, limit: float, tool: Sequence[str] = ()) -> int:
    """Run Python with the repository on its path. Return the exit code, or `TIMEOUT_CODE`.

    Args:
        command: Arguments of Python.
        log: File that gets the output.
        limit: Time limit in seconds.
        tool: Command that runs Python, such as compute-sanitizer with its options.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Tests use deterministic algorithms, for which cuBLAS needs a workspace.
    variables = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if "pytest" in command else {}
    if tool:
        # Cached blocks of memory in torch would hide accesses past the end of a tensor.
        variables["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **variables}
    start = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            [*tool, sys.executable, *command], cwd=ROOT, env=environment, start_new_session=True,
            stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            exit_code = process.wait(limit)
        except subprocess.TimeoutExpired:
            exit_code = TIMEOUT_CODE
            # After an interrupt, pytest prints the failures of the tests that have run.
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SHUTDOWN_SECONDS - 1)
            file.write(f"\nended after {limit:.0f} seconds\n")
        finally:
            # Child processes must also end, because a kernel that hangs would block the GPU.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    print(f"({time.monotonic() - start:.0f} s, exit code {exit_code}, {log})", flush=True)
    return abs(exit_code)  # negative after a signal


def run_part(
    name: str, command: list[str], out: Path, limit: float, tool: Sequence[str] = ()
) -> int:
    print(f"== {name}", flush=True)
    log = out / f"{name}.log"
    exit_code = run_python(command, log, limit, tool)
    print(read_tail(log, 40 if exit_code else 4), flush=True)
    return exit_code


def make_benchmark_command() -> list[str]:
    """Return the arguments of Python. In the interpreter of Triton, the tests' repairs apply."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return ["-c", INTERPRETED_BENCHMARK_SCRIPT] if is_interpreted else ["-m", "benchmarks.gpu"]


def run_benchmark(options: argparse.Namespace, out: Path, limits: dict[str, int]) -> int:
    command = make_benchmark_command()
    results_file = out / "gpu.json"
    seconds = options.seconds or limits["benchmark"] - GRACE_SECONDS
    arguments = ["--seconds", str(seconds), "--json", str(results_file)]
    if options.dry:
        arguments.append("--dry")
    exit_code = run_part("benchmark", [*command, *arguments], out, seconds + GRACE_SECONDS)
    if not results_file.exists():
        return exit_code
    # The file exists even if the benchmark was stopped.
    table_log = out / "table.log"
    table_code = run_python([*command, "--from", str(results_file)], table_log, limits["table"])
    print(table_log.read_text(), flush=True)
    return exit_code or table_code


def read_tail(log: Path, num_lines: int) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])


def read_summary(results_file: Path) -> dict[str, object]:
    if not results_file.exists():
        return {}
    sys.path.insert(0, str(ROOT))
    from benchmarks.gpu.record import summarize

    return summarize(json.loads(results_file.read_text()))


if __name__ == "__main__":
    # Like an interrupt, SIGTERM first ends the running part.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    sys.exit(main())
