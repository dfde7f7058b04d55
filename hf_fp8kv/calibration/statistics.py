"""Statistics of scales on a text: what saturates, what vanishes, and the error per format."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from ..errors import ConfigError
from ..formats import AUTO, DISTINCT, FORMATS, Format, LayerPlan, SidePlan
from ..formats.codec import dynamic_scale, round_to_format, rounding_error, search_scale
from ..scales.layer_scales import LayerScales
from ..scales.report import DYNAMIC, LayerStatistics, SideStatistics
from .choose import transform
from .observe import Batch, TensorDict, add_tensors, observe
from .state import Job

# Tokens that errors are measured on; shares are of all tokens.
_ERROR_TOKENS = 1024
# One row of counts for each side: these, then an error for each format, static and dynamic.
_COUNTS = ("numbers", "saturated", "not_zero", "vanished", "energy")
# The error under static scales of a layer that has none: no sum is below 0.
_NONE = -1.0


def head_amax(ranges: TensorDict) -> dict[str, tuple[float, ...]]:
    """Return the largest magnitude of each KV head, of K and V, from what `measure_range` gave."""
    amax = {}
    for side in "kv":
        largest = torch.maximum(ranges[f"{side}_max"].abs(), ranges[f"{side}_min"].abs())
        amax[side] = tuple(largest.amax(-1).tolist())
    return amax


def measure_statistics(
    job: Job,
    batches: Sequence[Batch],
    layers: Mapping[int, LayerScales],
    amax: Mapping[int, Mapping[str, tuple[float, ...]]],
) -> dict[int, LayerStatistics]:
    """Return the statistics of every layer on a text; raise ConfigError for NaN or infinity.

    `amax` has the largest magnitudes of each layer on the texts of its scales.
    """
    fmt = job.options.fmt
    tokens = sum(batch.tokens for batch in batches)
    formats = list(dict.fromkeys((*DISTINCT, fmt)))
    every = max(1, -(-tokens // _ERROR_TOKENS))
    # So that it is not the first token of each window that counts.
    before = dict(zip(map(id, batches), accumulate(b.tokens for b in batches), strict=True))

    def step(sums: TensorDict, batch: Batch) -> TensorDict:
        new: TensorDict = {}
        sample = slice((batch.tokens - before[id(batch)]) % every, None, every)

        def on_states(index: int, k: torch.Tensor, v: torch.Tensor) -> None:
            rows = [
                _count(x.float(), layers[index], side, fmt, formats, sample)
                for side, x in (("k", k), ("v", v))
            ]
            counted = torch.stack(rows).cpu()
            if not torch.isfinite(counted).all():
                raise ConfigError(
                    f"layer {index}: expected finite K and V of the text held out, got NaN or "
                    "infinity; load the model in bfloat16 or float32, and look at the text"
                )
            new[str(index)] = counted

        observe(job.model, batch, job.layers, on_states)
        return add_tensors(sums, new)

    sums = job.run_batches("statistics", batches, step)
    results = {}
    for index in sorted(layers):
        rows = sums[str(index)] if sums else torch.zeros(2, len(_COUNTS) + 2 * len(formats))
        k, v = (
            _summarize(row.tolist(), amax[index][side], formats)
            for side, row in zip("kv", rows, strict=True)
        )
        results[index] = LayerStatistics(k, v, layers[index].k_center is not None)
    return results


def _count(
    x: torch.Tensor, scales: LayerScales, side: str, fmt: Format, formats: list[Format],
    sample: slice,
) -> torch.Tensor:  # fmt: skip
    """Return one row of counts, float64, of `x` `[N, Hkv, D]`, float32.

    `fmt` is what the layer is stored in, unless it has a plan.
    """
    spread = _one_sided(scales, side).spread("here", x.shape[1], x.shape[2], x.shape[2])
    plan = None if spread.plan is None else spread.plan.k
    stored = transform(x, spread.k_center, rotated=plan is not None and plan.rotated)
    if plan is not None and not plan.is_auto:
        fmt = FORMATS[plan.format]
    choose = search_scale if side == "k" else dynamic_scale
    scale = None if spread.k is None else spread.k.to(x.device)
    if scale is None:
        scaled = stored / choose(stored, fmt).float()[..., None]
    else:
        scaled = stored / (scale * fmt.scale_from_e4m3)
    zero = stored == 0
    counts = [
        torch.tensor(x.numel(), device=x.device),
        (scaled.abs() > _largest(fmt)).sum(),
        (~zero).sum(),
        ((round_to_format(scaled, fmt) == 0) & ~zero).sum(),
    ]
    x, stored = x[sample], stored[sample]
    counts.append(x.square().sum(dtype=torch.float64))
    if scale is None:
        counts += [torch.tensor(_NONE, device=x.device)] * len(formats)
    else:
        counts += [_squared_error(stored, scale * f.scale_from_e4m3, f) for f in formats]
    counts += [_squared_error(x, choose(x, f).float()[..., None], f) for f in formats]
    return torch.stack([count.double() for count in counts])


def _largest(fmt: Format) -> float:
    """Return what just rounds to the format's largest number; only more than that saturates."""
    return fmt.max + fmt.max_step / 2


def _squared_error(x: torch.Tensor, scale: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return the squared error of `x` under a scale in the unit of `fmt`, float64."""
    return rounding_error(x, scale, fmt).square().sum(dtype=torch.float64)


def _summarize(row: list[float], amax: tuple[float, ...], formats: list[Format]) -> SideStatistics:
    numbers, saturated, not_zero, vanished, energy = row[: len(_COUNTS)]
    names = [fmt.name for fmt in formats] + [DYNAMIC + fmt.name for fmt in formats]
    errors = row[len(_COUNTS) :]
    return SideStatistics(
        amax,
        saturated / max(numbers, 1.0),
        vanished / max(not_zero, 1.0),
        {
            name: (e / energy) ** 0.5 if energy else 0.0
            for name, e in zip(names, errors, strict=True)
            if e >= 0
        },
    )


def _one_sided(scales: LayerScales, side: str) -> LayerScales:
    """Return the scales of one side for both: the head sizes of K and V may differ."""
    scale, plan = getattr(scales, side), scales.plan
    if side == "k":
        both = None if plan is None else LayerPlan(plan.k, SidePlan(AUTO))
        return LayerScales(scale, scale, scales.k_center, plan=both)
    return LayerScales(scale, scale, plan=None if plan is None else LayerPlan(plan.v, plan.v))
