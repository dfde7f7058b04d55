"""A pytest plugin that prints failures and unfinished tests when a run is interrupted.

pytest-xdist waits for its processes before pytest prints its summary, which may take too long. If a
failed test lost the GPU, its process ends, and pytest-xdist starts a new process.
"""

import os
import sys
from collections import Counter

import pytest


class Unfinished:
    """Collected tests, tests with a result, and failures."""

    def __init__(self) -> None:
        self.collected: set[str] = set()
        self.done: set[str] = set()
        self.failed: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collected.update(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.collected.update(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.done.add(report.nodeid)
        if report.failed:
            self.failed.append(f"failed: {report.nodeid}\n{report.longreprtext[-1500:]}")

    def pytest_internalerror(self) -> None:
        # An interrupt within a lock of pytest-xdist is an internal error.
        self.pytest_keyboard_interrupt()

    def pytest_keyboard_interrupt(self) -> None:
        files = Counter(name.partition("::")[0] for name in self.collected - self.done)
        lines = [f"not finished: {n} of {file}" for file, n in sorted(files.items())]
        sys.stdout.write("\n".join(["", *self.failed, *lines, ""]))
        sys.stdout.flush()


class EndsWithDevice:
    """Ends a process that has lost its GPU, because every later test in it would fail."""

    @pytest.hookimpl(trylast=True)  # after the report was sent
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and is_lost():
            os._exit(3)


def is_lost() -> bool:
    """Return whether this process used CUDA, and CUDA now raises errors."""
    import torch

    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def pytest_configure(config: pytest.Config) -> None:
    # The main process receives the reports of its workers.
    is_worker = hasattr(config, "workerinput")
    config.pluginmanager.register(EndsWithDevice() if is_worker else Unfinished())
