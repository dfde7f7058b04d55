"""`hf-fp8kv convert`, which converts static scales between formats."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from .arguments import SCALE_FORMATS, WEIGHT_MODES, Json, Overwrite, Scales, make_choice
from .shared import WarningLog, handle_log, print_note

logger = logging.getLogger("hf_fp8kv.convert")


def convert(
    scales: Scales,
    out: Annotated[str, typer.Argument(help="Folder of the new files. Created if missing.")],
    to: Annotated[str, typer.Option(help=", ".join(SCALE_FORMATS), **make_choice(SCALE_FORMATS))],
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Write a copy of this checkpoint with the scales."),
    ] = None,
    weights: Annotated[
        Any,
        typer.Option(
            help="copy, or link (hard links to the weights, on the same disk).",
            **make_choice(WEIGHT_MODES),
        ),
    ] = "copy",
    overwrite: Overwrite = False,
    tp_size: Annotated[
        int, typer.Option(min=1, help="Number of ranks in the file. Only for vllm-json.")
    ] = 1,
    model_type: Annotated[
        str | None,
        typer.Option(help="Model type of the scales (llama, ...), if the file does not have it."),
    ] = None,
    lenient: Annotated[
        bool,
        typer.Option(
            "--lenient", help="Warn of missing layers or a different model type, but do not fail."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Convert static scales to another format, and print the path of each new file.

    Scales that the format cannot hold are reduced with a warning, so that nothing saturates.
    """
    if not out or Path(out).suffix in (".json", ".safetensors"):
        raise typer.BadParameter(
            f"expected a folder (the format names the files in it), got {out!r}", param_hint="OUT"
        )
    if weights == "link" and checkpoint is None:
        raise typer.BadParameter("requires --checkpoint", param_hint="--weights")
    from hf_fp8kv import KVScales, ScaleError

    from .scales_table import describe_scales

    with handle_log(log := WarningLog()):
        source = KVScales.from_pretrained(scales, strict=not lenient)
        description = describe_scales(source)
        typed_scales = source
        if model_type not in (None, source.model_type):
            typed_scales = replace(source, model_type=model_type)
            if source.model_type is not None:
                message = (
                    f"{source.origin}: expected scales of {model_type!r}, got {source.model_type!r}"
                )
                if not lenient:
                    raise ScaleError(f"{message}. Omit --model-type, or pass --lenient")
                logger.warning("%s: written as %r", message, model_type)
        paths = typed_scales.save_pretrained(
            out,
            format=to,
            checkpoint=checkpoint,
            weights=weights,
            overwrite=overwrite,
            tp_size=tp_size,
        )
    file_names = [str(path) for path in paths]
    if as_json:
        output = {
            "from": description,
            "to": {"format": to, "folder": out},
            "files": file_names,
            "warnings": log.messages,
        }
        print(json.dumps(output))
        return
    centering = ", K centered" if source.centered else ""
    print_note(
        f"{source.format} -> {to}: {len(source.layers)} layers, per {source.granularity}"
        f"{centering}, {typed_scales.model_type or 'model type unknown'}"
    )
    print("\n".join(file_names))
