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
from dataclasses import dataclass, replace
from typing import Literal

import torch

from ..formats import Format, LayerPlan
from ..formats.codec import SEARCH_STEPS, rounding_error
from ..formats.rotation import rotate
from ..scales.layer_scales import Granularity, LayerScales
from .observe import TensorDict, merge_ranges
from .pairs import Partners
from .positions import SPREAD
from .queries import Queries

# What a larger scale may cost, and how many octaves up are tried.
_ROOM_COST = 1.02
_ROOM_OCTAVES = 3
# Tokens whose squared error tells whether there is room: a matter of the smallest numbers only.
_ROOM_TOKENS = 128
# The trials of K minus a center.
CENTERED = ("k_centered", "k_centered_evenly")
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
class Trial:
    """One side of a layer and the smallest scales that it can have, in the unit of the format."""

    side: str
    first: torch.Tensor  # [1, 1], [Hkv, 1] or [Hkv, D], on the CPU: nothing seen saturates under it
    reach: torch.Tensor  # the same, for what K can become at other positions
    center: torch.Tensor | None  # [Hkv, Dk], what is subtracted
    granularity: Granularity
    rotated: bool = False  # after that, before scaling

    def transform(
        self, x: torch.Tensor, queries: Queries | None
    ) -> tuple[torch.Tensor, Queries | None]:
        """Return what is scaled of `x`, `[N, Hkv, D]`, and queries for errors of that."""
        if queries is not None and self.rotated and self.side == "k":
            queries = queries.rotate()
        return transform(x, self.center, rotated=self.rotated), queries


def transform(x: torch.Tensor, center: torch.Tensor | None, *, rotated: bool) -> torch.Tensor:
    """Return `x`, `[N, Hkv, D]`, minus a center `[Hkv, D]`, and rotated then: float32."""
    x = x.float() if center is None else x.float() - center.to(x.device)
    return rotate(x) if rotated else x


def weigh_keys(k: torch.Tensor, queries: Queries | None) -> TensorDict:
    """Return sums of K `[N, Hkv, Dk]` for `make_trials`, each `[Hkv, Dk]`, float64 on the CPU.

    In `weighted_sum` each number counts as much as its error costs; `weight_sum` is what they count
    in all. Without queries all count the same.
    """
    weights = torch.ones_like(k, dtype=torch.float32) if queries is None else queries.weigh_keys()
    sums = {"weight_sum": weights, "weighted_sum": weights * k.float()}
    return {name: x.sum(0, dtype=torch.float64).cpu() for name, x in sums.items()}


def make_trials(
    ranges: TensorDict,
    partners: Partners,
    options: CalibrationOptions,
    near: TensorDict | None = None,
    far: TensorDict | None = None,
) -> dict[str, Trial]:
    """Return what to try for a layer: "k", "v", and `CENTERED` where a center is wanted.

    `near` and `far` are the ranges of some windows at their own and at other positions, with the
    sums of `weigh_keys`. The first center is their weighted mean, which makes the cost least as far
    as errors grow with what is stored. Where positions are far apart, it may suit neither: with
    `far` there is a second one, the mean over all positions, in which what turns a lot cancels.
    Scales cover what K is there. Without `near`, the center is the mean of `ranges`.
    """
    finest = options
    if options.granularity == "channel" and partners.k is None:
        # Not knowing what is rotated into a channel, its range says nothing of other positions.
        finest = replace(options, granularity="head")
    trials = {"k": make_trial("k", ranges, finest), "v": make_trial("v", ranges, options)}
    if options.center:
        centers, ranges = find_centers(ranges, near, far)
        for name, center in zip(CENTERED, centers, strict=False):
            trials[name] = make_trial("k", ranges, finest, center)
    return trials


def find_centers(
    ranges: TensorDict, near: TensorDict | None, far: TensorDict | None
) -> tuple[list[torch.Tensor], TensorDict]:
    """Return the centers of `make_trials`, `[Hkv, Dk]`, float32, and the ranges to cover."""
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


def make_trial(
    side: str, ranges: TensorDict, options: CalibrationOptions, center: torch.Tensor | None = None,
    rotated: bool = False,
) -> Trial:  # fmt: skip
    """Return the smallest scales for a side, `center` subtracted first and `rotated` then."""
    granularity, fmt = options.granularity, options.fmt
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
    reach = reach * options.margin
    # A channel on its own says little of other positions; over a head, its fastest pairs have been
    # everywhere.
    alone = granularity == "channel"
    amax = reach if alone else torch.maximum(high.abs(), low.abs()) * options.margin
    if axes := _AXES[granularity]:
        amax, reach = amax.amax(axes, keepdim=True), reach.amax(axes, keepdim=True)
    first, reach = _replace_zeros(amax) / fmt.max, reach / fmt.max
    return Trial(side, first, reach, center, granularity, rotated)


# Of `[Hkv, D]`, the axes that one scale stands for.
_AXES: dict[Granularity, tuple[int, ...]] = {"tensor": (0, 1), "head": (1,), "channel": ()}


def _replace_zeros(amax: torch.Tensor) -> torch.Tensor:
    """Give a range of zeros, which any scale stores, that of its neighbors; 1 if all are zeros."""
    largest = amax.max()
    largest = torch.where(largest > 0, largest, 1.0)
    return torch.where(amax > 0, amax, largest)


def measure_costs(
    trial: Trial, x: torch.Tensor, queries: Queries | None, fmt: Format
) -> TensorDict:
    """Return what every scale costs on K or V of a text, `x` `[N, Hkv, D]`; costs add up.

    `cost`, `[SEARCH_STEPS, ...]`, float64, is of the scales of an octave; zeros without queries.
    `room`, `[1 + octaves, SEARCH_STEPS, ...]`, is the squared error of these, and of larger ones.
    """
    x, queries = trial.transform(x, queries)
    first, axes = trial.first.to(x.device), _AXES[trial.granularity]
    thin = x[:: -(-len(x) // _ROOM_TOKENS)]
    cost, room = [], []
    for step in range(SEARCH_STEPS):
        scale = first * 2.0 ** (step / SEARCH_STEPS)
        octaves = [scale * 2.0**octave for octave in range(_ROOM_OCTAVES + 1)]
        room.append(torch.stack([_squared_error(thin, larger, axes, fmt) for larger in octaves]))
        if queries is not None:
            weigh = queries.cost_of_keys if trial.side == "k" else queries.cost_of_values
            of_scale = weigh(rounding_error(x, scale, fmt), trial.granularity)
            tensor = trial.granularity == "tensor"
            cost.append(of_scale.sum(0, keepdim=True) if tensor else of_scale)
    rooms = torch.stack(room, 1)
    total = torch.stack(cost).double() if cost else torch.zeros_like(rooms[0])
    return {"cost": total.cpu(), "room": rooms.cpu()}


def measure_key_cost(
    scales: LayerScales, k: torch.Tensor, queries: Queries | None, fmt: Format
) -> torch.Tensor:
    """Return the cost of storing K `[N, Hkv, D]` of a text with these scales, float64, `[]`."""
    x = transform(k, scales.k_center, rotated=False)
    error = rounding_error(x, (scales.static[0] * fmt.scale_from_e4m3).to(k.device), fmt)
    cost = error.square() if queries is None else queries.cost_of_keys(error, "head")
    return cost.sum(dtype=torch.float64).cpu()


def _squared_error(
    x: torch.Tensor, scale: torch.Tensor, axes: tuple[int, ...], fmt: Format
) -> torch.Tensor:
    squares = rounding_error(x, scale, fmt).square().sum(0, dtype=torch.float64)
    return squares.sum(axes, keepdim=True) if axes else squares


@dataclass(frozen=True)
class Choice:
    """The scales of one layer without a center and with one, float32 on the CPU, unit of E4M3.

    The last three are None where a center was not wanted.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_centered: torch.Tensor | None = None  # of K minus the center
    k_center: torch.Tensor | None = None  # [Hkv, Dk]: the mean of K
    # What K costs without the center, divided by what it costs with it; beyond the windows, too,
    # where that is less.
    gain: float | None = None

    @property
    def plain(self) -> LayerScales:
        """The scales without a center."""
        return LayerScales(self.k, self.v)

    @property
    def centered(self) -> LayerScales:
        """The scales with the center that was wanted."""
        assert self.k_centered is not None
        return LayerScales(self.k_centered, self.v, self.k_center)

    @property
    def tensors(self) -> TensorDict:
        """The same as named tensors, for a file."""
        tensors = {name: value for name, value in vars(self).items() if value is not None}
        if self.gain is not None:
            tensors["gain"] = torch.tensor(self.gain, dtype=torch.float64, device="cpu")
        return tensors

    @classmethod
    def from_tensors(cls, tensors: TensorDict) -> "Choice":
        """Return the choice of which these are the `tensors`."""
        return cls(**{n: t.item() if n == "gain" else t for n, t in tensors.items()})  # type: ignore[arg-type]


def pick_scales(
    trials: Mapping[str, Trial], costs: Mapping[str, TensorDict], fmt: Format,
    center: str = CENTERED[0],
) -> Choice:  # fmt: skip
    """Return the scales of `make_trials` that cost least over all texts, with one of `CENTERED`."""
    k, k_cost = pick_scale(trials["k"], costs["k"], fmt)
    v, _ = pick_scale(trials["v"], costs["v"], fmt)
    if center not in trials:
        return Choice(k, v)
    centered, cost = pick_scale(trials[center], costs[center], fmt)
    return Choice(k, v, centered, trials[center].center, k_cost / cost if cost > 0 else 1.0)


def pick_scale(trial: Trial, costs: TensorDict, fmt: Format) -> tuple[torch.Tensor, float]:
    """Return the scale in the unit of E4M3, and its cost; without queries the smallest scale."""
    cost, room = costs["cost"], costs["room"]
    first, reach = trial.first, trial.reach
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
    result = kept / fmt.scale_from_e4m3
    known = cost.any()
    total = cost.gather(0, step).sum() if known else rooms[0].sum()
    return result.reshape(()) if trial.granularity == "tensor" else result, total.item()
