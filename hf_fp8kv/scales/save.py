"""Writing files of scales into a folder or a repository, where they replace nothing else."""

from collections.abc import Collection, Mapping
from pathlib import Path

from huggingface_hub import HfApi

from ..errors import ScaleError
from ..utils.files import write_all
from ..utils.text import format_list
from .checkpoint.folder import translate_hub_errors
from .formats.hf_fp8kv import OWN_FILE
from .report import REPORT_FILE


def write_files(folder: Path, files: Mapping[str, bytes], *, overwrite: bool) -> list[Path]:
    """Write files of scales, all of them or none; return their paths."""
    paths = {folder / name: content for name, content in files.items()}
    try:
        check_folder(folder, files, overwrite=overwrite)
        folder.mkdir(parents=True, exist_ok=True)
        write_all(paths)
        if OWN_FILE in files and REPORT_FILE not in files:
            (folder / REPORT_FILE).unlink(missing_ok=True)  # it was about other scales
    except OSError as error:
        raise ScaleError(
            f"{folder}: expected a folder that can be written, got {error}; choose another"
        ) from error
    return list(paths)


def upload_files(
    folder: Path,
    repo_id: str,
    private: bool | None,
    token: str | bool | None,
    revision: str | None,
    commit_message: str,
    overwrite: bool,
) -> str:
    """Upload the files of scales in a folder, see `KVScales.push_to_hub`."""
    api = HfApi(token=token)
    files = [path.name for path in folder.iterdir()]
    with translate_hub_errors(repo_id, "written"):
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        existing = api.list_repo_files(repo_id, revision=revision)
        _check_existing(repo_id, existing, files, overwrite)
        commit = api.upload_folder(
            repo_id=repo_id, folder_path=folder, commit_message=commit_message, revision=revision
        )
    return str(commit.commit_url)


def check_folder(folder: Path, files: Collection[str], *, overwrite: bool) -> None:
    """Raise ScaleError unless files of scales can be written into a folder.

    They replace no scales without `overwrite`, never the config of a checkpoint, and they do not
    come beside scales that would be read instead of them.
    """
    existing = [path.name for path in folder.iterdir()] if folder.exists() else []
    _check_existing(str(folder), existing, files, overwrite)
    if OWN_FILE in existing and OWN_FILE not in files:
        raise ScaleError(
            f"{folder}: expected a folder without {OWN_FILE}, which is read before all others, "
            "got one that has it; choose another, or delete it"
        )


def _check_existing(
    target: str, existing: Collection[str], files: Collection[str], overwrite: bool
) -> None:
    replaced = sorted(set(files) & set(existing))
    if replaced and not overwrite:
        raise ScaleError(
            f"{target}: expected a place without {format_list(replaced)}, got one that has it; "
            "choose another, or pass overwrite=True (--overwrite)"
        )
    weights = [n for n in existing if n.endswith(".safetensors") and n not in (*files, OWN_FILE)]
    if "config.json" in files and weights:
        raise ScaleError(
            f"{target}: expected a place without weights, got {format_list(weights)}; choose "
            "another, or pass checkpoint= (--checkpoint) for a copy of the checkpoint with the "
            "scales, which can be uploaded"
        )
