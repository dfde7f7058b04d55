"""How SGLang, TGI and old versions of vLLM read KV scales, according to their source code.

These servers were not run. In tests/vllm/test_checkpoints.py, vLLM's own loader reads our files.

Each `read_as_` function returns the scales that the server would use, a pair for each layer, or
raises `LoadError`. It uses the server's names, configs and defaults, and no code of this package.
"""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file

ScalePairs = dict[int, tuple[torch.Tensor, torch.Tensor]]


class LoadError(Exception):
    """Raised if the server would not start, or would use a scale of 1.0."""


def read_checkpoint(folder: Path, *, by_index: bool = True) -> tuple[dict, dict[str, torch.Tensor]]:
    """Return the config and the tensors. With `by_index`, read only the files in the index."""
    config = json.loads((folder / "config.json").read_text())
    index_file = folder / "model.safetensors.index.json"
    files = {path.name for path in folder.glob("*.safetensors")}
    tensors: dict[str, torch.Tensor] = {}
    if by_index and index_file.exists():
        weight_map = json.loads(index_file.read_text())["weight_map"]
        if not set(weight_map.values()) <= files:
            raise LoadError("the index names a missing file")
        files = set(weight_map.values())
    for file in sorted(files):
        file_tensors = load_file(folder / file)
        if set(file_tensors) & set(tensors):
            raise LoadError("two files hold the same tensor")
        tensors |= file_tensors
    if by_index and index_file.exists() and set(tensors) != set(weight_map):
        raise LoadError("index and files have different tensors")
    return config, tensors


def find_quantization(config: dict) -> dict:
    """Return the quantization config from the places that the server reads."""
    text_config = config.get("text_config") or {}
    quantization = config.get("quantization_config") or text_config.get("quantization_config")
    quantization = quantization or config.get("compression_config")
    if not quantization:
        raise LoadError("without a quantization config no scale is loaded")
    return quantization


# Patterns of the names of scales in a checkpoint. The group is the side: k, v, or kv for both.
SGLANG_PATTERNS = (
    r"\.(?:self_attn|mixer)\.[kv]_proj\.([kv])_scale$",
    r"\.([kv])_proj\.output_scale$",
    r"\.([kv])_scale$",
    r"\.(kv)_scale$",
)


def group_scales(tensors: dict[str, torch.Tensor]) -> dict[int, dict]:
    """Return the scales by layer and side, without tensors that the server does not rename."""
    scales: dict[int, dict] = {}
    for name, tensor in tensors.items():
        matches = (re.search(pattern, name) for pattern in SGLANG_PATTERNS)
        side_match = next(filter(None, matches), None)
        index_match = re.search(r"\.(?:layers|h|blocks)\.(\d+)\.", f".{name}")
        if side_match and index_match:
            # The first letter, because the server reads a shared scale as the scale of K.
            scales.setdefault(int(index_match[1]), {})[side_match[1][0]] = tensor
    return scales


def read_scalars(scales: dict[int, dict], num_layers: int) -> ScalePairs:
    """Return a positive scale for K and V of each layer. V without a scale gets the scale of K."""
    pairs = {}
    for index in range(num_layers):
        layer_scales = scales.get(index, {})
        for tensor in layer_scales.values():
            if tensor.numel() != 1:
                raise LoadError(f"layer {index}: expected a scalar, got {tuple(tensor.shape)}")
        k, v = (layer_scales.get(side, torch.tensor(-1.0)).float().squeeze() for side in "kv")
        if k <= 0 and v <= 0:
            raise LoadError(f"layer {index}: the server would use a scale of 1.0")
        if not k > 0:
            raise LoadError(f"layer {index}: the assertion k_scale > 0 fails")
        pairs[index] = (k, v if v > 0 else k)
    return pairs


def read_as_sglang(folder: Path) -> ScalePairs:
    """Return the scales that SGLang 0.5 uses."""
    config, tensors = read_checkpoint(folder)
    quantization = find_quantization(config)
    if quantization["quant_method"] == "compressed-tensors":
        scheme = quantization.get("kv_cache_scheme") or {}
        fields = (
            scheme.get("type"), scheme.get("num_bits"), scheme.get("strategy"),
            scheme.get("symmetric", True), scheme.get("dynamic"),
        )  # fmt: skip
        if fields != ("float", 8, "tensor", True, False):
            raise LoadError(f"only 8-bit floats per tensor, got {fields}")
    return read_scalars(group_scales(tensors), config["num_hidden_layers"])


def read_as_tgi(folder: Path) -> ScalePairs:
    """Return the scales that TGI 3 uses: a scalar for K and a scalar for V of each layer.

    TGI reads every file in the folder, regardless of the index.
    """
    config, tensors = read_checkpoint(folder, by_index=False)
    if config.get("kv_cache_torch_dtype") not in ("float8_e4m3fn", None):
        raise LoadError("the dtype is unknown")
    pairs = {}
    for index in range(config["num_hidden_layers"]):
        names = [f"model.layers.{index}.self_attn.{side}_scale" for side in "kv"]
        if not all(name in tensors for name in names):
            raise LoadError(f"layer {index}: the server would use a scale of 1.0")
        if any(tensors[name].numel() != 1 for name in names):
            raise LoadError("Key and value scales must be scalar tensors.")
        pairs[index] = tuple(tensors[name].float() for name in names)
    return pairs
