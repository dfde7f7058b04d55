"""Score scales by the model's predictions, and choose centers and plans by these scores."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from ..attention.switching import paged_attention
from ..cache.cache import FP8PagedCache
from ..errors import ConfigError, FP8KVError
from ..formats import DEFAULT_DTYPE, FORMATS, summarize_plan
from ..scales.kv_scales import KVScales, StoragePlan
from .divergence import Scores, compare_caches
from .observe import MODEL_ERRORS, Batch, find_input_device, make_batches
from .rope import FarPositions, has_rope
from .stages import Job

logger = logging.getLogger(__name__)

# Minimum number of tokens of a window: two to read first, and two to score.
MIN_TOKENS = 4
# Approximate number of tokens that are scored to decide whether centers and plans help.
_TRIAL_TOKENS = 1024
# Minimum KL of static scales that causes a warning, relative to dynamic scales.
_WARNING_RATIO = 1.5
# Maximum numbers of tokens and of logits in a call that is scored.
_MAX_CHUNK_TOKENS = 128
_MAX_LOGITS = 2**23


def select_scales(
    job: Job, windows: Sequence[torch.Tensor], fallback: KVScales, best_scales: KVScales,
    positions: FarPositions,
) -> tuple[KVScales, str]:  # fmt: skip
    """Return the best scales if they help, otherwise the fallback, and the reason as text.

    Centers and plans must improve the model's predictions in the windows and at far positions.
    """
    if isinstance(job.options.plan, Mapping):
        return best_scales, "The plan was given."
    subject, refusal = "Centers", "No centers:"
    if fallback.plan is not None:
        subject = "Measured plans"
        refusal = f"Measured plans: {summarize_plan(fallback.plan)}, because"
    elif not job.options.center:
        return fallback, "Centers of K were not requested."
    reason = positions.skip_reason
    note = f" Far positions: {reason}." if reason else ""
    if reason and has_rope(job.model):
        note = f" RoPE rotates K with the position, and {reason}: K is stored unchanged."
    layers = best_scales.layers
    num_changed = sum(
        layer.k_center is not None or layer.plan != fallback.layers[index].plan
        for index, layer in layers.items()
    )
    if not num_changed:
        return fallback, f"{refusal} no other candidate costs much less in any layer.{note}"
    change = f"{subject} in {num_changed} of {len(layers)} layers"
    if job.model.get_output_embeddings() is None:
        return best_scales, f"{change}, by the errors of attention: no logits to compare.{note}"
    # Only the second half of each window is scored.
    trial_windows = [w for w in take_windows(windows, 2 * _TRIAL_TOKENS) if len(w) >= MIN_TOKENS]
    if not trial_windows:
        return fallback, f"{refusal} the texts are too short to compare predictions.{note}"
    scales_by_cache = {"without": fallback, "with": best_scales}
    factories = {n: make_cache_factory(job, x, layers) for n, x in scales_by_cache.items()}
    batches_by_location = {
        f"at positions up to {len(trial_windows[0])}": make_batches(trial_windows, 1),
        f"at far positions up to {positions.last_position}": positions.place(trial_windows),
    }
    findings = []
    for location, batches in batches_by_location.items():
        if not batches:
            continue
        stage = "predictions" if batches[0].first_position is None else "far predictions"
        try:
            scores = score_caches(job, stage, batches, factories)
        except ConfigError as error:
            logger.warning("%s are not tried: %s", subject.lower(), error)
            return fallback, f"{refusal} the model's predictions could not be compared.{note}"
        gain = scores["without"].kl - scores["with"].kl
        kl_texts = [f"{scores[cache].summarize().kl:.2e} {cache}" for cache in factories]
        findings.append(f"KL {', '.join(kl_texts)}, on {len(gain)} tokens {location}")
        standard_error = gain.std().item() / len(gain) ** 0.5 if len(gain) > 1 else float("inf")
        if not gain.mean().item() > 2 * standard_error:
            return fallback, f"{refusal} the gain is uncertain: {'; '.join(findings)}.{note}"
    return best_scales, f"{change}: {'; '.join(findings)}.{note}"


def make_cache_factory(
    job: Job, scales: KVScales | float | None, layers: Collection[int]
) -> Callable[[], Any]:
    """Return a function that makes caches, in which layers outside `layers` stay unquantized."""
    skipped_layers = sorted(job.layers.difference(layers))
    has_plan = isinstance(scales, KVScales) and scales.plan is not None
    dtype = None if has_plan else job.options.fmt.name
    return lambda: FP8PagedCache(
        job.model.config, dtype=dtype, skip_layers=skipped_layers, **make_scales_kwargs(scales)
    )


def make_scales_kwargs(scales: KVScales | float | None) -> dict[str, Any]:
    """Return the keyword argument of a cache for scales or a plan."""
    return {"plan" if isinstance(scales, StoragePlan) else "scales": scales}


def take_windows(windows: Sequence[torch.Tensor], num_tokens: int) -> list[torch.Tensor]:
    """Return the first windows that together have at least `num_tokens` tokens, or all windows."""
    starts = accumulate(map(len, windows), initial=0)
    return [window for window, start in zip(windows, starts, strict=False) if start < num_tokens]


def score_caches(
    job: Job, stage: str, batches: Sequence[Batch], factories: Mapping[str, Callable[[], Any]]
) -> dict[str, Scores]:
    """Score the second half of each window with each cache, after a prefill of the first half."""
    vocab_size = getattr(job.model.get_output_embeddings(), "out_features", None) or 1
    chunk_size = max(8, min(_MAX_CHUNK_TOKENS, _MAX_LOGITS // vocab_size))
    job.start_stage(stage, sum(batch.num_tokens for batch in batches) * (len(factories) + 1))
    scores = []
    for batch in batches:
        ids = batch.ids.to(find_input_device(job.model))
        try:
            with paged_attention(job.model):
                scores.append(compare_caches(
                    job.model, ids, factories, num_prefill=ids.shape[1] // 2, chunk_size=chunk_size,
                    first_position=batch.first_position, on_call=job.bar.update,
                ))  # fmt: skip
        except FP8KVError:
            raise
        except MODEL_ERRORS as error:
            raise ConfigError(
                "model: expected a model that reads several tokens with a filled cache, got "
                f"{type(job.model).__name__}: {type(error).__name__}: {error}"
            ) from error
    return {cache: Scores.concat(window[cache] for window in scores) for cache in scores[0]}


def warn_if_worse(
    static_kl: torch.Tensor, dynamic_kl: torch.Tensor, storage: str, batches: Sequence[Batch]
) -> None:
    """Warn if static scales are significantly worse than dynamic scales, by the KL of each token.

    `storage` is the name of the format of both caches, or "the plan".
    """
    excess = static_kl - _WARNING_RATIO * dynamic_kl
    if len(excess) < 2 or not excess.mean() > 2 * excess.std() / len(excess) ** 0.5:
        return
    last_position = max((batch.first_position or 0) + batch.ids.shape[1] for batch in batches)
    advice = "Use scales=None, which needs no calibration"
    if storage not in FORMATS:
        advice = "Use choose_plan(model), which makes a plan without static scales"
    elif storage != DEFAULT_DTYPE:
        advice += f", and {DEFAULT_DTYPE}, which is more accurate at the same size"
    static_mean, dynamic_mean = static_kl.mean().item(), dynamic_kl.mean().item()
    logger.warning(
        "at positions up to %d static scales in %s have %.1f times the KL of dynamic scales (%.1e, "
        "%.1e). %s",
        last_position, storage, static_mean / dynamic_mean, static_mean, dynamic_mean, advice,
    )  # fmt: skip
