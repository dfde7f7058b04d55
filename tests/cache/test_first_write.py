"""What waits for its queries: what they are shown with, and what is stored in the end."""

from typing import Any

import pytest
import torch

from hf_fp8kv import FP8PagedCache
from hf_fp8kv.cache import choice, first_write
from hf_fp8kv.cache.first_write import show_queries
from hf_fp8kv.formats import LayerPlan
from tests.helpers.tiny_models import tiny

pytestmark = pytest.mark.text

SAFE = LayerPlan.parse("fp8_e3m4 centered", "fp8_e3m4")
TOKENS, WINDOW = 60, 20


def model_with_windows() -> Any:
    """Layers with a window and without, of other RoPE, and logits with a scale of their own."""
    model, _ = tiny("gemma3_text", attn_implementation="fp8_paged", sliding_window=WINDOW)
    return model


def tokens(batch: int = 1) -> torch.Tensor:
    return torch.randint(4, 90, (batch, TOKENS), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def test_layers_with_a_window_keep_their_last_tokens() -> None:
    model, ids = model_with_windows(), tokens()
    chosen, exact = (FP8PagedCache(model.config, page_size=8, dtype=x) for x in (None, "auto"))
    for cache in (chosen, exact):
        model(ids, past_key_values=cache)
    assert {layer.sliding_window for layer in chosen.paged_layers} == {None, WINDOW}
    for layer, other in zip(chosen.paged_layers, exact.paged_layers, strict=True):
        assert layer.storage != SAFE
        for stored, expected in ((layer.keys, other.keys), (layer.values, other.values)):
            assert stored is not None
            dense, right = stored.dense(), expected.dense()  # type: ignore[union-attr]
            assert dense.shape == right.shape
            assert (dense - right).norm() < 0.02 * right.norm()


@torch.no_grad()
def test_a_choice_is_told_of_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text without padding and its center, the scale of the logits, window and turns."""
    seen: list[tuple[Any, ...]] = []

    def choose(*args: Any) -> None:
        seen.append(args)

    monkeypatch.setattr(first_write, "choose_plan", choose)
    model, ids = model_with_windows(), tokens(2)
    mask = torch.ones_like(ids)
    mask[0, :50], mask[1, :4] = 0, 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    alone, batch = FP8PagedCache(model.config), FP8PagedCache(model.config)
    model(ids[1:, 4:], past_key_values=alone)
    model(ids, attention_mask=mask, position_ids=positions, past_key_values=batch)
    layers = alone.paged_layers
    assert len(seen) == 2 * len(layers)
    for layer, one, other in zip(layers, seen, seen[len(layers) :], strict=False):
        for x, padded in zip(one[:3], other[:3], strict=True):
            torch.testing.assert_close(padded[:, 4:], x, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(other[3], one[3], rtol=1e-4, atol=1e-4)
        assert one[4:8] == other[4:8]
        plans, scaling, window, turns = one[4:8]
        assert plans == (layer.options.k_plans, layer.options.v_plans)
        assert scaling == model.config.query_pre_attn_scalar**-0.5 != layer.pool.k_dim**-0.5
        assert window == layer.sliding_window
        assert turns == layer.turns
        assert one[8] is None
        assert other[8].tolist() == list(range(4, TOKENS))


def test_autocast_does_not_change_a_choice() -> None:
    """In bfloat16 logits of hundreds would be off by some, and the weights by a factor."""
    chance = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, TOKENS, 16, generator=chance) for heads in (4, 2, 2))
    q, k = 10 * q, k + 100 * torch.randn(1, 2, 1, 16, generator=chance)
    seen: list[Any] = []

    def choose(*args: Any) -> LayerPlan | None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(choice, "_cheapest", lambda plans, costs: seen.append(costs) or plans[0])
            return choice.choose_plan(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_write, "choose_plan", choose)
        for enabled in (False, True):
            cache = FP8PagedCache(tiny("gqa")[0].config, page_size=8)
            given, _ = cache.update(k, v, 0)
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                show_queries(q, given, 0.25)
    assert seen[:2] == seen[2:]


@pytest.mark.parametrize("way", ["these", "other keys", "other queries"])
def test_only_the_queries_of_these_keys_count(way: str) -> None:
    chance = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, TOKENS, 16, generator=chance) for heads in (4, 2, 2))
    config = tiny("gqa")[0].config
    cache = FP8PagedCache(config, page_size=8)
    given, _ = cache.update(k, v, 0)
    asked = q[:, :, 1:] if way == "other queries" else q
    show_queries(asked, given.clone() if way == "other keys" else given, 0.25)
    assert (cache.plan[0] == SAFE) == (way != "these")
    layer = cache.paged_layers[0]
    assert layer.keys is not None
    torch.testing.assert_close(layer.keys.dense(), k, rtol=0.05, atol=0.05)
