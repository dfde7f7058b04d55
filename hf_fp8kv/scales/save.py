"""Writing files of scales into a folder, where they replace nothing that is not meant."""

from collections.abc import Collection, Mapping
from pathlib import Path

from ..errors import ScaleError
from ..utils.files import write_all
from ..utils.text import format_list
from .formats.hf_fp8kv import OWN_FILE
from .report import REPORT_FILE

__all__ = ["check_folder", "write_files"]


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


def check_folder(folder: Path, files: Collection[str], *, overwrite: bool) -> None:
    """Raise ScaleError unless files of scales can be written into a folder.

    They replace no scales without `overwrite`, never the config of a checkpoint, and they do not
    come beside scales that would be read instead of them.
    """
    existing = [name for name in files if (folder / name).exists()]
    if existing and not overwrite:
        raise ScaleError(
            f"{folder}: expected a folder without {format_list(existing)}, got one that has it; "
            "choose another, or pass overwrite=True (--overwrite)"
        )
    if OWN_FILE not in files and (folder / OWN_FILE).exists():
        raise ScaleError(
            f"{folder}: expected a folder without {OWN_FILE}, which is read before all others, "
            "got one that has it; choose another, or delete it"
        )
    weights = [p.name for p in folder.glob("*.safetensors") if p.name not in (*files, OWN_FILE)]
    if "config.json" in files and weights:
        raise ScaleError(
            f"{folder}: expected a folder without weights, got {format_list(weights)}; choose "
            "another, and pass checkpoint= (--checkpoint) for a copy of the checkpoint with the "
            "scales"
        )
