"""Results: bandwidths and rates from times, and what one line can say of them."""

from typing import Any

from .goals import MISSED, UNKNOWN, Row, find_rows, judge

__all__ = ["Row", "complete", "find_rows", "line"]


def complete(result: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with `ceilings`, the bandwidth and rate of each row, and `goals`."""
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
    return {**result, "ceilings": ceilings, "rows": rows, "goals": judge({**result, "rows": rows})}


def line(result: dict[str, Any]) -> dict[str, Any]:
    """Return what one line can say of a result."""
    states: dict[str, list[str]] = {}
    for goal in result["goals"]:
        states.setdefault(goal["state"], []).append(goal["what"])
    worst = {goal["what"]: goal["worst"] for goal in result["goals"]}
    return {
        "gpu": result["hardware"].get("gpu"),
        "dry": result["settings"]["dry"],
        **{name: value and round(value, 1) for name, value in result["ceilings"].items()},
        "goals": {what: value and round(value, 3) for what, value in worst.items()},
        "missed": states.get(MISSED, []),
        "not measured": states.get(UNKNOWN, []),
        "failed": sum("failed" in row for row in result["rows"]),
        "errors": [section["name"] for section in result["sections"] if section["error"]],
        "unfinished": [s["name"] for s in result["sections"] if s["seconds"] is None],
    }
