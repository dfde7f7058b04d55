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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from hf_fp8kv import FP8PagedCache, StoragePlan, choose_plan
from hf_fp8kv.attention.switching import paged_attention
from hf_fp8kv.card.caches import Contender, choose_contenders, count_token_bytes
from hf_fp8kv.card.drift import compute_student_quantile
from hf_fp8kv.card.long_texts import KINDS, read_texts
from hf_fp8kv.card.predictions import EXACT, STORED, prefill, score_text
from hf_fp8kv.errors import ConfigError
from hf_fp8kv.formats import summarize_plan
from hf_fp8kv.utils.digests import digest_weights
from hf_fp8kv.utils.terminal import build_table

from .outliers import planted_outliers
from .shared import MODEL_OPTIONS, Options, Result, load_model_before, main

if TYPE_CHECKING:
    from rich.console import RenderableType

PROMPTS = (EXACT, STORED)
BASELINE = "fp8_e3m4"
SCORED_TOKENS = 128
# Prefixes of plans of `choose_plan`, by the bytes that they may add, and by their bits.
_PLAN = "plan "
_BITS = "bits "
_PLANS = ("plan 0%", "plan 2%", "plan 4%", "plan 8%")
# Number of passages, and caches, by the number of tokens of a prompt.
CASES: dict[int, tuple[int, Sequence[str]]] = {
    1024: (12, (BASELINE, "fp8", *_PLANS)),
    4096: (4, _PLANS[::2]),
}
_BYTES_TOKENS = 4096  # tokens of a cache whose bytes are counted
_PROBE_TOKENS = 8
_SKIPPED_TOKENS = 99  # tokens before a passage that begins inside a text
_MIN_KL = 1e-15
# Mean divergence of each passage, by the names of the cache and of the prompt.
KLs = dict[tuple[str, str], list[float]]


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
    plans: Sequence[str] = (),
    tokens: int | None = None,
    num_passages: int | None = None,
    texts: str | None = None,
    factor: float = 1.0,
    head_stride: int = 1,
    progress: Callable[[str], None],
) -> Result:
    """Return a row for each cache and number of tokens of a prompt.

    Args:
        model: The model, in float32.
        tokenizer: The model's tokenizer.
        caches: Caches to measure instead of the standard caches, as in `hf-fp8kv card`, separated
            by commas. "plan 4%" is the plan that `choose_plan` makes for 4 % more bytes, and
            "bits 6.25" its plan for these bits.
        plans: Files or folders of more plans.
        tokens: Number of tokens of a prompt. None means all numbers in `CASES`.
        num_passages: Number of passages. None means the numbers in `CASES`.
        texts: Folder of text files, a passage each. None means texts that come with Python.
        factor: Factor by which planted outliers multiply K. 1 plants none.
        head_stride: Every `head_stride`-th head gets outliers. 1 means every head.
        progress: Function that is called with the name of each passage.
    """
    cases = CASES
    if tokens is not None:
        cases = {tokens: CASES.get(tokens, next(iter(CASES.values())))}
    rows = []
    storages: dict[str, Storage] = {}
    planting = planted_outliers(model, factor, head_stride) if factor != 1 else nullcontext()
    with planting, paged_attention(model):
        for length, (standard_passages, standard_caches) in cases.items():
            names = [x.strip() for x in caches.split(",") if x.strip()] or standard_caches
            for cache in (*names, *plans):
                if cache not in storages:
                    progress(f"preparing {cache}")
                    storages[cache] = make_storage(model, cache)
            count = num_passages or standard_passages
            kl: KLs = {(cache, prompt): [] for cache in (*names, *plans) for prompt in PROMPTS}
            passages = read_passages(tokenizer, count, length + SCORED_TOKENS, texts)
            for index, (passage, ids) in enumerate(passages.items()):
                progress(f"{length} tokens, {index + 1} of {count}: {passage}")
                measure_passage(model, ids.to(model.device), storages, kl)
            rows += [
                {"tokens": length, "passages": count, **summarize(cache, storages[cache], kl)}
                for cache in (*names, *plans)
            ]
    descriptions = {cache: storage.description for cache, storage in storages.items()}
    return {"rows": rows, "weights": digest_weights(model), "plans": descriptions}


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
            for number, ids in enumerate(texts):
                # Every second passage begins inside a text, because the first token matters.
                start = _SKIPPED_TOKENS * ((index + number) % 2)
                passages[f"{kind} {number + 1}"] = ids[:, start : start + length]
        return passages
    for path in sorted(Path(folder).iterdir()):
        ids = tokenizer(path.read_text(), return_tensors="pt").input_ids[:, :length]
        if ids.shape[1] == length and len(passages) < num_passages:
            passages[path.name] = ids
    if len(passages) < num_passages:
        raise ConfigError(
            f"texts: expected {num_passages} files of {length} tokens in {folder}, got "
            f"{len(passages)}. Add longer files, or measure fewer passages"
        )
    return passages


def make_storage(model: PreTrainedModel, name: str) -> Storage:
    """Return the storage of a cache with a name as in `measure_prompts`, or of a plan's file."""
    baseline = choose_contenders(model, [BASELINE])[0][BASELINE]
    plan = None
    if name.startswith(_PLAN):
        share = float(name.removeprefix(_PLAN).removesuffix("%")) / 100
        plan = choose_plan(model, max_extra_bytes=share)
    elif name.startswith(_BITS):
        plan = choose_plan(model, bits=float(name.removeprefix(_BITS)), max_extra_bytes=0)
    elif Path(name).exists():
        plan = StoragePlan.load(name)
    if plan is None:
        contenders, _ = choose_contenders(model, [name])
        contender = contenders[name]
    else:
        contender = Contender(name, lambda model: FP8PagedCache(model.config, plan=plan))
    cache = contender.make(model)
    description = contender.title
    if isinstance(cache, FP8PagedCache):
        description = summarize_plan(cache.plan)
    states = prefill(model, torch.arange(_PROBE_TOKENS, device=model.device)[None]).states
    num_bytes, baseline_bytes = (
        count_token_bytes(x, model, states, _BYTES_TOKENS) for x in (contender, baseline)
    )
    return Storage(contender, num_bytes / baseline_bytes - 1, description)


def measure_passage(
    model: PreTrainedModel, ids: torch.Tensor, storages: Mapping[str, Storage], kl: KLs
) -> None:
    """Append the mean divergence of a passage after each prompt to the lists in `kl`."""
    all_scores = score_text(
        model, ids, prefill(model, ids).states, {name: storages[name].contender for name, _ in kl},
        positions=[ids.shape[1]], scored=SCORED_TOKENS, stored_positions=[ids.shape[1]],
    )  # fmt: skip
    for (_, prompt, cache), scores in all_scores:
        kl[cache, prompt].append(scores.kl.mean().item())


def summarize(cache: str, storage: Storage, kl: KLs) -> Result:
    """Return the row of a cache. See `format_table` for its columns."""
    row: Result = {"cache": cache, "more_bytes": storage.more_bytes}
    for prompt in PROMPTS:
        values = kl[cache, prompt]
        row[f"{prompt}_kl"] = values
        row[prompt] = compute_interval(values) if values else None
        row[f"{prompt}_ratio"] = compute_ratio(values, kl.get((BASELINE, prompt), []))
    row["growth"] = compute_ratio(kl[cache, STORED], kl[cache, EXACT])
    return row


def compute_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of the values of all passages, and its 95% interval by Student's t."""
    mean = statistics.mean(values)
    error = math.nan
    if len(values) > 1:
        quantile = compute_student_quantile(0.975, len(values) - 1)
        error = quantile * statistics.stdev(values) / len(values) ** 0.5
    return mean, mean - error, mean + error


def compute_ratio(kl: Sequence[float], baseline: Sequence[float]) -> tuple[float, ...] | None:
    """Return the geometric mean of the ratios of each passage, and its 95% interval."""
    if not kl or not baseline or kl == baseline:
        return None
    pairs = zip(kl, baseline, strict=True)
    logarithms = [math.log(max(x, _MIN_KL) / max(y, _MIN_KL)) for x, y in pairs]
    return tuple(map(math.exp, compute_interval(logarithms)))


def format_table(result: Result) -> "RenderableType":
    """Return a table of mean KL in 1e-3 after exact and stored prompts, with 95% intervals.

    Ratios are geometric means over passages: to the baseline after the same prompt, and of stored
    to exact prompts ("growth").
    """
    from rich.console import Group

    def format_kl(interval: Sequence[float] | None) -> str:
        if interval is None:
            return "refused"
        mean, _, high = (1e3 * x for x in interval)
        return f"{mean:.3f} ± {high - mean:.3f}"

    def format_ratio(interval: Sequence[float] | None) -> str:
        return "" if interval is None else "{:.2f} [{:.2f}, {:.2f}]".format(*interval)

    lines = [
        (f"{row['tokens']:,}", row["cache"], str(row["passages"]), f"{row['more_bytes']:+.1%}",
         format_kl(row[EXACT]), format_kl(row[STORED]), format_ratio(row["growth"]),
         format_ratio(row[f"{EXACT}_ratio"]), format_ratio(row[f"{STORED}_ratio"]))
        for row in result["rows"]
    ]  # fmt: skip
    names = ("tokens", "cache", "passages", "bytes", EXACT, STORED, "growth",
             f"exact, of {BASELINE}", f"stored, of {BASELINE}")  # fmt: skip
    notes = [f"{name}: {result[name]}" for name in ("settings", "date", "commit", "idle")]
    return Group(build_table(dict.fromkeys(names, "left"), lines), *notes)


if __name__ == "__main__":
    options: Options = {
        **MODEL_OPTIONS,
        "--caches": {"help": "Caches as in `hf-fp8kv card`, or 'plan 4%%', separated by commas."},
        "--plans": {"nargs": "*", "help": "Files or folders of plans."},
        "--tokens": {"type": int, "help": "Tokens of a prompt. Default: 1,024 and 4,096."},
        "--passages": {"type": int, "dest": "num_passages", "help": "Number of passages."},
        "--texts": {"help": "Folder of text files. Default: texts that come with Python."},
        "--factor": {"type": float, "help": "Plant outliers in K, larger by this factor."},
        "--heads": {"type": int, "dest": "head_stride", "help": "Plant in every n-th head."},
    }
    main(__doc__, load_model_before(measure_prompts), options, format_table)
