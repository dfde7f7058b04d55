"""Tests of the effect of 8-bit K and V on predictions.

Bounds apply to means over several texts, because a few tokens dominate the mean of one text.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from transformers import DynamicCache, QuantizedCache, cache_utils

from hf_fp8kv import FP8PagedCache
from hf_fp8kv.attention.switching import paged_attention
from tests.helpers.divergence import UNQUANTIZED, compare_caches
from tests.helpers.tiny_models import VOCAB, build_variant

pytestmark = pytest.mark.text


NUM_PREFILL = 128
NUM_SCORED = 64
MAX_KL = {"fp8_e3m4": 8e-4, "fp8_e4m3": 3e-3, "fp8_e5m2": 1.5e-2}


def test_each_mantissa_bit_more_than_halves_the_kl() -> None:
    model, _ = build_variant("llama")
    ids = torch.randint(3, VOCAB, (4, NUM_PREFILL + NUM_SCORED))
    factories = {dtype: partial(FP8PagedCache, model.config, dtype=dtype) for dtype in MAX_KL}
    if hasattr(cache_utils, "Fp8QuantizedLayer"):
        factories["transformers"] = partial(QuantizedCache, backend="fp8", config=model.config)
    with paged_attention(model):
        scores = compare_caches(model, ids, factories, num_prefill=NUM_PREFILL)
    kl = {cache_name: score.kl.mean().item() for cache_name, score in scores.items()}
    assert all(0 < kl[dtype] <= bound for dtype, bound in MAX_KL.items()), kl
    assert kl["fp8_e3m4"] < kl["fp8_e4m3"] / 2 < kl["fp8_e5m2"] / 4
    assert kl["fp8_e4m3"] < kl.get("transformers", math.inf)


@torch.no_grad()
def compute_log_probs(model: Any, chunks: Sequence[torch.Tensor], cache: Any) -> torch.Tensor:
    """Return log-probabilities after each token past the first chunk, `[B, T, vocabulary]`."""
    logits = [model(input_ids=chunk, past_key_values=cache).logits.double() for chunk in chunks]
    return torch.cat(logits[1:], 1).log_softmax(-1)


@pytest.mark.parametrize("chunk_size", [5, 100, pytest.param(1, marks=pytest.mark.full)])
def test_scores_match_the_log_probabilities(chunk_size: int) -> None:
    model, _ = build_variant("llama", attn_implementation="fp8_paged")
    ids = torch.randint(3, VOCAB, (2, 24))
    num_prefill = 8
    scores = compare_caches(
        model, ids, {"fp8": lambda: FP8PagedCache(model.config, scales=0.25)},
        num_prefill=num_prefill, chunk_size=chunk_size,
    )  # fmt: skip
    chunks = [ids[:, :num_prefill], *ids[:, num_prefill:].split(chunk_size, dim=1)]
    expected = compute_log_probs(model, chunks, DynamicCache(config=model.config))
    quantized = compute_log_probs(model, chunks, FP8PagedCache(model.config, scales=0.25))
    for name, log_probs in ((UNQUANTIZED, expected), ("fp8", quantized)):
        actual = scores[name]
        kl = (expected.exp() * (expected - log_probs)).sum(-1)
        assert len(actual.kl) == 2 * (24 - num_prefill)
        assert actual.kl.mean().item() == pytest.approx(kl.mean().item(), rel=1e-3, abs=1e-9)
        assert actual.kl.max().item() == pytest.approx(kl.max().item(), rel=1e-3, abs=1e-9)
        variation = (expected.exp() - log_probs.exp()).abs().sum(-1).mean().item() / 2
        assert actual.total_variation.mean().item() == pytest.approx(variation, rel=1e-3, abs=1e-6)
        is_match = expected.argmax(-1) == log_probs.argmax(-1)
        assert actual.top1_match.mean().item() == pytest.approx(is_match.double().mean().item())
        # The last token has no next token.
        predicted = log_probs[:, :-1].flatten(0, 1)
        nll = torch.nn.functional.cross_entropy(predicted, ids[:, num_prefill + 1 :].flatten())
        assert actual.nll.mean().item() == pytest.approx(nll.item(), rel=1e-3)
    assert scores["fp8"].kl.mean() > 1e-6
