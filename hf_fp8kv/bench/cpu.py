"""Speed and memory against transformers' own caches: `hf-fp8kv bench`.

A measure is a decode step of one layer: the cache takes one new token, then attention reads all of
them. Contenders take turns, so that a busy machine slows all of them down, and what counts is the
median of the ratios within a turn. Contexts are random numbers; speed does not depend on them.
"""

import functools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers import Cache, DynamicCache, LlamaConfig, QuantizedCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..attention.fp8_paged import fp8_paged_attention
from ..cache.cache import FP8PagedCache
from ..utils.environment import describe_run

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["format_table", "run_cpu_suite"]

Step = Callable[[], torch.Tensor]
Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
_Cache = TypeVar("_Cache", bound=Cache)
Heads = tuple[int, int, int]

DYNAMIC, QUANTIZED, FOLDED = "DynamicCache + sdpa", "QuantizedCache fp8 + sdpa", "cat + folded sdpa"
PAGED: dict[str, dict[str, Any]] = {
    "FP8PagedCache e4m3": {"dtype": "fp8_e4m3"},
    "FP8PagedCache e3m4": {"dtype": "fp8_e3m4"},
    "FP8PagedCache e4m3 static": {"dtype": "fp8_e4m3", "scales": 0.01},
}
# Ratios that the longest context must not pass.
TARGETS = {DYNAMIC: 0.35, QUANTIZED: 0.10}
# The same for bytes at head size 128, with dynamic and with static scales.
BYTES = (0.54, 0.52)
# The relative RMS between a step and torch's attention on the same bytes: both round to bfloat16.
TOLERANCE = 0.02


class _Module(torch.nn.Module):
    """What the attention functions ask of a layer."""

    is_causal = True

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups


def run_cpu_suite(
    *,
    context: Sequence[int] = (4096, 16384),
    heads: Heads = (32, 8, 128),
    pairs: int = 9,
    backend: str = "auto",
    memory_tokens: int | None = 8192,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Returns what was measured, ready for JSON.

    Args:
        context: tokens already stored, ascending.
        heads: query heads, key/value heads, head size.
        pairs: turns; every contender runs once in each.
        backend: of FP8PagedCache.
        memory_tokens: tokens that processes of their own store, to see how they grow; None: skip.
        progress: called with what is measured next.

    Returns:
        `suite`, `date`, `command`, `versions`, `hardware`, `settings`, and `rows`, each with
        `measure`, `cache`, `context`, `against`, `value`, `unit`, `low` and `high` (quartiles), and
        `target`; None where a row has none.
    """
    say = progress or (lambda _message: None)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        steps: dict[int, dict[str, list[float]]] = {}
        for tokens in context:
            say(f"decode steps at {tokens} tokens")
            steps[tokens] = _take_turns(_contenders(tokens, heads, backend), pairs)
            rows += _step_rows(steps[tokens], tokens, last=tokens == max(context))
        rows += _growth_rows({n: s["FP8PagedCache e4m3"] for n, s in steps.items()})
        say("updates alone")
        rows += _update_rows(context, heads, backend, pairs)
    rows += _byte_rows(heads, backend)
    if memory_tokens:
        say("memory of processes")
        rows += _process_rows(memory_tokens, heads, backend)
    return {
        **describe_run("cpu"),
        "settings": {"context": list(context), "heads": list(heads), "pairs": pairs,
                     "backend": backend, "batch": 1},
        "rows": rows,
    }  # fmt: skip


def format_table(result: dict[str, Any]) -> "RenderableType":
    """Returns the rows of `run_cpu_suite` as a table for a terminal."""
    from rich.table import Table

    hardware, heads = result["hardware"], result["settings"]["heads"]
    table = Table(
        title=f"{heads[0]} query heads, {heads[1]} key/value heads, head size {heads[2]}, batch 1",
        caption=f"{hardware['cpu']}, {hardware['threads']} threads, medians and quartiles of "
        f"{result['settings']['pairs']} turns, {result['date']}",
    )
    for name in ("measure", "cache", "tokens", "median", "quartiles", "against", "target"):
        right = name in ("tokens", "median", "quartiles", "target")
        table.add_column(name, justify="right" if right else "left", no_wrap=name != "against")
    before = ""
    for row in result["rows"]:
        if before not in ("", row["measure"]):
            table.add_section()
        before = row["measure"]
        spread = "" if row["low"] is None else f"{_short(row['low'])} - {_short(row['high'])}"
        target = "" if row["target"] is None else f"≤ {row['target']:g}"
        context = "" if row["context"] is None else str(row["context"])
        value = f"{_short(row['value'])} {row['unit']}"
        table.add_row(
            row["measure"], row["cache"], context, value, spread, row["against"] or "", target
        )
    return table


def _short(number: float) -> str:
    """Three digits, and no exponent."""
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}"


def _row(
    measure: str,
    cache: str,
    values: Sequence[float],
    unit: str,
    *,
    context: int | None = None,
    against: str | None = None,
    target: float | None = None,
) -> dict[str, Any]:
    low, high = None, None
    if len(values) > 1:
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return {
        "measure": measure, "cache": cache, "context": context, "against": against,
        "value": statistics.median(values), "unit": unit, "low": low, "high": high,
        "target": target,
    }  # fmt: skip


# -- decode steps --------------------------------------------------------------------------------


def _numbers(heads: int, tokens: int, dim: int) -> torch.Tensor:
    return torch.randn(1, heads, tokens, dim, dtype=torch.bfloat16)


def _fill(cache: _Cache, tokens: int, heads: Heads, layer: int = 0) -> _Cache:
    """The cache then holds `tokens` random tokens, stored in several calls."""
    at = 0
    while at < tokens:
        count = min(1024, tokens - at)
        cache.update(
            _numbers(heads[1], count, heads[2]), _numbers(heads[1], count, heads[2]), layer
        )
        at += count
    return cache


def _paged(heads: Heads, backend: str, **settings: Any) -> FP8PagedCache:
    return FP8PagedCache(_config(heads), backend=backend, **settings)


def _config(heads: Heads, layers: int = 1) -> LlamaConfig:
    return LlamaConfig(
        num_hidden_layers=layers, num_attention_heads=heads[0], num_key_value_heads=heads[1],
        head_dim=heads[2], hidden_size=heads[0] * heads[2], vocab_size=8, intermediate_size=8,
    )  # fmt: skip


def _contenders(tokens: int, heads: Heads, backend: str) -> dict[str, Step]:
    """A decode step of each cache, with `tokens` stored."""
    module = _Module(heads[0] // heads[1])
    query = _numbers(heads[0], 1, heads[2])
    key, value = _numbers(heads[1], 1, heads[2]), _numbers(heads[1], 1, heads[2])
    attend = functools.partial(_attend, module, query, key, value)
    found: dict[str, Step] = {}
    for name, settings in PAGED.items():
        cache = _fill(_paged(heads, backend, **settings), tokens, heads)
        found[name] = functools.partial(attend, cache, fp8_paged_attention)
        _check(found[name](), module, query, cache, name)
    dynamic = _fill(DynamicCache(), tokens, heads)
    found[DYNAMIC] = functools.partial(attend, dynamic, sdpa_attention_forward)
    quantized = _fill(QuantizedCache(backend="fp8", config=_config(heads)), tokens, heads)
    found[QUANTIZED] = functools.partial(attend, quantized, sdpa_attention_forward)
    found[FOLDED] = _folded(tokens, heads, query, key, value)
    return found


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: Cache,
    attention: Attention,
    layer: int = 0,
) -> torch.Tensor:
    keys, values = cache.update(key, value, layer)
    return attention(module, query, keys, values, None, scaling=query.shape[3] ** -0.5)[0]


def _folded(
    tokens: int, heads: Heads, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> Step:
    """The fastest that torch does in bfloat16 on a CPU: a key head's query heads as its queries."""
    stored = [_numbers(heads[1], tokens, heads[2]) for _ in range(2)]
    folded = query.view(1, heads[1], -1, heads[2])

    def step() -> torch.Tensor:
        stored[:] = torch.cat([stored[0], key], 2), torch.cat([stored[1], value], 2)
        return torch.nn.functional.scaled_dot_product_attention(folded, stored[0], stored[1])

    return step


def _check(
    found: torch.Tensor, module: torch.nn.Module, query: torch.Tensor, cache: Cache, name: str
) -> None:
    """Raises RuntimeError unless a step computes attention: what is wrong is not worth timing."""
    layer: Any = cache.layers[0]
    expected = sdpa_attention_forward(
        module, query, layer.keys + 0, layer.values + 0, None, scaling=query.shape[3] ** -0.5
    )[0].float()
    error = ((found.float() - expected).square().mean() / expected.square().mean()).sqrt().item()
    if not error < TOLERANCE:
        raise RuntimeError(f"{name}: expected torch's attention, got {error:.1e} relative error")


def _take_turns(steps: Mapping[str, Step], turns: int) -> dict[str, list[float]]:
    """Returns the seconds of each, in turns; the first turn does not count.

    Each turn has another order: torch's threads spin for a while after their work, and disturb
    whoever comes next.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order, shuffle = list(steps), random.Random(0).shuffle
    for turn in range(turns + 1):
        for name in order:
            began = time.perf_counter()
            steps[name]()
            if turn:
                seconds[name].append(time.perf_counter() - began)
        shuffle(order)
    return seconds


def _step_rows(seconds: dict[str, list[float]], tokens: int, *, last: bool) -> list[dict[str, Any]]:
    rows = [
        _row("decode step", name, [1e3 * x for x in taken], "ms", context=tokens)
        for name, taken in seconds.items()
    ]
    for name in PAGED:
        for other in (DYNAMIC, QUANTIZED, FOLDED):
            ratios = [a / b for a, b in zip(seconds[name], seconds[other], strict=True)]
            target = TARGETS.get(other) if last else None
            rows.append(
                _row("ratio", name, ratios, "×", context=tokens, against=other, target=target)
            )
    return rows


def _growth_rows(seconds: dict[int, list[float]]) -> list[dict[str, Any]]:
    """The cost per token against that of the shortest context: 1 is linear."""
    shortest = min(seconds)
    base = statistics.median(seconds[shortest]) / shortest
    return [
        _row("cost per token", "FP8PagedCache e4m3", [x / tokens / base for x in taken], "×",
             context=tokens, against=f"{shortest} tokens")
        for tokens, taken in seconds.items() if tokens != shortest
    ]  # fmt: skip


def _update_rows(
    context: Sequence[int], heads: Heads, backend: str, turns: int
) -> list[dict[str, Any]]:
    """The cache's update alone; a turn is the mean of 20 updates."""
    many = 20
    key = _numbers(heads[1], 1, heads[2])
    caches: dict[tuple[str, int], Cache] = {}
    for tokens in (64, *context):
        paged = _paged(heads, backend, **PAGED["FP8PagedCache e4m3"])
        caches["FP8PagedCache e4m3", tokens] = _fill(paged, tokens, heads)
        caches["DynamicCache", tokens] = _fill(DynamicCache(), tokens, heads)

    def update(cache: Cache) -> torch.Tensor:
        for _ in range(many):
            cache.update(key, key, 0)
        return key

    steps = {f"{name} {n}": functools.partial(update, c) for (name, n), c in caches.items()}
    seconds = _take_turns(steps, turns)
    return [
        _row("update", name, [1e6 * x / many for x in seconds[f"{name} {n}"]], "µs", context=n)
        for name, n in sorted(caches)
    ]


# -- memory --------------------------------------------------------------------------------------


def _byte_rows(heads: Heads, backend: str) -> list[dict[str, Any]]:
    """Bytes per token and layer by construction, at 8192 tokens."""
    tokens = 8192
    plain = 4 * heads[1] * heads[2]
    rows = [_row("bytes per token", "DynamicCache", [plain], "B", context=tokens)]
    ratios = []
    for name, settings in PAGED.items():
        cache = _fill(_paged(heads, backend, **settings), tokens, heads)
        total = cache.memory_footprint()["total"] / tokens
        rows.append(_row("bytes per token", name, [total], "B", context=tokens))
        ratio = functools.partial(_row, "ratio", name, [total / plain], "×", context=tokens)
        ratios.append(ratio(against="DynamicCache, bytes", target=BYTES["scales" in settings]))
    return rows + ratios


def _process_rows(tokens: int, heads: Heads, backend: str) -> list[dict[str, Any]]:
    """How much a process of its own grows that stores 8 layers.

    glibc keeps freed memory of up to 32 MiB a piece, unless it is told where the limit is.
    """
    rows, grown = [], {}
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    for name in ("DynamicCache", "FP8PagedCache e4m3"):
        task = json.dumps({"name": name, "tokens": tokens, "heads": heads, "backend": backend})
        script = f"import sys; from {__name__} import _grow; _grow(sys.argv[1])"
        run = subprocess.run(
            [sys.executable, "-c", script, task],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if run.returncode:
            raise RuntimeError(f"the process that measures {name} ended with:\n{run.stderr}")
        grown[name] = float(run.stdout.split()[-1])
        rows.append(_row("process grows", name, [grown[name] / 2**20], "MiB", context=tokens))
    ratio = grown["FP8PagedCache e4m3"] / grown["DynamicCache"]
    against = "DynamicCache, process"
    rows.append(
        _row("ratio", "FP8PagedCache e4m3", [ratio], "×", context=tokens, against=against,
             target=BYTES[0] if tokens >= 8192 else None)
    )  # fmt: skip
    return rows


def _grow(task: str, layers: int = 8) -> None:
    """Writes by how many bytes this process grew while it filled a cache and took a step."""
    given = json.loads(task)
    heads: Heads = tuple(given["heads"])
    module = _Module(heads[0] // heads[1])
    query, key = _numbers(heads[0], 1, heads[2]), _numbers(heads[1], 1, heads[2])

    def use(tokens: int) -> Cache:
        cache: Cache = DynamicCache()
        attention: Attention = sdpa_attention_forward
        if given["name"] in PAGED:
            settings = PAGED[given["name"]]
            cache = FP8PagedCache(_config(heads, layers), backend=given["backend"], **settings)
            attention = fp8_paged_attention
        for layer in range(layers):
            _fill(cache, tokens, heads, layer)
            _attend(module, query, key, key, cache, attention, layer)
        return cache

    with torch.inference_mode():
        use(64)  # compiled code and threads are there before the measurement
        before = _resident()
        cache = use(given["tokens"])
        sys.stdout.write(f"{_resident() - before}\n")
        del cache


def _resident() -> int:
    """Bytes of memory that this process holds."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import psutil  # accelerate brings it

    return int(psutil.Process().memory_info().rss)
