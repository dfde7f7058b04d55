"""Measure predictions after exact and stored prompts, with each cache, over many passages.

A call computes an exact prompt from unrounded keys and values, as `generate()` does by default. A
stored prompt is read from the cache's bytes, as in serving, chunks, prefix stores and training, so
errors of the first layers and tokens grow through the hidden states. Single passages differ
tenfold, so ratios are means over passages.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_fp8kv import FP8PagedCache, StoragePlan, choose_plan
from hf_fp8kv.attention.switching import paged_attention
from hf_fp8kv.card.caches import CONTENDERS, Contender, choose_contenders, count_token_bytes
from hf_fp8kv.card.long_texts import KINDS, read_texts
from hf_fp8kv.card.predictions import EXACT, STORED, record_states, score_text
from hf_fp8kv.errors import ConfigError
from hf_fp8kv.formats import summarize_plan
from hf_fp8kv.utils.digests import digest_weights

from .outliers import planted_outliers
from .shared import MODEL_OPTIONS, Result, load_model_before, main

PROMPTS = (EXACT, STORED)
BASELINE = "fp8_e3m4"
SCORED_TOKENS = 128
# Prefixes of the names of plans, which `choose_plan` makes for more bytes or for a number of bits.
_PLAN_PREFIX, _BITS_PREFIX = "plan ", "bits "
# Number of passages, and caches, by the number of tokens of a prompt.
CASES: dict[int, tuple[int, Sequence[str]]] = {
    1024: (12, (BASELINE, "fp8", "plan 0%", "plan 2%", "plan 4%", "plan 8%")),
    4096: (4, ("plan 0%", "plan 4%")),
}
_BYTES_TOKENS = 4096  # tokens of a cache whose bytes are counted
_PROBE_TOKENS = 8
_SKIPPED_TOKENS = 99  # tokens before a passage that begins inside a text
_MIN_KL = 1e-15
# Mean divergence of each passage, by the names of the cache and of the prompt.
Divergences = dict[tuple[str, str], list[float]]


@dataclass(frozen=True)
class Storage:
    """How a cache stores keys and values."""

    contender: Contender
    more_bytes: float  # relative to `BASELINE`, at 4,096 tokens
    description: str


def measure_prompts(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    caches: str = "",
    prompt_tokens: int | None = None,
    num_passages: int | None = None,
    text_folder: str | None = None,
    factor: float = 1.0,
    head_stride: int = 1,
    progress: Callable[[str], None],
) -> Result:
    """Measure each cache after prompts of each number of tokens.

    Args:
        model: The model, in float32.
        tokenizer: The model's tokenizer.
        caches: Caches to measure instead of the caches in `CASES`, separated by commas: names as in
            `hf-fp8kv card`, or files and folders of plans. "plan 4%" is the plan that
            `choose_plan` makes for 4 % more bytes, and "bits 6.25" its plan for these bits.
        prompt_tokens: Number of tokens of a prompt. None means all numbers in `CASES`.
        num_passages: Number of passages. None means the numbers in `CASES`.
        text_folder: Folder of text files, a passage each. None means texts that come with Python.
        factor: Factor by which planted outliers multiply K. 1 plants none.
        head_stride: Every `head_stride`-th head gets outliers. 1 means every head.
        progress: Function that is called with a message before each cache and each passage.
    """
    cases = CASES
    if prompt_tokens is not None:
        cases = {prompt_tokens: CASES.get(prompt_tokens, next(iter(CASES.values())))}
    rows = []
    storages: dict[str, Storage] = {}
    planting = planted_outliers(model, factor, head_stride) if factor != 1 else nullcontext()
    with planting, paged_attention(model):
        for length, (standard_passages, standard_caches) in cases.items():
            cache_names = [name.strip() for name in caches.split(",") if name.strip()]
            for cache in cache_names or standard_caches:
                if cache not in storages:
                    progress(f"preparing {cache}")
                    storages[cache] = make_storage(model, cache)
            count = num_passages or standard_passages
            kl: Divergences = {
                (cache, prompt): [] for cache, prompt in product(cache_names, PROMPTS)
            }
            passages = read_passages(tokenizer, count, length + SCORED_TOKENS, text_folder)
            for index, (passage, ids) in enumerate(passages.items()):
                progress(f"{length} tokens, {index + 1} of {count}: {passage}")
                measure_passage(model, ids.to(model.device), storages, kl)
            rows += [
                {"tokens": length, "passages": count, **summarize(cache, storages[cache], kl)}
                for cache in cache_names
            ]
    return {
        "rows": rows, "weights": digest_weights(model),
        "plans": {cache: storage.description for cache, storage in storages.items()},
    }  # fmt: skip


def read_passages(
    tokenizer: Any, num_passages: int, length: int, folder: str | None
) -> dict[str, torch.Tensor]:
    """Return passages of `length` tokens, `[1, length]`, int64, by name.

    Raises:
        ConfigError: There are too few passages of this length.
    """
    passages: dict[str, torch.Tensor] = {}
    if folder is None:
        for index, kind in enumerate(KINDS):
            num_texts = len(range(index, num_passages, len(KINDS)))
            texts = read_texts(tokenizer, kind, num_texts, length + _SKIPPED_TOKENS)
            for number, ids in enumerate(texts, 1):
                # Every second passage begins inside a text, because the first token matters.
                start = _SKIPPED_TOKENS if (index + number) % 2 == 0 else 0
                passages[f"{kind} {number}"] = ids[:, start : start + length]
        return passages
    for path in sorted(Path(folder).iterdir()):
        ids = tokenizer(path.read_text(), return_tensors="pt").input_ids[:, :length]
        if ids.shape[1] == length and len(passages) < num_passages:
            passages[path.name] = ids
    if len(passages) < num_passages:
        raise ConfigError(
            f"--texts: expected {num_passages} files of {length} tokens in {folder}, got "
            f"{len(passages)}. Add longer files, or measure fewer passages"
        )
    return passages


def make_storage(model: PreTrainedModel, name: str) -> Storage:
    """Return the storage of a cache, whose name is an element of `caches` of `measure_prompts`."""
    plan = None
    if name.startswith(_PLAN_PREFIX):
        percentage = float(name.removeprefix(_PLAN_PREFIX).removesuffix("%"))
        plan = choose_plan(model, max_extra_bytes=percentage / 100)
    elif name.startswith(_BITS_PREFIX):
        plan = choose_plan(model, bits=float(name.removeprefix(_BITS_PREFIX)), max_extra_bytes=0)
    elif Path(name).exists():
        plan = StoragePlan.load(name)
    contender = Contender(name, lambda model: FP8PagedCache(model.config, plan=plan))
    if plan is None:
        contender = choose_contenders(model, [name])[0][name]
    cache = contender.make(model)
    is_paged = isinstance(cache, FP8PagedCache)
    description = summarize_plan(cache.plan) if is_paged else contender.title
    states = record_states(model, torch.arange(_PROBE_TOKENS, device=model.device)[None])
    num_bytes, baseline_bytes = (
        count_token_bytes(each, model, states, _BYTES_TOKENS)
        for each in (contender, CONTENDERS[BASELINE])
    )
    return Storage(contender, num_bytes / baseline_bytes - 1, description)


def measure_passage(
    model: PreTrainedModel, ids: torch.Tensor, storages: Mapping[str, Storage], kl: Divergences
) -> None:
    """Append the mean divergence of a passage after each prompt to the lists in `kl`."""
    all_scores = score_text(
        model, ids, record_states(model, ids), {name: storages[name].contender for name, _ in kl},
        positions=[ids.shape[1]], num_scored=SCORED_TOKENS, stored_positions=[ids.shape[1]],
    )  # fmt: skip
    for (_, prompt, cache), scores in all_scores:
        kl[cache, prompt].append(scores.kl.mean().item())


def summarize(cache: str, storage: Storage, kl: Divergences) -> Result:
    """Return the row of a cache: mean KL in 1e-3, and ratios to the KL of `BASELINE`.

    Ratios are geometric means over passages.
    """
    row: Result = {"cache": cache, "more_bytes": storage.more_bytes}
    for prompt in PROMPTS:
        passage_kl = kl[cache, prompt]
        row[f"{prompt}_kl"] = passage_kl
        scaled_kl = [1e3 * value for value in passage_kl]
        row[f"{prompt}, 1e-3"] = compute_interval(scaled_kl) if passage_kl else "refused"
        row[f"{prompt}, of {BASELINE}"] = compute_ratio(passage_kl, kl.get((BASELINE, prompt), []))
    return row


def compute_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of the values of all passages, and its 95% interval by Student's t."""
    mean = statistics.mean(values)
    error = math.nan
    if len(values) > 1:
        quantile = _compute_quantile(0.975, len(values) - 1)
        error = quantile * statistics.stdev(values) / len(values) ** 0.5
    return mean, mean - error, mean + error


def _compute_quantile(probability: float, degrees: int) -> float:
    """Return a quantile above the median of Student's t-distribution with `degrees` of freedom.

    With t = sqrt(degrees) * tan(angle), the density is proportional to cos(angle) ** (degrees - 1).
    """
    angle = torch.linspace(0, math.pi / 2, 1 << 16, dtype=torch.float64)
    integral = torch.cumulative_trapezoid(angle.cos() ** (degrees - 1), angle)
    index = int((integral / integral[-1] / 2 + 0.5 < probability).sum())
    return float(degrees**0.5 * math.tan(angle[index + 1].item()))


def compute_ratio(kl: Sequence[float], baseline: Sequence[float]) -> tuple[float, ...] | None:
    """Return the geometric mean of the ratios of each passage, and its 95% interval."""
    if not kl or not baseline or kl == baseline:
        return None
    logarithms = [
        math.log(max(cache_kl, _MIN_KL) / max(baseline_kl, _MIN_KL))
        for cache_kl, baseline_kl in zip(kl, baseline, strict=True)
    ]
    return tuple(map(math.exp, compute_interval(logarithms)))


if __name__ == "__main__":
    main(__doc__, load_model_before(measure_prompts), {
        **MODEL_OPTIONS,
        "--caches": {
            "help": "Names as in `hf-fp8kv card`, 'plan 4%%', 'bits 6', or files of plans."
        },
        "--tokens": {
            "type": int, "dest": "prompt_tokens",
            "help": "Number of tokens of a prompt. Default: 1,024 and 4,096.",
        },
        "--passages": {"type": int, "dest": "num_passages", "help": "Number of passages."},
        "--texts": {
            "dest": "text_folder",
            "help": "Folder of text files. Default: texts that come with Python.",
        },
        "--factor": {"type": float, "help": "Plant outliers in K, larger by this factor."},
        "--heads": {"type": int, "dest": "head_stride", "help": "Plant in every n-th head."},
    })  # fmt: skip
