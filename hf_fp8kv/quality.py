"""How far a cache moves a model's predictions: KL and top-1 against the unquantised cache."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from .errors import ConfigError

__all__ = ["Quality", "compare"]


@dataclass(frozen=True)
class Quality:
    """How far one cache is from the unquantised one, on the same text.

    Attributes:
        kl: mean KL divergence from the unquantised cache's next-token distribution, in nats.
        kl_max: the largest at one token.
        top1: share of tokens at which the most likely next token is the same.
        tokens: how many were scored.
    """

    kl: float
    kl_max: float
    top1: float
    tokens: int


def compare(
    model: PreTrainedModel,
    ids: torch.Tensor,
    caches: Mapping[str, Callable[[], Any]],
    *,
    prefill: int = 512,
    chunk: int = 32,
) -> dict[str, Quality]:
    """Scores a text under several caches, and under `DynamicCache`, which is the yardstick.

    The first `prefill` tokens are one call on an empty cache; the rest is scored `chunk` tokens at
    a call, each call reading what the cache stores.

    Args:
        model: a causal language model, in the attention implementation to measure.
        ids: `[B, N]`, the text, on the model's device; N is above `prefill`.
        caches: name -> a function that makes an empty cache.
        prefill: tokens of the first call, not scored.
        chunk: tokens of each later call.
    """
    if ids.ndim != 2 or ids.shape[1] <= prefill:
        raise ConfigError(
            f"ids: expected [B, N] with N > prefill={prefill}, got {tuple(ids.shape)}"
        )
    expected = _log_probabilities(model, ids, DynamicCache(config=model.config), prefill, chunk)
    found = {}
    for name, make in caches.items():
        got = _log_probabilities(model, ids, make(), prefill, chunk)
        kl = (expected.exp() * (expected - got)).sum(-1)
        same = (expected.argmax(-1) == got.argmax(-1)).double()
        found[name] = Quality(kl.mean().item(), kl.max().item(), same.mean().item(), kl.numel())
    return found


@torch.no_grad()
def _log_probabilities(
    model: PreTrainedModel, ids: torch.Tensor, cache: Any, prefill: int, chunk: int
) -> torch.Tensor:
    """`[B, N - prefill, vocabulary]`, float64: of the token after each scored one."""
    model(input_ids=ids[:, :prefill], past_key_values=cache, logits_to_keep=1)
    logits = [
        model(input_ids=part, past_key_values=cache).logits
        for part in ids[:, prefill:].split(chunk, dim=1)
    ]
    return torch.cat(logits, 1).double().log_softmax(-1)
