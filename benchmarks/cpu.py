"""Decode steps of rotated formats against the format that needs no rotation, on a CPU."""

from collections.abc import Callable, Sequence

import torch

from hf_fp8kv.bench.contenders import E3M4, Setup, make_steps, ratios, take_turns
from hf_fp8kv.bench.reporting import make_row
from hf_fp8kv.utils.environment import describe_run

from .shared import TURNS, Result, main

# The rotated formats of the default.
ROTATED = ("FP8PagedCache e2m5", "FP8PagedCache int8")


def measure_rotation(
    *,
    setup: Setup | None = None,
    context: Sequence[int] = (4096, 16384),
    turns: int = 90,
    progress: Callable[[str], None],
) -> Result:
    """Return the time of rotated formats relative to E3M4, in many turns of these three alone.

    The formats differ by less than what other contenders leave behind in the CPU's caches, so
    `hf-fp8kv bench speed` cannot show it.
    """
    setup, run, rows = setup or Setup(), describe_run("cpu"), []
    with torch.inference_mode():
        for tokens in context:
            progress(f"decode steps at {tokens} tokens")
            steps = make_steps(tokens, setup)
            seconds = take_turns({name: steps[name] for name in (E3M4, *ROTATED)}, turns)
            rows += [
                make_row("decode step, ratio", name, ratios(seconds, name, E3M4), "×",
                         context=tokens, against=E3M4)
                for name in ROTATED
            ]  # fmt: skip
    settings = {"heads": list(setup.heads), "context": list(context), "turns": turns}
    return {**run, "settings": settings, "rows": rows}


if __name__ == "__main__":
    main(__doc__, measure_rotation, TURNS)
