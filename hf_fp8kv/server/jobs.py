"""Threads for work that would delay the event loop: parsing, tokenizing, compiling, formatting."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from .errors import make_stopping_error

_T = TypeVar("_T")


class JobPool:
    """Threads that run the jobs of requests. A waiting job is dropped when its request ends.

    A running job cannot be stopped. It holds its thread until its end, even without its request.

    Args:
        name: Description of the jobs, for the names of threads.
        num_threads: Maximum number of jobs that run at once.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._executor = ThreadPoolExecutor(num_threads, f"hf_fp8kv {name}")
        # A job waits here and not in the executor's queue, which would keep dropped jobs.
        self._free_threads = asyncio.Semaphore(num_threads)
        self.num_running = 0  # includes jobs whose requests have ended

    async def run(self, function: Callable[..., _T], *args: object) -> _T:
        """Return the result of a function that runs in a thread.

        Raises:
            APIError: The pool is closed.
        """
        await self._free_threads.acquire()
        try:
            job = asyncio.get_running_loop().run_in_executor(self._executor, function, *args)
        except RuntimeError:  # the pool is closed
            self._free_threads.release()
            raise make_stopping_error() from None
        self.num_running += 1
        job.add_done_callback(self._finish)
        return await asyncio.shield(job)

    def _finish(self, job: asyncio.Future[Any]) -> None:
        self.num_running -= 1
        self._free_threads.release()
        if not job.cancelled():
            job.exception()  # otherwise asyncio would log the error of a request that has ended

    def close(self) -> None:
        """Let the threads end after their running jobs. Do not wait for these jobs."""
        self._executor.shutdown(wait=False)
