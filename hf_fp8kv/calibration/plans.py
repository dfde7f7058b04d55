"""Plans by measurement: how a layer is stored at least cost, and the scales for that.

Candidates take the same bytes: a format, rotated or not, with a center or without. Each is tried
with its own scales on the queries of some windows, at their own and at other positions: outliers
that turn with the position leave their center, and rotation then spreads their error over all
channels. Another one than the first has to cost less at both. At the end the model's predictions
decide, see scoring.
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
_MOST = 0.95

# The candidates of a layer by side. The first candidate of a side is the safe one.
Sides = Mapping[str, Sequence[Candidate]]
# A candidate, and the scale that costs least, in the unit of E4M3.
Scaled = tuple[Candidate, torch.Tensor]
ScaledSides = Mapping[str, Sequence[Scaled]]


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
        ranges: its range on all texts, and with a plan the range of the rotated numbers.
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


def make_scales(
    job: Job, windows: Sequence[torch.Tensor], candidates: Mapping[int, Sides]
) -> dict[int, dict[str, list[Scaled]]]:
    """Return the candidates of each layer with their scales, tried on some of the windows."""

    def cost(index: int, k: torch.Tensor, v: torch.Tensor, queries: Asked) -> TensorDict:
        return {
            f"{side}.{number}.{what}": costs
            for side, x in (("k", k), ("v", v))
            for number, candidate in enumerate(candidates[index][side])
            for what, costs in measure_costs(candidate, x, queries).items()
        }

    def work() -> TensorDict:
        sums = fold_layers(job, "scales", sample_near(windows), cost)
        return {
            (name := f"{index}.{side}.{number}"): pick_scale(
                candidate, {what: sums[f"{name}.{what}"] for what in ("cost", "room")}
            )
            for index, sides in candidates.items()
            for side, of_side in sides.items()
            for number, candidate in enumerate(of_side)
        }

    scales = job.run_once("chosen", work)
    job.state.drop("scales")  # which is large, and not needed again
    return {
        index: {
            side: [(c, scales[f"{index}.{side}.{number}"]) for number, c in enumerate(of_side)]
            for side, of_side in sides.items()
        }
        for index, sides in candidates.items()
    }


def choose_scales(
    job: Job, windows: Sequence[torch.Tensor], far: Sequence[Batch], made: Mapping[int, ScaledSides]
) -> tuple[dict[int, LayerScales], dict[int, LayerScales]]:
    """Return the scales of each layer for the first candidates, and for the best ones."""

    def measure(name: str, batches: Sequence[Batch], sides: str) -> TensorDict:
        def cost(index: int, k: torch.Tensor, v: torch.Tensor, queries: Asked) -> TensorDict:
            return {
                side: torch.stack([c.measure(x, queries, scale) for c, scale in made[index][side]])
                for side, x in (("k", k), ("v", v))
                if side in sides and len(made[index][side]) > 1
            }

        several = any(len(of[side]) > 1 for of in made.values() for side in sides)
        return fold_layers(job, name, batches if several else [], cost)

    costs = measure("plans", sample_near(windows), "kv"), measure("far plans", far, "k")
    first, best = {}, {}
    for index, of in made.items():
        k, v = (_pick([c[name] for c in costs if (name := f"{index}.{s}") in c]) for s in "kv")
        first[index] = join_sides(job.options, of["k"][0], of["v"][0])
        best[index] = join_sides(job.options, of["k"][k], of["v"][v])
    return first, best


def _pick(costs: Sequence[torch.Tensor]) -> int:
    """Return the number of the candidate to take: `costs`, each `[candidates]`, are near and far.

    It is the one whose cost relative to the first is least where it is larger.
    """
    if not costs:
        return 0
    # 0 / 0: where K is all zeros, every plan is as good.
    worst = torch.stack([cost / cost[0] for cost in costs]).nan_to_num(1.0).amax(0)
    best = int(worst.argmin())
    return best if worst[best] < _MOST else 0


def join_sides(options: CalibrationOptions, k: Scaled, v: Scaled) -> LayerScales:
    """Return the scales of a layer, with its plan if `calibrate` was called with a plan."""
    plan = None if options.plan is None else LayerPlan(k[0].plan, v[0].plan)
    return LayerScales(k[1], v[1], k[0].center, plan=plan)
