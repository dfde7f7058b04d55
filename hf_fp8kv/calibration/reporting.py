"""Make the report of scales: statistics of K and V on a text, and quality of predictions.

Statistics are the shares of values that saturate or vanish, and the error of each format.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ..errors import ConfigError
from ..formats import DISTINCT, FORMATS, Format, codec
from ..scales.kv_scales import KVScales, StoragePlan
from ..scales.layer_scales import LayerScales
from ..scales.report import DYNAMIC, CalibrationReport, LayerStatistics, QualityRow, SideStatistics
from ..utils.environment import describe_hardware, format_utc_now, list_versions
from . import scoring
from .choose import center_and_rotate
from .divergence import UNQUANTIZED
from .observe import Batch, TensorDict, make_batches, nan_error, observe
from .rope import FarPositions
from .stages import Job, fold_layers

logger = logging.getLogger(__name__)

# Number of tokens that are read again at far positions. Half of them are scored.
_FAR_TOKENS = 2048
# Number of tokens on which errors are measured. Shares are measured on all tokens.
_ERROR_TOKENS = 1024


def compute_head_amax(ranges: TensorDict) -> dict[str, tuple[float, ...]]:
    """Return the largest magnitude of each KV head, for K and V, from a `measure_range` result."""
    limits = {side: torch.stack([ranges[f"{side}_max"], ranges[f"{side}_min"]]) for side in "kv"}
    return {side: tuple(x.abs().amax((0, -1)).tolist()) for side, x in limits.items()}


def measure_statistics(
    job: Job, batches: Sequence[Batch], scales: KVScales, ranges: Mapping[int, TensorDict]
) -> dict[int, LayerStatistics]:
    """Return the statistics of every layer on a text. Raise ConfigError for NaN or infinity.

    `ranges` are the ranges on the calibration texts of each layer that stored something.
    """
    fmt = job.options.fmt
    num_tokens = sum(batch.num_tokens for batch in batches)
    formats = list(dict.fromkeys((*DISTINCT, fmt)))
    stride = max(1, -(-num_tokens // _ERROR_TOKENS))
    tokens_read = Counter[int]()  # by layer, so that the sample continues across windows

    def measure(index: int, k: torch.Tensor, v: torch.Tensor) -> TensorDict:
        sample = slice(-tokens_read[index] % stride, None, stride)
        tokens_read[index] += len(k)
        layer = scales.for_layer(
            index, num_kv_heads=k.shape[1], k_head_dim=k.shape[2], v_head_dim=v.shape[2]
        )
        counts = torch.stack([
            _count_values(x.float(), layer, side, fmt, formats, sample)
            for side, x in (("k", k), ("v", v))
        ]).cpu()  # fmt: skip
        if not torch.isfinite(counts).all():
            raise nan_error(index, "K and V of the text held out")
        return {"counts": counts}

    sums = fold_layers(job, "statistics", batches, measure, observe)
    statistics = {}
    for index in sorted(scales.layers.keys() & ranges.keys()):
        rows = sums[index]["counts"] if sums else torch.zeros(2, 5 + 2 * len(formats))
        sides = zip(rows.tolist(), compute_head_amax(ranges[index]).values(), strict=True)
        k, v = (_summarize(row, amax, formats) for row, amax in sides)
        statistics[index] = LayerStatistics(k, v, scales.layers[index].k_center is not None)
    return statistics


def _count_values(
    x: torch.Tensor, scales: LayerScales, side: str, fmt: Format, formats: list[Format],
    sample: slice,
) -> torch.Tensor:  # fmt: skip
    """Return a row of counts, float64, for K or V of a layer, `x` `[N, Hkv, D]`, float32.

    The row has the numbers of all, saturated, nonzero and vanished values, and the sum of squares.
    The squared errors follow: in each format with static scales, if any, and in each format with
    dynamic scales. `fmt` is the format of a layer without a plan.
    """
    plan = None if scales.plan is None else getattr(scales.plan, side)
    center = scales.k_center if side == "k" else None
    choose_scale = codec.search_scale if side == "k" else codec.compute_dynamic_scale
    stored_values = center_and_rotate(x, center, rotated=plan is not None and plan.rotated)
    if plan is not None and not plan.is_auto:
        fmt = FORMATS[plan.format]
    scale = getattr(scales, side)
    if scale is None:
        scaled_values = stored_values / choose_scale(stored_values, fmt).float()[..., None]
    else:
        scale = scale.to(x.device)
        scaled_values = stored_values / (scale * fmt.scale_from_e4m3)
    is_zero = stored_values == 0
    counts = [
        torch.tensor(x.numel(), device=x.device),
        # Values up to this limit round to the largest code.
        (scaled_values.abs() > fmt.max + fmt.max_step / 2).sum(),
        (~is_zero).sum(),
        ((codec.round_to_format(scaled_values, fmt) == 0) & ~is_zero).sum(),
    ]
    x, stored_values = x[sample], stored_values[sample]
    counts.append(x.square().sum(dtype=torch.float64))
    if scale is not None:
        counts += [_sum_squares(stored_values, scale * f.scale_from_e4m3, f) for f in formats]
    counts += [_sum_squares(x, choose_scale(x, f).float()[..., None], f) for f in formats]
    return torch.stack([count.double() for count in counts])


def _sum_squares(x: torch.Tensor, scale: torch.Tensor, fmt: Format) -> torch.Tensor:
    return codec.compute_rounding_error(x, scale, fmt).square().sum(dtype=torch.float64)


def _summarize(row: list[float], amax: tuple[float, ...], formats: list[Format]) -> SideStatistics:
    num_values, num_saturated, num_nonzero, num_vanished, energy, *squares = row
    names = [prefix + fmt.name for prefix in ("", DYNAMIC) for fmt in formats]
    names = names[-len(squares) :]  # without the static scales of a layer that has none
    errors = [(x / energy) ** 0.5 if energy else 0.0 for x in squares]
    shares = num_saturated / max(num_values, 1.0), num_vanished / max(num_nonzero, 1.0)
    return SideStatistics(amax, *shares, dict(zip(names, errors, strict=True)))


def _score_quality(
    job: Job, stage: str, batches: list[Batch], scales: KVScales
) -> tuple[QualityRow, ...]:
    """Compare the predictions with each cache. Return no rows if the model cannot be compared."""
    batches = [batch for batch in batches if batch.ids.shape[1] >= scoring.MIN_TOKENS]
    if not batches or job.model.get_output_embeddings() is None:
        reason = "no text is long enough" if not batches else "the model has no logits"
        logger.info("%s: predictions are not compared: %s", type(job.model).__name__, reason)
        return ()
    fmt = job.options.fmt.name
    scales_by_cache: dict[str, KVScales | float | None] = {f"static {fmt}": scales}
    if scales.plan is not None:
        layers = {i: replace(layer, k=None, v=None) for i, layer in scales.layers.items()}
        plan = StoragePlan(**{**vars(scales), "layers": layers, "report": None})
        scales_by_cache = {} if scales.is_dynamic else {"static, the plan": scales}
        scales_by_cache["dynamic, the plan"] = plan
    scales_by_cache |= {f"dynamic {fmt}": None, f"scale 1.0 {fmt}": 1.0}
    factories = {
        cache: scoring.make_cache_factory(job, cache_scales, scales.layers)
        for cache, cache_scales in scales_by_cache.items()
    }
    try:
        scores = scoring.score_caches(job, stage, batches, factories)
    except ConfigError as error:
        logger.warning("the predictions are not compared: %s", error)
        return ()
    if not scales.is_dynamic:
        static_kl, dynamic_kl = (scores[cache].kl for cache in list(factories)[:2])
        storage = fmt if scales.plan is None else "the plan"
        scoring.warn_if_worse(static_kl, dynamic_kl, storage, batches)
    rows = [scores[cache].summarize(cache) for cache in (UNQUANTIZED, *factories)]
    finite_rows = [row for row in rows if math.isfinite(row.kl) and math.isfinite(row.perplexity)]
    if len(finite_rows) < len(rows):
        names = ", ".join(sorted(row.cache for row in rows if row not in finite_rows))
        logger.warning("the model returns logits that are not finite: %s not compared", names)
    return tuple(finite_rows)


def make_report(
    job: Job,
    scales: KVScales,
    ranges: Mapping[int, TensorDict],
    centers_note: str,
    windows: Sequence[torch.Tensor],
    scored_windows: Sequence[torch.Tensor],
    positions: FarPositions,
    num_texts: int = 0,
    num_tokens: int = 0,
) -> CalibrationReport:
    """Measure scales on `windows`, and predictions on `scored_windows` and at far positions."""
    model, options = job.model, job.options
    statistics = measure_statistics(job, make_batches(windows, 1), scales, ranges)
    rows = _score_quality(job, "quality", make_batches(scored_windows, 1), scales)
    batches = positions.place(scoring.take_windows(scored_windows, _FAR_TOKENS))
    far_rows = _score_quality(job, "far quality", batches, scales) if batches and rows else ()
    return CalibrationReport(
        model=getattr(model, "name_or_path", "") or type(model).__name__,
        dtype=options.fmt.name if scales.plan is None else "plan",
        granularity=scales.granularity,
        margin=options.margin,
        texts=num_texts,
        tokens=num_tokens,
        held_out_tokens=sum(map(len, windows)),
        seconds=time.monotonic() - job.start_time,
        date=format_utc_now(),
        versions=list_versions(),
        hardware=describe_hardware() | {"device": str(model.device)},
        scales_digest=scales.digest,
        centers=centers_note,
        layers=statistics,
        quality=rows,
        far_quality=far_rows,
        max_position=positions.last_position if far_rows else None,
    )
