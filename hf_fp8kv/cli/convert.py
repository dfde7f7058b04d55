"""`hf-fp8kv convert`: static scales from any format into any other, and onto the Hub."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ScaleError
from .shared import facts, spoken, tell
from .values import Json, Scales, completing, formats, one_of, weights

if TYPE_CHECKING:
    from ..scales.kv_scales import KVScales

__all__ = ["convert"]

logger = logging.getLogger(__name__)


def convert(
    scales: Scales,
    to: Annotated[
        str,
        typer.Option(
            help="vllm-json, tgi, compressed-tensors, autofp8, modelopt, quark, trtllm, hf_fp8kv.",
            autocompletion=completing(formats),
        ),
    ],
    out: Annotated[
        str | None, typer.Argument(help="The folder to write to; it is made if it is not there.")
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Write a copy of this checkpoint with the scales."),
    ] = None,
    kept: Annotated[
        str,
        typer.Option(
            "--weights",
            help="copy, or link: the weights of the copy are hard links, on the same disk.",
            autocompletion=completing(weights),
        ),
    ] = "copy",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace scales that are there; never weights.")
    ] = False,
    tp_size: Annotated[
        int, typer.Option(min=1, help="vllm-json: write the scales for so many ranks.")
    ] = 1,
    model_type: Annotated[
        str | None,
        typer.Option(help="Which model the scales are of (llama, ...), if they do not say so."),
    ] = None,
    lenient: Annotated[
        bool,
        typer.Option(
            "--lenient", help="Missing layers or another model type are a warning, and no error."
        ),
    ] = False,
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="REPO", help="Upload the scales; nothing is written here.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write static scales in another format; prints the paths of what is new, one a line.

    What the format cannot hold is reduced, and a warning says how; nothing saturates for it.
    """
    from ..scales.resolve import resolve

    one_of(to, formats(), "--to")
    way: Any = one_of(kept, weights(), "--weights")
    _check_target(out, push_to_hub, checkpoint, kept)
    with spoken() as warnings:
        read: Any = resolve(scales, strict=not lenient)
        named = _named(read, model_type, lenient)
        if push_to_hub is not None:
            address = named.push_to_hub(
                push_to_hub, format=to, overwrite=overwrite, tp_size=tp_size
            )
            target: dict[str, Any] = {"format": to, "repo": push_to_hub, "commit": address}
            written = [address]
        else:
            paths = named.save_pretrained(
                str(out),
                format=to,
                checkpoint=checkpoint,
                weights=way,
                overwrite=overwrite,
                tp_size=tp_size,
            )
            target, written = {"format": to, "folder": str(out)}, list(map(str, paths))
    about = facts(read)
    if as_json:
        files = [] if push_to_hub else written
        print(json.dumps({"from": about, "to": target, "files": files, "warnings": warnings}))
        return
    tell(
        f"{about['format']} -> {to}: {about['num_layers']} layers, per {about['granularity']}"
        f"{', K centered' if about['centered'] else ''}, {named.model_type or 'model type unknown'}"
    )
    print("\n".join(written))


def _check_target(out: str | None, repo: str | None, checkpoint: str | None, kept: str) -> None:
    if (out is None) == (repo is None):
        message = (
            f"expected a folder to write to, or --push-to-hub; got {'both' if out else 'none'}"
        )
        raise typer.BadParameter(message, param_hint="OUT")
    if out is not None and Path(out).suffix in (".json", ".safetensors"):
        message = f"expected a folder (the format names the files in it), got {out!r}"
        raise typer.BadParameter(message, param_hint="OUT")
    if repo is not None and checkpoint is not None:
        message = "uploads the scales alone: leave --checkpoint out, or write the copy to a folder"
        raise typer.BadParameter(message, param_hint="--push-to-hub")
    if kept == "link" and checkpoint is None:
        raise typer.BadParameter("expected --checkpoint with it", param_hint="--weights")


def _named(scales: "KVScales", model_type: str | None, lenient: bool) -> "KVScales":
    """Returns the scales with the model type that was asked for, where it may be."""
    found = scales.model_type
    if model_type is None or found == model_type:
        return scales
    if found is not None:
        message = f"{scales.origin}: expected scales of {model_type!r}, got those of {found!r}"
        if not lenient:
            raise ScaleError(f"{message}; leave --model-type out, or pass --lenient")
        logger.warning("%s: written as those of %r", message, model_type)
    return replace(scales, model_type=model_type)
