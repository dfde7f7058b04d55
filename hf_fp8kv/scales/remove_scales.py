"""Removing the KV scales that a checkpoint has: their tensors, and what its config says of them."""

import copy
import json
import math
import os
from collections.abc import Collection
from pathlib import Path

from ..errors import ScaleError
from .checkpoint.checkpoint import Checkpoint
from .checkpoint.config import CACHE_ENTRIES, Config, nested_configs
from .checkpoint.tensor_names import FOREIGN, ZERO_POINT
from .formats import SCALE_FORMATS, TENSOR_NAMES, ScaleFormat
from .load import find_declaration

_BLOCKS = ("quantization_config", "compression_config", "quantization")
_OF_CONFIGS = ("kv_cache_torch_dtype", "kv_cache_dtype")
_PIECE = 2**24  # bytes that are copied at a time


def find_scales(checkpoint: Checkpoint) -> list[str]:
    """Return the names of the tensors that belong to an 8-bit or 4-bit KV cache."""
    patterns = [*(known.pattern for known in TENSOR_NAMES), *(p for p, _ in FOREIGN), ZERO_POINT]
    return [name for name in checkpoint.files if any(p.fullmatch(name) for p in patterns)]


def remove_declaration(
    origin: str, config: Config, second: Config | None, format: ScaleFormat
) -> Config:
    """Return a `config.json` without what it says of the scales; what is said of weights stays.

    What `format` will say anew is left to it. ScaleError is raised if something stays that would
    be wrong with scales in this format, such as an entry in `second`, a `hf_quant_config.json`.
    """
    config = copy.deepcopy(config)
    stays = find_declaration(config, second).dialect == format.name
    owners = [config, *(inner for _, inner in nested_configs("", config))]
    for owner in filter(lambda owner: isinstance(owner, dict), owners):
        assert isinstance(owner, dict)
        for entry in _BLOCKS:
            block = owner.get(entry)
            if isinstance(block, dict):
                for other in SCALE_FORMATS.values():
                    other.remove_declaration(block)
                if not stays:
                    _pop(block, CACHE_ENTRIES)
                    _pop(block.get("quantization"), CACHE_ENTRIES)
                    if _says_nothing(block):
                        del owner[entry]
        if not stays:
            _pop(owner, _OF_CONFIGS)
    left = find_declaration(config, second)
    if not stays and left.kind != "none":
        raise ScaleError(
            f"{origin}: expected a checkpoint whose KV scales can be replaced in the format "
            f"{format.name!r}, got one that declares {left.what}; choose {left.dialect}"
        )
    return config


def _pop(owner: object, entries: Collection[str]) -> None:
    if isinstance(owner, dict):
        for entry in entries:
            owner.pop(entry, None)


def _says_nothing(block: Config) -> bool:
    """Return whether a block of compressed-tensors quantizes nothing."""
    compressed = block.get("quant_method") == "compressed-tensors"
    return compressed and not block.get("config_groups") and not block.get("sparsity_config")


def remove_from_index(index: Path, place: Path, names: Collection[str]) -> None:
    """Write a safetensors index without some tensors; the sizes in its metadata are left out."""
    content = json.loads(index.read_bytes())
    weight_map = {n: file for n, file in content["weight_map"].items() if n not in names}
    metadata = dict(content.get("metadata") or {})
    _pop(metadata, ("total_size", "total_parameters"))
    place.write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2) + "\n")


def copy_without(source: Path, place: Path, names: Collection[str]) -> None:
    """Copy a safetensors file without some tensors; the bytes of the others stay the same.

    They are copied piece by piece: a file may be larger than the memory.
    """
    with source.open("rb") as old, place.open("wb") as new:
        size = int.from_bytes(old.read(8), "little")
        header = json.loads(old.read(size))
        metadata = header.pop("__metadata__", None)
        kept = {name: entry for name, entry in header.items() if name not in names}
        # Wide numbers first, as safetensors writes them: so each tensor is aligned.
        order = sorted(kept, key=lambda n: (-_bytes_per_number(kept[n]), kept[n]["data_offsets"]))
        spans = [tuple(kept[name]["data_offsets"]) for name in order]
        offset = 0
        written = {} if metadata is None else {"__metadata__": metadata}
        for name, (start, stop) in zip(order, spans, strict=True):
            written[name] = kept[name] | {"data_offsets": [offset, offset + stop - start]}
            offset += stop - start
        text = json.dumps(written, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        new.write(len(text).to_bytes(8, "little") + text)
        for start, stop in spans:
            old.seek(8 + size + start)
            for at in range(start, stop, _PIECE):
                new.write(old.read(min(_PIECE, stop - at)))
        new.flush()
        os.fsync(new.fileno())


def _bytes_per_number(entry: dict[str, list[int]]) -> int:
    start, stop = entry["data_offsets"]
    return (stop - start) // max(math.prod(entry["shape"]), 1)
