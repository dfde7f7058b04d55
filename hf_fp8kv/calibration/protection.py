"""Protect layers of a plan in which a stored prompt loses most.

A prompt that is stored before it is read passes the rounding errors of a layer to all later layers,
where they may grow. The costs of attention, by which formats are chosen, do not include this. The
predictions of random tokens do, and the cost of K shows the layer that causes the loss.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ..attention.switching import paged_attention
from ..cache.cache import FP8PagedCache
from ..errors import FP8KVError
from ..formats import AUTO, SidePlan
from ..modeling.exact_states import exact_states
from ..modeling.model_support import accepts_argument, with_cache
from ..ops.page_layout import make_page_layout
from ..scales.kv_scales import StoragePlan
from ..scales.report import Protection
from .divergence import compute_scores
from .observe import MODEL_ERRORS, find_input_device

logger = logging.getLogger(__name__)

# Maximum mean KL after a stored prompt, in nats, for which no layer is protected.
_MAX_KL = 4e-4
# Maximum ratio of the KL with a protected side to the KL without it. Useless protection changes
# the KL of a window by up to 5 %.
_MAX_KL_RATIO = 0.9
_MAX_FAILURES = 4  # number of sides in a row that do not reduce the KL, before the search ends
_LARGEST_KL = 1e6  # replaces infinity, which JSON does not have
# Maximum number of tokens that the model reads to choose the protected layers.
_MAX_READ_TOKENS = 6 * 512
# Number of tokens of the cache whose bytes are counted.
_COUNTED_TOKENS = 4096


def protect_layers(
    model: PreTrainedModel, plan: StoragePlan, window: Tensor, costs: Mapping[int, float],
    max_extra_bytes: float,
) -> StoragePlan:  # fmt: skip
    """Return the plan with K, then V, of the layers of largest cost in the model's dtype.

    If the KL after a stored prompt is not small, a side is protected if this reduces the KL by a
    tenth. The result has the `protection`, if the predictions of the model can be compared.

    Args:
        model: The model, in eval mode.
        plan: The plan.
        window: Token ids, `[N]`, on the CPU. The last half is scored.
        costs: The cost of K in attention, by layer.
        max_extra_bytes: Maximum share of bytes that protected sides add to a cache.
    """
    if model.config.is_encoder_decoder or model.get_output_embeddings() is None or len(window) < 2:
        return plan
    try:
        with paged_attention(model):
            return _choose_sides(model, plan, window, costs, max_extra_bytes)
    except (FP8KVError, *MODEL_ERRORS) as error:
        logger.warning("predictions after a stored prompt are not compared: %s", error)
        return plan


def _choose_sides(
    model: PreTrainedModel, plan: StoragePlan, window: Tensor, costs: Mapping[int, float],
    max_extra_bytes: float,
) -> StoragePlan:  # fmt: skip
    expected = _compute_logits(model, window, DynamicCache(config=model.config))

    def measure(plan: StoragePlan) -> tuple[float, FP8PagedCache]:
        cache = FP8PagedCache(model.config, plan=plan, prefill="stored")
        logits = _compute_logits(model, window, cache)
        kl = compute_scores(expected, logits, window[None, :0].to(logits.device)).kl
        return kl.clamp(max=_LARGEST_KL).mean().item(), cache

    kl, cache = measure(plan)
    old_bytes = _count_bytes(cache, plan)
    protection = Protection(kl, kl, 0.0)
    num_reads, max_reads, num_failures = 2, _MAX_READ_TOKENS // len(window), 0
    sides = product(sorted(costs, key=lambda index: -costs[index]), "kv")
    for index, side in sides if kl > _MAX_KL else ():
        candidate = _protect(plan, index, side)
        extra_bytes = _count_bytes(cache, candidate) / old_bytes - 1
        if not 0 < extra_bytes <= max_extra_bytes:
            continue
        if num_reads == max_reads or num_failures == _MAX_FAILURES:
            break
        num_reads, num_failures = num_reads + 1, num_failures + 1
        kl, _ = measure(candidate)
        if kl <= _MAX_KL_RATIO * protection.kl:
            plan, num_failures = candidate, 0
            names = (*protection.sides, f"{side.upper()} of layer {index}")
            protection = replace(protection, kl=kl, extra_bytes=extra_bytes, sides=names)
    return replace(plan, protection=protection)


@torch.no_grad()
def _compute_logits(model: PreTrainedModel, window: Tensor, cache: Any) -> Tensor:
    """Return the logits of the last half of a window, `[1, T, vocabulary]`."""
    num_logits = len(window) // 2
    options = with_cache(model, cache)
    if accepts_argument(type(model), "logits_to_keep"):
        options["logits_to_keep"] = num_logits
    ids = window[None].to(find_input_device(model))
    with exact_states():
        logits: Tensor = model(input_ids=ids, **options).logits
    return logits[:, -num_logits:]


def _protect(plan: StoragePlan, index: int, side: str) -> StoragePlan:
    """Return the plan with K or V ("k" or "v") of a layer in the model's dtype."""
    layer = plan.layers[index]
    assert layer.plan is not None
    layer_plan = layer.plan._replace(**{side: SidePlan(AUTO)})
    center = layer.k_center if layer_plan.k.centered else None
    new_layer = replace(layer, plan=layer_plan, k_center=center)
    return replace(plan, layers={**plan.layers, index: new_layer})


def _count_bytes(cache: FP8PagedCache, plan: StoragePlan) -> int:
    """Return the bytes of a sequence with a plan, if the model's dtype has 16 bits.

    The shapes are read from `cache`. Layers with a window only hold the tokens in it.
    """
    num_bytes = 0
    for layer in cache.paged_layers:
        pool, layer_plan = layer.store.pool, plan.layers[layer.index].plan
        assert layer_plan is not None
        dtypes = [torch.bfloat16 if side.is_auto else torch.uint8 for side in layer_plan]
        num_tokens = min(_COUNTED_TOKENS, layer.sliding_window or _COUNTED_TOKENS)
        has_scales = torch.uint8 in dtypes
        num_bytes += make_page_layout(
            pool.num_heads, num_tokens, pool.k_dim, pool.v_dim, *dtypes, has_scales
        ).size
    return num_bytes
