"""Measure times and memory on the device under test."""

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_fp8kv.bench.reporting import quartiles

Step = Callable[[], object]

# Minimum length of a graph in milliseconds, so that the time of its launch is negligible.
GRAPH_MS = 2.0
# Length of a measurement in milliseconds, and the limits of its number of replays.
REPLAY_MS, MIN_REPLAYS, MAX_REPLAYS = 60.0, 5, 40
# Maximum number of calls in a graph.
MAX_GRAPH_CALLS = 512


class Stage:
    """A device. With `dry`, everything runs on tiny shapes, and times are meaningless.

    With `compiling`, a step is called once and not timed, and sections leave out baselines.
    """

    def __init__(
        self, device: str | torch.device, *, dry: bool = False, compiling: bool = False
    ) -> None:
        self.device = torch.device(device)
        self.dry, self.compiling = dry, compiling

    @property
    def is_gpu(self) -> bool:
        """Whether the device has events, graphs and separate memory."""
        return self.device.type == "cuda"

    @property
    def cache_bytes(self) -> int:
        """Size of the last-level cache."""
        if not self.is_gpu:
            return 2**16
        return int(torch.cuda.get_device_properties(self.device).L2_cache_size)

    def randn(self, *shape: int) -> torch.Tensor:
        """Return normal random values in bfloat16."""
        return torch.randn(shape, dtype=torch.bfloat16, device=self.device)

    def reset_peak(self) -> None:
        """Free unused memory, and restart the measurement of the peak."""
        self.clean()
        if self.is_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int | None:
        """Return the peak of allocated bytes, or None on a CPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.is_gpu else None

    def clean(self) -> None:
        """Free memory that nothing refers to."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()

    def wait(self) -> None:
        """Wait for all work on the device, and raise its errors."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def mark(self) -> Any:
        """Return the current time: an event of the device, or the seconds of the CPU."""
        if not self.is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_lost(self) -> bool:
        """Return whether the device refuses further work, as after an illegal memory access."""
        try:
            self.wait()
        except RuntimeError:
            return True
        return False

    def copies(self, size: int) -> int:
        """Return the number of buffers of `size` bytes that exceed four times the cache."""
        if self.dry or self.compiling:
            return 1 if self.compiling else 2
        return max(1, min(-(-4 * self.cache_bytes // max(size, 1)), 256))

    def count_launches(self, steps: Sequence[Step]) -> float | None:
        """Return the kernels, copies and fills that one of `steps` starts, or None on a CPU.

        All of them run, because the first layer of a step also makes the mask.
        """
        if not self.is_gpu or self.compiling:
            return None
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        self.wait()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            for step in steps:
                step()
            self.wait()
        count = sum(event.device_type == DeviceType.CUDA for event in seen.events() or ())
        return count / len(steps) or None

    def time(self, steps: Sequence[Step], *, eagerly: bool = False) -> dict[str, Any]:
        """Return the microseconds of one of `steps`, which do equal work and alternate.

        The result has the median (`us`), the quartiles (`low`, `high`), the `calls` in one replay,
        and a `note` if no graph could be captured. With `eagerly`, Python makes each call.
        """
        # `triton.testing.do_bench_cudagraph` calls a step dozens of times before it captures it. By
        # then, a growing cache needs a new page, which no graph can allocate.

        def run(rounds: int = 1) -> None:
            for _ in range(rounds):
                for step in steps:
                    step()

        if self.compiling:
            steps[0]()
            self.wait()
            return {}
        if not self.is_gpu:
            began = time.perf_counter()
            run()
            return _summarize([1e6 * (time.perf_counter() - began)], len(steps))
        note = {}
        if not eagerly:
            try:
                replay, rounds = _capture(run, len(steps))
                return _replay(replay, rounds * len(steps))
            except RuntimeError as error:
                # Eager calls are still a result, although their launches take time.
                note = {"note": f"no graph: {str(error).splitlines()[0]}"}
                self.wait()
        run()
        return _replay(run, len(steps)) | note


def _capture(run: Callable[..., None], steps: int) -> tuple[Step, int]:
    """Return the replay of a graph of at least `GRAPH_MS` ms, and its number of rounds."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(2)
    torch.cuda.current_stream().wait_stream(stream)
    rounds = 1
    while True:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(rounds)
        took = _events(graph.replay, 1)[0] / 1e3
        next_rounds = min(int(GRAPH_MS / took) + 1, MAX_GRAPH_CALLS // steps)
        if rounds > 1 or next_rounds <= 1 or took >= GRAPH_MS / 2:
            return graph.replay, rounds
        rounds = next_rounds


def _replay(run: Step, calls: int) -> dict[str, Any]:
    milliseconds = _events(run, 1)[0] / 1e3
    count = max(MIN_REPLAYS, min(int(REPLAY_MS / milliseconds), MAX_REPLAYS))
    return _summarize(_events(run, count), calls)


def _events(run: Step, count: int) -> list[float]:
    """Return the microseconds of `count` runs."""
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for start, end in marks:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [1e3 * max(start.elapsed_time(end), 1e-3) for start, end in marks]


def _summarize(totals: list[float], calls: int) -> dict[str, Any]:
    us, low, high = quartiles([total / calls for total in totals])
    return {"us": us, "low": us if low is None else low, "high": us if high is None else high,
            "calls": calls}  # fmt: skip
