"""Reading scales: of a file or a whole checkpoint, by what its configs declare of its KV cache."""

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from ..errors import ScaleError
from ..utils.files import CACHE_FORMAT, PICKLES, read_header, read_json, read_weight_map
from ..utils.text import format_list
from .checkpoint.checkpoint import (
    JSON_FILE,
    OWN_FILE,
    OWN_FOLDER,
    SCALES_FILE,
    Checkpoint,
    Folder,
    HubFolder,
    HubOptions,
    LocalFolder,
    find_in_shards,
    find_indexed,
    read_configs,
)
from .checkpoint.configs import TGI_ENTRY, as_mapping
from .checkpoint.read_tensors import read_tensors
from .checkpoint.tensor_names import match_tensors
from .formats.files import METADATA, parse_json, read_own_file
from .layer_scales import ScaleData
from .report import REPORT_FILE
from .request import Request

logger = logging.getLogger(__name__)

_RANK_FILE = re.compile(r"rank([0-9]{1,6})\.safetensors")


def read_file(path: Path, request: Request) -> ScaleData:
    """Return the scales of one file, whichever format it is in; raise ScaleError otherwise."""
    if not os.path.isfile(path):
        advice = "use from_pretrained" if os.path.isdir(path) else "check the path"
        raise ScaleError(f"{path}: expected a file, found none; {advice}")
    if path.suffix not in (".json", ".safetensors"):
        raise ScaleError(
            f"{path}: expected .json or .safetensors, got {path.suffix!r}; name one of those, or "
            "convert the file (pickles are never loaded)"
        )
    if path.suffix == ".json":
        data = read_json(path)
        if "weight_map" not in data:
            return parse_json(path, data, request, {})
        files = read_weight_map(path)
    else:
        names, facts = read_header(path)
        if METADATA in facts:
            return read_own_file(path)
        if facts.get("format") == CACHE_FORMAT:
            raise ScaleError(
                f"{path}: expected scales, got a cache that FP8PagedCache.save wrote; "
                "FP8PagedCache.load reads it, and plan=FP8PagedCache.load(...).plan stores layers "
                "as it does"
            )
        files = dict.fromkeys(names, path.name)
    # One file of a checkpoint, or its index: the config beside it says what the scales mean.
    return read_tensors(replace(read_configs(LocalFolder(path.parent)), files=files), request)


def read_checkpoint(name: str, request: Request, **hub_options: Unpack[HubOptions]) -> ScaleData:
    """Return the scales of a local folder or repository of the Hub; raise ScaleError if none."""
    hub = HubFolder(name, **hub_options)
    if name and os.path.isdir(name):
        return read_folder(LocalFolder(Path(name) / (hub.subfolder or "")), request)
    files = (".json", ".safetensors", *PICKLES)
    if name and (os.path.isfile(name) or Path(name).suffix.lower() in files):
        return read_file(Path(name), request)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?", name):
        raise ScaleError(
            f"{name!r}: expected a folder, a file or a repository id, found none; check the path"
        )
    return read_folder(hub, request)


def read_folder(folder: Folder, request: Request) -> ScaleData:
    """Return the scales of a folder: of our own file, of tensors, or of a JSON file."""
    for place in (f"{OWN_FOLDER}/", ""):
        own = folder.path(place + OWN_FILE)
        if own is not None:
            folder.path(place + REPORT_FILE)  # fetched to lie beside it
            return read_file(own, request)
    checkpoint = read_configs(folder)
    indexed = find_indexed(folder)
    listed = [] if indexed else folder.list_files(".safetensors")
    ranks = {int(match[1]): name for name in listed if (match := _RANK_FILE.fullmatch(name))}
    # The files of a repository are not listed, so its config must declare TensorRT-LLM's.
    while not indexed and not listed and checkpoint.declaration.dialect == "trtllm":
        name = f"rank{len(ranks)}.safetensors"
        if folder.header(name) is None:
            break
        ranks[len(ranks)] = name
    if ranks:
        return _read_ranks(checkpoint, ranks, request)
    files = indexed or find_in_shards(folder)
    if checkpoint.declaration.kind == "static" and TGI_ENTRY in checkpoint.config:
        # A copy for TGI has an index without the scales, also beside quantized weights.
        files |= dict.fromkeys(folder.header(SCALES_FILE) or (), SCALES_FILE)
    checkpoint = replace(checkpoint, files=files)
    if match_tensors(files, checkpoint.declaration)[0]:
        if request.strict and folder.path("config.json") is None:
            raise ScaleError(
                f"{folder.origin}: expected a config.json beside the checkpoint, found none: it "
                "says whether the scales are of FP8; add it, or pass strict=False (--lenient)"
            )
    elif (path := folder.path(JSON_FILE)) is not None:
        logger.info("%s: no scales among its tensors, reading %s", folder.origin, JSON_FILE)
        return parse_json(path, read_json(path), request, checkpoint.config)
    return read_tensors(checkpoint, request)


def _read_ranks(checkpoint: Checkpoint, files: Mapping[int, str], request: Request) -> ScaleData:
    """Return one rank's scales, or for one process the largest over the ranks."""
    if sorted(files) != list(range(len(files))):
        raise ScaleError(
            f"{checkpoint.origin}: expected the ranks 0 to {len(files) - 1}, got "
            f"{format_list(sorted(files))}; fetch the missing file"
        )
    for owner in (as_mapping(checkpoint.config.get("mapping")), checkpoint.config):
        # Each stage of a pipeline counts its layers from 0: which one is which is not written.
        counts = dict.fromkeys(("tp_size", "world_size", "tensor_parallel"), len(files))
        for entry, count in {"pp_size": 1, **counts}.items():
            if owner.get(entry) not in (None, count):
                raise ScaleError(
                    f"{checkpoint.origin}: expected {len(files)} ranks of one pipeline stage, as "
                    f"there are files, got {entry} = {owner[entry]!r} in config.json; fetch "
                    "missing files, and convert without pipeline parallelism"
                )

    def read(rank: int) -> ScaleData:
        names = checkpoint.folder.header(files[rank]) or ()
        return read_tensors(replace(checkpoint, files=dict.fromkeys(names, files[rank])), request)

    return request.merge_ranks(checkpoint.origin, len(files), read)
