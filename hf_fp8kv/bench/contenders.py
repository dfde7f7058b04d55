"""Make caches filled with random values, and decode steps of one layer over them."""

import functools
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from transformers import Cache, DynamicCache, LlamaConfig, QuantizedCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..attention.fp8_paged import fp8_paged_attention
from ..cache.cache import FP8PagedCache
from ..formats import DISTINCT_FORMATS

Step = Callable[[], object]
Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
_Cache = TypeVar("_Cache", bound=Cache)

DYNAMIC = "DynamicCache + sdpa"
QUANTIZED = "QuantizedCache fp8 + sdpa"
FOLDED = "cat + folded sdpa"
E4M3, E3M4, INT6 = "FP8PagedCache e4m3", "FP8PagedCache e3m4", "FP8PagedCache int6"
PAGED: dict[str, dict[str, Any]] = {
    **{
        f"FP8PagedCache {fmt.name.removeprefix('fp8_')}": {"dtype": fmt.name}
        for fmt in DISTINCT_FORMATS
    },
    f"{E4M3} static": {"dtype": "fp8_e4m3", "scales": 0.01},
    INT6: {"plan": "int6 rotated"},
}
TOLERANCE = 0.02  # relative RMS error from torch's attention on the same bytes, in bfloat16


class Heads(NamedTuple):
    """Number of query heads, number of KV heads, and head size, by default of Llama-3.1-8B."""

    query: int = 32
    kv: int = 8
    dim: int = 128


@dataclass(frozen=True)
class Setup:
    """Heads of the attention layer to measure, backend of `FP8PagedCache`, and torch device."""

    heads: Heads = field(default_factory=Heads)
    backend: str = "auto"
    device: str = "cpu"

    def make_layer(self) -> "AttentionLayer":
        return AttentionLayer(self.heads.query // self.heads.kv)

    def draw_states(self, num_tokens: int) -> torch.Tensor:
        """Return random keys or values, `[1, Hkv, num_tokens, D]`, bfloat16."""
        return draw_states(self.heads.kv, num_tokens, self.heads.dim, self.device)

    def draw_inputs(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return random queries, `[1, Hq, num_tokens, D]`, bfloat16, with keys and values."""
        query = draw_states(self.heads.query, num_tokens, self.heads.dim, self.device)
        return query, self.draw_states(num_tokens), self.draw_states(num_tokens)

    def make_paged_cache(self, name: str, num_layers: int = 1) -> FP8PagedCache:
        """Return an empty cache with the options of `PAGED[name]`."""
        config = make_config(self.heads, num_layers)
        return FP8PagedCache(config, backend=self.backend, **PAGED[name])

    def fill(self, cache: _Cache, num_tokens: int, layer_index: int = 0) -> _Cache:
        """Store random tokens in calls of up to 1,024 tokens, and return the cache."""
        for start in range(0, num_tokens, 1024):
            num_new = min(1024, num_tokens - start)
            cache.update(self.draw_states(num_new), self.draw_states(num_new), layer_index)
        return cache


class AttentionLayer(torch.nn.Module):
    """A stand-in for a layer of a model, with the attributes that attention functions read."""

    is_causal = True

    def __init__(self, num_groups: int, layer_index: int = 0) -> None:
        super().__init__()
        self.layer_idx = layer_index
        self.num_key_value_groups = num_groups


def make_config(heads: tuple[int, int, int], num_layers: int = 1) -> LlamaConfig:
    """Return the config of a model whose layers have these `Heads`."""
    num_query_heads, num_kv_heads, dim = heads
    return LlamaConfig(
        num_hidden_layers=num_layers,
        num_attention_heads=num_query_heads,
        head_dim=dim,
        num_key_value_heads=num_kv_heads,
        hidden_size=num_query_heads * dim,
        vocab_size=8,
        intermediate_size=8,
    )


def draw_states(num_heads: int, num_tokens: int, dim: int, device: str = "cpu") -> torch.Tensor:
    """Return random values, `[1, num_heads, num_tokens, dim]`, bfloat16."""
    return torch.randn(1, num_heads, num_tokens, dim, dtype=torch.bfloat16, device=device)


def take_turns(
    steps: Mapping[str, Step], num_turns: int, device: str = "cpu"
) -> dict[str, list[float]]:
    """Run each step once in each turn, after a warm-up turn, and return the seconds of each run.

    The order of the steps changes from turn to turn, because torch's threads spin for a while after
    a step and disturb the next step.
    """
    is_gpu = torch.device(device).type == "cuda"
    wait: Step = functools.partial(torch.cuda.synchronize, device) if is_gpu else (lambda: None)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    shuffle = random.Random(0).shuffle
    for turn in range(num_turns + 1):
        for name in order:
            wait()
            start = time.perf_counter()
            steps[name]()
            wait()
            if turn > 0:
                seconds[name].append(time.perf_counter() - start)
        shuffle(order)
    return seconds


def compute_ratios(seconds: Mapping[str, list[float]], name: str, baseline: str) -> list[float]:
    """Return the time of a step divided by the time of step `baseline`, for each turn."""
    return [
        time / baseline_time
        for time, baseline_time in zip(seconds[name], seconds[baseline], strict=True)
    ]


def store_and_attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: Cache,
    attention: Attention,
    layer_index: int = 0,
) -> torch.Tensor:
    """Store tokens, `[1, Hkv, T, D]`, and return attention of their queries, `[1, T, Hq, D]`."""
    keys, values = cache.update(key, value, layer_index)
    return attention(module, query, keys, values, None, scaling=query.shape[3] ** -0.5)[0]


def make_steps(num_tokens: int, setup: Setup) -> dict[str, Step]:
    """Return a decode step of each cache, which already holds `num_tokens` tokens.

    Raises:
        RuntimeError: A step over pages does not compute attention.
    """
    module, (query, key, value) = setup.make_layer(), setup.draw_inputs(1)
    attend = functools.partial(store_and_attend, module, query, key, value)
    steps: dict[str, Step] = {}
    for name in PAGED:
        cache = setup.fill(setup.make_paged_cache(name), num_tokens)
        step = functools.partial(attend, cache, fp8_paged_attention)
        _check_output(step(), module, query, cache, name)
        steps[name] = step
    dynamic_cache = setup.fill(DynamicCache(), num_tokens)
    steps[DYNAMIC] = functools.partial(attend, dynamic_cache, sdpa_attention_forward)
    quantized_cache = setup.fill(QuantizedCache("fp8", make_config(setup.heads)), num_tokens)
    steps[QUANTIZED] = functools.partial(attend, quantized_cache, sdpa_attention_forward)
    steps[FOLDED] = _make_folded_step(num_tokens, setup, query, key, value)
    return steps


def _make_folded_step(
    num_tokens: int, setup: Setup, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> Step:
    """Return a step of torch in bfloat16 that treats query heads of a KV head as query tokens."""
    states = [setup.draw_states(num_tokens) for _ in range(2)]  # keys and values
    folded_query = query.view(1, setup.heads.kv, -1, setup.heads.dim)

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
