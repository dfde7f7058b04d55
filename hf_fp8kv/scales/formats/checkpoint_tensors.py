"""The scales among a checkpoint's tensors: found by the rows, checked, paired layer by layer."""

import logging
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open

from ...errors import ScaleError
from ...utils.files import PICKLES, convert_read_errors
from ...utils.text import format_list
from ..kv_scales import KVScales
from ..layer_scales import LayerScales
from .config import Declaration, head_counts
from .folder import Folder
from .native import OWN_FILE
from .request import Request, check_model_type, complete, expected_layers
from .tensor_names import FOREIGN, LAYER, LIKELY, ROWS, ZERO_POINT, Hit, matched
from .vllm_json import JSON_FILE

__all__ = ["read_tensors"]

logger = logging.getLogger(__package__)

_FLOATS = ("F64", "F32", "F16", "BF16")


def read_tensors(
    folder: Folder,
    files: dict[str, str],
    want: Request,
    declared: Declaration,
    config: dict[str, object],
) -> KVScales:
    """The scales among a checkpoint's tensors, whose names and files are given."""
    hits, unknown = matched(files, declared)
    if not hits:
        raise _nothing(folder, files, declared)
    _check_declared(folder, declared, bool(config))
    _check_foreign(folder, files)
    values = _values(folder, files, hits, 0.5 if declared.fnuz else 1.0)
    layers = _assembled(folder, files, hits, values)
    heads = head_counts(config)
    for index, layer in layers.items():
        for side in (layer.k, layer.v):
            if side.ndim and heads and side.shape[0] not in heads:
                raise ScaleError(
                    f"{layer.source}: expected one scale, or one for each of the heads that "
                    f"config.json names ({sorted(heads)}), got {side.shape[0]} in layer {index}; "
                    "use the scales of this very model"
                )
    if all(bool((s == 1).all()) for layer in layers.values() for s in (layer.k, layer.v)):
        logger.warning(
            "%s: every KV scale is exactly 1.0, as tools write it without calibration",
            folder.origin,
        )
    ours = [name for name in unknown if re.match(LAYER, name)]
    if ours:
        logger.warning("%s: not used, though they look like scales: %s", folder.origin,
                       format_list(ours))  # fmt: skip
    model_type = config.get("model_type")
    model_type = model_type if isinstance(model_type, str) else None
    check_model_type(folder.origin, model_type, want.model_type, want)
    layers = complete(layers, expected_layers(layers, config, want), want, folder.origin)
    return KVScales(layers, hits[0].row.format, model_type, folder.origin)


def _check_declared(folder: Folder, declared: Declaration, has_config: bool) -> None:
    if declared.kind == "refused":
        raise ScaleError(
            f"{folder.origin}: expected scales of an FP8 cache (static, symmetric, per tensor or "
            f"per head), got {declared.what}; use scales=None, which is dynamic"
        )
    if declared.kind == "dynamic":
        raise ScaleError(
            f"{folder.origin}: expected no scales in the checkpoint, as its config declares "
            f"{declared.what}, got some; use scales=None, which is dynamic, or correct the config"
        )
    if declared.kind == "none":
        logger.warning(
            "%s: %s; its KV scales are taken to be of float8_e4m3fn",
            folder.origin,
            "the config declares no KV cache" if has_config else "no config.json",
        )


def _check_foreign(folder: Folder, files: dict[str, str]) -> None:
    """Refuses what belongs to INT8 and NVFP4 caches, and zero points other than zero."""
    for name in files:
        for pattern, what in FOREIGN:
            if pattern.fullmatch(name):
                raise ScaleError(
                    f"{folder.origin}: expected scales of an FP8 cache, got {name}, of {what}; "
                    "use scales=None, which is dynamic"
                )
    points = [name for name in files if ZERO_POINT.fullmatch(name)]
    for file, names in _by_file(points, files).items():
        path = _present(folder, file)
        with convert_read_errors(path, "a safetensors file"), safe_open(path, "pt") as opened:
            for name in names:
                if bool(opened.get_tensor(name).float().ne(0).any()):
                    raise ScaleError(
                        f"{path}: {name}: expected a zero point of 0, got another; asymmetric "
                        "scales cannot be used"
                    )


def _values(
    folder: Folder, files: dict[str, str], hits: list[Hit], factor: float
) -> dict[str, torch.Tensor]:
    """The scales by the names of their tensors, in the unit of E4M3FN."""
    values = {}
    for file, names in _by_file([hit.name for hit in hits], files).items():
        for name, value in _load(_present(folder, file), names).items():
            values[name] = value * factor
    return values


def _load(path: Path, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Scales as float32: `[]`, or `[heads, 1]` for those per head."""
    loaded = {}
    with convert_read_errors(path, "a safetensors file"), safe_open(path, "pt") as file:
        there = set(file.keys())
        for name in names:
            if name not in there:
                raise ScaleError(
                    f"{path}: expected the tensor {name}, which the index places here, got none; "
                    "fetch the file again"
                )
            view = file.get_slice(name)
            dtype, shape = view.get_dtype(), list(view.get_shape())
            if dtype not in _FLOATS:
                raise ScaleError(
                    f"{path}: {name}: expected one of {', '.join(_FLOATS)}, got {dtype}; "
                    "these are not scales of an FP8 cache"
                )
            single, per_head = all(n == 1 for n in shape), shape[1:] in ([1], [1, 1])
            if not (single or (per_head and shape[0] > 0)):
                raise ScaleError(
                    f"{path}: {name}: expected one number, or the shape [heads, 1, 1], got "
                    f"{shape}; calibrate per tensor or per head"
                )
            tensor = file.get_tensor(name).float()
            loaded[name] = tensor.reshape(()) if single else tensor.reshape(-1, 1)
    return loaded


def _by_file(names: Iterable[str], files: dict[str, str]) -> dict[str, list[str]]:
    grouped = defaultdict(list)
    for name in names:
        grouped[files[name]].append(name)
    return grouped


def _present(folder: Folder, file: str) -> Path:
    path = folder.path(file)
    if path is None:
        raise ScaleError(
            f"{folder.origin}: expected the file {file}, which holds scales by the index, found "
            "none; fetch it"
        )
    return path


def _assembled(
    folder: Folder, files: dict[str, str], hits: list[Hit], values: dict[str, torch.Tensor]
) -> dict[int, LayerScales]:
    """One pair for each layer, by the rank of the rows; oddities are logged once a file."""
    by_layer: dict[int, list[Hit]] = defaultdict(list)
    for hit in hits:
        by_layer[hit.layer].append(hit)
    oddities: dict[str, list[int]] = defaultdict(list)
    layers = {}
    for index, found in by_layer.items():
        _check_ties(folder, found, values)
        k_hit, v_hit = _chosen(found)
        if k_hit is None or v_hit is None:
            only = "K" if v_hit is None else "V"
            oddities[f"only {only} has a scale, which is used for both sides"].append(index)
        first = k_hit or v_hit
        assert first is not None, "a layer is only listed with a hit"
        k_hit, v_hit = k_hit or first, v_hit or first
        k, v = values[k_hit.name], values[v_hit.name]
        shared = next((hit for hit in found if hit.side == "kv"), None)
        if shared is not None and shared not in (k_hit, v_hit):
            largest = max(k.max().item(), v.max().item())
            if values[shared.name].max().item() != largest:
                oddities["kv_scale is not the larger one of the pair, which is used"].append(index)
        names = ", ".join(dict.fromkeys((k_hit.name, v_hit.name)))
        layers[index] = LayerScales(k, v, source=f"{folder.origin}/{files[k_hit.name]}: {names}")
    for oddity, indices in oddities.items():
        logger.warning("%s: %s (layers %s)", folder.origin, oddity, format_list(indices))
    return layers


def _chosen(found: list[Hit]) -> tuple[Hit | None, Hit | None]:
    """The tensors for K and V: the first rank with both, else the best of each side."""

    def best(side: str, rank: int | None = None) -> Hit | None:
        return next(
            (h for h in found if side in h.side and (rank is None or h.row.rank == rank)), None
        )

    for rank in sorted({hit.row.rank for hit in found}):
        k, v = best("k", rank), best("v", rank)
        if k is not None and v is not None:
            return k, v
    return best("k"), best("v")


def _check_ties(folder: Folder, found: list[Hit], values: dict[str, torch.Tensor]) -> None:
    """Two names for one scale must agree: nothing says which one is meant."""
    first: dict[tuple[int, str], Hit] = {}
    for hit in found:
        other = first.setdefault((hit.row.rank, hit.side), hit)
        if other is not hit and not torch.equal(values[hit.name], values[other.name]):
            raise ScaleError(
                f"{folder.origin}: expected one scale for {hit.side.upper()} of layer "
                f"{hit.layer}, got {other.name} and {hit.name}, which differ; delete one"
            )


def _nothing(folder: Folder, files: Iterable[str], declared: Declaration) -> ScaleError:
    """The error for a checkpoint without scales: what was looked for, and what looks like it."""
    names = dict.fromkeys(row.name.format(side="{k,v}") for row in ROWS)
    likely = format_list(name for name in files if LIKELY.search(name))
    found = f"got only {likely}, which no reader takes" if likely else "got none"
    pickles = [n for suffix in PICKLES for n in folder.others(suffix)]
    if pickles:
        found += f" (pickles are never loaded: {format_list(pickles)})"
    return ScaleError(
        f"{folder.origin}: expected {OWN_FILE}, {JSON_FILE}, or scale tensors such as "
        f"{', '.join(names)} under the layers of the language model, {found}; the config declares "
        f"{declared.what}; use scales=None, which is dynamic, or calibrate"
    )
