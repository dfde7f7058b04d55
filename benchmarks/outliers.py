"""Plant outliers in K that no center or rotation removes: `benchmarks.prompts --factor 50`.

Some models have keys that are far larger in a few pairs of channels. RoPE rotates these pairs with
the position, so they have no center, and rotation spreads them over the whole head. No small model
has such keys. K is therefore multiplied by a factor in such pairs, and Q divided by it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_fp8kv.errors import ConfigError

# Maximum change of the logits by the planted outliers, relative to the logits.
_TOLERANCE = 0.01
_PROBE_TOKENS = 32
# Attributes by which attention modules are found.
_REQUIRED_ATTRIBUTES = frozenset(("q_proj", "k_proj", "head_dim", "layer_idx"))


@contextmanager
def planted_outliers(model: PreTrainedModel, factor: float, head_stride: int = 1) -> Iterator[None]:
    """Multiply K by `factor` in two pairs of channels of some KV heads, and divide Q by it.

    The pairs differ between layers. RoPE rotates some of them fast, and some slowly. The weights
    are restored afterwards.

    Args:
        model: The model, in float32, in which scaling K and Q changes the logits little.
        factor: Factor by which K is multiplied.
        head_stride: Every `head_stride`-th KV head gets outliers, from a head that depends on
            the layer.

    Raises:
        ConfigError: RoPE is not applied directly to the outputs of `q_proj` and `k_proj`, or does
            not pair channels i and i + D / 2.
    """
    modules: list[Any] = [
        module for module in model.modules() if _REQUIRED_ATTRIBUTES.issubset(dir(module))
    ]
    projections = [getattr(module, name) for module in modules for name in ("q_proj", "k_proj")]
    weights = [weight for projection in projections for weight in projection.parameters()]
    originals = [weight.detach().clone() for weight in weights]
    logits_before = _compute_logits(model)
    try:
        for module in modules:
            _plant_outliers(module, factor, head_stride)
        change = (_compute_logits(model) - logits_before).std() / logits_before.std()
        if not modules or not change < _TOLERANCE:
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
        return model(input_ids=ids, use_cache=False).logits.float()  # type: ignore[no-any-return]


def _plant_outliers(module: Any, factor: float, head_stride: int) -> None:
    index = module.layer_idx
    dim = module.head_dim
    num_pairs = dim // 2
    num_heads = module.k_proj.out_features // dim
    group_size = module.q_proj.out_features // dim // num_heads  # query heads of a KV head
    for head in range(index % min(head_stride, num_heads), num_heads, head_stride):
        # Together, the outliers of all layers have every frequency of RoPE.
        pairs = {(5 + 7 * index) % num_pairs, (20 + 3 * index + head) % num_pairs}
        for pair in pairs:
            for channel in (pair, pair + num_pairs):
                _scale_row(module.k_proj, head * dim + channel, factor)
                for query_head in range(head * group_size, (head + 1) * group_size):
                    _scale_row(module.q_proj, query_head * dim + channel, 1 / factor)


def _scale_row(projection: torch.nn.Linear, row: int, factor: float) -> None:
    """Multiply a row of the weight and an element of the bias, which make one channel."""
    with torch.no_grad():
        for weight in projection.parameters():
            weight[row] *= factor
