"""Compare the predictions of a model under several caches."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_fp8kv.calibration.divergence import Scores, compute_logits, compute_scores
from hf_fp8kv.errors import ConfigError

UNQUANTIZED = "unquantized"


def compare_caches(
    model: PreTrainedModel,
    ids: Tensor,
    factories: Mapping[str, Callable[[], Any]],
    *,
    num_prefill: int = 512,
    chunk_size: int = 32,
) -> dict[str, Scores]:
    """Return the scores of each cache by name, relative to `DynamicCache`, named `UNQUANTIZED`.

    Each chunk is scored under all caches before the next chunk, so only its logits are in memory.

    Args:
        model: A decoder, with the attention implementation to measure.
        ids: Token ids of the texts, `[B, N]`, int64, on the model's device, N > `num_prefill`.
        factories: Functions that make an empty cache, by name.
        num_prefill: Number of tokens that the first call reads on an empty cache, without scores.
        chunk_size: Number of tokens that each later call scores. It attends to all stored tokens.

    Raises:
        ConfigError: `ids` has no token to score, or the model does not return logits of each token.
    """
    if ids.ndim != 2 or ids.shape[1] <= num_prefill:
        rule = f"[B, N] with N > num_prefill={num_prefill}"
        raise ConfigError(f"ids: expected {rule}, got {tuple(ids.shape)}")
    caches: dict[str, Any] = {UNQUANTIZED: DynamicCache(config=model.config)}
    caches |= {name: make_cache() for name, make_cache in factories.items()}
    scores: dict[str, list[Scores]] = {name: [] for name in caches}
    shifted_ids = ids.roll(-1, dims=1)
    start = 0
    chunks = ids[:, num_prefill:].split(chunk_size, dim=1)
    for chunk_ids in (ids[:, :num_prefill], *chunks):
        stop = start + chunk_ids.shape[1]
        expected: Tensor | None = None
        for name, cache in caches.items():
            logits = compute_logits(model, chunk_ids, cache, scored=start > 0)
            if start == 0:
                continue
            expected = logits if expected is None else expected
            next_ids = shifted_ids[:, start : min(stop, ids.shape[1] - 1)]
            scores[name].append(compute_scores(expected, logits, next_ids))
        start = stop
    return {name: Scores.concat(chunk_scores) for name, chunk_scores in scores.items()}
