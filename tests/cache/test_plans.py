"""Tests of scales with a storage plan for each layer, in caches and in files."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_fp8kv import FP8PagedCache, SidePlan, StoragePlan
from hf_fp8kv.errors import ConfigError, ScaleError
from hf_fp8kv.formats import FORMATS, LayerPlan
from hf_fp8kv.formats.codec import compute_dynamic_scale, round_to_format, search_scale
from hf_fp8kv.formats.rotation import rotate
from hf_fp8kv.reproducible.training import StoredRounding
from hf_fp8kv.scales import KVScales, LayerScales
from tests.helpers.assertions import assert_same
from tests.helpers.planned import PLANS, make_cache_keyword, make_planned_scales
from tests.helpers.tiny_models import make_causal_config

NUM_HEADS = 2
HEAD_DIM = 16
NUM_LAYERS = 3
CONFIG = make_causal_config("llama", num_hidden_layers=NUM_LAYERS)


def make_states(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = torch.randn(2, 2, NUM_HEADS, num_tokens, HEAD_DIM)
    return 1.5 * keys, values


def round_by_plan(states: torch.Tensor, layer: LayerScales, side: str) -> torch.Tensor:
    """Return K or V, `[B, H, T, D]`, as a cache with this layer's plan reads it back."""
    plan = getattr(layer.plan, side)
    fmt = FORMATS[plan.format]
    center = layer.k_center[:, None] if plan.centered else 0.0
    states = rotate(states - center) if plan.rotated else states - center
    static_scale = getattr(layer, side)
    if static_scale is not None:
        scale = static_scale[:, None] * fmt.scale_from_e4m3
    elif side == "k":
        scale = search_scale(states, fmt).float()[..., None]
    else:
        scale = compute_dynamic_scale(states, fmt).float()[..., None]
    states = round_to_format(states * scale.reciprocal(), fmt) * scale
    return (rotate(states) if plan.rotated else states) + center


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("options", [{}, {"max_cache_len": 40}], ids=["", "preallocated"])
def test_each_layer_is_stored_by_its_plan(
    backend: str, is_dynamic: bool, options: dict[str, Any]
) -> None:
    scales = make_planned_scales(is_dynamic=is_dynamic)
    options = {**options, **make_cache_keyword(scales)}
    cache = FP8PagedCache(CONFIG, page_size=8, backend=backend, **options)
    assert cache.plan == dict(enumerate(PLANS))
    k, v = make_states(17)
    for index in range(NUM_LAYERS):
        for start, stop in ((0, 9), (9, 16), (16, 17)):
            cache.update(k[:, :, start:stop] + index, v[:, :, start:stop] - index, index)
    for index, layer in enumerate(cache.layers):
        for side, handle, states in (("k", layer.keys, k + index), ("v", layer.values, v - index)):
            expected = round_by_plan(states, scales.layers[index], side)
            # The inverse rotation runs in float32, and may sum in a different order.
            torch.testing.assert_close(handle.dense()[:, :, :17], expected, rtol=0, atol=1e-5)


def test_a_saved_cache_is_refused_as_scales(tmp_path: Path) -> None:
    path = FP8PagedCache(CONFIG).save(tmp_path / "cache.safetensors")
    with pytest.raises(ScaleError, match="expected scales, got a cache of"):
        FP8PagedCache(CONFIG, scales=path)


def test_the_footprint_and_repr_list_the_plans() -> None:
    cache = FP8PagedCache(CONFIG, scales=make_planned_scales(), skip_layers=[1])
    assert cache.memory_footprint().layers_by_plan == {str(PLANS[0]): 1, str(PLANS[2]): 1}
    assert repr(cache) == f"FP8PagedCache(3 layers: 1 x {PLANS[0]}; 1 x {PLANS[2]})"
    fp8_cache = FP8PagedCache(CONFIG, dtype="fp8")
    assert fp8_cache.memory_footprint().layers_by_plan == {"K fp8_e4m3, V fp8_e4m3": 3}


E3M4 = LayerPlan.parse("fp8_e3m4", "fp8_e3m4")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": E3M4, "dtype": "fp8"}, "dtype: expected None, because the plan defines"),
        ({"scales": make_planned_scales(), "key_dtype": "auto"}, "key_dtype: expected None"),
        ({"plan": E3M4, "scales": KVScales.uniform(3)}, "scales: expected None"),
        ({"plan": make_planned_scales(is_dynamic=True), "scales": 1.0}, "scales: expected None"),
        ({"scales": make_planned_scales(is_dynamic=True)}, "Pass it as plan"),
        ({"plan": 7}, "expected a StoragePlan"),
        ({"plan": "no_such_plan"}, "path of a saved plan, or text that begins with one of model"),
        ({"plan": KVScales.uniform(3)}, "got KVScales.* Pass static scales as `scales`"),
        ({"plan": ("int8", "int9")}, "expected one of"),
        ({"plan": {0: E3M4}}, r"got none for layer 1\. Add it"),
        ({"plan": dict.fromkeys(range(5), E3M4)}, r"2, but also got \[3, 4\]\. Leave them"),
        ({"plan": {-1: E3M4}}, r"layers from 0 on, got -1\. Use the keys"),
        ({"plan": {0: "int8"}}, "plan of layer 0: expected a LayerPlan"),
        ({"plan": LayerPlan("int8", "int8")}, "expected a LayerPlan of two SidePlans, got"),
        ({"plan": LayerPlan.parse("int8", "int8 centered")}, r"\. Leave 'centered' out"),
        ({"dtype": "adaptive"}, r"FP8PagedCache\(model\)"),
    ],
    ids=str,
)  # fmt: skip
def test_invalid_plans_of_a_cache_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FP8PagedCache(CONFIG, **options)


def test_invalid_plans_of_a_side_are_refused(tmp_path: Path) -> None:
    invalid_texts: list[Any] = ["", "int9", "int8 turned", "auto rotated", None]
    for text in invalid_texts:
        with pytest.raises(ConfigError, match=r"Write it|expected one of|expected a quantized"):
            SidePlan.parse(text)
    with pytest.raises(ConfigError, match="rotated: expected True or False, got 'rotated'"):
        SidePlan("int8", "rotated")
    make_planned_scales().save_pretrained(tmp_path)
    with pytest.raises(ScaleError, match=r"expected a StoragePlan in .* Pass static scales as"):
        FP8PagedCache(CONFIG, plan=tmp_path)
    with pytest.raises(ScaleError, match="without static scales"):
        StoragePlan(make_planned_scales().layers)


@pytest.mark.parametrize("options", [{}, {"max_cache_len": 64}], ids=str)
def test_scales_and_plans_for_different_layers_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ScaleError, match=r"none for layer 2.*skip_layers"):
        FP8PagedCache(CONFIG, scales=make_planned_scales(2), **options)
    assert FP8PagedCache(CONFIG, scales=make_planned_scales(2), skip_layers=[2], **options).plan
    with pytest.raises(ScaleError, match=r"0 to 2, but also got \[3, 4\]\. Use the scales"):
        FP8PagedCache(CONFIG, scales=make_planned_scales(5), **options)
    with pytest.raises(ScaleError, match=r"^plan \(.*none for layer 2.*Use the plan of this model"):
        FP8PagedCache(CONFIG, plan=make_planned_scales(2, is_dynamic=True), **options)
    # Scales without a plan may name more layers, because checkpoints contain draft layers.
    assert FP8PagedCache(CONFIG, scales=KVScales.uniform(5), **options).plan


PROTECTED_PLANS = (
    LayerPlan.parse("model", "int8 rotated"),
    LayerPlan.parse("model", "model"),
    LayerPlan.parse("fp8_e2m5 rotated centered", "model"),
)


def make_protected_plan() -> StoragePlan:
    """Return a plan with K, K and V, and V of consecutive layers in the model's dtype."""
    center = torch.linspace(-1, 1, NUM_HEADS * HEAD_DIM).view(NUM_HEADS, HEAD_DIM)
    return StoragePlan({
        index: LayerScales(None, None, center if plan.k.centered else None, plan=plan)
        for index, plan in enumerate(PROTECTED_PLANS)
    })  # fmt: skip


@pytest.mark.parametrize("chunk_size", [1, 37, 256])
def test_protected_layers_are_stored_unchanged(tmp_path: Path, chunk_size: int) -> None:
    """Caches, copies, files and training store the same values, whatever the calls."""
    plan = make_protected_plan()
    plan.save_pretrained(tmp_path / "plan")
    cache = FP8PagedCache(CONFIG, plan=tmp_path / "plan", prefill="stored")
    k, v = make_states(61)
    for index in range(NUM_LAYERS):
        for start in range(0, 61, chunk_size):
            chunk = slice(start, start + chunk_size)
            cache.update(k[:, :, chunk], v[:, :, chunk], index)
    copies = [
        cache,
        pickle.loads(pickle.dumps(cache)),
        copy.deepcopy(cache),
        FP8PagedCache.load(cache.save(tmp_path / "cache.safetensors")),
    ]
    for index, layer_scales in plan.layers.items():
        rounding = StoredRounding(cache.options, index, k, v)
        trained_k, trained_v = rounding.read(rounding.store(k, v), k, v)
        for copied_cache in copies:
            layer = copied_cache.layers[index]
            check_side(layer.keys.dense(), trained_k, k, layer_scales, "k")
            check_side(layer.values.dense(), trained_v, v, layer_scales, "v")


def check_side(
    actual: torch.Tensor, trained: torch.Tensor, states: torch.Tensor, layer: LayerScales, side: str
) -> None:
    """Assert that a cache and training stored K or V, `states`, by the plan of a layer."""
    assert_same(actual, trained)
    if getattr(layer.plan, side).is_auto:
        assert_same(actual, states)
    else:
        torch.testing.assert_close(actual, round_by_plan(states, layer, side), rtol=0, atol=1e-5)
