"""The stages of a calibration: each is a fold that a killed run goes on with."""

import logging
from collections.abc import Callable, Mapping, Sequence
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
from ..support import paged_attention
from .choose import Choice, choose
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
    "thinned",
    "with_centers",
]  # fmt: skip

logger = logging.getLogger(__name__)

# Tokens on which scales are tried, and the most bytes of K and V to hold for it.
SAMPLE_TOKENS = 1024
_SAMPLE_WINDOWS = 4
_SAMPLE_BYTES = 2**29
# A centre is tried where it makes K's squared error this much smaller.
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
    tried = [Batch((window,)) for window in _spread(windows, _SAMPLE_WINDOWS)]

    def work() -> Parts:
        parts: Parts = {}
        for index, (k, v) in _sampled(job, tried, ranges).items():
            choice = choose(
                ranges[index], k, v, partners[index],
                granularity=options.granularity, fmt=options.fmt, margin=options.margin,
                center=options.center,
            )  # fmt: skip
            found = {"k": choice.k, "v": choice.v}
            if choice.k_centered is not None and choice.k_center is not None:
                found |= {"k_centered": choice.k_centered, "k_center": choice.k_center}
                found["gain"] = torch.tensor(choice.gain, dtype=torch.float64)
            parts |= {f"{index}.{name}": part for name, part in found.items()}
        return parts

    choices = {}
    for index, part in _by_layer(job.once("scales", work)).items():
        gain = part["gain"].item() if "gain" in part else None
        choices[index] = Choice(
            part["k"], part["v"], part.get("k_centered"), part.get("k_center"), gain
        )
    return choices


def _spread(windows: Sequence[torch.Tensor], count: int) -> list[torch.Tensor]:
    """Some of the windows, from all over the list: of every length."""
    return list(windows[:: max(1, len(windows) // count)][:count])


def _sampled(
    job: Job, batches: Sequence[Batch], ranges: Mapping[int, Parts]
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """K and V of some tokens of the batches, `[N, Hkv, D]`, by layer."""
    per_token = sum(4 * (p["k_max"].numel() + p["v_max"].numel()) for p in ranges.values())
    tokens = max(1, min(SAMPLE_TOKENS, _SAMPLE_BYTES // per_token))
    kept: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {index: [] for index in ranges}
    each = max(1, tokens // len(batches))
    for batch in batches:

        def seen(index: int, k: torch.Tensor, v: torch.Tensor) -> None:
            kept[index].append((thinned(k, each).clone(), thinned(v, each).clone()))

        observe(job.model, batch, job.layers, seen)
        job.told("scales", batch.tokens, False)
    return {
        index: (torch.cat([k for k, _ in parts]), torch.cat([v for _, v in parts]))
        for index, parts in kept.items()
    }


def thinned(x: torch.Tensor, count: int) -> torch.Tensor:
    """Every so many of the rows of `x`, at most `count`."""
    return x[:: -(-len(x) // count)]


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
