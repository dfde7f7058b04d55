"""How good scales are for the model's predictions; and so, whether centers help."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..attention.switching import paged_attention
from ..cache.cache import FP8PagedCache
from ..errors import ConfigError, Fp8KVError
from ..formats import Format
from ..scales.kv_scales import KVScales
from ..scales.layer_scales import LayerScales
from .choose import Choice
from .corpus import Corpus
from .divergence import UNQUANTISED, Scores, compare_caches
from .job import Job, Options
from .observe import MODEL_ERRORS, Batch, Parts, input_device
from .pairs import TOKENS
from .stages import SAMPLE_WINDOWS, spread

__all__ = ["SHORTEST", "gives_logits", "other_tokens", "paged", "scored", "with_centers"]

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


def with_centers(
    job: Job,
    windows: Sequence[torch.Tensor],
    choices: Mapping[int, Choice],
    made: Callable[[dict[int, LayerScales]], KVScales],
    options: Options,
) -> tuple[KVScales, str]:
    """The scales, with centers where they help, and a sentence that says so.

    Args:
        job: see `Job`.
        windows: text to try both on; not the held-out one.
        choices: the scales of each layer.
        made: makes `KVScales` of layers.
        options: what the user chose.
    """
    plain = {index: LayerScales(choice.k, choice.v) for index, choice in choices.items()}
    if not options.center:
        return made(plain), "Centers of K were not asked for."
    helped = [index for index, choice in choices.items() if (choice.gain or 0.0) > _GAIN]
    if not helped:
        return made(plain), "No centers: in no layer do they make the error of K much smaller."
    layers = dict(plain)
    for index in helped:
        choice = choices[index]
        assert choice.k_centered is not None
        layers[index] = LayerScales(choice.k_centered, choice.v, choice.k_center)
    where = f"{len(helped)} of {len(choices)} layers"
    centered = made(layers)
    if not gives_logits(job.model):
        return centered, f"Centers in {where}, by the error of K: the model gives no logits."
    trial = _trial(windows)
    if not trial:
        return made(plain), "No centers: the texts are too short to try them on."
    caches = {
        "without": paged(job, options.fmt, made(plain), plain),
        "with": paged(job, options.fmt, centered, plain),
    }
    try:
        found = scored(job, "centers", [Batch((window,)) for window in trial], caches)
    except ConfigError as error:
        logger.warning("centers are not tried: %s", error)
        return made(plain), "No centers: the model's predictions could not be compared."
    less = found["without"].kl - found["with"].kl
    deviation = less.std().item() / len(less) ** 0.5 if len(less) > 1 else float("inf")
    kl = f"KL {found['without'].quality.kl:.2e} without, {found['with'].quality.kl:.2e} with"
    if less.mean().item() > 2 * deviation:
        return centered, f"Centers in {where}: {kl}, on {len(less)} tokens."
    return made(plain), f"No centers: in {where} they do not help for certain: {kl}."


def paged(
    job: Job, fmt: Format, scales: KVScales | float | None, covered: Collection[int]
) -> Callable[[], Any]:
    """Makes caches in a format; layers that are not among `covered` stay as they are."""
    without = job.without(covered)
    return lambda: FP8PagedCache(
        job.model.config, dtype=fmt.name, scales=scales, skip_layers=without
    )


def _trial(windows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The first windows, whose second halves hold about `_TRIAL_TOKENS`."""
    found: list[torch.Tensor] = []
    for window in windows:
        if len(window) < SHORTEST or sum(len(w) for w in found) >= 2 * _TRIAL_TOKENS:
            break
        found.append(window)
    return found


def gives_logits(model: PreTrainedModel) -> bool:
    """Whether the model predicts tokens."""
    return model.get_output_embeddings() is not None


def scored(
    job: Job, name: str, batches: Sequence[Batch], caches: Mapping[str, Callable[[], Any]]
) -> dict[str, Scores]:
    """The scores of the second half of each window, after a prefill on the first half."""
    vocabulary = getattr(job.model.get_output_embeddings(), "out_features", None) or 1
    chunk = max(8, min(_CHUNK, _LOGITS // vocabulary))

    def step(parts: Parts, batch: Batch) -> Parts:
        ids = batch.ids.to(input_device(job.model))
        try:
            with paged_attention(job.model):
                found = compare_caches(
                    job.model, ids, caches, prefill=ids.shape[1] // 2, chunk=chunk,
                    on_call=lambda cache, tokens: job.told(f"{name}: {cache}", tokens, False),
                )  # fmt: skip
        except Fp8KVError:
            raise
        except MODEL_ERRORS as error:
            raise ConfigError(
                "model: expected one that reads several tokens onto a cache that holds some, got "
                f"{type(job.model).__name__}: {type(error).__name__}: {error}"
            ) from error
        new = {
            f"{cache}.{what}": getattr(scores, what)
            for cache, scores in found.items()
            for what in ("kl", "same", "surprise")
        }
        return {key: torch.cat([parts[key], part]) if parts else part for key, part in new.items()}

    def after(batch: Batch, again: bool) -> None:
        if again:
            job.told(name, batch.ids.numel() * (len(caches) + 1), True)

    parts = job.state.fold(name, batches, step, after)
    return {
        cache: Scores(*(parts[f"{cache}.{what}"] for what in ("kl", "same", "surprise")))
        for cache in (UNQUANTISED, *caches)
    }


def other_tokens(corpus: Corpus, caches: int, options: Options) -> int:
    """About how many tokens the model reads besides `observed`, for a bar."""
    held = sum(map(len, corpus.held_out))
    tried = sum(map(len, spread(corpus.windows, SAMPLE_WINDOWS)))
    trial = 3 * sum(map(len, _trial(corpus.windows))) if options.center else 0
    return 2 * TOKENS + tried + trial + held * (2 + caches)
