"""Writing scales: alone, into a checkpoint or a copy of one, or to the Hub. See `KVScales`.

Nothing is changed before all files are complete next to their places, and `config.json` comes last:
until then a folder holds the same weights under the old config.
"""

import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import Literal, get_args

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..errors import ScaleError
from ..utils.files import WEIGHTS, read_header, read_weight_map, write_all
from ..utils.text import format_list, format_value
from .card import CARD_FILE, make_card
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
    translate_hub_errors,
)
from .checkpoint.configs import HF_QUANT_CONFIG, remove_declaration, text_config
from .checkpoint.tensor_names import CACHE_PATTERNS
from .formats import SCALE_FORMATS, ScaleFormat
from .formats.base import TensorFormat, make_index, reduce_scales, to_json
from .formats.files import HfFp8kv
from .layer_scales import ScaleData
from .load import read_folder
from .report import REPORT_FILE
from .request import Request

logger = logging.getLogger(__name__)

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


class WritableScales(ScaleData):
    """The part of `KVScales` that writes folders and repositories."""

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        *,
        format: str = "hf_fp8kv",
        checkpoint: str | os.PathLike[str] | None = None,
        weights: Weights = "copy",
        overwrite: bool = False,
        tp_size: int = 1,
        base_model: str | None = None,
    ) -> list[Path]:
        """Write the scales in a format, alone or into a checkpoint; return the paths.

        All files appear whole or not at all. "hf_fp8kv" holds every granularity and the centers
        exactly; what another format cannot hold is reduced to the largest scale, with a warning.

        Args:
            folder: where to; it is made when it is not there.
            format: one of `SCALE_FORMATS`.
            checkpoint: a folder with a checkpoint; `folder`, which must be new or empty, is then
                a copy of it with the scales. Its weights stay the same to the byte.
            weights: "link": the weights of the copy are hard links, on the same disk.
            overwrite: replaces the scales that are there, or those of `checkpoint` in its copy.
                In the folder of a model it adds the scales to that: its weights stay the same,
                and its `config.json` has every entry that it had.
            tp_size: for "vllm-json": for how many ranks; each gets the largest scale of the layer.
            base_model: the repository that `checkpoint` is of, for the card (README.md) of its
                copy, which says what the scales are and how to load them.

        Raises:
            ScaleError: when the format cannot be written, or not there.
        """
        chosen, target = _find_format(format, tp_size), Path(folder)
        reduced, losses = reduce_scales(self, chosen)
        source = target if checkpoint is None else Path(checkpoint)
        existing = _list_files(source)
        whole = checkpoint is not None or bool(_find_weights(existing))
        opened = open_place(
            target, chosen, chosen.files(reduced, tp_size), None if checkpoint is None else source,
            weights, overwrite=overwrite,
        )  # fmt: skip
        files = chosen.files(reduced, tp_size, opened)
        if opened is not None:
            types = [x.get("model_type") for x in (opened.config, text_config(opened.config))]
            if self.model_type is not None and self.model_type not in types and any(types):
                raise ScaleError(
                    f"{opened.origin}: expected a {self.model_type!r} model, which the scales are "
                    f"of, got {types[0]!r}; use the checkpoint that they were made for"
                )
            if opened.left_out:
                files = {"config.json": to_json(opened.config), **files}
        if opened is not None and whole:
            card = source / CARD_FILE
            files[CARD_FILE] = make_card(
                reduced, losses, chosen, target.resolve().name,
                card.read_bytes() if card.is_file() else b"", whole=True, base_model=base_model,
            )  # fmt: skip
        placed = _place(existing, files)
        _read_back(source, target, placed, reduced, tp_size)
        contents: dict[str, _Content] = {**placed}
        if opened is not None:
            move = partial(_transfer, "link" if checkpoint is None else weights)
            contents = _change_weights(source, opened, files, move) | contents
        order = sorted(contents, key=lambda name: (name == "config.json", contents[name] is None))
        contents = {name: contents[name] for name in order}
        try:
            if checkpoint is None:
                write_all({target / name: content for name, content in contents.items()})
            else:
                _write_copy(source, target, weights, contents)
        except (OSError, SafetensorError) as error:
            raise ScaleError(
                f"{target}: expected a folder that can be written, got {error}; choose another"
                + (", or weights='copy' (--weights copy)" if weights == "link" else "")
            ) from error
        if losses := losses + chosen.missing_facts(self, opened):
            logger.warning("%s: written as %s: %s", target, format, "; ".join(losses))
        return [target / name for name, content in contents.items() if content is not None]

    def push_to_hub(
        self,
        repo_id: str,
        *,
        format: str = "hf_fp8kv",
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        commit_message: str = "Add scales of the KV cache",
        overwrite: bool = False,
        tp_size: int = 1,
        base_model: str | None = None,
    ) -> str:
        """Upload the scales alone, as `save_pretrained` writes them; return the commit's address.

        A card (README.md) says what they are and how to use them; one that is there is extended.

        Args:
            repo_id: is made when it is not there.
            private, token, revision, commit_message: as everywhere in huggingface-hub.
            format, overwrite, tp_size: as in `save_pretrained`.
            base_model: the repository of the model that the scales are for, for the card.

        Raises:
            ScaleError: when the format cannot be written, or not there.
        """
        chosen = _find_format(format, tp_size)
        reduced, losses = reduce_scales(self, chosen)
        files = chosen.files(reduced, tp_size)
        api = HfApi(token=token)
        with translate_hub_errors(repo_id, "written"):
            api.create_repo(repo_id, private=private, exist_ok=True)
            if revision is not None:
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            existing = api.list_repo_files(repo_id, revision=revision)
            _check_place(repo_id, existing, files, overwrite=overwrite)
            weights = _find_weights(existing)
            of_scales = {*files} & {*existing} - {"config.json"}
            if "config.json" in files and (
                weights or ("config.json" in existing and not of_scales)
            ):
                raise ScaleError(
                    f"{repo_id}: expected a place without weights and their config.json, got "
                    f"{format_list([*weights, 'config.json'])}; choose another, or write the "
                    "scales into a copy of the checkpoint (checkpoint=) and upload that"
                )
            old = b""
            if CARD_FILE in existing:
                old = Path(api.hf_hub_download(repo_id, CARD_FILE, revision=revision)).read_bytes()
            card = make_card(
                reduced, losses, chosen, repo_id, old, whole=bool(weights), base_model=base_model
            )
            placed = {**_place(existing, files), CARD_FILE: card}
            commit = api.create_commit(
                repo_id,
                [
                    CommitOperationDelete(n) if content is None else CommitOperationAdd(n, content)
                    for n, content in placed.items()
                ],
                commit_message=commit_message,
                revision=revision,
            )
        if losses := losses + chosen.missing_facts(self):
            logger.warning("%s: written as %s: %s", repo_id, format, "; ".join(losses))
        return str(commit.commit_url)


def _find_format(name: str, tp_size: int) -> ScaleFormat:
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


def _place(existing: Collection[str], files: Mapping[str, bytes]) -> dict[str, bytes | None]:
    """Return files by their places: our own are apart from weights, and earlier ones go."""
    if OWN_FILE not in files:
        return dict(files)
    apart = _find_weights(existing) or f"{OWN_FOLDER}/{OWN_FILE}" in existing
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
        existing = _list_files(target)
        _check_place(target, existing, written, overwrite=overwrite)
        if not isinstance(format, TensorFormat):
            return None
        # Without weights it is a folder of scales, or an empty one.
        overwrite, whole = True, bool(_find_weights(existing))
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
    left_out = {JSON_FILE, *_PLACES}
    names = (path.relative_to(source) for path in source.rglob("*") if path.is_file())
    shown = (name for name in names if not any(part.startswith(".") for part in name.parts))
    copies = {name.as_posix(): partial(_transfer, weights, source / name) for name in shown}
    kept = {name: copy for name, copy in copies.items() if name not in left_out}
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
    source: Path, target: Path, files: Mapping[str, bytes | None], scales: ScaleData, tp_size: int
) -> None:
    """Read the files as they will be: what a config said before may change what scales mean."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        for config in ("config.json", HF_QUANT_CONFIG):
            if (source / config).is_file():
                shutil.copyfile(source / config, folder / config)
        for file, content in files.items():
            if content is not None and not file.endswith(REPORT_FILE):
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


def _list_files(folder: Path) -> list[str]:
    paths = [*folder.glob("*"), *folder.glob(f"{OWN_FOLDER}/*")]
    return [path.relative_to(folder).as_posix() for path in paths if path.is_file()]


def _find_weights(names: Iterable[str]) -> list[str]:
    files = (name for name in names if name not in (OWN_FILE, SCALES_FILE) and "/" not in name)
    return [name for name in files if PurePath(name).suffix.lower() in WEIGHTS]


def _check_place(
    place: object, existing: Collection[str], files: Collection[str], *, overwrite: bool
) -> None:
    """Raise ScaleError unless `files` of scales may be written to a place with `existing` files.

    Without `overwrite` they replace nothing, also not the config of weights. They are never written
    next to scales that readers prefer.
    """
    own = [f"{OWN_FOLDER}/{OWN_FILE}"] if OWN_FILE in files else []
    replaced = sorted({*files, *own} & {*existing})
    weights = _find_weights(existing) if "config.json" in files else []
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
