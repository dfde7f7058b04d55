"""The tables of the long suite."""

from typing import TYPE_CHECKING, Any

from ..reporting import build_table
from .predictions import ALL_KINDS

if TYPE_CHECKING:
    from rich.console import RenderableType


def format_table(result: dict[str, Any]) -> "RenderableType":
    """Return the result of `run_long_suite` as tables for a terminal."""
    from rich.console import Group

    return Group(_format_positions(result), _format_kinds(result))


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
            )
        )
    texts = settings["texts_of_a_kind"] * len(settings["texts"])
    return build_table(
        {"cache": "left", "bits": "right", **dict.fromkeys(measures, "right")},
        rows,
        title=f"{settings['model']}, {settings['dtype']}: KL from the unquantised cache, 1e-3",
        caption=f"{texts} texts, {settings['scored']} tokens each before the position, ± the "
        f"standard error over texts; {result['hardware']['cpu']}, {result['date']}",
    )


def _format_kinds(result: dict[str, Any]) -> "RenderableType":
    """Return mean KL by kind of text, at the last position."""
    settings, found = result["settings"], _by_key(result)
    position, kinds = settings["positions"][-1], settings["texts"]
    return build_table(
        {"cache": "left", **dict.fromkeys(kinds, "right")},
        (
            (cache["title"], *(_format_kl(found[cache["cache"], position, kind]) for kind in kinds))
            for cache in result["caches"]
            if not cache["missing"]
        ),
        title=f"KL in 1e-3 at {position}, by kind of text",
    )


def _by_key(result: dict[str, Any]) -> dict[tuple[str, int, str], dict[str, Any]]:
    return {(row["cache"], row["position"], row["kind"]): row for row in result["predictions"]}


def _format_kl(row: dict[str, Any] | None) -> str:
    """Return the mean in 1e-3 with its standard error; more digits of what is small."""
    if row is None:
        return ""
    mean, error = 1e3 * row["kl"], row["kl_error"]
    digits = 3 if mean < 1 else 2
    return f"{mean:.{digits}f}" + ("" if error is None else f" ± {1e3 * error:.{digits}f}")
