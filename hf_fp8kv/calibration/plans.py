"""Plans by measurement: how a layer is stored at least cost, and the scales for that.

Candidates take the same bytes: a format, rotated or not, with a center or without. Each is tried on
the queries of some windows, at their own and at other positions: outliers that turn with the
position leave their center, and rotation then spreads their error over all channels. Another plan
than the safe one has to cost less at both. At the end the model's predictions decide, see scoring.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..formats import AUTO, DEFAULT_DTYPE, FORMATS, STATIC_DTYPE, Format, LayerPlan, SidePlan
from ..formats.codec import SEARCH_STEPS, rounding_error
from ..scales.layer_scales import LayerScales
from .choose import CalibrationOptions, Trial, find_centers, make_trial, pick_scale
from .observe import Batch, TensorDict, add_tensors
from .pairs import Partners
from .queries import Queries
from .stages import Asked, observe_queries, sample_near, sum_costs
from .state import Job

# The scales of an octave that a plan is tried with: a float format is as good as its best one.
_STEPS = range(0, SEARCH_STEPS, 4)
_KINDS = (DEFAULT_DTYPE, False), ("fp8_e2m5", True), ("int8", True), (DEFAULT_DTYPE, True)
# What another plan than the safe one may cost at most, relative to it.
_MOST = 0.9


@dataclass(frozen=True)
class Candidate:
    """How one side of a layer may be stored, and the smallest static scales for that."""

    plan: SidePlan
    trial: Trial

    @property
    def fmt(self) -> Format:
        """The format that scales are made for; of numbers as they are, that of the unit."""
        return _unit_format(self.plan)

    def measure(self, x: torch.Tensor, queries: Queries | None) -> torch.Tensor:
        """Return what errors of K or V, `x` `[N, Hkv, D]`, cost: float64, `[scales tried]`."""
        if self.plan.is_auto:
            return torch.zeros(len(_STEPS), dtype=torch.float64, device="cpu")
        x, queries = self.trial.transform(x, queries)
        first = self.trial.first.to(x.device)
        scales = [first * 2.0 ** (step / SEARCH_STEPS) for step in _STEPS]
        errors = [rounding_error(x, scale, self.fmt) for scale in scales]
        if queries is None:
            costs = [error.square() for error in errors]
        else:
            weigh = queries.cost_of_keys if self.trial.side == "k" else queries.cost_of_values
            costs = [weigh(error, "head") for error in errors]
        return torch.stack([cost.sum(dtype=torch.float64) for cost in costs]).cpu()


Sides = Mapping[str, Sequence[Candidate]]


def _unit_format(plan: SidePlan) -> Format:
    return FORMATS[STATIC_DTYPE if plan.is_auto else plan.format]


def safe_plan(options: CalibrationOptions) -> LayerPlan:
    """Return what is stored where nothing else is known to be better, without centers."""
    side = SidePlan(STATIC_DTYPE)
    return LayerPlan(side, SidePlan(AUTO) if options.latent else side)


def list_candidates(
    index: int,
    ranges: TensorDict,
    partners: Partners,
    options: CalibrationOptions,
    near: TensorDict | None,
    far: TensorDict | None,
    *,
    may_turn: bool,
) -> dict[str, list[Candidate]]:
    """Return how K and V of a layer may be stored, by side, the safe plan first.

    Args:
        index: the layer.
        ranges: its range on all texts, with that of the rotated numbers.
        partners: the channels that RoPE turns together.
        options: `plan` is not None. Where it is by hand, only centers are left to choose.
        near: of some windows, as `make_trials` takes them.
        far: the same at other positions.
        may_turn: K may have turned where that is not seen: it stays as it is.
    """
    centers, covered = find_centers(ranges, near, far)
    plans: dict[str, tuple[SidePlan, ...]]
    if isinstance(options.plan, Mapping):
        by_hand = options.plan[index]
        plans = {"k": (by_hand.k,), "v": (by_hand.v,)}
    else:
        may_center = (False, True) if options.center else (False,)
        safe = safe_plan(options)
        plans = {"k": (safe.k,), "v": (safe.v,)}
        sides = {"k": may_center} if options.latent else {"k": may_center, "v": (False,)}
        for side, centered in sides.items():
            more = tuple(
                SidePlan(name, rotated, center) for center in centered for name, rotated in _KINDS
            )
            if side == "k" and may_turn:
                more = tuple(plan for plan in more if not (plan.rotated or plan.centered))
            plans[side] += tuple(plan for plan in more if plan != plans[side][0])
    candidates: dict[str, list[Candidate]] = {"k": [], "v": []}
    for side, of_side in plans.items():
        for plan in of_side:
            # Rotated channels are alike, and so have one scale for a head; where it is not known
            # which channels turn together, so do the others.
            kind = options.granularity
            unknown = side == "k" and partners.k is None
            if kind == "channel" and (plan.rotated or unknown):
                kind = "head"
            chosen = replace(options, granularity=kind, fmt=_unit_format(plan))
            for center in centers if plan.centered else [None]:
                trial = make_trial(side, covered, chosen, center, plan.rotated)
                candidates[side].append(Candidate(plan, trial))
    return candidates


def choose_candidates(
    job: Job, windows: Sequence[torch.Tensor], far: Sequence[Batch], candidates: Mapping[int, Sides]
) -> dict[int, dict[str, Candidate]]:
    """Return the candidate of each layer and side that costs least, near and far."""

    def measure(name: str, batches: Sequence[Batch], sides: str) -> TensorDict:
        def step(sums: TensorDict, batch: Batch) -> TensorDict:
            new: TensorDict = {}

            def on_layer(index: int, k: torch.Tensor, v: torch.Tensor, queries: Asked) -> None:
                for side in sides:
                    x = v if side == "v" else k
                    of_side = candidates[index][side]
                    # Where there is nothing to choose there is nothing to measure.
                    costs = [c.measure(x, queries) for c in (of_side if len(of_side) > 1 else ())]
                    if costs:
                        new[f"{index}.{side}"] = torch.stack(costs)

            observe_queries(job.model, job.layers, batch, on_layer)
            return add_tensors(sums, new)

        return job.run_batches(name, batches, step)

    near_costs = measure("plans", sample_near(windows), "kv")
    far_costs = measure("far plans", far, "k")
    return {
        index: {
            side: _pick(
                of_side, near_costs.get(f"{index}.{side}"), far_costs.get(f"{index}.{side}")
            )
            for side, of_side in sides.items()
        }
        for index, sides in candidates.items()
    }


def _pick(
    candidates: Sequence[Candidate], near: torch.Tensor | None, far: torch.Tensor | None
) -> Candidate:
    """Return the candidate whose cost, `[candidates, scales]`, is least where it is most."""
    if near is None:
        return candidates[0]
    step = near.argmin(1, keepdim=True)
    shares = [costs / costs[0] for costs in (near.gather(1, step), *_at(far, step))]
    # 0 / 0: where K is all zeros, every plan is as good.
    worst = torch.stack(shares).nan_to_num(1.0).amax(0).flatten()
    best = int(worst.argmin())
    return candidates[best if worst[best] < _MOST else 0]


def _at(costs: torch.Tensor | None, step: torch.Tensor) -> list[torch.Tensor]:
    return [] if costs is None else [costs.gather(1, step)]


def make_scales(
    job: Job,
    windows: Sequence[torch.Tensor],
    chosen: Mapping[int, Mapping[str, Candidate]],
    name: str,
) -> dict[int, LayerScales]:
    """Return the scales of each layer for what was chosen.

    `name` is that of the stage.
    """

    def work() -> TensorDict:
        trials = {i: {s: c.trial for s, c in sides.items()} for i, sides in chosen.items()}
        sums = sum_costs(job, windows, trials, lambda index, side: chosen[index][side].fmt)
        found: TensorDict = {}
        for index, sides in chosen.items():
            for side, candidate in sides.items():
                costs = {what: sums[f"{index}.{side}.{what}"] for what in ("cost", "room")}
                found[f"{index}.{side}"] = pick_scale(candidate.trial, costs, candidate.fmt)[0]
        return found

    scales = job.run_once(name, work)
    job.state.drop("scales")
    return {
        index: LayerScales(
            scales.get(f"{index}.k"), scales.get(f"{index}.v"), sides["k"].trial.center,
            plan=LayerPlan(sides["k"].plan, sides["v"].plan),
        )
        for index, sides in chosen.items()
    }  # fmt: skip
