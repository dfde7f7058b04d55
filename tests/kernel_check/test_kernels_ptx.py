"""Kernels executed from their PTX, and faults planted in it, in a separate process."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.shared import make_environment

pytest.importorskip("triton", reason="Triton compiles the kernels")


def test_kernels_run_from_their_ptx_and_faults_in_it_are_found():
    """This process runs kernels in Triton's interpreter."""
    environment = {k: v for k, v in make_environment().items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.tools.ptx.plugin", "tests/ops/test_ptx.py"],
        env=environment, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r" 16 passed, \d+ deselected", done.stdout), done.stdout
