"""What the configs of a checkpoint declare of its KV cache, by the rules of every format."""

from collections.abc import Mapping
from dataclasses import replace

from ..utils.files import read_json
from .checkpoint.checkpoint import Checkpoint
from .checkpoint.config import (
    HF_QUANT_CONFIG,
    Declaration,
    as_mapping,
    get_entry,
    nested_configs,
    parse_entry,
)
from .checkpoint.folder import Folder
from .formats import OWN_FILES, SCALE_FORMATS, TENSOR_NAMES
from .formats.autofp8 import AutoFP8
from .formats.modelopt import ModelOpt
from .formats.tgi import Tgi


def declared_kv_scales(config: object) -> str | None:
    """Describe the static FP8 KV scales that a config, or the dict of one, declares; or None."""
    declared = find_declaration(config)
    return declared.what if declared.kind == "static" else None


def open_checkpoint(folder: Folder) -> Checkpoint:
    """Return the checkpoint in a folder, with what its configs declare."""
    path, second_path = folder.path("config.json"), folder.path(HF_QUANT_CONFIG)
    config = {} if path is None else read_json(path, unique=False)
    second = None if second_path is None else read_json(second_path, unique=False)
    declared = find_declaration(config, second)
    return Checkpoint(folder, config, declared, TENSOR_NAMES, OWN_FILES)


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
    for entry in ("kv_cache_torch_dtype", "kv_cache_dtype"):
        for prefix, owner in owners:
            declarations += _in_dialect(
                dialect, parse_entry(prefix + entry, get_entry(owner, entry))
            )
    fnuz = any(declaration.fnuz for declaration in declarations)
    for kind in ("refused", "static", "dynamic"):
        for declaration in declarations:
            if declaration.kind == kind:
                return replace(declaration, fnuz=fnuz)
    return Declaration(dialect=dialect)


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
    for entry in ("kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_dtype"):
        for prefix, owner in (("quantization.", inner), ("", block)):
            declarations += parse_entry(f"{where}.{prefix}{entry}", owner.get(entry))
    for format in SCALE_FORMATS.values():
        declarations += format.parse_block(where, block)
    return _in_dialect(dialect, declarations)


def _in_dialect(dialect: str, declarations: list[Declaration]) -> list[Declaration]:
    return [replace(declaration, dialect=dialect) for declaration in declarations]
