"""Plans by measurement: how a layer is stored at least cost, and the scales for that.

Candidates take the same bytes: a format, rotated or not, with a center or without. Each is tried on
the queries of some windows, at their own and at other positions: outliers that turn with the
position leave their center, and rotation then spreads their error over all channels. Another one
than the first has to cost less at both. At the end the model's predictions decide, see scoring.
"""

from collections.abc import Mapping, Sequence

import torch

from ..formats import AUTO, DEFAULT_DTYPE, LayerPlan, SidePlan
from ..scales.layer_scales import LayerScales
from .choose import (
    CalibrationOptions,
    Candidate,
    find_centers,
    make_candidate,
    measure_costs,
    pick_scale,
)
from .observe import Batch, TensorDict
from .pairs import Partners
from .stages import Asked, fold_layers, sample_near
from .state import Job

_KINDS = (DEFAULT_DTYPE, False), ("fp8_e2m5", True), ("int8", True), (DEFAULT_DTYPE, True)
# What another candidate than the first may cost at most, relative to it.
_MOST = 0.9

# Of a layer, by side: the first candidate is the safe one.
Sides = Mapping[str, Sequence[Candidate]]


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
    """Return how K and V of a layer may be stored, by side.

    Args:
        index: the layer.
        ranges: its range on all texts; with a plan, that of the rotated numbers, too.
        partners: the channels that RoPE turns together.
        options: a plan by hand leaves only centers to choose, no plan only whether there is one.
        near: of some windows, as `find_centers` takes them.
        far: the same at other positions.
        may_turn: K may have turned where that is not seen: it stays as it is.
    """
    centers, covered = find_centers(ranges, near, far)
    candidates: dict[str, list[Candidate]] = {"k": [], "v": []}
    for side, plans in _list_plans(index, options, may_turn=may_turn).items():
        for plan in plans:
            # Scales for any server do not depend on the other positions, which centers need.
            seen = covered if plan.centered or options.plan is not None else ranges
            # Rotated channels are alike, and so have one scale for a head; where it is not known
            # which channels turn together, their ranges say nothing of other positions.
            kind, unknown = options.granularity, side == "k" and partners.k is None
            if kind == "channel" and (plan.rotated or unknown):
                kind = "head"
            candidates[side] += [
                make_candidate(side, plan, seen, kind, options.margin, center)
                for center in (centers if plan.centered else [None])
            ]
    return candidates


def _list_plans(
    index: int, options: CalibrationOptions, *, may_turn: bool
) -> dict[str, list[SidePlan]]:
    """Return the plans to try, by side."""
    if isinstance(options.plan, Mapping):
        return {side: [getattr(options.plan[index], side)] for side in "kv"}
    safe, kinds = SidePlan(options.fmt.name), _KINDS if options.plan == "measured" else ()
    plain = [SidePlan(*kind) for kind in kinds]
    k = [safe, *(plan for plan in plain if not (may_turn and plan.rotated))]
    if options.center and not may_turn:
        k += [SidePlan(*kind, True) for kind in kinds or [(safe.format, False)]]
    latent = options.latent and options.plan is not None
    return {"k": k, "v": [SidePlan(AUTO)] if latent else [safe, *plain]}


def choose_candidates(
    job: Job, windows: Sequence[torch.Tensor], far: Sequence[Batch], candidates: Mapping[int, Sides]
) -> dict[int, Sides]:
    """Return the first candidate of each layer and side, and the best one if it is another."""

    def measure(name: str, batches: Sequence[Batch], sides: str) -> TensorDict:
        def cost(index: int, k: torch.Tensor, v: torch.Tensor, queries: Asked) -> TensorDict:
            x, several = {"k": k, "v": v}, [s for s in sides if len(candidates[index][s]) > 1]
            return {
                side: torch.stack([c.measure(x[side], queries) for c in candidates[index][side]])
                for side in several
            }

        several = any(len(of[side]) > 1 for of in candidates.values() for side in sides)
        return fold_layers(job, name, batches if several else [], cost)

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
) -> Sequence[Candidate]:
    """Return the first one, and that whose cost, `[candidates, scales]`, is least at its worst."""
    if near is None:
        return candidates[:1]
    step = near.argmin(1, keepdim=True)
    costs = [near.gather(1, step), *([] if far is None else [far.gather(1, step)])]
    # 0 / 0: where K is all zeros, every plan is as good.
    worst = torch.stack([cost / cost[0] for cost in costs]).nan_to_num(1.0).amax(0).flatten()
    best = int(worst.argmin())
    return [candidates[0], candidates[best]] if worst[best] < _MOST else candidates[:1]


def make_scales(
    job: Job, windows: Sequence[torch.Tensor], candidates: Mapping[int, Sides]
) -> tuple[dict[int, LayerScales], dict[int, LayerScales]]:
    """Return the scales of each layer for the first candidates, and for the last ones."""
    named = {
        index: {f"{side}.{n}": c for side in sides for n, c in enumerate(sides[side])}
        for index, sides in candidates.items()
    }

    def cost(index: int, k: torch.Tensor, v: torch.Tensor, queries: Asked) -> TensorDict:
        return {
            f"{name}.{what}": costs
            for name, candidate in named[index].items()
            for what, costs in measure_costs(
                candidate, v if candidate.side == "v" else k, queries
            ).items()
        }

    def work() -> TensorDict:
        sums = fold_layers(job, "scales", sample_near(windows), cost)
        return {
            f"{index}.{name}": pick_scale(
                candidate, {what: sums[f"{index}.{name}.{what}"] for what in ("cost", "room")}
            )
            for index, of_layer in named.items()
            for name, candidate in of_layer.items()
        }

    scales = job.run_once("chosen", work)
    job.state.drop("scales")  # which is large, and not needed again

    def layer(index: int, sides: Sides, which: int) -> LayerScales:
        k, v = (range(len(sides[side]))[which] for side in "kv")
        plan = LayerPlan(sides["k"][k].plan, sides["v"][v].plan)
        return LayerScales(
            scales[f"{index}.k.{k}"], scales[f"{index}.v.{v}"], sides["k"][k].center,
            plan=None if job.options.plan is None else plan,
        )  # fmt: skip

    first, last = ({i: layer(i, of, which) for i, of in candidates.items()} for which in (0, -1))
    return first, last
