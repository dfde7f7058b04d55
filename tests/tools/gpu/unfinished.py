"""A pytest plugin that prints failures and unfinished tests when a run is interrupted.

pytest prints its summary after the processes of pytest-xdist have ended, which may take too long.
If a failed test has lost the GPU, its process ends, and pytest-xdist starts a new process.
"""

import os
import sys
from collections import Counter

import pytest


class UnfinishedTests:
    """Collects test ids, results and failures, and prints them after an interrupt."""

    def __init__(self) -> None:
        self.collected_ids: set[str] = set()
        self.finished_ids: set[str] = set()
        self.failure_texts: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collected_ids.update(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.collected_ids.update(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.finished_ids.add(report.nodeid)
        if report.failed:
            self.failure_texts.append(f"failed: {report.nodeid}\n{report.longreprtext[-1500:]}")

    def pytest_internalerror(self) -> None:
        # pytest reports an interrupt as an internal error while pytest-xdist holds a lock.
        self.pytest_keyboard_interrupt()

    def pytest_keyboard_interrupt(self) -> None:
        unfinished_ids = self.collected_ids - self.finished_ids
        file_counts = Counter(test_id.partition("::")[0] for test_id in unfinished_ids)
        lines = [f"not finished: {count} of {file}" for file, count in sorted(file_counts.items())]
        sys.stdout.write("\n".join(["", *self.failure_texts, *lines, ""]))
        sys.stdout.flush()


class LostGpuExit:
    """Ends a process that has lost its GPU, because every later test in it would fail."""

    @pytest.hookimpl(trylast=True)  # after the report is sent
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and has_lost_gpu():
            os._exit(pytest.ExitCode.INTERNAL_ERROR)


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
    config.pluginmanager.register(LostGpuExit() if is_worker else UnfinishedTests())
