"""Answer tasks under each cache, and count the right answers that each cache loses and wins."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from ..calibration.divergence import compute_logits
from .caches import UNQUANTIZED, Contender
from .predictions import read_states
from .tasks import Haystack, Question

# Share of right answers under the unquantized cache below which a task is too hard for the model.
_MIN_RIGHT = 0.5


def run_task(
    model: PreTrainedModel, haystacks: Sequence[Haystack], contenders: Mapping[str, Contender]
) -> dict[str, Any]:
    """Answer the questions of a task under each cache.

    The task is dropped if fewer than half of the answers are right under the unquantized cache.

    Args:
        model: The model, with the attention implementation to measure.
        haystacks: The texts and questions of the task.
        contenders: The caches by name.

    Returns:
        `asked` and `right`, the numbers of answers and of right answers under the unquantized
        cache, `dropped`, and `caches`. `caches` has for each cache the numbers of right
        answers `lost` and `won` against the unquantized cache. It is empty for a dropped task.
    """
    states = [read_states(model, haystack.ids.to(model.device)) for haystack in haystacks]

    def answer_all(contender: Contender) -> list[bool]:
        correct = []
        for haystack_states, haystack in zip(states, haystacks, strict=True):
            for question in haystack.questions:
                correct += _answer(model, question, contender.fill(model, haystack_states))
        return correct

    expected = answer_all(UNQUANTIZED)
    dropped = sum(expected) < _MIN_RIGHT * len(expected)
    caches = {}
    for name, contender in {} if dropped else contenders.items():
        pairs = [*zip(expected, answer_all(contender), strict=True)]
        caches[name] = {"lost": pairs.count((True, False)), "won": pairs.count((False, True))}
    return {"asked": len(expected), "right": sum(expected), "dropped": dropped, "caches": caches}


def _answer(model: PreTrainedModel, question: Question, cache: Any) -> list[bool]:
    """Return whether all tokens of each answer have higher logits than the wrong candidates."""
    logits = compute_logits(model, question.ids.to(model.device), cache, {}, scored=True)[0].cpu()
    return [
        all(logits[x.index, x.right_id] > logits[x.index, list(x.wrong_ids)].max() for x in tokens)
        for tokens in question.answers
    ]
