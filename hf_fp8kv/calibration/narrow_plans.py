"""Choose plans of six bits per value, in which single layers keep eight bits.

K and V in int6 take the bytes of K in int8 and V in int4. Each layer has the pair that changes the
output of attention less. Both are rotated, because integers have no range for outliers.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..cache.cache import FP8PagedCache
from ..errors import ConfigError
from ..formats import FORMATS, STATIC_DTYPE, LayerPlan, SidePlan
from ..formats.codec import compute_dynamic_scale, compute_rounding_error
from ..scales.kv_scales import StoragePlan
from ..scales.layer_scales import LayerScales
from .observe import center_and_rotate
from .protection import MAX_KL, count_bytes, protect_layers, protect_side
from .queries import LayerStates, round_keys

logger = logging.getLogger(__name__)

MIN_BITS = 6
MAX_BITS = 8
_PAIRS = (("int6", "int6"), ("int8", "int4"))
# Plan with which the errors of a layer, and the predictions of a model, are compared.
_E4M3 = LayerPlan(SidePlan(STATIC_DTYPE), SidePlan(STATIC_DTYPE))
# Maximum ratio of the squared error of a head's output to its error in E4M3.
_MAX_COST_RATIO = 4.0
_TINY = 1e-30


@dataclass(frozen=True)
class NarrowLayer:
    """A layer in six bits, and the expected errors of the output of its attention.

    Attributes:
        scales: The plan and the center of the layer.
        costs: Squared errors due to K and V by head, relative to the output.
        cost_ratio: Largest ratio of the squared error of a head to its error in E4M3.
    """

    scales: LayerScales
    costs: Mapping[str, Tensor]
    cost_ratio: float

    def estimate_error(self, plan: LayerPlan | None) -> float:
        """Return the relative RMS error of the worst head due to sides that `plan` stores alike."""
        own_plan = self.scales.plan
        costs = [
            x for side, x in self.costs.items() if getattr(plan, side) == getattr(own_plan, side)
        ]
        return float(sum(costs, torch.zeros(1)).max().sqrt())


def check_bits(bits: object) -> None:
    """Raise ConfigError unless `bits` is a number of bits for which plans can be chosen."""
    is_number = isinstance(bits, int | float) and not isinstance(bits, bool)
    if not is_number or not MIN_BITS <= bits <= MAX_BITS:  # type: ignore[operator]
        raise ConfigError(
            f"bits: expected a number from {MIN_BITS} to {MAX_BITS}, got {bits!r}. Leave it out "
            f"for {MAX_BITS}"
        )


def choose_narrow_layer(all_states: Sequence[LayerStates], wide: LayerScales) -> NarrowLayer:
    """Return a layer in the pair of formats of least error. `wide` has its center, in 8 bits."""
    wide_k = LayerPlan.check(wide.plan, "plan").k
    plans = [
        LayerPlan(replace(wide_k, format=k, rotated=True), SidePlan(v, rotated=True))
        for k, v in _PAIRS
    ]
    costs = torch.stack([
        torch.stack([_compute_costs(states, wide.k_center, plan) for plan in (*plans, _E4M3)])
        for states in all_states
    ]).sum(0)  # fmt: skip
    errors = costs[:, :2].sum(1)
    index = int(errors[: len(plans)].sum(1).argmin())
    relative_costs = dict(zip("kv", costs[index, :2] / costs[index, 2].clamp(_TINY), strict=True))
    ratio = (errors[index] / errors[-1].clamp(_TINY)).max().item()
    return NarrowLayer(replace(wide, plan=plans[index]), relative_costs, ratio)


def choose_narrow_plan(
    model: PreTrainedModel,
    wide_plan: StoragePlan,
    layers: Mapping[int, NarrowLayer],
    cache: FP8PagedCache,
    window: Tensor,
    bits: float,
    max_extra_bytes: float,
) -> StoragePlan:
    """Return the plan of the layers, with eight bits for sides of layers that lose most.

    Args:
        model: The model.
        wide_plan: The plan in 8 bits.
        layers: The layers in six bits.
        cache: A cache with the shapes of the layers.
        window: As for `protect_layers`.
        bits: Maximum average bits of a value.
        max_extra_bytes: Maximum share of bytes that are added to six bits, if `bits` does not
            allow more.

    Raises:
        ConfigError: A layer loses too much in six bits, and the bytes do not suffice for eight.
    """
    scales = {index: layer.scales for index, layer in layers.items()}
    plan = replace(wide_plan, layers=scales)
    narrow_bytes = count_bytes(cache, plan)
    bytes_per_bit = (count_bytes(cache, wide_plan) - narrow_bytes) / (MAX_BITS - MIN_BITS)
    max_bytes = narrow_bytes + (bits - MIN_BITS) * bytes_per_bit
    max_protected_bytes = max(max_bytes, narrow_bytes * (1 + max_extra_bytes))
    # Sides with the largest error for their bytes come first.
    gains = {}
    for index, side in product(layers, "kv"):
        num_bytes = count_bytes(cache, protect_side(plan, index, side, wide_plan)) - narrow_bytes
        if num_bytes > 0:
            gains[index, side] = float(layers[index].costs[side].mean()) / num_bytes
    sides = sorted(gains, key=lambda side: -gains[side])
    lossy = [index for index, layer in layers.items() if layer.cost_ratio > _MAX_COST_RATIO]
    for index, side in product(lossy, "kv"):
        plan = protect_side(plan, index, side, wide_plan)
    if (num_bytes := count_bytes(cache, plan)) > max_protected_bytes:
        required_bits = MIN_BITS + (num_bytes - narrow_bytes) / bytes_per_bit
        ratio = max(layer.cost_ratio for layer in layers.values())
        raise ConfigError(
            f"bits: expected at least {required_bits:.2f} for this model, got {bits}, because in "
            f"{len(lossy)} of {len(layers)} layers six bits have up to {ratio:.0f} times the "
            "squared error of E4M3. Leave it out for 8"
        )
    for index, side in sides:
        candidate = protect_side(plan, index, side, wide_plan)
        if count_bytes(cache, candidate) <= max_bytes:
            plan = candidate
    extra_bytes = max_protected_bytes / count_bytes(cache, plan) - 1
    plan = protect_layers(model, plan, window, sides, extra_bytes, wide_plan=wide_plan)
    e4m3_layers = {
        index: replace(layer, plan=_E4M3, k_center=None) for index, layer in scales.items()
    }
    e4m3_plan = protect_layers(model, replace(plan, layers=e4m3_layers), window, (), 0.0, 0)
    kl, e4m3_kl = (x.protection.kl if x.protection else 0.0 for x in (plan, e4m3_plan))
    if kl > max(MAX_KL, e4m3_kl):
        logger.warning(
            "bits=%s: the KL after a stored prompt is %.1e, larger than in E4M3 (%.1e). Pass more "
            "bits, or leave it out for 8",
            bits,
            kl,
            e4m3_kl,
        )
    errors = {i: layer.estimate_error(plan.layers[i].plan) for i, layer in layers.items()}
    worst = max(errors, key=lambda index: errors[index])
    text = f"largest expected error of attention {errors[worst]:.1%} in layer {worst}"
    return replace(plan, origin=f"{plan.origin}, {text}")


def _compute_costs(states: LayerStates, center: Tensor | None, plan: LayerPlan) -> Tensor:
    """Return the squared errors of the output due to K and V, and its square, `[3, Hkv]`."""
    k, v, queries = states
    assert queries is not None
    rotated_queries, k_error = round_keys(k, queries, center, plan.k)
    fmt = FORMATS[plan.v.format]
    x = center_and_rotate(v, None, rotated=plan.v.rotated)
    v_error = compute_rounding_error(x, compute_dynamic_scale(x, fmt).float()[..., None], fmt)
    return torch.stack([
        rotated_queries.compute_output_cost(k_error, v.float()),
        queries.compute_cost("v", v_error),
        queries.compute_cost("v", v.float()),
    ]).cpu()  # fmt: skip
