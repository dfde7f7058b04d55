"""Format a card as a table for a terminal, and as Markdown."""

import math
from collections.abc import Mapping
from typing import Any

from rich.console import Group

from ..utils.terminal import build_table
from .measure import TIERS, find_tier, select_rows
from .predictions import EXACT, STORED


def format_verdict(card: Mapping[str, Any], name: str | None = None) -> str:
    """Return the verdict on a cache, by default on the first cache of the card, as one line."""
    name = name or next(iter(card["caches"]))
    cache = card["caches"][name]
    verdict = cache["verdict"]
    bytes_ratio = cache["bytes_per_token"] / card["bf16_bytes_per_token"]
    max_kl = TIERS[verdict["tier"]]
    bound = f"up to {max_kl:g}" if math.isfinite(max_kl) else f"above {TIERS['visible']:g}"
    text = (
        f"{cache['title']}: {verdict['tier']} (mean KL {verdict['kl']:.1e}, tier {bound}), "
        f"{bytes_ratio:.2f} of the bytes of bf16."
    )
    if _list_stored_positions(card):
        stored_kl = max((row["kl"] for row in select_rows(cache, STORED)), default=None)
        loss = "refused" if stored_kl is None else f"{find_tier(stored_kl)} ({stored_kl:.1e})"
        text += f" After stored prompts: {loss}."
    return text


def _list_stored_positions(card: Mapping[str, Any]) -> list[int]:
    """Return the positions at which the card has scores after stored prompts, in order."""
    caches = card["caches"].values()
    return sorted({row["position"] for cache in caches for row in select_rows(cache, STORED)})


def format_table(card: Mapping[str, Any]) -> Group:
    """Return the card as a table for a terminal, with the verdicts below it."""
    settings = card["settings"]
    columns = make_columns(card)
    table = build_table(
        {title: "right" if title else "left" for title in columns},
        zip(*columns.values(), strict=True),
        caption=_describe_conditions(card),
        title=f"{settings['model']}, {settings['dtype']}",
    )
    verdicts = (format_verdict(card, name) for name in card["caches"])
    return Group(table, *verdicts, *_list_refusals(card))


def _list_refusals(card: Mapping[str, Any]) -> list[str]:
    return [f"{name} was not measured. {reason}" for name, reason in card["refused"].items()]


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
        _describe_measures(card),
        "",
        *(f"* {format_verdict(card, name)}" for name in card["caches"]),
        *(f"* {refusal}" for refusal in _list_refusals(card)),
        "",
        _describe_conditions(card),
    ]
    return "\n".join(lines) + "\n"


def _describe_measures(card: Mapping[str, Any]) -> str:
    settings = card["settings"]
    source = f" of {settings['texts']}" if settings.get("texts") else ""
    stored_note = ""
    if _list_stored_positions(card):
        stored_note = (
            ' One call computed the prompt exactly. Prompts that are "stored" attend to stored '
            "bytes, as in serving, chunks, prefix stores and training."
        )
    return (
        f"KL (1e-3) and top-1 compare the last {settings['num_scored']} predictions before each "
        f"position, in each of {settings['num_texts']} texts{source}, with the predictions of the "
        f"unquantized cache.{stored_note} Total variation is an upper bound on the "
        "share of draft tokens that are rejected because of the cache."
    )


def make_columns(card: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the columns of the table: labels under "", and values under the name of a cache."""
    settings = card["settings"]
    stored_positions = _list_stored_positions(card)
    columns: dict[str, list[str]] = {}
    for name, cache in card["caches"].items():
        exact_rows = select_rows(cache, EXACT)
        stored_cells = {
            row["position"]: _format_kl(row["kl"], row["kl_error"])
            for row in select_rows(cache, STORED)
        }
        values = {
            "bytes per token": f"{cache['bytes_per_token']:,.0f}",
            f"tokens in {settings['memory_gib']:g} GiB": f"{cache['tokens']:,}",
        }
        values |= {
            f"KL at {row['position']:,}": _format_kl(row["kl"], row["kl_error"])
            for row in exact_rows
        }
        values |= {
            f"KL at {position:,}, stored": stored_cells.get(position, "refused")
            for position in stored_positions
        }
        values["99th percentile"] = _format_kl(exact_rows[-1]["kl_p99"])
        values["largest KL"] = _format_kl(exact_rows[-1]["kl_max"])
        values |= {f"top-1 at {row['position']:,}": f"{row['top1']:.1%}" for row in exact_rows}
        values |= {
            f"total variation at {row['position']:,}": f"{row['total_variation']:.2%}"
            for row in exact_rows
        }
        for position in settings["step_positions"]:
            step = cache["steps"][str(position)]
            values[f"step at {position:,}"] = f"{step['ratio']:.2f}" if step else ""
        columns.setdefault("", list(values))
        columns[name] = list(values.values())
    return columns


def _format_kl(mean: float, error: float | None = None) -> str:
    """Return a divergence in units of 1e-3, with its standard error."""
    digits = 3 if 1e3 * mean < 1 else 2
    return f"{1e3 * mean:.{digits}f}" + ("" if error is None else f" ± {1e3 * error:.{digits}f}")


def _describe_conditions(card: Mapping[str, Any]) -> str:
    hardware = card["hardware"]
    versions = card["versions"]
    device = hardware["cpu"] if hardware["device"] == "cpu" else ", ".join(hardware["gpus"])
    return (
        f"Times of decode steps, in {card['settings']['dtype']}, are relative to DynamicCache. "
        f"{device}, {hardware['threads']} threads, torch {versions['torch']}, "
        f"transformers {versions['transformers']}, hf-fp8kv {versions['hf-fp8kv']}, "
        f"{card['date'][:10]}."
    )
