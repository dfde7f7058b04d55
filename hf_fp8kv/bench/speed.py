"""Time one attention layer with FP8 pages and with transformers' own caches.

A decode step stores a new token in the cache, then attention reads all tokens. The contenders
alternate, so that a busy machine slows all of them down. The result is the median over the turns
of ratios within a turn. Keys and values are random, because the time does not depend on them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..attention.fp8_paged import fp8_paged_attention
from ..utils.environment import describe_run
from .contenders import (
    DYNAMIC,
    E3M4,
    E4M3,
    FOLDED,
    PAGED,
    QUANTIZED,
    Heads,
    Setup,
    Step,
    compute_ratios,
    make_steps,
    store_and_attend,
    take_turns,
)
from .reporting import build_rows_table, make_row

if TYPE_CHECKING:
    from rich.console import RenderableType

CHUNK_TOKENS = 256  # number of tokens in a chunk of a prompt


def measure_speed(
    setup: Setup | None = None,
    *,
    context_lengths: Sequence[int] = (4096, 16384),
    first_lengths: Sequence[int] = (512, 2048),
    num_turns: int = 9,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Measure decode steps, first calls and chunks of prompts, and return rows for JSON.

    Args:
        setup: Shape of the layer, backend and device. None means Llama-3.1-8B on a CPU.
        context_lengths: Numbers of tokens stored before a decode step or a chunk.
        first_lengths: Numbers of tokens of a first call.
        num_turns: Number of turns. Each contender runs once in each turn.
        progress: Function that is called with a message before each measurement.

    Returns:
        The entries of `describe_run`, `settings`, and `rows` of `make_row`.

    Raises:
        RuntimeError: A step does not compute attention.
    """
    setup = setup or Setup()
    progress = progress or (lambda _message: None)
    run = describe_run("speed", device=setup.device)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for context in context_lengths:
            progress(f"decode steps at {context} tokens")
            seconds = take_turns(make_steps(context, setup), num_turns, setup.device)
            rows += _make_rows("decode step", seconds, context)
            rows += [
                _make_ratio_row("decode step", seconds, name, baseline, context)
                for name in PAGED
                for baseline in (DYNAMIC, QUANTIZED, FOLDED)
            ]
        for length in first_lengths:
            progress(f"first call with {length} tokens")
            rows += _measure_first_call(setup, length, num_turns)
        for context in context_lengths:
            progress(f"{CHUNK_TOKENS} tokens after {context} tokens")
            rows += _measure_chunk(setup, context, num_turns)
    return {
        **run,
        "settings": {
            "context": list(context_lengths),
            "heads": list(setup.heads),
            "turns": num_turns,
            "backend": setup.backend,
            "batch": 1,
        },
        "rows": rows,
    }


def format_table(result: dict[str, Any]) -> "RenderableType":
    """Return the result of `measure_speed` as a table for a terminal."""
    hardware = result["hardware"]
    heads = Heads(*result["settings"]["heads"])
    device = hardware["cpu"] if hardware["device"] == "cpu" else ", ".join(hardware["gpus"])
    return build_rows_table(
        result["rows"],
        title=f"{heads.query} query heads, {heads.kv} KV heads, head size {heads.dim}, batch 1",
        caption=f"{device}, {hardware['threads']} threads, medians and quartiles of "
        f"{result['settings']['turns']} turns, {result['date']}",
    )


def _measure_first_call(setup: Setup, num_tokens: int, num_turns: int) -> list[dict[str, Any]]:
    """Return rows of a layer's first call, which stores its tokens and attends to them."""
    attend = functools.partial(store_and_attend, setup.make_layer(), *setup.draw_inputs(num_tokens))
    steps: dict[str, Step] = {
        E3M4: lambda: attend(setup.make_paged_cache(E3M4), fp8_paged_attention),
        DYNAMIC: lambda: attend(DynamicCache(), sdpa_attention_forward),
    }
    seconds = take_turns(steps, num_turns, setup.device)
    rows = _make_rows("first call", seconds, num_tokens)
    return [*rows, _make_ratio_row("first call", seconds, E3M4, DYNAMIC, num_tokens)]


def _measure_chunk(setup: Setup, context: int, num_turns: int) -> list[dict[str, Any]]:
    """Return rows of a call that stores a chunk of a prompt after `context` tokens, and attends."""
    module, (query, key, value) = setup.make_layer(), setup.draw_inputs(CHUNK_TOKENS)

    def run_chunk(cache: Cache, attend: Callable[..., object], mask: torch.Tensor | None) -> None:
        keys, values = cache.update(key, value, 0)
        attend(module, query, keys, values, mask, scaling=setup.heads.dim**-0.5)
        cache.crop(-CHUNK_TOKENS)

    paged_cache = setup.fill(setup.make_paged_cache(E4M3), context)
    dynamic_cache = setup.fill(DynamicCache(), context)
    # transformers makes this mask for sdpa. "fp8_paged" needs no mask.
    mask_shape = 1, 1, CHUNK_TOKENS, context + CHUNK_TOKENS
    mask = torch.ones(mask_shape, dtype=torch.bool, device=setup.device).tril(context)
    steps: dict[str, Step] = {
        E4M3: functools.partial(run_chunk, paged_cache, fp8_paged_attention, None),
        DYNAMIC: functools.partial(run_chunk, dynamic_cache, sdpa_attention_forward, mask),
    }
    seconds = take_turns(steps, num_turns, setup.device)
    measure = f"{CHUNK_TOKENS} tokens more"
    rows = _make_rows(measure, seconds, context)
    return [*rows, _make_ratio_row(measure, seconds, E4M3, DYNAMIC, context)]


def _make_ratio_row(
    measure: str, seconds: dict[str, list[float]], name: str, baseline: str, context: int
) -> dict[str, Any]:
    ratios = compute_ratios(seconds, name, baseline)
    return make_row(f"{measure}, ratio", name, ratios, "×", context=context, baseline=baseline)


def _make_rows(measure: str, seconds: dict[str, list[float]], context: int) -> list[dict[str, Any]]:
    return [
        make_row(measure, name, [1e3 * x for x in durations], "ms", context=context)
        for name, durations in seconds.items()
    ]
