"""`make gpu`: the tests that need a GPU, and the benchmark, in under eight minutes.

The benchmark comes before the slower half of the tests. Each part ends when its time is up, and
what it left out is named. Logs, gpu.json and roofline.png go to a folder; the last line is one JSON
object; the exit code is that of the tests, or else of the benchmark. Without a GPU it says so and
exits with 0. In a dry run nothing is short of time.
"""

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Seconds of each part at most: with END for each they make TOTAL, and START is torch's import here.
LIMITS = {"kernels": 80, "benchmark": 270, "table": 20, "gpu": 70}
# With --experiments there are no other tests than those of the kernels.
EXPERIMENTS = {"kernels": 80, "benchmark": 340, "table": 20}
END, START, TOTAL = 7, 12, 480
# What a benchmark needs after its own time is up.
GRACE = 15
DRY = 1800
INTERPRETED = """
from tests.helpers.interpreter import repair
repair()
from hf_fp8kv.cli import app
app()
"""


def main() -> int:
    options = parse_arguments()
    gpu = gpu_name()
    if gpu is None and not options.dry:
        say("No GPU: torch finds none, so nothing was run.")
        say(json.dumps({"gpu": None}))
        return 0
    # Parts run in the repository, wherever this was started.
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    logs = ("kernels.log", "gpu.log", "benchmark.log", "table.log")
    for name in (*logs, "gpu.json", "gpu.json.new", "roofline.png"):
        (out / name).unlink(missing_ok=True)
    limits = EXPERIMENTS if options.experiments else LIMITS
    if options.dry:
        limits = dict.fromkeys(limits, DRY)
    kernels = sorted(str(path) for path in ROOT.glob("tests/ops/test_kernels_*.py"))
    codes = [run_tests("kernels", options.tests or kernels, out, limits["kernels"])]
    benchmark_code = run_benchmark(options, out, limits)
    if "gpu" in limits:
        others = ["-m", "gpu", *(f"--ignore={path}" for path in kernels)]
        codes.append(run_tests("gpu", others, out, limits["gpu"]))
    last = {"gpu": gpu, "tests_exit_code": max(codes), "benchmark_exit_code": benchmark_code}
    say(json.dumps(read_summary(out / "gpu.json") | last))
    return max(codes) or benchmark_code


@functools.cache
def gpu_name() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--seconds", type=float, help="of the benchmark, instead of its own limit")
    parser.add_argument("--dry", action="store_true", help="all of it, tiny, on any machine")
    parser.add_argument("--experiments", action="store_true", help="other launch parameters")
    parser.add_argument("tests", nargs="*", help="instead of the tests of the kernels")
    return parser.parse_args()


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run(command: list[str], log: Path, seconds: float) -> int:
    """Run Python with the repository on its path; 124 if it was ended when its time was up."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # cuBLAS asks for its workspace where a test asks for deterministic algorithms.
    more = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if "pytest" in command else {}
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **more}
    began = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=environment, start_new_session=True,
            stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = 124
            # Interrupted, pytest still tells what failed so far.
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END - 1)
            file.write(f"\nended after {seconds:.0f} seconds\n")
        finally:
            # Its own processes too, also where this one is told to end: one that waits for a kernel
            # that never ends holds the GPU.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    say(f"({time.monotonic() - began:.0f} s, exit code {code}, {log})")
    return code


def run_tests(name: str, arguments: list[str], out: Path, seconds: float) -> int:
    """Return pytest's exit code; a selection without tests is no failure."""
    say(f"== tests: {name}")
    options = ["-q", "-rfE", "--tb=short", "-p", "no:cacheprovider", "-p", "tests.gpu.unfinished"]
    if importlib.util.find_spec("xdist"):
        # Nearly all of their time goes into compiling, on the processor.
        most = 14 if name == "kernels" else 8
        options += ["-n", str(min(os.cpu_count() or 1, most))]
    # The versions there are not those that the tests were made with.
    for warning in ("UserWarning", "DeprecationWarning", "FutureWarning"):
        options += ["-W", f"ignore::{warning}"]
    # Where a kernel hangs, the log says in which test.
    options += ["-o", "faulthandler_timeout=60", "--durations=5"]
    log = out / f"{name}.log"
    code = run(["-m", "pytest", *options, *arguments], log, seconds)
    say(tail(log, 40 if code == 124 else 14))
    return 0 if code == 5 else abs(code)


def run_benchmark(options: argparse.Namespace, out: Path, limits: dict[str, int]) -> int:
    say("== benchmark")
    command = ["-m", "hf_fp8kv.cli"]
    if options.dry and gpu_name() is None:
        # Kernels run in Triton's interpreter, whose arithmetic the tests have mended.
        os.environ["TRITON_INTERPRET"] = "1"
        command = ["-c", INTERPRETED]
    command += ["bench", "--suite", "gpu"]
    results, log = out / "gpu.json", out / "benchmark.log"
    seconds = options.seconds or limits["benchmark"] - GRACE
    more = ["--seconds", str(seconds), "--json", str(results)]
    more += ["--dry"] * options.dry + ["--experiments"] * options.experiments
    code = run([*command, *more], log, seconds + GRACE)
    if code:
        say(tail(log))
    if results.exists():
        # From the file, which is there even if the benchmark was ended.
        table = out / "table.log"
        can_plot = importlib.util.find_spec("matplotlib") is not None
        picture = ["--plot", str(out / "roofline.png")] if can_plot else []
        if run([*command, "--from", str(results), *picture], table, limits["table"]):
            code = code or 1
        say(table.read_text())
    return abs(code)


def tail(log: Path, lines: int = 14) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def read_summary(results: Path) -> dict[str, object]:
    """Return what one line can say of the benchmark."""
    if not results.exists():
        return {}
    sys.path.insert(0, str(ROOT))
    from benchmarks.gpu import line

    return line(json.loads(results.read_text()))


if __name__ == "__main__":
    # As an interrupt does: what runs is ended first.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    sys.exit(main())
