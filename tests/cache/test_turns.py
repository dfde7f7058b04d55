"""The rotation of keys by RoPE, and the center of rotated keys."""

import dataclasses
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers.models.glm import modeling_glm

from hf_fp8kv import FP8PagedCache
from hf_fp8kv.cache.turns import STILL, Turns
from tests.cache.public import read_centers
from tests.helpers.tiny_models import build, causal_config

pytestmark = pytest.mark.text

DISTANCE = 37
# Kinds of RoPE: halves, neighbors (also as complex numbers), a part of the head, one base for each
# type of layer, the latents of MLA, and layers without RoPE.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {}, "cohere": {}, "glm": {}, "gpt_neox": {}, "gemma3_text": {}, "gemma4_text": {},
    "deepseek_v3": {"kv_lora_rank": 24}, "cohere2": {}, "exaone4": {},
    "smollm3": {"no_rope_layers": [1, 0]}, "llama4_text": {}, "granitemoehybrid": {},
}  # fmt: skip


def turn_keys(turns: Turns, x: torch.Tensor, positions: int) -> torch.Tensor:
    """Return float32 keys, `[..., D]`, moved by a number of positions."""
    dim = x.shape[-1]
    before, turned = turns.mla or (0, int(dim * turns.share))
    if before + turned > dim or (turns.mla and before + turned != dim):
        return x  # latents
    pairs = turned // 2
    pair = torch.arange(pairs)
    speeds = (turns.base ** -(pair / max(pairs, 1))).where(pair < int(pairs * turns.moving), 0.0)
    cos, sin = (speeds.double() * positions).float().cos(), (speeds * positions).sin()
    part = x[..., before : before + 2 * pairs]
    axis = -1 if turns.neighbors else -2
    a, b = part.unflatten(-1, (pairs, 2) if turns.neighbors else (2, pairs)).unbind(axis)
    part = torch.stack([a * cos - b * sin, a * sin + b * cos], axis).flatten(-2)
    return torch.cat([x[..., :before], part, x[..., before + 2 * pairs :]], -1)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_keys_turn_as_in_the_model(name: str) -> None:
    model, inputs = build(name, **MODELS[name])
    ids = inputs["input_ids"][:1, -8:]
    caches = []
    for start in (0, DISTANCE):
        caches.append(FP8PagedCache(model.config, dtype="auto"))
        position_ids = torch.arange(start, start + ids.shape[1])[None]
        model(ids, position_ids=position_ids, past_key_values=caches[-1])
    for near, far in zip(*(cache.paged_layers for cache in caches), strict=True):
        keys, expected = (layer.keys.dense()[:, :, :8].float() for layer in (near, far))
        turns = Turns.of(model.config)(near.index)
        assert turns is not None
        keys = turn_keys(turns, keys, DISTANCE)
        torch.testing.assert_close(keys, expected, rtol=1e-3, atol=1e-4)


def test_complex_numbers_are_neighbors() -> None:
    model, _ = build("deepseek_v2")  # this model ignores position_ids
    turns = Turns.of(model.config)(0)
    assert turns is not None
    assert turns.neighbors


def test_layers_without_rope_do_not_turn() -> None:
    assert Turns.of(causal_config("gpt2"))(0) == STILL
    smollm3 = causal_config("smollm3", no_rope_layers=[1, 0])
    assert [Turns.of(smollm3)(index) == STILL for index in (0, 1)] == [False, True]
    granite = [causal_config("granitemoehybrid", position_embedding_type=x) for x in (None, "rope")]
    assert [Turns.of(config)(1) == STILL for config in granite] == [True, False]
    cohere2 = causal_config("cohere2")
    results = [Turns.of(cohere2)(index) == STILL for index in range(len(cohere2.layer_types))]
    assert results == [kind == "full_attention" for kind in cohere2.layer_types]


@pytest.mark.parametrize(
    "turns",
    [
        Turns(10000.0, positions=600),
        Turns(500.0, neighbors=True, positions=600),
        Turns(10000.0, share=0.5, positions=600),
        Turns(10000.0, moving=0.5, positions=600),
        Turns(10000.0, mla=(10, 6), positions=600),
    ],
    ids=str,
)
def test_a_steady_center_is_the_mean_over_positions(turns: Turns) -> None:
    center = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
    mean = sum(turn_keys(turns, center, at) for at in range(-300, 301)) / 601
    torch.testing.assert_close(turns.steady(center), mean, rtol=0, atol=0.01)
    far = dataclasses.replace(turns, positions=1 << 20).steady(center)
    assert (far.abs() <= center.abs()).all()
    assert (far - turns.steady(center)).abs().max() > 0.05


def test_a_center_keeps_channels_that_hardly_turn() -> None:
    """Caches center slow pairs of channels, and channels that do not turn."""
    config = causal_config("gpt_neox", max_position_embeddings=65536)
    cache = FP8PagedCache(config, plan="fp8 centered")
    k = 20 + torch.randn(1, 2, 40, 16, generator=torch.Generator().manual_seed(0))
    cache.update(k, k, 0)
    turns, mean = Turns.of(config)(0), k[:, :, -32:].mean(2)
    assert turns is not None
    center = read_centers(cache)
    torch.testing.assert_close(center, turns.steady(mean))
    assert center[..., 0].abs().max() < 0.1
    torch.testing.assert_close(center[..., 4:], mean[..., 4:])


def test_turns_do_not_depend_on_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """No earlier test has inspected this model code, which turns channels 2i and 2i + 1."""
    module = ModuleType("modeling_probe")
    vars(module)["rotate_half"] = modeling_glm.rotate_half
    monkeypatch.setitem(sys.modules, module.__name__, module)
    config = causal_config("glm")
    config.__class__ = type("Probe", (type(config),), {"__module__": "configuration_probe"})
    with torch.device("meta"):
        turns = Turns.of(config)(0)
    assert turns is not None
    assert turns.neighbors
