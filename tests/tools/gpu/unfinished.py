"""A pytest plugin that prints failures and unfinished tests when a run is interrupted.

pytest-xdist waits for its processes before pytest prints its summary, and this may take too long.
If a failed test lost the GPU, its process ends, and pytest-xdist starts a new process.
"""

import os
import sys
from collections import Counter

import pytest


class UnfinishedTests:
    """Collects test ids, results and failures, and prints them after an interrupt."""

    def __init__(self) -> None:
        self.collected: set[str] = set()
        self.finished: set[str] = set()
        self.failed: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collected.update(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.collected.update(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.finished.add(report.nodeid)
        if report.failed:
            self.failed.append(f"failed: {report.nodeid}\n{report.longreprtext[-1500:]}")

    def pytest_internalerror(self) -> None:
        # pytest reports an interrupt within a lock of pytest-xdist as an internal error.
        self.pytest_keyboard_interrupt()

    def pytest_keyboard_interrupt(self) -> None:
        files = Counter(name.partition("::")[0] for name in self.collected - self.finished)
        lines = [f"not finished: {n} of {file}" for file, n in sorted(files.items())]
        sys.stdout.write("\n".join(["", *self.failed, *lines, ""]))
        sys.stdout.flush()


class ProcessEnder:
    """Ends a process that has lost its GPU, because every later test in it would fail."""

    @pytest.hookimpl(trylast=True)  # after the report is sent
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and has_lost_gpu():
            os._exit(3)


def has_lost_gpu() -> bool:
    """Return whether this process has used CUDA, and CUDA now raises errors."""
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
    config.pluginmanager.register(ProcessEnder() if is_worker else UnfinishedTests())
