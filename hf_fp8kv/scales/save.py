"""Writing scales: alone, into a checkpoint or a copy of one, or to the Hub. See `KVScales`.

Nothing is changed before all files are complete next to their places, and `config.json` comes last:
until then a folder holds the same weights under the old config.
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
from ..utils.files import WEIGHTS, read_header, read_weight_map, write_all
from ..utils.text import format_list, format_value
from .checkpoint.checkpoint import (
    FIRST_FILE,
    INDEX_FILE,
    JSON_FILE,
    ONLY_FILE,
    OWN_FILE,
    OWN_FOLDER,
    SCALES_FILE,
    Checkpoint,
    LocalFolder,
    find_in_shards,
    find_indexed,
    read_configs,
)
from .checkpoint.configs import HF_QUANT_CONFIG, remove_declaration, text_config
from .checkpoint.tensor_names import CACHE_PATTERNS
from .formats import SCALE_FORMATS, ScaleFormat
from .formats.base import TensorFormat, make_index
from .formats.files import HfFp8kv
from .layer_scales import ScaleData
from .load import read_folder
from .report import REPORT_FILE
from .request import Request

Weights = Literal["copy", "link"]
# Where our own files can be.
_PLACES = [place + name for place in ("", f"{OWN_FOLDER}/") for name in (REPORT_FILE, OWN_FILE)]
# All that a config.json of scales alone can have, whichever the format.
_MINIMAL_ENTRIES = frozenset((
    "model_type", "num_hidden_layers", "num_key_value_heads", "quantization_config",
    "kv_cache_torch_dtype",
))  # fmt: skip
# The bytes of a file, a function that makes it, or None for a file that is deleted.
_Content = bytes | Callable[[Path], object] | None


def find_format(name: str, tp_size: int) -> ScaleFormat:
    if name not in SCALE_FORMATS:
        raise ScaleError(
            f"format: expected one of {', '.join(SCALE_FORMATS)}, got {name!r}; choose one"
            + (", since nothing reads scales in it without weights" * (name == "trtllm"))
        )
    format = SCALE_FORMATS[name]
    valid = isinstance(tp_size, int) and tp_size > 0
    if not valid or (tp_size > 1 and not format.holds_ranks):
        ranked = " or ".join(repr(f.name) for f in SCALE_FORMATS.values() if f.holds_ranks)
        raise ScaleError(
            f"tp_size: expected 1, or the number of ranks for {ranked}, got {tp_size!r} for "
            f"{name!r}; only that format names ranks"
        )
    return format


def place_files(existing: Collection[str], files: Mapping[str, bytes]) -> dict[str, bytes | None]:
    """Return files by their places: our own are apart from weights, and earlier ones go."""
    if OWN_FILE not in files:
        return dict(files)
    apart = find_weights(existing) or f"{OWN_FOLDER}/{OWN_FILE}" in existing
    start = f"{OWN_FOLDER}/" if apart else ""
    placed = {start + n if n in (OWN_FILE, REPORT_FILE) else n: file for n, file in files.items()}
    return {**dict.fromkeys(name for name in _PLACES if name in existing), **placed}


def open_place(
    target: Path, format: ScaleFormat, written: Collection[str], checkpoint: Path | None,
    weights: Weights = "copy", *, overwrite: bool,
) -> Checkpoint | None:  # fmt: skip
    """Return the checkpoint that scales become a part of, without its scales, or None.

    Raises:
        ScaleError: The `written` files of scales cannot be written to `target`, or the checkpoint
            is not complete, has scales without `overwrite`, or others than can be replaced.
    """
    source, place, whole = checkpoint or target, target.resolve(), True  # ".." may follow no folder
    if place.exists() and not place.is_dir():
        raise ScaleError(f"{target}: expected a folder, got a file; choose another")
    if checkpoint is None:
        existing = list_files(target)
        check_place(target, existing, written, overwrite=overwrite)
        if not isinstance(format, TensorFormat):
            return None
        # Without weights it is a folder of scales, or an empty one.
        overwrite, whole = True, bool(find_weights(existing))
    elif weights not in get_args(Weights):
        raise ScaleError(f"weights: expected 'copy' or 'link', got {weights!r}; choose one")
    elif place.exists() and (any(place.iterdir()) or place.samefile(os.curdir)):
        raise ScaleError(
            f"{target}: expected a folder that is new or empty, got one with files, or the working "
            "folder itself; a copy of a checkpoint never replaces anything, choose another"
        )
    folder = LocalFolder(source)
    if whole and folder.path("config.json") is None:
        raise ScaleError(
            f"{source}: expected a folder with a checkpoint and its config.json, got none; fetch "
            "a repository of the Hub first, with huggingface_hub.snapshot_download"
        )
    opened = read_configs(folder)
    config = opened.config
    if not isinstance(format, HfFp8kv) and text_config(config).get("kv_lora_rank"):
        raise ScaleError(
            f"{source}: expected a model whose servers cache K and V, got one with kv_lora_rank: "
            "they cache the latent that both are made of; choose hf_fp8kv"
        )
    if not whole and _MINIMAL_ENTRIES.issuperset(config):
        config = {}  # only scales wrote it
    files = find_indexed(folder) or find_in_shards(folder)
    files |= dict.fromkeys(folder.header(SCALES_FILE) or (), SCALES_FILE)  # not in every index
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
        config = remove_declaration(str(source), config, opened.second, format.name)
    for name in present:
        del files[name]
    return replace(opened, config=config, files=files, left_out=frozenset(present))


def write_files(
    source: Path, target: Path, files: Mapping[str, bytes], opened: Checkpoint | None,
    scales: ScaleData, weights: Weights, tp_size: int,
) -> list[Path]:  # fmt: skip
    """Write files of scales to a folder, or to a copy of `source` with them; return the paths."""
    contents: dict[str, _Content] = {**place_files(list_files(source), files)}
    _read_back(source, target, contents, scales, tp_size)
    if opened is not None:
        move = partial(_transfer, "link" if source == target else weights)
        contents = _change_weights(source, opened, files, move) | contents
    contents = dict(sorted(contents.items(), key=lambda x: (x[0] == "config.json", x[1] is None)))
    try:
        if source == target:
            write_all({target / name: content for name, content in contents.items()})
        else:
            _write_copy(source, target, weights, contents)
    except (OSError, SafetensorError) as error:
        raise ScaleError(
            f"{target}: expected a folder that can be written, got {error}; choose another"
            + (", or weights='copy' (--weights copy)" if weights == "link" else "")
        ) from error
    return [target / name for name, content in contents.items() if content is not None]


def _change_weights(
    source: Path,
    checkpoint: Checkpoint,
    files: Collection[str],
    move: Callable[[Path, Path], object],
) -> dict[str, _Content]:
    """Return the files of weights that change: the scales in them go, and an index renames one."""
    only, first = source / ONLY_FILE, source / FIRST_FILE
    changes: dict[str, _Content] = {}
    removed = set(checkpoint.left_out)
    if INDEX_FILE in files and only.is_file():
        # Both are one file, or one has no scales, if an earlier call was interrupted.
        rest = {*read_header(only)[0]}.difference(removed) if removed else None
        if first.is_file() and not only.samefile(first) and {*read_header(first)[0]} != rest:
            raise ScaleError(
                f"{source}: expected the weights in one of {ONLY_FILE} and {FIRST_FILE}, got two "
                "files; delete one"
            )
        changes = {FIRST_FILE: partial(move, only), ONLY_FILE: None}
    for path in source.glob("[!.]*.safetensors") if removed else ():
        names, metadata = read_header(path)
        kept = [name for name in names if name not in removed]
        if len(kept) < len(names):
            rewrite = partial(_copy_tensors, path, kept, metadata) if kept else None
            renamed = path.name == ONLY_FILE and ONLY_FILE in changes
            changes[FIRST_FILE if renamed else path.name] = rewrite
    for path in source.glob("*.safetensors.index.json") if removed else ():
        weight_map = {n: f for n, f in read_weight_map(path).items() if n not in removed}
        changes[path.name] = make_index(path, weight_map)
    # An index among `files` comes later, after the files that it names.
    return {name: content for name, content in changes.items() if name not in files}


def _copy_tensors(source: Path, names: Collection[str], metadata: dict[str, str], to: Path) -> None:
    with safe_open(source, "pt") as file:
        save_file({name: file.get_tensor(name) for name in names}, to, metadata or None)


def _transfer(weights: Weights, source: Path, target: Path) -> None:
    if weights == "link" and source.suffix.lower() in WEIGHTS:
        # The Hub's cache holds symbolic links, and only the file itself stays.
        os.link(source.resolve(), target)
    else:
        shutil.copy2(source, target)


def _write_copy(
    source: Path, target: Path, weights: Weights, contents: Mapping[str, _Content]
) -> None:
    """Make `target` a copy of `source` with these files; on any error it is not there at all."""
    names = (path.relative_to(source) for path in source.rglob("*") if path.is_file())
    shown = (name for name in names if not any(part.startswith(".") for part in name.parts))
    copies = {name.as_posix(): partial(_transfer, weights, source / name) for name in shown}
    kept = {name: copy for name, copy in copies.items() if name not in (JSON_FILE, *_PLACES)}
    target = target.resolve()  # ".." has no name
    staging = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        staging.mkdir(parents=True)
        write_all({staging / name: content for name, content in {**kept, **contents}.items()})
        if target.exists():
            target.rmdir()
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _read_back(
    source: Path, target: Path, files: Mapping[str, _Content], scales: ScaleData, tp_size: int
) -> None:
    """Read the files as they will be: what a config said before may change what scales mean."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        for config in ("config.json", HF_QUANT_CONFIG):
            if (source / config).is_file():
                shutil.copyfile(source / config, folder / config)
        for file, content in files.items():
            if isinstance(content, bytes) and not file.endswith(REPORT_FILE):
                (folder / file).parent.mkdir(exist_ok=True)
                (folder / file).write_bytes(content)
        try:
            read = read_folder(LocalFolder(folder, target), Request(0, tp_size))
        except ScaleError as error:
            raise ScaleError(str(error).replace(name, str(target))) from error
    if read.digest != scales.digest:
        raise ScaleError(
            f"{target}: expected to read back what was written, got {_values(read)} for "
            f"{_values(scales)}; remove what config.json says of the KV cache"
        )


def _values(scales: ScaleData) -> str:
    layers = scales.layers.items()
    return format_value({i: [*(x.tolist() for x in s.static), str(s.plan)] for i, s in layers})


def list_files(folder: Path) -> list[str]:
    paths = [*folder.glob("*"), *folder.glob(f"{OWN_FOLDER}/*")]
    return [path.relative_to(folder).as_posix() for path in paths if path.is_file()]


def find_weights(names: Iterable[str]) -> list[str]:
    files = (name for name in names if name not in (OWN_FILE, SCALES_FILE) and "/" not in name)
    return [name for name in files if PurePath(name).suffix.lower() in WEIGHTS]


def check_place(
    place: object, existing: Collection[str], files: Collection[str], *, overwrite: bool
) -> None:
    """Raise ScaleError unless `files` of scales may be written to a place with `existing` files.

    Without `overwrite` they replace nothing, also not the config of weights. They are never written
    next to scales that readers prefer.
    """
    own = [f"{OWN_FOLDER}/{OWN_FILE}"] if OWN_FILE in files else []
    replaced = sorted({*files, *own} & {*existing})
    weights = find_weights(existing) if "config.json" in files else []
    if (replaced or weights) and not overwrite:
        without, found = format_list(replaced), format_list(weights)
        raise ScaleError(
            f"{place}: expected a place without {without or 'weights'}, got one that has "
            f"{'it' if without else found}; choose another, pass overwrite=True (--overwrite), or "
            "checkpoint= (--checkpoint) for a copy of a checkpoint with the scales"
        )
    if OWN_FILE not in files and any(PurePath(name).name == OWN_FILE for name in existing):
        raise ScaleError(
            f"{place}: expected a place without {OWN_FILE}, which is read before all others, got "
            "one that has it; choose another, or delete it"
        )
