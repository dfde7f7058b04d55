"""The choice of how a layer is stored, by what attention makes of the errors in its first call.

Of the plans that a user allows (`CacheOptions.k_plans`, `v_plans`) each layer takes the one with
the least cost on a few of its own queries, keys and values, see queries.py. Rotation makes numbers
Gaussian, for which more mantissa and less range is right. But outliers that turn with the position
(RoPE) leave the center, and rotation then spreads their error over all channels: so keys and
queries are also tried where RoPE would have them at other positions. Their products, and thus the
weights, are the same there.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..formats import FORMATS, Format, LayerPlan, SidePlan
from ..formats.codec import dynamic_scale, rounding_error
from ..formats.rotation import rotate
from ..scales.layer_scales import Granularity
from .queries import Queries
from .turns import Turns

# Fewer tokens of a first call say too little: the safe plan is kept.
FEWEST_TOKENS = 32
# Keys and queries that are looked at: the first keys, which most queries look at; the last; and
# some from in between.
_FIRST, _LAST, _BETWEEN, _QUERIES = 16, 112, 128, 16
# What another plan than the safe one has to cost at most in each head, relative to it: what one
# head loses, others do not make up for. A head that loses nothing, as one of zeros, agrees to all.
# Costs are of the smallest scales, while K's are searched at the write: of E3M4's cost that takes a
# quarter off Gaussian numbers, and two thirds where two channels are 50 times larger; of int8's,
# next to nothing.
_GAIN = 0.5
# Other positions that keys are tried at, as far as the model goes.
_MOVES = (1024, 4096, 16384)


def choose_plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    center: Tensor,
    plans: tuple[Sequence[SidePlan], Sequence[SidePlan]],
    scaling: float,
    window: int | None,
    turns: Turns | None,
    columns: Tensor | None = None,
) -> LayerPlan | None:
    """Return the plan of least cost for a layer, or None where its queries say nothing of it.

    Args:
        query: `[Hq, T, Dk]`, of one sequence.
        key: `[Hkv, T, Dk]`.
        value: `[Hkv, T, Dv]`.
        center: `[Hkv, Dk]`, float32, of the plans with one.
        plans: those of K and of V; the first of each is the safe one.
        scaling: of the logits.
        window: tokens that a query sees; None: all.
        turns: how K moves with the position; None: that is not known, and so K is not rotated,
            unless the safe plan is.
        columns: `[n]`, int64, rising: which of the T tokens are no padding; None: all.
    """
    count = key.shape[1] if columns is None else len(columns)
    if count < FEWEST_TOKENS:
        return None
    tokens = _sample(count, window).to(key.device)
    asked = torch.linspace(len(tokens) // 4, len(tokens) - 1, _QUERIES, device="cpu")
    asked = asked.long().unique().to(key.device)
    tokens = tokens if columns is None else columns.to(key.device)[tokens]
    k, v = (x[:, tokens].transpose(0, 1).float() for x in (key, value))
    queries = Queries.from_states(query[:, tokens[asked]], k, asked, scaling, None)
    if queries is None:
        return None
    if turns is not None:
        queries, k = _turn(queries, k, turns)
    else:
        safe = plans[0][0]
        plans = [plan for plan in plans[0] if safe.rotated or not plan.rotated], plans[1]
    k_costs = weigh_plans(Queries.cost_of_keys, queries, k, center, plans[0])
    v_costs = weigh_plans(Queries.cost_of_values, queries, v, None, plans[1])
    costs = torch.stack(k_costs + v_costs).tolist()  # at once: it waits for a GPU
    if not all(map(math.isfinite, itertools.chain(*costs))):
        return None
    count = len(k_costs)
    return LayerPlan(_cheapest(plans[0], costs[:count]), _cheapest(plans[1], costs[count:]))


def _turn(queries: Queries, k: Tensor, turns: Turns) -> tuple[Queries, Tensor]:
    """Return queries and keys as they are at several positions, along a new first axis."""
    moves = [0, *filter(turns.positions.__gt__, _MOVES)]
    q, k = (torch.stack([turns.turn(x, move) for move in moves]) for x in (queries.q, k))
    return Queries(q, queries.weights), k


def weigh_plans(
    cost: Callable[[Queries, Tensor, Granularity], Tensor],
    queries: Queries,
    x: Tensor,
    center: Tensor | None,
    plans: Sequence[SidePlan],
) -> list[Tensor]:
    """Return what errors of keys or values `x`, `[..., N, Hkv, D]`, cost in each plan: `[Hkv]`."""
    heads = x.shape[-2]
    if len(plans) == 1:
        return [x.new_zeros(heads)]
    seen = {False: (queries, x, center)}
    if any(plan.rotated for plan in plans):
        # Nothing is rotated back: rotated queries make the same of it, as does a sum of squares.
        seen[True] = queries.rotate(), rotate(x), None if center is None else rotate(center)
    found = []
    for plan in plans:
        asked, y, middle = seen[plan.rotated]
        if plan.centered and middle is not None:
            y = y - middle
        error = dynamic_error(y, FORMATS[plan.format])
        found.append(cost(asked, error, "head").reshape(-1, heads).sum(0))
    return found


def dynamic_error(x: Tensor, fmt: Format) -> Tensor:
    """Return what `x`, `[..., D]`, float32, changes by where it is stored with dynamic scales.

    With the smallest scales: to search better ones takes six times as long.
    """
    return rounding_error(x, dynamic_scale(x, fmt).float()[..., None], fmt)


def _cheapest(plans: Sequence[SidePlan], costs: Sequence[Sequence[float]]) -> SidePlan:
    """Return the plan that costs least of those that every head gains by, or the first one."""
    better = [
        index
        for index, heads in enumerate(costs)
        if all(cost <= _GAIN * safe for cost, safe in zip(heads, costs[0], strict=True))
    ]
    return plans[min(better, key=lambda index: sum(costs[index]), default=0)]


def _sample(tokens: int, window: int | None) -> Tensor:
    """Return which of so many tokens are looked at, rising: of a window, those in the last one."""
    first = 0 if window is None else max(tokens - window, 0)
    begin, end = first + _FIRST, tokens - _LAST
    if begin >= end:
        return torch.arange(first, tokens, device="cpu")
    between = torch.linspace(begin, end - 1, min(_BETWEEN, end - begin), device="cpu")
    before = torch.arange(first, begin, device="cpu")
    after = torch.arange(end, tokens, device="cpu")
    return torch.cat([before, between.long().unique(), after])
