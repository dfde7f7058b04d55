"""Measure times and memory on the device under test."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from hf_fp8kv.utils.timing import Step

# Minimum duration of a graph in milliseconds. The time of its launch is then negligible.
GRAPH_MS = 2.0
# Duration of a measurement in milliseconds, within the limits of the number of replays.
REPLAY_MS = 60.0
MIN_REPLAYS, MAX_REPLAYS = 5, 40
# Maximum number of calls in a graph.
MAX_GRAPH_CALLS = 512


class Stage:
    """A device under test. With `is_dry`, shapes are tiny, and times are meaningless.

    With `is_compiling`, a step is called once and not timed, and sections omit baselines.
    """

    def __init__(
        self, device: str | torch.device, *, is_dry: bool = False, is_compiling: bool = False
    ) -> None:
        self.device = torch.device(device)
        self.is_dry = is_dry
        self.is_compiling = is_compiling

    @property
    def is_gpu(self) -> bool:
        """Whether the device has events, graphs and separate memory."""
        return self.device.type == "cuda"

    @property
    def cache_bytes(self) -> int:
        """Size of the last-level cache of a GPU, in bytes."""
        return int(torch.cuda.get_device_properties(self.device).L2_cache_size)

    def randn(self, *shape: int) -> torch.Tensor:
        """Return normal random values in bfloat16."""
        return torch.randn(shape, dtype=torch.bfloat16, device=self.device)

    def reset_peak(self) -> None:
        """Free unused memory, and restart the measurement of the peak memory."""
        self.free_memory()
        if self.is_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)

    def read_peak_bytes(self) -> int | None:
        """Return the peak of allocated memory in bytes, or None on a CPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.is_gpu else None

    def free_memory(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()  # does nothing without a GPU

    def synchronize(self) -> None:
        """Wait for all work on the device, and raise its errors."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def record_time(self) -> Any:
        """Return the current time: a recorded event of the device, or on a CPU the seconds."""
        if not self.is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_lost(self) -> bool:
        """Return whether the device refuses further work, as after an illegal memory access."""
        try:
            self.synchronize()
        except RuntimeError:
            return True
        return False

    def count_buffers(self, buffer_bytes: int) -> int:
        """Return the number of buffers that fill four times the device's cache, at most 256."""
        if self.is_compiling:
            return 1
        if self.is_dry:
            return 2
        num_buffers = math.ceil(4 * self.cache_bytes / max(buffer_bytes, 1))
        return max(1, min(num_buffers, 256))

    def count_launches(self, steps: Sequence[Step]) -> float | None:
        """Return the average number of kernels, copies and fills of a step, or None on a CPU.

        All steps run, because the first layer of a model's step also makes the mask.
        """
        if not self.is_gpu or self.is_compiling:
            return None
        self.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for step in steps:
                step()
            self.synchronize()
        device_types = [event.device_type for event in profiler.events() or ()]
        return device_types.count(DeviceType.CUDA) / len(steps) or None

    def time_steps(self, steps: Sequence[Step], *, is_eager: bool = False) -> dict[str, Any]:
        """Return the time of a step in µs. All `steps` do equal work, and run alternately.

        The result has the median (`us`), the `calls` in one replay, and a `note` if no graph could
        be captured. With `is_eager`, Python makes each call.
        """
        # `triton.testing.do_bench_cudagraph` calls a step dozens of times before it captures it. By
        # then, a growing cache needs a new page, which no graph can allocate.

        def run(num_rounds: int = 1) -> None:
            for _ in range(num_rounds):
                for step in steps:
                    step()

        if self.is_compiling:
            steps[0]()
            self.synchronize()
            return {}
        if not self.is_gpu:
            start = time.perf_counter()
            run()
            return {"us": 1e6 * (time.perf_counter() - start) / len(steps), "calls": len(steps)}
        note_fields = {}
        if not is_eager:
            try:
                replay, num_rounds = _capture_graph(run, len(steps))
                return _time_replays(replay, num_rounds * len(steps))
            except RuntimeError as error:
                # Eager calls are still a result, although their launches take time.
                note_fields = {"note": f"no graph: {str(error).splitlines()[0]}"}
                self.synchronize()
        run()
        return _time_replays(run, len(steps)) | note_fields


def _capture_graph(run: Callable[..., None], num_steps: int) -> tuple[Step, int]:
    """Return the replay of a graph of at least `GRAPH_MS` ms, and its number of rounds."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(2)
    torch.cuda.current_stream().wait_stream(stream)
    num_rounds = 1
    while True:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(num_rounds)
        milliseconds = _time_runs(graph.replay, 1)
        next_rounds = min(int(GRAPH_MS / milliseconds) + 1, MAX_GRAPH_CALLS // num_steps)
        if num_rounds > 1 or next_rounds <= 1 or milliseconds >= GRAPH_MS / 2:
            return graph.replay, num_rounds
        num_rounds = next_rounds


def _time_replays(run: Step, num_calls: int) -> dict[str, Any]:
    num_runs = max(MIN_REPLAYS, min(int(REPLAY_MS / _time_runs(run, 1)), MAX_REPLAYS))
    return {"us": 1e3 * _time_runs(run, num_runs) / num_calls, "calls": num_calls}


def _time_runs(run: Step, num_runs: int) -> float:
    """Return the median time of `num_runs` runs, in milliseconds."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(num_runs)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(max(start.elapsed_time(end), 1e-3) for start, end in events)
