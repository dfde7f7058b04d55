"""Search for the fastest launch parameters of the decode kernel and its plan, one at a time."""

from collections.abc import Sequence
from typing import Any

from ...ops.triton import tuning
from .decode import measure_pages
from .record import Record
from .shapes import KINDS, Case, Kind, Sizes

SECTION = "experiments"
# Where the search may begin. Two warps do a third less work per tile than four (the query is read
# from shared memory by each warp), with more registers each and one program more.
STARTS: tuple[dict[str, Any], ...] = ({}, {"warps": 2, "registers": 255, "programs": 4})
# What is tried of each parameter, the others being the best so far.
GRID: dict[str, tuple[Any, ...]] = {
    "tile": (32, 64, 128),
    "programs": (1, 2, 3, 4, 6),
    "stages": (2, 3, 4, 5),
    "warps": (2, 4, 8),
    "registers": (None, 128, 168),
    "combine": ("kernel", "last"),
    "unit": (64, 128),
    "rounds": (1, 2, 4),
    # Tokens; so many that no sequence is split.
    "split_cost": (0, 160, 640, 10**6),
    "merge_cost": (0.0, 2.5, 10.0),
}


def measure(record: Record, sizes: Sizes, backend: str) -> None:
    """Add a row for each attempt; `kind` and `parameters` say what it was."""
    cases: Sequence[Case] = [
        Case((32768,) * 16), Case((32768,) * 50), Case((32768,)), Case((1024,)),
    ]  # fmt: skip
    kinds: Sequence[Kind] = KINDS
    if record.stage.dry:
        cases, kinds = sizes.decode[:1], KINDS[:1]
    for kind in kinds:
        for case in cases:
            _search(record, sizes, backend, case, kind)


def _search(record: Record, sizes: Sizes, backend: str, case: Case, kind: Kind) -> None:
    times = [_attempt(record, sizes, backend, case, kind, start) for start in STARTS]
    fastest = min(times)
    best = STARTS[times.index(fastest)]
    for parameter, values in GRID.items():
        chosen = best
        for value in values[:2] if record.stage.dry else values:
            tried = {**best, parameter: value}
            us = _attempt(record, sizes, backend, case, kind, tried)
            if us < fastest:
                fastest, chosen = us, tried
        best = chosen


def _attempt(
    record: Record, sizes: Sizes, backend: str, case: Case, kind: Kind, parameters: dict[str, Any]
) -> float:
    """Return the microseconds with these parameters; infinite if it failed or was not tried."""
    text = ", ".join(f"{key} {value}" for key, value in parameters.items()) or "as it is"
    name = f"{kind.name}: {text}"
    # Many launch parameters cannot work (too much shared memory): that is one failed row.
    with tuning.override(**parameters):
        measure_pages(record, sizes, backend, SECTION, case, kind, name)
    for row in record.find(SECTION, case=str(case), name=name):
        row["parameters"], row["kind"] = parameters, kind.name
        return float(row["us"])
    return float("inf")
