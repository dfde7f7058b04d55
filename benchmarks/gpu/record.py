"""Record the rows of a run, one per section, case and contender, with numbers or a failure."""

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch

from .goals import MISSED, UNKNOWN, Row, find_rows, judge
from .stage import Stage

# Rounding to 16 bits gives a relative RMS error of 0.1 to 0.4 %. A lost page gives 4 % at 32k
# tokens, and 2 % at 128k.
TOLERANCE = 0.01

# Measures one contender, and returns fields of its row.
Work = Callable[[], dict[str, Any]]


class DeviceLost(RuntimeError):
    """The device refuses further work in this process."""


class Record:
    """The rows of a run, and the clock of the current section.

    Attributes:
        rows: All rows so far.
        skipped: Rows that the current section left out, with reasons.
        report: Called with progress messages.

    A record with the share `(index, count)` measures every `count`-th row, from `index` on.
    """

    def __init__(
        self,
        stage: Stage,
        report: Callable[[str], None] = lambda _message: None,
        keep: Callable[[], None] = lambda: None,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        self.stage, self.report, self._keep, self._share = stage, report, keep, share
        self.rows: list[Row] = []
        self.skipped: list[str] = []
        self._ends = float("inf")
        self._took: dict[tuple[str, str], float] = {}
        self._rows_requested = itertools.count()

    def begin(self, seconds: float) -> list[str]:
        """Start a section with a time limit, and return its list of skipped rows."""
        self._ends = time.perf_counter() + seconds
        self.skipped = []
        return self.skipped

    def seconds_left(self) -> float:
        """Return the remaining seconds of the section."""
        return self._ends - time.perf_counter()

    def skip(self, row: str) -> None:
        """Record a row that is not measured, and report it."""
        self.skipped.append(row)
        self.report(f"skipped: {row}")

    def measure(self, section: str, case: object, name: str, work: Work) -> Row | None:
        """Add a row with the result of `work` or with its error, and return the row.

        The result is None, and the row is skipped, if the section has less time than the
        contender's fastest row took, or if the device has too little memory. It is also None if
        the row belongs to the share of another process.

        Raises:
            DeviceLost: The device refuses further work.
        """
        place, (index, count) = f"{section}, {case}, {name}", self._share
        if next(self._rows_requested) % count != index:
            return None
        if self.seconds_left() <= self._took.get((section, name), 0.0):
            self.skip(f"{place}: no time left")
            return None
        row: Row = {"section": section, "case": str(case), "name": name}
        began, lost, is_out_of_memory = time.perf_counter(), None, False
        try:
            row |= {key: value for key, value in work().items() if value is not None}
        except torch.OutOfMemoryError:
            is_out_of_memory = True
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            row["failed"] = f"{type(error).__name__}: {' '.join(lines[:2])}"[:300]
            lost = error if self.stage.is_lost() else None
        if is_out_of_memory or ("failed" in row and lost is None):
            # Not in the handlers, because an exception refers to the tensors of its frames.
            self.stage.clean()
        if is_out_of_memory:
            self.skip(f"{place}: out of memory")
            return None
        if not row.get("error", 0.0) < TOLERANCE:
            # A wrong result has no speed.
            row.pop("us", None)
            row["failed"] = f"relative error {row['error']:.1e}, at most {TOLERANCE:g} is rounding"
        took = time.perf_counter() - began
        # A first row compiles, so the fastest row counts.
        self._took[section, name] = min(took, self._took.get((section, name), took))
        self.report(f"{place}: {took:.1f} s")
        self.rows.append(row)
        self._keep()
        if lost is not None:
            raise DeviceLost(f"lost the device: {place}: {lost}") from lost
        return row

    def find(self, section: str, **fields: Any) -> list[Row]:
        """Return the rows of a section with these fields that did not fail."""
        return find_rows(self.rows, section, **fields)


def complete(result: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with `ceilings`, the bandwidth and rate of each row, and `goals`."""
    rows = [dict(row) for row in result["rows"]]
    for row in rows:
        for field, rate, scale in (("moved", "gb_per_s", 1e3), ("flops", "tflops", 1e6)):
            if row.get("us") and field in row:
                row[rate] = row[field] / row["us"] / scale
    ceilings: dict[str, float | None] = {}
    for case, rate in (("copy", "gb_per_s"), ("read", "gb_per_s"), ("matmul", "tflops")):
        reached = [row[rate] for row in find_rows(rows, "ceilings", case=case) if rate in row]
        ceilings[f"{case}_{rate}"] = top = max(reached, default=None)
        for row in rows:
            if row["section"] != "ceilings" and rate in row and top:
                row[f"of_{case}"] = row[rate] / top
    result = {**result, "ceilings": ceilings, "rows": rows}
    return {**result, "goals": judge(result)}


def summarize(result: dict[str, Any]) -> dict[str, Any]:
    """Return a summary that fits on one line."""
    states: dict[str, list[str]] = {}
    for goal in result["goals"]:
        states.setdefault(goal["state"], []).append(goal["what"])
    worst = {goal["what"]: goal["worst"] for goal in result["goals"]}
    return {
        "gpu": result["hardware"].get("gpu"),
        "dry": result["settings"]["dry"],
        **{name: value and round(value, 1) for name, value in result["ceilings"].items()},
        "goals": {what: value and round(value, 3) for what, value in worst.items()},
        "missed": states.get(MISSED, []),
        "not measured": states.get(UNKNOWN, []),
        "failed": sum("failed" in row for row in result["rows"]),
        "errors": [section["name"] for section in result["sections"] if section["error"]],
        "unfinished": [s["name"] for s in result["sections"] if s["seconds"] is None],
    }
