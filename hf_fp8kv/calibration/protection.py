"""Protect the layers of a plan in which stored prompts lose most.

A prompt that is stored before it is read passes the rounding errors of a layer to all later layers,
where they may grow. The costs of attention, by which formats are chosen, do not include this. The
predictions of random tokens do, and the cost of K shows the layers that cause the loss.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice, product

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ..attention.switching import eval_mode, paged_attention
from ..cache.cache import FP8PagedCache
from ..errors import ConfigError, FP8KVError
from ..formats import AUTO, LayerPlan, SidePlan
from ..ops.page_layout import make_page_layout
from ..scales.kv_scales import StoragePlan
from ..scales.protection import Protection
from .divergence import compute_logits, compute_scores
from .observe import MODEL_ERRORS, find_input_device

logger = logging.getLogger(__name__)

# Maximum mean KL after a stored prompt, in nats, for which no layer is protected.
MAX_KL = 4e-4
# In bfloat16, any change of K changes later roundings: SmolLM2 has 3.3e-3 instead of 2.1e-4.
_MAX_KL_BFLOAT16 = 5e-3
# Maximum ratio of the KL with a protected side to the KL without it. Useless protection changes
# the KL of a window by up to 5 %.
_MAX_KL_RATIO = 0.9
MAX_TRIES = 16  # maximum number of sides that are tried
_LARGEST_KL = 1e6  # replaces infinity, which JSON does not have
MIN_BITS = 6
MAX_BITS = 8
# Maximum ratio of the squared error of a head in six bits to its error in E4M3.
_MAX_ERROR_RATIO = 2.5
_COUNTED_TOKENS = 4096  # number of tokens of the cache whose bytes are counted


def protect_layers(
    model: PreTrainedModel,
    plan: StoragePlan,
    window: Tensor,
    costs: Mapping[int, float],
    max_extra_bytes: float,
    max_tries: int = MAX_TRIES,
) -> StoragePlan:
    """Return the plan with K, then V, of the layers of largest cost in the model's dtype.

    If the KL after a stored prompt is not small, a side is protected if this reduces the KL by a
    tenth. The result has the `protection`, if the predictions of the model can be compared.

    Args:
        model: The model.
        plan: The plan.
        window: Token ids, `[N]`, on the CPU. The last half is scored.
        costs: The cost of K in attention, by layer.
        max_extra_bytes: Maximum share of bytes that protected sides add to a cache.
        max_tries: Maximum number of sides that are tried.
    """
    if model.config.is_encoder_decoder or model.get_output_embeddings() is None or len(window) < 2:
        return plan
    try:
        with eval_mode(model), paged_attention(model):
            return _choose_sides(model, plan, window, costs, max_extra_bytes, max_tries)
    except (FP8KVError, *MODEL_ERRORS) as error:
        logger.warning("predictions after a stored prompt are not compared: %s", error)
        return plan


def _choose_sides(
    model: PreTrainedModel,
    plan: StoragePlan,
    window: Tensor,
    costs: Mapping[int, float],
    max_extra_bytes: float,
    max_tries: int,
) -> StoragePlan:
    ids = window[None].to(find_input_device(model))
    num_read = len(window) // 2
    expected_logits = compute_logits(model, ids, DynamicCache(config=model.config), scored=True)

    def measure_kl(tried_plan: StoragePlan) -> tuple[float, FP8PagedCache]:
        filled_cache = FP8PagedCache(model.config, plan=tried_plan, prefill="stored")
        logits = compute_logits(model, ids, filled_cache, scored=True)
        # Random tokens need no likelihood, so no next tokens are passed.
        scores = compute_scores(expected_logits[:, num_read:], logits[:, num_read:], ids[:, :0])
        return scores.kl.clamp(max=_LARGEST_KL).mean().item(), filled_cache

    kl, cache = measure_kl(plan)
    old_bytes = _count_bytes(cache, plan)
    max_kl = _MAX_KL_BFLOAT16 if model.dtype == torch.bfloat16 else MAX_KL
    protection = Protection(kl, kl, 0.0)
    layer_sides = product(sorted(costs, key=lambda index: -costs[index]), "kv")
    num_tries = max_tries if kl > max_kl else 0
    for index, side in islice(layer_sides, num_tries):
        candidate = _replace_side(plan, index, side, SidePlan(AUTO))
        extra_bytes = _count_bytes(cache, candidate) / old_bytes - 1
        # A side that already has the model's dtype adds no bytes.
        if protection.extra_bytes < extra_bytes <= max_extra_bytes:
            kl, _ = measure_kl(candidate)
            if kl <= _MAX_KL_RATIO * protection.kl:
                side_names = (*protection.sides, f"{side.upper()} of layer {index}")
                protection = Protection(kl, protection.unprotected_kl, extra_bytes, side_names)
                plan = candidate
    return replace(plan, protection=protection)


def _replace_side(plan: StoragePlan, index: int, side: str, new_side: SidePlan) -> StoragePlan:
    """Return the plan with a new plan for K or V ("k" or "v") of a layer."""
    layer = plan.layers[index]
    layer_plan = LayerPlan.check(layer.plan, "plan")._replace(**{side: new_side})
    center = layer.k_center if layer_plan.k.centered else None
    layers = {**plan.layers, index: replace(layer, plan=layer_plan, k_center=center)}
    return replace(plan, layers=layers)


def widen_layers(
    plan: StoragePlan,
    wide_plan: StoragePlan,
    cache: FP8PagedCache,
    errors: Mapping[int, Tensor],
    bits: float,
    max_extra_bytes: float,
) -> StoragePlan:
    """Return the plan with sides of `wide_plan` where attention loses most for their bytes.

    Args:
        plan: A plan of six bits.
        wide_plan: A plan of eight bits, with the same centers.
        cache: A cache with the shapes of the layers.
        errors: The relative squared errors of attention due to K and V, and the ratio of their sum
            to the error with E4M3, by layer and head, `[3, Hkv]`.
        bits: Maximum average bits of a value.
        max_extra_bytes: Maximum share of bytes that are added, if `bits` does not allow more.

    Raises:
        ConfigError: A layer loses too much, and the bytes do not suffice for `wide_plan`.
    """
    bytes_before = _count_bytes(cache, plan)
    bytes_per_bit = (_count_bytes(cache, wide_plan) - bytes_before) / (MAX_BITS - MIN_BITS)
    max_bytes = bytes_before + max(
        (bits - MIN_BITS) * bytes_per_bit, max_extra_bytes * bytes_before
    )
    gains = {}
    error_ratios = {}
    for index, (k_errors, v_errors, e4m3_ratios) in errors.items():
        error_ratios[index] = e4m3_ratios.max()
        for side, side_errors in (("k", k_errors), ("v", v_errors)):
            candidate = _replace_side(
                plan, index, side, getattr(wide_plan.layers[index].plan, side)
            )
            added_bytes = _count_bytes(cache, candidate) - bytes_before
            if added_bytes > 0:
                gains[index, side] = float(side_errors.mean()) / added_bytes
    lossy_layers = {
        index: wide_plan.layers[index]
        for index, error_ratio in error_ratios.items()
        if error_ratio > _MAX_ERROR_RATIO
    }
    plan = replace(plan, layers={**plan.layers, **lossy_layers})
    num_bytes = _count_bytes(cache, plan)
    if num_bytes > max_bytes:
        min_bits = MIN_BITS + (num_bytes - bytes_before) / bytes_per_bit
        raise ConfigError(
            f"bits: expected at least {math.ceil(100 * min_bits) / 100} for this model, got "
            f"{bits}, because in {len(lossy_layers)} of {len(errors)} layers six bits have up to "
            f"{max(error_ratios.values()):.0f} times the squared error of E4M3. Leave it out for 8"
        )
    for index, side in sorted(gains, key=lambda key: -gains[key]):
        candidate = _replace_side(plan, index, side, getattr(wide_plan.layers[index].plan, side))
        if _count_bytes(cache, candidate) <= max_bytes:
            plan = candidate
    return plan


def _count_bytes(cache: FP8PagedCache, plan: StoragePlan) -> int:
    """Return the bytes of a sequence with a plan, if the model's dtype has 16 bits.

    The shapes are read from `cache`. Layers with a window only hold the tokens in it.
    """
    num_bytes = 0
    for layer in cache.paged_layers:
        layer_plan = LayerPlan.check(plan.layers[layer.index].plan, "plan")
        k_dtype, v_dtype = (side.find_dtype(torch.bfloat16) for side in layer_plan)
        num_tokens = min(_COUNTED_TOKENS, layer.sliding_window or _COUNTED_TOKENS)
        has_scales = not all(side.is_auto for side in layer_plan)
        pool = layer.pool
        num_bytes += make_page_layout(
            pool.num_heads, num_tokens, pool.k_dim, pool.v_dim, k_dtype, v_dtype, has_scales
        ).size
    return num_bytes
