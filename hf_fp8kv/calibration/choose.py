"""Choose how each layer is stored: the scales of least cost, and the plan of least cost.

A scale must be at least `amax / 448`, so that nothing saturates. The best scale is searched for in
the octave above that. Candidates are compared by their costs for queries of a text:

    K:  sum over queries of  Var_a(q . e)      V:  sum over queries of  |sum_a e|^2

where `e` are the rounding errors, and `a` the weights that the query gives to the tokens. The sum
for K is twice the KL divergence of the weights, to second order. docs/architecture.md has the
reasons.

Headroom is then added: a scale is raised by whole octaves while this costs almost nothing, up to
the norm of the pairs that RoPE rotates. K can reach this norm at positions beyond the text. A scale
per channel always covers it.

Plans are tried at the positions of the windows and at far positions, with a static scale for each.
All candidates use the same number of bytes, and the first candidate is the fallback. Finally, the
model's predictions decide (scoring.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ..formats import AUTO, DEFAULT_DTYPE, FORMATS, STATIC_DTYPE, Format, LayerPlan, SidePlan
from ..formats.codec import SEARCH_STEPS, compute_rounding_error
from ..formats.rotation import rotate
from ..scales.layer_scales import Granularity, LayerScales
from .observe import ROTATED, TensorDict, make_batches, merge_tensors
from .queries import Queries
from .rope import NUM_FAR_POSITIONS, FarPositions, Partners
from .stages import CalibrationOptions, Job, fold_layers, sample_far_windows, sample_windows

# Maximum ratio of the error of a larger scale to the original error, and number of tried octaves.
_MAX_HEADROOM_ERROR_RATIO = 1.02
_HEADROOM_OCTAVES = 3
# Number of tokens whose squared errors set the headroom, which only affects the smallest values.
_HEADROOM_TOKENS = 128
# Term that is added to the weight of a channel, as a share of the largest weight of the head.
_MIN_WEIGHT = 1e-6
# The plans of K or V that are tried for a measured plan. For K they are also tried with a center.
_TRIED_PLANS = [SidePlan(DEFAULT_DTYPE)]
_TRIED_PLANS += [SidePlan(name, rotated=True) for name in ("fp8_e2m5", "int8", DEFAULT_DTYPE)]
# Maximum ratio of the cost of a preferred candidate to the cost of the first candidate.
_MAX_COST_RATIO = 0.95


@dataclass(frozen=True)
class Candidate:
    """A way to store K or V ("k" or "v") of a layer, and its smallest static scales."""

    side: str
    plan: SidePlan
    center: Tensor | None  # [Hkv, Dk], subtracted from K
    min_scale: Tensor  # [1, 1], [Hkv, 1] or [Hkv, D], on the CPU: no observed value saturates
    far_scale: Tensor  # as `min_scale`, but it also covers K at far positions
    granularity: Granularity = "head"

    @property
    def fmt(self) -> Format:
        """The format of the scales. For unquantized values it is the format of the unit."""
        return FORMATS[STATIC_DTYPE if self.plan.is_auto else self.plan.format]

    def transform(self, x: Tensor, queries: Queries | None) -> tuple[Tensor, Queries | None]:
        """Return the values to scale, `[N, Hkv, D]`, and the queries for their errors."""
        if queries is not None and self.plan.rotated and self.side == "k":
            queries = replace(queries, q=rotate(queries.q))  # the products stay the same
        return center_and_rotate(x, self.center, rotated=self.plan.rotated), queries

    def compute_cost(self, x: Tensor, queries: Queries | None, scale: Tensor) -> Tensor:
        """Return the cost of K or V, `x` `[N, Hkv, D]`, over all heads, `[]`, float64, on the CPU.

        `scale` is in the unit of E4M3. Without queries, the cost is the squared error.
        """
        x, queries = self.transform(x, queries)
        format_scale = (scale * self.fmt.scale_from_e4m3).to(x.device)
        error = compute_rounding_error(x, format_scale, self.fmt)
        cost = error.square() if queries is None else queries.compute_cost(self.side, error, "head")
        return cost.sum(dtype=torch.float64).cpu()


# The candidates of a layer by side. The first candidate of a side is the fallback.
LayerCandidates = Mapping[str, Sequence[Candidate]]
# A candidate, and the scale of least cost, in the unit of E4M3.
ScaledCandidate = tuple[Candidate, Tensor]


def center_and_rotate(x: Tensor, center: Tensor | None, *, rotated: bool) -> Tensor:
    """Return `x`, `[N, Hkv, D]`, in float32. Subtract a center `[Hkv, D]`, then rotate."""
    x = x.float() if center is None else x.float() - center.to(x.device)
    return rotate(x) if rotated else x


def list_candidates(
    index: int, ranges: TensorDict, partners: Partners, options: CalibrationOptions,
    near_sums: TensorDict | None, far_sums: TensorDict | None, *, may_rotate: bool,
) -> dict[str, list[Candidate]]:  # fmt: skip
    """Return the candidates of K and V of a layer, by side.

    Args:
        ranges: The layer's range on all texts, and with a plan the range of the rotated values.
        partners: The channels that RoPE rotates together.
        options: With an explicit plan, candidates differ by their centers only. Without a plan,
            they differ by whether they have a center.
        near_sums: Ranges and sums of a sample of windows, as in `find_centers`.
        far_sums: As `near_sums`, at far positions.
        may_rotate: Whether RoPE may rotate K at positions that cannot be observed. K then has no
            center and no rotation.
    """
    centers, covered_ranges = find_centers(ranges, near_sums, far_sums)
    candidates: dict[str, list[Candidate]] = {"k": [], "v": []}
    for side, plans in _list_plans(index, options, may_rotate=may_rotate).items():
        for plan in plans:
            # Only centers and plans depend on far positions. Scales for other servers do not.
            side_ranges = covered_ranges if plan.centered or options.plan is not None else ranges
            # Rotated channels are alike, so a head has one scale. If the channels that
            # RoPE rotates together are unknown, their ranges do not bound K at far positions.
            lacks_partners = side == "k" and partners.k is None
            granularity = options.granularity
            if granularity == "channel" and (plan.rotated or lacks_partners):
                granularity = "head"
            candidates[side] += [
                make_candidate(side, plan, side_ranges, granularity, options.margin, center)
                for center in (centers if plan.centered else [None])
            ]
    return candidates


def _list_plans(
    index: int, options: CalibrationOptions, *, may_rotate: bool
) -> dict[str, list[SidePlan]]:
    if isinstance(options.plan, Mapping):
        return {side: [getattr(options.plan[index], side)] for side in "kv"}
    fallback = SidePlan(options.fmt.name)
    plans = _TRIED_PLANS if options.plan == "measured" else []
    k_plans = [fallback, *(plan for plan in plans if not (may_rotate and plan.rotated))]
    if options.center and not may_rotate:
        k_plans += [replace(plan, centered=True) for plan in plans or [fallback]]
    keeps_v = options.is_latent and options.plan is not None
    return {"k": k_plans, "v": [SidePlan(AUTO)] if keeps_v else [fallback, *plans]}


def find_centers(
    ranges: TensorDict, near_sums: TensorDict | None, far_sums: TensorDict | None
) -> tuple[list[Tensor], TensorDict]:
    """Return candidate centers of a layer's K, `[Hkv, Dk]`, float32, and the ranges to cover.

    `near_sums` and `far_sums` are the ranges of a sample of windows at near and far positions, with
    the sums of `weigh_keys`. The first center is their weighted mean. It minimizes the cost if
    errors are proportional to the stored values. K at far positions may differ too much from it, so
    `far_sums` add a second center: the mean over all positions, in which channels that rotate a lot
    average to zero. Scales cover far positions. Without `near_sums`, the center is the text's mean.
    """
    text_mean = ranges["k_sum"] / ranges["count"]
    if near_sums is None:
        return [text_mean.float()], ranges
    sample = near_sums if far_sums is None else merge_tensors(near_sums, far_sums)
    # Weighted by `weigh_keys`, or the plain mean if the weights are almost zero.
    weights, weighted_sum = sample["weight_sum"], sample["weighted_sum"]
    plain_mean = (sample["k_sum"] / sample["count"]).to(weights)
    min_weight = _MIN_WEIGHT * weights.amax(-1, keepdim=True)
    weighted_mean = (weighted_sum + min_weight * plain_mean) / (weights + min_weight)
    centers = [torch.where(weights + min_weight > 0, weighted_mean, plain_mean)]
    if far_sums is not None:
        # The far windows represent `NUM_FAR_POSITIONS` positions, and the text one more.
        far_sum = NUM_FAR_POSITIONS * (far_sums["k_sum"] / far_sums["count"]).to(text_mean)
        centers.append((text_mean + far_sum) / (1 + NUM_FAR_POSITIONS))
    return [center.float() for center in centers], merge_tensors(ranges, sample)


def make_candidate(
    side: str, plan: SidePlan, ranges: TensorDict, granularity: Granularity, margin: float,
    center: Tensor | None = None,
) -> Candidate:  # fmt: skip
    """Return a candidate with the smallest scales of a plan. A centered plan needs a `center`."""
    prefix = f"{ROTATED}{side}" if plan.rotated else side
    # Divide on the CPU, because GPUs divide slightly differently.
    upper, lower, far_amax = (ranges[f"{prefix}_{x}"].cpu() for x in ("max", "min", "pair_norm"))
    if center is not None:
        center = center.cpu()
        shift = rotate(center) if plan.rotated else center
        upper, lower, far_amax = upper - shift, lower - shift, far_amax + shift.abs()
    amax = torch.maximum(upper.abs(), lower.abs()) * margin
    # Rotation mixes all pairs in each channel. Only far positions show the range of the mixture.
    far_amax = amax if plan.rotated else far_amax * margin
    # A channel may leave its range at far positions. A head stays in its range, because its
    # fastest pairs have completed a rotation.
    amax = far_amax if granularity == "channel" else amax
    if axes := _AXES[granularity]:
        amax, far_amax = amax.amax(axes, keepdim=True), far_amax.amax(axes, keepdim=True)
    # Any scale can store zeros, so a range of zeros becomes the largest range, or 1.
    max_amax = amax.max()
    amax = torch.where(amax > 0, amax, torch.where(max_amax > 0, max_amax, 1.0))
    candidate = Candidate(side, plan, center, amax, far_amax, granularity)
    max_value = candidate.fmt.max
    return replace(candidate, min_scale=amax / max_value, far_scale=far_amax / max_value)


# The axes of `[Hkv, D]` that share a scale.
_AXES: dict[Granularity, tuple[int, ...]] = {"tensor": (0, 1), "head": (1,), "channel": ()}


def measure_costs(candidate: Candidate, x: Tensor, queries: Queries | None) -> Tensor:
    """Return the cost of each scale for K or V of a text, `x` `[N, Hkv, D]`.

    The result is `[2 + octaves, SEARCH_STEPS, ...]`, float64 on the CPU. Row 0 has the costs of the
    scales of an octave, or zeros without queries. Row `1 + n` has the squared errors with scales
    that are larger by `n` octaves. Costs of different texts can be added.
    """
    x, queries = candidate.transform(x, queries)
    side, granularity, fmt = candidate.side, candidate.granularity, candidate.fmt
    axes = _AXES[granularity]
    sample = x[:: -(-len(x) // _HEADROOM_TOKENS)]
    costs = []
    for step in range(SEARCH_STEPS):
        scale = candidate.min_scale.to(x.device) * 2.0 ** (step / SEARCH_STEPS)
        errors = []
        for octave in range(_HEADROOM_OCTAVES + 1):
            error = compute_rounding_error(sample, scale * 2.0**octave, fmt)
            squares = error.square().sum(0, dtype=torch.float64)
            errors.append(squares.sum(axes, keepdim=True) if axes else squares)
        cost = torch.zeros_like(errors[0])
        if queries is not None:
            cost = queries.compute_cost(side, compute_rounding_error(x, scale, fmt), granularity)
            cost = (cost.sum(0, keepdim=True) if granularity == "tensor" else cost).double()
        costs.append(torch.stack([cost, *errors]))
    return torch.stack(costs, 1).cpu()


def pick_scale(candidate: Candidate, costs: Tensor) -> Tensor:
    """Return the scale of least cost, or the smallest without queries, in the unit of E4M3."""
    cost, errors = costs[0], costs[1:]
    step = cost.argmin(0, keepdim=True)  # the first of several equal costs
    errors = errors.gather(1, step[None].expand(len(errors), *step.shape))[:, 0]
    octaves = step[0].float() / SEARCH_STEPS
    scale = candidate.min_scale * torch.tensor(2.0, dtype=torch.float32, device="cpu") ** octaves
    chosen_scale = scale
    for octave in range(1, _HEADROOM_OCTAVES + 1):
        larger_scale = scale * 2.0**octave
        # Up to `far_scale`, and only if every smaller octave costs little as well.
        is_next = (chosen_scale < candidate.far_scale) & (chosen_scale == larger_scale / 2)
        is_cheap = errors[octave] <= _MAX_HEADROOM_ERROR_RATIO * errors[0]
        chosen_scale = torch.where(is_next & is_cheap, larger_scale, chosen_scale)
    e4m3_scale = chosen_scale / candidate.fmt.scale_from_e4m3
    return e4m3_scale.reshape(()) if candidate.granularity == "tensor" else e4m3_scale


def make_scales(
    job: Job, windows: Sequence[Tensor], candidates: Mapping[int, LayerCandidates]
) -> dict[int, dict[str, list[ScaledCandidate]]]:
    """Return the candidates of each layer with the scales of least cost on a sample of windows."""

    def measure(index: int, k: Tensor, v: Tensor, queries: Queries | None) -> TensorDict:
        return {
            f"{side}{number}": measure_costs(candidate, x, queries)
            for side, x in (("k", k), ("v", v))
            for number, candidate in enumerate(candidates[index][side])
        }

    costs = fold_layers(job, "scales", make_batches(sample_windows(windows), 1), measure)
    return {
        index: {
            side: [
                (candidate, pick_scale(candidate, costs[index][f"{side}{number}"]))
                for number, candidate in enumerate(side_candidates)
            ]
            for side, side_candidates in layer_candidates.items()
        }
        for index, layer_candidates in candidates.items()
    }


def choose_scales(
    job: Job, windows: Sequence[Tensor], positions: FarPositions,
    candidates: Mapping[int, Mapping[str, Sequence[ScaledCandidate]]], source: str,
) -> tuple[dict[int, LayerScales], dict[int, LayerScales]]:  # fmt: skip
    """Return the scales of each layer with the first candidates, and with the best candidates."""

    def measure(
        sides: str, index: int, k: Tensor, v: Tensor, queries: Queries | None
    ) -> TensorDict:
        return {
            side: torch.stack([c.compute_cost(x, queries, scale) for c, scale in choices])
            for side, x in (("k", k), ("v", v))
            if side in sides and len(choices := candidates[index][side]) > 1
        }

    stage_costs, near_batches = [], make_batches(sample_windows(windows), 1)
    far_batches = sample_far_windows(windows, positions)
    for name, sides, batches in (("plans", "kv", near_batches), ("far plans", "k", far_batches)):
        has_choice = any(len(layer[side]) > 1 for layer in candidates.values() for side in sides)
        used_batches = batches if has_choice else []
        stage_costs.append(fold_layers(job, name, used_batches, partial(measure, sides)))
    first_scales, best_scales = dict[int, LayerScales](), dict[int, LayerScales]()
    for index, layer in candidates.items():
        layer_costs = [costs[index] for costs in stage_costs if index in costs]
        best_indices = []
        for side in "kv":
            parts = [costs[side].tolist() for costs in layer_costs if side in costs]
            best_indices.append(pick_candidate([*zip(*parts, strict=True)], _MAX_COST_RATIO))
        for scales, (k_index, v_index) in ((first_scales, (0, 0)), (best_scales, best_indices)):
            scales[index] = join_kv(job.options, source, layer["k"][k_index], layer["v"][v_index])
    return first_scales, best_scales


def pick_candidate(costs: Sequence[Sequence[float]], max_ratio: float) -> int:
    """Return the index of the candidate of least cost, or 0 if no candidate is good.

    `costs` is `[candidates][parts]`. A part is a head, or near or far positions. In each part the
    cost of a good candidate is at most `max_ratio` times the cost of the first candidate.
    """
    good_indices = [
        index
        for index, parts in enumerate(costs)
        if all(cost <= max_ratio * fallback for cost, fallback in zip(parts, costs[0], strict=True))
    ]
    return min(good_indices, key=lambda index: sum(costs[index]), default=0)


def join_kv(
    options: CalibrationOptions, source: str, k: ScaledCandidate, v: ScaledCandidate
) -> LayerScales:
    """Return the scales of a layer, with its plan if `calibrate` was called with a plan."""
    (k_candidate, k_scale), (v_candidate, v_scale) = k, v
    plan = None if options.plan is None else LayerPlan(k_candidate.plan, v_candidate.plan)
    return LayerScales(k_scale, v_scale, k_candidate.center, source, plan)
