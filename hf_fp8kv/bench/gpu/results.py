"""Results: bandwidths and rates from times, and how they compare with the targets."""

from collections.abc import Iterator
from typing import Any

Row = dict[str, Any]
# Tokens of all sequences from which on a decode step is a matter of bandwidth.
LARGE = 2**18


def complete(result: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with `ceilings`, the bandwidth and rate of each row, and `targets`."""
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
    targets = list(_targets(rows))
    if result["settings"]["dry"]:
        targets = [target | {"met": None} for target in targets]
    return {**result, "ceilings": ceilings, "rows": rows, "targets": targets}


def line(result: dict[str, Any]) -> dict[str, Any]:
    """Return what one line can say of a result."""
    return {
        "gpu": result["hardware"].get("gpu"),
        "dry": result["settings"]["dry"],
        **{name: value and round(value, 1) for name, value in result["ceilings"].items()},
        "targets": {t["what"]: t["value"] and round(t["value"], 3) for t in result["targets"]},
        "missed": [t["what"] for t in result["targets"] if t["met"] is False],
        "failed": sum("failed" in row for row in result["rows"]),
        "errors": [s["name"] for s in result["sections"] if s["error"]],
    }


def find_rows(rows: list[Row], section: str, **fields: Any) -> list[Row]:
    """Return the rows of a section with these fields that did not fail."""
    wanted = {"section": section, **fields}.items()
    return [row for row in rows if "failed" not in row and wanted <= row.items()]


def _ratios(
    rows: list[Row], section: str, name: str, other: str, field: str, least: int = 0
) -> list[float]:
    """Return `field` of a contender over that of another, for each case of so many tokens."""
    return [
        row[field] / against[field]
        for row in find_rows(rows, section, name=name)
        for against in find_rows(rows, section, name=other, case=row["case"])
        if row.get("read", LARGE) >= least and field in row and field in against
    ]


def _targets(rows: list[Row]) -> Iterator[dict[str, Any]]:
    large = [
        row["of_read"]
        for name in ("e4m3", "e4m3 static")
        for row in find_rows(rows, "decode", name=name)
        if row.get("read", 0) >= LARGE and "of_read" in row
    ]
    yield _target("decode e4m3, share of read bandwidth, 256k tokens on", ">=", 0.85, large)
    for name, most in (("e4m3", 0.60), ("e4m3 static", 0.60), ("e3m4", 0.75)):
        ratios = _ratios(rows, "decode", name, "bf16 pages", "us", LARGE)
        yield _target(f"decode {name}, time over bf16 pages, 256k tokens on", "<=", most, ratios)
    short = [row["us"] for row in find_rows(rows, "decode", name="e4m3", case="1 x 1k")]
    yield _target("decode e4m3, us, batch 1, 1k", "<=", 12, short)
    writes = [row["us"] for row in find_rows(rows, "write") if row["case"].endswith("1 token")]
    yield _target("write one token, us", "<=", 6, writes)
    flash = _ratios(rows, "extend", "e4m3", "sdpa flash", "tflops")
    yield _target("extend e4m3, rate over SDPA flash", ">=", 0.8, flash)
    ends = [row for row in rows if row["case"] == "8 x 32k"]
    for other, field, what, sign, bound in (
        ("StaticCache compiled", "tokens_per_s", "tokens/s over StaticCache compiled", ">=", 1.4),
        ("DynamicCache eager", "tokens_per_s", "tokens/s over DynamicCache eager", ">=", 3),
        ("StaticCache compiled", "cache_bytes", "cache bytes over StaticCache", "<=", 0.54),
    ):
        ratios = _ratios(ends, "end to end", "FP8PagedCache compiled", other, field)
        yield _target(f"generate 8 x 32k, {what}", sign, bound, ratios)


def _target(what: str, sign: str, bound: float, values: list[float]) -> dict[str, Any]:
    """Return a target with the worst of `values`, or None where nothing was measured."""
    target = {"what": what, "target": f"{sign} {bound:g}", "value": None, "met": None}
    if not values:
        return target
    worst, best = min(values), max(values)
    if sign == "<=":
        worst, best = best, worst
    met = worst >= bound if sign == ">=" else worst <= bound
    return target | {"value": worst, "met": met, "best": best, "cases": len(values)}
