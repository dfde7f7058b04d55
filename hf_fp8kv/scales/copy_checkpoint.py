"""Copying a checkpoint with its KV scales: the same weights, one file more, another config."""

import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from ..errors import ScaleError
from ..utils.files import WEIGHTS, read_header, read_json, write_all
from ..utils.text import format_list, format_value
from .card import CARD_FILE, make_card, read_card
from .checkpoint.checkpoint import FIRST_FILE, INDEX_FILE, ONLY_FILE, Checkpoint
from .checkpoint.config import HF_QUANT_CONFIG, Declaration, check_layer_counts, text_config
from .checkpoint.folder import LocalFolder
from .formats import OWN_FILES, SCALE_FORMATS, TENSOR_NAMES, ScaleFormat
from .formats.hf_fp8kv import OWN_FOLDER
from .formats.tensor_format import TensorFormat, to_json, with_own_file
from .layer_scales import LayerScales, ScaleData, take_rank
from .load import read_checkpoint
from .reduce import reduce_scales
from .remove_scales import copy_without, find_scales, remove_declaration, remove_from_index
from .request import Request

Weights = Literal["copy", "link"]


def copy_checkpoint(
    scales: ScaleData, source: Path, target: Path, format: ScaleFormat, weights: Weights,
    tp_size: int, *, overwrite: bool = False, base_model: str | None = None, name: str = "",
) -> tuple[list[Path], list[str]]:  # fmt: skip
    """Make `target` a copy of `source` with the scales; on any error it is not there at all.

    With `overwrite` the copy is without the scales that the source has. Its card says what was made
    of `base_model`, and calls it `name` (empty: as the folder). The paths that differ from the
    source are returned, and what was lost, for people.
    """
    _check_folders(source, target, weights)
    checkpoint = open_source(source, format, overwrite=overwrite)
    _check_scales(scales, checkpoint, format)
    reduced, losses = reduce_scales(scales, format, tp_size)
    new_files = format.checkpoint_files(reduced, checkpoint, tp_size)
    if checkpoint.left_out:
        new_files = {"config.json": to_json(checkpoint.config), **new_files}
    new_files[CARD_FILE] = make_card(
        reduced, losses, format, name or target.name, read_card(source / CARD_FILE), whole=True,
        base_model=base_model,
    )  # fmt: skip
    staging = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
        changed = _transfer_files(source, staging, new_files, weights, checkpoint.left_out)
        write_all({staging / name: content for name, content in new_files.items()})
        for rank in range(tp_size):
            written = take_rank(reduced.layers, rank, tp_size)
            _check_copy(staging, written, target, Request(rank, tp_size))
        if target.exists():
            target.rmdir()
        staging.rename(target)
    except OSError as error:
        raise ScaleError(
            f"{target}: expected a folder that can be written, got {error}; choose another"
            + (", or weights='copy' (--weights copy)" if weights == "link" else "")
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return [target / name for name in (*changed, *new_files)], losses


def add_to_checkpoint(
    scales: ScaleData, folder: Path, format: ScaleFormat, tp_size: int,
    base_model: str | None = None,
) -> list[Path]:  # fmt: skip
    """Add the scales to the checkpoint in a folder, as a copy of it would have them.

    Each file is replaced as a whole, and the config comes last: until then the folder holds the
    same weights under the old config, by either of two names.
    """
    place = folder.resolve()
    staging = place.with_name(f".{place.name}.{os.getpid()}.new")
    try:
        written, _ = copy_checkpoint(
            scales, folder, staging, format, "link", tp_size, overwrite=True,
            base_model=base_model, name=place.name,
        )  # fmt: skip
        copied = {path.relative_to(staging) for path in staging.rglob("*") if path.is_file()}
        new = [name for name in copied if staging / name in written or not (folder / name).exists()]
        last = Path("config.json")
        # Not in the copy: the old name of the weights, and files of older scales alone. Hidden
        # files are in no copy, and stay.
        left_out = [
            path
            for path in folder.glob("[!.]*.safetensors")
            if path.is_file() and Path(path.name) not in copied
        ]
        order = {n: (n == last, n.suffix == ".json", "config" in n.name, n.name) for n in new}
        for name in sorted(new, key=order.__getitem__):
            if name == last:
                for path in left_out:
                    path.unlink()
            (staging / name).replace(folder / name)
    except ScaleError as error:
        raise ScaleError(str(error).replace(str(staging), str(folder))) from error
    except OSError as error:
        raise ScaleError(
            f"{folder}: expected a folder that can be written, got {error}; choose another"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return [folder / name for name in sorted(new)]


def open_source(source: Path, format: ScaleFormat, *, overwrite: bool) -> Checkpoint:
    """Return a checkpoint to copy, without its scales; ScaleError for some without `overwrite`.

    It is also raised for one that cannot have scales in the format.
    """
    config = read_json(source / "config.json", unique=False)
    check_layer_counts(source / "config.json", config)
    checkpoint = with_own_file(
        Checkpoint(LocalFolder(source), config, Declaration(), TENSOR_NAMES, OWN_FILES)
    )
    if format.no_checkpoint:
        raise ScaleError(
            f"format {format.name!r}: expected no checkpoint, got {source}; write the scales "
            f"alone, {format.no_checkpoint}"
        )
    if isinstance(format, TensorFormat) and not checkpoint.files:
        raise ScaleError(f"{source}: expected weights in safetensors, got none; convert them")
    _check_files(source, checkpoint.files)
    present = find_scales(checkpoint)
    if present and not overwrite:
        raise ScaleError(
            f"{source}: expected a checkpoint without KV scales, got {format_list(present)}; use "
            "the one that it was made from, or pass overwrite=True (--overwrite) to replace them "
            "in the copy"
        )
    if not present:
        return checkpoint
    second = source / HF_QUANT_CONFIG
    second_config = read_json(second, unique=False) if second.is_file() else None
    config = remove_declaration(str(source), config, second_config, format)
    return replace(checkpoint, config=config, left_out=frozenset(present))


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
    """Raise ScaleError unless every file is whole and holds the tensors that the index says."""
    for file in sorted(set(files.values())):
        names = {name for name, other in files.items() if other == file}
        missing = names - set(read_header(source / file)[0])
        if missing:
            raise ScaleError(
                f"{source / file}: expected the tensors of the index, found none named "
                f"{format_list(sorted(missing))}; fetch the file again"
            )


def _check_scales(scales: ScaleData, checkpoint: Checkpoint, format: ScaleFormat) -> None:
    """Raise ScaleError if the scales are of another model, or not for its servers."""
    config, text = checkpoint.config, text_config(checkpoint.config)
    types = [config.get("model_type"), text.get("model_type")]
    if scales.model_type is not None and scales.model_type not in types and any(types):
        raise ScaleError(
            f"{checkpoint.origin}: expected a {scales.model_type!r} model, which the scales are "
            f"of, got {types[0]!r}; use the checkpoint that they were made for"
        )
    if format.for_servers and text.get("kv_lora_rank"):
        raise ScaleError(
            f"{checkpoint.origin}: expected a model whose servers cache K and V, got one with "
            "kv_lora_rank: they cache the latent that both are made of; choose hf_fp8kv"
        )


def _transfer_files(
    source: Path, staging: Path, new_files: Collection[str], weights: Weights,
    removed: Collection[str],
) -> list[str]:  # fmt: skip
    """Link or copy everything but hidden files, older scales and what is written anew.

    Files with tensors that are `removed` are copied without them, and not at all without others;
    the names of the copies that differ are returned.
    """
    changed = []
    own_files = {name for f in SCALE_FORMATS.values() for name in f.own_files}
    left_out = {*new_files, *own_files, *(f"{OWN_FOLDER}/{name}" for name in own_files)}
    only, first = source / ONLY_FILE, source / FIRST_FILE
    if INDEX_FILE in new_files and only.is_file() and first.is_file():
        # `add_to_checkpoint` was interrupted, and both are one file.
        if not only.samefile(first):
            raise ScaleError(
                f"{source}: expected the weights in one of {ONLY_FILE} and {FIRST_FILE}, got two "
                "files; delete one"
            )
        left_out.add(FIRST_FILE)
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        hidden = any(part.startswith(".") for part in relative.parts)
        if hidden or not path.is_file() or str(relative) in left_out:
            continue
        if INDEX_FILE in new_files and str(relative) == ONLY_FILE:
            relative = Path(FIRST_FILE)
        place = staging / relative
        place.parent.mkdir(parents=True, exist_ok=True)
        names = read_header(path)[0] if removed and path.suffix == ".safetensors" else ()
        if removed and path.name.endswith(".safetensors.index.json"):
            remove_from_index(path, place, removed)
            changed.append(str(relative))
        elif not set(names).isdisjoint(removed):
            if not set(names) <= set(removed):
                copy_without(path, place, removed)
                changed.append(str(relative))
        elif weights == "link" and path.suffix.lower() in WEIGHTS:
            # The Hub's cache holds symbolic links: the file itself is what stays.
            os.link(path.resolve(), place)
        else:
            shutil.copy2(path, place)
            with place.open("rb") as file:
                os.fsync(file.fileno())
    return changed


def _check_copy(
    folder: Path, written: Mapping[int, LayerScales], target: Path, request: Request
) -> None:
    """Read the copy back: what a config said before may change what the scales mean."""
    try:
        read = read_checkpoint(str(folder), request).layers
    except ScaleError as error:
        raise ScaleError(str(error).replace(str(folder), str(target))) from error
    for index in {*written, *read}:
        pair = [side.get(index) for side in (written, read)]
        if None in pair or not _equal(*pair):  # type: ignore[arg-type]
            got = format_value([s and [x.tolist() for x in s.static] for s in pair])
            raise ScaleError(
                f"{target}: expected to read back what was written for layer {index}, got "
                f"{got}; remove what "
                "config.json says of the KV cache"
            )


def _equal(left: LayerScales, right: LayerScales) -> bool:
    pairs = ((left.k, right.k), (left.v, right.v), (left.k_center, right.k_center))
    same = (a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)
    return left.plan == right.plan and all(same)
