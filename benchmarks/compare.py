"""Time the hot loops of two source trees of the package alternately.

A process for each tree runs the loops of `hot_loops.py`. The processes alternate, so a busy machine
slows both of them down. The result is the median of the ratios within a turn. Tools such as pyperf
finish one tree before they start the next.

    git worktree add /tmp/before HEAD~1
    python -m benchmarks.compare /tmp/before --turns 30 --backend cpu
"""

import contextlib
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from . import hot_loops
from .shared import TURNS_OPTION, Result, compute_quartiles, exchange_line, main

THIS_TREE = Path(__file__).parents[1]
OLD, NEW = 0, 1  # indices of the processes


def compare_trees(
    old: Path | str,
    new: Path | str = THIS_TREE,
    *,
    turns: int = 30,
    backend: str = "auto",
    loop_prefix: str = "",
    progress: Callable[[str], None],
) -> Result:
    """Return a row for each hot loop: `loop`, `old` and `new` in µs, `ratio`, `low` and `high`.

    Args:
        old: Folder that contains a folder `hf_fp8kv`.
        new: Folder like `old`, of the tree to compare with it.
        turns: Number of timed turns of each loop in each tree. One untimed turn comes first.
        backend: Backend of `FP8PagedCache`.
        loop_prefix: Prefix of the names of the loops to run.
        progress: Function that is called with the number of the turn.

    Raises:
        RuntimeError: A tree cannot run the loops.
    """
    # With -P, Python does not import from the script's folder. With -u, it does not buffer output.
    command = [sys.executable, "-P", "-u", str(hot_loops.__file__), backend, loop_prefix]
    rng = random.Random(0)
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen(
                command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": str(Path(tree).resolve())},
            ))
            for tree in (old, new)
        ]  # fmt: skip
        old_loops, _ = map(exchange_line, processes)
        us_by_loop: dict[str, list[tuple[float, float]]] = {name: [] for name in old_loops}
        for turn in range(turns + 1):
            progress(f"turn {turn} of {turns}")
            for name in us_by_loop:
                turn_us = {
                    index: exchange_line(processes[index], name)
                    for index in rng.sample((OLD, NEW), 2)
                }
                if turn:
                    us_by_loop[name].append((turn_us[OLD], turn_us[NEW]))
    rows = []
    for name, loop_us in us_by_loop.items():
        ratio, low, high = compute_quartiles([new_us / old_us for old_us, new_us in loop_us])
        rows.append({
            "loop": name, "old": statistics.median(old_us for old_us, _ in loop_us),
            "new": statistics.median(new_us for _, new_us in loop_us),
            "ratio": ratio, "low": low, "high": high,
        })  # fmt: skip
    return {"rows": rows}


if __name__ == "__main__":
    main(__doc__, compare_trees, {
        "old": {"help": "Source tree to compare with."},
        "--new": {"help": "Source tree to measure. Default: the tree of this file."},
        "--backend": {"help": "Backend of FP8PagedCache. Default: auto."},
        "--loops": {"dest": "loop_prefix", "help": "Prefix of the names of the loops to run."},
        **TURNS_OPTION,
    })  # fmt: skip
