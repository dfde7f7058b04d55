"""A pytest plugin that repeats tests with filled memory, and writes a line for each result.

`HF_FP8KV_REPEAT` is the number of repetitions. In repeated tests, torch fills new memory with NaN
or the largest integer. `HF_FP8KV_RESULTS` is the file for the lines, which are JSON objects.
"""

import json
import os
from pathlib import Path

import pytest

NUM_REPETITIONS = int(os.environ.get("HF_FP8KV_REPEAT", "0"))
MAX_MESSAGE_LENGTH = 300


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if NUM_REPETITIONS:
        metafunc.fixturenames.append("repetition")
        metafunc.parametrize("repetition", range(NUM_REPETITIONS))


@pytest.fixture(autouse=True)
def _fill_memory(request: pytest.FixtureRequest) -> None:
    if NUM_REPETITIONS:
        request.getfixturevalue("poisoned_outputs")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the result of a test, and of its setup or teardown if that does not pass."""
    if report.when == "call" or not report.passed:
        row = {
            "name": report.nodeid,
            "outcome": report.outcome,
            "seconds": report.duration,
            "message": report.longreprtext.strip().rpartition("\n")[2][:MAX_MESSAGE_LENGTH],
        }
        with Path(os.environ["HF_FP8KV_RESULTS"]).open("a") as file:
            file.write(json.dumps(row) + "\n")
