"""Reading scales: of a file or a whole checkpoint, by what its configs declare of its KV cache."""

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from ..errors import ScaleError
from ..utils.files import CACHE_FORMAT, PICKLES, read_header, read_json, read_weight_map
from .checkpoint.checkpoint import Checkpoint
from .checkpoint.config import (
    CACHE_ENTRIES,
    HF_QUANT_CONFIG,
    Declaration,
    as_mapping,
    check_layer_counts,
    get_entry,
    nested_configs,
    parse_entry,
)
from .checkpoint.folder import Folder, HubFolder, HubOptions, LocalFolder
from .checkpoint.read_tensors import read_tensors
from .formats import OWN_FILES, SCALE_FORMATS, TENSOR_NAMES
from .formats.checkpoints import TGI_ENTRY, AutoFP8, ModelOpt, Tgi
from .formats.hf_fp8kv import OWN_FILE, OWN_FOLDER
from .formats.tensor_format import with_own_file
from .layer_scales import ScaleData
from .report import REPORT_FILE
from .request import Request


def read_file(path: Path, request: Request) -> ScaleData:
    """Return the scales of one file, whichever format it is in; raise ScaleError otherwise."""
    if path.suffix.lower() in PICKLES:
        raise ScaleError(
            f"{path}: expected .json or .safetensors, got {path.suffix}; pickles are never "
            "loaded, convert the file to safetensors"
        )
    if not os.path.isfile(path):
        advice = "use from_pretrained" if os.path.isdir(path) else "check the path"
        raise ScaleError(f"{path}: expected a file, found none; {advice}")
    if path.suffix not in (".json", ".safetensors"):
        raise ScaleError(
            f"{path}: expected .json or .safetensors, got {path.suffix!r}; name one of those"
        )
    for format in SCALE_FORMATS.values():
        scales = format.read_file(path, request)
        if scales is not None:
            return scales
    # One file of a checkpoint, or its index: the config beside it says what the scales mean.
    if path.suffix == ".json":
        files = read_weight_map(path)
    else:
        names, facts = read_header(path)
        if facts.get("format") == CACHE_FORMAT:
            raise ScaleError(
                f"{path}: expected scales, got a cache that FP8PagedCache.save wrote; "
                "FP8PagedCache.load reads it, and plan=FP8PagedCache.load(...).plan stores layers "
                "as it does"
            )
        files = dict.fromkeys(names, path.name)
    return read_tensors(_open_checkpoint(LocalFolder(path.parent)), files, request)


def read_checkpoint(name: str, request: Request, **hub_options: Unpack[HubOptions]) -> ScaleData:
    """Return the scales of a local folder or repository of the Hub; raise ScaleError if none."""
    hub = HubFolder(name, **hub_options)
    if name and os.path.isdir(name):
        return _read_folder(LocalFolder(Path(name) / (hub.subfolder or "")), request)
    files = (".json", ".safetensors", *PICKLES)
    if name and (os.path.isfile(name) or Path(name).suffix.lower() in files):
        return read_file(Path(name), request)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?", name):
        raise ScaleError(
            f"{name!r}: expected a folder, a file or a repository id, found none; check the path"
        )
    return _read_folder(hub, request)


def _read_folder(folder: Folder, request: Request) -> ScaleData:
    for place in (f"{OWN_FOLDER}/", ""):
        own = folder.path(place + OWN_FILE)
        if own is not None:
            folder.path(place + REPORT_FILE)  # fetched to lie beside it
            return read_file(own, request)
    checkpoint = _open_checkpoint(folder)
    for format in reversed(SCALE_FORMATS.values()):
        scales = format.read(checkpoint, request)
        if scales is not None:
            return scales
    return read_tensors(checkpoint, checkpoint.files, request)  # raises: there are none


def declared_kv_scales(config: object) -> str | None:
    """Describe the static FP8 KV scales that a config, or the dict of one, declares; or None."""
    declared = find_declaration(config)
    return declared.what if declared.kind == "static" else None


def _open_checkpoint(folder: Folder) -> Checkpoint:
    """Return the checkpoint in a folder, with what its configs declare."""
    path, second_path = folder.path("config.json"), folder.path(HF_QUANT_CONFIG)
    config = {} if path is None else read_json(path, unique=False)
    second = None if second_path is None else read_json(second_path, unique=False)
    check_layer_counts(path, config)
    declared = find_declaration(config, second)
    checkpoint = Checkpoint(folder, config, declared, TENSOR_NAMES, OWN_FILES)
    # A copy for TGI has an index without the scales, also beside a config of quantized weights.
    if declared.kind == "static" and TGI_ENTRY in config:
        return with_own_file(checkpoint)
    return checkpoint


def find_declaration(config: object, hf_quant_config: object = None) -> Declaration:
    """Return what a config, and ModelOpt's second config beside it, say of static KV scales."""
    owners = [("", config), *nested_configs("", config)]
    declarations: list[Declaration] = []
    dialect = None
    for entry in ("quantization_config", "compression_config", "quantization"):
        for prefix, owner in owners:
            block = as_mapping(get_entry(owner, entry))
            if block:
                block_dialect = _find_dialect(entry, block)
                dialect = dialect or block_dialect
                declarations += _parse_block(prefix + entry, block, block_dialect)
    if hf_quant_config is not None:
        dialect = dialect if dialect not in (None, AutoFP8.name) else ModelOpt.name
        declarations += _parse_block(HF_QUANT_CONFIG, as_mapping(hf_quant_config), ModelOpt.name)
    dialect = dialect or Tgi.name
    for entry in (TGI_ENTRY, "kv_cache_dtype"):
        for prefix, owner in owners:
            declared = parse_entry(prefix + entry, get_entry(owner, entry))
            declarations += _in_dialect(dialect, declared)
    fnuz = any(declaration.fnuz for declaration in declarations)
    rotated = max((declaration.rotated for declaration in declarations), default=0)
    for kind in ("refused", "static", "dynamic"):
        for declaration in declarations:
            if declaration.kind == kind:
                return replace(declaration, fnuz=fnuz, rotated=rotated)
    return Declaration(dialect=dialect, rotated=rotated)


def _find_dialect(entry: str, block: Mapping[str, object]) -> str:
    """Return the format of the tool that wrote a quantization entry."""
    method = block.get("quant_method")
    method = str(getattr(method, "value", method) or "").lower()
    for format in SCALE_FORMATS.values():
        if format.recognizes(entry, method):
            return format.name
    return AutoFP8.name


def _parse_block(where: str, block: Mapping[str, object], dialect: str) -> list[Declaration]:
    inner = as_mapping(block.get("quantization"))
    declarations: list[Declaration] = []
    for entry in CACHE_ENTRIES:
        for prefix, owner in (("quantization.", inner), ("", block)):
            declarations += parse_entry(f"{where}.{prefix}{entry}", owner.get(entry))
    for format in SCALE_FORMATS.values():
        declarations += format.parse_block(where, block)
    return _in_dialect(dialect, declarations)


def _in_dialect(dialect: str, declarations: list[Declaration]) -> list[Declaration]:
    return [replace(declaration, dialect=dialect) for declaration in declarations]
