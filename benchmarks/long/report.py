"""The tables of the long suite."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hf_fp8kv.bench.reporting import build_table
from hf_fp8kv.calibration.divergence import UNQUANTISED

from .predictions import ALL_KINDS

if TYPE_CHECKING:
    from rich.console import RenderableType


def format_table(result: dict[str, Any]) -> "RenderableType":
    """Return the result of `run_long_suite` as tables for a terminal."""
    from rich.console import Group

    tables = [_format_positions(result), _format_kinds(result)] if result["predictions"] else []
    return Group(*tables, *_format_tasks(result))


def _format_positions(result: dict[str, Any]) -> "RenderableType":
    """Return mean KL and top-1 by position, over all kinds of text."""
    settings, found = result["settings"], _by_key(result)
    positions = settings["positions"]
    measures = [f"{what} {p}" for what in ("KL at", "top-1 at") for p in positions]
    rows = []
    for cache in result["caches"]:
        cells = [found.get((cache["cache"], p, ALL_KINDS)) for p in positions]
        if cache["missing"]:
            rows.append((f"{cache['title']}: {cache['missing']}",))
            continue
        rows.append(
            (
                cache["title"],
                f"{cache['bits']:g}",
                *(_format_kl(cell) for cell in cells),
                *(f"{cell['top1']:.1%}" for cell in cells if cell),
                _format_rotated(cache),
            )
        )
    tokens = next(iter(found.values()))["tokens"]
    factor = settings.get("outliers")
    planted = f", outliers x{factor:g} in K" if factor else ""
    if planted and settings["outlier_heads"] > 1:
        planted += f" of 1 in {settings['outlier_heads']} heads"
    return build_table(
        {"cache": "left", "bits": "right", **dict.fromkeys((*measures, "K rotated"), "right")},
        rows,
        title=f"{settings['model']}, {settings['dtype']}{planted}: KL from the unquantised cache, "
        "1e-3",
        caption=f"{tokens // settings['scored']} texts, {settings['scored']} tokens each before "
        f"the position, ± the standard error over texts; {_describe_run(result)}",
    )


def _format_kinds(result: dict[str, Any]) -> "RenderableType":
    """Return mean KL by kind of text, at the last position."""
    settings, found = result["settings"], _by_key(result)
    position, kinds = settings["positions"][-1], settings["texts"]
    return build_table(
        {"cache": "left", **dict.fromkeys(kinds, "right")},
        (
            (
                cache["title"],
                *(_format_kl(found.get((cache["cache"], position, kind))) for kind in kinds),
            )
            for cache in result["caches"]
            if not cache["missing"]
        ),
        title=f"KL in 1e-3 at {position}, by kind of text",
    )


def _format_tasks(result: dict[str, Any]) -> "Iterator[RenderableType]":
    """Yield a table for each position: the questions that are right, and those that are lost."""
    for position in result["settings"]["positions"]:
        tasks = [task for task in result["tasks"] if task["position"] == position]
        if not tasks:
            continue
        heads = [f"{task['task']}, of {task['asked']}" for task in tasks]
        found = [{answer["cache"]: answer for answer in task["answers"]} for task in tasks]
        ceilings = (
            f"{round(task['ceiling'] * task['asked'])}" + (", dropped" * task["dropped"])
            for task in tasks
        )
        yield build_table(
            {"cache": "left", **dict.fromkeys(heads, "right")},
            [
                (UNQUANTISED, *ceilings),
                *(
                    (cache["title"], *(_format_answer(of.get(cache["cache"])) for of in found))
                    for cache in result["caches"]
                    if not cache["missing"]
                ),
            ],
            title=f"{result['settings']['model']}: right answers at {position} tokens (lost: those "
            "that the unquantised cache has right)",
            caption=_describe_run(result),
        )


def _format_rotated(cache: dict[str, Any]) -> str:
    """Return in how many layers, over all texts, a cache rotated K. Older files do not know."""
    layers = sum(cache.get("plans", {}).values())
    return f"{cache['k_rotated']} of {layers}" if layers else ""


def _describe_run(result: dict[str, Any]) -> str:
    """Return where and when, and that a run was cut short. Older files know nothing of that."""
    cut = "" if result.get("complete", True) else "INCOMPLETE: cut short; "
    return f"{cut}{result['hardware']['cpu']}, {result['date']}"


def _by_key(result: dict[str, Any]) -> dict[tuple[str, int, str], dict[str, Any]]:
    return {(row["cache"], row["position"], row["kind"]): row for row in result["predictions"]}


def _format_answer(answer: dict[str, Any] | None) -> str:
    if answer is None:
        return ""
    return f"{answer['right']}" + (f" ({answer['lost']} lost)" if answer["lost"] else "")


def _format_kl(row: dict[str, Any] | None) -> str:
    """Return the mean in 1e-3 with its standard error; more digits of what is small."""
    if row is None:
        return ""
    mean, error = 1e3 * row["kl"], row["kl_error"]
    digits = 3 if mean < 1 else 2
    return f"{mean:.{digits}f}" + ("" if error is None else f" ± {1e3 * error:.{digits}f}")
