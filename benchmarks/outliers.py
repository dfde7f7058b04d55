"""Measure predictions of a model with outliers in K that no center or rotation removes.

Some models have keys that are far larger in a few pairs of channels. RoPE rotates these pairs with
the position, so they have no center, and rotation spreads them over the whole head. No small model
has such keys. This benchmark therefore multiplies K by a factor in such pairs, and divides Q by it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_fp8kv.attention.switching import paged_attention
from hf_fp8kv.cache.cache import FP8PagedCache
from hf_fp8kv.cache.rope_rotation import RopeRotation
from hf_fp8kv.card.caches import CONTENDERS, Contender
from hf_fp8kv.card.measure import summarize_scores
from hf_fp8kv.card.predictions import prefill, score_text
from hf_fp8kv.card.texts import read_texts
from hf_fp8kv.errors import ConfigError
from hf_fp8kv.utils.environment import describe_run

from .shared import MODEL_OPTIONS, Options, Result, load_model_before, main

# Maximum change of the logits by the planted outliers, relative to the logits.
_TOLERANCE = 0.01
_PROBE_TOKENS = 32
# Attributes by which attention modules are found.
_REQUIRED_ATTRIBUTES = ("q_proj", "k_proj", "head_dim", "layer_idx")
_TEXT_KINDS = ("code", "prose", "manual")
# Number of tokens before the scored tokens, and number of scored tokens.
_POSITION, _SCORED_TOKENS = 768, 256
_E2M5_PLAN = ("fp8_e2m5 rotated centered", "fp8_e2m5 rotated")


def measure_outliers(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    name: str,
    factor: float = 50.0,
    head_stride: int = 1,
    progress: Callable[[str], None],
) -> Result:
    """Return rows with `cache`, `kl`, `kl_error` and `k_rotated` (layers whose K is rotated).

    Args:
        model: The model, in float32.
        tokenizer: The model's tokenizer.
        name: The model's name in the result.
        factor: Factor by which planted outliers multiply K.
        head_stride: Every `head_stride`-th head gets outliers. 1 means every head.
        progress: Function that is called with the name of each text.
    """
    run = describe_run("outliers", device=str(model.device))
    e2m5 = Contender(str(_E2M5_PLAN), lambda model: FP8PagedCache(model.config, plan=_E2M5_PLAN))
    caches = {key: CONTENDERS[key] for key in ("default", "adaptive", "fp8")} | {"e2m5": e2m5}
    all_scores = []
    with planted_outliers(model, factor, head_stride), paged_attention(model):
        for kind in _TEXT_KINDS:
            progress(kind)
            ids = read_texts(tokenizer, kind, 1, _POSITION)[0].to(model.device)
            states = prefill(model, ids).states
            all_scores.append(
                score_text(model, ids, states, caches, positions=[_POSITION], scored=_SCORED_TOKENS)
            )
        plans = {key: cache.make(model).plan for key, cache in caches.items()}
    rows = []
    for key, cache in caches.items():
        summary = summarize_scores([text_scores[_POSITION, key] for text_scores in all_scores])
        num_rotated = sum(layer_plan.k.rotated for layer_plan in plans[key].values())
        rows.append({"cache": cache.title, **summary, "k_rotated": num_rotated})
    settings = {
        "model": name, "factor": factor, "heads": head_stride, "texts": list(_TEXT_KINDS),
        "position": _POSITION, "scored": _SCORED_TOKENS,
    }  # fmt: skip
    return {**run, "settings": settings, "rows": rows}


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
        ConfigError: RoPE is not applied directly to the outputs of `q_proj` and `k_proj`.
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
        num_planted = sum(_plant_outliers(model, module, factor, head_stride) for module in modules)
        change = (_compute_logits(model) - logits_before).std() / logits_before.std()
        if not num_planted or not change < _TOLERANCE:
            raise ConfigError(
                "model: expected q_proj and k_proj that RoPE follows directly, got "
                f"{type(model).__name__}. Choose a model without norms of Q and K."
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


def _plant_outliers(model: PreTrainedModel, module: Any, factor: float, head_stride: int) -> int:
    """Plant outliers in one attention module, and return the number of planted channels."""
    config = model.config.get_text_config(decoder=True)
    layer = module.layer_idx
    rope = RopeRotation.from_config(config)(layer)
    dim = module.head_dim
    num_pairs = int(dim * rope.paired_fraction) // 2
    if not num_pairs:
        return 0
    num_planted = 0
    num_heads = module.k_proj.out_features // dim
    group_size = module.q_proj.out_features // dim // num_heads  # query heads of a KV head
    for head in range(layer % min(head_stride, num_heads), num_heads, head_stride):
        # Together, the outliers of all layers have every frequency of RoPE.
        for pair in {(5 + 7 * layer) % num_pairs, (20 + 3 * layer + head) % num_pairs}:
            channels = (2 * pair, 2 * pair + 1) if rope.interleaved else (pair, pair + num_pairs)
            num_planted += len(channels)
            for channel in channels:
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
    }
    main(__doc__, load_model_before(measure_outliers), options)
