"""Tests of the marker for tests of style, in a pytest that runs in another process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.style import STRICT

TESTS = """
import pytest

@pytest.mark.style
def test_of_style():
    assert not ["a long cell"]

def test_of_behavior(fails):
    assert not fails
"""


@pytest.fixture
def run_tests(tmp_path):
    """Return a function that runs a failed test of style and a test, and returns their output."""
    (tmp_path / "test_both.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = style\nxfail_strict = true\n")

    def run_process(strict: str, fails: bool) -> tuple[int, str]:
        (tmp_path / "conftest.py").write_text(
            "import pytest\nfrom tests.helpers.style import pytest_runtest_makereport\n"
            f"@pytest.fixture\ndef fails():\n    return {fails}\n"
        )
        paths = {"PYTHONPATH": str(Path(__file__).parents[2]), STRICT: strict}
        paths["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # plugins take most of the time
        command = [sys.executable, "-m", "pytest", "-ra", "-p", "no:cacheprovider", tmp_path]
        result = subprocess.run(command, env=os.environ | paths, capture_output=True, text=True)
        return result.returncode, result.stdout

    return run_process


def test_a_failure_of_style_is_shown_and_does_not_fail_the_run(run_tests):
    code, output = run_tests(strict="", fails=False)
    assert code == 0
    assert "1 passed, 1 xfailed" in output
    assert "assert not ['a long cell']" in output


def test_other_failures_and_strict_runs_fail(run_tests):
    code, output = run_tests(strict="", fails=True)
    assert code == 1
    assert "1 failed, 1 xfailed" in output
    code, output = run_tests(strict="1", fails=False)
    assert code == 1
    assert "1 failed, 1 passed" in output
