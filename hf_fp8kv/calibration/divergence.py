"""Measure how far a model's predictions with a cache diverge from its unquantized predictions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import ConfigError
from ..modeling.exact_states import exact_states
from ..modeling.model_support import accepts_argument, with_cache

_SLICE_TOKENS = 8  # number of tokens whose logits are compared together


@dataclass(frozen=True)
class Scores:
    """The divergence at each scored token, float64 on the CPU."""

    kl: Tensor  # [n]
    top1_match: Tensor  # [n], 1 if the most likely next token is the same, otherwise 0
    nll: Tensor  # [m], negative log-likelihood of the next token, if the text has one
    # [n], total variation of the two distributions. It bounds how much less often a draft token is
    # accepted.
    total_variation: Tensor

    @classmethod
    def concat(cls, scores: Sequence["Scores"]) -> "Scores":
        """Concatenate the scores of several chunks or texts."""
        return cls(
            kl=torch.cat([part.kl for part in scores]),
            top1_match=torch.cat([part.top1_match for part in scores]),
            nll=torch.cat([part.nll for part in scores]),
            total_variation=torch.cat([part.total_variation for part in scores]),
        )


@torch.no_grad()
def compute_logits(model: PreTrainedModel, ids: Tensor, cache: Any, *, scored: bool) -> Tensor:
    """Return the logits of the tokens `ids`, `[B, T, vocabulary]`.

    `ids` is `[B, T]`, int64, the tokens after the tokens in the cache. Without `scored`, the logits
    may be of the last token only. With `scored`, a model that omits logits raises ConfigError.
    """
    logit_kwargs = {} if scored else make_last_logit_kwargs(model)
    with exact_states():  # needed even for the unquantized cache
        logits: Tensor = model(input_ids=ids, **with_cache(model, cache), **logit_kwargs).logits
    if scored and logits.shape[1] != ids.shape[1]:
        raise ConfigError(
            f"model: expected logits of {ids.shape[1]} tokens, got {logits.shape[1]} from "
            f"{type(model).__name__}, whose predictions cannot be compared"
        )
    return logits


def compute_scores(expected: Tensor, logits: Tensor, next_ids: Tensor) -> Scores:
    """Return the scores of one chunk.

    The divergence is computed from the differences of logits after subtracting their mean. In
    float32 the difference of two log-probabilities would cancel most digits of a small divergence.

    Args:
        expected: Logits with the unquantized cache, `[B, T, vocabulary]`.
        logits: Logits with the cache, in the same shape.
        next_ids: Next tokens of the text, `[B, T or T - 1]`, int64.
    """
    # Temporary tensors of a few tokens stay in a CPU's caches, which cuts the time to a third.
    slice_scores = map(
        _compare_logits, expected.split(_SLICE_TOKENS, 1), logits.split(_SLICE_TOKENS, 1)
    )
    kl, top1_match, logsumexp, total_variation = (
        torch.cat(slices, 1) for slices in zip(*slice_scores, strict=True)
    )
    num_next = next_ids.shape[1]
    next_logits = logits[:, :num_next].gather(-1, next_ids[..., None].to(logits.device))[..., 0]
    nll = logsumexp[:, :num_next] - next_logits
    return Scores(
        *(score.flatten().double().cpu() for score in (kl, top1_match, nll, total_variation))
    )


def _compare_logits(expected: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
    """Return the divergence, equality of the argmax, logsumexp of `logits`, and total variation.

    Each is `[B, T]`.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    expected, logits = expected.to(dtype), logits.to(dtype)
    # KL = log(sum(p * exp(d - mean))), with p the expected probabilities, d the differences of the
    # logits, and mean = sum(p * d). The logarithms of both sums of exponentials cancel.
    p = expected.softmax(-1)
    # A token with an expected logit of -inf adds nothing here. `scaled_p` adds its probability.
    logit_diff = torch.where(p > 0, logits - expected, 0.0)
    mean = (p * logit_diff).sum(-1, keepdim=True)
    scaled_p = (logits - expected.logsumexp(-1, keepdim=True) - mean).exp()
    kl = torch.where(p > 0, p * (logit_diff - mean).expm1(), scaled_p).sum(-1).log1p().clamp(min=0)
    kl = torch.where(mean[..., 0].isfinite(), kl, math.inf)
    total_variation = (p - logits.softmax(-1)).abs().sum(-1) / 2
    return kl, expected.argmax(-1) == logits.argmax(-1), logits.logsumexp(-1), total_variation


def make_last_logit_kwargs(model: PreTrainedModel) -> dict[str, int]:
    """Return a keyword argument for logits of the last token only, if the model accepts it."""
    return {"logits_to_keep": 1} if accepts_argument(type(model), "logits_to_keep") else {}
