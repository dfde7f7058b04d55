"""Static scales in the formats that servers read: what they lose, and the bytes of their files.

The names are those of the readers' table (`sources.rows`), used the other way. What a format cannot
hold is reduced so that nothing saturates that did not before: the largest scale is taken, and the
center of K is made room for.
"""

import json
from collections import defaultdict
from collections.abc import Mapping

import torch
from safetensors.torch import save as to_safetensors

from ...errors import ScaleError
from ...formats import FORMATS
from ...utils.text import format_list
from ..kv_scales import KVScales
from ..layer_scales import LayerScales
from ..report import REPORT_FILE
from . import JSON_FILE
from .native import own_files
from .tensor_names import written
from .write_config import HF_QUANT_CONFIG, declared, declared_beside

__all__ = [
    "INDEX_FILE",
    "SCALES_FILE",
    "as_json",
    "index_of",
    "of_rank",
    "reduced",
    "scale_files",
    "tensors_of",
    "vllm_json",
]

SCALES_FILE = "model-kv-scales.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_LAYERS = {"trtllm": "transformer.layers"}


def reduced(
    layers: Mapping[int, LayerScales], format: str, tp_size: int = 1
) -> tuple[dict[int, LayerScales], list[str]]:
    """The scales as the format can hold them, and what is lost, for people.

    For several ranks (of "vllm-json") a layer has one number for each of them, `[tp_size, 1]`.
    """
    if format == "hf_fp8kv":
        return dict(layers), []
    losses: dict[str, list[int]] = defaultdict(list)
    centered = {index: _without_center(layer) for index, layer in layers.items()}
    losses["K's scales make room for the centers, which are left out"] = [
        index for index, layer in layers.items() if layer.k_center is not None
    ]
    per_head = _heads_of(centered) if format == "compressed-tensors" else {}
    result = {}
    for index, layer in centered.items():
        heads = per_head.get(index)
        k, v = (_largest(tensor, heads, tp_size) for tensor in (layer.k, layer.v))
        for before, after in ((layer.k, k), (layer.v, v)):
            same = after if tp_size == 1 or not before.ndim else _per_head(after, before.shape[0])
            if before.ndim and (before != same).any():
                what = "head" if heads else "layer" if tp_size == 1 else "rank"
                losses[f"the largest scale of each {what} is written"].append(index)
        if format == "vllm-json":
            if (k != v).any():
                losses["K and V share the larger scale"].append(index)
            k = v = torch.maximum(k, v)
        result[index] = LayerScales(k, v, source=layer.source)
    said = [f"{what} (layers {format_list(dict.fromkeys(i))})" for what, i in losses.items() if i]
    return result, said


def _without_center(layer: LayerScales) -> LayerScales:
    """A scale of K for the same numbers without their center: |K| <= max * scale + |center|."""
    if layer.k_center is None:
        return layer
    room = layer.k_center.abs() / FORMATS["fp8_e4m3"].max
    # One number stays one number.
    room = room if layer.k.ndim else room.max()
    return LayerScales(layer.k + room, layer.v, source=layer.source)


def _heads_of(layers: Mapping[int, LayerScales]) -> dict[int, int]:
    """How many heads each layer is written for; empty: every layer is written per tensor."""
    found = {
        index: next((t.shape[0] for t in (s.k, s.v) if t.ndim and t.shape[0] > 1), None)
        for index, s in layers.items()
    }
    counts = {heads for heads in found.values() if heads}
    # A layer with one number needs the number of heads of the others, since all have one strategy.
    default = counts.pop() if len(counts) == 1 else None
    heads = {index: own or default for index, own in found.items()}
    return {i: n for i, n in heads.items() if n} if all(heads.values()) else {}


def _largest(scale: torch.Tensor, heads: int | None, ranks: int) -> torch.Tensor:
    """The largest scale: `[]`, of each head `[heads, 1]`, or of each rank's heads `[ranks, 1]`."""
    if ranks > 1:
        if scale.ndim and scale.shape[0] % ranks == 0:
            return scale.reshape(ranks, -1).amax(1, keepdim=True)
        return scale.max().expand(ranks, 1).clone()
    if heads is None:
        return scale.max()
    return (scale.amax(1, keepdim=True) if scale.ndim else scale).expand(heads, 1).clone()


def _per_head(of_ranks: torch.Tensor, heads: int) -> torch.Tensor:
    """The scale of each head, `[heads, 1]`; one for all where heads cannot be split."""
    if heads % len(of_ranks):
        return of_ranks[:1]
    return of_ranks.repeat_interleave(heads // len(of_ranks), 0)


def tensors_of(
    layers: Mapping[int, LayerScales], format: str, modules: Mapping[int, str] | None = None
) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, float32, under the names that the table gives them.

    Args:
        layers: as `reduced` gives them.
        format: one that has rows to write.
        modules: the attention module of each layer in a checkpoint; None: its usual name.
    """
    tensors = {}
    for index, layer in layers.items():
        sides = {"k": layer.k, "v": layer.v, "kv": torch.maximum(layer.k.max(), layer.v.max())}
        for side, row in written(format).items():
            module, tail = row.name.format(side=side).split(".", 1)
            default = f"{_LAYERS.get(format, 'model.layers')}.{index}.{module}"
            path = default if modules is None else modules[index]
            assert row.shape is not None, "only rows with a shape are written"
            shape = (-1, 1, 1) if sides[side].ndim else row.shape
            tensors[f"{path}.{tail}"] = sides[side].reshape(shape).clone()
    return tensors


def of_rank(
    layers: Mapping[int, LayerScales], tp_rank: int, tp_size: int
) -> Mapping[int, LayerScales]:
    """One rank's part of what `reduced` gives for several ranks; for a single one, all of it."""
    if tp_size == 1:
        return layers
    return {
        index: LayerScales(layer.k[tp_rank, 0], layer.v[tp_rank, 0], source=layer.source)
        for index, layer in layers.items()
    }


def index_of(
    files: Mapping[str, str], scales: Mapping[str, torch.Tensor], total: int, about: object = None
) -> bytes:
    """A safetensors index.

    Args:
        files: tensor names and files, without those of the scales.
        scales: the scales, which are in `SCALES_FILE`.
        total: the bytes of the other tensors.
        about: the metadata of the index that there was.
    """
    old = about if isinstance(about, dict) else {}
    size, count = old.get("total_size", total), old.get("total_parameters")
    metadata = dict(old)
    if isinstance(size, int):
        metadata["total_size"] = size + sum(t.nbytes for t in scales.values())
    if isinstance(count, int):
        metadata["total_parameters"] = count + sum(t.numel() for t in scales.values())
    weight_map = {**files, **dict.fromkeys(scales, SCALES_FILE)}
    return as_json({"metadata": metadata, "weight_map": weight_map})


def as_json(data: object) -> bytes:
    """The bytes of a JSON file."""
    return json.dumps(data, indent=2).encode() + b"\n"


def vllm_json(
    layers: Mapping[int, LayerScales], model_type: str | None, tp_size: int
) -> dict[str, bytes]:
    """The file of `quantization_param_path`; `layers` as `reduced` gives them."""
    if sorted(layers) != list(range(len(layers))):
        raise ScaleError(
            f"format 'vllm-json': expected the layers 0 to {len(layers) - 1}, got "
            f"{format_list(sorted(layers))}; its readers refuse a file with gaps, choose another"
        )
    ranks = {
        str(rank): {str(i): s.k.item() for i, s in of_rank(layers, rank, tp_size).items()}
        for rank in range(tp_size)
    }
    cache = {"dtype": "float8_e4m3fn", "scaling_factor": ranks}
    return {JSON_FILE: as_json({"model_type": model_type, "kv_cache": cache})}


def scale_files(
    scales: KVScales, layers: Mapping[int, LayerScales], format: str, tp_size: int
) -> dict[str, bytes]:
    """The files of the scales alone, by their names; what a reader looks for first comes last."""
    if format == "hf_fp8kv":
        about: dict[str, object] = {"model_type": scales.model_type, "origin": scales.origin}
        # The report comes first: what is read comes last.
        report = {} if scales.report is None else {REPORT_FILE: as_json(scales.report.to_dict())}
        return report | own_files(layers, {**about, "read_as": scales.format})
    if format == "vllm-json":
        return vllm_json(layers, scales.model_type, tp_size)
    tensors = tensors_of(layers, format)
    heads = {layer.k.shape[0] for layer in layers.values() if layer.k.ndim}
    config: dict[str, object] = {"model_type": scales.model_type} if scales.model_type else {}
    if sorted(layers) == list(range(len(layers))):
        config["num_hidden_layers"] = len(layers)
    if len(heads) == 1:
        config["num_key_value_heads"] = heads.pop()
    file = "rank0.safetensors" if format == "trtllm" else SCALES_FILE
    files = {file: to_safetensors(tensors, {"format": "pt"})}
    if format != "trtllm":
        files[INDEX_FILE] = index_of({}, tensors, 0)
    per_head = any(layer.k.ndim for layer in layers.values())
    config = declared(format, config, per_head=per_head, excluded=())
    if format == "modelopt":
        files[HF_QUANT_CONFIG] = as_json(declared_beside(None, config))
    return {**files, "config.json": as_json(config)}
