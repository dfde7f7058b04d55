"""Tests that run the kernels from their PTX, and that detect planted faults."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.shared import make_environment

pytest.importorskip("triton", reason="Triton compiles the kernels")


@pytest.mark.full  # the kernels compile, and run instruction by instruction
def test_kernels_run_from_their_ptx_and_faults_are_detected():
    """A separate process runs the PTX, because this process uses Triton's interpreter."""
    environment = {
        name: text for name, text in make_environment().items() if not name.startswith("PYTEST_")
    }
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.tools.ptx.plugin", "tests/ops/test_ptx.py"],
        env=environment, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    assert re.search(r" 16 passed, \d+ deselected", process.stdout), process.stdout
