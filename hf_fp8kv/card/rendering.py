"""Format a card as a table for a terminal, and as Markdown."""

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..utils.terminal import build_table
from .caches import FLOOR
from .drift import format_change
from .long_texts import KINDS
from .measure import TIERS, find_tier, select_rows
from .predictions import EXACT, STORED

if TYPE_CHECKING:
    from rich.console import RenderableType


def format_verdict(card: Mapping[str, Any], name: str | None = None) -> str:
    """Return the verdict on a cache, by default on the first cache of the card, as one line."""
    name = name or next(iter(card["caches"]))
    cache = card["caches"][name]
    verdict = cache["verdict"]
    bytes_ratio = cache["bytes_per_token"] / card["bf16_bytes_per_token"]
    max_kl = TIERS[verdict["tier"]]
    bound = f"up to {max_kl:g}" if math.isfinite(max_kl) else f"above {TIERS['visible']:g}"
    sentences = verdict["findings"] or ["No other problems were found."]
    if _list_stored_positions(card):
        stored_kl = max((row["kl"] for row in select_rows(cache, STORED)), default=None)
        loss = "refused" if stored_kl is None else f"{find_tier(stored_kl)} ({stored_kl:.1e})"
        sentences = [f"After stored prompts: {loss}.", *sentences]
    return (
        f"{cache['title']}: {verdict['tier']} (mean KL {verdict['kl']:.1e}, tier {bound}), "
        f"{bytes_ratio:.2f} of the bytes of bf16. {' '.join(sentences)}"
    )


def _list_stored_positions(card: Mapping[str, Any]) -> list[int]:
    """Return the positions at which the card has scores after stored prompts, in order."""
    caches = card["caches"].values()
    return sorted({row["position"] for cache in caches for row in select_rows(cache, STORED)})


def format_table(card: Mapping[str, Any]) -> "RenderableType":
    """Return the card as a table for a terminal, with the verdicts below it."""
    from rich.console import Group

    settings = card["settings"]
    columns = make_columns(card)
    table = build_table(
        {title: "right" if title else "left" for title in columns},
        zip(*columns.values(), strict=True),
        caption=_describe_conditions(card),
        title=f"{settings['model']}, {settings['dtype']}",
    )
    refusals = [f"{name} was not measured. {reason}" for name, reason in card["refused"].items()]
    return Group(table, *(format_verdict(card, name) for name in card["caches"]), *refusals)


def format_markdown(card: Mapping[str, Any]) -> str:
    """Return the card as a section of a model card."""
    columns = make_columns(card)
    lines = [
        f"# {card['settings']['model']}: losses with a quantized KV cache",
        "",
        format_verdict(card),
        "",
        f"| {' | '.join(columns)} |",
        f"|---|{'--:|' * (len(columns) - 1)}",
        *(f"| {' | '.join(row)} |" for row in zip(*columns.values(), strict=True)),
        "",
        *_describe_measures(card),
        "",
        *(f"* {format_verdict(card, name)}" for name in card["caches"]),
        *(f"* {name} was not measured. {reason}" for name, reason in card["refused"].items()),
        "",
        _describe_conditions(card),
    ]
    return "\n".join(lines) + "\n"


def _describe_measures(card: Mapping[str, Any]) -> Iterator[str]:
    settings = card["settings"]
    floor = ", relative to rounding to bfloat16" if FLOOR in card["caches"] else ""
    stored = ""
    if _list_stored_positions(card):
        stored = (
            ' One call computed the prompt exactly. Prompts that are "stored" attend to stored '
            "bytes, as in serving, chunks, prefix stores and training."
        )
    yield (
        f"KL (1e-3) and top-1 compare the last {settings['scored']} predictions before each "
        f"position, in each of {len(KINDS) * settings['texts']} texts, with the predictions of the "
        f"unquantized cache.{stored} Total variation is an upper bound on the "
        "share of draft tokens that are rejected because of the cache. Drift is the change of KL "
        "per 1,000 tokens along "
        f"{settings['answers']} answers of {settings['drift']:,} tokens (at least 1,024){floor}, "
        "with a 95% interval. A drift of the detectable size would be found with 80% probability."
    )
    if settings["free"]:
        yield (
            '"First difference" is the position of the first different token of each answer, in '
            f"{settings['free']} sampled tokens."
        )
    tasks = card["tasks"].items()
    if shares := [
        f"{name} ({task['right']} of {task['asked']})"
        for name, task in tasks
        if not task["dropped"]
    ]:
        yield f"Correct answers with the unquantized cache: {', '.join(shares)}."
    if dropped_tasks := [name for name, task in tasks if task["dropped"]]:
        yield f"Too hard for this model: {', '.join(dropped_tasks)}."


def make_columns(card: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the columns of the table: labels under "", and values under the name of a cache."""
    settings = card["settings"]
    stored_positions = _list_stored_positions(card)
    columns: dict[str, list[str]] = {}
    for name, cache in card["caches"].items():
        rows = select_rows(cache, EXACT)
        stored_cells = {
            row["position"]: _format_kl(row["kl"], row["kl_error"])
            for row in select_rows(cache, STORED)
        }
        drift, steps = cache["drift"], cache["steps"]
        values = {
            "bytes per token": f"{cache['bytes_per_token']:,.0f}",
            f"tokens in {settings['memory_gib']:g} GiB": f"{cache['tokens']:,}",
            **{
                f"KL at {row['position']:,}": _format_kl(row["kl"], row["kl_error"]) for row in rows
            },
            **{f"KL at {n:,}, stored": stored_cells.get(n, "refused") for n in stored_positions},
            "99th percentile": _format_kl(rows[-1]["kl_p99"]),
            "largest KL": _format_kl(rows[-1]["kl_max"]),
            **{f"top-1 at {row['position']:,}": f"{row['top1']:.1%}" for row in rows},
            **{
                f"total variation at {row['position']:,}": f"{row['total_variation']:.2%}"
                for row in rows
                if "total_variation" in row
            },
            "KL of answers": _format_kl(drift["kl"]),
            "drift": "",
            "detectable drift": "",
        }
        if name != FLOOR and drift["slope"] is not None:
            slope, low, high = (format_change(drift[field]) for field in ("slope", "low", "high"))
            values["drift"] = f"{slope} [{low}, {high}]"
            values["detectable drift"] = format_change(drift["detectable"])
        if settings["free"]:
            positions = ["none" if n is None else f"{n}" for n in cache["free"]["first"][:4]]
            values["first difference"] = ", ".join(positions)
        if card["tasks"]:
            tasks = [task for task in cache["tasks"].values() if task]
            num_lost, num_gained = (sum(task[key] for task in tasks) for key in ("lost", "won"))
            values["answers lost, gained"] = f"{num_lost}, {num_gained}"
        for length in settings["stored"]:
            step = steps[str(length)]
            values[f"step at {length:,}"] = f"{step['ratio']:.2f}" if step else ""
        columns.setdefault("", [*values])
        columns[name] = [*values.values()]
    return columns


def _format_kl(mean: float, error: float | None = None) -> str:
    """Return a divergence in units of 1e-3, with its standard error."""
    digits = 3 if 1e3 * mean < 1 else 2
    return f"{1e3 * mean:.{digits}f}" + ("" if error is None else f" ± {1e3 * error:.{digits}f}")


def _describe_conditions(card: Mapping[str, Any]) -> str:
    hardware, versions = card["hardware"], card["versions"]
    device = hardware["cpu"] if hardware["device"] == "cpu" else ", ".join(hardware["gpus"])
    return (
        f"Times of decode steps, in {card['settings']['dtype']}, are relative to DynamicCache. "
        f"{device}, {hardware['threads']} threads, torch {versions['torch']}, "
        f"transformers {versions['transformers']}, hf-fp8kv {versions['hf-fp8kv']}, "
        f"{card['date'][:10]}."
    )
