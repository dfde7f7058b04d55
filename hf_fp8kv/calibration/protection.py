"""Protect the layers of a plan in which stored prompts lose most.

A prompt that is stored before it is read passes the rounding errors of a layer to all later layers,
where they may grow. The costs of attention, by which formats are chosen, do not include this. The
predictions of random tokens do, and the cost of K shows the layers that cause the loss.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ..attention.switching import eval_mode, paged_attention
from ..cache.cache import FP8PagedCache
from ..errors import FP8KVError
from ..formats import AUTO, LayerPlan, SidePlan
from ..ops.page_layout import make_page_layout
from ..scales.kv_scales import StoragePlan
from ..scales.measured_report import Protection
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
_COUNTED_TOKENS = 4096  # number of tokens of the cache whose bytes are counted


def protect_layers(
    model: PreTrainedModel,
    plan: StoragePlan,
    window: Tensor,
    sides: Sequence[tuple[int, str]],
    max_extra_bytes: float,
    max_tries: int = MAX_TRIES,
    wide_plan: StoragePlan | None = None,
) -> StoragePlan:
    """Return the plan with some sides in the model's dtype, or as `wide_plan` stores them.

    If the KL after a stored prompt is not small, a side is protected if this reduces the KL by a
    tenth. The result has the `protection`, if the predictions of the model can be compared.

    Args:
        model: The model.
        plan: The plan.
        window: Token ids, `[N]`, on the CPU. The last half is scored.
        sides: Sides that may be protected, in the order of their trial: a layer, and "k" or "v".
        max_extra_bytes: Maximum share of bytes that protected sides add to a cache.
        max_tries: Maximum number of sides that are tried.
        wide_plan: Plan of more bits. None means the model's dtype for all sides.
    """
    if model.config.is_encoder_decoder or model.get_output_embeddings() is None or len(window) < 2:
        return plan
    try:
        with eval_mode(model), paged_attention(model):
            return _choose_sides(model, plan, window, sides, max_extra_bytes, max_tries, wide_plan)
    except (FP8KVError, *MODEL_ERRORS) as error:
        logger.warning("predictions after a stored prompt are not compared: %s", error)
        return plan


def _choose_sides(
    model: PreTrainedModel,
    plan: StoragePlan,
    window: Tensor,
    sides: Sequence[tuple[int, str]],
    max_extra_bytes: float,
    max_tries: int,
    wide_plan: StoragePlan | None,
) -> StoragePlan:
    ids = window[None].to(find_input_device(model))
    num_read = len(window) // 2
    expected = compute_logits(model, ids, DynamicCache(config=model.config), {}, scored=True)

    def measure(plan: StoragePlan) -> tuple[float, FP8PagedCache]:
        cache = FP8PagedCache(model.config, plan=plan, prefill="stored")
        logits = compute_logits(model, ids, cache, {}, scored=True)
        kl = compute_scores(expected[:, num_read:], logits[:, num_read:], ids[:, :0]).kl
        return kl.clamp(max=_LARGEST_KL).mean().item(), cache

    kl, cache = measure(plan)
    old_bytes = count_bytes(cache, plan)
    max_kl = _MAX_KL_BFLOAT16 if model.dtype == torch.bfloat16 else MAX_KL
    protection = Protection(kl, kl, 0.0)
    for index, side in sides[: max_tries if kl > max_kl else 0]:
        candidate = protect_side(plan, index, side, wide_plan)
        extra_bytes = count_bytes(cache, candidate) / old_bytes - 1
        # A side that is already protected adds no bytes.
        if protection.extra_bytes < extra_bytes <= max_extra_bytes:
            kl, _ = measure(candidate)
            if kl <= _MAX_KL_RATIO * protection.kl:
                names = (*protection.sides, f"{side.upper()} of layer {index}")
                protection = Protection(kl, protection.unprotected_kl, extra_bytes, names)
                plan = candidate
    return replace(plan, protection=protection)


def protect_side(
    plan: StoragePlan, index: int, side: str, wide_plan: StoragePlan | None
) -> StoragePlan:
    """Return the plan with K or V ("k" or "v") of a layer as in `wide_plan`.

    None means the model's dtype.
    """
    layer = plan.layers[index]
    wide_layer = None if wide_plan is None else wide_plan.layers[index].plan
    new_side = SidePlan(AUTO) if wide_layer is None else getattr(wide_layer, side)
    layer_plan = LayerPlan.check(layer.plan, "plan")._replace(**{side: new_side})
    center = layer.k_center if layer_plan.k.centered else None
    new_layer = replace(layer, plan=layer_plan, k_center=center)
    return replace(plan, layers={**plan.layers, index: new_layer})


def count_bytes(cache: FP8PagedCache, plan: StoragePlan) -> int:
    """Return the bytes of a sequence with a plan, if the model's dtype has 16 bits.

    The shapes are read from `cache`. Layers with a window only hold the tokens in it.
    """
    num_bytes = 0
    for layer in cache.paged_layers:
        layer_plan = LayerPlan.check(plan.layers[layer.index].plan, "plan")
        k_dtype, v_dtype = (x.find_dtype(torch.bfloat16) for x in layer_plan)
        num_tokens = min(_COUNTED_TOKENS, layer.sliding_window or _COUNTED_TOKENS)
        has_scales = not all(x.is_auto for x in layer_plan)
        pool = layer.store.pool
        num_bytes += make_page_layout(
            pool.num_heads, num_tokens, pool.k_dim, pool.v_dim, k_dtype, v_dtype, has_scales
        ).size
    return num_bytes
