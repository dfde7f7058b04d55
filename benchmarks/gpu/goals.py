"""Judge the goals for a GPU from the rows of a result: met, missed or not measured."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]

# Bandwidth in the datasheets of GPUs, in GB/s, by a part of their names.
DATASHEETS = {"H100 80GB HBM3": 3350.0, "H200": 4800.0}
# Minimum number of tokens over all sequences for which the bandwidth limits a decode step.
LARGE = 2**18
MET, MISSED, UNKNOWN = "met", "missed", "not measured"

FORMATS = ("e4m3", "e3m4")
# Goals "at every batch size" cannot be judged without these cases.
CASES = ("8 x 32k", "50 x 32k", "64 x 32k", "1 x 256k")
PADDED = " left padded"
PAGED, AUTO = "FP8PagedCache compiled", "FP8PagedCache auto compiled"
FLASH = "DynamicCache flash eager"
LATENT, STOCK, ABSORBED = "latent", "DynamicCache", "absorbed in torch"
# Alternatives of generate() in 16 bits. The first two must have been measured.
STRONG = (FLASH, AUTO, "DynamicCache flash-attn eager", "FP8PagedCache auto eager")


@dataclass(frozen=True)
class Goal:
    """A bound for a field of rows, or for its ratio to the field of other contenders."""

    what: str
    sign: str  # ">=" or "<="
    bound: float  # for the worst value
    section: str
    field: str
    names: tuple[str, ...] = ()  # contenders, by default all
    over: tuple[str, ...] = ()  # contenders that the field is divided by, in the same case
    cases: tuple[str, ...] = ()  # by default all
    ending: str = ""  # end of the names of cases
    least: int = 0  # minimum number of tokens that a case reads
    needed: tuple[str, ...] = ()  # values without which the goal is not met

    def values(self, rows: list[Row]) -> dict[str, float]:
        """Return the values by case, contender and divisor."""
        by_place = {(row["case"], row["name"]): row for row in find_rows(rows, self.section)}
        values = {}
        for (case, name), row in by_place.items():
            if not self.is_about(row) or self.field not in row or row.get("read", 0) < self.least:
                continue
            value, place = row[self.field], f"{case}, {name}"
            if not self.over:
                values[place] = value
            padded = PADDED if name.endswith(PADDED) else ""
            for other in self.over:
                if divisor := by_place.get((case, other + padded), {}).get(self.field):
                    values[f"{place} over {other}"] = value / divisor
        return values

    def is_about(self, row: Row) -> bool:
        """Return whether a row of the section, measured or failed, belongs to the goal."""
        is_named = not self.names or row["name"].removesuffix(PADDED) in self.names
        is_case = not self.cases or row["case"] in self.cases
        return is_named and is_case and row["case"].endswith(self.ending)

    def judge(
        self, rows: list[Row], why: str = "", datasheet: float | None = None
    ) -> dict[str, Any]:
        """Return the goal as a dict with its state, the worst and the best value, and a reason.

        Args:
            rows: All rows of a result.
            why: The reason why nothing can be judged, or empty.
            datasheet: The datasheet's bandwidth over the measured one, if both are known.
        """
        values, state = self.values(rows), UNKNOWN
        order = sorted(values, key=values.__getitem__, reverse=self.sign == "<=")
        worst, best = (values[order[place]] if order else None for place in (0, -1))
        if worst is not None:
            holds = worst >= self.bound if self.sign == ">=" else worst <= self.bound
            state = MET if holds else MISSED
        judged = [row for row in rows if row["section"] == self.section and self.is_about(row)]
        failed = [row["case"] for row in judged if "failed" in row]
        missing = [place for place in self.needed if place not in values]
        if why:
            state = UNKNOWN
        elif failed:
            state, why = MISSED, f"failed: {', '.join(failed)}"
        elif missing and state != MISSED:
            state, why = UNKNOWN, f"not measured: {', '.join(missing)}"
        elif not values:
            why = "no row to judge"
        return {
            "what": self.what, "sign": self.sign, "bound": self.bound, "state": state,
            "worst": worst, "best": best, "where": order[0] if order else "",
            "cases": len(values), "why": why,
            "of_datasheet": worst / datasheet
            if worst is not None and datasheet and self.field == "of_read"
            else None,
        }  # fmt: skip


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all goals for the rows of a result."""
    why = ""
    gpu = result.get("hardware", {}).get("gpu")
    if result["settings"]["dry"]:
        why = "a dry run"
    elif not gpu:
        why = "no GPU"
    specified = next((rate for name, rate in DATASHEETS.items() if name in str(gpu)), None)
    measured = result["ceilings"]["read_gb_per_s"]
    datasheet = specified / measured if specified and measured else None
    return [goal.judge(result["rows"], why, datasheet) for goal in GOALS]


def find_rows(rows: Iterable[Row], section: str, **fields: Any) -> list[Row]:
    """Return the rows of a section with these fields that did not fail."""
    required = {"section": section, **fields}.items()
    return [row for row in rows if "failed" not in row and required <= row.items()]


def _decode(name: str, what: str, sign: str, bound: float, field: str, **options: Any) -> Goal:
    what = f"decode {name}, {what}, 256k tokens on"
    return Goal(what, sign, bound, "decode", field, (name,), least=LARGE, **options)


def _layer(field: str, bound: float) -> Goal:
    case = "1 x 1k"
    needed = tuple(f"{case}, {name}" for name in FORMATS)
    what = f"one layer of a step, {field}, {case}"
    return Goal(what, "<=", bound, "layer", field, FORMATS, cases=(case,), needed=needed)


def _generate(what: str, sign: str, bound: float, field: str, over: tuple[str, ...]) -> Goal:
    case = "8 x 32k"
    needed = tuple(f"{case}, {PAGED} over {other}" for other in over[:2])
    return Goal(
        f"generate() {case}, {what}", sign, bound, "end to end", field, (PAGED,), over,
        cases=(case,), needed=needed,
    )  # fmt: skip


def _expanding(heads: int, bound: float) -> Goal:
    cases = tuple(f"{heads} heads, {batch} x 16k" for batch in (1, 16))
    needed = tuple(f"{case}, {name} over {STOCK}" for case in cases for name in FORMATS)
    what = f"latent, {heads} heads, 16k, time over expanding"
    return Goal(what, "<=", bound, LATENT, "us", FORMATS, (STOCK,), cases=cases, needed=needed)


GOALS = (
    *(
        _decode(
            name, "share of reads", ">=", 0.85, "of_read",
            needed=tuple(f"{case}, {name}" for case in CASES),
        )
        for name in FORMATS
    ),
    _decode("e3m4", "time over e4m3", "<=", 1.05, "us", over=("e4m3",)),
    _decode("e4m3", "time over bf16 pages", "<=", 0.60, "us", over=("bf16 pages",)),
    _layer("us", 7),
    _layer("launches", 2),
    Goal("write one token, us", "<=", 6, "write", "us", ending="1 token"),
    Goal("extend e4m3, rate over SDPA flash", ">=", 0.8, "extend", "tflops", ("e4m3",),
         ("sdpa flash",)),
    _generate("tokens/s over the strongest path in 16 bits", ">=", 1.6, "tokens_per_s", STRONG),
    _generate("bytes of the cache over 16 bits", "<=", 0.54, "cache_bytes", (AUTO,)),
    _expanding(16, 1 / 20),
    _expanding(128, 1 / 50),
    Goal("latent, time over absorbed bf16 in torch", "<=", 1.0, LATENT, "us", FORMATS, (ABSORBED,)),
)  # fmt: skip
