"""Two source trees of the package, turn by turn: `python -m hf_fp8kv.bench.compare OLD_TREE`.

A process for each tree runs the loops of `hot_loops.py`. The two take turns, so that a busy machine
slows both of them down, and what counts is the median of the ratios within a turn.

    git worktree add /tmp/before HEAD~1
    python -m hf_fp8kv.bench.compare /tmp/before --turns 30 --backend numba
"""

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Self

from . import hot_loops
from .reporting import build_table, format_number, quartiles

__all__ = ["compare_trees"]

NEW = Path(__file__).parents[2]


class _Tree:
    """A process that runs the hot loops with the package of one source tree."""

    def __init__(self, tree: Path, backend: str, prefix: str) -> None:
        # -P: the folder of the script is no place to import from.
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(hot_loops.__file__), backend, prefix], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(tree.resolve())},
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()

    def read(self) -> str:
        """Return the next line that the process writes."""
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"a process ended with {self.process.wait()}: {self.process.args!r}")
        return line

    def measure(self, name: str) -> float:
        """Return the microseconds per layer and step of one turn of a loop."""
        assert self.process.stdin is not None
        self.process.stdin.write(name + "\n")
        self.process.stdin.flush()
        return float(self.read())


def compare_trees(
    old: Path, new: Path = NEW, *, turns: int = 30, backend: str = "auto", loops: str = ""
) -> list[dict[str, object]]:
    """Return a row for each hot loop: `loop`, `old` and `new` in µs, `ratio`, `low` and `high`.

    Args:
        old, new: folders that hold a folder `hf_fp8kv`.
        turns: of each loop in each tree; the first one more does not count.
        backend: of FP8PagedCache.
        loops: how the names of the loops to run begin.

    Raises:
        RuntimeError: a tree cannot run the loops.
    """
    shuffle = random.Random(0).shuffle
    order = [0, 1]
    with contextlib.ExitStack() as stack:
        trees = [stack.enter_context(_Tree(tree, backend, loops)) for tree in (old, new)]
        names, _ = [json.loads(tree.read()) for tree in trees]
        pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for turn in range(turns + 1):
            for name in names:
                shuffle(order)
                taken = {which: trees[which].measure(name) for which in order}
                if turn:
                    pairs[name].append((taken[0], taken[1]))
    rows: list[dict[str, object]] = []
    for name, measured in pairs.items():
        ratio, low, high = quartiles([after / before for before, after in measured])
        before, after = (quartiles([pair[which] for pair in measured])[0] for which in (0, 1))
        rows.append({"loop": name, "old": before, "new": after, "ratio": ratio,
                     "low": low, "high": high})  # fmt: skip
    return rows


def main() -> None:
    """Read the command line and print the ratios."""
    from rich.console import Console

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("old", type=Path, help="the source tree to compare with")
    parser.add_argument("--new", type=Path, default=NEW, help="default: the tree of this module")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--loops", default="", help="only those whose names begin so")
    given = parser.parse_args()
    rows = compare_trees(
        given.old, given.new, turns=given.turns, backend=given.backend, loops=given.loops
    )
    keys = ("old", "new", "ratio", "low", "high")
    table = build_table(
        {"µs per layer and step": "left", **dict.fromkeys(keys, "right")},
        ([str(row["loop"]), *(format_number(row[key]) for key in keys)] for row in rows),  # type: ignore[arg-type]
    )
    Console().print(table)


if __name__ == "__main__":
    main()
