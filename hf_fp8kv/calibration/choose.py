"""Scales from what was observed: how large they must be, and which of the large ones lose least.

A scale must be at least `amax / 448`, so that nothing saturates. A float format rounds a number by
a share that depends on where in its binade the number falls, so of the scales in the octave above
that some lose less than others (on SmolLM2 the KL falls by a sixth). Then there is room: where a
larger scale by whole octaves loses next to nothing, it is taken up to the norm of the pairs that
RoPE rotates, which K can reach at positions that the text did not have.
"""

from dataclasses import dataclass
from typing import Any

import torch

from ..formats import FORMATS, Format
from ..layer_scales import Granularity
from ..quantize import SEARCH_STEPS, rounded
from .observe import Parts
from .pairs import Partners

__all__ = ["Choice", "choose"]

# What a scale may lose for room, and how many octaves up are tried.
_ROOM_COST = 1.02
_ROOM_OCTAVES = 3
# Calibrated scales are in the unit of E4M3.
_UNIT = FORMATS["fp8_e4m3"].max


@dataclass(frozen=True)
class Choice:
    """The scales of one layer without a centre and with one, float32 on the CPU, unit of E4M3.

    Attributes:
        k: of K as it is.
        v: of V.
        k_centered: of K minus the centre; None where a centre was not wanted.
        k_center: `[Hkv, Dk]`: the mean of K; None likewise.
        gain: squared error of K without the centre, divided by that with it; None likewise.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_centered: torch.Tensor | None = None
    k_center: torch.Tensor | None = None
    gain: float | None = None


def choose(
    parts: Parts,
    k: torch.Tensor,
    v: torch.Tensor,
    partners: Partners,
    *,
    granularity: Granularity,
    fmt: Format,
    margin: float,
    center: bool,
) -> Choice:
    """The scales of one layer.

    Args:
        parts: the range of the layer, see `range_of`.
        k: `[N, Hkv, Dk]`: K of some tokens, to measure errors on.
        v: the same for V.
        partners: what RoPE rotates; where it is not known, K gets no scale finer than a head's.
        granularity: for which numbers together a scale is made.
        fmt: the format that the errors are measured in.
        margin: times the largest magnitude.
        center: whether to make scales for K minus its mean too.
    """
    parts = {name: part.to(k.device) for name, part in parts.items()}
    k, v = k.float(), v.float()
    known = {"k": partners.k, "v": partners.v}

    def best(side: str, x: torch.Tensor, shift: torch.Tensor | None) -> tuple[Any, float]:
        middle = 0.0 if shift is None else shift
        high, low = parts[f"{side}_max"] - middle, parts[f"{side}_min"] - middle
        amax = torch.maximum(high.abs(), low.abs()) * margin
        reach = parts[f"{side}_pair"] * margin
        if shift is not None:
            reach = reach + shift.abs()
        return _best_scale(x - middle, amax, reach, _finest(granularity, side, known), fmt)

    k_scale, k_error = best("k", k, None)
    v_scale, _ = best("v", v, None)
    if not center:
        return Choice(k_scale, v_scale)
    mean = (parts["k_sum"] / parts["count"]).float()
    centered, error = best("k", k, mean)
    gain = k_error / error if error > 0 else 1.0
    return Choice(k_scale, v_scale, centered, mean.cpu(), gain)


def _finest(
    granularity: Granularity, side: str, known: dict[str, torch.Tensor | None]
) -> Granularity:
    # Without knowing what is rotated into a channel, its own range says nothing of other positions.
    if granularity == "channel" and side == "k" and known["k"] is None:
        return "head"
    return granularity


def _best_scale(
    x: torch.Tensor, amax: torch.Tensor, reach: torch.Tensor, granularity: Granularity, fmt: Format
) -> tuple[torch.Tensor, float]:
    """The scale on the CPU, in the unit of E4M3, and the squared error of `x` under it.

    Args:
        x: `[N, H, D]`, float32.
        amax: `[H, D]`: the smallest range that a scale must cover.
        reach: `[H, D]`: the range that it should cover.
        granularity: over what of `[H, D]` one scale stands.
        fmt: the format to measure in.
    """
    over = {"tensor": (0, 1), "head": (1,), "channel": ()}[granularity]
    amax, reach = (t.amax(over, keepdim=True) if over else t for t in (amax, reach))
    amax = _without_zeros(amax)
    first = amax / fmt.max

    def error(scale: torch.Tensor) -> torch.Tensor:
        lost = (rounded(x / scale, fmt) * scale - x).square().sum(0, dtype=torch.float64)
        return lost.sum(over, keepdim=True) if over else lost

    steps = [2.0 ** (step / SEARCH_STEPS) for step in range(SEARCH_STEPS)]
    errors = torch.stack([error(first * step) for step in steps])
    least, best = errors.min(0)
    scale = first * torch.tensor(steps, device=x.device, dtype=torch.float32)[best]
    kept = scale
    for octave in range(1, _ROOM_OCTAVES + 1):
        larger = scale * 2.0**octave
        # Not further than is of use, and only where all octaves below were good, too.
        good = (kept * fmt.max < reach) & (kept == larger / 2)
        good &= error(larger) <= _ROOM_COST * least
        kept = torch.where(good, larger, kept)
    result = (kept / fmt.scale_from_e4m3).cpu()
    return result.reshape(()) if granularity == "tensor" else result, error(kept).sum().item()


def _without_zeros(amax: torch.Tensor) -> torch.Tensor:
    """The range with that of its neighbours where there was nothing but zeros; 1 for all zeros.

    Any scale stores zeros; this one leaves room for other numbers.
    """
    largest = amax.max()
    largest = torch.where(largest > 0, largest, 1.0)
    return torch.where(amax > 0, amax, largest)
