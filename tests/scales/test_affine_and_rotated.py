"""Scales of numbers that were moved or rotated first: ModelOpt's FP8_AFFINE, and rotations of K."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

from hf_fp8kv import FP8PagedCache
from hf_fp8kv.formats import LayerPlan
from hf_fp8kv.formats.rotation import rotate
from hf_fp8kv.scales import KVScales
from tests.helpers.declared import LAYERS, save_plain
from tests.scales.test_sources import refused

ROTATED = LayerPlan.parse("fp8_e4m3 rotated", "fp8_e4m3")
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
IDS = torch.arange(3, 51)[None]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return save_plain(tmp_path_factory.mktemp("checkpoint") / "plain")


def states(folder: Path) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """The logits of a model, and K and V of its layers, `[1, Hkv, T, D]`."""
    cache = DynamicCache()
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(IDS, past_key_values=cache).logits
    return logits, [(layer.keys.float(), layer.values.float()) for layer in cache.layers]


def written(
    plain: Path, folder: Path, block: dict[str, object], tensors: dict[str, torch.Tensor]
) -> Path:
    """A copy of a checkpoint with a quantization config and tensors in each layer."""
    folder.mkdir()
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": block}
    (folder / "config.json").write_text(json.dumps(config))
    named = {f"model.layers.{name}": tensor for name, tensor in tensors.items()}
    save_file(load_file(plain / "model.safetensors") | named, folder / "model.safetensors")
    return folder


def affine(plain: Path, folder: Path, shift: float) -> Path:
    """As ModelOpt exports FP8_AFFINE: scales of K and V without their means, and the means."""
    tensors: dict[str, torch.Tensor] = {}
    for index, pair in enumerate(states(plain)[1]):
        for side, x in zip("kv", pair, strict=True):
            bias = x.mean(2, keepdim=True) + shift
            path = f"{index}.self_attn.{side}_proj.{side}"
            tensors[f"{path}_bias"] = bias.bfloat16()
            tensors[f"{path}_scale"] = (x - bias.bfloat16().float()).abs().max() / 448
    block = {
        "quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*"],
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    }  # fmt: skip
    return written(plain, folder, block, tensors)


@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_biases_move_k_and_make_room_for_v(plain, tmp_path, shift):
    folder = affine(plain, tmp_path / "affine", shift)
    scales, tensors = KVScales.from_pretrained(folder), load_file(folder / "model.safetensors")
    logits, pairs = states(plain)
    for index, (k, v) in enumerate(pairs):
        path, layer = f"model.layers.{index}.self_attn", scales.layers[index]
        assert torch.equal(layer.k_center, tensors[f"{path}.k_proj.k_bias"][0, :, 0].float())
        assert torch.equal(layer.k, tensors[f"{path}.k_proj.k_scale"])
        # Nothing saturates: neither K without its center, nor V as it is.
        assert ((k - layer.k_center[:, None]).abs() <= 448 * layer.k * (1 + 1e-6)).all()
        assert (v.abs() <= 448 * layer.v[:, None] * (1 + 1e-6)).all()
    model = AutoModelForCausalLM.from_pretrained(plain, attn_implementation="fp8_paged")
    with torch.no_grad():
        found = model(IDS, past_key_values=FP8PagedCache(model.config, scales=scales)).logits
    assert (found - logits).norm() < 0.05 * logits.norm()


def test_biases_go_where_scales_are_replaced(plain, tmp_path):
    folder = affine(plain, tmp_path / "affine", 0.0)
    new = KVScales.uniform(LAYERS, 0.5)
    new.save_pretrained(tmp_path / "new", format="modelopt", checkpoint=folder, overwrite=True)
    assert KVScales.from_pretrained(tmp_path / "new").digest == new.digest


def rotation(**changes: object) -> dict[str, object]:
    """The config of a checkpoint whose K LLM Compressor rotates, R3 of SpinQuant."""
    places = [{"targets": ["LlamaAttention"], "location": at} for at in ("q_attn", "k_cache")]
    places = [{"inverse": False, "ignore": [], **place} for place in places]
    scheme = {"type": "hadamard", "apply": places, "randomize": False, "head_dim": 16} | changes
    return {
        "quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME,
        "transform_config": {"config_groups": {"R3": scheme}},
    }  # fmt: skip


def rotated(plain: Path, folder: Path, **changes: object) -> Path:
    tensors = {}
    for index, (k, v) in enumerate(states(plain)[1]):
        for side, x in (("k", rotate(k)), ("v", v)):
            tensors[f"{index}.self_attn.{side}_scale"] = x.abs().max()[None] / 448
    return written(plain, folder, rotation(**changes), tensors)


def test_the_cache_rotates_k_for_scales_of_rotated_k(plain, tmp_path):
    scales = KVScales.from_pretrained(rotated(plain, tmp_path / "rotated"))
    assert scales.plan == dict.fromkeys(range(LAYERS), ROTATED)
    logits, pairs = states(plain)
    for layer, (k, _) in zip(scales.layers.values(), pairs, strict=True):
        assert layer.k.item() == pytest.approx(rotate(k).abs().max().item() / 448)
    model = AutoModelForCausalLM.from_pretrained(plain, attn_implementation="fp8_paged")
    cache = FP8PagedCache(model.config, scales=scales)
    with torch.no_grad():
        found = model(IDS, past_key_values=cache).logits
    assert cache.plan[0] == ROTATED
    assert (found - logits).norm() < 0.05 * logits.norm()
    # They are for nothing else: no server gets them.
    with refused("rotated values in layers 0, 1"):
        scales.save_pretrained(tmp_path / "out", format="compressed-tensors")


@pytest.mark.parametrize("dim", [16, 64, 128])
def test_it_is_the_rotation_of_compressed_tensors(dim):
    utils = pytest.importorskip("compressed_tensors.transform.utils.hadamard")
    matrix = utils.deterministic_hadamard_matrix(dim, torch.float64, torch.device("cpu"))
    x = torch.randn(5, dim)
    torch.testing.assert_close(rotate(x), (x.double() @ matrix / dim**0.5).float())


def test_compressed_tensors_reads_the_config_of_these_tests():
    transform = pytest.importorskip("compressed_tensors.transform")
    config = transform.TransformConfig.model_validate(rotation()["transform_config"])
    assert config.config_groups["R3"].apply[1].location == "k_cache"


K_CACHE = {"targets": ["LlamaAttention"], "location": "k_cache"}


@pytest.mark.parametrize(
    "changes",
    [
        {"type": "random-hadamard"},
        {"type": "random-matrix"},
        {"randomize": True},
        {"head_dim": 8},
        {"head_dim": None},
        {"apply": [K_CACHE | {"ignore": ["model.layers.0.self_attn"]}]},
        {"apply": [K_CACHE | {"targets": r"re:.*layers\.0\.self_attn$"}]},
        {"apply": [K_CACHE | {"targets": ["model.layers.0.self_attn", "Linear"]}]},
        {"apply": [K_CACHE | {"targets": []}]},
    ],
    ids=str,
)
def test_another_rotation_is_refused(plain, tmp_path, changes):
    folder = rotated(plain, tmp_path / "rotated", **changes)
    with refused("K rotated (by type|in blocks)", folder):
        KVScales.from_pretrained(folder)


@pytest.mark.parametrize(
    "targets",
    ["re:.*self_attn$", [f"model.layers.{i}.self_attn" for i in range(LAYERS)], ["LlamaAttention"]],
    ids=str,
)
def test_targets_of_a_rotation_may_be_paths_patterns_and_classes(plain, tmp_path, targets):
    folder = rotated(plain, tmp_path / "rotated", apply=[K_CACHE | {"targets": targets}])
    assert KVScales.from_pretrained(folder).plan == dict.fromkeys(range(LAYERS), ROTATED)


def test_a_pattern_that_is_none_is_our_error(plain, tmp_path):
    folder = rotated(plain, tmp_path / "rotated", apply=[K_CACHE | {"targets": ["re:("]}])
    with refused("expected targets of a rotation, got", folder):
        KVScales.from_pretrained(folder)


def test_k_is_rotated_also_where_the_config_declares_no_cache(plain, tmp_path):
    folder = rotated(plain, tmp_path / "rotated")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]["kv_cache_scheme"]
    (folder / "config.json").write_text(json.dumps(config))
    assert KVScales.from_pretrained(folder).plan == dict.fromkeys(range(LAYERS), ROTATED)


def test_scales_of_k_as_it_is_are_not_written_where_k_is_rotated(plain, tmp_path):
    folder = rotated(plain, tmp_path / "rotated")
    before = (folder / "config.json").read_bytes()
    with refused("None.* got .*K fp8_e4m3 rotated"):
        KVScales.uniform(LAYERS, 0.5).save_pretrained(
            folder, format="compressed-tensors", overwrite=True
        )
    assert (folder / "config.json").read_bytes() == before


def test_rotations_of_weights_alone_change_nothing(plain, tmp_path):
    weights = [{"targets": ["re:.*v_proj$"], "location": "weight_output"}]
    folder = rotated(plain, tmp_path / "rotated", apply=weights, type="random-hadamard")
    assert KVScales.from_pretrained(folder).plan is None
