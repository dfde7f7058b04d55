"""Tests of the description of a benchmark run: the commit, the machine, and the machine's load."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from hf_fp8kv.utils.environment import commit, describe_run, share_of_others


def test_a_run_is_described(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/bin/hf-fp8kv", "bench", "speed"])
    run = describe_run("speed", device="cpu")
    assert json.loads(json.dumps(run)) == run
    assert (run["suite"], run["command"]) == ("speed", "hf-fp8kv bench speed")
    assert run["commit"] == commit()
    assert run["idle"] in (True, False)
    assert 0 <= run["used_by_others"] <= 1
    assert run["hardware"]["cpu"]
    assert run["hardware"]["device"] == "cpu"
    assert run["hardware"]["threads"] == torch.get_num_threads()
    # A build for GPUs has its CUDA in `torch.__version__` alone.
    assert torch.__version__.startswith(run["versions"]["torch"])


@pytest.mark.parametrize(("busy", "share", "idle"), [(25, 0.25, False), (0, 0, True)])
def test_a_machine_is_idle_if_other_processes_use_little_of_it(monkeypatch, busy, share, idle):
    monkeypatch.setattr(psutil, "cpu_percent", lambda _seconds: busy)
    assert share_of_others(100) == pytest.approx(share, abs=0.01)
    assert describe_run("speed")["idle"] is idle


def test_this_process_does_not_count_as_others(monkeypatch):
    def work(seconds: float) -> float:
        end = time.process_time() + 0.1
        while time.process_time() < end:
            pass
        return 100 * 0.1 / (seconds * os.cpu_count())

    monkeypatch.setattr(psutil, "cpu_percent", work)
    assert share_of_others(0.1) == pytest.approx(0, abs=0.1)


def test_commit_describes_the_repository_of_the_package(tmp_path: Path):
    """The package may be in a subfolder. A package that git does not track has no commit."""
    package = tmp_path / "checkout" / "package"
    package.mkdir(parents=True)
    file = package / "__init__.py"
    file.write_text("one = 1\n")
    assert commit(package) is None

    def git(*arguments: str) -> str:
        options = ("-c", "user.name=a", "-c", "user.email=a@b.example", "-C", str(package.parent))
        return subprocess.run(
            ["git", *options, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init")
    assert commit(package) is None
    git("add", "package")
    git("commit", "-m", "One")
    head = git("rev-parse", "HEAD")
    assert commit(package) == head
    (package / "result.json").write_text("{}")
    assert commit(package) == head
    file.write_text("one = 2\n")
    assert commit(package) == f"{head}-dirty"
    installed = package / "site-packages" / "package"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    assert commit(installed) is None
