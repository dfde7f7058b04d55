"""Results: bandwidths and rates from times, and how they compare with the targets."""

from collections.abc import Callable, Iterator
from typing import Any

Row = dict[str, Any]
# Tokens of all sequences from which on a decode step is a matter of bandwidth.
LARGE = 2**18


def complete(result: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with `ceilings`, the bandwidth and rate of each row, and `targets`."""
    rows = [dict(row) for row in result["rows"]]
    for row in rows:
        us = row.get("us")
        if us and "moved" in row:
            row["gb_per_s"] = row["moved"] / us / 1e3
        if us and "flops" in row:
            row["tflops"] = row["flops"] / us / 1e6
    ceilings = {
        name: max(
            (r[field] for r in find_rows(rows, "ceilings", case=case) if field in r), default=None
        )
        for name, case, field in (
            ("copy_gb_per_s", "copy", "gb_per_s"),
            ("read_gb_per_s", "read", "gb_per_s"),
            ("matmul_tflops", "matmul", "tflops"),
        )
    }
    for row in rows:
        for name, field, ceiling in (
            ("of_read", "gb_per_s", "read_gb_per_s"),
            ("of_copy", "gb_per_s", "copy_gb_per_s"),
            ("of_matmul", "tflops", "matmul_tflops"),
        ):
            top = ceilings[ceiling]
            if row["section"] != "ceilings" and field in row and top:
                row[name] = row[field] / top
    completed = {**result, "ceilings": ceilings, "rows": rows}
    targets = list(_targets(rows))
    if result["settings"]["dry"]:
        targets = [target | {"met": None} for target in targets]
    return completed | {"targets": targets}


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
    }  # fmt: skip


def find_rows(rows: list[Row], section: str, **fields: Any) -> list[Row]:
    """Return the rows of a section with these fields that did not fail."""
    return [
        row for row in rows
        if row["section"] == section and "failed" not in row
        and all(row.get(key) == value for key, value in fields.items())
    ]  # fmt: skip


def _ratios(
    rows: list[Row], section: str, name: str, others: Callable[[str], bool], field: str,
    least: int = 0,
) -> list[float]:  # fmt: skip
    """`field` of a contender, over the smallest (`us`) or largest of others, for each case."""
    ratios = []
    for row in find_rows(rows, section, name=name):
        against = [
            r[field] for r in find_rows(rows, section, case=row["case"])
            if others(r["name"]) and field in r
        ]  # fmt: skip
        if against and row.get("read", LARGE) >= least and field in row:
            best = min(against) if field in ("us", "cache_bytes") else max(against)
            ratios.append(row[field] / best)
    return ratios


def _targets(rows: list[Row]) -> Iterator[dict[str, Any]]:
    large = [
        row["of_read"]
        for name in ("e4m3", "e4m3 static")
        for row in find_rows(rows, "decode", name=name)
        if row.get("read", 0) >= LARGE and "of_read" in row
    ]
    yield _target("decode e4m3, share of read bandwidth, 256k tokens on", ">=", 0.85, large)
    pages = "bf16 pages".__eq__
    for name, most in (("e4m3", 0.60), ("e4m3 static", 0.60), ("e3m4", 0.75)):
        ratios = _ratios(rows, "decode", name, pages, "us", LARGE)
        yield _target(f"decode {name}, time over bf16 pages, 256k tokens on", "<=", most, ratios)
    short = [row["us"] for row in find_rows(rows, "decode", name="e4m3", case="1 x 1k")]
    yield _target("decode e4m3, us, batch 1, 1k", "<=", 12, short)
    writes = [row["us"] for row in find_rows(rows, "write") if row["case"].endswith("1 token")]
    yield _target("write one token, us", "<=", 6, writes)
    flash = _ratios(rows, "extend", "e4m3", "sdpa flash".__eq__, "tflops")
    yield _target("extend e4m3, rate over SDPA flash", ">=", 0.8, flash)
    ours = _ratios_end(rows, "StaticCache compiled", "tokens_per_s")
    yield _target("generate 8 x 32k, tokens/s over StaticCache compiled", ">=", 1.4, ours)
    ours = _ratios_end(rows, "DynamicCache eager", "tokens_per_s")
    yield _target("generate 8 x 32k, tokens/s over DynamicCache eager", ">=", 3, ours)
    ours = _ratios_end(rows, "StaticCache compiled", "cache_bytes")
    yield _target("generate 8 x 32k, cache bytes over StaticCache", "<=", 0.54, ours)


def _ratios_end(rows: list[Row], other: str, field: str) -> list[float]:
    chosen = [row for row in rows if row["section"] != "end to end" or row["case"] == "8 x 32k"]
    return _ratios(chosen, "end to end", "FP8PagedCache compiled", other.__eq__, field)


def _target(what: str, sign: str, bound: float, values: list[float]) -> dict[str, Any]:
    """Return a target with the worst of `values`, or None where nothing was measured."""
    if not values:
        return {"what": what, "target": f"{sign} {bound:g}", "value": None, "met": None}
    value = min(values) if sign == ">=" else max(values)
    met = value >= bound if sign == ">=" else value <= bound
    return {"what": what, "target": f"{sign} {bound:g}", "value": value, "met": met,
            "best": max(values) if sign == ">=" else min(values), "cases": len(values)}  # fmt: skip
