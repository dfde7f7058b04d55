"""Compare predictions after long texts with predictions of the unquantized cache.

With `prefill="exact"`, the first call attends to its own unquantized keys and values, so it passes
the same states to every cache. Therefore the prompt is computed once, with an unquantized cache.
All other caches store the recorded states by `update`, layer by layer, as in a call of the model.
With `prefill="stored"`, states depend on the cache, so each cache needs a call on the whole prompt.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from ..calibration.divergence import Scores, compute_logits, compute_scores
from ..errors import ConfigError
from .caches import UNQUANTIZED, Contender, KeysAndValues

# States that a prompt attends to, as in `FP8PagedCache`.
EXACT = "exact"
STORED = "stored"


def record_states(model: PreTrainedModel, ids: torch.Tensor) -> list[KeysAndValues]:
    """Return the keys and values of each layer for the tokens `ids`, `[B, N]`, int64.

    The model is a decoder of attention layers. Layers with a window also return all N tokens.
    """
    recorded_cache = DynamicCache()  # without a config, no layer has a window
    compute_logits(model, ids, recorded_cache, scored=False)
    layers: list[Any] = recorded_cache.layers
    return [(layer.keys, layer.values) for layer in layers]


def score_text(
    model: PreTrainedModel,
    ids: torch.Tensor,
    states: list[KeysAndValues],
    contenders: Mapping[str, Contender],
    *,
    positions: Sequence[int],
    num_scored: int,
    stored_positions: Collection[int] = (),
) -> Iterator[tuple[tuple[int, str, str], Scores]]:
    """Yield the scores of the last `num_scored` tokens before each position.

    The key of scores is the position, `EXACT` or `STORED`, and the name of the cache. One call
    reads the scored tokens. It attends to the stored states of all earlier tokens. An exact prompt
    is one call that attends to its unrounded states. A stored prompt attends only to stored states,
    as in chunks, engines, prefix stores and training. It has no scores for caches that refuse it.

    Args:
        model: The model, with the attention implementation to measure.
        ids: Tokens, `[1, N]`, int64, on the model's device. N is at least the last position.
        states: Keys and values of the text, by layer, with at least N - `num_scored` tokens.
        contenders: The caches by name.
        positions: Positions in the text, each greater than `num_scored`.
        num_scored: Number of scored tokens before each position.
        stored_positions: The positions at which stored prompts are also scored.

    Raises:
        ConfigError: The logits with the unquantized cache have NaN.
    """
    for position in positions:
        start = position - num_scored
        scored_ids = ids[:, start:position]
        next_ids = ids[:, start + 1 : position]
        unquantized_cache = UNQUANTIZED.fill(model, states, start)
        expected_logits = compute_logits(model, scored_ids, unquantized_cache, scored=True)
        if torch.isnan(expected_logits).any():
            raise ConfigError(
                f"model: expected logits other than NaN, got NaN from {type(model).__name__}. "
                "Load it in another dtype, or check its weights"
            )
        for name, contender in contenders.items():
            caches = {EXACT: contender.fill(model, states, start)}
            if position in stored_positions:
                stored_cache = contender.make_stored(model)
                if stored_cache is not None:
                    compute_logits(model, ids[:, :start], stored_cache, scored=False)
                    caches[STORED] = stored_cache
            for prefill, cache in caches.items():
                logits = compute_logits(model, scored_ids, cache, scored=True)
                yield (position, prefill, name), compute_scores(expected_logits, logits, next_ids)
