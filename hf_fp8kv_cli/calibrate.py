"""`hf-fp8kv calibrate`, which calibrates static scales of a model on texts."""

import inspect
import json
from pathlib import Path
from typing import Annotated

import typer

from . import arguments
from .shared import WarningLog, handle_log, load_model_and_tokenizer, print_note

COPY_FOLDER = "checkpoint"


def calibrate(
    ctx: typer.Context,
    texts: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="A .txt file, JSON lines (.jsonl), or pydoc for Python's documentation.",
        ),
    ],
    out: Annotated[
        str, typer.Option(metavar="FOLDER", help="Folder of the scales. Created if missing.")
    ],
    model: arguments.Model = None,
    granularity: Annotated[
        str | None,
        typer.Option(
            help="One scale per layer (tensor), head or channel. "
            "Default: head, or the finest that --format can hold.",
            **arguments.make_choice(arguments.GRANULARITIES),
        ),
    ] = None,
    center: Annotated[
        bool | None,
        typer.Option(
            "--center/--no-center",
            help="Subtract the mean of K, a center. "
            "Default: on for hf_fp8kv, the only format that can hold centers.",
        ),
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|TEXT",
            help="Storage plan of the caches that will use the scales: the path of a saved result "
            "of choose_plan, or text such as 'int8 rotated'. Only this package reads such scales.",
        ),
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(min=1, max=16, help="Factor of the largest value, as headroom. Default: 1.0."),
    ] = None,
    format_name: Annotated[
        str,
        typer.Option(
            "--format",
            help="Format of the files (see convert --to).",
            **arguments.make_choice(arguments.SCALE_FORMATS),
        ),
    ] = "hf_fp8kv",
    max_tokens: Annotated[
        int | None, typer.Option(min=2, help="Maximum number of tokens to read.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Maximum tokens in a window of text.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Windows of text per call.")] = None,
    text_column: Annotated[
        str | None, typer.Option(help="Key of the text in JSON lines. Default: text.")
    ] = None,
    chat_template: Annotated[
        bool | None,
        typer.Option(
            "--chat-template/--no-chat-template",
            help="Use the model's chat template for every text / refuse conversations. "
            "Default: use it for conversations, not for plain texts.",
        ),
    ] = None,
    device: arguments.Device = "auto",
    model_dtype: arguments.ModelDtype = "auto",
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            exists=True,
            file_okay=False,
            help=f"Also copy this checkpoint, with the scales in --format, to OUT/{COPY_FOLDER}.",
        ),
    ] = None,
    overwrite: arguments.Overwrite = False,
    as_json: arguments.Json = False,
) -> None:
    """Calibrate static scales on texts. `card MODEL --scales OUT` measures their quality."""
    from hf_fp8kv import KVScales, ScaleError, calibration
    from hf_fp8kv.scales import SCALE_FORMATS
    from hf_fp8kv.scales.checkpoint.checkpoint import JSON_FILE, SCALES_SHARD
    from hf_fp8kv.scales.save import read_base

    from .scales_table import describe_scales

    option_names = inspect.signature(calibration.calibrate).parameters.keys() - {"model", "texts"}
    options = {
        name: value
        for name, value in ctx.params.items()
        if name in option_names and value is not None
    }
    if plan is not None and not SCALE_FORMATS[format_name].is_lossless:
        raise typer.BadParameter(
            f"requires --format hf_fp8kv, got {format_name}, which cannot hold a plan",
            param_hint="--plan",
        )
    if not SCALE_FORMATS[format_name].is_lossless:
        options = {"center": False, "granularity": SCALE_FORMATS[format_name].granularity} | options
    if not out:
        raise typer.BadParameter("expected a folder, got ''", param_hint="--out")
    folder = Path(out)
    copy_folder = Path(out) / COPY_FOLDER
    with handle_log(log := WarningLog()):
        corpus = arguments.load_texts(texts)
        # With a checkpoint, only its copy has the scales in --format, and OUT has hf_fp8kv.
        out_format = "hf_fp8kv" if checkpoint else format_name
        # The calibration takes minutes, so first check that the scales can be written. OUT must not
        # contain other scales, although some formats can share a folder.
        checked_names = {JSON_FILE, SCALES_SHARD}
        checked_names |= SCALE_FORMATS[out_format].make_files(KVScales.uniform(1)).keys()
        read_base(folder, SCALE_FORMATS[out_format], checked_names, None, overwrite=overwrite)
        if checkpoint is not None:
            read_base(copy_folder, SCALE_FORMATS[format_name], (), checkpoint, overwrite=overwrite)
        loaded_model, tokenizer = load_model_and_tokenizer(model, device, model_dtype)
        scales = calibration.calibrate(loaded_model, corpus, tokenizer=tokenizer, **options)
        try:
            paths = scales.save_pretrained(folder, format=out_format, overwrite=overwrite)
        except ScaleError as error:
            if SCALE_FORMATS[out_format].is_lossless:
                raise
            scales.save_pretrained(folder, overwrite=overwrite)  # keeps the result
            raise ScaleError(f"{error}. The scales are in {folder}, as hf_fp8kv") from error
        if checkpoint is not None:
            print_note(f"{folder}: scales are written. Copying {checkpoint}")
            paths += scales.save_pretrained(
                copy_folder, format=format_name, checkpoint=checkpoint, overwrite=overwrite
            )
    file_names = list(map(str, paths))
    if as_json:
        print(
            json.dumps({**describe_scales(scales), "files": file_names, "warnings": log.messages})
        )
        return
    print("\n".join(file_names))
