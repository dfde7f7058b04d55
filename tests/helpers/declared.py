"""Checkpoints that declare a KV cache in the format of compressed-tensors, and their models.

The declared scales are much too small, so a model that applies them computes wrong K and V.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_fp8kv import KVScales, LayerScales
from tests.helpers.tiny_models import build_variant

NUM_LAYERS = 2
NUM_HEADS = 2
# With codes up to 448, K reaches at most 1.35 and V 0.68. The model's K and V are far larger.
TOO_SMALL = KVScales(
    {
        index: LayerScales(
            torch.tensor([[0.002], [0.003]]) / (index + 1),
            torch.tensor([[0.0015], [0.001]]) / (index + 1),
        )
        for index in range(NUM_LAYERS)
    },
    model_type="llama",
)
_FP8_FIELDS = {"num_bits": 8, "type": "float", "symmetric": True}
_W8A8_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_FP8_FIELDS, "strategy": "channel", "dynamic": False},
            "input_activations": {**_FP8_FIELDS, "strategy": "token", "dynamic": True},
        }
    },
}


def make_model() -> PreTrainedModel:
    return build_variant("llama", num_hidden_layers=NUM_LAYERS, num_key_value_heads=NUM_HEADS)[0]


def save_plain(folder: Path) -> Path:
    make_model().save_pretrained(folder)
    return folder


def save_w8a8(folder: Path) -> Path:
    """Save the model of `save_plain` with FP8 weights, and declare FP8 activations but no cache."""
    model = make_model()
    tensors = model.state_dict()
    for name, weight in model.state_dict().items():
        if name.endswith("_proj.weight"):
            scale = weight.abs().amax(1, keepdim=True) / 448
            tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
            tensors[name.replace("weight", "weight_scale")] = scale
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": _W8A8_CONFIG}))
    return folder


def declare(checkpoint: Path, folder: Path) -> Path:
    """Copy a checkpoint, and declare the scales `TOO_SMALL` in the copy. Return its folder."""
    TOO_SMALL.save_pretrained(folder, format="compressed-tensors", checkpoint=checkpoint)
    return folder


def declare_output_scales(checkpoint: Path, folder: Path) -> Path:
    """Copy a checkpoint, and declare scales in an older format, for the outputs of projections.

    `kv_cache_scheme` has replaced this format. Return the folder of the copy.
    """
    tensors = load_file(checkpoint / "model.safetensors")
    for index in range(NUM_LAYERS):
        prefix = f"model.layers.{index}.self_attn"
        tensors[f"{prefix}.k_proj.output_scale"] = torch.tensor([0.002])
        tensors[f"{prefix}.v_proj.output_scale"] = torch.tensor([0.0015])
    output_scheme = {**_FP8_FIELDS, "strategy": "tensor", "dynamic": False}
    group = {"targets": ["re:.*k_proj", "re:.*v_proj"], "output_activations": output_scheme}
    quantization = {**_W8A8_CONFIG, "format": "dense", "config_groups": {"group_0": group}}
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = quantization
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load(folder: Path, attention: str = "sdpa", **options: Any) -> PreTrainedModel:
    options["attn_implementation"] = attention
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()
