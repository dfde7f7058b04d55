"""Answer tasks with each cache, and count answers that are correct only with or without it."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ..calibration.divergence import compute_logits
from .caches import UNQUANTIZED, Contender
from .predictions import prefill
from .tasks import Haystack, Question

# Minimum share of correct answers with the unquantized cache. Below it, a task is too hard.
_MIN_CORRECT_SHARE = 0.5
_MAX_ROWS = 8  # maximum number of questions in a call. Each row copies the haystack's states


def run_task(
    model: PreTrainedModel, haystacks: Sequence[Haystack], contenders: Mapping[str, Contender]
) -> dict[str, Any]:
    """Answer the questions of a task with each cache.

    Args:
        model: The model, with the attention implementation to measure.
        haystacks: Long texts with hidden facts, and questions about them.
        contenders: The caches to compare, by name.

    Returns:
        A dictionary with these entries:

        * `asked`: number of answers.
        * `right`: number of correct answers with the unquantized cache.
        * `dropped`: whether the task is too hard, with fewer than half of the answers correct.
        * `caches`: for each cache, the numbers of correct answers `lost` and `won` compared with
          the unquantized cache. Empty for a dropped task.
    """
    states = [prefill(model, haystack.ids.to(model.device)).states for haystack in haystacks]

    def answer_all(contender: Contender) -> list[bool]:
        is_correct = []
        for haystack_states, haystack in zip(states, haystacks, strict=True):
            for start in range(0, len(haystack.questions), _MAX_ROWS):
                questions = haystack.questions[start : start + _MAX_ROWS]
                shape = len(questions), -1, -1, -1
                rows = [(k.expand(shape), v.expand(shape)) for k, v in haystack_states]
                is_correct += _check_answers(model, questions, contender.fill(model, rows))
        return is_correct

    unquantized_correct = answer_all(UNQUANTIZED)
    num_asked = len(unquantized_correct)
    num_correct = sum(unquantized_correct)
    is_dropped = num_correct < _MIN_CORRECT_SHARE * num_asked
    caches = {}
    for name, contender in {} if is_dropped else contenders.items():
        outcomes = [*zip(unquantized_correct, answer_all(contender), strict=True)]
        caches[name] = {"lost": outcomes.count((True, False)), "won": outcomes.count((False, True))}
    return {"asked": num_asked, "right": num_correct, "dropped": is_dropped, "caches": caches}


def _check_answers(model: PreTrainedModel, questions: Sequence[Question], cache: Any) -> list[bool]:
    """Return whether all tokens of each answer have higher logits than the wrong tokens."""
    # Shorter questions are padded at the end. No scored token attends to the padding.
    ids = pad_sequence([question.ids[0] for question in questions], batch_first=True)
    logits = compute_logits(model, ids.to(model.device), cache, {}, scored=True).cpu()
    return [
        all(
            row[token.index, token.correct_id] > row[token.index, list(token.wrong_ids)].max()
            for token in tokens
        )
        for row, question in zip(logits, questions, strict=True)
        for tokens in question.answers
    ]
