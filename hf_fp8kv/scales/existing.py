"""Existing files and scales of the place that scales are written to, and their removal."""

from collections.abc import Collection, Iterable
from pathlib import Path, PurePath

from ..errors import ScaleError
from ..utils.files import WEIGHTS, read_header, read_json
from ..utils.text import format_list
from .checkpoint.checkpoint import (
    OWN_FILE,
    OWN_FOLDER,
    SCALES_FILE,
    Checkpoint,
    find_added,
    find_in_shards,
    find_indexed,
)
from .checkpoint.config import HF_QUANT_CONFIG, check_layer_counts
from .checkpoint.declaration import Declaration, remove_declaration
from .checkpoint.folder import LocalFolder
from .checkpoint.tensor_names import CACHE_PATTERNS
from .formats import ScaleFormat
from .formats.base import TensorFormat

# All that a config.json of scales alone can have, whichever the format.
_MINIMAL_ENTRIES = frozenset((
    "model_type", "num_hidden_layers", "num_key_value_heads", "quantization_config",
    "kv_cache_torch_dtype",
))  # fmt: skip


def list_files(folder: Path) -> list[str]:
    """Return the names of the files in a folder, and of those in the folder of our own file."""
    paths = [*folder.glob("*"), *folder.glob(f"{OWN_FOLDER}/*")]
    return [path.relative_to(folder).as_posix() for path in paths if path.is_file()]


def find_weights(names: Iterable[str]) -> list[str]:
    """Return the file names in a model's folder that are weights."""
    scales = (OWN_FILE, SCALES_FILE)
    return [
        name
        for name in names
        if PurePath(name).suffix.lower() in WEIGHTS and name not in scales and "/" not in name
    ]


def check_place(
    place: object, existing: Collection[str], files: Collection[str], *, overwrite: bool
) -> None:
    """Raise ScaleError unless `files` of scales may be written to a place with `existing` files.

    Without `overwrite` they replace nothing, also not the config of weights. They are never written
    next to scales that readers prefer.
    """
    own = [f"{OWN_FOLDER}/{OWN_FILE}"] if OWN_FILE in files else []
    replaced = sorted({*files, *own} & {*existing})
    if replaced and not overwrite:
        raise ScaleError(
            f"{place}: expected a place without {format_list(replaced)}, got one that has it; "
            "choose another, or pass overwrite=True (--overwrite)"
        )
    weights = find_weights(existing)
    if "config.json" in files and weights and not overwrite:
        raise ScaleError(
            f"{place}: expected a place without weights, got {format_list(weights)}; choose "
            "another, or pass checkpoint= (--checkpoint) for a copy of the checkpoint with the "
            "scales, which can be uploaded"
        )
    if OWN_FILE not in files and any(PurePath(name).name == OWN_FILE for name in existing):
        raise ScaleError(
            f"{place}: expected a place without {OWN_FILE}, which is read before all others, got "
            "one that has it; choose another, or delete it"
        )


def open_source(
    source: Path, format: ScaleFormat, *, overwrite: bool, whole: bool = True
) -> Checkpoint:
    """Return the checkpoint in a folder without its scales.

    Args:
        source: The folder.
        format: The format in which scales will be written to it.
        overwrite: Whether it may have scales.
        whole: Whether it has weights. False is a folder of scales, or an empty one.

    Raises:
        ScaleError: It has scales and `overwrite` is False, it is not complete, or it cannot have
            scales in the format.
    """
    path, second_path = source / "config.json", source / HF_QUANT_CONFIG
    if whole and not path.is_file():
        raise ScaleError(
            f"{source}: expected a folder with a checkpoint and its config.json, got none; fetch "
            "a repository of the Hub first, with huggingface_hub.snapshot_download"
        )
    config = read_json(path, unique=False) if path.is_file() else {}
    if not whole and _MINIMAL_ENTRIES.issuperset(config):
        config = {}  # only scales wrote it
    check_layer_counts(path, config)
    folder = LocalFolder(source)
    files = (find_indexed(folder) or find_in_shards(folder)) | find_added(folder)
    if whole and isinstance(format, TensorFormat) and not files:
        raise ScaleError(f"{source}: expected weights in safetensors, got none; convert them")
    present = [name for name in files if any(p.fullmatch(name) for p in CACHE_PATTERNS)]
    for file in sorted(set(files.values())):
        names = {name for name, other in files.items() if other == file}
        # An interrupted call may have removed some scales.
        missing = names - set(read_header(source / file)[0]) - set(present if overwrite else ())
        if missing:
            raise ScaleError(
                f"{source / file}: expected the tensors of the index, found none named "
                f"{format_list(sorted(missing))}; fetch the file again"
            )
        if file == SCALES_FILE and not names.issubset(present):
            raise ScaleError(
                f"{source / file}: expected a file of scales to replace, got one with "
                f"{format_list(names.difference(present))}; rename that file"
            )
    if present and not overwrite:
        raise ScaleError(
            f"{source}: expected a checkpoint without KV scales, got {format_list(present)}; use "
            "the one that it was made from, or pass overwrite=True (--overwrite) to replace them "
            "in the copy"
        )
    if config and (present or not whole):
        second = read_json(second_path, unique=False) if second_path.is_file() else None
        config = remove_declaration(str(source), config, second, format.name)
    for name in present:
        del files[name]
    return Checkpoint(folder, config, Declaration(), files, frozenset(present))
