"""Judge the goals for a GPU from the rows of a result: met, missed or not measured."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]

# Bandwidth in the datasheets of GPUs, by a part of the GPU's name.
DATASHEET_GB_PER_S = {"H100 80GB HBM3": 3350.0, "H200": 4800.0}
# Minimum number of tokens over all sequences at which the bandwidth limits a decode step.
LARGE_STEP_TOKENS = 2**18
MET, MISSED, UNKNOWN = "met", "missed", "not measured"

FORMATS = ("e4m3", "e3m4")
# Decode cases that must be measured before a goal over all decode cases counts as met.
REQUIRED_CASES = ("8 x 32k", "50 x 32k", "64 x 32k", "1 x 256k")
PADDED_SUFFIX = " left padded"
PAGED, PAGED_AUTO = "FP8PagedCache compiled", "FP8PagedCache auto compiled"
FLASH = "DynamicCache flash eager"
LATENT, STOCK, ABSORBED = "latent", "DynamicCache", "absorbed in torch"
# Contenders that run generate() with 16-bit caches. The first two are required for a met goal.
ALTERNATIVES = (FLASH, PAGED_AUTO, "DynamicCache flash-attn eager", "FP8PagedCache auto eager")


@dataclass(frozen=True)
class Goal:
    """A bound for a field of rows, or for its ratio to the same field of other contenders."""

    title: str
    sign: str  # ">=" or "<="
    bound: float  # for the worst value
    section: str
    field: str
    names: tuple[str, ...] = ()  # judged contenders, by default all
    divisors: tuple[str, ...] = ()  # contenders whose field, in the same case, is the divisor
    cases: tuple[str, ...] = ()  # judged cases, by default all
    case_suffix: str = ""  # end of the names of judged cases
    min_tokens: int = 0  # minimum number of tokens that a case reads
    required_labels: tuple[str, ...] = ()  # labels of values without which the goal is not met

    def collect_values(self, rows: list[Row]) -> dict[str, float]:
        """Return the judged values by label: case, contender and divisor."""
        rows_by_name = {(row["case"], row["name"]): row for row in find_rows(rows, self.section)}
        values = {}
        for (case, name), row in rows_by_name.items():
            is_large = row.get("read", 0) >= self.min_tokens
            if not (self.covers(row) and self.field in row and is_large):
                continue
            value, label = row[self.field], f"{case}, {name}"
            if not self.divisors:
                values[label] = value
            suffix = PADDED_SUFFIX if name.endswith(PADDED_SUFFIX) else ""
            for divisor_name in self.divisors:
                if divisor := rows_by_name.get((case, divisor_name + suffix), {}).get(self.field):
                    values[f"{label} over {divisor_name}"] = value / divisor
        return values

    def covers(self, row: Row) -> bool:
        """Return whether a row of the section, measured or failed, counts for the goal."""
        has_name = not self.names or row["name"].removesuffix(PADDED_SUFFIX) in self.names
        has_case = not self.cases or row["case"] in self.cases
        return has_name and has_case and row["case"].endswith(self.case_suffix)

    def judge(
        self, rows: list[Row], reason: str = "", datasheet_ratio: float | None = None
    ) -> dict[str, Any]:
        """Return the goal as a dict with the state, the worst and the best value, and a reason.

        Args:
            rows: All rows of a result.
            reason: Why nothing can be judged, or an empty string.
            datasheet_ratio: The datasheet's bandwidth over the measured bandwidth, if known.
        """
        values = self.collect_values(rows)
        state = UNKNOWN
        # The worst value comes first.
        labels = sorted(values, key=values.__getitem__, reverse=self.sign == "<=")
        worst, best = (values[labels[index]] if labels else None for index in (0, -1))
        if worst is not None:
            is_met = worst >= self.bound if self.sign == ">=" else worst <= self.bound
            state = MET if is_met else MISSED
        covered_rows = [row for row in rows if row["section"] == self.section and self.covers(row)]
        failed_cases = [row["case"] for row in covered_rows if "failed" in row]
        missing_labels = [label for label in self.required_labels if label not in values]
        if reason:
            state = UNKNOWN
        elif failed_cases:
            state, reason = MISSED, f"failed: {', '.join(failed_cases)}"
        elif missing_labels and state != MISSED:
            state, reason = UNKNOWN, f"not measured: {', '.join(missing_labels)}"
        elif not values:
            reason = "no row to judge"
        return {
            "what": self.title, "sign": self.sign, "bound": self.bound, "state": state,
            "worst": worst, "best": best, "where": labels[0] if labels else "",
            "cases": len(values), "why": reason,
            "of_datasheet": worst / datasheet_ratio
            if worst is not None and datasheet_ratio and self.field == "of_read"
            else None,
        }  # fmt: skip


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the state of all goals for a result, as `Goal.judge` describes them."""
    reason = ""
    gpu = result.get("hardware", {}).get("gpu")
    if result["settings"]["dry"]:
        reason = "a dry run"
    elif not gpu:
        reason = "no GPU"
    rates = (rate for name, rate in DATASHEET_GB_PER_S.items() if name in str(gpu))
    datasheet_rate = next(rates, None)
    read_rate = result["ceilings"]["read_gb_per_s"]
    ratio = datasheet_rate / read_rate if datasheet_rate and read_rate else None
    return [goal.judge(result["rows"], reason, ratio) for goal in GOALS]


def find_rows(rows: Iterable[Row], section: str, **fields: Any) -> list[Row]:
    """Return the rows of a section that have these fields and did not fail."""
    required_items = {"section": section, **fields}.items()
    return [row for row in rows if "failed" not in row and required_items <= row.items()]


def _make_decode_goal(
    name: str, quantity: str, sign: str, bound: float, field: str, **options: Any
) -> Goal:
    title = f"decode {name}, {quantity}, 256k tokens on"
    return Goal(
        title, sign, bound, "decode", field, (name,), min_tokens=LARGE_STEP_TOKENS, **options
    )


def _make_layer_goal(field: str, bound: float) -> Goal:
    case = "1 x 1k"
    labels = tuple(f"{case}, {name}" for name in FORMATS)
    title = f"one layer of a step, {field}, {case}"
    return Goal(title, "<=", bound, "layer", field, FORMATS, cases=(case,), required_labels=labels)


def _make_generate_goal(
    quantity: str, sign: str, bound: float, field: str, divisors: tuple[str, ...]
) -> Goal:
    case = "8 x 32k"
    labels = tuple(f"{case}, {PAGED} over {name}" for name in divisors[:2])
    return Goal(
        f"generate() {case}, {quantity}", sign, bound, "end to end", field, (PAGED,), divisors,
        cases=(case,), required_labels=labels,
    )  # fmt: skip


def _make_latent_goal(num_heads: int, bound: float) -> Goal:
    cases = tuple(f"{num_heads} heads, {batch} x 16k" for batch in (1, 16))
    labels = tuple(f"{case}, {name} over {STOCK}" for case in cases for name in FORMATS)
    title = f"latent, {num_heads} heads, 16k, time over expanding"
    return Goal(
        title, "<=", bound, LATENT, "us", FORMATS, (STOCK,), cases=cases, required_labels=labels
    )


GOALS = (
    *(
        _make_decode_goal(
            name, "share of reads", ">=", 0.85, "of_read",
            required_labels=tuple(f"{case}, {name}" for case in REQUIRED_CASES),
        )
        for name in FORMATS
    ),
    _make_decode_goal("e3m4", "time over e4m3", "<=", 1.05, "us", divisors=("e4m3",)),
    _make_decode_goal("e4m3", "time over bf16 pages", "<=", 0.60, "us", divisors=("bf16 pages",)),
    _make_layer_goal("us", 7),
    _make_layer_goal("launches", 2),
    Goal("write one token, us", "<=", 6, "write", "us", case_suffix="1 token"),
    Goal("extend e4m3, rate over SDPA flash", ">=", 0.8, "extend", "tflops", ("e4m3",),
         ("sdpa flash",)),
    _make_generate_goal(
        "tokens/s over the strongest path in 16 bits", ">=", 1.6, "tokens_per_s", ALTERNATIVES
    ),
    _make_generate_goal(
        "bytes of the cache over 16 bits", "<=", 0.54, "cache_bytes", (PAGED_AUTO,)
    ),
    _make_latent_goal(16, 1 / 20),
    _make_latent_goal(128, 1 / 50),
    Goal("latent, time over absorbed bf16 in torch", "<=", 1.0, LATENT, "us", FORMATS, (ABSORBED,)),
)  # fmt: skip
