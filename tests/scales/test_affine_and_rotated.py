"""Tests of reading scales for shifted or rotated values, or for some layers only.

These are ModelOpt's FP8_AFFINE and `kv_cache_quantized_layers`, and rotated K.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

from hf_fp8kv import FP8PagedCache
from hf_fp8kv.cache.paged_tensor import densify
from hf_fp8kv.formats import LayerPlan
from hf_fp8kv.formats.rotation import rotate
from hf_fp8kv.scales import KVScales
from tests.helpers.declared import NUM_LAYERS
from tests.scales.test_sources import SCHEME, edit_json, scale_error

ROTATED_PLAN = LayerPlan.parse("fp8_e4m3 rotated", "fp8_e4m3")

IDS = torch.arange(3, 51)[None]


@torch.no_grad()
def run_model(folder: Path) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return the logits of the model in a folder, and K and V of its layers, `[1, Hkv, T, D]`."""
    cache = DynamicCache()
    logits = AutoModelForCausalLM.from_pretrained(folder)(IDS, past_key_values=cache).logits
    return logits, [(layer.keys.float(), layer.values.float()) for layer in cache.layers]


def write_checkpoint(
    plain_folder: Path,
    folder: Path,
    quantization_config: dict[str, object],
    tensors: dict[str, torch.Tensor],
) -> Path:
    folder.mkdir()
    config = json.loads((plain_folder / "config.json").read_text())
    config["quantization_config"] = quantization_config
    (folder / "config.json").write_text(json.dumps(config))
    all_tensors = load_file(plain_folder / "model.safetensors")
    all_tensors |= {f"model.layers.{name}": tensor for name, tensor in tensors.items()}
    save_file(all_tensors, folder / "model.safetensors")
    return folder


def save_affine(plain_folder: Path, folder: Path) -> Path:
    """Save a checkpoint in FP8_AFFINE. Biases are means, and scales fit the centered values."""
    tensors: dict[str, torch.Tensor] = {}
    _, layer_states = run_model(plain_folder)
    for index, k_and_v in enumerate(layer_states):
        for side, states in zip("kv", k_and_v, strict=True):
            bias = states.mean(2, keepdim=True) + 3.0
            prefix = f"{index}.self_attn.{side}_proj.{side}"
            tensors[f"{prefix}_bias"] = bias.bfloat16()
            tensors[f"{prefix}_scale"] = (states - bias.bfloat16().float()).abs().max() / 448
    quantization_config = {
        "quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*"],
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    }  # fmt: skip
    return write_checkpoint(plain_folder, folder, quantization_config, tensors)


@torch.no_grad()
def test_biases_become_centers_of_k_and_enlarge_scales_of_v(plain_folder, tmp_path):
    folder = save_affine(plain_folder, tmp_path / "affine")
    scales = KVScales.from_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    logits, layer_states = run_model(plain_folder)
    for index, (k, v) in enumerate(layer_states):
        prefix = f"model.layers.{index}.self_attn"
        layer = scales.layers[index]
        assert torch.equal(layer.k_center, tensors[f"{prefix}.k_proj.k_bias"][0, :, 0].float())
        assert torch.equal(layer.k, tensors[f"{prefix}.k_proj.k_scale"])
        # Neither K minus the center nor V, which is stored unchanged, saturates.
        assert ((k - layer.k_center[:, None]).abs() <= 448 * layer.k * (1 + 1e-6)).all()
        assert (v.abs() <= 448 * layer.v[:, None] * (1 + 1e-6)).all()
    model = AutoModelForCausalLM.from_pretrained(plain_folder, attn_implementation="fp8_paged")
    output = model(IDS, past_key_values=FP8PagedCache(model.config, scales=scales)).logits
    assert (output - logits).norm() < 0.05 * logits.norm()
    # Replacing the scales removes the biases.
    new_scales = KVScales.uniform(NUM_LAYERS, 0.5)
    new_scales.save_pretrained(
        tmp_path / "new", format="modelopt", checkpoint=folder, overwrite=True
    )
    assert KVScales.from_pretrained(tmp_path / "new").digest == new_scales.digest


def make_rotation_config(**changes: object) -> dict[str, object]:
    """Return the config of a checkpoint in which LLM Compressor rotates K (R3 of SpinQuant)."""
    defaults = {"targets": ["LlamaAttention"], "inverse": False, "ignore": []}
    locations = [{**defaults, "location": location} for location in ("q_attn", "k_cache")]
    scheme = {"type": "hadamard", "apply": locations, "randomize": False, "head_dim": 16} | changes
    return {
        "quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME,
        "transform_config": {"config_groups": {"R3": scheme}},
    }  # fmt: skip


def save_rotated(plain_folder: Path, folder: Path, **changes: object) -> Path:
    tensors = {}
    for index, (k, v) in enumerate(run_model(plain_folder)[1]):
        tensors[f"{index}.self_attn.k_scale"] = rotate(k).abs().max()[None] / 448
        tensors[f"{index}.self_attn.v_scale"] = v.abs().max()[None] / 448
    return write_checkpoint(plain_folder, folder, make_rotation_config(**changes), tensors)


@torch.no_grad()
def test_the_cache_rotates_k_for_scales_of_rotated_k(plain_folder, tmp_path):
    scales = KVScales.from_pretrained(save_rotated(plain_folder, tmp_path / "rotated"))
    assert scales.plan == dict.fromkeys(range(NUM_LAYERS), ROTATED_PLAN)
    logits, layer_states = run_model(plain_folder)
    for layer, (k, _) in zip(scales.layers.values(), layer_states, strict=True):
        assert layer.k.item() == pytest.approx(rotate(k).abs().max().item() / 448)
    model = AutoModelForCausalLM.from_pretrained(plain_folder, attn_implementation="fp8_paged")
    cache = FP8PagedCache(model.config, scales=scales)
    output = model(IDS, past_key_values=cache).logits
    assert cache.plan[0] == ROTATED_PLAN
    assert (output - logits).norm() < 0.05 * logits.norm()
    # Scales for rotated K cannot be saved for a server.
    with scale_error("rotated values in layers 0, 1"):
        scales.save_pretrained(tmp_path / "out", format="compressed-tensors")


K_CACHE_LOCATION = {"targets": ["LlamaAttention"], "location": "k_cache"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "random-hadamard"}, "K rotated by type"),
        ({"head_dim": 8}, "K rotated in blocks"),
        ({"apply": [K_CACHE_LOCATION | {"ignore": ["model.layers.0.self_attn"]}]}, "K rotated"),
        ({"apply": [K_CACHE_LOCATION | {"targets": []}]}, "K rotated"),
        ({"apply": [K_CACHE_LOCATION | {"targets": ["re:("]}]}, "expected targets of a rotation"),
    ],
    ids=str,
)
def test_other_rotations_of_k_are_refused(plain_folder, tmp_path, changes, message):
    folder = save_rotated(plain_folder, tmp_path / "rotated", **changes)
    with scale_error(message, folder):
        KVScales.from_pretrained(folder)


ALL_LAYERS = [f"model.layers.{index}.self_attn" for index in range(NUM_LAYERS)]


@pytest.mark.parametrize("targets", ["re:.*self_attn$", ALL_LAYERS])
def test_k_is_rotated_for_any_kind_of_targets(plain_folder, tmp_path, targets):
    # K is rotated even if the config does not declare a cache.
    location = K_CACHE_LOCATION | {"targets": targets}
    folder = save_rotated(plain_folder, tmp_path / "rotated", apply=[location])
    block = make_rotation_config(apply=[location]) | {"kv_cache_scheme": None}
    edit_json(folder / "config.json", quantization_config=block)
    assert KVScales.from_pretrained(folder).plan == dict.fromkeys(range(NUM_LAYERS), ROTATED_PLAN)


def test_scales_of_unrotated_k_are_not_written_for_rotated_k(plain_folder, tmp_path):
    folder = save_rotated(plain_folder, tmp_path / "rotated")
    config_bytes = (folder / "config.json").read_bytes()
    with scale_error("None.* got .*K fp8_e4m3 rotated"):
        KVScales.uniform(NUM_LAYERS, 0.5).save_pretrained(
            folder, format="compressed-tensors", overwrite=True
        )
    assert (folder / "config.json").read_bytes() == config_bytes


def test_rotations_of_weights_are_ignored(plain_folder, tmp_path):
    weights = [{"targets": ["re:.*v_proj$"], "location": "weight_output"}]
    folder = save_rotated(plain_folder, tmp_path / "rotated", apply=weights, type="random-hadamard")
    assert KVScales.from_pretrained(folder).plan is None


def save_partial(plain_folder, folder, algorithms, scale_layers, *, in_second_config=False):
    """Save a checkpoint as ModelOpt 0.48 does if only some layers have a quantized cache.

    `algorithms` has the algorithm of each quantized layer, by the name of the layer.
    """
    quantized_layers = {name: {"quant_algo": value} for name, value in algorithms.items()}
    entries = {"kv_cache_quantized_layers": quantized_layers, "kv_cache_schema_version": 1}
    tensors = {}
    for index in scale_layers:
        tensors[f"{index}.self_attn.k_proj.k_scale"] = torch.tensor(0.25 + index)
        tensors[f"{index}.self_attn.v_proj.v_scale"] = torch.tensor(0.25 + index)
    algorithm, *others = set(algorithms.values())
    if others:
        algorithm = "MIXED_PRECISION"
    block = {"quant_method": "modelopt", "kv_cache_quant_algo": algorithm}
    if in_second_config:
        folder = write_checkpoint(plain_folder, folder, block, tensors)
        (folder / "hf_quant_config.json").write_text(
            json.dumps({"quantization": {"kv_cache_quant_algo": algorithm, **entries}})
        )
        return folder
    return write_checkpoint(plain_folder, folder, block | entries, tensors)


@pytest.mark.parametrize("in_second_config", [False, True])
@torch.no_grad()
def test_layers_that_modelopt_leaves_out_keep_the_dtype_of_the_model(
    plain_folder, tmp_path, in_second_config
):
    folder = save_partial(
        plain_folder, tmp_path / "partial", {ALL_LAYERS[1]: "FP8"}, [1],
        in_second_config=in_second_config,
    )  # fmt: skip
    scales = KVScales.from_pretrained(folder)
    expected_plans = dict.fromkeys(range(NUM_LAYERS), LayerPlan.parse("auto", "auto"))
    assert scales.plan == expected_plans | {1: LayerPlan.parse("fp8_e4m3", "fp8_e4m3")}
    assert scales.layers[1].k == 1.25
    model = AutoModelForCausalLM.from_pretrained(plain_folder, attn_implementation="fp8_paged")
    cache = FP8PagedCache(model.config, scales=scales)
    model(IDS, past_key_values=cache)
    _, exact_states = run_model(plain_folder)
    for index, (layer, (exact_k, _)) in enumerate(zip(cache.layers, exact_states, strict=True)):
        assert torch.equal(densify(layer.keys).float(), exact_k) == (index != 1)
    scales.save_pretrained(tmp_path / "converted")
    assert KVScales.from_pretrained(tmp_path / "converted").digest == scales.digest
    with scale_error("expected scales of unchanged K and V, got scales for unquantized layers 0"):
        scales.save_pretrained(tmp_path / "other", format="compressed-tensors")
    # Scales of all layers replace the list.
    KVScales.uniform(NUM_LAYERS, 0.5).save_pretrained(folder, format="modelopt", overwrite=True)
    assert KVScales.from_pretrained(folder).plan is None


@pytest.mark.parametrize(
    ("layer_algorithms", "scale_layers", "message"),
    [
        (["FP8", "NVFP4"], [0], "kv_cache_quantized_layers: model.layers.1.self_attn with 'NVFP4'"),
        ([None], [0], "0.self_attn with None"),
        (["FP8"], [0, 1], "got layers 1. Fix the config"),
        (["FP8", "FP8"], [0], "without layers 1"),
    ],
)
def test_wrong_lists_of_quantized_layers_are_refused(
    plain_folder, tmp_path, layer_algorithms, scale_layers, message
):
    algorithms = dict(zip(ALL_LAYERS, layer_algorithms, strict=False))
    folder = save_partial(plain_folder, tmp_path / "partial", algorithms, scale_layers)
    with scale_error(message, folder):
        KVScales.from_pretrained(folder)
