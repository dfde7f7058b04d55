"""Measure the quality of static scales: errors of K and V on a text, and of the predictions."""

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from ..attention.switching import eval_mode, paged_attention
from ..cache.cache import FP8PagedCache
from ..errors import ConfigError, FP8KVError
from ..formats import (
    AUTO,
    DEFAULT_DTYPE,
    DISTINCT_FORMATS,
    FORMATS,
    STATIC_DTYPE,
    Format,
    codec,
    parse_dtype,
)
from ..modeling.model_support import find_base_model
from ..scales.kv_scales import KVScales, StoragePlan, resolve_scales, warn_if_stale
from ..scales.layer_scales import LayerScales
from ..scales.measured_report import (
    DYNAMIC,
    LayerStatistics,
    QualityRow,
    ScalesReport,
    SideStatistics,
)
from ..utils.environment import describe_hardware, format_utc_now, list_versions
from .divergence import UNQUANTIZED, Scores, compare_caches
from .observe import (
    MODEL_ERRORS,
    Batch,
    center_and_rotate,
    find_input_device,
    find_paged_layers,
    make_batches,
    make_nan_error,
    observe,
)
from .texts import read_model_windows

logger = logging.getLogger(__name__)

# Minimum number of tokens of a window: two to read first, and two to score.
_MIN_TOKENS = 4
# Number of tokens of the windows in which predictions are scored, and on which errors are measured.
# Shares are measured on all tokens.
_SCORED_TOKENS, _ERROR_TOKENS = 4096, 1024
# Minimum KL of static scales that causes a warning, relative to dynamic scales.
_WARNING_RATIO = 1.5
# Maximum numbers of tokens and of logits in a call that is scored.
_MAX_CHUNK_TOKENS = 128
_MAX_LOGITS = 2**23


@dataclass(frozen=True)
class _Job:
    """A model in eval mode, the layers that are stored in `fmt`, and a progress bar."""

    model: PreTrainedModel
    layers: frozenset[int]
    fmt: Format
    bar: "tqdm[Any]"
    start_time: float = field(default_factory=time.monotonic)

    def start_stage(self, stage: str, num_tokens: int) -> None:
        """Restart the progress bar for a stage of `num_tokens` tokens."""
        self.bar.set_description(stage, refresh=False)
        self.bar.reset(num_tokens)


def measure(
    model: PreTrainedModel,
    scales: KVScales | str | os.PathLike[str],
    texts: Any,
    *,
    tokenizer: Any = None,
    dtype: str | torch.dtype | None = None,
    max_tokens: int = 16384,
    max_length: int = 1024,
    text_column: str = "text",
    chat_template: bool | None = None,
    progress: bool = True,
) -> ScalesReport:
    """Measure the quality of scales for a model on texts other than the texts of `calibrate`.

    The report has the shares of values that saturate or vanish, the error of each format, and the
    predictions with static, dynamic and constant scales, compared with an unquantized cache.

    Args:
        model, texts, tokenizer, max_tokens, max_length: As in `calibrate`.
        text_column, chat_template, progress: As in `calibrate`.
        scales: Scales from any source, or a path, a folder or a repository of the Hub.
        dtype: The format of the stored values. None means "fp8_e4m3", or the plan of the scales.

    Raises:
        ConfigError: As in `calibrate`.
        ScaleError: The scales belong to another model.
    """
    model = find_base_model(model)
    layers = find_paged_layers(model)
    format_name = parse_dtype(STATIC_DTYPE if dtype is None else dtype)
    if format_name == AUTO:
        raise ConfigError(f"dtype: expected an 8-bit format, got {dtype!r}, which needs no scales")
    if not isinstance(loaded_scales := resolve_scales(scales), KVScales):
        raise ConfigError(
            f"scales: expected KVScales, a path or a repository id, got {scales!r}. "
            "For a constant scale in each layer, pass KVScales.uniform(num_layers)"
        )
    warn_if_stale(model, loaded_scales)
    cache_dtype = dtype if loaded_scales.plan is not None else format_name
    # Raises an error if the scales do not fit, for example if layers are missing.
    FP8PagedCache(model.config, dtype=cache_dtype, **_make_scales_kwargs(loaded_scales))
    windows = read_model_windows(
        model,
        texts,
        tokenizer,
        max_tokens=max_tokens,
        max_length=max_length,
        text_column=text_column,
        chat_template=chat_template,
    )
    with eval_mode(model), tqdm(disable=not progress, unit="tok", unit_scale=True) as progress_bar:
        job = _Job(model, layers, FORMATS[format_name], progress_bar)
        statistics = _measure_statistics(job, windows, loaded_scales)
        rows = _score_quality(job, windows, loaded_scales)
        progress_bar.set_description("done")
    return ScalesReport(
        model=getattr(model, "name_or_path", "") or type(model).__name__,
        dtype=format_name if loaded_scales.plan is None else "plan",
        granularity=loaded_scales.granularity,
        tokens=sum(map(len, windows)),
        seconds=time.monotonic() - job.start_time,
        date=format_utc_now(),
        versions=list_versions(),
        hardware=describe_hardware() | {"device": str(model.device)},
        scales_digest=loaded_scales.digest,
        layers=statistics,
        quality=rows,
    )


def _measure_statistics(
    job: _Job, windows: Sequence[Tensor], scales: KVScales
) -> dict[int, LayerStatistics]:
    """Return the statistics of every layer on a text. Raise ConfigError for NaN or infinity."""
    num_tokens = sum(map(len, windows))
    formats = list(dict.fromkeys((*DISTINCT_FORMATS, job.fmt)))
    stride = max(1, -(-num_tokens // _ERROR_TOKENS))
    tokens_read = Counter[int]()  # by layer, so that the sample continues across windows
    counts: dict[int, Tensor] = {}
    head_amax: dict[int, list[Tensor]] = {}

    def add_counts(index: int, k: Tensor, v: Tensor) -> None:
        sample = slice(-tokens_read[index] % stride, None, stride)
        tokens_read[index] += len(k)
        layer = scales.for_layer(
            index, num_kv_heads=k.shape[1], k_head_dim=k.shape[2], v_head_dim=v.shape[2]
        )
        new_counts = torch.stack(
            [
                _count_values(x.float(), layer, side, job.fmt, formats, sample)
                for side, x in (("k", k), ("v", v))
            ]
        ).cpu()
        if not torch.isfinite(new_counts).all():
            raise make_nan_error(index, "K and V of the text")
        new_amax = [states.float().abs().amax((0, 2)).cpu() for states in (k, v)]
        if index in counts:
            new_counts += counts[index]
            new_amax = list(map(torch.maximum, new_amax, head_amax[index]))
        counts[index] = new_counts
        head_amax[index] = new_amax

    job.start_stage("statistics", num_tokens)
    for batch in make_batches(windows, 1):
        observe(job.model, batch, job.layers, add_counts)
        job.bar.update(batch.num_tokens)
    return {
        index: LayerStatistics(
            *(
                _summarize(row, tuple(amax.tolist()), formats)
                for row, amax in zip(rows.tolist(), head_amax[index], strict=True)
            )
        )
        for index, rows in sorted(counts.items())
    }


def _count_values(
    x: torch.Tensor,
    scales: LayerScales,
    side: str,
    fmt: Format,
    formats: list[Format],
    sample: slice,
) -> torch.Tensor:
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
    errors = [(square / energy) ** 0.5 if energy else 0.0 for square in squares]
    shares = num_saturated / max(num_values, 1.0), num_vanished / max(num_nonzero, 1.0)
    return SideStatistics(amax, *shares, dict(zip(names, errors, strict=True)))


def _score_quality(
    job: _Job, windows: Sequence[Tensor], scales: KVScales
) -> tuple[QualityRow, ...]:
    """Compare the predictions with each cache. Return no rows if the model cannot be compared."""
    starts = accumulate(map(len, windows), initial=0)
    scored_windows = [
        window
        for window, start in zip(windows, starts, strict=False)
        if start < _SCORED_TOKENS and len(window) >= _MIN_TOKENS
    ]
    if not scored_windows or job.model.get_output_embeddings() is None:
        reason = "no text is long enough" if not scored_windows else "the model has no logits"
        logger.info("%s: predictions are not compared: %s", type(job.model).__name__, reason)
        return ()
    fmt = job.fmt.name
    scales_by_cache: dict[str, KVScales | float | None] = {f"static {fmt}": scales}
    if scales.plan is not None:
        layers = {i: replace(layer, k=None, v=None) for i, layer in scales.layers.items()}
        plan = StoragePlan(**{**vars(scales), "layers": layers})
        scales_by_cache = {} if scales.is_dynamic else {"static, the plan": scales}
        scales_by_cache["dynamic, the plan"] = plan
    scales_by_cache |= {f"dynamic {fmt}": None, f"scale 1.0 {fmt}": 1.0}
    factories = {
        name: _make_cache_factory(job, cache_scales)
        for name, cache_scales in scales_by_cache.items()
    }
    try:
        scores = _score_caches(job, make_batches(scored_windows, 1), factories)
    except ConfigError as error:
        logger.warning("the predictions are not compared: %s", error)
        return ()
    if not scales.is_dynamic:
        static_kl, dynamic_kl = (scores[name].kl for name in list(factories)[:2])
        _warn_if_worse(static_kl, dynamic_kl, fmt if scales.plan is None else "the plan")
    rows = [scores[name].summarize(name) for name in (UNQUANTIZED, *factories)]
    finite_rows = [row for row in rows if math.isfinite(row.kl) and math.isfinite(row.perplexity)]
    if len(finite_rows) < len(rows):
        names = ", ".join(sorted(row.cache for row in rows if row not in finite_rows))
        logger.warning("the model returns logits that are not finite: %s not compared", names)
    return tuple(finite_rows)


def _make_cache_factory(job: _Job, scales: KVScales | float | None) -> Callable[[], Any]:
    """Return a function that makes caches."""
    has_plan = isinstance(scales, KVScales) and scales.plan is not None
    dtype = None if has_plan else job.fmt.name
    return lambda: FP8PagedCache(job.model.config, dtype=dtype, **_make_scales_kwargs(scales))


def _make_scales_kwargs(scales: KVScales | float | None) -> dict[str, Any]:
    """Return the keyword argument of a cache for scales or a plan."""
    return {"plan" if isinstance(scales, StoragePlan) else "scales": scales}


def _score_caches(
    job: _Job, batches: Sequence[Batch], factories: Mapping[str, Callable[[], Any]]
) -> dict[str, Scores]:
    """Score the second half of each window with each cache, after a prefill of the first half."""
    vocab_size = getattr(job.model.get_output_embeddings(), "out_features", None) or 1
    chunk_size = max(8, min(_MAX_CHUNK_TOKENS, _MAX_LOGITS // vocab_size))
    num_tokens = sum(batch.num_tokens for batch in batches)
    job.start_stage("predictions", num_tokens * (len(factories) + 1))
    batch_scores = []
    for batch in batches:
        ids = batch.ids.to(find_input_device(job.model))
        try:
            with paged_attention(job.model):
                batch_scores.append(
                    compare_caches(
                        job.model,
                        ids,
                        factories,
                        num_prefill=ids.shape[1] // 2,
                        chunk_size=chunk_size,
                        on_call=job.bar.update,
                    )
                )
        except FP8KVError:
            raise
        except MODEL_ERRORS as error:
            raise ConfigError(
                "model: expected a model that reads several tokens with a filled cache, got "
                f"{type(job.model).__name__}: {type(error).__name__}: {error}"
            ) from error
    return {
        name: Scores.concat(scores[name] for scores in batch_scores) for name in batch_scores[0]
    }


def _warn_if_worse(static_kl: Tensor, dynamic_kl: Tensor, storage: str) -> None:
    """Warn if static scales are significantly worse than dynamic scales, by the KL of each token.

    `storage` is the name of the format of both caches, or "the plan".
    """
    excess = static_kl - _WARNING_RATIO * dynamic_kl
    if len(excess) < 2 or not excess.mean() > 2 * excess.std() / len(excess) ** 0.5:
        return
    advice = "Use scales=None, which needs no calibration"
    if storage not in FORMATS:
        advice = "Use choose_plan(model), which makes a plan without static scales"
    elif storage != DEFAULT_DTYPE:
        advice += f", and {DEFAULT_DTYPE}, which is more accurate at the same size"
    static_mean = static_kl.mean().item()
    dynamic_mean = dynamic_kl.mean().item()
    logger.warning(
        "static scales in %s have %.1f times the KL of dynamic scales (%.1e, %.1e). %s",
        storage,
        static_mean / dynamic_mean,
        static_mean,
        dynamic_mean,
        advice,
    )
