"""Long suite: what caches do to whole models at long context."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_fp8kv.attention.switching import paged_attention
from hf_fp8kv.bench.quality import describe_settings
from hf_fp8kv.errors import ConfigError
from hf_fp8kv.formats import LayerPlan
from hf_fp8kv.utils.environment import describe_run
from hf_fp8kv.utils.files import write_all

from ..shared import report_percents
from . import predictions
from .answers import count_tokens as count_task_tokens
from .answers import run_task
from .caches import ROWS, Row, choose_rows
from .outliers import planted_outliers
from .predictions import TextScores
from .tasks import TASKS, Haystack, write_haystacks
from .texts import KINDS, read_texts

THOROUGH: dict[str, Any] = {"positions": (1024, 4096, 8192), "texts": 6, "answers": 40}
# A call of the model: of which part of the suite, under which cache, with how many tokens.


def run_long_suite(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    name: str = "",
    texts: int = 1,
    positions: Sequence[int] = (1024, 2048),
    scored: int = 64,
    kinds: Sequence[str] = tuple(KINDS),
    tasks: Sequence[str] = tuple(TASKS),
    answers: int = 10,
    caches: Sequence[str] = tuple(ROWS),
    outliers: float | None = None,
    outlier_heads: int = 1,
    save: Path | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> dict[str, Any]:
    """Return what caches do to a model's predictions and answers at long context, for JSON.

    Of `texts` texts of each kind, the `scored` tokens before each of the `positions` are scored
    under each cache, after one call with all tokens before them. In float32 one sees the cache
    alone. The texts come with Python: see `texts.py`. Then so many `answers` of each task are
    asked for behind texts that end at the positions: see `tasks.py`.

    Args:
        model: a decoder; it is left as it was.
        tokenizer: the model's.
        name: what the result calls the model.
        texts: how many of each kind.
        positions: in tokens.
        scored: tokens before each position.
        kinds: of text, some of `KINDS`, or none.
        tasks: some of `TASKS`, or none.
        answers: at least so many of each task, at each position.
        caches: some of `ROWS`. Those that cannot be measured here are named in the result.
        outliers: how much larger K is made in a few channels, see `outliers.py`; None: it is not.
        outlier_heads: n: in every n-th head.
        save: a file that the result is written to whenever there is more of it.
        progress: called with what is measured next, and the share that is done.

    Returns:
        `suite`, `date`, `command`, `versions`, `hardware`, `settings`, and

        * `complete`: whether all was measured that was asked for; False only in the file;
        * `caches`: each with `cache`, `title`, `bits` (of a number of a bf16 model, its share of
          the scales included), `missing` (why it was not measured, or None), and how it stored the
          layers of the texts so far: `plans` (how many, by plan) and `k_rotated` (how many with K
          rotated);
        * `predictions`: each with `cache`, `position`, `kind` ("all": over all texts) and the
          fields of `summarize_texts`;
        * `tasks`: each with `task`, `position` and the fields of `run_task`.

    Raises:
        ConfigError: unknown kinds, tasks or caches, a position that the model does not reach or
            that leaves no token before those that are scored, or too few texts.
    """
    positions = sorted(set(positions))
    _check_positions(model, positions, scored)
    _check_names("kinds", kinds, KINDS)
    _check_names("tasks", tasks, TASKS)
    rows, missing = choose_rows(model, caches)
    read = {kind: read_texts(tokenizer, kind, texts, positions[-1]) for kind in kinds}
    written = {
        (position, task): write_haystacks(tokenizer, task, position, answers)
        for position in positions
        for task in tasks
    }
    result: dict[str, Any] = {
        **describe_run("long", device=str(model.device)),
        "settings": {
            **describe_settings(model, name, kinds, scored=scored),
            "texts_of_a_kind": texts,
            "tasks": list(tasks),
            "answers": answers,
            "outliers": outliers,
            "outlier_heads": outlier_heads,
            "positions": list(positions),
            "chat_template": bool(tokenizer.chat_template),
        },
        "complete": False,
        "caches": _describe_caches(model, caches, missing, {}),
        "predictions": [],
        "tasks": [],
    }

    def keep() -> None:
        if save is not None:
            write_all({save: (json.dumps(result, indent=2) + "\n").encode()})

    report = report_percents(progress, _count_tokens(read, written, rows, positions, scored))

    def on_call(what: str, cache: str, tokens: int) -> None:
        report(f"{what}, {cache}", tokens)

    plans: dict[str, Counter[LayerPlan]] = {name: Counter() for name in rows}
    keep()
    with planted_outliers(model, outliers, outlier_heads), paged_attention(model):
        by_kind: dict[str, list[TextScores]] = {kind: [] for kind in kinds}
        # One text of each kind, then the next: what is cut short has all kinds.
        for number in range(texts):
            for kind, of_kind in read.items():
                by_kind[kind].append(
                    predictions.score_text(
                        model, of_kind[number].to(model.device), rows, positions=positions,
                        scored=scored,
                        on_call=partial(on_call, f"{kind}, text {number + 1} of {texts}"),
                        plans=plans,
                    )
                )  # fmt: skip
                result["caches"] = _describe_caches(model, caches, missing, plans)
                result["predictions"] = predictions.summarize_predictions(
                    by_kind, list(rows), positions
                )
                keep()
        for (position, task), haystacks in written.items():
            called = partial(on_call, f"{task} at {position}")
            found = run_task(model, haystacks, rows, called)
            result["tasks"].append({"task": task, "position": position, **found})
            keep()
    result["complete"] = True
    keep()
    return result


def _describe_caches(
    model: PreTrainedModel,
    caches: Sequence[str],
    missing: Mapping[str, str],
    plans: Mapping[str, Counter[LayerPlan]],
) -> list[dict[str, Any]]:
    config = model.config.get_text_config(decoder=True)
    head_size = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    return [
        {
            "cache": cache,
            "title": ROWS[cache].title,
            "bits": ROWS[cache].bits(head_size),
            "missing": missing.get(cache),
            "plans": {str(plan): n for plan, n in plans.get(cache, Counter()).most_common()},
            "k_rotated": sum(n for plan, n in plans.get(cache, {}).items() if plan.k.rotated),
        }
        for cache in caches
    ]


def _count_tokens(
    read: Mapping[str, Sequence[torch.Tensor]],
    written: Mapping[tuple[int, str], Sequence[Haystack]],
    rows: Mapping[str, Row],
    positions: Sequence[int],
    scored: int,
) -> int:
    """Return the tokens that are reported in all."""
    of_text = predictions.count_tokens(rows, positions, scored)
    of_tasks = (count_task_tokens(haystacks, rows) for haystacks in written.values())
    return of_text * sum(map(len, read.values())) + sum(of_tasks)


def _check_names(what: str, names: Sequence[str], known: Mapping[str, Any]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"{what}: expected some of {', '.join(known)}, got {unknown[0]!r}")


def _check_positions(model: PreTrainedModel, positions: Sequence[int], scored: int) -> None:
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if not positions or positions[0] <= scored or (limit is not None and positions[-1] > limit):
        raise ConfigError(
            f"positions: expected some above {scored}, the tokens that are scored before each"
            + (f", up to {limit}, the model's max_position_embeddings" if limit else "")
            + f"; got {', '.join(map(str, positions)) or 'none'}"
        )
