"""Tests of the description of a benchmark run: the commit, the machine, and the machine's load."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from hf_fp8kv.utils.environment import describe_run, find_commit, measure_other_load
from hf_fp8kv.utils.timing import compute_ratios


def test_the_description_of_a_run_has_commit_machine_and_load(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/bin/hf-fp8kv", "card", "--quick"])
    run = describe_run("card", device="cpu")
    assert json.loads(json.dumps(run)) == run
    assert (run["suite"], run["command"]) == ("card", "hf-fp8kv card --quick")
    assert run["commit"] == find_commit()
    assert run["idle"] in (True, False)
    assert 0 <= run["used_by_others"] <= 1
    assert run["hardware"]["cpu"]
    assert run["hardware"]["device"] == "cpu"
    assert run["hardware"]["threads"] == torch.get_num_threads()
    # Only `torch.__version__` names the CUDA version of a build for GPUs.
    assert torch.__version__.startswith(run["versions"]["torch"])


@pytest.mark.parametrize(("percent", "expected", "is_idle"), [(25, 0.25, False), (0, 0, True)])
def test_a_machine_is_idle_if_other_processes_use_little(monkeypatch, percent, expected, is_idle):
    monkeypatch.setattr(psutil, "cpu_percent", lambda _seconds: percent)
    assert measure_other_load(100) == pytest.approx(expected, abs=0.01)
    assert describe_run("card")["idle"] is is_idle


def test_the_commit_is_found_in_the_repository_of_the_package(tmp_path: Path):
    """The package may be in a subfolder. A package that git does not track has no commit."""
    package = tmp_path / "checkout" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("one = 1\n")
    assert find_commit(package) is None

    def run_git(*arguments: str) -> str:
        options = ("-c", "user.name=a", "-c", "user.email=a@b.example", "-C", str(package.parent))
        return subprocess.run(
            ["git", *options, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    run_git("init")
    assert find_commit(package) is None
    run_git("add", "package")
    run_git("commit", "-m", "One")
    commit_id = run_git("rev-parse", "HEAD")
    assert find_commit(package) == commit_id
    (package / "__init__.py").write_text("one = 2\n")
    assert find_commit(package) == f"{commit_id}-dirty"


def test_a_ratio_is_the_time_over_the_time_of_the_baseline():
    assert compute_ratios({"fast": [1.0, 2.0], "slow": [4.0, 4.0]}, "fast", "slow") == [0.25, 0.5]
