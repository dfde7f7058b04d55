"""Time one attention layer with FP8 pages and with transformers' own caches.

A decode step stores a new token in the cache, then attention reads all tokens. The contenders
alternate, so that a busy machine slows all of them down. The result is the median of the ratios
within a turn. Keys and values are random, because the time of a step does not depend on them.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..attention.fp8_paged import fp8_paged_attention
from ..cache.cache import FP8PagedCache
from ..utils.environment import describe_run
from .contenders import (
    DYNAMIC,
    E4M3,
    FOLDED,
    PAGED,
    QUANTIZED,
    Setup,
    Step,
    attend_step,
    make_config,
    make_steps,
    ratios,
    take_turns,
)
from .reporting import build_rows_table, make_row

if TYPE_CHECKING:
    from rich.console import RenderableType

# Number of tokens in a chunk of a prompt.
CHUNK = 256
# The default cache centers K. The same format given by name does not center K.
_CENTERED, _UNCENTERED = "FP8PagedCache default", "FP8PagedCache e3m4"
_FIRST_CALLS: dict[str, dict[str, Any]] = {_CENTERED: {}, _UNCENTERED: {"dtype": "fp8_e3m4"}}


def measure_speed(
    setup: Setup | None = None,
    *,
    context: Sequence[int] = (4096, 16384),
    first: Sequence[int] = (512, 2048),
    turns: int = 9,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Measure decode steps, first calls and chunks of prompts, and return rows for JSON.

    Args:
        setup: Shape of the layer, backend and device. None means the shape of an 8B model on a CPU.
        context: Numbers of tokens stored before a decode step or a chunk.
        first: Numbers of tokens of a first call.
        turns: Number of turns. Each contender runs once in each turn.
        progress: Function that is called with the name of the next measurement.

    Returns:
        The entries of `describe_run`, `settings`, and `rows` of `make_row`.

    Raises:
        RuntimeError: A step does not compute attention.
    """
    setup, report = setup or Setup(), progress or (lambda _message: None)
    run = describe_run("speed", device=setup.device)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for tokens in context:
            report(f"decode steps at {tokens} tokens")
            seconds = take_turns(make_steps(tokens, setup), turns, setup.device)
            rows += _make_rows("decode step", seconds, tokens)
            rows += [
                _make_ratio_row("decode step", seconds, name, baseline, tokens)
                for name in PAGED
                for baseline in (DYNAMIC, QUANTIZED, FOLDED)
            ]
        for tokens in first:
            report(f"first call with {tokens} tokens")
            rows += _measure_first_call(setup, tokens, turns)
        for tokens in context:
            report(f"{CHUNK} tokens after {tokens} tokens")
            rows += _measure_chunk(setup, tokens, turns)
    return {
        **run,
        "settings": {"context": list(context), "heads": list(setup.heads), "turns": turns,
                     "backend": setup.backend, "batch": 1},
        "rows": rows,
    }  # fmt: skip


def format_table(result: dict[str, Any]) -> "RenderableType":
    """Return the result of `measure_speed` as a table for a terminal."""
    hardware, heads = result["hardware"], result["settings"]["heads"]
    device = hardware["cpu"] if hardware["device"] == "cpu" else ", ".join(hardware["gpus"])
    return build_rows_table(
        result["rows"],
        title=f"{heads[0]} query heads, {heads[1]} key/value heads, head size {heads[2]}, batch 1",
        caption=f"{device}, {hardware['threads']} threads, medians and quartiles of "
        f"{result['settings']['turns']} turns, {result['date']}",
    )


def _measure_first_call(setup: Setup, tokens: int, turns: int) -> list[dict[str, Any]]:
    """Return rows of a layer's first call, which stores its tokens and attends to them."""
    config = make_config(setup.heads)
    config.max_position_embeddings = 2**17  # the center of the default cache depends on it
    query, key, value = setup.queries(tokens), setup.states(tokens), setup.states(tokens)
    attend = functools.partial(attend_step, setup.module, query, key, value)

    def run_call(options: Mapping[str, Any]) -> None:
        attend(FP8PagedCache(config, backend=setup.backend, **options), fp8_paged_attention)

    steps: dict[str, Step] = {
        name: functools.partial(run_call, options) for name, options in _FIRST_CALLS.items()
    }
    seconds = take_turns(steps, turns, setup.device)
    rows = _make_rows("first call", seconds, tokens)
    return [*rows, _make_ratio_row("first call", seconds, _CENTERED, _UNCENTERED, tokens)]


def _measure_chunk(setup: Setup, tokens: int, turns: int) -> list[dict[str, Any]]:
    """Return rows of a call that stores a chunk of a prompt after `tokens` tokens, and attends."""
    module, query = setup.module, setup.queries(CHUNK)
    key, value = setup.states(CHUNK), setup.states(CHUNK)

    def run_chunk(cache: Cache, attend: Callable[..., object], mask: torch.Tensor | None) -> None:
        keys, values = cache.update(key, value, 0)
        attend(module, query, keys, values, mask, scaling=setup.heads[2] ** -0.5)
        cache.crop(-CHUNK)

    paged_cache = setup.fill(setup.make_paged(E4M3), tokens)
    dynamic = setup.fill(DynamicCache(), tokens)
    # transformers makes this mask for sdpa. fp8_paged needs no mask.
    mask = torch.ones((1, 1, CHUNK, tokens + CHUNK), dtype=torch.bool, device=setup.device)
    steps: dict[str, Step] = {
        E4M3: functools.partial(run_chunk, paged_cache, fp8_paged_attention, None),
        DYNAMIC: functools.partial(run_chunk, dynamic, sdpa_attention_forward, mask.tril(tokens)),
    }
    seconds = take_turns(steps, turns, setup.device)
    measure = f"{CHUNK} tokens more"
    rows = _make_rows(measure, seconds, tokens)
    return [*rows, _make_ratio_row(measure, seconds, E4M3, DYNAMIC, tokens)]


def _make_ratio_row(
    measure: str, seconds: dict[str, list[float]], name: str, baseline: str, tokens: int
) -> dict[str, Any]:
    values = ratios(seconds, name, baseline)
    return make_row(f"{measure}, ratio", name, values, "×", context=tokens, baseline=baseline)


def _make_rows(measure: str, seconds: dict[str, list[float]], tokens: int) -> list[dict[str, Any]]:
    return [
        make_row(measure, name, [1e3 * x for x in durations], "ms", context=tokens)
        for name, durations in seconds.items()
    ]
