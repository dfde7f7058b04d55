"""The report of a calibration, or of a measurement of scales from elsewhere."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ..errors import ConfigError
from ..scales.kv_scales import KVScales, StoragePlan
from ..scales.report import PLANNED, CalibrationReport, QualityRow
from ..utils.environment import hardware, utc_now, versions
from . import scoring
from .divergence import UNQUANTISED
from .observe import Batch, TensorDict, make_batches
from .positions import Beyond
from .state import Job
from .statistics import head_amax, measure_statistics

logger = logging.getLogger(__name__)

# How many caches are compared with the unquantised one, at most.
CACHES = 4


def _score_quality(
    job: Job, name: str, batches: list[Batch], scales: KVScales
) -> tuple[QualityRow, ...]:
    """Score how far caches move the model's predictions; nothing if there is nothing to score."""
    batches = [batch for batch in batches if batch.ids.shape[1] >= scoring.SHORTEST]
    if not batches or not scoring.has_logits(job.model):
        why = "there is no text for it that is long enough" if not batches else "it has no logits"
        logger.info("%s: its predictions are not compared: %s", type(job.model).__name__, why)
        return ()
    fmt = job.options.fmt.name
    if scales.plan is None:
        given = {f"static {fmt}": scales}
    elif scales.is_dynamic:
        given = {"dynamic, the plan": scales}
    else:
        given = {"static, the plan": scales, "dynamic, the plan": _without_scales(scales)}
    others = {f"dynamic {fmt}": None, f"scale 1.0 {fmt}": 1.0}
    caches = {
        cache: scoring.cache_factory(job, these, scales.layers)
        for cache, these in {**given, **others}.items()
    }
    try:
        scores = scoring.score_caches(job, name, batches, caches)
    except ConfigError as error:
        logger.warning("the predictions are not compared: %s", error)
        return ()
    if not scales.is_dynamic:
        static, dynamic = (scores[cache].kl for cache in list(caches)[:2])
        what = fmt if scales.plan is None else "the plan"
        scoring.warn_if_worse(static, dynamic, what, batches)
    rows = {name: scores[name].quality for name in (UNQUANTISED, *caches)}
    finite = {n: q for n, q in rows.items() if math.isfinite(q.kl) and math.isfinite(q.perplexity)}
    if len(finite) < len(rows):
        lost = ", ".join(sorted(rows.keys() - finite))
        logger.warning("the model gives logits that are not finite: %s not compared", lost)
    return tuple(QualityRow(name, **vars(quality)) for name, quality in finite.items())


def _without_scales(scales: KVScales) -> StoragePlan:
    """Return the plan and the centers of static scales."""
    layers = {i: replace(layer, k=None, v=None) for i, layer in scales.layers.items()}
    return StoragePlan(**{**vars(scales), "layers": layers, "report": None})


def make_report(
    job: Job,
    scales: KVScales,
    ranges: Mapping[int, TensorDict],
    centers: str,
    windows: Sequence[torch.Tensor],
    scored: Sequence[torch.Tensor],
    beyond: Beyond,
    *,
    texts: int = 0,
    tokens: int = 0,
) -> CalibrationReport:
    """Measure the scales on `windows`, and the model's predictions on `scored`, also beyond."""
    model, options = job.model, job.options
    layers = {index: layer for index, layer in scales.layers.items() if index in ranges}
    amax = {index: head_amax(of_layer) for index, of_layer in ranges.items()}
    batches = make_batches(windows, 1)
    statistics = measure_statistics(job, batches, layers, amax)
    rows = _score_quality(job, "quality", make_batches(scored, 1), scales)
    far = beyond.spread(scoring.far_windows(scored))
    far_rows = _score_quality(job, "far quality", far, scales) if far and rows else ()
    return CalibrationReport(
        model=getattr(model, "name_or_path", "") or type(model).__name__,
        dtype=options.fmt.name if scales.plan is None else PLANNED,
        granularity="/".join(dict.fromkeys(s.granularity for s in scales.layers.values())),
        margin=options.margin,
        texts=texts,
        tokens=tokens,
        held_out_tokens=sum(map(len, windows)),
        seconds=job.state.seconds,
        date=utc_now(),
        versions=versions(),
        hardware=hardware() | {"device": str(model.device)},
        scales_digest=scales.digest,
        centers=centers,
        layers=statistics,
        quality=rows,
        far_quality=far_rows,
        max_position=beyond.reach if far_rows else None,
    )
