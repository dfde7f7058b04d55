"""Static scales on the Hub: one commit of small files, and nothing else is touched."""

from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import HfApi

from ...errors import ScaleError
from ...utils.text import format_list
from ..kv_scales import KVScales
from .hub import HUB_ERRORS
from .native import OWN_FILE

__all__ = ["upload"]


def upload(
    scales: KVScales,
    repo_id: str,
    *,
    format: str,
    private: bool | None,
    token: str | bool | None,
    revision: str | None,
    commit_message: str,
    overwrite: bool,
    tp_size: int,
) -> str:
    """Uploads the files that `save_pretrained` writes; see `KVScales.push_to_hub`."""
    api = HfApi(token=token)
    with TemporaryDirectory() as folder:
        paths = scales.save_pretrained(folder, format=format, tp_size=tp_size)
        names = [path.name for path in paths]
        try:
            api.create_repo(repo_id, private=private, exist_ok=True)
            if revision is not None:
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            _check_repository(repo_id, api.list_repo_files(repo_id, revision=revision), names,
                              overwrite)  # fmt: skip
            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=Path(folder),
                commit_message=commit_message,
                revision=revision,
            )
        except HUB_ERRORS as error:
            if isinstance(error, ScaleError):
                raise
            raise ScaleError(
                f"{repo_id}: expected a repository that can be written, got "
                f"{type(error).__name__}: {error}; check the name, the revision and the token"
            ) from error
    return str(commit.commit_url)


def _check_repository(repo_id: str, there: list[str], names: list[str], overwrite: bool) -> None:
    """The files replace nothing that is not meant, and never the config of a checkpoint."""
    same = sorted(set(names) & set(there))
    if same and not overwrite:
        raise ScaleError(
            f"{repo_id}: expected a repository without {format_list(same)}, got one that has it; "
            "choose another, or pass overwrite=True"
        )
    weights = [n for n in there if n.endswith(".safetensors") and n not in (*names, OWN_FILE)]
    if "config.json" in names and weights:
        raise ScaleError(
            f"{repo_id}: expected a repository without weights, got {format_list(weights)}; write "
            "a copy of the checkpoint with save_pretrained(checkpoint=), and upload its folder"
        )
