"""Our own file of static scales, `kv_scales.safetensors`: its writer and its reader.

It holds every granularity and the centers exactly. Beside it lies `kv_scales.json`, for people.
"""

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save as to_safetensors

from ...errors import ScaleError
from ...utils.files import convert_read_errors
from ...utils.text import format_list
from ..layer_scales import LayerScales

__all__ = ["OWN_FILE", "OWN_SUMMARY", "OWN_VERSION", "own_files", "read_own"]

OWN_FILE = "kv_scales.safetensors"
OWN_SUMMARY = "kv_scales.json"
OWN_VERSION = 1
_OWN_NAME = re.compile(r"layers\.([0-9]{1,9})\.(k_scale|v_scale|k_center)")


def own_files(layers: Mapping[int, LayerScales], about: dict[str, object]) -> dict[str, bytes]:
    """Both files, by their names.

    Args:
        layers: the scales of each layer.
        about: what else the files say of them.
    """
    about = {
        "version": OWN_VERSION,
        "dtype": "float8_e4m3fn",
        "layers": list(layers),
        **about,
    }
    tensors: dict[str, torch.Tensor] = {}
    for index, layer in layers.items():
        tensors[f"layers.{index}.k_scale"] = layer.k.clone()
        tensors[f"layers.{index}.v_scale"] = layer.v.clone()
        if layer.k_center is not None:
            tensors[f"layers.{index}.k_center"] = layer.k_center.clone()
    summary = {**about, "scales": {str(i): _summary(s) for i, s in layers.items()}}
    # The scales come last: with them in place, the pair is complete.
    return {
        OWN_SUMMARY: json.dumps(summary, indent=2).encode() + b"\n",
        OWN_FILE: to_safetensors(tensors, {"hf_fp8kv": json.dumps(about)}),
    }


def read_own(path: Path, names: list[str], about: str) -> tuple[dict[int, LayerScales], str | None]:
    """The layers of the file, and its model type where it says one.

    Args:
        path: the file.
        names: its tensors.
        about: the entry "hf_fp8kv" of its metadata.
    """
    with convert_read_errors(path, "JSON in the metadata entry 'hf_fp8kv'"):
        header = json.loads(about)
    if not isinstance(header, dict):
        header = {}
    if header.get("version") != OWN_VERSION or header.get("dtype") != "float8_e4m3fn":
        raise ScaleError(
            f"{path}: expected version {OWN_VERSION} and float8_e4m3fn, got "
            f"{header.get('version')!r} and {header.get('dtype')!r}; update hf_fp8kv"
        )
    parts: dict[int, dict[str, torch.Tensor]] = defaultdict(dict)
    with convert_read_errors(path, "a safetensors file"), safe_open(path, "pt") as file:
        for name in names:
            match = _OWN_NAME.fullmatch(name)
            if match is None or file.get_slice(name).get_dtype() != "F32":
                raise ScaleError(
                    f"{path}: expected layers.N.k_scale, v_scale and k_center in F32, got {name}; "
                    "write the file again with save_pretrained"
                )
            parts[int(match[1])][match[2]] = file.get_tensor(name)
    if header.get("layers") != sorted(parts):
        raise ScaleError(
            f"{path}: expected the layers of its metadata, {header.get('layers')}, got "
            f"{format_list(sorted(parts))}; write the file again"
        )
    layers = {}
    for index, part in parts.items():
        if not {"k_scale", "v_scale"} <= set(part):
            raise ScaleError(
                f"{path}: layer {index}: expected k_scale and v_scale, got one; write the file "
                "again with save_pretrained"
            )
        source = f"{path}: layers.{index}"
        layers[index] = LayerScales(part["k_scale"], part["v_scale"], part.get("k_center"), source)
    model_type = header.get("model_type")
    return layers, model_type if isinstance(model_type, str) else None


def _summary(layer: LayerScales) -> dict[str, object]:
    """The largest scale of each side, for people to read."""
    return {
        "k": layer.k.max().item(),
        "v": layer.v.max().item(),
        "granularity": layer.granularity,
        "centered": layer.k_center is not None,
        "source": layer.source,
    }
