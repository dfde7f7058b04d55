"""Outliers that are planted in K: the model computes the same, and what stores K sees them."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch

from benchmarks.long import predictions
from benchmarks.long.caches import ROWS
from benchmarks.long.outliers import planted_outliers
from hf_fp8kv.attention.switching import paged_attention
from hf_fp8kv.errors import ConfigError
from tests.helpers.tiny_models import tiny

FACTOR = 50.0


def run(model: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits, and what each layer's `k_proj` says, `[T, Hkv, D]`."""
    keys: list[torch.Tensor] = []
    handles = [
        layer.self_attn.k_proj.register_forward_hook(lambda module, args, out: keys.append(out[0]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        logits = model(input_ids=torch.arange(4, 44)[None]).logits
    for handle in handles:
        handle.remove()
    return logits, [k.unflatten(-1, (-1, 16)) for k in keys]


# A bias of K grows, too; pairs of neighbors; pairs in a part of the head.
@pytest.mark.parametrize("name", ["llama", "qwen2", "cohere", "glm"])
@pytest.mark.parametrize("every", [1, 2])
def test_the_model_computes_the_same(name: str, every: int) -> None:
    model, _ = tiny(name, num_hidden_layers=2)
    weights = copy.deepcopy(model.state_dict())
    logits, keys = run(model)
    with planted_outliers(model, FACTOR, every):
        planted_logits, planted = run(model)
    torch.testing.assert_close(planted_logits, logits, rtol=1e-4, atol=1e-4)
    for layer, (before, after) in enumerate(zip(keys, planted, strict=True)):
        grown = (after / before).abs().amin(0) > FACTOR / 2
        assert not (grown ^ ((after / before).abs().amax(0) > FACTOR / 2)).any()
        by_head = grown.sum(-1).tolist()
        for head, channels in enumerate(by_head):
            assert channels in ((2, 4) if (head - layer) % every == 0 else (0,)), by_head
    for key, weight in model.state_dict().items():
        assert torch.equal(weight, weights[key]), key


def test_weights_come_back_after_an_error() -> None:
    model, _ = tiny("llama")
    weights = copy.deepcopy(model.state_dict())
    with pytest.raises(KeyboardInterrupt), planted_outliers(model, FACTOR):
        raise KeyboardInterrupt
    for key, weight in model.state_dict().items():
        assert torch.equal(weight, weights[key]), key


def test_rotation_is_ruinous_and_is_not_chosen() -> None:
    model, _ = tiny("llama", num_hidden_layers=2, head_dim=64, max_position_embeddings=4096)
    ids = torch.randint(4, 90, (1, 300), generator=torch.Generator().manual_seed(0))
    rows = {name: ROWS[name] for name in ("default", "e3m4", "e2m5-rotated")}
    kl, rotated = {}, {}
    for factor in (None, FACTOR):
        plans: dict[str, Any] = {name: Counter() for name in rows}
        with planted_outliers(model, factor), paged_attention(model):
            scores = predictions.score_text(
                model, ids, rows, positions=[300], scored=100, plans=plans
            )
        kl[factor] = {name: scores[300, name].quality.kl for name in rows}
        rotated[factor] = sum(plan.k.rotated for plan in plans["default"].elements())
    assert rotated == {None: 2, FACTOR: 0}
    assert kl[None]["e2m5-rotated"] < kl[None]["e3m4"]
    assert kl[FACTOR]["e2m5-rotated"] > 3 * kl[FACTOR]["default"]


# Norms of K after k_proj; all projections in one; no RoPE.
@pytest.mark.parametrize("name", ["qwen3", "phi3", "opt"])
def test_models_that_cannot_have_outliers_are_refused(name: str) -> None:
    model, _ = tiny(name)
    weights = copy.deepcopy(model.state_dict())
    with (
        pytest.raises(ConfigError, match=r"outliers: expected q_proj and k_proj.*; leave"),
        planted_outliers(model, FACTOR),
    ):
        raise AssertionError
    for key, weight in model.state_dict().items():
        assert torch.equal(weight, weights[key]), key


def test_heads_without_outliers() -> None:
    model, _ = tiny("llama")
    with (
        pytest.raises(ConfigError, match="outlier_heads: expected outliers"),
        planted_outliers(model, None, 2),
    ):
        raise AssertionError
