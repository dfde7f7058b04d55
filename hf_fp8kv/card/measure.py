"""Measure the parts of a card in order, and judge the caches.

Each part is written to a file when it is done, so an interrupted card resumes.
"""

import json
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..attention.switching import paged_attention
from ..calibration.divergence import Scores, compute_logits
from ..calibration.texts import read_model_windows
from ..errors import ConfigError
from ..modeling.model_support import find_max_positions, without_replacement_note
from ..scales.kv_scales import resolve_scales
from ..utils.digests import compute_digest, digest_weights
from ..utils.environment import describe_run
from ..utils.files import write_atomically
from ..utils.timing import Step, compute_ratios, take_turns
from .caches import UNQUANTIZED, Contender, KeysAndValues, choose_contenders, count_token_bytes
from .long_texts import KINDS, read_texts
from .predictions import EXACT, STORED, record_states, score_text

ALL_KINDS = "all"
# Largest mean divergence of each tier.
TIERS = {"very close": 1e-3, "close": 1e-2, "visible": 1e-1, "broken": math.inf}
_SAMPLE_TOKENS = 128  # number of tokens whose states fill the caches that are timed
_TIMED_STEPS = 5  # number of timed decode steps of a cache
_MIN_POSITIONS = 512  # minimum number of positions of a model


@dataclass(frozen=True)
class Size:
    """Numbers of texts and tokens that a card measures.

    Attributes:
        texts_per_kind: Number of scored texts of each of five kinds.
        positions: Positions in tokens before which predictions are scored. Predictions after stored
            prompts are scored before the first position only, because each cache needs a call.
        num_scored: Number of scored tokens before each position.
        step_positions: Numbers of stored tokens before a timed decode step.
    """

    texts_per_kind: int = 1
    positions: tuple[int, ...] = (512, 2048)
    num_scored: int = 64
    step_positions: tuple[int, ...] = (1024, 4096, 16384)

    def fit(self, max_positions: int) -> "Size":
        """Return the size for a model with at most `max_positions` positions."""
        # Leave room for the tokens of the timed steps and of their warm-up.
        max_step_position = max_positions - 2 * _TIMED_STEPS
        positions = {min(position, max_positions) for position in self.positions}
        step_positions = {min(position, max_step_position) for position in self.step_positions}
        return replace(
            self, positions=tuple(sorted(positions)), step_positions=tuple(sorted(step_positions))
        )


SIZES = {
    "quick": Size(positions=(512,), step_positions=(1024,)),
    "normal": Size(),
    "long": Size(texts_per_kind=6, positions=(1024, 4096, 8192)),
}


def _load_parts(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of a file with the results of parts, from which a later run resumes.

    `settings` are everything that results depend on. Results for different settings are discarded.
    """
    contents: dict[str, Any] = {"settings": json.loads(json.dumps(settings)), "parts": {}}
    with suppress(OSError, ValueError, KeyError, TypeError):
        saved_contents = json.loads(path.read_text())
        if saved_contents["settings"] == contents["settings"]:
            contents = saved_contents
    return contents


@without_replacement_note
def measure_card(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    name: str,
    parts_path: Path,
    size: Size = SIZES["normal"],
    texts: str | os.PathLike[str] | Sequence[str] | None = None,
    caches: Sequence[str] = (),
    scales: str | None = None,
    memory_gib: float = 8.0,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Measure what a model loses with each cache, and return the card for JSON.

    Args:
        model: A decoder, which is left unchanged. In float32 only the cache adds errors.
        tokenizer: The model's tokenizer.
        name: Name of the model in the card.
        parts_path: File in which an interrupted run keeps its results.
        size: Numbers of texts and tokens.
        texts: Texts to score, as in `calibrate`. None means texts of five kinds that come with
            Python.
        caches: Names or plans, as in `choose_contenders`. Empty means the standard caches.
        scales: Folder or repository of additional static scales to measure.
        memory_gib: Memory in GiB, for the number of tokens that fit into it.
        show_progress: Whether to show a progress bar on stderr.

    Returns:
        The entries of `describe_run`, `settings`, `bf16_bytes_per_token` of an unquantized cache,
        `refused` with the reasons, and `caches` with an entry for each cache.

    Raises:
        ConfigError: The model is not a decoder of attention layers, or has too few positions, or
            `texts` have too few tokens.
    """
    run = describe_run("card", device=str(model.device))
    max_positions = find_max_positions(model)
    layer_classes = {type(layer) for layer in UNQUANTIZED.make(model).layers}
    other_classes = layer_classes - {DynamicLayer, DynamicSlidingWindowLayer}
    reason = f"{max_positions} positions" if max_positions < _MIN_POSITIONS else ""
    if model.config.is_encoder_decoder or other_classes:
        reason = "an encoder, or layers without keys and values"
    if reason:
        raise ConfigError(
            f"model: expected a decoder of attention layers with at least {_MIN_POSITIONS} "
            f"positions, got {type(model).__name__} with {reason}. Choose another model"
        )
    size = size.fit(max_positions)
    # Unusable texts and scales raise their errors before a plan is chosen.
    card_texts = _read_all_texts(model, tokenizer, size, texts)
    loaded_scales: Any = resolve_scales(scales)
    contenders, refusals = choose_contenders(model, caches, loaded_scales)
    card = _Card(model, card_texts, size, contenders)
    settings = {
        "model": name,
        "dtype": str(model.dtype).removeprefix("torch."),
        **asdict(size),
        "texts": str(texts) if isinstance(texts, str | os.PathLike) else texts and "a list",
        "num_texts": sum(map(len, card.texts.values())),
        "caches": list(contenders),
        "scales": scales,
    }
    conditions = {key: run[key] for key in ("commit", "versions", "hardware")}
    digests = {
        "weights": digest_weights(model),
        "texts_digest": compute_digest(card.texts),
        "scales_digest": scales and loaded_scales.digest,
    }
    contents = _load_parts(parts_path, {**settings, **conditions, **digests})
    settings["memory_gib"] = memory_gib  # no part depends on it
    computations = card.list_parts()
    results = card.results = contents["parts"]
    with paged_attention(model), tqdm(computations, disable=not show_progress, unit="part") as bar:
        for part, compute in computations.items():
            bar.set_description(part)
            if part not in results:
                results[part] = json.loads(json.dumps(compute()))
                write_atomically({parts_path: json.dumps(contents).encode()})
            bar.update()
    entries = {cache: card.describe_cache(cache) for cache in contenders}
    for entry in entries.values():
        # The verdict is on the largest of the mean divergences after exact prompts.
        kl = max(row["kl"] for row in select_rows(entry, EXACT))
        entry["verdict"] = {"tier": find_tier(kl), "kl": kl}
        entry["tokens"] = int(memory_gib * 2**30 / entry["bytes_per_token"])
    return {
        **run,
        "settings": settings,
        "bf16_bytes_per_token": results["bytes"][UNQUANTIZED.title],
        "caches": entries,
        "refused": refusals,
    }


def _read_all_texts(
    model: PreTrainedModel, tokenizer: Any, size: Size, texts: Any
) -> dict[str, list[torch.Tensor]]:
    """Return the texts of each kind, or `texts` as one kind, in tokens `[1, N]`, int64.

    N is the last position of `size`. `texts` are joined, and cut into at most five times
    `size.texts_per_kind` texts. Each begins with the token that the tokenizer adds before a text.

    Raises:
        ConfigError: `texts` have fewer than N tokens.
    """
    length = size.positions[-1]
    if texts is None:
        texts_by_kind = {}
        for kind in KINDS:
            kind_texts = read_texts(tokenizer, kind, size.texts_per_kind, length)
            texts_by_kind[kind] = [ids.to(model.device) for ids in kind_texts]
        return texts_by_kind
    max_tokens = len(KINDS) * size.texts_per_kind * length
    windows = read_model_windows(model, texts, tokenizer, max_length=length, max_tokens=max_tokens)
    ids = torch.cat(windows).long().to(model.device)
    start_ids = ids.new_tensor(tokenizer("a")["input_ids"][:1])
    if start_ids.tolist() != [tokenizer.bos_token_id]:
        start_ids = start_ids[:0]
    ids = ids[~torch.isin(ids, start_ids)]
    length -= len(start_ids)
    if len(ids) < length:
        raise ConfigError(
            f"texts: expected at least {length} tokens, got {len(ids)}. Add texts, or measure a "
            "smaller card (--quick)"
        )
    sections = ids[: len(ids) // length * length].split(length)
    return {"own texts": [torch.cat([start_ids, section])[None] for section in sections]}


class _Card:
    """Computes the parts of a card, and describes each cache from their results."""

    def __init__(
        self,
        model: PreTrainedModel,
        texts: dict[str, list[torch.Tensor]],
        size: Size,
        contenders: dict[str, Contender],
    ) -> None:
        self.model = model
        self.size = size
        self.contenders = contenders
        self.all_caches = {UNQUANTIZED.title: UNQUANTIZED, **contenders}
        self.results: dict[str, Any] = {}
        self.texts = texts
        self.first_text = next(iter(self.texts.values()))[0]

    def list_parts(self) -> dict[str, Callable[[], Any]]:
        """Return the functions that compute the parts, in order."""
        parts: dict[str, Callable[[], Any]] = {"bytes": self._count_token_bytes}
        for kind, texts in self.texts.items():
            for index, ids in enumerate(texts):
                parts[f"text: {kind} {index + 1}"] = partial(self._score_text, ids)
        for position in self.size.step_positions:
            parts[f"steps: {position} tokens"] = partial(self._time_steps, position)
        return parts

    @cached_property
    def states(self) -> list[KeysAndValues]:
        """Return the keys and values of the first text, by layer."""
        return record_states(self.model, self.first_text)

    @property
    def sample_states(self) -> list[KeysAndValues]:
        """Return the keys and values of the first tokens, by layer."""
        return [(k[:, :, :_SAMPLE_TOKENS], v[:, :, :_SAMPLE_TOKENS]) for k, v in self.states]

    def _count_token_bytes(self) -> dict[str, float]:
        states = self.sample_states
        return {
            name: count_token_bytes(cache, self.model, states)
            for name, cache in self.all_caches.items()
        }

    def _score_text(self, ids: torch.Tensor) -> dict[str, Any]:
        states = self.states if ids is self.first_text else record_states(self.model, ids)
        scores = score_text(
            self.model,
            ids,
            states,
            self.contenders,
            positions=self.size.positions,
            num_scored=self.size.num_scored,
            stored_positions=self.size.positions[:1],
        )
        scores_by_key = {}
        for (position, prefill, cache_name), text_scores in scores:
            values = {name: tensor.tolist() for name, tensor in vars(text_scores).items()}
            scores_by_key[f"{position} {prefill} {cache_name}"] = values
        return scores_by_key

    def _time_steps(self, position: int) -> dict[str, Any]:
        """Return the milliseconds of a decode step, and the ratio to a step with DynamicCache."""
        sample = self.sample_states
        sample_length = sample[0][0].shape[2]  # all layers have the same tokens
        repeats = (1, 1, math.ceil(position / sample_length), 1)
        states = [(k.repeat(repeats), v.repeat(repeats)) for k, v in sample]
        steps: dict[str, Step] = {
            name: partial(
                compute_logits,
                self.model,
                self.first_text[:, :1],
                contender.fill(self.model, states, position),
                scored=True,
            )
            for name, contender in self.all_caches.items()
            if contender.bits is None
        }
        seconds = take_turns(steps, _TIMED_STEPS, str(self.model.device))
        return {
            name: {
                "ms": 1e3 * statistics.median(durations),
                "ratio": statistics.median(compute_ratios(seconds, name, UNQUANTIZED.title)),
            }
            for name, durations in seconds.items()
        }

    def describe_cache(self, name: str) -> dict[str, Any]:
        """Return the entry of a cache in the card."""
        return {
            "title": self.contenders[name].title,
            "bytes_per_token": self.results["bytes"][name],
            "predictions": self._summarize_predictions(name),
            "steps": {
                str(position): self.results[f"steps: {position} tokens"].get(name)
                for position in self.size.step_positions
            },
        }

    def _summarize_predictions(self, name: str) -> list[dict[str, Any]]:
        """Return the scores of all texts, by prompt, position and kind of text."""
        rows = []
        groups = product((EXACT, STORED), self.size.positions, (ALL_KINDS, *self.texts))
        for prefill, position, kind in groups:
            part_prefix = "text:" if kind == ALL_KINDS else f"text: {kind} "
            key = f"{position} {prefill} {name}"
            text_scores = []
            for part, part_scores in self.results.items():
                if part.startswith(part_prefix) and key in part_scores:
                    values = part_scores[key].values()
                    tensors = (torch.tensor(numbers, dtype=torch.float64) for numbers in values)
                    text_scores.append(Scores(*tensors))
            if text_scores:
                row = {"prompt": prefill, "position": position, "kind": kind}
                rows.append({**row, **summarize_scores(text_scores)})
        return rows


def summarize_scores(texts: Sequence[Scores]) -> dict[str, Any]:
    """Return the mean, 99th percentile and maximum of the divergence, and means of other scores.

    `kl_error` is the standard error of the mean over the texts, or None for a single text.
    """
    all_scores = Scores.concat(texts)
    means = torch.stack([text.kl.mean() for text in texts])
    return {
        "kl": all_scores.kl.mean().item(),
        "kl_error": means.std().item() / len(means) ** 0.5 if len(means) > 1 else None,
        "kl_p99": all_scores.kl.quantile(0.99).item(),
        "kl_max": all_scores.kl.max().item(),
        "top1": all_scores.top1_match.mean().item(),
        "total_variation": all_scores.total_variation.mean().item(),
        "perplexity": all_scores.nll.mean().exp().item(),
    }


def find_tier(kl: float) -> str:
    """Return the key of `TIERS` for a mean divergence."""
    return next(tier for tier, max_kl in TIERS.items() if kl <= max_kl)


def select_rows(entry: Mapping[str, Any], prefill: str) -> list[Any]:
    """Return the rows of all texts after exact or stored prompts, by position."""
    rows = entry["predictions"]
    return [row for row in rows if row["kind"] == ALL_KINDS and row["prompt"] == prefill]
