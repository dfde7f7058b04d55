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

from .shared import TURNS_OPTION, Result, main

ABSORBED = "cat + absorbed, bf16"
PAGED = {f"FP8PagedCache {name}": f"fp8_{name}" for name in ("e4m3", "e3m4")}
RANK, ROPE_DIM = 512, 64
# Maximum relative RMS difference between steps with 8 and with 16 bits.
_TOLERANCE = 0.1
_CHUNK_TOKENS = 1024


def measure_latents(
    *,
    context_lengths: Sequence[int] = (4096, 16384, 32768),
    head_counts: Sequence[int] = (16, 128),
    backend: str = "auto",
    turns: int = 9,
    progress: Callable[[str], None],
) -> Result:
    """Return rows of decode steps over latents of 512 values and RoPE parts of 64, batch 1.

    Args:
        context_lengths: Numbers of stored tokens.
        head_counts: Numbers of query heads.
        backend: Backend of `FP8PagedCache`.
        turns: Number of turns. A step of transformers takes seconds, so it has at most three turns.
        progress: Function that is called with the name of the next measurement.
    """
    run = describe_run("latent")
    rows: list[Result] = []
    with torch.inference_mode():
        for num_heads in head_counts:
            module = make_module(num_heads)
            for num_tokens in context_lengths:
                progress(f"latents, {num_heads} heads, {num_tokens} tokens")
                rows += _measure_steps(module, num_heads, num_tokens, backend, turns)
    settings = {
        "context": list(context_lengths), "heads": list(head_counts), "turns": turns,
        "backend": backend,
    }  # fmt: skip
    return {**run, "settings": settings, "rows": rows}


def make_module(
    num_heads: int, rank: int = RANK, rope_dim: int = ROPE_DIM, num_layers: int = 1, layer: int = 0
) -> Any:
    """Return a random attention layer of DeepSeek V3, bfloat16, that stores latents.

    `rank` and `rope_dim` are the sizes of a latent and of its RoPE part. The layer has the index
    `layer` in a model of `num_layers` layers.
    """
    config = DeepseekV3Config(
        hidden_size=256, num_attention_heads=num_heads, num_key_value_heads=num_heads,
        kv_lora_rank=rank, qk_rope_head_dim=rope_dim, q_lora_rank=64, num_hidden_layers=num_layers,
    )  # fmt: skip
    config._attn_implementation = ATTENTION
    module = DeepseekV3Attention(config, layer).to(torch.bfloat16).eval().requires_grad_(False)
    torch.nn.init.normal_(module.kv_b_proj.weight, std=rank**-0.5)
    latent.install(module)
    return module


def _measure_steps(
    module: Any, num_heads: int, num_tokens: int, backend: str, turns: int
) -> list[dict[str, Any]]:
    steps = make_steps(module, num_heads, num_tokens, backend)
    expanded_seconds = take_turns({name: steps[name] for name in (*PAGED, DYNAMIC)}, min(turns, 3))
    absorbed_seconds = take_turns({name: steps[name] for name in (*PAGED, ABSORBED)}, turns)
    make_case_row = functools.partial(make_row, f"latent, {num_heads} heads", context=num_tokens)
    rows = [
        make_case_row(name, [1e3 * duration for duration in durations], "ms")
        for name, durations in {**absorbed_seconds, DYNAMIC: expanded_seconds[DYNAMIC]}.items()
    ]
    return rows + [
        make_case_row(name, compute_ratios(seconds, name, baseline), "×", baseline=baseline)
        for baseline, seconds in ((DYNAMIC, expanded_seconds), (ABSORBED, absorbed_seconds))
        for name in PAGED
    ]


def make_steps(module: Any, num_heads: int, num_tokens: int, backend: str) -> dict[str, Step]:
    """Return a decode step of each cache, which holds `num_tokens` tokens.

    Raises:
        RuntimeError: A step of this package does not compute absorbed attention.
    """
    query = draw_states(num_heads, 1, module.qk_head_dim)
    new_states = draw_states(1, 1, RANK), draw_states(1, 1, ROPE_DIM)
    history = draw_states(1, num_tokens, RANK), draw_states(1, num_tokens, ROPE_DIM)

    def step(cache: Cache, attend: Callable[..., Any]) -> torch.Tensor:
        states = module.expand_kv(*cache.update(*new_states, 0))
        output: torch.Tensor = attend(module, query, *states, None, scaling=module.scaling)[0]
        return output

    steps: dict[str, Step] = {}
    for name, dtype in PAGED.items():
        cache = FP8PagedCache(module.config, dtype=dtype, backend=backend)
        for latents, rope_parts in zip(*(x.split(_CHUNK_TOKENS, 2) for x in history), strict=True):
            cache.update(latents, rope_parts, 0)
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
            raise RuntimeError(f"{name}: expected absorbed attention, got an error of {error:.1e}")
    return steps


def _attend_absorbed(
    module: Any, query: torch.Tensor, states: tuple[torch.Tensor, ...], history: list[torch.Tensor]
) -> torch.Tensor:
    """Append `states` to `history`, and attend to it in bfloat16 with torch's matrix products."""
    history[:] = [torch.cat([past, new], 2) for past, new in zip(history, states, strict=True)]
    projections = latent.find_projections(module, history[0])
    assert projections is not None
    latents, rope_parts = (x[0, 0] for x in history)
    absorbed_query = projections.absorb(query)[0, :, 0]
    logits = absorbed_query[:, :RANK] @ latents.T + absorbed_query[:, RANK:] @ rope_parts.T
    weights = (logits.float() * module.scaling).softmax(-1).to(latents.dtype)
    return projections.expand((weights @ latents)[None, None])


if __name__ == "__main__":
    main(__doc__, measure_latents, TURNS_OPTION)
