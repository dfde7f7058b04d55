"""Read scales from a file or a checkpoint, according to the KV cache that its configs declare."""

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import ScaleError
from ..utils.files import CACHE_FORMAT, PICKLE_SUFFIXES, read_header, read_json, read_weight_map
from ..utils.text import format_list
from .checkpoint.checkpoint import (
    JSON_FILE,
    KV_FILE,
    KV_FOLDER,
    SCALES_SHARD,
    Checkpoint,
    Folder,
    HubFolder,
    LocalFolder,
    find_indexed_tensors,
    find_shard_tensors,
    read_configs,
)
from .checkpoint.configs import TGI_ENTRY, as_mapping
from .checkpoint.read_tensors import read_tensors
from .checkpoint.tensor_names import match_tensors
from .formats.separate_files import METADATA_KEY, parse_json, parse_kv_scales
from .layer_scales import ScaleData
from .read_options import ReadOptions

logger = logging.getLogger(__name__)

_RANK_FILE_PATTERN = re.compile(r"rank([0-9]{1,6})\.safetensors")


def read_file(path: Path, read_options: ReadOptions) -> ScaleData:
    """Return the scales of one file in any format. Raise ScaleError if it has none."""
    if not os.path.isfile(path):
        got = "a folder. Use from_pretrained" if os.path.isdir(path) else "none. Check the path"
        raise ScaleError(f"{path}: expected a file, got {got}")
    if path.suffix not in (".json", ".safetensors"):
        raise ScaleError(
            f"{path}: expected .json or .safetensors, got {path.suffix!r}. Pass such a file, or "
            "convert the file (pickles are never loaded)"
        )
    if path.suffix == ".json":
        content = read_json(path)
        if "weight_map" not in content:
            return parse_json(path, content, read_options, {})
        tensor_files = read_weight_map(path)
    else:
        tensor_names, metadata = read_header(path)
        if METADATA_KEY in metadata:
            return parse_kv_scales(path.read_bytes(), str(path))
        if metadata.get("format") == CACHE_FORMAT:
            raise ScaleError(
                f"{path}: expected scales, got a cache of FP8PagedCache.save. FP8PagedCache.load "
                "reads it, and plan=FP8PagedCache.load(...).plan is its storage plan"
            )
        tensor_files = dict.fromkeys(tensor_names, path.name)
    # The config next to a checkpoint's file or index defines the scales.
    checkpoint = read_configs(LocalFolder(path.parent))
    return read_tensors(replace(checkpoint, tensor_files=tensor_files), read_options)


def read_checkpoint(name: str, read_options: ReadOptions, **hub_options: Any) -> ScaleData:
    """Return the scales of a local folder or repository. Raise ScaleError if it has none."""
    hub = HubFolder(name, **hub_options)
    if name and os.path.isdir(name):
        return read_folder(LocalFolder(Path(name) / (hub.subfolder or "")), read_options)
    suffixes = (".json", ".safetensors", *PICKLE_SUFFIXES)
    if name and (os.path.isfile(name) or Path(name).suffix.lower() in suffixes):
        return read_file(Path(name), read_options)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?", name):
        raise ScaleError(
            f"{name!r}: expected a folder, a file or a repository id, found none. Check the path"
        )
    return read_folder(hub, read_options)


def read_folder(folder: Folder, read_options: ReadOptions) -> ScaleData:
    """Return the scales of a folder, from `KV_FILE`, tensors or `JSON_FILE`, in this order."""
    for prefix in (f"{KV_FOLDER}/", ""):
        if (path := folder.find_file(prefix + KV_FILE)) is not None:
            return read_file(path, read_options)
    checkpoint = read_configs(folder)
    tensor_files = find_indexed_tensors(folder)
    shards = [] if tensor_files else folder.list_files(".safetensors")
    rank_files = {
        int(match[1]): match[0] for match in filter(None, map(_RANK_FILE_PATTERN.fullmatch, shards))
    }
    # The files of a repository are not listed, so its config must declare TensorRT-LLM's format.
    while not tensor_files and not shards and checkpoint.declaration.dialect == "trtllm":
        name = f"rank{len(rank_files)}.safetensors"
        if folder.list_tensors(name) is None:
            break
        rank_files[len(rank_files)] = name
    if rank_files:
        return _read_ranks(checkpoint, rank_files, read_options)
    tensor_files = tensor_files or find_shard_tensors(folder)
    if checkpoint.declaration.kind == "static" and TGI_ENTRY in checkpoint.config:
        # The index of a copy for TGI does not have the scales, even with quantized weights.
        tensor_files |= dict.fromkeys(folder.list_tensors(SCALES_SHARD) or (), SCALES_SHARD)
    checkpoint = replace(checkpoint, tensor_files=tensor_files)
    scale_tensors, _ = match_tensors(tensor_files, checkpoint.declaration)
    if scale_tensors:
        if read_options.strict and folder.find_file("config.json") is None:
            raise ScaleError(
                f"{folder.origin}: expected a config.json next to the checkpoint, found none. It "
                "declares the format of the scales. Add it, or pass strict=False (--lenient)"
            )
    elif (path := folder.find_file(JSON_FILE)) is not None:
        logger.info("%s: no scales among its tensors, reading %s", folder.origin, JSON_FILE)
        return parse_json(path, read_json(path), read_options, checkpoint.config)
    if not checkpoint.config and isinstance(folder, HubFolder) and folder.offline_reason:
        raise ScaleError(
            f"{folder.repo!r}: expected a folder, or a repository with files here, got no such "
            f"folder, and {folder.offline_reason}. Check the path, or connect to the Hub"
        )
    return read_tensors(checkpoint, read_options)


def _read_ranks(
    checkpoint: Checkpoint, files: Mapping[int, str], read_options: ReadOptions
) -> ScaleData:
    """Return the scales of the requested rank, or the largest scales over all ranks."""
    num_ranks = len(files)
    if sorted(files) != list(range(num_ranks)):
        raise ScaleError(
            f"{checkpoint.origin}: expected the ranks 0 to {num_ranks - 1}, got "
            f"{format_list(sorted(files))}. Fetch the missing file"
        )
    # Each pipeline stage counts its layers from 0, and its file lacks the stage's number.
    expected_counts = {
        "pp_size": 1,
        "tp_size": num_ranks,
        "world_size": num_ranks,
        "tensor_parallel": num_ranks,
    }
    for config in (as_mapping(checkpoint.config.get("mapping")), checkpoint.config):
        for entry, count in expected_counts.items():
            if config.get(entry) not in (None, count):
                raise ScaleError(
                    f"{checkpoint.origin}: expected {num_ranks} ranks of one pipeline stage, one "
                    f"for each file, got {entry} = {config[entry]!r} in config.json. Fetch missing "
                    "files, and convert without pipeline parallelism"
                )

    def read_rank(rank: int) -> ScaleData:
        tensor_names = checkpoint.folder.list_tensors(files[rank]) or ()
        tensor_files = dict.fromkeys(tensor_names, files[rank])
        return read_tensors(replace(checkpoint, tensor_files=tensor_files), read_options)

    return read_options.merge_ranks(checkpoint.origin, num_ranks, read_rank)
