"""Writing scales: the files alone, or a copy of a checkpoint that holds them."""

import logging
from collections.abc import Collection
from pathlib import Path

from ..errors import ScaleError
from ..utils.files import write_all
from ..utils.text import format_list
from .copy_checkpoint import Weights, copy_checkpoint
from .formats import SCALE_FORMATS
from .formats.hf_fp8kv import OWN_FILE
from .reduce import reduce_scales
from .report import REPORT_FILE
from .scale_data import ScaleData

__all__ = ["check_folder", "save_scales"]

logger = logging.getLogger(__name__)


def save_scales(
    scales: ScaleData,
    folder: Path,
    *,
    format: str,
    checkpoint: Path | None = None,
    weights: Weights = "copy",
    overwrite: bool = False,
    tp_size: int = 1,
) -> list[Path]:
    """Write the scales, see `KVScales.save_pretrained`; one warning says what was lost."""
    if format not in SCALE_FORMATS:
        raise ScaleError(
            f"format: expected one of {', '.join(SCALE_FORMATS)}, got {format!r}; choose one"
        )
    scale_format = SCALE_FORMATS[format]
    valid = isinstance(tp_size, int) and tp_size > 0
    if not valid or (tp_size > 1 and not scale_format.holds_ranks):
        ranked = " or ".join(repr(f.name) for f in SCALE_FORMATS.values() if f.holds_ranks)
        raise ScaleError(
            f"tp_size: expected 1, or the number of ranks for {ranked}, got {tp_size!r} for "
            f"{format!r}; only that format names ranks"
        )
    if checkpoint is not None:
        paths, losses = copy_checkpoint(
            scales, checkpoint, folder, format=scale_format, weights=weights, tp_size=tp_size
        )
    else:
        reduced, losses = reduce_scales(scales, scale_format, tp_size)
        losses += scale_format.missing_facts(scales)
        files = scale_format.files(reduced, tp_size)
        paths = [folder / name for name in files]
        try:
            check_folder(folder, files, overwrite=overwrite)
            folder.mkdir(parents=True, exist_ok=True)
            write_all({folder / name: content for name, content in files.items()})
            if OWN_FILE in files and REPORT_FILE not in files:
                (folder / REPORT_FILE).unlink(missing_ok=True)  # it was about other scales
        except OSError as error:
            raise ScaleError(
                f"{folder}: expected a folder that can be written, got {error}; choose another"
            ) from error
    if losses:
        logger.warning("%s: written as %s: %s", folder, format, "; ".join(losses))
    return paths


def check_folder(folder: Path, files: Collection[str], *, overwrite: bool) -> None:
    """Raise ScaleError unless the files can be written into a folder.

    They replace no scales without `overwrite`, never the config of a checkpoint, and they do not
    come beside scales that would be read instead of them.
    """
    present = [name for name in files if (folder / name).exists()]
    if present and not overwrite:
        raise ScaleError(
            f"{folder}: expected a folder without {format_list(present)}, got one that has it; "
            "choose another, or pass overwrite=True"
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
            "another, and pass checkpoint= for a copy of the checkpoint with the scales"
        )
