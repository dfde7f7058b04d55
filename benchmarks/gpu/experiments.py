"""Search for the fastest launch parameters of the decode kernel, one parameter at a time."""

from dataclasses import replace
from typing import Any

from hf_fp8kv.ops.triton.target import assuming, target_of

from .attention import measure_pages
from .record import Record
from .shapes import KINDS, Case, Kind, Sizes

SECTION = "experiments"
Parameters = dict[str, Any]


def _each(name: str, *values: Any) -> list[Parameters]:
    return [{name: value} for value in values]


# Parameters to search, the least certain first. Each search starts from the best values so far.
SWITCHES: dict[str, list[Parameters]] = {
    # The product is codes times rows, or rows times codes, which is designed for four warps.
    "operands": [{"swapped": True}, {"swapped": False, "warps": 4}],
    "warps": _each("warps", 1, 2, 4, 8),
    "tile": [{"tile": n, "masked_tile": max(16, n // 2)} for n in (32, 64, 128)],
    "masked tile": _each("masked_tile", 16, 32, 64),
    "stages": _each("stages", 2, 3, 4, 5),
    "registers": _each("registers", None, 128, 168),
    "programs": _each("programs", 1, 2, 3, 4, 6, 8),
    # The unit is tokens. The last value splits no sequence.
    "split cost": _each("split_cost", 0, 160, 640, 10**6),
    "merge cost": _each("merge_cost", 0.0, 2.5, 10.0),
    "unit": _each("unit", 64, 128),
}
# Only kernels for latents have these parameters.
LATENT_SWITCHES: dict[str, list[Parameters]] = {
    "rows": _each("rows", 16, 32, 64),
    "chunks": _each("chunks", 1, 2, 4),
    **SWITCHES,
}
CASES = [Case((1024 * n,) * batch) for batch, n in ((8, 32), (1, 1), (64, 32), (50, 32), (1, 32))]
LATENT_CASES = ("16 heads, 16 x 16k", "128 heads, 1 x 16k")


def measure(record: Record, sizes: Sizes, backend: str) -> None:
    """Add a row for each attempt, with its `kind` and `parameters`."""
    is_dry = record.stage.dry
    latents = [case for case in sizes.latents if is_dry or str(case) in LATENT_CASES]
    cases = [*sizes.decode[:1], *latents] if is_dry else [*CASES[:1], *latents, *CASES[1:]]
    kinds = KINDS[:1] if is_dry else sorted(KINDS, key=lambda kind: kind.is_rare)
    for case in cases:
        for kind in sizes.layer_kinds if case.heads.positions and not is_dry else kinds:
            _search(record, sizes, backend, case, kind)


def _search(record: Record, sizes: Sizes, backend: str, case: Case, kind: Kind) -> None:
    best: Parameters = {}
    fastest = _attempt(record, sizes, backend, case, kind, best)
    for values in (LATENT_SWITCHES if case.heads.positions else SWITCHES).values():
        chosen = best
        for value in values[:2] if record.stage.dry else values:
            parameters = {**best, **value}
            us = _attempt(record, sizes, backend, case, kind, parameters)
            if us < fastest:
                fastest, chosen = us, parameters
        best = chosen


def _attempt(
    record: Record, sizes: Sizes, backend: str, case: Case, kind: Kind, parameters: Parameters
) -> float:
    """Return the microseconds with these parameters, infinite if they failed or were skipped."""
    text = ", ".join(f"{key} {value}" for key, value in parameters.items()) or "default"
    name = f"{kind.name}: {text}"
    if done := record.find(SECTION, case=str(case), name=name):
        return float(done[0]["us"])
    # Some parameters cannot work, such as tiles larger than shared memory. Their rows fail.
    with assuming(replace(target_of(record.stage.device), parameters=parameters)):
        row = measure_pages(record, sizes, backend, SECTION, case, kind, name)
    if row is None:
        return float("inf")
    row |= {"parameters": parameters, "kind": kind.name}
    return float(row.get("us", "inf"))
