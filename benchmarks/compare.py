"""Two source trees of the package, turn by turn: `python -m benchmarks.compare OLD_TREE`.

A process for each tree runs the loops of `hot_loops.py`. The two take turns, so that a busy machine
slows both of them down, and what counts is the median of the ratios within a turn.

    git worktree add /tmp/before HEAD~1
    python -m benchmarks.compare /tmp/before --turns 30 --backend numba
"""

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from hf_fp8kv.bench.reporting import build_table, format_number, quartiles

from . import hot_loops

NEW = Path(__file__).parents[2]


def compare_trees(
    old: Path, new: Path = NEW, *, turns: int = 30, backend: str = "auto", loops: str = ""
) -> list[dict[str, Any]]:
    """Return a row for each hot loop: `loop`, `old` and `new` in µs, `ratio`, `low` and `high`.

    `old` and `new` are folders that hold a folder `hf_fp8kv`. Each loop whose name begins with
    `loops` has so many turns in each tree, after one that does not count.

    Raises:
        RuntimeError: a tree cannot run the loops.
    """
    # -P: the folder of the script is no place to import from.
    command = [sys.executable, "-P", str(hot_loops.__file__), backend, loops]
    shuffle, order = random.Random(0).shuffle, [0, 1]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen(
                command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": str(tree.resolve())},
            ))
            for tree in (old, new)
        ]  # fmt: skip
        names, _ = [json.loads(_read_line(process)) for process in processes]
        pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for turn in range(turns + 1):
            for name in names:
                shuffle(order)
                taken = {which: _measure(processes[which], name) for which in order}
                if turn:
                    pairs[name].append((taken[0], taken[1]))
    rows = []
    for name, measured in pairs.items():
        ratio, low, high = quartiles([after / before for before, after in measured])
        before, after = (quartiles(values)[0] for values in zip(*measured, strict=True))
        row = {"loop": name, "old": before, "new": after, "ratio": ratio, "low": low, "high": high}
        rows.append(row)
    return rows


def _measure(process: "subprocess.Popen[str]", name: str) -> float:
    """Return the microseconds per layer and step of one turn of a loop."""
    assert process.stdin is not None
    process.stdin.write(name + "\n")
    process.stdin.flush()
    return float(_read_line(process))


def _read_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    if not (line := process.stdout.readline()):
        raise RuntimeError(f"a process ended with {process.wait()}: {process.args!r}")
    return line


def main() -> None:
    """Read the command line and print the ratios."""
    from rich.console import Console

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("old", type=Path, help="the source tree to compare with")
    parser.add_argument("--new", type=Path, default=NEW, help="default: the tree of this module")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--loops", default="", help="only those whose names begin so")
    keys = ("old", "new", "ratio", "low", "high")
    table = build_table(
        {"µs per layer and step": "left", **dict.fromkeys(keys, "right")},
        [
            [row["loop"], *(format_number(row[key]) for key in keys)]
            for row in compare_trees(**vars(parser.parse_args()))
        ],
    )
    Console().print(table)


if __name__ == "__main__":
    main()
