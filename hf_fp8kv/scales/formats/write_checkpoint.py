"""A copy of a checkpoint with its KV scales: the same weights, one file more, another config."""

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save as to_safetensors

from ...errors import ScaleError
from ...utils.files import PICKLES, read_header, read_json, write_all
from ...utils.text import format_list, format_value
from ..kv_scales import KVScales
from ..layer_scales import LayerScales
from ..report import REPORT_FILE
from . import JSON_FILE
from .config import text_config
from .folder import LocalFolder
from .native import OWN_FILE, OWN_SUMMARY
from .read import tensor_files
from .tensor_names import FOREIGN, MODULE, ROWS, ZERO_POINT
from .write_config import HF_QUANT_CONFIG, METHODS, declared, declared_beside
from .write_files import (
    INDEX_FILE,
    SCALES_FILE,
    as_json,
    index_of,
    of_rank,
    reduced,
    scale_files,
    tensors_of,
    vllm_json,
)

__all__ = ["Weights", "write_checkpoint"]

Weights = Literal["copy", "link"]
_WEIGHTS = (".safetensors", ".gguf", *PICKLES)
# A checkpoint in one file needs an index for a second one, and with an index no file may have the
# name of the only one: readers would stop there.
_ONLY_FILE, _FIRST_FILE = "model.safetensors", "model-00001-of-00001.safetensors"


def write_checkpoint(
    scales: KVScales,
    source: Path,
    target: Path,
    *,
    format: str,
    weights: Weights,
    tp_size: int,
) -> tuple[list[Path], list[str]]:
    """The folder `target` is then a copy of `source` with the scales, or it is not there at all.

    Returns the paths that differ from the source, and what was lost, for people.
    """
    _check_folders(source, target, weights)
    files = tensor_files(LocalFolder(source))
    config = read_json(source / "config.json", unique=False)
    _check_files(source, files)
    _check_scales(scales, source, files, config)
    if format != "hf_fp8kv" and text_config(config).get("kv_lora_rank"):
        raise ScaleError(
            f"{source}: expected a model whose servers cache K and V, got one with kv_lora_rank: "
            "they cache the latent that both are made of; choose hf_fp8kv"
        )
    layers, losses = reduced(scales.layers, format, tp_size)
    new = _new_files(scales, layers, source, files, config, format, tp_size)
    staging = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
        _transfer(source, staging, new, weights, renamed=INDEX_FILE in new)
        write_all({staging / name: content for name, content in new.items()})
        for rank in range(tp_size):
            _check_copy(staging, of_rank(layers, rank, tp_size), target, rank, tp_size)
        if target.exists():
            target.rmdir()
        staging.rename(target)
    except OSError as error:
        raise ScaleError(
            f"{target}: expected a folder that can be written, got {error}; choose another"
            + (", or weights='copy'" if weights == "link" else "")
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return [target / name for name in new], losses


def _check_folders(source: Path, target: Path, weights: str) -> None:
    if weights not in ("copy", "link"):
        raise ScaleError(f"weights: expected 'copy' or 'link', got {weights!r}; choose one")
    if not (source / "config.json").is_file():
        raise ScaleError(
            f"{source}: expected a folder with a checkpoint and its config.json, got none; fetch "
            "a repository of the Hub first, with huggingface_hub.snapshot_download"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ScaleError(
            f"{target}: expected a folder that is new or empty, got one with files; a copy of a "
            "checkpoint never replaces anything, choose another"
        )


def _check_files(source: Path, files: Mapping[str, str]) -> None:
    """Every file is whole, and holds the tensors that the index says."""
    for file in sorted(set(files.values())):
        names = {name for name, other in files.items() if other == file}
        missing = names - set(read_header(source / file)[0])
        if missing:
            raise ScaleError(
                f"{source / file}: expected the tensors of the index, found none named "
                f"{format_list(sorted(missing))}; fetch the file again"
            )


def _check_scales(
    scales: KVScales, source: Path, files: Iterable[str], config: Mapping[str, object]
) -> None:
    """The scales are of this model, and the checkpoint has none of its own."""
    types = [c.get("model_type") for c in (config, text_config(config))]
    if scales.model_type is not None and scales.model_type not in types and any(types):
        raise ScaleError(
            f"{source}: expected a {scales.model_type!r} model, which the scales are of, got "
            f"{types[0]!r}; use the checkpoint that they were made for"
        )
    patterns = [*(row.pattern for row in ROWS), *(p for p, _ in FOREIGN), ZERO_POINT]
    there = [name for name in files if any(p.fullmatch(name) for p in patterns)]
    if there:
        raise ScaleError(
            f"{source}: expected a checkpoint without KV scales, got {format_list(there)}; use the "
            "one that it was made from"
        )


def _new_files(
    scales: KVScales,
    layers: Mapping[int, LayerScales],
    source: Path,
    files: dict[str, str],
    config: dict[str, object],
    format: str,
    tp_size: int,
) -> dict[str, bytes]:
    """The files that the copy has instead of those of the source, or beside them."""
    if format == "hf_fp8kv":
        return scale_files(scales, layers, format, tp_size)
    if format == "vllm-json":
        own = config.get("model_type")
        return vllm_json(layers, own if isinstance(own, str) else scales.model_type, tp_size)
    if format == "trtllm":
        raise ScaleError(
            "format 'trtllm': expected no checkpoint, got one; TensorRT-LLM converts the weights, "
            "write the scales alone"
        )
    if not files:
        raise ScaleError(f"{source}: expected weights in safetensors, got none; convert them first")
    tensors = tensors_of(layers, format, _modules(files, layers, source))
    index = source / INDEX_FILE
    old = read_json(index).get("metadata") if index.is_file() else None
    total = sum(_tensor_bytes(source / file) for file in set(files.values()))
    named = {n: _FIRST_FILE if f == _ONLY_FILE else f for n, f in files.items()}
    per_head = any(layer.k.ndim for layer in layers.values())
    second = source / HF_QUANT_CONFIG
    beside = read_json(second, unique=False) if second.is_file() else None
    new = {
        SCALES_FILE: to_safetensors(tensors, {"format": "pt"}),
        INDEX_FILE: index_of(named, tensors, total, old),
    }
    if beside is not None and format in METHODS and "quantization_config" not in config:
        # The weights are quantised by this second config alone: another in the first one would
        # say something else of them.
        if format != "modelopt":
            raise ScaleError(
                f"format {format!r}: expected weights that are not quantised, got "
                f"{HF_QUANT_CONFIG}; choose modelopt, tgi, vllm-json or hf_fp8kv"
            )
        return {**new, HF_QUANT_CONFIG: as_json(declared_beside(beside, config))}
    config = declared(format, config, per_head=per_head, excluded=_modules_with_weights(files))
    if format == "modelopt":
        new[HF_QUANT_CONFIG] = as_json(declared_beside(beside, config))
    return {**new, "config.json": as_json(config)}


def _modules(files: Iterable[str], layers: Iterable[int], source: Path) -> dict[int, str]:
    """The attention module of each layer, by the names of its weights."""
    found: dict[int, set[str]] = {}
    for name in files:
        match = MODULE.match(name)
        if match is not None:
            found.setdefault(int(match["layer"]), set()).add(match["path"])
    modules = {}
    for index in layers:
        paths = found.get(index, set())
        if len(paths) != 1:
            raise ScaleError(
                f"{source}: expected one attention module in layer {index}, got "
                f"{format_list(sorted(paths)) or 'none'}; use the scales of this very model"
            )
        modules[index] = paths.pop()
    return modules


def _modules_with_weights(files: Iterable[str]) -> list[str]:
    """The modules that have a weight, and what holds experts, as some readers name them."""
    modules = {name.removesuffix(".weight") for name in files if name.endswith(".weight")}
    experts = {name.split(".experts.")[0] + ".experts" for name in files if ".experts." in name}
    return sorted(modules | experts)


def _tensor_bytes(path: Path) -> int:
    """The bytes of a safetensors file after its header."""
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    return path.stat().st_size - 8 - header


def _transfer(
    source: Path, staging: Path, new: Iterable[str], weights: Weights, *, renamed: bool
) -> None:
    """Links or copies everything but hidden files and what is written anew."""
    left_out = {*new, OWN_FILE, OWN_SUMMARY, JSON_FILE, REPORT_FILE}
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        if any(part.startswith(".") for part in relative.parts) or not path.is_file():
            continue
        if str(relative) in left_out:
            continue
        if renamed and str(relative) == _ONLY_FILE:
            relative = Path(_FIRST_FILE)
        place = staging / relative
        place.parent.mkdir(parents=True, exist_ok=True)
        if weights == "link" and path.suffix.lower() in _WEIGHTS:
            # The Hub's cache holds symbolic links: the file itself is what stays.
            os.link(path.resolve(), place)
        else:
            shutil.copy2(path, place)
            with place.open("rb") as file:
                os.fsync(file.fileno())


def _check_copy(
    folder: Path, layers: Mapping[int, LayerScales], target: Path, tp_rank: int, tp_size: int
) -> None:
    """Reads the copy: what a config of long ago says may change what the scales mean."""
    try:
        read = KVScales.from_pretrained(folder, tp_rank=tp_rank, tp_size=tp_size).layers
    except ScaleError as error:
        raise ScaleError(str(error).replace(str(folder), str(target))) from error
    for index in {*layers, *read}:
        pair = [side.get(index) for side in (layers, read)]
        if None in pair or not _same(*pair):  # type: ignore[arg-type]
            raise ScaleError(
                f"{target}: expected to read back what was written for layer {index}, got "
                f"{format_value([s and (s.k.tolist(), s.v.tolist()) for s in pair])}; config.json "
                "says something else of the KV cache, remove that entry"
            )


def _same(left: LayerScales, right: LayerScales) -> bool:
    sides = ((left.k, right.k), (left.v, right.v), (left.k_center, right.k_center))
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in sides)
