"""Section "latent" of the CPU suite: a decode step of one MLA layer, as DeepSeek's models have it.

A step stores a token's latent and attends to all: everything between the layer's projections. The
stock one expands the history, as the model's code does; "absorbed" is the same algebra as here on a
16-bit latent, written with torch's own products.
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
from hf_fp8kv.bench.contenders import DYNAMIC, Step, make_row, random_states, take_turns
from hf_fp8kv.cache.cache import FP8PagedCache
from hf_fp8kv.modeling.model_support import ATTENTION

ABSORBED = "cat + absorbed, bf16"
PAGED = {f"FP8PagedCache {name}": f"fp8_{name}" for name in ("e4m3", "e3m4")}
RANK, POSITIONS = 512, 64
# The most that a step may take of one of the stock kind at 16k tokens, by query heads.
_TARGETS = {16: 1 / 20, 128: 1 / 50}
_TARGET_TOKENS = 16384
# Relative RMS between steps: 8 bits in one, 16 in the other.
_TOLERANCE = 0.1
_CHUNK = 1024


def measure_latents(
    context: Sequence[int],
    heads: Sequence[int],
    backend: str,
    turns: int,
    report: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Return rows of decode steps over latents of 512 numbers and 64 of position, batch 1.

    `context`: tokens stored; `heads`: query heads; the stock step runs in three turns, since it
    takes seconds.
    """
    rows = []
    for count in heads:
        module = make_module(count)
        for tokens in context:
            report(f"latents, {count} heads, {tokens} tokens")
            rows += _measure(module, count, tokens, backend, turns)
    return rows


def make_module(
    heads: int, rank: int = RANK, positions: int = POSITIONS, layers: int = 1, layer: int = 0
) -> Any:
    """Return DeepSeek's attention with so many heads, random, bfloat16, that leaves latents.

    It is number `layer` of a model of `layers`.
    """
    config = DeepseekV3Config(
        hidden_size=256, num_attention_heads=heads, num_key_value_heads=heads, kv_lora_rank=rank,
        qk_rope_head_dim=positions, q_lora_rank=64, num_hidden_layers=layers,
    )  # fmt: skip
    config._attn_implementation = ATTENTION
    module = DeepseekV3Attention(config, layer).to(torch.bfloat16).eval().requires_grad_(False)
    torch.nn.init.normal_(module.kv_b_proj.weight, std=rank**-0.5)
    latent.install(module)
    return module


def _measure(
    module: Any, heads: int, tokens: int, backend: str, turns: int
) -> list[dict[str, Any]]:
    steps = make_steps(module, heads, tokens, backend)
    stock = {name: steps[name] for name in (*PAGED, DYNAMIC)}
    seconds = take_turns(stock, min(turns, 3))
    others = take_turns({name: steps[name] for name in (*PAGED, ABSORBED)}, turns)
    label = f"latent, {heads} heads"
    rows = [
        make_row(label, name, [1e3 * x for x in taken], "ms", context=tokens)
        for name, taken in {**others, DYNAMIC: seconds[DYNAMIC]}.items()
    ]
    for other, taken, target in (
        (DYNAMIC, seconds, _TARGETS.get(heads) if tokens == _TARGET_TOKENS else None),
        (ABSORBED, others, 1.0),
    ):
        for name in PAGED:
            ratios = [a / b for a, b in zip(taken[name], taken[other], strict=True)]
            rows.append(
                make_row(label, name, ratios, "×", context=tokens, against=other, target=target)
            )
    return rows


def make_steps(module: Any, heads: int, tokens: int, backend: str) -> dict[str, Step]:
    """Return a decode step of each cache with `tokens` stored, checked against the stock one."""
    query = random_states(heads, 1, module.qk_head_dim)
    new = random_states(1, 1, RANK), random_states(1, 1, POSITIONS)
    stored = random_states(1, tokens, RANK), random_states(1, tokens, POSITIONS)

    def step(cache: Cache, attend: Callable[..., Any]) -> torch.Tensor:
        states = module.expand_kv(*cache.update(*new, 0))
        attended: torch.Tensor = attend(module, query, *states, None, scaling=module.scaling)[0]
        return attended

    steps: dict[str, Step] = {}
    for name, dtype in PAGED.items():
        cache = FP8PagedCache(module.config, dtype=dtype, backend=backend)
        for start in range(0, tokens, _CHUNK):
            key, value = (x[:, :, start : start + _CHUNK] for x in stored)
            cache.update(key, value, 0)
        steps[name] = functools.partial(step, cache, fp8_paged_attention)
    dynamic = DynamicCache()
    dynamic.update(*stored, 0)
    steps[DYNAMIC] = functools.partial(step, dynamic, sdpa_attention_forward)
    steps[ABSORBED] = functools.partial(_absorb, module, query, new, list(stored))
    expected = steps[ABSORBED]()
    for name in PAGED:
        _check(name, steps[name](), expected)
    return steps


def _absorb(
    module: Any, query: torch.Tensor, new: tuple[torch.Tensor, ...], stored: list[torch.Tensor]
) -> torch.Tensor:
    """Attend to latents in bfloat16, as fast as torch's own products are."""
    stored[:] = [torch.cat([old, x], 2) for old, x in zip(stored, new, strict=True)]
    projections = latent.find_projections(module, stored[0])
    assert projections is not None
    key, position = stored[0][0, 0], stored[1][0, 0]
    absorbed = projections.absorb(query)[0, :, 0]
    logits = absorbed[:, :RANK] @ key.T + absorbed[:, RANK:] @ position.T
    weights = (logits.float() * module.scaling).softmax(-1).to(key.dtype)
    return projections.expand((weights @ key)[None, None])


def _check(name: str, found: Any, expected: Any) -> None:
    """Raise RuntimeError unless two steps agree: what is wrong is not worth timing."""
    error = float((found.float() - expected.float()).norm() / expected.float().norm())
    if not error < _TOLERANCE:
        raise RuntimeError(f"{name}: expected absorbed attention, got {error:.1e} relative error")
