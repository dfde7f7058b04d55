"""Contenders of the CPU suite: caches filled with random numbers, and decode steps over them."""

import functools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from transformers import Cache, DynamicCache, LlamaConfig, QuantizedCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..attention.fp8_paged import fp8_paged_attention
from ..cache.cache import FP8PagedCache
from ..formats import DISTINCT
from .reporting import quartiles

Step = Callable[[], object]
Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
_Cache = TypeVar("_Cache", bound=Cache)
# Query heads, key/value heads, head size.
Heads = tuple[int, int, int]

DYNAMIC, QUANTIZED, FOLDED = "DynamicCache + sdpa", "QuantizedCache fp8 + sdpa", "cat + folded sdpa"
E4M3, E3M4 = "FP8PagedCache e4m3", "FP8PagedCache e3m4"
PAGED: dict[str, dict[str, Any]] = {
    **{f"FP8PagedCache {fmt.name.removeprefix('fp8_')}": {"dtype": fmt.name} for fmt in DISTINCT},
    f"{E4M3} static": {"dtype": "fp8_e4m3", "scales": 0.01},
}
# The relative RMS between a step and torch's attention on the same bytes: both round to bfloat16.
TOLERANCE = 0.02


class AttentionLayer(torch.nn.Module):
    """A stand-in for a model's layer: what the attention functions ask of one."""

    is_causal = True

    def __init__(self, groups: int, layer: int = 0) -> None:
        super().__init__()
        self.layer_idx, self.num_key_value_groups = layer, groups


def make_config(heads: tuple[int, int, int], layers: int = 1) -> LlamaConfig:
    """Return the config of a model with layers of these query heads, KV heads and head size."""
    return LlamaConfig(
        num_hidden_layers=layers, num_attention_heads=heads[0], num_key_value_heads=heads[1],
        head_dim=heads[2], hidden_size=heads[0] * heads[2], vocab_size=8, intermediate_size=8,
    )  # fmt: skip


def make_row(
    measure: str,
    cache: str,
    values: Sequence[float],
    unit: str,
    *,
    context: int | None = None,
    against: str | None = None,
    target: float | None = None,
) -> dict[str, Any]:
    """Return a row of the suite: the median of the values and their quartiles."""
    value, low, high = quartiles(values)
    return {
        "measure": measure, "cache": cache, "context": context, "against": against,
        "value": value, "unit": unit, "low": low, "high": high, "target": target,
    }  # fmt: skip


def take_turns(steps: Mapping[str, Step], turns: int) -> dict[str, list[float]]:
    """Return the seconds of each step, in turns; the first turn does not count.

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


def random_states(heads: int, tokens: int, dim: int) -> torch.Tensor:
    """Return random `[1, heads, tokens, dim]`, bfloat16."""
    return torch.randn(1, heads, tokens, dim, dtype=torch.bfloat16)


def fill(cache: _Cache, tokens: int, heads: Heads, layer: int = 0) -> _Cache:
    """Store random tokens in several calls, and return the cache."""
    for start in range(0, tokens, 1024):
        count = min(1024, tokens - start)
        key, value = (random_states(heads[1], count, heads[2]) for _ in range(2))
        cache.update(key, value, layer)
    return cache


def make_paged(heads: Heads, backend: str, name: str, layers: int = 1) -> FP8PagedCache:
    """Return one of the caches of `PAGED`, empty."""
    return FP8PagedCache(make_config(heads, layers), backend=backend, **PAGED[name])


def attend_step(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: Cache,
    attention: Attention,
    layer: int = 0,
) -> torch.Tensor:
    """Store one token, `[1, Hkv, 1, D]`, and return the attention over all, `[1, 1, Hq, D]`."""
    keys, values = cache.update(key, value, layer)
    return attention(module, query, keys, values, None, scaling=query.shape[3] ** -0.5)[0]


def make_steps(tokens: int, heads: Heads, backend: str) -> dict[str, Step]:
    """Return a decode step of each cache, with `tokens` stored.

    Raises:
        RuntimeError: a step does not compute attention.
    """
    module = AttentionLayer(heads[0] // heads[1])
    query = random_states(heads[0], 1, heads[2])
    key, value = random_states(heads[1], 1, heads[2]), random_states(heads[1], 1, heads[2])
    attend = functools.partial(attend_step, module, query, key, value)
    steps: dict[str, Step] = {}
    for name in PAGED:
        cache = fill(make_paged(heads, backend, name), tokens, heads)
        step = functools.partial(attend, cache, fp8_paged_attention)
        _check(step(), module, query, cache, name)
        steps[name] = step
    dynamic = fill(DynamicCache(), tokens, heads)
    steps[DYNAMIC] = functools.partial(attend, dynamic, sdpa_attention_forward)
    quantized = fill(QuantizedCache(backend="fp8", config=make_config(heads)), tokens, heads)
    steps[QUANTIZED] = functools.partial(attend, quantized, sdpa_attention_forward)
    steps[FOLDED] = _make_folded(tokens, heads, query, key, value)
    return steps


def _make_folded(
    tokens: int, heads: Heads, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> Step:
    """Return the fastest step of torch in bfloat16: a key head's query heads as its queries."""
    stored = [random_states(heads[1], tokens, heads[2]) for _ in range(2)]
    folded = query.view(1, heads[1], -1, heads[2])

    def step() -> torch.Tensor:
        stored[:] = torch.cat([stored[0], key], 2), torch.cat([stored[1], value], 2)
        return torch.nn.functional.scaled_dot_product_attention(folded, stored[0], stored[1])

    return step


def _check(
    output: torch.Tensor, module: torch.nn.Module, query: torch.Tensor, cache: Cache, name: str
) -> None:
    """Raise RuntimeError unless a step computes attention: what is wrong is not worth timing."""
    layer: Any = cache.layers[0]
    expected = sdpa_attention_forward(
        module, query, layer.keys + 0, layer.values + 0, None, scaling=query.shape[3] ** -0.5
    )[0].float()
    error = ((output.float() - expected).square().mean() / expected.square().mean()).sqrt().item()
    if not error < TOLERANCE:
        raise RuntimeError(f"{name}: expected torch's attention, got {error:.1e} relative error")
