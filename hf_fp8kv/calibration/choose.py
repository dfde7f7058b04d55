"""Scales of least cost: how large they must be, and which of the large ones lose least.

A scale must be at least `amax / 448`, so that nothing saturates. A float format rounds a number by
a share that depends on where in its binade the number falls, so of the scales in the octave above
that some suit the numbers better than others. What counts is not the error of K itself: nearly all
queries look at a few tokens (the first one above all), whose errors weigh more than all others, and
an error that all keys share is none, since softmax does not see it. So each scale is tried on the
queries of some text, with the cost

    K:  sum over queries of  Var_a(q . e)      V:  sum over queries of  |sum_a e|^2

where `e` are the rounding errors, and `a` the weights that the query gives to the tokens. The first
is twice the KL divergence of the weights, to second order. On SmolLM2, per head and with centers,
it makes the KL of the predictions 0.78 of what `amax / 448` gives (docs/accuracy.md).

Then there is room: where a scale that is larger by whole octaves loses next to nothing, it is
taken, up to the norm of the pairs that RoPE rotates, which K can reach at positions that the text
did not have. A scale per channel always covers that norm.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from ..formats import FORMATS, STATIC_DTYPE, Format, LayerPlan, SidePlan
from ..formats.codec import SEARCH_STEPS, rounding_error
from ..formats.rotation import rotate
from ..scales.layer_scales import Granularity
from .observe import TensorDict, merge_ranges
from .positions import SPREAD
from .queries import Queries

# What a larger scale may cost, and how many octaves up are tried.
_ROOM_COST = 1.02
_ROOM_OCTAVES = 3
# Tokens whose squared error tells whether there is room: a matter of the smallest numbers only.
_ROOM_TOKENS = 128
# Put before the names of a range: of the same numbers, rotated.
ROTATED = "rotated."
# Added to what the numbers of a channel count in its center, as a share of the head's largest.
_LEAST_WEIGHT = 1e-6


@dataclass(frozen=True)
class CalibrationOptions:
    """What a user chose of the scales to make, see `calibrate`.

    `plan`: how each layer is to be stored; "measured": what costs least; None: in `fmt`. `latent`:
    layers hold latents and positions (MLA): no centers, and positions keep 16 bits in a plan.
    """

    granularity: Granularity
    fmt: Format
    margin: float
    center: bool
    plan: Mapping[int, LayerPlan] | Literal["measured"] | None = None
    latent: bool = False


@dataclass(frozen=True)
class Candidate:
    """How one side of a layer may be stored, and the smallest static scales for that."""

    side: str
    plan: SidePlan
    first: torch.Tensor  # [1, 1], [Hkv, 1] or [Hkv, D], on the CPU: nothing seen saturates under it
    reach: torch.Tensor  # the same, for what K can become at other positions
    center: torch.Tensor | None  # [Hkv, Dk], what is subtracted
    granularity: Granularity

    @property
    def fmt(self) -> Format:
        """The format of the scales. Numbers stored as they are have the unit's format."""
        return _unit_format(self.plan)

    def transform(
        self, x: torch.Tensor, queries: Queries | None
    ) -> tuple[torch.Tensor, Queries | None]:
        """Return the numbers that are scaled, `[N, Hkv, D]`, and queries for errors of them."""
        if queries is not None and self.plan.rotated and self.side == "k":
            queries = queries.rotate()
        return transform(x, self.center, rotated=self.plan.rotated), queries

    def weigh(self, error: torch.Tensor, queries: Queries, kind: Granularity) -> torch.Tensor:
        """Return the cost of errors of the scaled numbers, see `Queries`."""
        weigh = queries.cost_of_keys if self.side == "k" else queries.cost_of_values
        return weigh(error, kind)

    def measure(
        self, x: torch.Tensor, queries: Queries | None, scale: torch.Tensor
    ) -> torch.Tensor:
        """Return the cost of K or V, `x` `[N, Hkv, D]`, with a scale in the unit of E4M3.

        The cost is float64, `[]`. Without queries it is the squared error.
        """
        x, queries = self.transform(x, queries)
        error = rounding_error(x, (scale * self.fmt.scale_from_e4m3).to(x.device), self.fmt)
        cost = error.square() if queries is None else self.weigh(error, queries, "head")
        return cost.sum(dtype=torch.float64).cpu()


def _unit_format(plan: SidePlan) -> Format:
    return FORMATS[STATIC_DTYPE if plan.is_auto else plan.format]


def transform(x: torch.Tensor, center: torch.Tensor | None, *, rotated: bool) -> torch.Tensor:
    """Return `x`, `[N, Hkv, D]`, minus a center `[Hkv, D]`, and rotated then: float32."""
    x = x.float() if center is None else x.float() - center.to(x.device)
    return rotate(x) if rotated else x


def weigh_keys(k: torch.Tensor, queries: Queries | None) -> TensorDict:
    """Return sums of K `[N, Hkv, Dk]` for `find_centers`, each `[Hkv, Dk]`, float64 on the CPU.

    In `weighted_sum` each number counts as much as its error costs; `weight_sum` is what they count
    in all. Without queries all count the same.
    """
    weights = torch.ones_like(k, dtype=torch.float32) if queries is None else queries.weigh_keys()
    sums = {"weight_sum": weights, "weighted_sum": weights * k.float()}
    return {name: x.sum(0, dtype=torch.float64).cpu() for name, x in sums.items()}


def find_centers(
    ranges: TensorDict, near: TensorDict | None, far: TensorDict | None
) -> tuple[list[torch.Tensor], TensorDict]:
    """Return the centers of a layer's K to try, `[Hkv, Dk]`, float32, and the ranges to cover.

    `near` and `far` are the ranges of some windows at their own and at other positions, with the
    sums of `weigh_keys`. The first center is their weighted mean, which makes the cost least as far
    as errors grow with what is stored. Where positions are far apart, it may suit neither: with
    `far` there is a second one, the mean over all positions, in which what turns a lot cancels.
    Scales cover what K is there. Without `near`, the center is the mean of `ranges`.
    """
    centers = [ranges["k_sum"] / ranges["count"]]
    if near is not None:
        sample = near if far is None else merge_ranges(near, far)
        centers.insert(0, _weighted_mean(sample))
        if far is None:
            centers.pop()
        else:
            # As many windows as `far` has stand for all positions; the text's are one more.
            even = SPREAD * (far["k_sum"] / far["count"]).to(centers[1])
            centers[1] = (centers[1] + even) / (1 + SPREAD)
        ranges = merge_ranges(ranges, sample)
    return [center.float() for center in centers], ranges


def _weighted_mean(sample: TensorDict) -> torch.Tensor:
    """Return the mean of K by `weigh_keys`; where next to nothing counts, the plain one."""
    weights, weighted = sample["weight_sum"], sample["weighted_sum"]
    plain = (sample["k_sum"] / sample["count"]).to(weights)
    least = _LEAST_WEIGHT * weights.amax(-1, keepdim=True)
    mean = (weighted + least * plain) / (weights + least)
    return torch.where(weights + least > 0, mean, plain)


def make_candidate(
    side: str, plan: SidePlan, ranges: TensorDict, granularity: Granularity, margin: float,
    center: torch.Tensor | None = None,
) -> Candidate:  # fmt: skip
    """Return the smallest scales of a side in a plan; with a "centered" one, minus `center`."""
    rotated, most = plan.rotated, _unit_format(plan).max
    start = f"{ROTATED}{side}" if rotated else side
    # On the CPU, as after an interruption: GPUs divide a little otherwise.
    high, low, reach = (ranges[f"{start}_{name}"].cpu() for name in ("max", "min", "pair"))
    center = None if center is None else center.cpu()
    if center is not None:
        middle = rotate(center) if rotated else center
        high, low, reach = high - middle, low - middle, reach + middle.abs()
    if rotated:
        # Every channel has a part of all pairs: that they turn is seen at other positions alone.
        reach = torch.maximum(high.abs(), low.abs())
    reach = reach * margin
    # A channel on its own says little of other positions; over a head, its fastest pairs have been
    # everywhere.
    alone = granularity == "channel"
    amax = reach if alone else torch.maximum(high.abs(), low.abs()) * margin
    if axes := _AXES[granularity]:
        amax, reach = amax.amax(axes, keepdim=True), reach.amax(axes, keepdim=True)
    first, reach = _replace_zeros(amax) / most, reach / most
    return Candidate(side, plan, first, reach, center, granularity)


# Of `[Hkv, D]`, the axes that one scale stands for.
_AXES: dict[Granularity, tuple[int, ...]] = {"tensor": (0, 1), "head": (1,), "channel": ()}


def _replace_zeros(amax: torch.Tensor) -> torch.Tensor:
    """Give a range of zeros, which any scale stores, that of its neighbors; 1 if all are zeros."""
    largest = amax.max()
    largest = torch.where(largest > 0, largest, 1.0)
    return torch.where(amax > 0, amax, largest)


def measure_costs(candidate: Candidate, x: torch.Tensor, queries: Queries | None) -> TensorDict:
    """Return what every scale costs on K or V of a text, `x` `[N, Hkv, D]`; costs add up.

    `cost`, `[SEARCH_STEPS, ...]`, float64, is of the scales of an octave; zeros without queries.
    `room`, `[1 + octaves, SEARCH_STEPS, ...]`, is the squared error of these, and of larger ones.
    """
    x, queries = candidate.transform(x, queries)
    kind, fmt = candidate.granularity, candidate.fmt
    thin = x[:: -(-len(x) // _ROOM_TOKENS)]
    cost, room = [], []
    for step in range(SEARCH_STEPS):
        scale = candidate.first.to(x.device) * 2.0 ** (step / SEARCH_STEPS)
        octaves = [scale * 2.0**octave for octave in range(_ROOM_OCTAVES + 1)]
        room.append(torch.stack([_squared_error(thin, larger, kind, fmt) for larger in octaves]))
        if queries is not None:
            of_scale = candidate.weigh(rounding_error(x, scale, fmt), queries, kind)
            cost.append(of_scale.sum(0, keepdim=True) if kind == "tensor" else of_scale)
    rooms = torch.stack(room, 1)
    total = torch.stack(cost).double() if cost else torch.zeros_like(rooms[0])
    return {"cost": total.cpu(), "room": rooms.cpu()}


def _squared_error(
    x: torch.Tensor, scale: torch.Tensor, kind: Granularity, fmt: Format
) -> torch.Tensor:
    squares = rounding_error(x, scale, fmt).square().sum(0, dtype=torch.float64)
    axes = _AXES[kind]
    return squares.sum(axes, keepdim=True) if axes else squares


def pick_scale(candidate: Candidate, costs: TensorDict) -> torch.Tensor:
    """Return the scale of least cost in the unit of E4M3; without queries the smallest scale."""
    cost, room = costs["cost"], costs["room"]
    first, reach = candidate.first, candidate.reach
    step = cost.argmin(0, keepdim=True)  # the first of equals
    rooms = room.gather(1, step[None].expand(len(room), *step.shape))[:, 0]
    scale = first * torch.tensor(2.0, dtype=torch.float32, device="cpu") ** (
        step[0].float() / SEARCH_STEPS
    )
    kept = scale
    for octave in range(1, _ROOM_OCTAVES + 1):
        larger = scale * 2.0**octave
        # Not further than is of use, and only where all octaves below were good, too.
        good = (kept < reach) & (kept == larger / 2) & (rooms[octave] <= _ROOM_COST * rooms[0])
        kept = torch.where(good, larger, kept)
    result = kept / candidate.fmt.scale_from_e4m3
    return result.reshape(()) if candidate.granularity == "tensor" else result
