"""Predictions at positions of long texts, under each cache against the unquantised one."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from hf_fp8kv.cache.cache import FP8PagedCache
from hf_fp8kv.calibration.divergence import (
    UNQUANTISED,
    Scores,
    compute_logits,
    compute_scores,
    log_probabilities,
)
from hf_fp8kv.formats import LayerPlan

from ..shared import summarize_texts
from .caches import Row
from .fill import Prefix

ALL_KINDS = "all"
YARDSTICK = Row(UNQUANTISED, lambda model: DynamicCache(config=model.config))
# By position and cache.
TextScores = dict[tuple[int, str], Scores]


def score_text(
    model: PreTrainedModel,
    ids: torch.Tensor,
    rows: Mapping[str, Row],
    *,
    positions: Sequence[int],
    scored: int,
    on_call: Callable[[str, int], None] | None = None,
    plans: Mapping[str, Counter[LayerPlan]] | None = None,
) -> TextScores:
    """Score a text before each of the positions, under each cache.

    The last `scored` tokens before a position are one call, which reads what the cache stores of
    all tokens before them; these were one call on an empty cache, with `prefill="exact"`.

    Args:
        model: in the attention to measure.
        ids: `[1, N]`, int64, on the model's device; N is at least the last position.
        rows: the caches.
        positions: in tokens, each above `scored`.
        scored: tokens.
        on_call: called with a cache's name and the tokens that the model has read for it.
        plans: where to count how each cache of this package has stored its layers.
    """
    prefix = Prefix(model, ids[:, : max(positions) - scored])
    if on_call is not None:
        on_call(UNQUANTISED, max(positions) - scored)
    scores: TextScores = {}
    for position in positions:
        start = position - scored
        known = ids[:, start + 1 : position]
        expected: torch.Tensor | None = None
        for name, row in {UNQUANTISED: YARDSTICK, **rows}.items():
            cache = prefix.fill(row, start)
            logits = compute_logits(model, ids[:, start:position], cache, {}, scored=True)
            log_p = log_probabilities(logits)
            expected = log_p if expected is None else expected
            scores[position, name] = compute_scores(expected, log_p, known)
            if plans is not None and isinstance(cache, FP8PagedCache):
                plans[name].update(cache.plan.values())
            if on_call is not None:
                on_call(name, scored)
    return scores


def count_tokens(rows: Mapping[str, Row], positions: Sequence[int], scored: int) -> int:
    """Return the tokens that `score_text` reports."""
    return max(positions) - scored + len(positions) * scored * (len(rows) + 1)


def summarize_predictions(
    by_kind: Mapping[str, Sequence[TextScores]], names: Sequence[str], positions: Sequence[int]
) -> list[dict[str, Any]]:
    """Return a row for each cache, position and kind of text, and for all kinds together.

    Kinds without texts have no rows.
    """
    kinds = {ALL_KINDS: [text for texts in by_kind.values() for text in texts], **by_kind}
    return [
        {
            "cache": name,
            "position": position,
            "kind": kind,
            **summarize_texts([scores[position, name] for scores in texts]),
        }
        for name in names
        for position in positions
        for kind, texts in kinds.items()
        if texts
    ]
