"""Timing of work on a device: replayed CUDA graphs there, a clock elsewhere."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hf_fp8kv.bench.reporting import quartiles

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
    """Microseconds of one call: the median over replays and the quartiles."""

    us: float
    low: float
    high: float
    calls: int  # in one replay
    note: str | None = None  # why it was not replayed from a graph, where it was not


class Stage:
    """The device that is measured; `dry`: everything runs on tiny shapes, and nothing counts."""

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

    def randn(self, *shape: int) -> torch.Tensor:
        """Return normal random numbers of this shape, bfloat16."""
        return torch.randn(shape, dtype=torch.bfloat16, device=self.device)

    def free(self) -> int:
        """Return the bytes that may still be taken."""
        if not self.is_gpu:
            return 2**50
        # What torch holds and does not use counts as free: it gives it back before it gives up.
        held = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return max(torch.cuda.mem_get_info(self.device)[0] + held - RESERVE, 0)

    def reset_peak(self) -> None:
        """Give back what nothing refers to, and begin to look for the peak of memory anew."""
        if self.is_gpu:
            self.clean()
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int | None:
        """Return the most bytes that were taken at once; None: there is no memory of its own."""
        return torch.cuda.max_memory_allocated(self.device) if self.is_gpu else None

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

    def time(
        self, steps: Sequence[Step], before: Step | None = None, *, eagerly: bool = False
    ) -> Timed:
        """Return the time of one of `steps`, which run in turns.

        Args:
            steps: calls that do the same to different buffers.
            before: run at the beginning of every replay, once for all: what layers share.
            eagerly: whether they are called from Python each time, without a graph.
        """

        def run(rounds: int = 1) -> None:
            if before is not None:
                before()
            for _ in range(rounds):
                for step in steps:
                    step()

        if not self.is_gpu:
            return _time_by_clock(run, len(steps), 1 if self.dry else 3)
        note = None
        if not eagerly:
            try:
                return _time_by_graph(run, len(steps))
            except RuntimeError as error:
                # What cannot be captured is timed as it is: its launches show.
                note = f"no graph: {str(error).splitlines()[0]}"
                self.wait()
        run()
        return _replay(run, len(steps), note)


def _time_by_clock(run: Step, calls: int, times: int) -> Timed:
    totals = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        totals.append(1e6 * (time.perf_counter() - began))
    return _summarize(totals, calls)


def _time_by_graph(run: Callable[..., None], steps: int) -> Timed:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()

    def capture(rounds: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(rounds)
        return graph

    graph, rounds = capture(1), 1
    took = _milliseconds(graph.replay)
    wanted = min(int(GRAPH / took) + 1, LARGEST_GRAPH // steps)
    if took < GRAPH / 2 and wanted > 1:
        graph, rounds = capture(wanted), wanted
    return _replay(graph.replay, rounds * steps)


def _replay(run: Step, calls: int, note: str | None = None) -> Timed:
    count = max(FEWEST, min(int(REPLAYED / _milliseconds(run)), MOST))
    return _summarize(_events(run, count), calls, note)


def _milliseconds(run: Step) -> float:
    return _events(run, 1)[0] / 1e3


def _events(run: Step, count: int) -> list[float]:
    """Return the microseconds of each of `count` runs."""
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for start, end in marks:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [1e3 * max(start.elapsed_time(end), 1e-3) for start, end in marks]


def _summarize(totals: list[float], calls: int, note: str | None = None) -> Timed:
    us, low, high = quartiles([total / calls for total in totals])
    return Timed(us, us if low is None else low, us if high is None else high, calls, note)
