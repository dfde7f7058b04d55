"""Answers: how many of a task are right under each cache, and how many it loses."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from hf_fp8kv.cache.cache import FP8PagedCache
from hf_fp8kv.calibration.divergence import UNQUANTISED, compute_logits

from .caches import Row
from .fill import Prefix
from .predictions import YARDSTICK
from .tasks import Haystack, Question

# Below it, what the unquantised cache gets right may be chance, and says nothing about the others.
CEILING = 0.5
OnCall = Callable[[str, int], None]


def run_task(
    model: PreTrainedModel,
    haystacks: Sequence[Haystack],
    rows: Mapping[str, Row],
    on_call: OnCall | None = None,
) -> dict[str, Any]:
    """Return what caches make of a task.

    The unquantised cache is asked first. Where less than half of its answers are right, the task
    is dropped: the other caches are not asked.

    Args:
        model: in the attention to measure.
        haystacks: of the task.
        rows: the caches.
        on_call: called with a cache's name and the tokens that the model has read for it.

    Returns:
        `asked` (answers in all), `ceiling` (the share that is right under the unquantised cache),
        `dropped`, and `answers`: for each cache `cache`, and the numbers that are `right` and
        `lost` (right under the unquantised cache, wrong under this one); none if it is dropped.
    """
    report = on_call or (lambda cache, tokens: None)
    yardstick = {UNQUANTISED: YARDSTICK}
    expected = _ask_all(model, haystacks, yardstick, report)[UNQUANTISED]
    dropped = sum(expected) < CEILING * len(expected)
    answers = {} if dropped else _ask_all(model, haystacks, rows, report)
    if dropped:
        report("dropped", count_tokens(haystacks, rows) - count_tokens(haystacks, {}))
    return {
        "asked": len(expected),
        "ceiling": sum(expected) / len(expected),
        "dropped": dropped,
        "answers": [
            {
                "cache": name,
                "right": sum(found),
                "lost": sum(e and not f for e, f in zip(expected, found, strict=True)),
            }
            for name, found in answers.items()
        ],
    }


def count_tokens(haystacks: Sequence[Haystack], rows: Mapping[str, Row]) -> int:
    """Return the tokens that `run_task` reports."""
    return sum(_count_tokens(haystack, row) for haystack in haystacks for row in rows.values()) + (
        sum(_count_tokens(haystack, YARDSTICK) for haystack in haystacks)
    )


def _count_tokens(haystack: Haystack, row: Row) -> int:
    """Return what is read for a cache; those that are filled by one call share the yardstick's."""
    asked = sum(question.ids.shape[1] for question in haystack.questions)
    return asked + haystack.ids.shape[1] * (row is YARDSTICK)


def _ask_all(
    model: PreTrainedModel, haystacks: Sequence[Haystack], rows: Mapping[str, Row], report: OnCall
) -> dict[str, list[bool]]:
    """Return for each cache which answers are right, in the order of the haystacks."""
    found: dict[str, list[bool]] = {name: [] for name in rows}
    for haystack in haystacks:
        ids = haystack.ids.to(model.device)
        prefix = Prefix(model, ids)
        for name, row in rows.items():
            cache = prefix.fill(row, ids.shape[1])
            for question in haystack.questions:
                found[name] += _answer(model, question, _copy(cache))
            report(name, _count_tokens(haystack, row))
    return found


def _copy(cache: Any) -> Any:
    """Return a cache that a question may write to, without copying what is stored."""
    if isinstance(cache, FP8PagedCache):
        return cache.fork()
    twin = copy.copy(cache)
    # The growing layers of transformers replace their tensors, and write into none.
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    return twin


def _answer(model: PreTrainedModel, question: Question, cache: Any) -> list[bool]:
    """Return for each answer whether every right token is above its wrong ones."""
    logits = compute_logits(model, question.ids.to(model.device), cache, {}, scored=True)[0].cpu()
    return [
        all(logits[s.index, s.right] > logits[s.index, list(s.wrong)].max() for s in steps)
        for steps in question.answers
    ]
