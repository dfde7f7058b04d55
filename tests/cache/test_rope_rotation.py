"""Tests of the RoPE rotation of keys, and of the centers of rotated keys."""

import dataclasses
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers.models.glm import modeling_glm

from hf_fp8kv import FP8PagedCache
from hf_fp8kv.cache.rope_rotation import NO_ROPE, RopeRotation
from tests.cache.public import read_centers
from tests.helpers.tiny_models import build_model, make_causal_config

pytestmark = pytest.mark.text

DISTANCE = 37
# Changes of the tiny configs, by model type.
MODEL_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},  # rotates the halves of a head
    "cohere": {},  # rotates neighboring channels
    "llama4_text": {},  # rotates complex numbers
    "glm": {},  # rotates neighboring channels in a part of a head
    "gpt_neox": {},  # rotates halves of a part of a head
    "gemma3_text": {},  # has a theta for each type of layer
    "gemma4_text": {},  # rotates only some pairs in layers with full attention
    "deepseek_v3": {"kv_lora_rank": 24},  # caches the latents of MLA
    "cohere2": {},  # these models have layers without RoPE
    "exaone4": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "granitemoehybrid": {},
}

make_rotation_lookup = RopeRotation.from_config


def rotate_keys(rope: RopeRotation, x: torch.Tensor, distance: int) -> torch.Tensor:
    """Return float32 keys, `[..., D]`, rotated by `distance` positions."""
    dim = x.shape[-1]
    start, num_rotated = rope.mla_dims or (0, int(dim * rope.paired_fraction))
    if start + num_rotated > dim or (rope.mla_dims and start + num_rotated != dim):
        return x  # latents
    num_pairs = num_rotated // 2
    pair_indices = torch.arange(num_pairs)
    frequencies = rope.theta ** -(pair_indices / max(num_pairs, 1))  # in radians per position
    frequencies = frequencies.where(pair_indices < int(num_pairs * rope.rotating_fraction), 0.0)
    cos, sin = (frequencies.double() * distance).float().cos(), (frequencies * distance).sin()
    shape, axis = ((num_pairs, 2), -1) if rope.interleaved else ((2, num_pairs), -2)
    stop = start + 2 * num_pairs
    x0, x1 = x[..., start:stop].unflatten(-1, shape).unbind(axis)
    rotated = torch.stack([x0 * cos - x1 * sin, x0 * sin + x1 * cos], axis).flatten(-2)
    return torch.cat([x[..., :start], rotated, x[..., stop:]], -1)


@pytest.mark.parametrize("name", MODEL_CONFIGS)
@torch.no_grad()
def test_keys_rotate_as_in_the_model(name: str) -> None:
    model, inputs = build_model(name, **MODEL_CONFIGS[name])
    ids = inputs["input_ids"][:1, -8:]
    caches = []
    for start in (0, DISTANCE):
        caches.append(FP8PagedCache(model.config, dtype="auto"))
        position_ids = torch.arange(start, start + ids.shape[1])[None]
        model(ids, position_ids=position_ids, past_key_values=caches[-1])
    for layer, shifted_layer in zip(*(cache.paged_layers for cache in caches), strict=True):
        keys, expected = (x.keys.dense()[:, :, :8].float() for x in (layer, shifted_layer))
        rope = make_rotation_lookup(model.config)(layer.index)
        keys = rotate_keys(rope, keys, DISTANCE)
        torch.testing.assert_close(keys, expected, rtol=1e-3, atol=1e-4)


def test_complex_numbers_are_interleaved() -> None:
    model, _ = build_model("deepseek_v2")  # this model ignores position_ids
    assert make_rotation_lookup(model.config)(0).interleaved


def test_layers_without_rope_do_not_rotate() -> None:
    assert make_rotation_lookup(make_causal_config("gpt2"))(0) == NO_ROPE
    smollm3 = make_causal_config("smollm3", no_rope_layers=[1, 0])
    assert [make_rotation_lookup(smollm3)(index) == NO_ROPE for index in (0, 1)] == [False, True]
    for position_type, uses_rope in ((None, False), ("rope", True)):
        granite = make_causal_config("granitemoehybrid", position_embedding_type=position_type)
        assert (make_rotation_lookup(granite)(1) != NO_ROPE) == uses_rope
    cohere2 = make_causal_config("cohere2")
    rotations = map(make_rotation_lookup(cohere2), range(len(cohere2.layer_types)))
    lacks_rope = [rotation == NO_ROPE for rotation in rotations]
    has_full_attention = [layer_type == "full_attention" for layer_type in cohere2.layer_types]
    assert lacks_rope == has_full_attention


@pytest.mark.parametrize(
    "rope",
    [
        RopeRotation(10000.0, max_positions=600),
        RopeRotation(500.0, interleaved=True, max_positions=600),
        RopeRotation(10000.0, paired_fraction=0.5, max_positions=600),
        RopeRotation(10000.0, rotating_fraction=0.5, max_positions=600),
        RopeRotation(10000.0, mla_dims=(10, 6), max_positions=600),
    ],
    ids=str,
)
def test_an_averaged_center_is_the_mean_over_positions(rope: RopeRotation) -> None:
    center = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
    mean = sum(rotate_keys(rope, center, position) for position in range(-300, 301)) / 601
    torch.testing.assert_close(rope.average(center), mean, rtol=0, atol=0.01)
    wide_average = dataclasses.replace(rope, max_positions=1 << 20).average(center)
    assert (wide_average.abs() <= center.abs()).all()
    assert (wide_average - rope.average(center)).abs().max() > 0.05


def test_a_center_keeps_channels_that_hardly_rotate() -> None:
    """Caches center slow pairs of channels, and channels that do not rotate."""
    config = make_causal_config("gpt_neox", max_position_embeddings=65536)
    cache = FP8PagedCache(config, plan="fp8 centered")
    k = 20 + torch.randn(1, 2, 40, 16, generator=torch.Generator().manual_seed(0))
    cache.update(k, k, 0)
    rope, mean = make_rotation_lookup(config)(0), k[:, :, -32:].mean(2)
    center = read_centers(cache)
    torch.testing.assert_close(center, rope.average(mean))
    assert center[..., 0].abs().max() < 0.1
    torch.testing.assert_close(center[..., 4:], mean[..., 4:])


def test_rotations_do_not_depend_on_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module is new, because the result for a known module is cached and runs no operation."""
    module = ModuleType("modeling_probe")
    vars(module)["rotate_half"] = modeling_glm.rotate_half
    monkeypatch.setitem(sys.modules, module.__name__, module)
    config = make_causal_config("glm")
    config.__class__ = type("Probe", (type(config),), {"__module__": "configuration_probe"})
    with torch.device("meta"):
        rope = make_rotation_lookup(config)(0)
    assert rope.interleaved
