"""Adapters of PEFT and a prefix store. `make peft` runs this in an environment that has PEFT."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]


def test_three_processes_share_a_folder(tmp_path: Path) -> None:
    """An adapter, the model without one, and a different adapter: all answer as without a store."""
    pytest.importorskip("peft")
    said: dict[str, set[str]] = {}
    for number, seed in enumerate((1, 0, 2), 1):
        command = [sys.executable, "-m", "tests.helpers.adapters", str(tmp_path), str(seed)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert not done.returncode, done.stderr[-3000:]
        for method, got in json.loads(done.stdout.splitlines()[-1]).items():
            where = f"{method}, process {number}"
            assert got["right"], where
            # LoRA changes weights, so its pages have other keys. The 60 tokens fill seven pages.
            counts = (1, 7 * number) if method == "LoRA" else (int(seed == 0), 7 * (number > 1))
            assert (got["hits"], got["pages"]) == counts, where
            assert ("is not used" in done.stderr) == (seed > 0), where
            said.setdefault(method, set()).add(str(got["said"]))
    assert all(len(answers) == 3 for answers in said.values()), "each adapter changes the answer"
