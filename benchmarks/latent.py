"""Time decode steps of one MLA layer on a CPU, with the sizes of DeepSeek's models.

A step stores a token's latent and attends to all latents. It contains everything between the
layer's projections. The step of transformers expands the history, as the model's code does.
"absorbed" is this package's algebra on a 16-bit latent, with torch's matrix products.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import Cache, DeepseekV3Config, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from hf_fp8kv.attention import latent
from hf_fp8kv.attention.fp8_paged import fp8_paged_attention
from hf_fp8kv.bench.contenders import DYNAMIC, Step, compute_ratios, draw_states, take_turns
from hf_fp8kv.bench.reporting import make_row
from hf_fp8kv.cache.cache import FP8PagedCache
from hf_fp8kv.modeling.model_support import ATTENTION
from hf_fp8kv.utils.environment import describe_run

from .shared import TURNS, Result, main

ABSORBED = "cat + absorbed, bf16"
PAGED = {f"FP8PagedCache {name}": f"fp8_{name}" for name in ("e4m3", "e3m4")}
RANK, ROPE_DIM = 512, 64
# Maximum relative RMS difference between steps with 8 and with 16 bits.
_TOLERANCE = 0.1
_CHUNK = 1024


def measure_latents(
    *,
    context: Sequence[int] = (4096, 16384, 32768),
    heads: Sequence[int] = (16, 128),
    backend: str = "auto",
    turns: int = 9,
    progress: Callable[[str], None],
) -> Result:
    """Return rows of decode steps over latents of 512 values and RoPE parts of 64, batch 1.

    Args:
        context: Numbers of stored tokens.
        heads: Numbers of query heads.
        backend: Backend of `FP8PagedCache`.
        turns: Number of turns. The step of transformers takes seconds, so it has at most three.
        progress: Function that is called with the name of the next measurement.
    """
    run, rows = describe_run("latent"), []
    with torch.inference_mode():
        for num_heads in heads:
            module = make_module(num_heads)
            for tokens in context:
                progress(f"latents, {num_heads} heads, {tokens} tokens")
                rows += _measure_steps(module, num_heads, tokens, backend, turns)
    settings = {"context": list(context), "heads": list(heads), "turns": turns, "backend": backend}
    return {**run, "settings": settings, "rows": rows}


def make_module(
    heads: int, rank: int = RANK, rope_dim: int = ROPE_DIM, layers: int = 1, layer: int = 0
) -> Any:
    """Return a random attention layer of DeepSeek V3, bfloat16, that stores latents.

    Args:
        heads: Number of query heads.
        rank: Size of a latent.
        rope_dim: Size of the RoPE part next to it.
        layers: Number of layers of the model.
        layer: Index of this layer.
    """
    config = DeepseekV3Config(
        hidden_size=256, num_attention_heads=heads, num_key_value_heads=heads, kv_lora_rank=rank,
        qk_rope_head_dim=rope_dim, q_lora_rank=64, num_hidden_layers=layers,
    )  # fmt: skip
    config._attn_implementation = ATTENTION
    module = DeepseekV3Attention(config, layer).to(torch.bfloat16).eval().requires_grad_(False)
    torch.nn.init.normal_(module.kv_b_proj.weight, std=rank**-0.5)
    latent.install(module)
    return module


def _measure_steps(
    module: Any, heads: int, tokens: int, backend: str, turns: int
) -> list[dict[str, Any]]:
    steps = make_steps(module, heads, tokens, backend)
    expanded_seconds = take_turns({name: steps[name] for name in (*PAGED, DYNAMIC)}, min(turns, 3))
    absorbed_seconds = take_turns({name: steps[name] for name in (*PAGED, ABSORBED)}, turns)
    label = f"latent, {heads} heads"
    rows = [
        make_row(label, name, [1e3 * x for x in durations], "ms", context=tokens)
        for name, durations in {**absorbed_seconds, DYNAMIC: expanded_seconds[DYNAMIC]}.items()
    ]
    return rows + [
        make_row(
            label, name, compute_ratios(durations, name, other), "×", context=tokens, baseline=other
        )
        for other, durations in ((DYNAMIC, expanded_seconds), (ABSORBED, absorbed_seconds))
        for name in PAGED
    ]


def make_steps(module: Any, heads: int, tokens: int, backend: str) -> dict[str, Step]:
    """Return a decode step of each cache, which holds `tokens` tokens.

    Raises:
        RuntimeError: A step of this package does not compute absorbed attention.
    """
    query = draw_states(heads, 1, module.qk_head_dim)
    new_states = draw_states(1, 1, RANK), draw_states(1, 1, ROPE_DIM)
    history = draw_states(1, tokens, RANK), draw_states(1, tokens, ROPE_DIM)

    def step(cache: Cache, attend: Callable[..., Any]) -> torch.Tensor:
        states = module.expand_kv(*cache.update(*new_states, 0))
        output: torch.Tensor = attend(module, query, *states, None, scaling=module.scaling)[0]
        return output

    steps: dict[str, Step] = {}
    for name, dtype in PAGED.items():
        cache = FP8PagedCache(module.config, dtype=dtype, backend=backend)
        for start in range(0, tokens, _CHUNK):
            key, value = (x[:, :, start : start + _CHUNK] for x in history)
            cache.update(key, value, 0)
        steps[name] = functools.partial(step, cache, fp8_paged_attention)
    dynamic_cache = DynamicCache()
    dynamic_cache.update(*history, 0)
    steps[DYNAMIC] = functools.partial(step, dynamic_cache, sdpa_attention_forward)
    steps[ABSORBED] = functools.partial(_attend_absorbed, module, query, new_states, list(history))
    expected: Any = steps[ABSORBED]()
    for name in PAGED:
        output: Any = steps[name]()
        error = float((output.float() - expected.float()).norm() / expected.float().norm())
        if not error < _TOLERANCE:
            raise RuntimeError(f"{name}: expected absorbed attention, got {error:.1e} error")
    return steps


def _attend_absorbed(
    module: Any, query: torch.Tensor, states: tuple[torch.Tensor, ...], history: list[torch.Tensor]
) -> torch.Tensor:
    """Attend to latents in bfloat16 with torch's matrix products."""
    history[:] = [torch.cat([past, x], 2) for past, x in zip(history, states, strict=True)]
    projections = latent.find_projections(module, history[0])
    assert projections is not None
    key, rope_part = history[0][0, 0], history[1][0, 0]
    absorbed = projections.absorb(query)[0, :, 0]
    logits = absorbed[:, :RANK] @ key.T + absorbed[:, RANK:] @ rope_part.T
    weights = (logits.float() * module.scaling).softmax(-1).to(key.dtype)
    return projections.expand((weights @ key)[None, None])


if __name__ == "__main__":
    main(__doc__, measure_latents, TURNS)
