"""Measure predictions of a model with outliers in K that no center or rotation removes.

Some models have keys that are far larger in a few pairs of channels. RoPE rotates these pairs with
the position, so they have no center, and rotation spreads them over the whole head. No small model
has such keys. This benchmark therefore multiplies K by a factor, and divides Q by it.
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

from .shared import MODEL_OPTIONS, Result, load_model_before, main

# Maximum change of the logits by the planted outliers, relative to the logits.
_TOLERANCE = 0.01
_PROBE_TOKENS = 32
# Attributes by which attention modules are found.
_REQUIRED_ATTRIBUTES = ("q_proj", "k_proj", "head_dim", "layer_idx")
_TEXT_KINDS, _POSITION, _SCORED_TOKENS = ("code", "prose", "manual"), 768, 256
_PLAN = ("fp8_e2m5 rotated centered", "fp8_e2m5 rotated")


def measure_outliers(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    name: str,
    factor: float = 50.0,
    heads: int = 1,
    progress: Callable[[str], None],
) -> Result:
    """Return rows with `cache`, `kl`, `kl_error` and `k_rotated`, the layers whose K is rotated.

    Args:
        model: The model, in float32.
        tokenizer: The model's tokenizer.
        name: The model's name in the result.
        factor: Factor by which planted outliers multiply K.
        heads: Every `heads`-th head gets outliers. 1 means every head.
        progress: Function that is called with the name of each text.
    """
    run = describe_run("outliers", device=str(model.device))
    e2m5 = Contender(str(_PLAN), lambda model: FP8PagedCache(model.config, plan=_PLAN))
    caches = {key: CONTENDERS[key] for key in ("default", "adaptive", "fp8")} | {"e2m5": e2m5}
    scores = []
    with planted_outliers(model, factor, heads), paged_attention(model):
        for kind in _TEXT_KINDS:
            progress(kind)
            ids = read_texts(tokenizer, kind, 1, _POSITION)[0].to(model.device)
            states = prefill(model, ids).states
            scores.append(
                score_text(model, ids, states, caches, positions=[_POSITION], scored=_SCORED_TOKENS)
            )
        plans = {key: cache.make(model).plan for key, cache in caches.items()}
    return {
        **run,
        "settings": {"model": name, "factor": factor, "heads": heads, "texts": list(_TEXT_KINDS),
                     "position": _POSITION, "scored": _SCORED_TOKENS},
        "rows": [
            {"cache": cache.title, **summarize_scores([score[_POSITION, key] for score in scores]),
             "k_rotated": sum(plan.k.rotated for plan in plans[key].values())}
            for key, cache in caches.items()
        ],
    }  # fmt: skip


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
        m for m in model.modules() if all(hasattr(m, name) for name in _REQUIRED_ATTRIBUTES)
    ]
    weights = [w for m in modules for p in (m.q_proj, m.k_proj) for w in p.parameters()]
    originals = [weight.detach().clone() for weight in weights]
    logits_before = _compute_logits(model)
    try:
        num_planted = sum(_plant_outliers(model, module, factor, head_stride) for module in modules)
        change = (_compute_logits(model) - logits_before).std() / logits_before.std()
        if not num_planted or not change < _TOLERANCE:
            raise ConfigError(
                "model: expected q_proj and k_proj that RoPE follows directly, got "
                f"{type(model).__name__}"
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
    config, layer = model.config.get_text_config(decoder=True), module.layer_idx
    rope, dim = RopeRotation.from_config(config)(layer), module.head_dim
    pairs = int(dim * rope.rotary_fraction) // 2
    if not pairs:
        return 0
    num_planted = 0
    num_heads = module.k_proj.out_features // dim
    group_size = module.q_proj.out_features // dim // num_heads  # query heads of a KV head
    for head in range(layer % min(head_stride, num_heads), num_heads, head_stride):
        # Together, the outliers of all layers have every frequency of RoPE.
        for pair in {(5 + 7 * layer) % pairs, (20 + 3 * layer + head) % pairs}:
            channels = (2 * pair, 2 * pair + 1) if rope.interleaved else (pair, pair + pairs)
            num_planted += len(channels)
            for channel in channels:
                _scale_row(module.k_proj, head * dim + channel, factor)
                for query_head in range(head * group_size, (head + 1) * group_size):
                    _scale_row(module.q_proj, query_head * dim + channel, 1 / factor)
    return num_planted


def _scale_row(projection: torch.nn.Linear, row: int, factor: float) -> None:
    with torch.no_grad():
        for weight in projection.parameters():
            weight[row] *= factor


if __name__ == "__main__":
    main(
        __doc__,
        load_model_before(measure_outliers),
        {
            **MODEL_OPTIONS,
            "--factor": {"type": float},
            "--heads": {"type": int, "help": "Every n-th head gets outliers."},
        },
    )
