"""A pytest plugin that prints failures and unfinished tests when a run is interrupted.

pytest prints its summary after the processes of pytest-xdist have ended, which may take too long.
If a test loses the GPU, its process exits, and pytest-xdist starts a new process.
"""

import os
from collections import Counter

import pytest

collected_ids: set[str] = set()
finished_ids: set[str] = set()
failure_texts: list[str] = []
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ


def pytest_collection_finish(session: pytest.Session) -> None:
    collected_ids.update(item.nodeid for item in session.items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(ids: list[str]) -> None:
    collected_ids.update(ids)


@pytest.hookimpl(trylast=True)  # after a worker has sent the report to the main process
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        finished_ids.add(report.nodeid)
    if report.failed:
        failure_texts.append(f"failed: {report.nodeid}\n{report.longreprtext[-1500:]}")
        if IS_WORKER and has_lost_gpu():
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


def print_unfinished() -> None:
    """Print the failures, and the number of unfinished tests of each file."""
    if not IS_WORKER:
        unfinished_ids = collected_ids - finished_ids
        test_counts = Counter(test_id.partition("::")[0] for test_id in unfinished_ids)
        lines = [f"not finished: {count} of {file}" for file, count in sorted(test_counts.items())]
        print("", *failure_texts, *lines, sep="\n", flush=True)


# pytest reports an interrupt as an internal error while pytest-xdist holds a lock.
pytest_keyboard_interrupt = pytest_internalerror = print_unfinished
