"""Uploading scales to the Hub: one commit of small files, and nothing else is touched."""

from pathlib import Path

from huggingface_hub import HfApi

from ..errors import ScaleError
from ..utils.text import format_list
from .checkpoint.hub import translate_hub_errors
from .formats.hf_fp8kv import OWN_FILE

__all__ = ["upload_files"]


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
    files = sorted(path.name for path in folder.iterdir())
    with translate_hub_errors(repo_id, "written"):
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        existing = api.list_repo_files(repo_id, revision=revision)
        _check_repository(repo_id, existing, files, overwrite)
        commit = api.upload_folder(
            repo_id=repo_id, folder_path=folder, commit_message=commit_message, revision=revision
        )
    return str(commit.commit_url)


def _check_repository(repo_id: str, existing: list[str], files: list[str], overwrite: bool) -> None:
    """Raise ScaleError if an upload replaced scales without `overwrite`, or a model's config."""
    replaced = sorted(set(files) & set(existing))
    if replaced and not overwrite:
        raise ScaleError(
            f"{repo_id}: expected a repository without {format_list(replaced)}, got one that has "
            "it; choose another, or pass overwrite=True (--overwrite)"
        )
    weights = [n for n in existing if n.endswith(".safetensors") and n not in (*files, OWN_FILE)]
    if "config.json" in files and weights:
        raise ScaleError(
            f"{repo_id}: expected a repository without weights, got {format_list(weights)}; write "
            "a copy of the checkpoint with save_pretrained(checkpoint=) (hf-fp8kv convert "
            "--checkpoint), and upload its folder"
        )
