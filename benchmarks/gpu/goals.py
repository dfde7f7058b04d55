"""Goals, on an H200: met, missed or not measured, from the rows of a result alone."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

Row = dict[str, Any]
# What was measured, by case.
Values = dict[str, float]

# The GPU that goals are for, and what its datasheet promises, in GB/s.
GPU, DATASHEET = "H200", 4800.0
# Tokens of all sequences from which on a decode step is a matter of bandwidth.
LARGE = 2**18
MET, MISSED, UNKNOWN = "met", "missed", "not measured"

FORMATS = ("e4m3", "e3m4")
# "At every batch size": without these nobody knows.
CASES = ("8 x 32k", "50 x 32k", "64 x 32k", "1 x 256k")
PADDED = " left padded"
PAGED, AUTO = "FP8PagedCache compiled", "FP8PagedCache auto compiled"
FLASH = "DynamicCache flash eager"
LATENT, STOCK, ABSORBED = "latent", "DynamicCache", "absorbed in torch"
# The most that a step over latents may take of one that expands them, by query heads; cases of 16k.
EXPANDED = {16: 1 / 20, 128: 1 / 50}
# What generate() could run in 16 bits instead; the first two must have been measured.
STRONG = (FLASH, AUTO, "DynamicCache flash-attn eager", "FP8PagedCache auto eager")
NEEDED = STRONG[:2]


@dataclass(frozen=True)
class Goal:
    """A goal and its state.

    Attributes:
        what: what is judged.
        sign, bound: ">=" or "<=", and of what.
        state: MET, MISSED or UNKNOWN.
        worst, best: of the values; the worst one counts. None: there are none.
        where: the case of the worst one.
        cases: how many values there are.
        why: why it is UNKNOWN, or what failed.
    """

    what: str
    sign: str
    bound: float
    state: str = UNKNOWN
    worst: float | None = None
    best: float | None = None
    where: str = ""
    cases: int = 0
    why: str = ""


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all goals for the rows of a result, as dictionaries."""
    why = ""
    gpu = result.get("hardware", {}).get("gpu")
    if result["settings"]["dry"]:
        why = "a dry run"
    elif GPU not in str(gpu):
        why = f"goals are for an {GPU}, this is {gpu or 'no GPU'}"
    goals = _judge_all(result["rows"])
    return [asdict(replace(goal, state=UNKNOWN, why=why) if why else goal) for goal in goals]


def find_rows(rows: Iterable[Row], section: str, **fields: Any) -> list[Row]:
    """Return the rows of a section with these fields that did not fail."""
    wanted = {"section": section, **fields}.items()
    return [row for row in rows if "failed" not in row and wanted <= row.items()]


def _judge_all(rows: list[Row]) -> Iterator[Goal]:
    for name in FORMATS:
        share = {case: row["gb_per_s"] / DATASHEET for case, row in _large(rows, name).items()}
        what = f"decode {name}, share of {DATASHEET / 1000:g} TB/s, 256k tokens on"
        missing = [case for case in CASES if case not in share]
        failed = _failed(rows, "decode", name, name + PADDED)
        yield _judge(what, ">=", 0.85, share, missing, failed)
    for name, other, most in (("e3m4", "e4m3", 1.05), ("e4m3", "bf16 pages", 0.60)):
        ours, theirs = _large(rows, name), _large(rows, other)
        ratios = {case: ours[case]["us"] / theirs[case]["us"] for case in ours if case in theirs}
        what = f"decode {name}, time over {other}, 256k tokens on"
        yield _judge(what, "<=", most, ratios, failed=_failed(rows, "decode", name))
    layers = [find_rows(rows, "layer", case="1 x 1k", name=name) for name in FORMATS]
    for what, field, bound in (("us", "us", 7), ("launches", "launches", 1)):
        values = {row["name"]: row[field] for (row,) in filter(None, layers) if field in row}
        missing = [name for name in FORMATS if name not in values]
        failed = _failed(rows, "layer", *FORMATS)
        yield _judge(f"one layer of a step, {what}, 1 x 1k", "<=", bound, values, missing, failed)
    writes = {
        f"{row['case']}, {row['name']}": row["us"]
        for row in find_rows(rows, "write")
        if row["case"].endswith("1 token")
    }
    yield _judge("write one token, us", "<=", 6, writes, failed=_failed(rows, "write"))
    flash = {
        row["case"]: row["tflops"] / other["tflops"]
        for row in find_rows(rows, "extend", name="e4m3")
        for other in find_rows(rows, "extend", name="sdpa flash", case=row["case"])
    }
    failed = _failed(rows, "extend", "e4m3")
    yield _judge("extend e4m3, rate over SDPA flash", ">=", 0.8, flash, failed=failed)
    yield from _judge_generate(rows)
    yield from _judge_latents(rows)


def _judge_latents(rows: list[Row]) -> Iterator[Goal]:
    failed = _failed(rows, LATENT, *FORMATS)
    for heads, bound in EXPANDED.items():
        cases = [f"{heads} heads, {batch} x 16k" for batch in (1, 16)]
        over, wanted = _over(rows, STOCK), [f"{case}, {name}" for case in cases for name in FORMATS]
        what = f"latent, {heads} heads, 16k, time over expanding"
        values = {case: over[case] for case in wanted if case in over}
        missing = [case for case in wanted if case not in over]
        yield _judge(what, "<=", bound, values, missing, [x for x in failed if x in cases])
    what = "latent, time over absorbed bf16 in torch"
    yield _judge(what, "<=", 1.0, _over(rows, ABSORBED), failed=failed)


def _over(rows: list[Row], other: str) -> Values:
    """Return the time of each format's steps over latents, over that of another contender."""
    theirs = {row["case"]: row["us"] for row in find_rows(rows, LATENT, name=other)}
    return {
        f"{row['case']}, {name}": row["us"] / theirs[row["case"]]
        for name in FORMATS
        for row in find_rows(rows, LATENT, name=name)
        if row["case"] in theirs
    }


def _judge_generate(rows: list[Row]) -> Iterator[Goal]:
    ends = {row["name"]: row for row in find_rows(rows, "end to end", case="8 x 32k")}
    speeds = {name: row["tokens_per_s"] for name, row in ends.items()}
    over: Values = {}
    if PAGED in ends and (others := [name for name in STRONG if name in ends]):
        strongest = max(others, key=speeds.__getitem__)
        over[f"over {strongest}"] = speeds[PAGED] / speeds[strongest]
    missing = [name for name in (PAGED, *NEEDED) if name not in ends]
    what = "generate() 8 x 32k, tokens/s over the strongest path in 16 bits"
    failed = _failed(rows, "end to end", PAGED)
    yield _judge(what, ">=", 1.6, over, missing, failed)
    size: Values = {}
    if PAGED in ends and AUTO in ends:
        size["8 x 32k"] = ends[PAGED]["cache_bytes"] / ends[AUTO]["cache_bytes"]
    yield _judge("generate() 8 x 32k, bytes of the cache over 16 bits", "<=", 0.54, size)


def _large(rows: list[Row], name: str) -> dict[str, Row]:
    """Return a contender's decode rows of many tokens, with and without padding, by case."""
    return {
        row["case"] + own.removeprefix(name): row
        for own in (name, name + PADDED)
        for row in find_rows(rows, "decode", name=own)
        if row.get("read", 0) >= LARGE and "gb_per_s" in row
    }


def _failed(rows: list[Row], section: str, *names: str) -> list[str]:
    """Return the cases of a section in which one of these contenders failed; no name: any."""
    return [
        row["case"]
        for row in rows
        if row["section"] == section and "failed" in row and (not names or row["name"] in names)
    ]


def _judge(
    what: str,
    sign: str,
    bound: float,
    values: Values,
    missing: Sequence[str] = (),
    failed: Sequence[str] = (),
) -> Goal:
    """Return the goal with its state: that of the worst value.

    What failed in a case is a goal missed; without all that it is about, it cannot be met.
    """
    goal = Goal(what, sign, bound, why="no row that it is about")
    if values:
        ordered = sorted(values, key=values.__getitem__, reverse=sign == "<=")
        worst, best = values[ordered[0]], values[ordered[-1]]
        state = MET if (worst >= bound if sign == ">=" else worst <= bound) else MISSED
        goal = Goal(what, sign, bound, state, worst, best, ordered[0], len(values))
    if failed:
        return replace(goal, state=MISSED, why=f"failed: {', '.join(failed)}")
    if missing and goal.state != MISSED:
        return replace(goal, state=UNKNOWN, why=f"not measured: {', '.join(missing)}")
    return goal
