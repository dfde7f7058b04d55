"""Outliers in K, planted in a model that computes the same with them.

In some models a few pairs of channels have keys far larger than all others. RoPE turns them with
the position, so no center takes them away, and rotation spreads what they cost over the whole head:
rotated formats are ruinous there, and whoever chooses formats has to see it. None of the small
models that can be had has such keys, so they are made: K grows, and Q becomes smaller by as much.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_fp8kv.cache.turns import STILL, Turns
from hf_fp8kv.errors import ConfigError

# What products of queries and keys may change by, relative to the logits of the model.
_TOLERANCE = 0.01
_PROBE = 32  # tokens
# What is asked of an attention module.
_NEEDED = ("q_proj", "k_proj", "head_dim", "layer_idx")


@contextmanager
def planted_outliers(
    model: PreTrainedModel, factor: float | None, every: int = 1
) -> Iterator[None]:
    """Multiply K by `factor` in two pairs of channels of each head, and divide Q by it.

    The pairs are other ones in each layer, fast and slow. The model's weights are as they were
    afterwards.

    Args:
        model: in float32, since both products round.
        factor: None: do nothing.
        every: n: in every n-th head only, starting with another one in each layer.

    Raises:
        ConfigError: not a model with `q_proj` and `k_proj`, and RoPE straight after them; `every`
            without a factor.
    """
    if factor is None:
        if every != 1:
            raise ConfigError(
                f"outlier_heads: expected outliers with it, got {every} without; say how large"
            )
        yield
        return
    modules: list[Any] = [m for m in model.modules() if all(hasattr(m, name) for name in _NEEDED)]
    weights = [w for m in modules for p in (m.q_proj, m.k_proj) for w in p.parameters()]
    kept = [weight.detach().clone() for weight in weights]
    before = _compute_logits(model)
    try:
        planted = sum(_plant(model, module, factor, every) for module in modules)
        change = (_compute_logits(model) - before).std() / before.std()
        if not planted or not change < _TOLERANCE:
            raise ConfigError(
                "outliers: expected q_proj and k_proj with nothing but RoPE behind them, got "
                f"{type(model).__name__}, which has none or computes something else with them; "
                "leave outliers out, or measure another model"
            )
        yield
    finally:
        with torch.no_grad():
            for weight, original in zip(weights, kept, strict=True):
                weight.copy_(original)


def _compute_logits(model: PreTrainedModel) -> torch.Tensor:
    ids = torch.arange(_PROBE, device=model.device)[None]
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float()


def _plant(model: PreTrainedModel, module: Any, factor: float, every: int) -> int:
    """Plant the outliers of one attention module, and return how many channels have one."""
    config, layer = model.config.get_text_config(decoder=True), module.layer_idx
    turns, dim = Turns.of(config)(layer) or STILL, module.head_dim
    pairs = int(dim * turns.share) // 2
    if not pairs:
        return 0
    planted = 0
    heads = module.k_proj.out_features // dim
    group = module.q_proj.out_features // dim // heads
    for head in range(layer % min(every, heads), heads, every):
        # Over the layers, outliers at every speed.
        for pair in {(5 + 7 * layer) % pairs, (20 + 3 * layer + head) % pairs}:
            both = (2 * pair, 2 * pair + 1) if turns.neighbors else (pair, pair + pairs)
            planted += len(both)
            for channel in both:
                _scale(module.k_proj, head * dim + channel, factor)
                for query in range(head * group, (head + 1) * group):
                    _scale(module.q_proj, query * dim + channel, 1 / factor)
    return planted


def _scale(projection: torch.nn.Linear, row: int, factor: float) -> None:
    with torch.no_grad():
        for weight in projection.parameters():
            weight[row] *= factor
