"""Measure predictions of random MLA models with different formats of latents and RoPE parts.

No small MLA model exists. These models have DeepSeek V3's code, head sizes and rank. Their weights
imitate the properties that make real latents hard to store: decaying singular values, outlier
channels of the latent, and RoPE parts larger than latents. Every cache gets bfloat16 values. To
imitate the formats of other software, values are rounded before transformers' cache stores them.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedModel

from hf_fp8kv.attention.switching import paged_attention
from hf_fp8kv.cache.cache import FP8PagedCache
from hf_fp8kv.calibration.divergence import Scores
from hf_fp8kv.card.caches import RoundedCache, Rounding, round_to_bfloat16
from hf_fp8kv.card.measure import summarize_scores
from hf_fp8kv.formats import FORMATS, LayerPlan
from hf_fp8kv.formats.codec import round_to_format

from .divergence import UNQUANTIZED, compare_caches
from .shared import Result, main

_VOCABULARY = 2000
_E4M3 = FORMATS["fp8_e4m3"]


# For each random model, the magnitude of the RoPE part relative to the latents, and the number of
# channels of each latent that are scaled by eight.
MODEL_KINDS = {"mild": (1.0, 0), "large positions": (4.0, 0), "large positions, outliers": (4.0, 8)}


class _RoundedBf16(RoundedCache):
    """A cache of transformers that gets bfloat16 latents and RoPE parts, and rounds them."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(*round_to_bfloat16(key_states, value_states), *args, **kwargs)


class _PagedBf16(FP8PagedCache):
    """A cache of this package that gets bfloat16 latents and RoPE parts."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(*round_to_bfloat16(key_states, value_states), *args, **kwargs)


def _round_to_e4m3(x: Tensor, amax: Tensor) -> Tensor:
    scale = amax.clamp(min=1e-30) / _E4M3.max
    return round_to_format(x / scale, _E4M3) * scale


def _compute_amax(*states: Tensor) -> Tensor:
    return torch.cat(states, -1).abs().amax(-1, keepdim=True)


def _round_by_blocks(latent: Tensor, rope_part: Tensor) -> tuple[Tensor, Tensor]:
    """Round like `fp8_ds_mla` of vLLM and FlashMLA: E4M3 with a scale for each 128 values."""
    blocks = latent.unflatten(-1, (-1, 128))
    rounded = _round_to_e4m3(blocks, _compute_amax(blocks)).flatten(-2)
    return rounded, rope_part.bfloat16().to(rope_part.dtype)


def _round_together(
    latent: Tensor, rope_part: Tensor, *, scale_covers_rope: bool
) -> tuple[Tensor, Tensor]:
    """Round both parts with one scale, for the maximum of both parts or of the latent alone."""
    amax = _compute_amax(latent, rope_part) if scale_covers_rope else _compute_amax(latent)
    return _round_to_e4m3(latent, amax), _round_to_e4m3(rope_part, amax)


# For other formats, the bytes of a latent of 512 values with a RoPE part of 64, and the rounding.
IMITATIONS: dict[str, tuple[int, Rounding]] = {
    "bfloat16": (1152, round_to_bfloat16),
    "fp8_ds_mla (e4m3, scale per 128)": (656, _round_by_blocks),
    "e4m3, one scale for both": (580, partial(_round_together, scale_covers_rope=True)),
    "e4m3, the latent's scale for both": (580, partial(_round_together, scale_covers_rope=False)),
}
# Formats of latents and of RoPE parts.
PLANS = (
    ("fp8_e4m3", "auto"), ("fp8_e2m5 rotated", "auto"), ("int8 rotated", "auto"), ("int8", "auto"),
    ("fp8_e3m4", "fp8_e4m3"), ("fp8_e3m4", "fp8_e3m4"), ("fp8_e3m4", "int8"),
)  # fmt: skip
DEFAULT_CACHE = "FP8PagedCache, the default"


def measure_latent_accuracy(
    *,
    num_texts: int = 3,
    prefill_tokens: int = 512,
    scored_tokens: int = 256,
    num_layers: int = 4,
    rank: int = 512,
    progress: Callable[[str], None],
) -> Result:
    """Score predictions of random models with each format of latents and RoPE parts.

    A text has `prefill_tokens` and then `scored_tokens` random tokens. `rank` is the size of a
    latent. `progress` is called with the name of each text.

    Returns:
        `rows` with `model` (of `MODEL_KINDS`), `cache`, `bytes_per_token` (of a model in bf16 with
        latents of 512 and RoPE parts of 64 values) and the fields of `summarize_scores`.
    """
    rows = []
    for model_name, properties in MODEL_KINDS.items():
        model = make_model(*properties, num_layers=num_layers, rank=rank)
        cache_makers = _list_cache_makers(model)
        scores: dict[str, list[Scores]] = defaultdict(list)
        for index in range(num_texts):
            progress(f"{model_name}, text {index + 1} of {num_texts}")
            ids = _draw_text(prefill_tokens + scored_tokens, seed=index)
            with paged_attention(model):
                text_scores = compare_caches(
                    model, ids, cache_makers, num_prefill=prefill_tokens, chunk_size=128
                )
            for cache_name, cache_scores in text_scores.items():
                scores[cache_name].append(cache_scores)
        del scores[UNQUANTIZED]
        for name, all_scores in scores.items():
            num_bytes, _ = IMITATIONS.get(name) or (_measure_bytes(cache_makers[name]), None)
            rows.append({
                "model": model_name, "cache": name, "bytes_per_token": num_bytes,
                **summarize_scores(all_scores),
            })  # fmt: skip
    return {"rows": rows}


def _list_cache_makers(model: PreTrainedModel) -> dict[str, Callable[[], Any]]:
    config: Any = model.config
    makers: dict[str, Callable[[], Any]] = {DEFAULT_CACHE: partial(_PagedBf16, config)}
    for name, (_, rounding) in IMITATIONS.items():
        makers[name] = partial(_RoundedBf16, config, rounding)
    for latents, rope_parts in PLANS:
        plan = LayerPlan.parse(latents, rope_parts)
        name = f"latents {latents}, positions {rope_parts}"
        makers[name] = partial(_PagedBf16, config, plan=plan)
    return makers


def _measure_bytes(make_cache: Callable[[], Any]) -> float:
    """Return the bytes of a token in one layer of DeepSeek's sizes, for a model in bf16."""
    cache = make_cache()
    latents = torch.ones((1, 1, 64, 512), dtype=torch.bfloat16)
    cache.update(latents, latents[..., :64], 0)
    return float(cache.memory_footprint().used_bytes) / latents.shape[2]


def make_model(
    rope_magnitude: float, num_outliers: int, *, num_layers: int, rank: int
) -> PreTrainedModel:
    """Return a random model, float32, with attention that differs between tokens."""
    generator = torch.Generator().manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=_VOCABULARY, hidden_size=512, intermediate_size=1024, num_attention_heads=8,
        num_hidden_layers=num_layers, num_key_value_heads=8, kv_lora_rank=rank, q_lora_rank=256,
        qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, first_k_dense_replace=num_layers,
        n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        max_position_embeddings=4096,
    )  # fmt: skip
    model: Any = DeepseekV3ForCausalLM(config).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            weight.copy_(_draw_matrix(weight.shape, generator, is_flat="embed" in name))
    model.lm_head.weight.mul_(3)
    for layer in model.model.layers:
        attention: Any = layer.self_attn
        gains = torch.exp(0.5 * torch.randn(rank, generator=generator))
        gains[torch.randperm(rank, generator=generator)[:num_outliers]] *= 8
        attention.kv_a_layernorm.weight.copy_(gains)
        # The projection compensates for the gains of the norm, except for gains below 0.2.
        attention.kv_b_proj.weight.div_(gains.clamp(min=0.2))
        attention.kv_a_proj_with_mqa.weight[rank:].mul_(rope_magnitude)
        attention.q_b_proj.weight.mul_(3)
    return model  # type: ignore[no-any-return]


def _draw_matrix(shape: torch.Size, generator: torch.Generator, *, is_flat: bool) -> Tensor:
    """Return a matrix that keeps the norm of its input, or has unit variance if `is_flat`.

    The i-th singular value is proportional to the root of 1 / i, unless `is_flat`.
    """
    matrix: Tensor = torch.randn(shape, generator=generator)
    if is_flat:
        return matrix
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    singular_values = torch.arange(1, u.shape[1] + 1).float() ** -0.5
    matrix = (u * singular_values).matmul(v)
    return matrix.div(matrix.square().mean().sqrt() * shape[1] ** 0.5)


def _draw_text(num_tokens: int, seed: int) -> Tensor:
    """Return random tokens, `[1, num_tokens]`, whose frequencies follow Zipf's law, as words do."""
    frequencies = 1 / torch.arange(1, _VOCABULARY + 1).float()
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(frequencies, num_tokens, replacement=True, generator=generator)[None]


if __name__ == "__main__":
    main(__doc__, measure_latent_accuracy, {
        "--texts": {"type": int, "dest": "num_texts", "help": "Number of texts."},
    })  # fmt: skip
