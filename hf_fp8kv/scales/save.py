"""Writing files of scales into a folder or a repository, where they replace nothing else."""

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path, PurePath
from typing import TypeVar

from huggingface_hub import HfApi

from ..errors import ScaleError
from ..utils.files import WEIGHTS, read_header, read_json, write_all
from ..utils.text import format_list
from .card import CARD_FILE, read_card
from .checkpoint.config import HF_QUANT_CONFIG
from .checkpoint.folder import translate_hub_errors
from .formats import TENSOR_NAMES, ScaleFormat
from .formats.hf_fp8kv import OWN_FILE, OWN_FOLDER, HfFp8kv
from .formats.tensor_format import MINIMAL_ENTRIES, SCALES_FILE, TensorFormat
from .layer_scales import ScaleData
from .remove_scales import remove_declaration
from .report import REPORT_FILE

_T = TypeVar("_T")


def find_weights(names: Iterable[str]) -> list[str]:
    """Return the names of a model's weights among those of the files in its folder."""
    return [
        name
        for name in names
        if PurePath(name).suffix.lower() in WEIGHTS
        and name not in (OWN_FILE, SCALES_FILE)
        and "/" not in name
    ]


def list_files(folder: Path) -> list[str]:
    """Return the names of the files in a folder, and of those in the folder of our own file."""
    paths = [*folder.glob("*"), *folder.glob(f"{OWN_FOLDER}/*")]
    return [path.relative_to(folder).as_posix() for path in paths if path.is_file()]


def write_files(folder: Path, files: Mapping[str, bytes], *, overwrite: bool) -> list[Path]:
    """Write files of scales, all of them or none; return their paths."""
    try:
        existing = check_folder(folder, files, overwrite=overwrite)
        placed = _place_files(existing, files)
        paths = {folder / name: content for name, content in placed.items()}
        write_all(paths)
        if OWN_FILE in files:
            # What was in another place, and the report about other scales.
            for name in {*HfFp8kv.own_files, f"{OWN_FOLDER}/{REPORT_FILE}"} - {*placed}:
                (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise ScaleError(
            f"{folder}: expected a folder that can be written, got {error}; choose another"
        ) from error
    return list(paths)


def keep_config(
    folder: Path, files: dict[str, bytes], format: ScaleFormat, scales: ScaleData
) -> dict[str, bytes]:
    """Return the files with a `config.json` that has every entry of the one that is there."""
    path, second_path = folder / "config.json", folder / HF_QUANT_CONFIG
    if not isinstance(format, TensorFormat) or not path.is_file():
        return files
    config = read_json(path, unique=False)
    if MINIMAL_ENTRIES.issuperset(config):
        return files  # it is that of other scales alone
    second = read_json(second_path, unique=False) if second_path.is_file() else None
    config = remove_declaration(str(folder), config, second, format)
    return {**files, **format.config_files(config, second, scales, ())}


def upload_files(
    folder: Path,
    repo_id: str,
    private: bool | None,
    token: str | bool | None,
    revision: str | None,
    commit_message: str,
    overwrite: bool,
    make_readme: Callable[[str, bool], bytes],
) -> str:
    """Upload the files of scales in a folder, see `KVScales.push_to_hub`.

    `make_readme` returns the card, of the one that there is and of whether weights are there.
    """
    api = HfApi(token=token)
    files = {path.name: path for path in folder.iterdir()}
    with translate_hub_errors(repo_id, "written"):
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        existing = api.list_repo_files(repo_id, revision=revision)
        _check_existing(repo_id, existing, files, overwrite)
        _check_own_file(repo_id, existing, files)
        _check_config(repo_id, existing, files)
        placed = _place_files(existing, files)
        for name, path in placed.items():
            (folder / name).parent.mkdir(exist_ok=True)
            path.rename(folder / name)
        moved = [n for n in HfFp8kv.own_files if OWN_FILE in files and n in {*existing} - {*placed}]
        card = ""
        if CARD_FILE in existing:
            card = read_card(Path(api.hf_hub_download(repo_id, CARD_FILE, revision=revision)))
        (folder / CARD_FILE).write_bytes(make_readme(card, bool(find_weights(existing))))
        commit = api.upload_folder(
            repo_id=repo_id, folder_path=folder, commit_message=commit_message, revision=revision,
            delete_patterns=moved or None,
        )  # fmt: skip
    return str(commit.commit_url)


def check_folder(folder: Path, files: Collection[str], *, overwrite: bool) -> list[str]:
    """Return what is in a folder; raise ScaleError unless files of scales can be written there.

    They replace no scales without `overwrite`, and never weights, and they do not come beside
    scales that would be read instead of them.
    """
    existing = list_files(folder)
    _check_existing(str(folder), existing, files, overwrite)
    for name in sorted({*files} & {*existing}):
        if name.endswith(".safetensors") and not _holds_scales(folder / name):
            raise ScaleError(
                f"{folder / name}: expected a file of scales to replace, got one with weights; "
                "choose another folder"
            )
    _check_own_file(str(folder), existing, files)
    return existing


def _place_files(existing: Collection[str], files: Mapping[str, _T]) -> dict[str, _T]:
    """Return the files by their names in the folder: our own are apart from weights."""
    apart = find_weights(existing) or f"{OWN_FOLDER}/{OWN_FILE}" in existing
    if OWN_FILE in files and apart:
        return {f"{OWN_FOLDER}/{name}": content for name, content in files.items()}
    return dict(files)


def _check_existing(
    target: str, existing: Collection[str], files: Collection[str], overwrite: bool
) -> None:
    if overwrite:
        return
    own = [f"{OWN_FOLDER}/{OWN_FILE}"] if OWN_FILE in files else []
    replaced = sorted({*files, *own} & {*existing})
    if replaced:
        raise ScaleError(
            f"{target}: expected a place without {format_list(replaced)}, got one that has it; "
            "choose another, or pass overwrite=True (--overwrite)"
        )
    weights = [name for name in find_weights(existing) if name not in files]
    if "config.json" in files and weights:
        raise ScaleError(
            f"{target}: expected a place without weights, got {format_list(weights)}; choose "
            "another, or pass checkpoint= (--checkpoint) for a copy of the checkpoint with the "
            "scales, which can be uploaded"
        )


def _check_own_file(target: str, existing: Collection[str], files: Collection[str]) -> None:
    if OWN_FILE not in files and any(PurePath(name).name == OWN_FILE for name in existing):
        raise ScaleError(
            f"{target}: expected a place without {OWN_FILE}, which is read before all others, got "
            "one that has it; choose another, or delete it"
        )


def _check_config(repo_id: str, existing: Collection[str], files: Collection[str]) -> None:
    """Raise ScaleError if the config of a model would be replaced in a repository."""
    kept = [*(n for n in find_weights(existing) if n not in files), "config.json"]
    of_scales = {*files} & {*existing} - {"config.json"}
    if "config.json" in files and (kept[:-1] or ("config.json" in existing and not of_scales)):
        raise ScaleError(
            f"{repo_id}: expected a place without weights and their config.json, got "
            f"{format_list(n for n in kept if n in existing)}; choose another, or write the scales "
            "into a copy of the checkpoint (checkpoint=) and upload that"
        )


def _holds_scales(path: Path) -> bool:
    """Return whether a safetensors file holds scales and nothing else."""
    names, metadata = read_header(path)
    known = all(any(k.pattern.fullmatch(name) for k in TENSOR_NAMES) for name in names)
    return known or HfFp8kv.name in metadata
