"""Measure the parts of a card in order, and judge the caches.

Each part is written to a file when it is done, so an interrupted card resumes.
"""

import json
import math
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
from ..bench.contenders import Step, compute_ratios, take_turns
from ..calibration.divergence import Scores, compute_logits
from ..errors import ConfigError
from ..utils.digests import digest_weights
from ..utils.environment import describe_run
from ..utils.files import write_atomically
from ..utils.text import format_list
from .answers import run_task
from .caches import FLOOR, UNQUANTIZED, Contender, States, choose_contenders, count_token_bytes
from .drift import (
    UNQUANTIZED_PAGES,
    average_windows,
    compare_answers,
    describe_drift,
    format_change,
    sample_answers,
)
from .long_texts import KINDS, read_texts
from .predictions import EXACT, STORED, compare_states, prefill, score_text
from .tasks import TASKS, Haystack, write_haystacks

ALL_KINDS = "all"
# Largest mean divergence of each tier.
TIERS = {"very close": 1e-3, "close": 1e-2, "visible": 1e-1, "broken": math.inf}
_PROMPT_TOKENS, _GROUP_SIZE = 128, 4  # numbers of tokens of a prompt, and of answers in a group
_TIMED_STEPS = 5  # number of timed decode steps of a cache
_MIN_POSITIONS = 512  # minimum number of positions of a model
# Largest tolerated gain of stored states, and ratio of the error of K to its error without centers.
_MAX_GAIN, _MAX_CENTER_ERROR = 5e-3, 1.1
_SIGNIFICANCE = 0.05  # maximum p-value of a finding about lost answers


@dataclass(frozen=True)
class Size:
    """Numbers of texts, tokens and answers that a card measures.

    Attributes:
        texts: Number of scored texts of each of five kinds.
        positions: Positions in tokens before which predictions are scored. Predictions after stored
            prompts are scored before the first position only, because each cache needs a call.
        scored: Number of scored tokens before each position.
        answers: Number of long answers.
        drift: Number of tokens of a long answer, along which drift is measured.
        free: Number of tokens of an answer that each cache samples itself. 0 omits these answers.
        asked: Number of answers in each task. 0 omits the tasks.
        length: Number of tokens of a haystack and its longest question in a task.
        stored: Numbers of stored tokens before a timed decode step.
    """

    texts: int = 1
    positions: tuple[int, ...] = (512, 2048)
    scored: int = 64
    answers: int = 2
    drift: int = 2048
    free: int = 256
    asked: int = 10
    length: int = 1024
    stored: tuple[int, ...] = (1024, 4096, 16384)

    def fit(self, max_positions: int) -> "Size":
        """Return the size for a model with at most `max_positions` positions."""
        drift = min(self.drift, max_positions - _PROMPT_TOKENS)
        return replace(
            self,
            positions=tuple(sorted({min(n, max_positions) for n in self.positions})),
            drift=drift,
            free=min(self.free, drift),
            length=min(self.length, max_positions),
            stored=tuple(sorted({min(n, max_positions - 2 * _TIMED_STEPS) for n in self.stored})),
        )


SIZES = {
    "quick": Size(positions=(512,), answers=2, drift=512, free=0, asked=8, stored=(1024,)),
    "normal": Size(),
    "long": Size(
        texts=6, positions=(1024, 4096, 8192), answers=24, free=2048, asked=60, length=4096
    ),
}


class Parts:
    """The results of the parts of a card, saved in a file so that a later run can resume.

    Args:
        path: The file. Results for different settings in this file are discarded.
        settings: Everything that the results depend on.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._path = path
        self._content: Any = {"settings": json.loads(json.dumps(settings)), "parts": {}}
        with suppress(OSError, ValueError, KeyError, TypeError):
            saved_content = json.loads(path.read_text())
            if saved_content["settings"] == self._content["settings"]:
                self._content = saved_content

    def get(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return the saved result of a part, or compute and save the result."""
        parts = self._content["parts"]
        if name not in parts:
            parts[name] = json.loads(json.dumps(compute()))
            write_atomically({self._path: json.dumps(self._content).encode()})
        return parts[name]


def measure_card(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    name: str,
    parts_path: Path,
    size: Size = SIZES["normal"],
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
        size: Numbers of texts, tokens and answers.
        caches: Names or plans, as in `choose_contenders`. Empty means the standard caches.
        scales: Folder or repository of additional static scales to measure.
        memory_gib: Memory in GiB, for the number of tokens that fit into it.
        show_progress: Whether to show a progress bar on stderr.

    Returns:
        The entries of `describe_run`, `settings`, `bf16_bytes_per_token` of an unquantized cache,
        `tasks`, `refused` with the reasons, and `caches` with an entry for each cache.

    Raises:
        ConfigError: The model is not a decoder of attention layers, or has too few positions.
    """
    run = describe_run("card", device=str(model.device))
    config = model.config.get_text_config(decoder=True)
    max_positions = getattr(config, "max_position_embeddings", None) or max(size.positions)
    layer_classes = {type(layer) for layer in UNQUANTIZED.make(model).layers}
    if (
        model.config.is_encoder_decoder
        or max_positions < _MIN_POSITIONS
        or layer_classes - {DynamicLayer, DynamicSlidingWindowLayer}
    ):
        raise ConfigError(
            f"model: expected a decoder of attention layers with at least {_MIN_POSITIONS} "
            f"positions, got {type(model).__name__} with {max_positions}"
        )
    size = size.fit(max_positions)
    contenders, refusals = choose_contenders(model, caches, scales)
    settings = {
        "model": name,
        "dtype": str(model.dtype).removeprefix("torch."),
        **asdict(size),
        "caches": list(contenders),
        "scales": scales,
    }
    conditions = {key: run[key] for key in ("commit", "versions", "hardware")}
    saved_parts = Parts(parts_path, {**settings, **conditions, "weights": digest_weights(model)})
    settings["memory_gib"] = memory_gib  # no part depends on it
    card = _Card(model, tokenizer, size, contenders)
    computations = card.list_parts()
    results = card.results
    with paged_attention(model), tqdm(computations, disable=not show_progress, unit="part") as bar:
        for part, compute in computations.items():
            bar.set_description(part)
            results[part] = saved_parts.get(part, compute)
            bar.update()
    entries = {cache: card.describe_cache(cache) for cache in contenders}
    for entry in entries.values():
        entry["verdict"] = judge_cache(entry, entries.get(FLOOR))
        entry["tokens"] = int(memory_gib * 2**30 / entry["bytes_per_token"])
    return {
        **run,
        "settings": settings,
        "bf16_bytes_per_token": results["bytes"][UNQUANTIZED.title],
        "tasks": {
            task: {key: count for key, count in results[f"task: {task}"].items() if key != "caches"}
            for task in card.haystacks
        },
        "caches": entries,
        "refused": refusals | card.refusals,
    }


class _Card:
    """Computes the parts of a card, and describes each cache from their results."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, size: Size, contenders: dict[str, Contender]
    ) -> None:
        self.model = model
        self.size = size
        self.contenders = contenders
        self.all_caches = {UNQUANTIZED.title: UNQUANTIZED, **contenders}
        self.results: dict[str, Any] = {}
        self.texts = {
            kind: [
                ids.to(model.device)
                for ids in read_texts(tokenizer, kind, size.texts, size.positions[-1])
            ]
            for kind in KINDS
        }
        self.first_text = next(iter(self.texts.values()))[0]
        self.haystacks: dict[str, list[Haystack]] = {}
        self.refusals: dict[str, str] = {}
        for task in TASKS if size.asked else ():
            try:
                self.haystacks[task] = write_haystacks(tokenizer, task, size.length, size.asked)
            except ConfigError as error:
                self.refusals[task] = str(error)
        num_prompts = -(-size.answers // len(KINDS))
        prompts = [
            ids
            for kind in KINDS
            for ids in read_texts(tokenizer, kind, num_prompts, _PROMPT_TOKENS)
        ]
        self.prompts = prefill(model, torch.cat(prompts)[: size.answers].to(model.device))
        self.sample_states = [(keys[:1], values[:1]) for keys, values in self.prompts.states]

    def list_parts(self) -> dict[str, Callable[[], Any]]:
        """Return the functions that compute the parts, in order. Some need earlier results."""
        size = self.size
        parts: dict[str, Callable[[], Any]] = {"bytes": self._count_token_bytes}
        for index in range(size.texts):
            for kind in KINDS:
                parts[f"text: {kind} {index + 1}"] = partial(self._score_text, kind, index)
        parts["stored states"] = self._compare_states
        for start in range(0, size.answers, _GROUP_SIZE):
            parts[f"drift: answers from {start + 1}"] = partial(self._measure_drift, start)
        for name in self.contenders if size.free else ():
            parts[f"free: {name}"] = partial(self._sample_freely, name)
        for task, haystacks in self.haystacks.items():
            parts[f"task: {task}"] = partial(run_task, self.model, haystacks, self.contenders)
        for length in size.stored:
            parts[f"steps: {length} tokens"] = partial(self._time_steps, length)
        return parts

    @cached_property
    def states(self) -> list[States]:
        """Return the keys and values of the first text, by layer."""
        return prefill(self.model, self.first_text).states

    def _count_token_bytes(self) -> dict[str, float]:
        caches = self.all_caches.items()
        states = self.sample_states
        return {name: count_token_bytes(cache, self.model, states) for name, cache in caches}

    def _score_text(self, kind: str, index: int) -> dict[str, Any]:
        ids = self.texts[kind][index]
        states = self.states if ids is self.first_text else prefill(self.model, ids).states
        scores = score_text(
            self.model,
            ids,
            states,
            self.contenders,
            positions=self.size.positions,
            num_scored=self.size.scored,
            stored_positions=self.size.positions[:1],
        )
        return {
            " ".join(map(str, key)): {
                field: tensor.tolist() for field, tensor in vars(text_scores).items()
            }
            for key, text_scores in scores
        }

    def _compare_states(self) -> dict[str, Any]:
        return {
            name: compare_states(contender, self.model, self.states)
            for name, contender in self.contenders.items()
        }

    def _measure_drift(self, start: int) -> dict[str, Any]:
        """Return unquantized answers, and the divergences of each cache along them, by window."""
        answers, kl = sample_answers(
            self.model,
            self.prompts,
            slice(start, start + _GROUP_SIZE),
            UNQUANTIZED_PAGES,
            self.contenders,
            self.size.drift,
        )
        windows = {name: average_windows(cache_kl).tolist() for name, cache_kl in kl.items()}
        return {"answers": answers.tolist(), "windows": windows}

    @property
    def _drift_groups(self) -> list[dict[str, Any]]:
        """Return the results of `_measure_drift`."""
        return [group for part, group in self.results.items() if part.startswith("drift:")]

    def _sample_freely(self, name: str) -> dict[str, Any]:
        """Sample answers with a cache, and compare them with the unquantized answers."""
        answers, kl = sample_answers(
            self.model,
            self.prompts,
            slice(None),
            self.contenders[name],
            {name: UNQUANTIZED},
            self.size.free,
        )
        rows = [row[: self.size.free] for group in self._drift_groups for row in group["answers"]]
        return compare_answers(answers.cpu(), torch.tensor(rows), kl[name])

    def _time_steps(self, length: int) -> dict[str, Any]:
        """Return the milliseconds of a decode step, and the ratio to a step with DynamicCache."""
        repeats = 1, 1, -(-length // _PROMPT_TOKENS), 1
        states = [(k.repeat(repeats), v.repeat(repeats)) for k, v in self.sample_states]
        steps: dict[str, Step] = {
            name: partial(
                compute_logits,
                self.model,
                self.first_text[:, :1],
                contender.fill(self.model, states, length),
                {},
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
        group_windows = [group["windows"] for group in self._drift_groups]
        windows, floor = (
            torch.tensor(
                [row for group in group_windows for row in group.get(cache, ())],
                dtype=torch.float64,
            )
            for cache in (name, FLOOR)
        )
        is_relative = name != FLOOR and FLOOR in self.contenders
        return {
            "title": self.contenders[name].title,
            "bytes_per_token": self.results["bytes"][name],
            "predictions": self._summarize_predictions(name),
            "stored": self.results["stored states"][name],
            "drift": {
                "kl": windows.mean().item(),
                "windows": [float(f"{mean:.4g}") for mean in windows.mean(0).tolist()],
                **describe_drift(windows, floor if is_relative else None),
            },
            "free": self.results.get(f"free: {name}"),
            "tasks": {
                part.removeprefix("task: "): task["caches"].get(name)
                for part, task in self.results.items()
                if part.startswith("task:")
            },
            "steps": {
                str(length): self.results[f"steps: {length} tokens"].get(name)
                for length in self.size.stored
            },
        }

    def _summarize_predictions(self, name: str) -> list[dict[str, Any]]:
        """Return the scores of all texts, by prompt, position and kind of text."""
        rows = []
        for prompt, position, kind in product(
            (EXACT, STORED), self.size.positions, (ALL_KINDS, *KINDS)
        ):
            text_scores = [
                Scores(*(torch.tensor(numbers, dtype=torch.float64) for numbers in fields.values()))
                for part, part_scores in self.results.items()
                if part.startswith("text:" if kind == ALL_KINDS else f"text: {kind} ")
                for key, fields in part_scores.items()
                if key == f"{position} {prompt} {name}"
            ]
            if text_scores:
                row = {"prompt": prompt, "position": position, "kind": kind}
                rows.append({**row, **summarize_scores(text_scores)})
        return rows


def summarize_scores(texts: Sequence[Scores]) -> dict[str, Any]:
    """Return the mean, 99th percentile and maximum of the divergence, and means of other scores.

    `kl_error` is the standard error of the mean over the texts, or None for a single text.
    """
    all_scores = Scores.concat(texts)
    means = torch.stack([text.kl.mean() for text in texts])
    row = asdict(all_scores.summarize())
    del row["cache"]
    standard_error = means.std().item() / len(means) ** 0.5 if len(means) > 1 else None
    return {
        **row,
        "kl_error": standard_error,
        "kl_p99": all_scores.kl.quantile(0.99).item(),
        "total_variation": all_scores.total_variation.mean().item(),
    }


def judge_cache(entry: Mapping[str, Any], floor_entry: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the verdict on a cache from its entry in the card.

    Returns:
        `kl`, the largest of the mean divergences along the answers and after exact prompts, `tier`,
        the key of `TIERS` for this divergence, and `findings`, a sentence about each defect.
    """
    drift = entry["drift"]
    stored_errors = entry["stored"]
    findings = []
    kl = max(drift["kl"], *(row["kl"] for row in select_rows(entry, EXACT)))
    if stored_errors is not None:
        for side in "kv":
            if abs(gain := stored_errors[f"{side}_gain"]) > _MAX_GAIN:
                direction = "large" if gain > 0 else "small"
                findings.append(f"{side.upper()} is stored {abs(gain):.1%} too {direction}.")
        if positions := stored_errors["lost"]:
            first_positions = format_list(positions, 3)
            findings.append(f"{len(positions)} stored tokens are lost (at {first_positions}).")
        if stored_errors["center"] > _MAX_CENTER_ERROR:
            findings.append(
                f"The centers do not fit: the error of K is {stored_errors['center']:.1f} times "
                "the error without centers."
            )
    if entry is not floor_entry and floor_entry is not None and (drift["low"] or 0) > 0:
        growth = format_change(drift["slope"])
        findings.append(f"KL grows {growth} per 1,000 tokens faster than with bfloat16.")
    if jump := drift["jump"]:
        findings.append(f"KL jumps {jump['factor']:.0f}-fold at token {jump['position']}.")
    tasks = [task for task in entry["tasks"].values() if task]
    num_lost, num_gained = (sum(task[key] for task in tasks) for key in ("lost", "won"))
    if _compute_p_value(num_lost, num_gained) < _SIGNIFICANCE:
        findings.append(f"It loses {num_lost} correct answers and gains {num_gained}.")
    return {"tier": find_tier(kl), "kl": kl, "findings": findings}


def find_tier(kl: float) -> str:
    """Return the key of `TIERS` for a mean divergence."""
    return next(tier for tier, max_kl in TIERS.items() if kl <= max_kl)


def select_rows(entry: Mapping[str, Any], prompt: str) -> list[Any]:
    """Return the rows of all texts after exact or stored prompts, by position."""
    rows = entry["predictions"]
    return [row for row in rows if (row["kind"], row["prompt"]) == (ALL_KINDS, prompt)]


def _compute_p_value(num_lost: int, num_gained: int) -> float:
    """Return the p-value of a sign test: P(losses >= num_lost) if losses are as likely as gains."""
    num_changed = num_lost + num_gained
    return float(
        sum(math.comb(num_changed, n) for n in range(num_lost, num_changed + 1)) / 2**num_changed
    )
