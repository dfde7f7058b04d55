"""Timing of work on a device: replayed CUDA graphs there, a clock elsewhere."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..reporting import quartiles

Step = Callable[[], object]

# A graph is made at least so long, in milliseconds, that starting it does not show.
GRAPH = 2.0
# How long one measurement replays, in milliseconds, and how often at least and at most.
REPLAYED = 60.0
FEWEST, MOST = 5, 40
# Calls of one graph at most.
LARGEST_GRAPH = 512
# Bytes of a device that stay free: graphs, workspaces, torch's own.
RESERVE = 6 * 2**30


@dataclass(frozen=True)
class Timed:
    """Microseconds of one call.

    Attributes:
        us: the median over replays.
        low: the first quartile.
        high: the third.
        calls: calls in one replay.
        note: why it was not replayed from a graph, where it was not.
    """

    us: float
    low: float
    high: float
    calls: int
    note: str | None = None


class Stage:
    """The device that is measured.

    Attributes:
        device: where tensors go.
        dry: shapes are tiny and a clock is read: everything runs, and nothing is measured.
    """

    def __init__(self, device: str | torch.device, *, dry: bool = False) -> None:
        self.device = torch.device(device)
        self.dry = dry

    @property
    def is_gpu(self) -> bool:
        """Whether there are events, graphs and a memory of its own."""
        return self.device.type == "cuda"

    @property
    def cache_bytes(self) -> int:
        """Bytes of the last cache before the memory."""
        if not self.is_gpu:
            return 2**16
        return int(torch.cuda.get_device_properties(self.device).L2_cache_size)

    def free(self) -> int:
        """Return the bytes that may still be taken."""
        if not self.is_gpu:
            return 2**50
        # What torch holds and does not use counts as free: it gives it back before it gives up.
        held = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return max(torch.cuda.mem_get_info(self.device)[0] + held - RESERVE, 0)

    def clean(self) -> None:
        """Give back to the device what nothing refers to."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()

    def wait(self) -> None:
        """Wait until the device has done all it was given; raise what went wrong there."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def is_lost(self) -> bool:
        """Whether the device refuses all further work, as after a bad access to memory."""
        try:
            self.wait()
        except RuntimeError:
            return True
        return False

    def copies(self, size: int, least: int = 1) -> int:
        """Return over how many buffers of `size` bytes to rotate, so that none is in a cache."""
        if self.dry:
            return 2
        return max(least, min(-(-4 * self.cache_bytes // max(size, 1)), 256))

    def time(self, steps: Sequence[Step], before: Step | None = None) -> Timed:
        """Return the time of one of `steps`, which run in turns.

        Args:
            steps: calls that do the same to different buffers.
            before: run at the beginning of every replay, once for all: what layers share.
        """
        first: Step = before or (lambda: None)
        if not self.is_gpu:
            return _time_by_clock(steps, first)
        try:
            return _time_by_graph(steps, first)
        except RuntimeError as error:
            # What cannot be captured is timed as it is: its launches show.
            self.wait()
            return _time_by_events(steps, first, f"no graph: {str(error).splitlines()[0]}")


def _time_by_clock(steps: Sequence[Step], first: Step) -> Timed:
    def run() -> float:
        began = time.perf_counter()
        first()
        for step in steps:
            step()
        return 1e6 * (time.perf_counter() - began)

    run()
    return _summarize([run() for _ in range(3)], len(steps))


def _time_by_graph(steps: Sequence[Step], first: Step) -> Timed:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            first()
            for step in steps:
                step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    rounds = 1
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            first()
            for _ in range(rounds):
                for step in steps:
                    step()
        graph.replay()
        took = _run_once(graph.replay)
        calls = rounds * len(steps)
        wanted = min(int(GRAPH / took) + 1, LARGEST_GRAPH // len(steps))
        if took >= GRAPH / 2 or wanted <= 1 or rounds > 1:
            break
        rounds = wanted
    count = max(FEWEST, min(int(REPLAYED / took), MOST))
    return _summarize(_events(graph.replay, count), calls)


def _time_by_events(steps: Sequence[Step], first: Step, note: str) -> Timed:
    def run() -> None:
        first()
        for step in steps:
            step()

    run()
    took = _run_once(run)
    count = max(FEWEST, min(int(REPLAYED / took), MOST))
    return _summarize(_events(run, count), len(steps), note)


def _run_once(run: Step) -> float:
    return _events(run, 1)[0] / 1e3


def _events(run: Step, count: int) -> list[float]:
    """Return the microseconds of each of `count` runs."""
    marks = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(count)
    ]
    for start, end in marks:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [1e3 * max(start.elapsed_time(end), 1e-3) for start, end in marks]


def _summarize(totals: list[float], calls: int, note: str | None = None) -> Timed:
    us, low, high = quartiles([total / calls for total in totals])
    return Timed(us, us if low is None else low, us if high is None else high, calls, note)
