"""Write scales alone, into a checkpoint, or into a copy of a checkpoint.

Nothing is changed before all files are complete under temporary names. `config.json` comes last, so
until then a folder has the same weights under the old config.
"""

import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import Literal, get_args

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..errors import ScaleError
from ..utils.files import WEIGHT_SUFFIXES, read_header, read_weight_map, write_atomically
from ..utils.text import format_list, format_value
from .checkpoint.checkpoint import (
    FIRST_FILE,
    INDEX_FILE,
    JSON_FILE,
    KV_FILE,
    KV_FOLDER,
    SCALES_SHARD,
    SINGLE_FILE,
    Checkpoint,
    Folder,
    LocalFolder,
    find_indexed_tensors,
    find_shard_tensors,
    read_configs,
)
from .checkpoint.configs import HF_QUANT_CONFIG, find_text_config, remove_declaration
from .checkpoint.tensor_names import CACHE_PATTERNS
from .formats import SCALE_FORMATS, ScaleFormat
from .formats.base import TensorFormat, make_index
from .formats.separate_files import HfFp8kv
from .layer_scales import ScaleData
from .load import read_folder
from .read_options import ReadOptions

Weights = Literal["copy", "link"]
# Possible paths of the files of the format "hf_fp8kv".
_KV_PATHS = (KV_FILE, f"{KV_FOLDER}/{KV_FILE}")
# All entries that a config.json of scales alone can have, in any format.
_MINIMAL_ENTRIES = frozenset(
    (
        "model_type",
        "num_hidden_layers",
        "num_key_value_heads",
        "quantization_config",
        "kv_cache_torch_dtype",
    )
)
# The bytes of a file, a function that makes it, or None for a file that is deleted.
_Content = bytes | Callable[[Path], object] | None


def find_format(name: str, tp_size: int) -> ScaleFormat:
    """Return a format by name. Raise ScaleError if it is unknown or cannot hold `tp_size` ranks."""
    if name not in SCALE_FORMATS:
        note = ". trtllm stores scales only with weights" if name == "trtllm" else ""
        raise ScaleError(
            f"format: expected one of {', '.join(SCALE_FORMATS)}, got {name!r}. Choose a "
            f"format{note}"
        )
    scale_format = SCALE_FORMATS[name]
    is_count = isinstance(tp_size, int) and tp_size > 0
    if not is_count or (tp_size > 1 and not scale_format.holds_ranks):
        rank_formats = [repr(each.name) for each in SCALE_FORMATS.values() if each.holds_ranks]
        raise ScaleError(
            f"tp_size: expected 1, or the number of ranks for {' or '.join(rank_formats)}, got "
            f"{tp_size!r} for {name!r}. No other format has ranks"
        )
    return scale_format


def _place_files(old_files: Collection[str], files: Mapping[str, bytes]) -> dict[str, bytes | None]:
    """Return contents by path, or None to delete. Next to weights, "hf_fp8kv" has a subfolder."""
    if KV_FILE not in files:
        return dict(files)
    uses_folder = _find_weight_files(old_files) or f"{KV_FOLDER}/{KV_FILE}" in old_files
    prefix = f"{KV_FOLDER}/" if uses_folder else ""
    new_files = {
        prefix + name if name == KV_FILE else name: content for name, content in files.items()
    }
    return {**dict.fromkeys(path for path in _KV_PATHS if path in old_files), **new_files}


def read_base(
    target: Path,
    scale_format: ScaleFormat,
    new_files: Collection[str],
    checkpoint: Path | None,
    weights: Weights = "copy",
    *,
    overwrite: bool,
) -> Checkpoint | None:
    """Return the checkpoint that gets the scales, without its old scales.

    None means that the format needs no checkpoint.

    Raises:
        ScaleError: The `new_files` with scales cannot be written to `target`, or the checkpoint is
            incomplete, has scales without `overwrite`, or has scales that cannot be replaced.
    """
    source = checkpoint or target
    has_model = True
    target_path = target.resolve()  # because ".." may follow a missing folder
    if target_path.exists() and not target_path.is_dir():
        raise ScaleError(f"{target}: expected a folder, got a file. Choose another path")
    if checkpoint is None:
        old_files = list_files(target)
        _check_target(target, old_files, new_files, overwrite=overwrite)
        if not isinstance(scale_format, TensorFormat):
            if KV_FILE not in new_files:  # readers prefer this file to tensors
                _, old_scales = _find_scale_tensors(LocalFolder(target))
                if old_scales:
                    raise ScaleError(
                        f"{target}: expected a place without scales among its tensors, which are "
                        f"read before {format_list(sorted(new_files))}, got "
                        f"{format_list(old_scales)}. Choose a different place, or checkpoint= "
                        "(--checkpoint) and overwrite=True for a copy"
                    )
            return None
        # A folder without weights has scales, or is empty.
        overwrite = True
        has_model = bool(_find_weight_files(old_files))
    elif weights not in get_args(Weights):
        raise ScaleError(
            f"weights: expected 'copy' or 'link', got {weights!r}. Pass 'copy', or 'link' on the "
            "same disk"
        )
    elif target_path.exists() and (any(target_path.iterdir()) or target_path.samefile(os.curdir)):
        raise ScaleError(
            f"{target}: expected a folder that is new or empty, got a folder with files, or the "
            "working folder. A copy of a checkpoint never replaces files. Choose another folder"
        )
    folder = LocalFolder(source)
    if has_model and folder.find_file("config.json") is None:
        raise ScaleError(
            f"{source}: expected a folder with a checkpoint and its config.json, got none. Fetch "
            "a repository of the Hub first, with huggingface_hub.snapshot_download"
        )
    base = read_configs(folder)
    config = base.config
    if not isinstance(scale_format, HfFp8kv) and find_text_config(config).get("kv_lora_rank"):
        raise ScaleError(
            f"{source}: expected a model whose servers cache K and V, got a model with "
            "kv_lora_rank. Its servers cache latents. Choose hf_fp8kv"
        )
    if not has_model and _MINIMAL_ENTRIES.issuperset(config):
        config = {}  # written with scales only
    tensor_files, old_scales = _find_scale_tensors(folder)
    if has_model and isinstance(scale_format, TensorFormat) and not tensor_files:
        raise ScaleError(f"{source}: expected weights in safetensors, got none. Convert them")
    for file_name in sorted(set(tensor_files.values())):
        path = source / file_name
        indexed_names = {name for name, file in tensor_files.items() if file == file_name}
        # An interrupted call may have removed a part of the scales.
        missing_names = indexed_names.difference(
            read_header(path)[0], old_scales if overwrite else ()
        )
        if missing_names:
            raise ScaleError(
                f"{path}: expected the tensors of the index, found none named "
                f"{format_list(sorted(missing_names))}. Fetch the file again"
            )
        if file_name == SCALES_SHARD and not indexed_names.issubset(old_scales):
            raise ScaleError(
                f"{path}: expected a file of scales to replace, got a file with "
                f"{format_list(indexed_names.difference(old_scales))}. Rename that file"
            )
    if old_scales and not overwrite:
        raise ScaleError(
            f"{source}: expected a checkpoint without KV scales, got {format_list(old_scales)}. "
            "Use the original checkpoint, or pass overwrite=True (--overwrite) to replace the "
            "scales in the copy"
        )
    if config and (old_scales or not has_model):
        config = remove_declaration(str(source), config, base.modelopt_config, scale_format.name)
    kept_files = {name: file for name, file in tensor_files.items() if name not in old_scales}
    return replace(base, config=config, tensor_files=kept_files, removed_tensors=set(old_scales))


def _find_scale_tensors(folder: Folder) -> tuple[dict[str, str], list[str]]:
    """Return the file of each tensor of a folder by name, and the names of scales among them."""
    tensor_files = find_indexed_tensors(folder) or find_shard_tensors(folder)
    # The index of a copy for TGI does not list the scales.
    tensor_files |= dict.fromkeys(folder.list_tensors(SCALES_SHARD) or (), SCALES_SHARD)
    scale_names = [
        name for name in tensor_files if any(pattern.fullmatch(name) for pattern in CACHE_PATTERNS)
    ]
    return tensor_files, scale_names


def write_files(
    source: Path,
    target: Path,
    files: Mapping[str, bytes],
    base: Checkpoint | None,
    scales: ScaleData,
    weights: Weights,
    tp_size: int,
) -> list[Path]:
    """Write files of scales to a folder, or to a copy of `source`, and return the paths."""
    contents: dict[str, _Content] = dict(_place_files(list_files(source), files))
    _verify_files(source, target, contents, scales, tp_size)
    if base is not None:
        transfer = partial(_transfer_file, "link" if source == target else weights)
        contents = _plan_weight_files(source, base, files, transfer) | contents
    # Files are deleted after new files are complete, and config.json comes last.
    contents = dict(
        sorted(contents.items(), key=lambda item: (item[0] == "config.json", item[1] is None))
    )
    try:
        if source == target:
            write_atomically({target / name: content for name, content in contents.items()})
        else:
            _write_copy(source, target, weights, contents)
    except (OSError, SafetensorError) as error:
        copy_advice = ", or weights='copy'" if weights == "link" else ""
        raise ScaleError(
            f"{target}: expected a folder that can be written, got {error}. Choose another "
            f"folder{copy_advice}"
        ) from error
    return [target / name for name, content in contents.items() if content is not None]


def _plan_weight_files(
    source: Path,
    checkpoint: Checkpoint,
    files: Collection[str],
    transfer: Callable[[Path, Path], object],
) -> dict[str, _Content]:
    """Return the files of weights that change: without scales, and renamed if an index is added."""
    single_file = source / SINGLE_FILE
    first_file = source / FIRST_FILE
    changes: dict[str, _Content] = {}
    removed_names = set(checkpoint.removed_tensors)
    if INDEX_FILE in files and single_file.is_file():
        # After an interrupted call, both are the same file, or `FIRST_FILE` has no scales.
        has_both = first_file.is_file() and not single_file.samefile(first_file)
        is_interrupted = (
            has_both
            and removed_names
            and (
                set(read_header(single_file)[0]) - removed_names == set(read_header(first_file)[0])
            )
        )
        if has_both and not is_interrupted:
            raise ScaleError(
                f"{source}: expected the weights in {SINGLE_FILE} or {FIRST_FILE}, got two files. "
                f"Delete {SINGLE_FILE} or {FIRST_FILE}"
            )
        changes = {FIRST_FILE: partial(transfer, single_file), SINGLE_FILE: None}
    if not removed_names:
        return changes
    for path in source.glob("[!.]*.safetensors"):
        names, metadata = read_header(path)
        kept_names = [name for name in names if name not in removed_names]
        if len(kept_names) < len(names):
            rewrite = partial(_copy_tensors, path, kept_names, metadata) if kept_names else None
            is_renamed = path.name == SINGLE_FILE and SINGLE_FILE in changes
            changes[FIRST_FILE if is_renamed else path.name] = rewrite
    for path in source.glob("*.safetensors.index.json"):
        weight_map = {
            name: file_name
            for name, file_name in read_weight_map(path).items()
            if name not in removed_names
        }
        changes[path.name] = make_index(path, weight_map)
    # An index among `files` is written later, after the files that it lists.
    return {name: content for name, content in changes.items() if name not in files}


def _copy_tensors(
    source: Path, names: Collection[str], metadata: dict[str, str], target: Path
) -> None:
    with safe_open(source, "pt") as file:
        save_file({name: file.get_tensor(name) for name in names}, target, metadata or None)


def _transfer_file(weights: Weights, source: Path, target: Path) -> None:
    if weights == "link" and source.suffix.lower() in WEIGHT_SUFFIXES:
        # Link to the file, because the Hub's cache has symbolic links.
        os.link(source.resolve(), target)
    else:
        shutil.copy2(source, target)


def _write_copy(
    source: Path, target: Path, weights: Weights, contents: Mapping[str, _Content]
) -> None:
    """Make `target` a copy of `source` with these files. An error leaves no files."""
    paths = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
    visible_paths = [path for path in paths if not any(part[0] == "." for part in path.parts)]
    files: dict[str, _Content] = {
        path.as_posix(): partial(_transfer_file, weights, source / path)
        for path in visible_paths
        if path.as_posix() not in (JSON_FILE, *_KV_PATHS)
    }
    target = target.resolve()  # ".." has no name
    staging = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        staging.mkdir(parents=True)
        write_atomically(
            {staging / name: content for name, content in {**files, **contents}.items()}
        )
        if target.exists():
            target.rmdir()
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _verify_files(
    source: Path, target: Path, files: Mapping[str, _Content], scales: ScaleData, tp_size: int
) -> None:
    """Check that the new files are read correctly, because an old entry may change the scales."""
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for config_name in ("config.json", HF_QUANT_CONFIG):
            if (source / config_name).is_file():
                shutil.copyfile(source / config_name, folder / config_name)
        for file, content in files.items():
            if isinstance(content, bytes):
                (folder / file).parent.mkdir(exist_ok=True)
                (folder / file).write_bytes(content)
        try:
            read_scales = read_folder(LocalFolder(folder, target), ReadOptions(0, tp_size))
        except ScaleError as error:
            raise ScaleError(str(error).replace(temporary, str(target))) from error
    if read_scales.digest != scales.digest:
        raise ScaleError(
            f"{target}: expected to read the written scales {_format_values(scales)}, got "
            f"{_format_values(read_scales)}. Remove the entries of config.json about the KV cache"
        )


def _format_values(scales: ScaleData) -> str:
    values = {
        index: [layer.static[0].tolist(), layer.static[1].tolist(), str(layer.plan)]
        for index, layer in scales.layers.items()
    }
    return format_value(values)


def list_files(folder: Path) -> list[str]:
    paths = [*folder.glob("*"), *folder.glob(f"{KV_FOLDER}/*")]
    return [path.relative_to(folder).as_posix() for path in paths if path.is_file()]


def _find_weight_files(names: Iterable[str]) -> list[str]:
    return [
        name
        for name in names
        if PurePath(name).suffix.lower() in WEIGHT_SUFFIXES
        and name not in (KV_FILE, SCALES_SHARD)
        and "/" not in name
    ]


def _check_target(
    target: object, old_files: Collection[str], files: Collection[str], *, overwrite: bool
) -> None:
    """Raise ScaleError unless `files` of scales may be written to a place with `old_files`.

    Old files, and the config of weights, are replaced only with `overwrite`. Nothing is written
    next to scales that readers prefer.
    """
    kv_paths = _KV_PATHS if KV_FILE in files else ()
    clashes = sorted({*files, *kv_paths}.intersection(old_files))
    weights = _find_weight_files(old_files) if "config.json" in files else []
    if (clashes or weights) and not overwrite:
        rule = format_list(clashes) or "weights and their config.json"
        raise ScaleError(
            f"{target}: expected a place without {rule}, got {format_list(clashes or weights)}. "
            "Choose another place, pass overwrite=True (--overwrite), or checkpoint= "
            "(--checkpoint) for a copy of a checkpoint with the scales"
        )
    if KV_FILE not in files and any(PurePath(name).name == KV_FILE for name in old_files):
        raise ScaleError(
            f"{target}: expected a place without {KV_FILE}, got that file, which is read before "
            f"all others. Choose another place, or delete {KV_FILE}"
        )
