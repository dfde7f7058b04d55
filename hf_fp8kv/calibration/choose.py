"""Scales from what was observed: how large they must be, and which of the large ones lose least.

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

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ..formats import Format
from ..formats.codec import SEARCH_STEPS, rounded
from ..scales.layer_scales import Granularity
from .observe import Parts
from .pairs import Partners

__all__ = ["Choice", "Queries", "Trial", "chosen_scales", "costs", "trials"]

# What a larger scale may cost, and how many octaves up are tried.
_ROOM_COST = 1.02
_ROOM_OCTAVES = 3
# Tokens whose squared error tells whether there is room: a matter of the smallest numbers only.
_ROOM_TOKENS = 128


@dataclass(frozen=True)
class Queries:
    """Some queries of a text, and what they attend to.

    Softcaps, sinks, chunks and biases of the logits are left out.

    Attributes:
        q: `[Hkv, G, Q, Dk]`, float32, scaled: `G` query heads for each KV head.
        weights: `[Hkv, G, Q, N]`, float32: how much each gives to every token.
    """

    q: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(
        cls, q: torch.Tensor, k: torch.Tensor, at: torch.Tensor, scaling: float, window: int | None
    ) -> "Queries | None":
        """The queries, or None where they are not of these keys (MLA expands what is cached).

        Args:
            q: `[Hq, Q, Dk]`.
            k: `[N, Hkv, Dk]`.
            at: `[Q]`, int64: the positions of the queries among the keys.
            scaling: of the logits.
            window: tokens that a query sees; None: all before it, and itself.
        """
        heads, dim = k.shape[1:]
        if q.shape[0] % heads or q.shape[2] != dim:
            return None
        q = q.float().reshape(heads, -1, *q.shape[1:]) * scaling
        logits = torch.einsum("hgqd,nhd->hgqn", q, k.float())
        tokens = torch.arange(len(k), device=k.device)
        hidden = tokens > at[:, None]
        if window is not None:
            hidden |= tokens <= at[:, None] - window
        return cls(q, logits.masked_fill(hidden, -torch.inf).softmax(-1))

    def of_keys(self, error: torch.Tensor, granularity: Granularity) -> torch.Tensor:
        """What errors `[N, Hkv, Dk]` of K cost: of each head `[Hkv, 1]`, or channel `[Hkv, Dk]`."""
        if granularity == "channel":
            mean = torch.einsum("hgqn,nhd->hgqd", self.weights, error)
            square = torch.einsum("hgqn,nhd->hgqd", self.weights, error.square())
            return (self.q.square() * (square - mean.square())).sum((1, 2))
        moved = torch.einsum("hgqd,nhd->hgqn", self.q, error)
        mean = (self.weights * moved).sum(-1, keepdim=True)
        return (self.weights * (moved - mean).square()).sum((1, 2, 3))[:, None]

    def of_values(self, error: torch.Tensor, granularity: Granularity) -> torch.Tensor:
        """The same for errors `[N, Hkv, Dv]` of V."""
        moved = torch.einsum("hgqn,nhd->hgqd", self.weights, error).square().sum((1, 2))
        return moved if granularity == "channel" else moved.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Trial:
    """One side of a layer and the smallest scales that it can have, in the unit of the format.

    Attributes:
        side: "k" or "v".
        first: `[1, 1]`, `[Hkv, 1]` or `[Hkv, D]`, on the CPU: nothing that was seen saturates
            under it.
        reach: the same, for what K can become at other positions.
        center: `[Hkv, Dk]`, what is subtracted, or None.
        granularity: over what one scale stands.
    """

    side: str
    first: torch.Tensor
    reach: torch.Tensor
    center: torch.Tensor | None
    granularity: Granularity


def trials(
    parts: Parts,
    partners: Partners,
    *,
    granularity: Granularity,
    fmt: Format,
    margin: float,
    center: bool,
) -> dict[str, Trial]:
    """What to try for a layer: "k", "v", and "k_centered" where a center is wanted.

    Args:
        parts: the range of the layer, see `range_of`.
        partners: what RoPE rotates; where it is not known, K gets no scale finer than a head's.
        granularity: over what one scale stands.
        fmt: the format that scales are chosen for.
        margin: times the largest magnitude.
        center: whether to try K minus its mean.
    """
    # Without knowing what is rotated into a channel, its own range says nothing of other positions.
    finest = "head" if granularity == "channel" and partners.k is None else granularity
    found = {
        "k": _trial("k", parts, None, finest, fmt, margin),
        "v": _trial("v", parts, None, granularity, fmt, margin),
    }
    if center:
        mean = (parts["k_sum"] / parts["count"]).float()
        found["k_centered"] = _trial("k", parts, mean, finest, fmt, margin)
    return found


def _trial(
    side: str,
    parts: Parts,
    center: torch.Tensor | None,
    granularity: Granularity,
    fmt: Format,
    margin: float,
) -> Trial:
    # On the CPU, as after an interruption: GPUs divide a little otherwise.
    high, low, reach = (parts[f"{side}_{name}"].cpu() for name in ("max", "min", "pair"))
    if center is not None:
        center = center.cpu()
        high, low, reach = high - center, low - center, reach + center.abs()
    reach = reach * margin
    # A channel on its own says little of other positions; over a head, its fastest pairs have been
    # everywhere.
    alone = granularity == "channel"
    amax = reach if alone else torch.maximum(high.abs(), low.abs()) * margin
    if over := _OVER[granularity]:
        amax, reach = amax.amax(over, keepdim=True), reach.amax(over, keepdim=True)
    return Trial(side, _without_zeros(amax) / fmt.max, reach / fmt.max, center, granularity)


# Of `[Hkv, D]`, the axes that one scale stands for.
_OVER: dict[Granularity, tuple[int, ...]] = {"tensor": (0, 1), "head": (1,), "channel": ()}


def _without_zeros(amax: torch.Tensor) -> torch.Tensor:
    """The range, with that of its neighbours where there was nothing but zeros; 1 for all zeros.

    Any scale stores zeros; this one leaves room for other numbers.
    """
    largest = amax.max()
    largest = torch.where(largest > 0, largest, 1.0)
    return torch.where(amax > 0, amax, largest)


def costs(trial: Trial, x: torch.Tensor, queries: Queries | None, fmt: Format) -> Parts:
    """What every scale costs on a text; costs of several texts add up.

    Args:
        trial: the side and its smallest scales.
        x: `[N, Hkv, D]`: K or V of the text.
        queries: what attends to it; None: not known, and then only `room` counts.
        fmt: the format.

    Returns:
        `cost`: `[SEARCH_STEPS, ...]`, float64: of the scales of an octave. `room`:
        `[1 + octaves, SEARCH_STEPS, ...]`: the squared error of these, and of larger ones.
    """
    x = x.float() if trial.center is None else x.float() - trial.center.to(x.device)
    first, over = trial.first.to(x.device), _OVER[trial.granularity]
    thin = x[:: -(-len(x) // _ROOM_TOKENS)]
    cost, room = [], []
    for step in range(SEARCH_STEPS):
        scale = first * 2.0 ** (step / SEARCH_STEPS)
        room.append(
            torch.stack(
                [
                    _squares(thin, scale * 2.0**octave, over, fmt)
                    for octave in range(_ROOM_OCTAVES + 1)
                ]
            )
        )
        if queries is not None:
            weigh: Callable[[torch.Tensor, Granularity], torch.Tensor]
            weigh = queries.of_keys if trial.side == "k" else queries.of_values
            lost = weigh(_error(x, scale, fmt), trial.granularity)
            cost.append(lost.sum(0, keepdim=True) if trial.granularity == "tensor" else lost)
    rooms = torch.stack(room, 1)
    found = torch.stack(cost).double() if cost else torch.zeros_like(rooms[0])
    return {"cost": found.cpu(), "room": rooms.cpu()}


def _error(x: torch.Tensor, scale: torch.Tensor, fmt: Format) -> torch.Tensor:
    return rounded(x / scale, fmt) * scale - x


def _squares(
    x: torch.Tensor, scale: torch.Tensor, over: tuple[int, ...], fmt: Format
) -> torch.Tensor:
    lost = _error(x, scale, fmt).square().sum(0, dtype=torch.float64)
    return lost.sum(over, keepdim=True) if over else lost


@dataclass(frozen=True)
class Choice:
    """The scales of one layer without a center and with one, float32 on the CPU, unit of E4M3.

    Attributes:
        k: of K as it is.
        v: of V.
        k_centered: of K minus the center; None where a center was not wanted.
        k_center: `[Hkv, Dk]`: the mean of K; None likewise.
        gain: what K costs without the center, divided by what it costs with it; None likewise.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_centered: torch.Tensor | None = None
    k_center: torch.Tensor | None = None
    gain: float | None = None

    @property
    def parts(self) -> Parts:
        """The same as tensors, for a file."""
        found: Parts = {"k": self.k, "v": self.v}
        if self.k_centered is not None and self.k_center is not None:
            found |= {"k_centered": self.k_centered, "k_center": self.k_center}
            found["gain"] = torch.tensor(self.gain, dtype=torch.float64, device="cpu")
        return found

    @classmethod
    def of(cls, parts: Parts) -> "Choice":
        """What `parts` gave."""
        gain = parts["gain"].item() if "gain" in parts else None
        return cls(parts["k"], parts["v"], parts.get("k_centered"), parts.get("k_center"), gain)


def chosen_scales(tried: Mapping[str, Trial], found: Mapping[str, Parts], fmt: Format) -> Choice:
    """The scales that cost least.

    Args:
        tried: what `trials` gave.
        found: what each of them costs, over all texts.
        fmt: the format.
    """
    k, k_cost = _best(tried["k"], found["k"], fmt)
    v, _ = _best(tried["v"], found["v"], fmt)
    if "k_centered" not in tried:
        return Choice(k, v)
    centered, cost = _best(tried["k_centered"], found["k_centered"], fmt)
    center = tried["k_centered"].center
    assert center is not None
    return Choice(k, v, centered, center, k_cost / cost if cost > 0 else 1.0)


def _best(trial: Trial, found: Parts, fmt: Format) -> tuple[torch.Tensor, float]:
    """The scale in the unit of E4M3, and its cost; without queries the smallest scale."""
    cost, room = found["cost"], found["room"]
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
