"""CPU suite: speed and memory beside transformers' own caches.

A measure is a decode step of one layer: the cache takes one new token, then attention reads all of
them. Contenders take turns, so that a busy machine slows all of them down, and what counts is the
median of the ratios within a turn. Contexts are random numbers; speed does not depend on them.
"""

import copy
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import Cache, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..attention.fp8_paged import fp8_paged_attention
from ..cache.cache import FP8PagedCache
from ..utils.environment import describe_run
from .contenders import (
    DYNAMIC,
    E3M4,
    E4M3,
    FOLDED,
    PAGED,
    QUANTIZED,
    AttentionLayer,
    Heads,
    Step,
    attend_step,
    fill,
    make_config,
    make_paged,
    make_row,
    make_steps,
    random_states,
    take_turns,
)
from .cpu_memory import measure_bytes, measure_processes
from .reporting import build_table, format_number, format_target

if TYPE_CHECKING:
    from rich.console import RenderableType

# Ratios that the longest context must not pass.
TARGETS = {DYNAMIC: 0.35, QUANTIZED: 0.10}
# What the default takes, rotated, may take so much longer than the format that needs no rotation.
_ROTATED = ("FP8PagedCache e2m5", "FP8PagedCache int8")
_ROTATED_TARGET = 1.05
_BEAMS = 4
# Tokens of a chunk of a prompt.
_CHUNK = 256
# First calls: their tokens, the default, which decides how to store them, and its safe plan.
_FIRST_TOKENS = (512, 2048)
_CHOOSES, _SAFE = "FP8PagedCache default", "FP8PagedCache e3m4, K centered"
_FIRST: dict[str, dict[str, Any]] = {
    _CHOOSES: {}, _SAFE: {"dtype": "fp8_e3m4", "center_keys": True},
}  # fmt: skip


def run_cpu_suite(
    *,
    context: Sequence[int] = (4096, 16384),
    heads: Heads = (32, 8, 128),
    pairs: int = 9,
    backend: str = "auto",
    memory_tokens: int | None = 8192,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Measure decode steps, updates, copies and memory, and return rows for JSON.

    Each contender runs once in each of the `pairs` turns, with so many tokens stored (`context`,
    ascending). `heads` are query heads, key/value heads and head size. Processes of their own store
    `memory_tokens`, to see how they grow; None: skip. `progress` is called with what is next.

    Returns:
        `suite`, `date`, `command`, `versions`, `hardware`, `settings`, and `rows`, each with
        `measure`, `cache`, `context`, `against`, `value`, `unit`, `low` and `high` (quartiles), and
        `target`; None where a row has none.
    """
    report = progress or (lambda _message: None)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        seconds: dict[int, dict[str, list[float]]] = {}
        for tokens in context:
            report(f"decode steps at {tokens} tokens")
            steps = make_steps(tokens, heads, backend)
            seconds[tokens] = take_turns(steps, pairs)
            rows += _step_rows(seconds[tokens], tokens, last=tokens == max(context))
            rows += _rotated_rows(steps, tokens, pairs)
            del steps
        rows += _growth_rows({tokens: taken[E4M3] for tokens, taken in seconds.items()})
        report("first calls")
        rows += _first_call_rows(heads, backend, pairs)
        report("chunks of prompts")
        rows += _chunk_rows(context, heads, backend, pairs)
        report("updates and copies")
        rows += _update_rows(context, heads, backend, pairs)
        rows += _copy_rows(max(context), heads, backend, pairs)
    rows += measure_bytes(heads, backend)
    if memory_tokens:
        report("memory of processes")
        rows += measure_processes(memory_tokens, heads, backend)
    return {
        **describe_run("cpu"),
        "settings": {"context": list(context), "heads": list(heads), "pairs": pairs,
                     "backend": backend, "batch": 1},
        "rows": rows,
    }  # fmt: skip


def format_table(result: dict[str, Any]) -> "RenderableType":
    """Return the rows of `run_cpu_suite` as a table for a terminal."""
    hardware, heads = result["hardware"], result["settings"]["heads"]
    columns: dict[str, Literal["left", "right"]] = {
        "measure": "left", "cache": "left", "tokens": "right", "median": "right",
        "quartiles": "right", "against": "left", "target": "right",
    }  # fmt: skip
    cells = [
        (
            row["measure"], row["cache"], str(row["context"] or ""),
            f"{format_number(row['value'])} {row['unit']}",
            "" if row["low"] is None
            else f"{format_number(row['low'])} - {format_number(row['high'])}",
            row["against"] or "", format_target(row["target"]),
        )
        for row in result["rows"]
    ]  # fmt: skip
    return build_table(
        columns,
        cells,
        grouped=True,
        title=f"{heads[0]} query heads, {heads[1]} key/value heads, head size {heads[2]}, batch 1",
        caption=f"{hardware['cpu']}, {hardware['threads']} threads, medians and quartiles of "
        f"{result['settings']['pairs']} turns, {result['date']}",
    )


def _step_rows(seconds: dict[str, list[float]], tokens: int, *, last: bool) -> list[dict[str, Any]]:
    rows = _time_rows("decode step", seconds, tokens)
    for name in PAGED:
        for other in (DYNAMIC, QUANTIZED, FOLDED):
            ratios = [a / b for a, b in zip(seconds[name], seconds[other], strict=True)]
            target = TARGETS.get(other) if last else None
            rows.append(
                make_row("ratio", name, ratios, "×", context=tokens, against=other, target=target)
            )
    return rows


def _rotated_rows(steps: Mapping[str, Step], tokens: int, turns: int) -> list[dict[str, Any]]:
    """Return rows of rotated formats against E3M4, in many turns among themselves.

    They differ by less than what other contenders leave behind in the processor's caches.
    """
    seconds = take_turns({name: steps[name] for name in (E3M4, *_ROTATED)}, 10 * turns)
    return [
        make_row("ratio", name, [a / b for a, b in zip(seconds[name], seconds[E3M4], strict=True)],
                 "×", context=tokens, against=E3M4, target=_ROTATED_TARGET)
        for name in _ROTATED
    ]  # fmt: skip


def _growth_rows(seconds: dict[int, list[float]]) -> list[dict[str, Any]]:
    """Return rows of the cost per token against that of the shortest context: 1 is linear."""
    shortest = min(seconds)
    base = statistics.median(seconds[shortest]) / shortest
    return [
        make_row("cost per token", E4M3, [x / tokens / base for x in taken], "×",
                 context=tokens, against=f"{shortest} tokens")
        for tokens, taken in seconds.items() if tokens != shortest
    ]  # fmt: skip


def _first_call_rows(heads: Heads, backend: str, turns: int) -> list[dict[str, Any]]:
    """Return rows of a layer's first call: storing its tokens, and attention among them."""
    rows = []
    module, config = AttentionLayer(heads[0] // heads[1]), make_config(heads)
    config.max_position_embeddings = 2**17  # the default tries keys at positions up to that
    for tokens in _FIRST_TOKENS:
        query = random_states(heads[0], tokens, heads[2])
        key, value = (random_states(heads[1], tokens, heads[2]) for _ in range(2))

        attend = functools.partial(attend_step, module, query, key, value)

        def call(options: Mapping[str, Any], attend: Callable[..., object] = attend) -> None:
            attend(FP8PagedCache(config, backend=backend, **options), fp8_paged_attention)

        steps: dict[str, Step] = {
            name: functools.partial(call, options) for name, options in _FIRST.items()
        }
        seconds = take_turns(steps, turns)
        rows += _time_rows("first call", seconds, tokens)
        ratios = [a / b for a, b in zip(seconds[_CHOOSES], seconds[_SAFE], strict=True)]
        rows.append(make_row("ratio", _CHOOSES, ratios, "×", context=tokens, against=_SAFE))
    return rows


def _chunk_rows(
    context: Sequence[int], heads: Heads, backend: str, turns: int
) -> list[dict[str, Any]]:
    """Return rows of some hundred new tokens on top of what is stored: storing, and attention."""
    rows, module = [], AttentionLayer(heads[0] // heads[1])
    query = random_states(heads[0], _CHUNK, heads[2])
    key, value = (random_states(heads[1], _CHUNK, heads[2]) for _ in range(2))

    def call(cache: Cache, attend: Callable[..., object], mask: torch.Tensor | None) -> None:
        keys, values = cache.update(key, value, 0)
        attend(module, query, keys, values, mask, scaling=heads[2] ** -0.5)
        cache.crop(-_CHUNK)

    for tokens in context:
        pair = _make_pair(tokens, heads, backend)
        # As transformers makes it; ours needs none.
        mask = torch.ones((1, 1, _CHUNK, tokens + _CHUNK), dtype=torch.bool).tril(tokens)
        steps: dict[str, Step] = {
            E4M3: functools.partial(call, pair[E4M3], fp8_paged_attention, None),
            "DynamicCache": functools.partial(
                call, pair["DynamicCache"], sdpa_attention_forward, mask
            ),
        }
        seconds = take_turns(steps, turns)
        rows += _time_rows(f"{_CHUNK} tokens more", seconds, tokens)
        ratios = [a / b for a, b in zip(seconds[E4M3], seconds["DynamicCache"], strict=True)]
        rows.append(make_row("ratio", E4M3, ratios, "×", context=tokens, against="DynamicCache"))
    return rows


def _update_rows(
    context: Sequence[int], heads: Heads, backend: str, turns: int
) -> list[dict[str, Any]]:
    """Return rows of the cache's update alone; a turn is the mean of 20 updates."""
    many = 20
    key = random_states(heads[1], 1, heads[2])
    caches = {
        (name, tokens): cache
        for tokens in (64, *context)
        for name, cache in _make_pair(tokens, heads, backend).items()
    }

    def update(cache: Cache) -> None:
        for _ in range(many):
            cache.update(key, key, 0)

    steps = {f"{name} {n}": functools.partial(update, c) for (name, n), c in caches.items()}
    seconds = take_turns(steps, turns)
    return [
        make_row("update", name, [1e6 * x / many for x in seconds[f"{name} {n}"]], "µs", context=n)
        for name, n in sorted(caches)
    ]


def _make_pair(tokens: int, heads: Heads, backend: str) -> dict[str, Cache]:
    """Return this package's cache and transformers' own, with so many tokens stored."""
    paged = fill(make_paged(heads, backend, E4M3), tokens, heads)
    return {E4M3: paged, "DynamicCache": fill(DynamicCache(), tokens, heads)}


def _copy_rows(tokens: int, heads: Heads, backend: str, turns: int) -> list[dict[str, Any]]:
    """Return rows of a copy of a cache, and of a beam search's reorder: page numbers, not bytes."""
    order = torch.arange(_BEAMS).flip(0)
    caches = _make_pair(tokens, heads, backend)
    copies: dict[str, Step] = {
        name: functools.partial(copy.deepcopy, cache) for name, cache in caches.items()
    }
    rows = _time_rows("deepcopy", take_turns(copies, turns), tokens)
    for cache in caches.values():
        cache.batch_repeat_interleave(_BEAMS)
    reorders: dict[str, Step] = {
        name: functools.partial(cache.reorder_cache, order)  # type: ignore[arg-type]
        for name, cache in caches.items()
    }
    return rows + _time_rows(f"reorder {_BEAMS} beams", take_turns(reorders, turns), tokens)


def _time_rows(measure: str, seconds: dict[str, list[float]], tokens: int) -> list[dict[str, Any]]:
    return [
        make_row(measure, name, [1e3 * x for x in taken], "ms", context=tokens)
        for name, taken in seconds.items()
    ]
