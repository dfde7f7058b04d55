"""Time several functions alternately."""

import functools
import random
import time
from collections.abc import Callable, Mapping

import torch

Step = Callable[[], object]


def take_turns(
    steps: Mapping[str, Step], num_turns: int, device: str = "cpu"
) -> dict[str, list[float]]:
    """Run each step once in each turn, after a warm-up turn, and return the seconds of each run.

    A busy machine slows down all steps of a turn. Their order changes from turn to turn, because
    torch's threads spin for a while after a step and disturb the next step.
    """
    is_gpu = torch.device(device).type == "cuda"
    wait: Step = functools.partial(torch.cuda.synchronize, device) if is_gpu else (lambda: None)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    shuffle = random.Random(0).shuffle
    for turn in range(num_turns + 1):
        for name in order:
            wait()
            start = time.perf_counter()
            steps[name]()
            wait()
            if turn > 0:
                seconds[name].append(time.perf_counter() - start)
        shuffle(order)
    return seconds


def compute_ratios(seconds: Mapping[str, list[float]], name: str, baseline: str) -> list[float]:
    """Return the time of a step divided by the time of step `baseline`, for each turn."""
    return [
        time / baseline_time
        for time, baseline_time in zip(seconds[name], seconds[baseline], strict=True)
    ]
