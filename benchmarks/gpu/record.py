"""Record of a run: rows, what failed, what there was no time for."""

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from .results import Row, find_rows
from .timing import Stage, Timed

# A relative RMS above this is not rounding to 16 bits, which gives 0.1 to 0.4 %; one lost page is
# worth 4 % at 32k tokens, and 2 % at 128k.
TOLERANCE = 0.01

# Measures one thing, and returns fields of its row.
Work = Callable[[], dict[str, Any]]


class DeviceLost(RuntimeError):
    """The device refuses all further work in this process."""


class Record:
    """Rows, and the clock of the section that is measured; rows are appended to `rows` in place.

    Attributes:
        report: called with what is done next.
        banned: contenders that lost the device once, and are not tried again.
        skipped: what the section that is measured had no time or no memory for.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        progress: Callable[[str], None],
        keep: Callable[[], None] = lambda: None,
        rows: list[Row] | None = None,
        banned: list[str] | None = None,
    ) -> None:
        self.stage, self.report, self._keep = stage, progress, keep
        self.rows = [] if rows is None else rows
        self.banned = [] if banned is None else banned
        self.skipped: list[str] = []
        self._done = {_key(row) for row in self.rows}
        self._ends = float("inf")

    def begin(self, seconds: float) -> list[str]:
        """Begin a section that has so many seconds, and return the list of what it will skip."""
        self._ends = time.perf_counter() + seconds
        self.skipped = []
        return self.skipped

    def seconds_left(self) -> float:
        """Return the seconds that the section still has."""
        return self._ends - time.perf_counter()

    def skip(self, what: str) -> None:
        """Note that something was not measured, and why."""
        self.skipped.append(what)
        self.report(f"skipped: {what}")

    def is_wanted(
        self, section: str, case: str, name: str, seconds: float = 0.0, size: float = 0.0
    ) -> bool:
        """Return whether to measure this; what has no `seconds` or no `size` bytes is skipped."""
        if (section, case, name) in self._done or name in self.banned:
            return False
        if self.seconds_left() < seconds or self.seconds_left() <= 0:
            self.skip(f"{section}, {case}, {name}: no time left")
            return False
        free = self.stage.free()
        if size > free:
            need = f"needs {size / 2**30:.0f} GiB, {free / 2**30:.0f} GiB are free"
            self.skip(f"{section}, {case}, {name}: {need}")
        return size <= free

    def measure(
        self, section: str, case: object, name: str, work: Work, **needs: float
    ) -> Row | None:
        """Add a row with what `work` returns, or with its error, and return it; None: not wanted.

        `needs` are the seconds and the bytes that `is_wanted` asks about.

        Raises:
            DeviceLost: `work` left the device unusable.
        """
        case = str(case)
        if not self.is_wanted(section, case, name, **needs):
            return None
        began = time.perf_counter()
        try:
            fields = work()
        except Exception as error:
            row = self._add(section, case, name, failed=_first_lines(error))
            if self.stage.is_lost():
                self.banned.append(name)
                raise DeviceLost(f"{section}, {case}, {name}: {error}") from error
            self.stage.clean()
            return row
        finally:
            self.report(f"{section}, {case}, {name}: {time.perf_counter() - began:.1f} s")
        return self._add(section, case, name, **fields)

    def _add(self, section: str, case: str, name: str, **fields: Any) -> Row:
        row: Row = {"section": section, "case": case, "name": name}
        timed = fields.pop("timed", None)
        if isinstance(timed, Timed):
            fields = asdict(timed) | fields
        row |= {key: value for key, value in fields.items() if value is not None}
        error = row.get("error")
        if error is not None and not error < TOLERANCE:
            # What is wrong is not a speed.
            row["failed"] = f"relative error {error:.1e} where at most {TOLERANCE:g} is rounding"
        self.rows.append(row)
        self._done.add(_key(row))
        self._keep()
        return row

    def find(self, section: str, **fields: Any) -> list[Row]:
        """Return the rows of a section with these fields that did not fail."""
        return find_rows(self.rows, section, **fields)


def _key(row: Row) -> tuple[str, str, str]:
    return row["section"], row["case"], row["name"]


def _first_lines(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"[:300]
