"""`hf-fp8kv calibrate`: static scales for a model, from texts."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ScaleError
from ..utils.terminal import make_table
from .shared import facts, load, show, spoken, tell
from .texts import (
    TEXTS_HELP,
    ChatTemplate,
    Dtype,
    MaxLength,
    MaxTokens,
    TextColumn,
    given,
    texts_of,
)
from .values import (
    Device,
    Json,
    Model,
    completing,
    formats,
    granularities,
    model_dtypes,
    one_of,
    parse_format,
)

if TYPE_CHECKING:
    from ..scales.kv_scales import KVScales

__all__ = ["calibrate"]

STATE = ".calibration-state"
COPY = "checkpoint"


def calibrate(
    texts: Annotated[str, typer.Option(metavar="FILE", help=TEXTS_HELP)],
    out: Annotated[
        str, typer.Option(metavar="FOLDER", help="Where to write the scales; made if not there.")
    ],
    model: Model = None,
    granularity: Annotated[
        str | None,
        typer.Option(
            help="A scale for each layer (tensor), head or channel. "
            "Default: head, or what --format holds.",
            autocompletion=completing(granularities),
        ),
    ] = None,
    center: Annotated[
        bool | None,
        typer.Option(
            "--center/--no-center",
            help="Try centers of K, and keep those that help. "
            "Default: on for hf_fp8kv, which alone holds them.",
        ),
    ] = None,
    dtype: Dtype = None,
    margin: Annotated[
        float | None,
        typer.Option(min=1, max=16, help="Scales hold so many times what was seen. Default: 1.0."),
    ] = None,
    to: Annotated[
        str,
        typer.Option(
            "--format", help="What to write; see convert --to.", autocompletion=completing(formats)
        ),
    ] = "hf_fp8kv",
    max_tokens: MaxTokens = None,
    max_length: MaxLength = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Pieces at a time.")] = None,
    text_column: TextColumn = None,
    chat_template: ChatTemplate = None,
    held_out: Annotated[
        int | None,
        typer.Option(min=0, help="Tokens that are kept out, to check the scales on."),
    ] = None,
    device: Device = "auto",
    model_dtype: Annotated[
        str,
        typer.Option(
            help="auto (as the checkpoint says), bfloat16, float16, float32.",
            autocompletion=completing(model_dtypes),
        ),
    ] = "auto",
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help=f"Also copy this checkpoint, with the scales in --format, to OUT/{COPY}.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace scales that are there; never weights.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Calibrate static scales on texts; the same command goes on where it was interrupted."""
    options = given(
        granularity=granularity and one_of(granularity, granularities(), "--granularity"),
        center=center,
        dtype=dtype and parse_format(dtype, "--dtype"),
        margin=margin,
        max_tokens=max_tokens,
        max_length=max_length,
        batch_size=batch_size,
        text_column=text_column,
        chat_template=chat_template,
        held_out=held_out,
    )
    one_of(to, formats(), "--format")
    options = _fitting(to) | options
    one_of(model_dtype, model_dtypes(), "--model-dtype")
    folder = Path(out)
    with spoken() as warnings:
        source = texts_of(texts)
        own = "hf_fp8kv" if checkpoint else to
        _check_out(folder, own, overwrite)
        _check_checkpoint(checkpoint, to, folder / COPY)
        loaded, tokenizer = load(model, device, model_dtype)
        with _resumable(folder / STATE) as state:
            from ..calibration import calibrate as run

            scales = run(loaded, source, tokenizer=tokenizer, state=state, **options)
            paths = _saved(scales, folder, own, overwrite)
            if checkpoint is not None:
                tell(f"{folder}: the scales; now the copy of {checkpoint}")
                paths += scales.save_pretrained(folder / COPY, format=to, checkpoint=checkpoint)
            state.unlink(missing_ok=True)
    _print_result(scales, paths, warnings, as_json)


def _fitting(format: str) -> dict[str, Any]:
    """Returns the finest that the format holds: scales are chosen for what is written."""
    if format == "hf_fp8kv":
        return {}
    per_head = format == "compressed-tensors"
    return {"center": False, "granularity": "head" if per_head else "tensor"}


def _check_out(folder: Path, format: str, overwrite: bool) -> None:
    """The folder can take the scales: known before minutes are spent."""
    from ..scales.formats import JSON_FILE
    from ..scales.formats.native import OWN_FILE
    from ..scales.formats.write_files import SCALES_FILE, scale_files
    from ..scales.kv_scales import KVScales
    from ..scales.report import REPORT_FILE

    if folder.exists() and not folder.is_dir():
        raise ScaleError(f"--out: expected a folder, got the file {str(folder)!r}; choose another")
    some = KVScales.uniform(1)
    names = {*scale_files(some, some.layers, format, 1)}
    scales = {OWN_FILE, REPORT_FILE, JSON_FILE, SCALES_FILE, *names}
    there = sorted(name for name in scales if (folder / name).exists())
    if there and not overwrite:
        raise ScaleError(
            f"{folder}: expected a folder without {', '.join(there)}, got one that has it; choose "
            "another --out, or pass --overwrite"
        )
    if OWN_FILE in there and OWN_FILE not in names:
        raise ScaleError(
            f"{folder}: expected a folder without {OWN_FILE}, got one that has it, and it is read "
            "before all others; choose another --out"
        )
    weights = [p.name for p in folder.glob("*.safetensors") if p.name not in scales]
    if weights and "config.json" in names:
        raise ScaleError(
            f"{folder}: expected a folder without weights, got {', '.join(sorted(weights))}; "
            "choose another --out, and --checkpoint for a copy of the checkpoint with the scales"
        )


def _check_checkpoint(checkpoint: str | None, format: str, copy: Path) -> None:
    """A copy of the checkpoint can be written, as far as that is known without scales."""
    if checkpoint is None:
        return
    if not (Path(checkpoint) / "config.json").is_file():
        message = f"expected a folder with a config.json, got {checkpoint!r}"
        raise typer.BadParameter(message, param_hint="--checkpoint")
    if format == "trtllm":
        message = "TensorRT-LLM converts the weights itself: leave it out with --format trtllm"
        raise typer.BadParameter(message, param_hint="--checkpoint")
    if copy.exists() and (not copy.is_dir() or any(copy.iterdir())):
        raise ScaleError(
            f"{copy}: expected a folder that is new or empty, got one with files; a copy of a "
            "checkpoint never replaces anything, choose another --out"
        )


@contextlib.contextmanager
def _resumable(state: Path) -> Iterator[Path]:
    """Inside, the file's folder is there; it is left behind only for what can be gone on with."""
    new = not state.parent.exists()
    state.parent.mkdir(parents=True, exist_ok=True)
    if state.exists():
        tell(f"{state}: found what an interrupted calibration had done")
    try:
        yield state
    except KeyboardInterrupt:
        kept = "run the same command again to go on from here" if state.exists() else None
        raise KeyboardInterrupt(*filter(None, [kept])) from None
    finally:
        if new:
            # Only where nothing was written.
            with contextlib.suppress(OSError):
                state.parent.rmdir()


def _saved(scales: "KVScales", folder: Path, format: str, overwrite: bool) -> list[Path]:
    """Returns the paths of the scales; what a format refuses is kept in our own."""
    try:
        return scales.save_pretrained(folder, format=format, overwrite=overwrite)
    except ScaleError as error:
        if format == "hf_fp8kv":
            raise
        scales.save_pretrained(folder, overwrite=overwrite)
        raise ScaleError(f"{error}; the scales are in {folder}, as hf_fp8kv") from error


def _print_result(
    scales: "KVScales", paths: list[Path], warnings: list[str], as_json: bool
) -> None:
    report = scales.report
    if as_json:
        found = None if report is None else report.to_dict()
        files = list(map(str, paths))
        print(json.dumps(facts(scales) | {"files": files, "warnings": warnings, "report": found}))
        return
    if report is not None and report.quality:
        from rich.text import Text

        rows = [
            {
                "cache": row.cache, "mean KL": row.kl, "largest KL": row.kl_max,
                "same top-1": f"{row.top1:.2%}", "perplexity": row.perplexity, "tokens": row.tokens,
            }
            for row in report.quality
        ]  # fmt: skip
        show([make_table(rows), Text(report.centers)], piped_width=120)
    print("\n".join(map(str, paths)))
