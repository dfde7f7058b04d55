"""Measure predictions of a model with outliers in K that no center or rotation removes.

Some models have keys that are far larger in a few pairs of channels. RoPE rotates these pairs with
the position, so they have no center, and rotation spreads them over the whole head. No small model
has such keys. This benchmark therefore multiplies K by a factor in such pairs, and divides Q by it.

Each cache is compared with plain E3M4 on the same texts, after exact and after stored prompts.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_fp8kv.attention.switching import paged_attention
from hf_fp8kv.cache.cache import FP8PagedCache
from hf_fp8kv.calibration.divergence import Scores
from hf_fp8kv.card.caches import CONTENDERS, Contender
from hf_fp8kv.card.long_texts import read_texts
from hf_fp8kv.card.measure import summarize_scores
from hf_fp8kv.card.predictions import prefill, score_text
from hf_fp8kv.errors import ConfigError
from hf_fp8kv.utils.environment import describe_run

from .shared import MODEL_OPTIONS, Options, Result, load_model_before, main

# Maximum change of the logits by the planted outliers, relative to the logits.
_TOLERANCE = 0.01
_PROBE_TOKENS = 32
# Attributes by which attention modules are found.
_REQUIRED_ATTRIBUTES = ("q_proj", "k_proj", "head_dim", "layer_idx")
_TEXT_KINDS = ("code", "prose", "manual", "chat")
# Number of tokens before the scored tokens, and number of scored tokens.
_POSITION, _SCORED_TOKENS = 768, 256
_PLANS = {"plain": ("fp8_e3m4", "fp8_e3m4"), "e2m5": ("fp8_e2m5 rotated", "fp8_e2m5 rotated")}


def measure_outliers(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    name: str,
    factor: float = 50.0,
    head_stride: int = 1,
    num_texts: int = 4,
    progress: Callable[[str], None],
) -> Result:
    """Return rows with `cache`, `prompt`, `kl`, `kl_error`, `ratio`, `ratio_high` and `k_rotated`.

    `ratio` is the ratio of the mean KL to plain E3M4, `ratio_high` its upper bound at 95 %, and
    `k_rotated` the number of layers whose K is rotated.

    Args:
        model: The model, in float32.
        tokenizer: The model's tokenizer.
        name: The model's name in the result.
        factor: Factor by which planted outliers multiply K.
        head_stride: Every `head_stride`-th head gets outliers. 1 means every head.
        num_texts: Number of texts of each kind.
        progress: Function that is called with the name of each text.
    """
    run = describe_run("outliers", device=str(model.device))
    caches = {key: CONTENDERS[key] for key in ("default", "fp8")}
    for key, plan in _PLANS.items():
        caches[key] = Contender(str(plan), partial(_make_cache, plan))
    scores = defaultdict[tuple[str, str], list[Scores]](list)
    with planted_outliers(model, factor, head_stride), paged_attention(model):
        for kind in _TEXT_KINDS:
            progress(kind)
            for text in read_texts(tokenizer, kind, num_texts, _POSITION):
                ids = text.to(model.device)
                for (_, prompt, key), scores_of_text in score_text(
                    model, ids, prefill(model, ids).states, caches, positions=[_POSITION],
                    scored=_SCORED_TOKENS, stored_positions=[_POSITION],
                ):  # fmt: skip
                    scores[key, prompt].append(scores_of_text)
        plans = {key: cache.make(model).plan for key, cache in caches.items()}
    rows = []
    for (key, prompt), text_scores in scores.items():
        ratio, ratio_high = _compare_means(text_scores, scores["plain", prompt])
        num_rotated = sum(layer_plan.k.rotated for layer_plan in plans[key].values())
        rows.append({
            "cache": caches[key].title, "prompt": prompt, **summarize_scores(text_scores),
            "ratio": ratio, "ratio_high": ratio_high, "k_rotated": num_rotated,
        })  # fmt: skip
    settings = {
        "model": name, "factor": factor, "heads": head_stride, "texts": list(_TEXT_KINDS),
        "num_texts": num_texts,
        "position": _POSITION, "scored": _SCORED_TOKENS,
    }  # fmt: skip
    return {**run, "settings": settings, "rows": rows}


def _make_cache(plan: tuple[str, str], model: PreTrainedModel) -> FP8PagedCache:
    return FP8PagedCache(model.config, plan=plan)


def _compare_means(scores: Sequence[Scores], plain: Sequence[Scores]) -> tuple[float, float]:
    """Return the ratio of the mean KL of the same texts, and its upper bound at 95 %."""
    kl, plain_kl = (torch.stack([text.kl.mean() for text in texts]) for texts in (scores, plain))
    ratio = kl.mean() / plain_kl.mean()
    error = (kl - ratio * plain_kl).std() / len(kl) ** 0.5 / plain_kl.mean()
    return ratio.item(), (ratio + 1.96 * error).item()


@contextmanager
def planted_outliers(model: PreTrainedModel, factor: float, head_stride: int = 1) -> Iterator[None]:
    """Multiply K by `factor` in two pairs of channels of each head, and divide Q by it.

    The pairs differ between layers. RoPE rotates some of them fast, and some slowly. The weights
    are restored afterwards.

    Args:
        model: The model, in float32, in which scaling K and Q changes the logits little.
        factor: Factor by which K is multiplied.
        head_stride: Every `head_stride`-th head gets outliers. The first head depends on the layer.

    Raises:
        ConfigError: RoPE is not applied directly to the outputs of `q_proj` and `k_proj`, or does
            not pair channels i and i + D / 2.
    """
    modules: list[Any] = [
        module
        for module in model.modules()
        if all(hasattr(module, name) for name in _REQUIRED_ATTRIBUTES)
    ]
    projections = [getattr(module, name) for module in modules for name in ("q_proj", "k_proj")]
    weights = [weight for projection in projections for weight in projection.parameters()]
    originals = [weight.detach().clone() for weight in weights]
    logits_before = _compute_logits(model)
    try:
        num_planted = sum(_plant_outliers(module, factor, head_stride) for module in modules)
        change = (_compute_logits(model) - logits_before).std() / logits_before.std()
        if not num_planted or not change < _TOLERANCE:
            raise ConfigError(
                "model: expected q_proj and k_proj that RoPE follows directly, and pairs of "
                f"channels i and i + D / 2, got {type(model).__name__}. Choose a Llama or Qwen2"
            )
        yield
    finally:
        with torch.no_grad():
            for weight, original in zip(weights, originals, strict=True):
                weight.copy_(original)


def _compute_logits(model: PreTrainedModel) -> torch.Tensor:
    ids = torch.arange(_PROBE_TOKENS, device=model.device)[None]
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float()


def _plant_outliers(module: Any, factor: float, head_stride: int) -> int:
    """Plant outliers in one attention module, and return the number of planted channels."""
    layer = module.layer_idx
    dim = module.head_dim
    num_pairs = dim // 2
    num_planted = 0
    num_heads = module.k_proj.out_features // dim
    group_size = module.q_proj.out_features // dim // num_heads  # query heads of a KV head
    for head in range(layer % min(head_stride, num_heads), num_heads, head_stride):
        # Together, the outliers of all layers have every frequency of RoPE.
        for pair in {(5 + 7 * layer) % num_pairs, (20 + 3 * layer + head) % num_pairs}:
            num_planted += 2
            for channel in (pair, pair + num_pairs):
                _scale_row(module.k_proj, head * dim + channel, factor)
                for query_head in range(head * group_size, (head + 1) * group_size):
                    _scale_row(module.q_proj, query_head * dim + channel, 1 / factor)
    return num_planted


def _scale_row(projection: torch.nn.Linear, row: int, factor: float) -> None:
    """Multiply a row of the weight and an element of the bias, which make one channel."""
    with torch.no_grad():
        for weight in projection.parameters():
            weight[row] *= factor


if __name__ == "__main__":
    options: Options = {
        **MODEL_OPTIONS,
        "--factor": {"type": float, "help": "Factor of the outliers. Default: 50."},
        "--heads": {"type": int, "dest": "head_stride", "help": "Plant in every n-th head."},
        "--texts": {"type": int, "dest": "num_texts", "help": "Texts of each kind. Default: 4."},
    }
    main(__doc__, load_model_before(measure_outliers), options)
