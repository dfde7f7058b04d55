"""The description of a run: its commit, its machine, and whether the machine was idle."""

import json
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import psutil
import pytest
import torch

from hf_fp8kv.utils.environment import commit, describe_run, share_of_others

Times = namedtuple("Times", "user system idle iowait guest")


def test_a_run_is_described(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/bin/hf-fp8kv", "bench", "speed"])
    found = describe_run("speed", device="cpu")
    assert json.loads(json.dumps(found)) == found
    assert (found["suite"], found["command"]) == ("speed", "hf-fp8kv bench speed")
    assert found["commit"] == commit()
    assert found["idle"] in (True, False)
    assert 0 <= found["used_by_others"] <= 1
    assert found["hardware"]["cpu"]
    assert found["hardware"]["device"] == "cpu"
    assert found["hardware"]["threads"] == torch.get_num_threads()
    # A build for GPUs has its CUDA in `torch.__version__` alone.
    assert torch.__version__.startswith(found["versions"]["torch"])


# Of four seconds of CPU time: one used, none used, all used. Waiting and guests do not count.
@pytest.mark.parametrize(
    ("spent", "share", "idle"),
    [((1, 0, 2, 1, 1), 0.25, False), ((0, 0, 3, 1, 0), 0.0, True), ((3, 1, 0, 0, 0), 1.0, False)],
)
def test_the_share_of_other_processes(monkeypatch, spent, share, idle):
    before = Times(10, 10, 100, 5, 1)
    after = Times(*(a + b for a, b in zip(before, spent, strict=True)))
    monkeypatch.setattr(psutil, "cpu_times", iter([before, after] * 2).__next__)
    assert share_of_others(0.01) == pytest.approx(share, abs=0.01)
    assert describe_run("speed")["idle"] is idle


def test_a_machine_without_psutil_is_neither_idle_nor_busy(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    found = describe_run("speed")
    assert found["idle"] is found["used_by_others"] is None


def test_the_commit_is_that_of_the_package(tmp_path: Path):
    """Also in a folder of the checkout; a package that git does not track has no commit."""
    package = tmp_path / "checkout" / "package"
    package.mkdir(parents=True)
    file = package / "__init__.py"
    file.write_text("one = 1\n")
    assert commit(package) is None

    def git(*arguments: str) -> str:
        named = ("-c", "user.name=a", "-c", "user.email=a@b.example", "-C", str(package.parent))
        return subprocess.run(
            ["git", *named, *arguments], check=True, capture_output=True, text=True
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
