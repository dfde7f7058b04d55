"""Make caches filled with random values, and decode steps of one layer over them."""

import functools
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from transformers import Cache, DynamicCache, LlamaConfig, QuantizedCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..attention.fp8_paged import fp8_paged_attention
from ..cache.cache import FP8PagedCache
from ..formats import DISTINCT

Step = Callable[[], object]
Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
_Cache = TypeVar("_Cache", bound=Cache)
# Number of query heads, number of key/value heads, head size.
Heads = tuple[int, int, int]

DYNAMIC, QUANTIZED, FOLDED = "DynamicCache + sdpa", "QuantizedCache fp8 + sdpa", "cat + folded sdpa"
E4M3, E3M4 = "FP8PagedCache e4m3", "FP8PagedCache e3m4"
PAGED: dict[str, dict[str, Any]] = {
    **{f"FP8PagedCache {fmt.name.removeprefix('fp8_')}": {"dtype": fmt.name} for fmt in DISTINCT},
    f"{E4M3} static": {"dtype": "fp8_e4m3", "scales": 0.01},
}
# Maximum relative RMS error from torch's attention on the same bytes. Both round to bfloat16.
TOLERANCE = 0.02


@dataclass(frozen=True)
class Setup:
    """Shape, backend and device of the attention layer to measure.

    Attributes:
        heads: Number of query heads, number of key/value heads, head size.
        backend: Backend of `FP8PagedCache`.
        device: Device of all tensors.
    """

    heads: Heads = (32, 8, 128)
    backend: str = "auto"
    device: str = "cpu"

    @property
    def module(self) -> "AttentionLayer":
        return AttentionLayer(self.heads[0] // self.heads[1])

    def queries(self, tokens: int) -> torch.Tensor:
        """Return random queries, `[1, Hq, tokens, D]`, bfloat16."""
        return random_states(self.heads[0], tokens, self.heads[2], self.device)

    def states(self, tokens: int) -> torch.Tensor:
        """Return random keys or values, `[1, Hkv, tokens, D]`, bfloat16."""
        return random_states(self.heads[1], tokens, self.heads[2], self.device)

    def make_paged(self, name: str, layers: int = 1) -> FP8PagedCache:
        """Return an empty cache with the options of `PAGED[name]`."""
        return FP8PagedCache(make_config(self.heads, layers), backend=self.backend, **PAGED[name])

    def fill(self, cache: _Cache, tokens: int, layer: int = 0) -> _Cache:
        """Store random tokens in several calls, and return the cache."""
        for start in range(0, tokens, 1024):
            num_new = min(1024, tokens - start)
            cache.update(self.states(num_new), self.states(num_new), layer)
        return cache


class AttentionLayer(torch.nn.Module):
    """A stand-in for a model's layer with the attributes that attention functions read."""

    is_causal = True

    def __init__(self, num_groups: int, layer: int = 0) -> None:
        super().__init__()
        self.layer_idx, self.num_key_value_groups = layer, num_groups


def make_config(heads: Heads, layers: int = 1) -> LlamaConfig:
    """Return the config of a model with layers of these query heads, KV heads and head size."""
    return LlamaConfig(
        num_hidden_layers=layers, num_attention_heads=heads[0], num_key_value_heads=heads[1],
        head_dim=heads[2], hidden_size=heads[0] * heads[2], vocab_size=8, intermediate_size=8,
    )  # fmt: skip


def random_states(heads: int, tokens: int, dim: int, device: str = "cpu") -> torch.Tensor:
    """Return random values, `[1, heads, tokens, dim]`, bfloat16."""
    return torch.randn(1, heads, tokens, dim, dtype=torch.bfloat16, device=device)


def take_turns(
    steps: Mapping[str, Step], turns: int, device: str = "cpu"
) -> dict[str, list[float]]:
    """Run each step once in each turn, after a warm-up turn, and return the seconds of each run.

    The order changes from turn to turn, because torch's threads spin for a while after their work
    and disturb the next step.
    """
    is_gpu = torch.device(device).type == "cuda"
    wait: Step = functools.partial(torch.cuda.synchronize, device) if is_gpu else (lambda: None)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order, shuffle = list(steps), random.Random(0).shuffle
    for turn in range(turns + 1):
        for name in order:
            wait()
            start = time.perf_counter()
            steps[name]()
            wait()
            if turn:
                seconds[name].append(time.perf_counter() - start)
        shuffle(order)
    return seconds


def ratios(seconds: Mapping[str, list[float]], name: str, baseline: str) -> list[float]:
    """Return the time of a step divided by the time of step `baseline`, for each turn."""
    return [a / b for a, b in zip(seconds[name], seconds[baseline], strict=True)]


def attend_step(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: Cache,
    attention: Attention,
    layer: int = 0,
) -> torch.Tensor:
    """Store a token, `[1, Hkv, 1, D]`, and return the attention of a query, `[1, 1, Hq, D]`."""
    keys, values = cache.update(key, value, layer)
    return attention(module, query, keys, values, None, scaling=query.shape[3] ** -0.5)[0]


def make_steps(tokens: int, setup: Setup) -> dict[str, Step]:
    """Return a decode step of each cache, which already holds `tokens` tokens.

    Raises:
        RuntimeError: A step does not compute attention.
    """
    module, query = setup.module, setup.queries(1)
    key, value = setup.states(1), setup.states(1)
    attend = functools.partial(attend_step, module, query, key, value)
    steps: dict[str, Step] = {}
    for name in PAGED:
        cache = setup.fill(setup.make_paged(name), tokens)
        step = functools.partial(attend, cache, fp8_paged_attention)
        _check_output(step(), module, query, cache, name)
        steps[name] = step
    dynamic_cache = setup.fill(DynamicCache(), tokens)
    steps[DYNAMIC] = functools.partial(attend, dynamic_cache, sdpa_attention_forward)
    quantized = setup.fill(QuantizedCache(backend="fp8", config=make_config(setup.heads)), tokens)
    steps[QUANTIZED] = functools.partial(attend, quantized, sdpa_attention_forward)
    steps[FOLDED] = _make_folded_step(tokens, setup, query, key, value)
    return steps


def _make_folded_step(
    tokens: int, setup: Setup, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> Step:
    """Return torch's fastest step in bfloat16, which folds the query heads of a KV head."""
    states = [setup.states(tokens) for _ in range(2)]
    folded_query = query.view(1, setup.heads[1], -1, setup.heads[2])

    def step() -> torch.Tensor:
        states[:] = torch.cat([states[0], key], 2), torch.cat([states[1], value], 2)
        return torch.nn.functional.scaled_dot_product_attention(folded_query, states[0], states[1])

    return step


def _check_output(
    output: torch.Tensor, module: torch.nn.Module, query: torch.Tensor, cache: Cache, name: str
) -> None:
    """Raise RuntimeError unless `output` is the attention of `query` to the tokens of `cache`."""
    layer: Any = cache.layers[0]
    expected = sdpa_attention_forward(
        module, query, layer.keys + 0, layer.values + 0, None, scaling=query.shape[3] ** -0.5
    )[0].float()
    error = ((output.float() - expected).square().mean() / expected.square().mean()).sqrt().item()
    if not error < TOLERANCE:
        raise RuntimeError(f"{name}: expected torch's attention, got {error:.1e} relative error")
