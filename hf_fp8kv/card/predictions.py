"""Compare predictions after long texts, and stored states, with the unquantized cache.

With `prefill="exact"`, the first call attends to its own unquantized keys and values, so it passes
the same states to every cache. Therefore the prompt is computed once, with an unquantized cache.
All other caches store the recorded states by `update`, layer by layer, as in a call of the model.
With `prefill="stored"`, states depend on the cache, so each cache needs a call on the whole prompt.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel

from ..cache.cache import FP8PagedCache
from ..cache.paged_tensor import densify
from ..calibration.divergence import Scores, compute_logits, compute_scores
from ..errors import ConfigError
from ..scales import KVScales
from .caches import UNQUANTIZED, Contender, States

EXACT, STORED = "exact", "stored"  # states that a prompt attends to, as in `FP8PagedCache`
_LOST_ERROR = 0.5  # relative error from which on a stored token counts as lost
_EPSILON = 1e-30


class Prefill(NamedTuple):
    """The results of one call on an empty cache."""

    states: list[States]  # of each layer, with all tokens of a window layer
    logits: torch.Tensor  # of the last tokens, [B, 1, vocabulary]


def prefill(model: PreTrainedModel, ids: torch.Tensor) -> Prefill:
    """Call a decoder of attention layers on the tokens `ids`, `[B, N]`, int64, on its device."""
    recorded_cache = DynamicCache()  # without a config, no layer has a window
    logits = compute_logits(model, ids, recorded_cache, scored=False)[:, -1:]
    layers: list[Any] = recorded_cache.layers
    return Prefill([(layer.keys, layer.values) for layer in layers], logits)


def score_text(
    model: PreTrainedModel,
    ids: torch.Tensor,
    states: list[States],
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
        exact_cache = UNQUANTIZED.fill(model, states, start)
        exact_logits = compute_logits(model, scored_ids, exact_cache, scored=True)
        if torch.isnan(exact_logits).any():
            raise ConfigError(
                f"model: expected logits other than NaN, got NaN from {type(model).__name__}. "
                "Load it in another dtype, or check its weights"
            )
        for name, contender in contenders.items():
            caches = {EXACT: contender.fill(model, states, start)}
            if position in stored_positions and (cache := contender.make_stored(model)) is not None:
                compute_logits(model, ids[:, :start], cache, scored=False)
                caches[STORED] = cache
            for prompt, cache in caches.items():
                logits = compute_logits(model, scored_ids, cache, scored=True)
                yield (position, prompt, name), compute_scores(exact_logits, logits, next_ids)


def compare_states(
    contender: Contender, model: PreTrainedModel, states: list[States]
) -> dict[str, Any] | None:
    """Compare the states that pages store with the exact states of the model.

    Args:
        contender: The cache.
        model: The model.
        states: Exact keys and values of a text, by layer.

    Returns:
        None for caches other than `FP8PagedCache`, otherwise a dictionary with these entries:

        * `k_error`, `v_error`: largest RMS error of a layer, relative to the RMS of its states.
        * `k_gain`, `v_gain`: factor from exact to stored states, minus 1, of the layer where it is
          farthest from 0.
        * `center`: root of the summed squares of the relative errors of K of all layers, divided by
          the same root without centers.
        * `lost`: positions of tokens whose error is larger than half of their norm.
    """
    cache = contender.fill(model, states)
    if not isinstance(cache, FP8PagedCache):
        return None
    uncentered_cache = Contender("", partial(_make_uncentered, cache)).fill(model, states)
    extremes: dict[str, Any] = dict.fromkeys(("k_error", "v_error", "k_gain", "v_gain"), 0.0)
    lost_positions: set[int] = set()
    error_power = uncentered_power = 0.0  # sums of squared relative errors
    # The last layers of some models store nothing, because they read an earlier layer.
    layers = zip(cache.layers, uncentered_cache.layers, states, strict=False)
    for layer, uncentered_layer, exact_states in layers:
        for side, stored, exact in zip("kv", (layer.keys, layer.values), exact_states, strict=True):
            num_skipped = exact.shape[2] - stored.shape[2]  # tokens before the layer's window
            exact = exact[:, :, num_skipped:].float()
            error, gain, token_errors = _compare_side(stored, exact)
            extremes[f"{side}_error"] = max(extremes[f"{side}_error"], error)
            extremes[f"{side}_gain"] = max(extremes[f"{side}_gain"], gain, key=abs)
            lost_tokens = (token_errors > _LOST_ERROR).nonzero()
            lost_positions.update(int(n) + num_skipped for n in lost_tokens)
            if side == "k":
                error_power += error**2
                uncentered_power += _compare_side(uncentered_layer.keys, exact)[0] ** 2
    center_error = math.sqrt(error_power / max(uncentered_power, _EPSILON))
    return {**extremes, "center": center_error, "lost": sorted(lost_positions)}


def _make_uncentered(cache: FP8PagedCache, model: PreTrainedModel) -> FP8PagedCache:
    """Return an empty cache with the plan and scales of `cache`, but without centers."""
    plan = {
        index: layer_plan._replace(k=replace(layer_plan.k, centered=False))
        for index, layer_plan in cache.plan.items()
    }
    scales = cache.options.scales
    if not isinstance(scales, KVScales) or scales.is_dynamic:
        constant_scale = None if isinstance(scales, KVScales) else scales
        return FP8PagedCache(model.config, plan=plan, scales=constant_scale)
    layers = {
        index: replace(layer, k_center=None, plan=plan[index])
        for index, layer in scales.layers.items()
    }
    return FP8PagedCache(model.config, scales=replace(scales, layers=layers))


def _compare_side(stored: torch.Tensor, exact: torch.Tensor) -> tuple[float, float, torch.Tensor]:
    """Return the relative RMS error, the gain minus 1, and the relative error of each token."""
    actual = densify(stored).float()
    power = exact.square().sum().clamp(min=_EPSILON)
    error = ((actual - exact).square().sum() / power).sqrt()
    gain = (actual * exact).sum() / power - 1
    distance, norm = (x.square().sum((0, 1, 3)).sqrt() for x in (actual - exact, exact))
    token_errors = distance / norm.clamp(min=_EPSILON)
    return error.item(), gain.item(), token_errors.cpu()
