"""Scores of scales by the model's predictions, which also decide whether centers help."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..attention.switching import paged_attention
from ..cache.cache import FP8PagedCache
from ..errors import ConfigError, Fp8KVError
from ..scales.kv_scales import KVScales
from ..scales.layer_scales import LayerScales
from .choose import CalibrationOptions, Choice
from .corpus import Corpus
from .divergence import UNQUANTISED, Scores, compare_caches
from .observe import MODEL_ERRORS, Batch, TensorDict, input_device
from .pairs import TOKENS
from .stages import SAMPLE_WINDOWS, sample_windows
from .state import Job

logger = logging.getLogger(__name__)

# Tokens of a window: two to read first, and two to score.
SHORTEST = 4
# A center is tried where it makes what K's errors cost this much smaller.
_GAIN = 1.05
# Tokens scored to see whether centers help.
_TRIAL_TOKENS = 1024
# Tokens of a later call when a text is scored, and the most logits that it may have.
_CHUNK = 128
_LOGITS = 2**23


def choose_centers(
    job: Job,
    windows: Sequence[torch.Tensor],
    choices: Mapping[int, Choice],
    make_scales: Callable[[dict[int, LayerScales]], KVScales],
) -> tuple[KVScales, str]:
    """Return the scales, with centers where they help on the windows, and a sentence on that."""
    plain = {index: LayerScales(choice.k, choice.v) for index, choice in choices.items()}
    if not job.options.center:
        return make_scales(plain), "Centers of K were not asked for."
    helped = [index for index, choice in choices.items() if (choice.gain or 0.0) > _GAIN]
    if not helped:
        why = "No centers: in no layer do they make the error of K much smaller."
        return make_scales(plain), why
    layers = dict(plain)
    for index in helped:
        choice = choices[index]
        assert choice.k_centered is not None
        layers[index] = LayerScales(choice.k_centered, choice.v, choice.k_center)
    where = f"{len(helped)} of {len(choices)} layers"
    centered = make_scales(layers)
    if not has_logits(job.model):
        return centered, f"Centers in {where}, by the error of K: the model gives no logits."
    trial = _trial_windows(windows)
    if not trial:
        return make_scales(plain), "No centers: the texts are too short to try them on."
    caches = {
        "without": cache_factory(job, make_scales(plain), plain),
        "with": cache_factory(job, centered, plain),
    }
    try:
        scores = score_caches(job, "centers", [Batch((window,)) for window in trial], caches)
    except ConfigError as error:
        logger.warning("centers are not tried: %s", error)
        return make_scales(plain), "No centers: the model's predictions could not be compared."
    gain = scores["without"].kl - scores["with"].kl
    deviation = gain.std().item() / len(gain) ** 0.5 if len(gain) > 1 else float("inf")
    kl = f"KL {scores['without'].quality.kl:.2e} without, {scores['with'].quality.kl:.2e} with"
    if gain.mean().item() > 2 * deviation:
        return centered, f"Centers in {where}: {kl}, on {len(gain)} tokens."
    return make_scales(plain), f"No centers: in {where} they do not help for certain: {kl}."


def cache_factory(
    job: Job, scales: KVScales | float | None, covered: Collection[int]
) -> Callable[[], Any]:
    """Return what makes caches; layers not among `covered` stay unquantised."""
    skipped, dtype = sorted(job.layers.difference(covered)), job.options.fmt.name
    return lambda: FP8PagedCache(job.model.config, dtype=dtype, scales=scales, skip_layers=skipped)


def _trial_windows(windows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the first windows, whose second halves hold about `_TRIAL_TOKENS`."""
    first: list[torch.Tensor] = []
    for window in windows:
        if len(window) < SHORTEST or sum(len(w) for w in first) >= 2 * _TRIAL_TOKENS:
            break
        first.append(window)
    return first


def has_logits(model: PreTrainedModel) -> bool:
    """Return whether the model predicts tokens."""
    return model.get_output_embeddings() is not None


def score_caches(
    job: Job, name: str, batches: Sequence[Batch], caches: Mapping[str, Callable[[], Any]]
) -> dict[str, Scores]:
    """Score the second half of each window under each cache, after a prefill on the first half."""
    vocabulary = getattr(job.model.get_output_embeddings(), "out_features", None) or 1
    chunk = max(8, min(_CHUNK, _LOGITS // vocabulary))

    def on_call(cache: str, tokens: int) -> None:
        job.on_progress(f"{name}: {cache}", tokens, False)

    def step(scores: TensorDict, batch: Batch) -> TensorDict:
        ids = batch.ids.to(input_device(job.model))
        try:
            with paged_attention(job.model):
                of_window = compare_caches(
                    job.model, ids, caches, prefill=ids.shape[1] // 2, chunk=chunk, on_call=on_call
                )
        except Fp8KVError:
            raise
        except MODEL_ERRORS as error:
            raise ConfigError(
                "model: expected one that reads several tokens onto a cache that holds some, got "
                f"{type(job.model).__name__}: {type(error).__name__}: {error}"
            ) from error
        new = {
            f"{cache}.{field}": tensor
            for cache, of_cache in of_window.items()
            for field, tensor in vars(of_cache).items()
        }
        return {key: torch.cat([scores[key], new[key]]) if scores else new[key] for key in new}

    def on_batch(batch: Batch, resumed: bool) -> None:
        if resumed:
            job.on_progress(name, batch.ids.numel() * (len(caches) + 1), True)

    scores = job.state.fold(name, batches, step, on_batch)
    return {
        cache: Scores(*(scores[f"{cache}.{field}"] for field in ("kl", "same", "surprise")))
        for cache in (UNQUANTISED, *caches)
    }


def estimate_other_tokens(corpus: Corpus, caches: int, options: CalibrationOptions) -> int:
    """Return about how many tokens the model reads besides `collect_ranges`, for a bar."""
    held = sum(map(len, corpus.held_out))
    sampled = sum(map(len, sample_windows(corpus.windows, SAMPLE_WINDOWS)))
    trial = 3 * sum(map(len, _trial_windows(corpus.windows))) if options.center else 0
    return 2 * TOKENS + sampled + trial + held * (2 + caches)
