"""Writing static scales: the files alone, or a copy of a checkpoint that holds them."""

import logging
from collections.abc import Mapping
from pathlib import Path

from ...errors import ScaleError
from ...utils.files import write_all
from ...utils.text import format_list
from ..kv_scales import CHECKPOINT_FORMATS, KVScales
from ..report import REPORT_FILE
from .native import OWN_FILE
from .write_checkpoint import Weights, write_checkpoint
from .write_files import reduced, scale_files

__all__ = ["save"]

logger = logging.getLogger(__name__)


def save(
    scales: KVScales,
    folder: Path,
    *,
    format: str,
    checkpoint: Path | None,
    weights: Weights,
    overwrite: bool,
    tp_size: int,
) -> list[Path]:
    """Writes the scales, see `KVScales.save_pretrained`; one warning says what was lost."""
    if format not in CHECKPOINT_FORMATS:
        raise ScaleError(
            f"format: expected one of {', '.join(CHECKPOINT_FORMATS)}, got {format!r}; choose one"
        )
    ranks = isinstance(tp_size, int) and tp_size > 0
    if not ranks or (tp_size > 1 and format != "vllm-json"):
        raise ScaleError(
            f"tp_size: expected 1, or the number of ranks for 'vllm-json', got {tp_size!r} for "
            f"{format!r}; only that format names ranks"
        )
    if checkpoint is not None:
        paths, losses = write_checkpoint(
            scales, checkpoint, folder, format=format, weights=weights, tp_size=tp_size
        )
    else:
        layers, losses = reduced(scales.layers, format, tp_size)
        if format == "vllm-json" and scales.model_type is None:
            losses.append("model_type is not known and null, which vLLM and SGLang refuse")
        paths = _write(folder, scale_files(scales, layers, format, tp_size), overwrite)
    if losses:
        logger.warning("%s: written as %s: %s", folder, format, "; ".join(losses))
    return paths


def _write(folder: Path, files: Mapping[str, bytes], overwrite: bool) -> list[Path]:
    """The folder then holds the files, each whole or as it was; returns their paths."""
    paths = {folder / name: content for name, content in files.items()}
    try:
        there = [path.name for path in paths if path.exists()]
        if there and not overwrite:
            raise ScaleError(
                f"{folder}: expected a folder without {format_list(there)}, got one that has it; "
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
        folder.mkdir(parents=True, exist_ok=True)
        write_all(paths)
        if OWN_FILE in files and REPORT_FILE not in files:
            (folder / REPORT_FILE).unlink(missing_ok=True)  # it was about other scales
    except OSError as error:
        raise ScaleError(
            f"{folder}: expected a folder that can be written, got {error}; choose another"
        ) from error
    return list(paths)
