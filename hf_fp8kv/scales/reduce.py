"""Reducing scales to what a format can hold, so that nothing saturates that did not before."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import torch

from ..errors import ScaleError
from ..formats import FORMATS
from ..utils.text import format_list
from .formats.base import ScaleFormat
from .layer_scales import LayerScales, ScaleData


def reduce_scales(scales: ScaleData, format: ScaleFormat) -> tuple[ScaleData, list[str]]:
    """Return the scales as the format can hold them, and what is lost, for people.

    The largest scale is taken, and the center of K is made room for.

    Raises:
        ScaleError: scales of rotated numbers, which servers do not store, or none.
    """
    if format.holds_centers:
        return scales, []
    rotated = [i for i, plan in (scales.plan or {}).items() if plan.k.rotated or plan.v.rotated]
    if rotated or scales.is_dynamic:
        what = f"rotated numbers in layers {format_list(rotated)}" if rotated else "each token"
        raise ScaleError(
            f"format {format.name!r}: expected scales of K and V as they are, got scales for "
            f"{what} ({scales.origin}); its readers cannot store that: save as 'hf_fp8kv', or "
            "calibrate without a plan"
        )
    losses: dict[str, list[int]] = defaultdict(list)
    losses["the formats of the plan are left out, servers store E4M3"] = list(scales.plan or ())
    losses["K's scales make room for the centers, which are left out"] = [
        index for index, layer in scales.layers.items() if layer.k_center is not None
    ]
    layers = {index: _drop_center(layer) for index, layer in scales.layers.items()}
    head_counts = _count_heads(layers) if format.granularity == "head" else {}
    for index, layer in layers.items():
        heads = head_counts.get(index)
        k, v = (_largest(scale, heads) for scale in layer.static)
        for before, after in zip(layer.static, (k, v), strict=True):
            if before.ndim and (before != after).any():
                losses[
                    f"the largest scale of each {'head' if heads else 'layer'} is written"
                ].append(index)
        if not format.holds_both_sides:
            if (k != v).any():
                losses["K and V share the larger scale"].append(index)
            k = v = torch.maximum(k, v)
        layers[index] = LayerScales(k, v, source=layer.source)
    texts = [f"{what} (layers {format_list(dict.fromkeys(i))})" for what, i in losses.items() if i]
    return replace(scales, layers=layers), texts


def _drop_center(layer: LayerScales) -> LayerScales:
    """Return a scale of K for the same numbers without a center: |K| <= max * scale + |center|."""
    if layer.k_center is None:
        return layer
    k, v = layer.static
    room = layer.k_center.abs() / FORMATS["fp8_e4m3"].max
    # One number stays one number.
    room = room if k.ndim else room.max()
    return LayerScales(k + room, v, source=layer.source)


def _count_heads(layers: Mapping[int, LayerScales]) -> dict[int, int]:
    """Return how many heads each layer is written for; empty: all are written per tensor."""
    own = {
        index: next((t.shape[0] for t in s.static if t.ndim and t.shape[0] > 1), None)
        for index, s in layers.items()
    }
    counts = {heads for heads in own.values() if heads}
    # A layer with one number needs the number of heads of the others, since all have one strategy.
    default = counts.pop() if len(counts) == 1 else None
    heads = {index: count or default for index, count in own.items()}
    return {i: n for i, n in heads.items() if n} if all(heads.values()) else {}


def _largest(scale: torch.Tensor, heads: int | None) -> torch.Tensor:
    """Return the largest scale, `[]`, or with a number of heads one for each, `[heads, 1]`."""
    if heads is None:
        return scale.max()
    return (scale.amax(1, keepdim=True) if scale.ndim else scale).expand(heads, 1).clone()
