"""The stages of a calibration: each is a fold that a killed run goes on with."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..cache import FP8PagedCache
from ..errors import ConfigError
from ..formats import Format
from ..layer_scales import Granularity, LayerScales
from ..quality import Scores, compare
from ..scales import KVScales
from ..support import paged_attention, watched_attention
from .choose import Choice, Queries, chosen_scales, costs, trials
from .corpus import Corpus
from .observe import Batch, Parts, input_device, merged, observe, range_of
from .pairs import TOKENS, Partners, measure_pairs
from .state import State

__all__ = [
    "Job",
    "Options",
    "batches_of",
    "chosen",
    "gives_logits",
    "observed",
    "pairs",
    "scored",
    "with_centers",
]  # fmt: skip

logger = logging.getLogger(__name__)

# Windows on which scales are tried, and queries of each.
_SAMPLE_WINDOWS = 8
_QUERIES = 64
# A centre is tried where it makes what K's errors cost this much smaller.
_GAIN = 1.05
# Tokens scored to see whether centres help.
_TRIAL_TOKENS = 1024
# Tokens of a later call when a text is scored.
_CHUNK = 128


@dataclass(frozen=True)
class Options:
    """What a user chose of the scales to make, see `calibrate`."""

    granularity: Granularity
    fmt: Format
    margin: float
    center: bool


@dataclass(frozen=True)
class Job:
    """What all stages need.

    Attributes:
        model: in eval mode.
        layers: those that need scales.
        state: what was done before.
        told: called with a stage, tokens that the model was run on, and whether in an earlier run.
    """

    model: PreTrainedModel
    layers: frozenset[int]
    state: State
    told: Callable[[str, int, bool], None]

    def over(
        self, name: str, batches: Sequence[Batch], step: Callable[[Parts, Batch], Parts]
    ) -> Parts:
        """A fold over batches that tells of its tokens."""

        def after(batch: Batch, again: bool) -> None:
            self.told(name, batch.tokens, again)

        return self.state.fold(name, batches, step, after)

    def once(self, name: str, work: Callable[[], Parts]) -> Parts:
        """A fold over nothing but the work itself."""
        return self.state.fold(name, (None,), lambda parts, item: work())


def batches_of(windows: Sequence[torch.Tensor], size: int) -> list[Batch]:
    """The windows in batches of `size`, in their order."""
    return [Batch(tuple(windows[i : i + size])) for i in range(0, len(windows), size)]


def other_tokens(corpus: Corpus, caches: int, options: Options) -> int:
    """About how many tokens the model reads besides `observed`, for a bar."""
    held = sum(map(len, corpus.held_out))
    tried = sum(map(len, _spread(corpus.windows, _SAMPLE_WINDOWS)))
    trial = 3 * sum(map(len, _trial(corpus.windows))) if options.center else 0
    return 2 * TOKENS + tried + trial + held * (2 + caches)


def pairs(job: Job, window: torch.Tensor) -> dict[int, Partners]:
    """Which channels each layer rotates together."""

    def work() -> Parts:
        found = measure_pairs(job.model, window, job.layers)
        job.told("pairs", 2 * min(TOKENS, len(window)), False)
        return {
            f"{index}.{side}": partner
            for index, of in found.items()
            for side, partner in (("k", of.k), ("v", of.v))
            if partner is not None
        }

    parts = job.once("pairs", work)
    return {i: Partners(parts.get(f"{i}.k"), parts.get(f"{i}.v")) for i in job.layers}


def observed(
    job: Job, name: str, batches: Sequence[Batch], partners: Mapping[int, Partners]
) -> dict[int, Parts]:
    """The range of K and V of each layer over all batches.

    Raises:
        ConfigError: a layer held NaN or infinity.
    """

    def step(parts: Parts, batch: Batch) -> Parts:
        new: Parts = {}

        def seen(index: int, k: torch.Tensor, v: torch.Tensor) -> None:
            found = range_of(k, v, partners[index].k, partners[index].v)
            _check_finite(index, found)
            new.update({f"{index}.{name}": part for name, part in found.items()})

        observe(job.model, batch, job.layers, seen)
        return merged(parts, new) if parts else new

    return _by_layer(job.over(name, batches, step))


def _check_finite(index: int, parts: Parts) -> None:
    for side in "kv":
        if not torch.isfinite(parts[f"{side}_pair"]).all():
            raise ConfigError(
                f"layer {index}: expected finite {side.upper()}, got NaN or infinity; load the "
                "model in bfloat16 or float32, and look at the text"
            )


def _by_layer(parts: Parts) -> dict[int, Parts]:
    found: dict[int, Parts] = {}
    for name, part in parts.items():
        index, _, what = name.partition(".")
        found.setdefault(int(index), {})[what] = part
    return dict(sorted(found.items()))


def chosen(
    job: Job,
    windows: Sequence[torch.Tensor],
    ranges: Mapping[int, Parts],
    partners: Mapping[int, Partners],
    options: Options,
) -> dict[int, Choice]:
    """The scales of each layer, with and without centres, tried on some of the windows."""
    tried = {
        index: trials(
            parts, partners[index], granularity=options.granularity, fmt=options.fmt,
            margin=options.margin, center=options.center,
        )
        for index, parts in ranges.items()
    }  # fmt: skip

    def step(parts: Parts, batch: Batch) -> Parts:
        new: Parts = {}
        stored: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def seen(index: int, k: torch.Tensor, v: torch.Tensor) -> None:
            stored[index] = (k, v)

        def count(index: int, queries: Queries | None) -> None:
            k, v = stored.pop(index)
            for name, trial in tried[index].items():
                x = v if trial.side == "v" else k
                found = costs(trial, x, queries, options.fmt)
                new.update({f"{index}.{name}.{what}": part for what, part in found.items()})

        def saw(index: int, query: torch.Tensor, *_: Any, more: dict[str, Any]) -> None:
            if index in stored:
                count(index, _queries(query, stored[index][0], more))

        with _watched(job.model, lambda i, q, k, v, more: saw(i, q, more=more)):
            observe(job.model, batch, job.layers, seen)
        for index in sorted(stored):  # those whose attention does not show its queries
            count(index, None)
        return {name: parts[name] + part for name, part in new.items()} if parts else new

    batches = [Batch((window,)) for window in _spread(windows, _SAMPLE_WINDOWS)]
    parts = job.over("scales", batches, step)
    choices = {}
    for index, of in tried.items():
        found = {
            name: {what: parts[f"{index}.{name}.{what}"] for what in ("cost", "room")}
            for name in of
        }
        choices[index] = chosen_scales(of, found, options.fmt)
    return choices


def _watched(model: PreTrainedModel, saw: Any) -> AbstractContextManager[None]:
    """Shows queries where the model looks its attention up and its K are those of the text."""
    if model.config.is_encoder_decoder or not model._can_set_attn_implementation():
        return nullcontext()
    return watched_attention(model, saw)


def _queries(query: torch.Tensor, k: torch.Tensor, more: dict[str, Any]) -> Queries | None:
    """Some of the queries `[1, Hq, N, D]` of one window, from all over its last three quarters."""
    tokens = query.shape[2]
    if query.shape[0] != 1 or tokens != len(k):
        return None
    at = torch.linspace(tokens // 4, tokens - 1, min(_QUERIES, tokens)).long()
    scaling = more.get("scaling")
    window = more.get("sliding_window")
    return Queries.of(
        query[0, :, at.to(query.device)].to(k.device), k, at.to(k.device),
        query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        None if window is None else int(window),
    )  # fmt: skip


def _spread(windows: Sequence[torch.Tensor], count: int) -> list[torch.Tensor]:
    """Some of the windows, from all over the list: of every length."""
    return list(windows[:: max(1, len(windows) // count)][:count])


def with_centers(
    job: Job,
    windows: Sequence[torch.Tensor],
    choices: Mapping[int, Choice],
    made: Callable[[dict[int, LayerScales]], KVScales],
    options: Options,
) -> tuple[KVScales, str]:
    """The scales, with centres where they help, and a sentence that says so.

    Args:
        job: see `Job`.
        windows: text to try both on; not the held-out one.
        choices: the scales of each layer.
        made: makes `KVScales` of layers.
        options: what the user chose.
    """
    plain = {index: LayerScales(choice.k, choice.v) for index, choice in choices.items()}
    if not options.center:
        return made(plain), "Centres of K were not asked for."
    helped = [index for index, choice in choices.items() if (choice.gain or 0.0) > _GAIN]
    if not helped:
        return made(plain), "No centres: in no layer do they make the error of K much smaller."
    layers = dict(plain)
    for index in helped:
        choice = choices[index]
        assert choice.k_centered is not None
        layers[index] = LayerScales(choice.k_centered, choice.v, choice.k_center)
    where = f"{len(helped)} of {len(choices)} layers"
    centered = made(layers)
    if not gives_logits(job.model):
        return centered, f"Centres in {where}, by the error of K: the model gives no logits."
    caches = {
        "without": _static(job, made(plain), options),
        "with": _static(job, centered, options),
    }
    trial = _trial(windows)
    found = scored(job, "centres", [Batch((window,)) for window in trial], caches)
    less = found["without"].kl - found["with"].kl
    error = less.std().item() / len(less) ** 0.5 if len(less) > 1 else float("inf")
    kl = f"KL {found['without'].quality.kl:.2e} without, {found['with'].quality.kl:.2e} with"
    if less.mean().item() > 2 * error:
        return centered, f"Centres in {where}: {kl}, on {len(less)} tokens."
    return made(plain), f"No centres: in {where} they do not help for certain: {kl}."


def _static(job: Job, scales: KVScales, options: Options) -> Callable[[], Any]:
    return lambda: FP8PagedCache(job.model.config, dtype=options.fmt.name, scales=scales)


def _trial(windows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The first windows, whose second halves hold about `_TRIAL_TOKENS`."""
    found: list[torch.Tensor] = []
    for window in windows:
        if len(window) < 4 or sum(len(w) for w in found) >= 2 * _TRIAL_TOKENS:
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

    def step(parts: Parts, batch: Batch) -> Parts:
        ids = batch.ids.to(input_device(job.model))
        with paged_attention(job.model):
            found = compare(
                job.model, ids, caches, prefill=ids.shape[1] // 2, chunk=_CHUNK,
                after=lambda cache, tokens: job.told(f"{name}: {cache}", tokens, False),
            )  # fmt: skip
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
    caches_too = {key.rpartition(".")[0] for key in parts}
    return {
        cache: Scores(*(parts[f"{cache}.{what}"] for what in ("kl", "same", "surprise")))
        for cache in caches_too
    }
