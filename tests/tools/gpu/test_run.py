"""Tests of `make gpu`: time limits, exit codes, logs, and the end of child processes."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from benchmarks.gpu.shapes import FULL
from benchmarks.gpu.suite import COMPILE_SECONDS, run_suite
from tests.tools.gpu import run


def test_without_a_gpu_nothing_is_run(monkeypatch, capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.setattr(sys, "argv", ["run.py"])
    assert run.main() == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"gpu": None}


def test_all_parts_fit_into_nine_minutes():
    shutdown_seconds = len(run.LIMITS) * run.SHUTDOWN_SECONDS
    assert run.TOTAL_SECONDS == 9 * 60
    assert sum(run.LIMITS.values()) + shutdown_seconds + run.IMPORT_SECONDS <= run.TOTAL_SECONDS
    benchmark_seconds = run.LIMITS["benchmark"] - run.GRACE_SECONDS
    assert sum(FULL.time_weights.values()) + COMPILE_SECONDS == benchmark_seconds


@pytest.mark.parametrize(
    ("failed_part", "exit_code"),
    [("none", 0), ("smoke", 7), ("memcheck", 7), ("racecheck", 7), ("tests", 1), ("benchmark", 2)],
)
def test_exit_code_and_summary_show_failures(monkeypatch, capsys, tmp_path, failed_part, exit_code):
    results = run_suite(device="cpu", backend="torch", is_dry=True, sections=("ceilings",))

    def fake_run_python(command, log, limit, tool=()):
        log.write_text("the log\n")
        logs.append(log.stem)
        if "tests.tools.gpu.smoke" in command:
            is_sanitized = tool[:1] == ("compute-sanitizer",)
            assert (command[-1] == "tiny") == is_sanitized
            return 7 if log.stem == failed_part else 0
        if "pytest" in command:
            selects_marker = "-m" in command[2:]  # command[0] is "-m" of `python -m pytest`
            has_failed = failed_part == "tests" and not selects_marker
            return pytest.ExitCode.TESTS_FAILED if has_failed else run.NO_TESTS_CODE
        (tmp_path / "gpu.json").write_text(json.dumps(results))
        return 2 if failed_part == "benchmark" else 0

    logs = []
    monkeypatch.setattr(run, "run_python", fake_run_python)
    monkeypatch.setattr(run.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(sys, "argv", ["run.py", "--dry", "--out", str(tmp_path)])
    assert run.main() == exit_code
    assert logs == list(run.LIMITS)
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["tests_exit_code"] == (0 if failed_part == "benchmark" else exit_code)
    assert summary["benchmark_exit_code"] == (2 if failed_part == "benchmark" else 0)
    assert summary["rows"] == len(results["rows"])


def test_the_log_names_failures_and_unfinished_tests(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    test_file = tmp_path / "test_ended.py"
    test_file.write_text(
        "def test_bad(): assert 1 == 2\n"
        "def test_ends(): raise KeyboardInterrupt\n"
        "def test_late(): pass\n"
    )
    options = ["-m", "pytest", "-p", "tests.tools.gpu.unfinished", "-p", "no:cacheprovider", "-q"]
    options += [str(test_file), "--rootdir", str(tmp_path)]
    assert run.run_python(options, tmp_path / "log", 600) == 2
    log = (tmp_path / "log").read_text()
    assert "failed: test_ended.py::test_bad" in log
    assert "not finished: 2 of test_ended.py" in log


@pytest.mark.full
def test_child_processes_end_with_a_part(tmp_path):
    test_file = tmp_path / "test_slow.py"
    test_file.write_text(
        "import os, pathlib, time\n"
        "def test_slow():\n"
        "    pathlib.Path(__file__).with_name('pid').write_text(str(os.getpid()))\n"
        "    time.sleep(600)\n"
    )
    command = [sys.executable, "-m", "tests.tools.gpu.run", "--dry", str(test_file)]
    with subprocess.Popen(
        [*command, "--out", str(tmp_path / "out")], cwd=run.ROOT, stdout=subprocess.DEVNULL,
        # Background jobs of a shell ignore SIGINT, and their child processes inherit this.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:  # fmt: skip
        pid_file = tmp_path / "pid"
        while not (pid_file.exists() and pid_file.read_text()):
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait() not in (0, None)
    while True:
        try:
            os.kill(int(pid_file.read_text()), 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
