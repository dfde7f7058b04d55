"""Search for the fastest launch parameters of the decode kernel, one parameter at a time."""

from dataclasses import replace
from typing import Any

from hf_fp8kv.ops.triton.target import assuming, get_target

from .attention import measure_pages
from .goals import find_rows
from .record import Record
from .shapes import PAGE_FORMATS, Case, PageFormat, RunSizes

SECTION = "experiments"
Parameters = dict[str, Any]


def _list_values(name: str, *values: Any) -> list[Parameters]:
    return [{name: value} for value in values]


# Parameters to try, the least certain first. Each search starts from the best parameters so far.
SEARCHES: dict[str, list[Parameters]] = {
    # The product is codes times rows, or rows times codes, which is designed for four warps.
    "operands": [{"swapped": True}, {"swapped": False, "warps": 4}],
    "warps": _list_values("warps", 1, 2, 4, 8),
    "tile": [{"tile": n, "masked_tile": max(16, n // 2)} for n in (32, 64, 128)],
    "masked tile": _list_values("masked_tile", 16, 32, 64),
    "stages": _list_values("stages", 2, 3, 4, 5),
    "registers": _list_values("registers", None, 128, 168),
    "programs": _list_values("programs", 1, 2, 3, 4, 6, 8),
    # The cost in tokens. With the last value, no sequence is split.
    "split cost": _list_values("split_cost", 0, 160, 640, 10**6),
    "merge cost": _list_values("merge_cost", 0.0, 2.5, 10.0),
    "growth": _list_values("max_growth", 1, 2, 4),
    "unit": _list_values("unit", 64, 128),
}
# Only kernels for latents have these parameters.
LATENT_SEARCHES: dict[str, list[Parameters]] = {
    "rows": _list_values("rows", 16, 32, 64),
    "isolated": _list_values("isolated", False, True),
    **SEARCHES,
}
CASES = [Case((1024 * n,) * batch) for batch, n in ((8, 32), (1, 1), (64, 32), (50, 32), (1, 32))]
LATENT_CASES = ("16 heads, 16 x 16k", "128 heads, 1 x 16k")


def measure(record: Record, sizes: RunSizes, backend: str) -> None:
    """Add a row for each set of launch parameters, with fields for its `kind` and `parameters`."""
    is_dry = record.stage.is_dry
    latents = [case for case in sizes.latent_cases if is_dry or str(case) in LATENT_CASES]
    cases = [*sizes.decode_cases[:1], *latents] if is_dry else [*CASES[:1], *latents, *CASES[1:]]
    formats = sorted(PAGE_FORMATS, key=lambda fmt: fmt.full_cases_only)[: 1 if is_dry else None]
    for case in cases:
        for fmt in sizes.layer_formats if case.heads.rope_dim and not is_dry else formats:
            _search_best(record, sizes, backend, case, fmt)


def _search_best(
    record: Record, sizes: RunSizes, backend: str, case: Case, fmt: PageFormat
) -> None:
    """Measure the default, then the candidates of each search on top of the best parameters."""
    best: Parameters = {}
    fastest = _measure_parameters(record, sizes, backend, case, fmt, best)
    for candidates in (LATENT_SEARCHES if case.heads.rope_dim else SEARCHES).values():
        next_best = best
        for candidate in candidates[:2] if record.stage.is_dry else candidates:
            parameters = {**best, **candidate}
            us = _measure_parameters(record, sizes, backend, case, fmt, parameters)
            if us < fastest:
                fastest, next_best = us, parameters
        best = next_best


def _measure_parameters(
    record: Record, sizes: RunSizes, backend: str, case: Case, fmt: PageFormat,
    parameters: Parameters,
) -> float:  # fmt: skip
    """Return the time in us, which is infinite if the parameters fail or the row is skipped."""
    description = ", ".join(f"{key} {value}" for key, value in parameters.items()) or "default"
    name = f"{fmt.name}: {description}"
    if previous_rows := find_rows(record.rows, SECTION, case=str(case), name=name):
        return float(previous_rows[0]["us"])
    # Rows of impossible parameters, such as tiles larger than shared memory, fail.
    with assuming(replace(get_target(record.stage.device), parameters=parameters)):
        row = measure_pages(record, sizes, backend, SECTION, case, fmt, name)
    if row is None:
        return float("inf")
    row |= {"parameters": parameters, "kind": fmt.name}
    return float(row.get("us", "inf"))
