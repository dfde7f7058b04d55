"""Record the rows of a run. Each contender has a row in each case, with values or a failure."""

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch

from .stage import Stage

# Rounding to 16 bits gives a relative RMS error of 0.1 to 0.4 %. A lost page gives 4 % at 32k
# tokens, and 2 % at 128k.
TOLERANCE = 0.01

Row = dict[str, Any]
# Fields of a row: an amount, its rate, and the amount per microsecond that makes a rate of 1.
_RATES = (("moved", "gb_per_s", 1e3), ("flops", "tflops", 1e6))
# The rate that is a ceiling, by the case of the section "ceilings".
_CEILING_RATES = {"copy": "gb_per_s", "read": "gb_per_s", "matmul": "tflops"}


class Record:
    """The rows of a run, and the time limit of the current section.

    Attributes:
        rows: All rows so far.
        skipped: Messages about rows that the current section did not measure.
        report: Function that is called with progress messages.
        save: Function that stores the rows, after each row and each change of a row.

    With the shard `(index, num_shards)`, every `num_shards`-th row is measured, from row `index`.
    """

    def __init__(
        self,
        stage: Stage,
        report: Callable[[str], None] = lambda _message: None,
        save: Callable[[], None] = lambda: None,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        self.stage = stage
        self.report = report
        self.save = save
        self._shard = shard
        self.rows: list[Row] = []
        self.skipped: list[str] = []
        self._deadline = float("inf")
        self._fastest_seconds: dict[tuple[str, str], float] = {}
        self._row_indices = itertools.count()

    def begin(self, seconds: float) -> list[str]:
        """Start a section with a time limit. Return the list of its messages about skipped rows."""
        self._deadline = time.perf_counter() + seconds
        self.skipped = []
        return self.skipped

    def compute_seconds_left(self) -> float:
        return self._deadline - time.perf_counter()

    def skip(self, message: str) -> None:
        """Record a row that is not measured. The message names the row, and ends in the reason."""
        self.skipped.append(message)
        self.report(f"skipped: {message}")

    def measure(
        self, section: str, case: object, name: str, measure_row: Callable[[], Row]
    ) -> Row | None:
        """Add a row with the fields that `measure_row` returns, or with its error. Return the row.

        Skip the row and return None if the section has less time than the contender's fastest row
        took, or if the device has too little memory. Also return None if the row belongs to the
        shard of another process.

        Raises:
            RuntimeError: The device refuses further work in this process.
        """
        label = f"{section}, {case}, {name}"
        shard_index, num_shards = self._shard
        if next(self._row_indices) % num_shards != shard_index:
            return None
        if self.compute_seconds_left() <= self._fastest_seconds.get((section, name), 0.0):
            self.skip(f"{label}: no time left")
            return None
        row: Row = {"section": section, "case": str(case), "name": name}
        start = time.perf_counter()
        device_error = None
        is_out_of_memory = False
        try:
            row |= {field: value for field, value in measure_row().items() if value is not None}
        except torch.OutOfMemoryError:
            is_out_of_memory = True
        except Exception as error:
            message_lines = str(error).strip().splitlines() or [""]
            row["failed"] = f"{type(error).__name__}: {' '.join(message_lines[:2])}"[:300]
            device_error = error if self.stage.is_lost() else None
        if is_out_of_memory or ("failed" in row and device_error is None):
            # The handlers cannot free memory, because an exception refers to its frames' tensors.
            self.stage.free_memory()
        if is_out_of_memory:
            self.skip(f"{label}: out of memory")
            return None
        if not row.get("error", 0.0) < TOLERANCE:
            # A wrong result has no speed.
            row.pop("us", None)
            row["failed"] = f"expected a relative error below {TOLERANCE:g}, got {row['error']:.1e}"
        seconds = time.perf_counter() - start
        # The first row of a contender compiles its kernels, so the fastest row counts.
        self._fastest_seconds[section, name] = min(
            seconds, self._fastest_seconds.get((section, name), seconds)
        )
        self.report(f"{label}: {seconds:.1f} s")
        self.rows.append(row)
        self.save()
        if device_error is not None:
            raise RuntimeError(f"lost the device: {label}: {device_error}") from device_error
        return row


def complete(result: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with `ceilings`, the rates of each row, and the rates' shares of a ceiling."""
    rows = [dict(row) for row in result["rows"]]
    for row in rows:
        for amount, rate, per_us in _RATES:
            if row.get("us") and amount in row:
                row[rate] = row[amount] / row["us"] / per_us
    ceilings: dict[str, float | None] = {}
    for case, rate in _CEILING_RATES.items():
        ceiling_rows = [row for row in rows if (row["section"], row["case"]) == ("ceilings", case)]
        ceiling = max((row[rate] for row in ceiling_rows if rate in row), default=None)
        ceilings[f"{case}_{rate}"] = ceiling
        for row in rows:
            if row["section"] != "ceilings" and rate in row and ceiling:
                row[f"of_{case}"] = row[rate] / ceiling
    return {**result, "ceilings": ceilings, "rows": rows}


def summarize(result: dict[str, Any]) -> dict[str, Any]:
    """Return a summary of a result that fits on one line of JSON."""
    return {
        "gpu": result["hardware"].get("gpu"),
        "dry": result["settings"]["dry"],
        **{name: rate and round(rate, 1) for name, rate in result["ceilings"].items()},
        "rows": len(result["rows"]),
        "failed": sum("failed" in row for row in result["rows"]),
        "errors": [section["name"] for section in result["sections"] if section["error"]],
        "unfinished": [
            section["name"] for section in result["sections"] if section["seconds"] is None
        ],
    }
