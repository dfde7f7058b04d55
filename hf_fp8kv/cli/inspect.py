"""`hf-fp8kv inspect`: what static scales hold, and how good they are on a text."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .shared import facts, load, show, spoken
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
from .values import Device, Json, Model, Scales, check_plot, parse_format

if TYPE_CHECKING:
    import torch

    from ..scales.kv_scales import KVScales
    from ..scales.report import CalibrationReport, SideStatistics

__all__ = ["inspect"]


def inspect(
    scales: Scales,
    model: Model = None,
    texts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help=f"Measure the scales on it, with the model. {TEXTS_HELP}"
        ),
    ] = None,
    plot: Annotated[
        str | None, typer.Option(metavar="PATH", help="Draw what is known of each layer (PNG).")
    ] = None,
    dtype: Dtype = None,
    max_tokens: MaxTokens = None,
    max_length: MaxLength = None,
    text_column: TextColumn = None,
    chat_template: ChatTemplate = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Show static scales, a row a layer, and what is odd about them.

    With --texts they are measured; else what their calibration found is shown, where it is there.
    """
    from ..scales.resolve import resolve

    options = given(
        dtype=dtype and parse_format(dtype, "--dtype"),
        max_tokens=max_tokens,
        max_length=max_length,
        text_column=text_column,
        chat_template=chat_template,
    )
    if texts is None and (model is not None or options):
        option = "--model" if model else f"--{next(iter(options)).replace('_', '-')}"
        raise typer.BadParameter("expected --texts with it", param_hint=option)
    check_plot(plot)
    if plot is not None and Path(plot).suffix.lower() != ".png":
        message = f"expected a file that ends in .png, got {plot!r}"
        raise typer.BadParameter(message, param_hint="--plot")
    with spoken() as warnings:
        # What is wrong with a file is what one looks for here: it is a warning where it can be one.
        read: Any = resolve(scales, strict=False)
        report = getattr(read, "report", None)
        if texts is not None:
            report = _measured(read, texts, model, device, options)
        from . import scales_table as pictures

        if plot is not None:
            pictures.plot_scales(read, report, plot)
        if as_json:
            print(json.dumps(_described(read, report) | {"warnings": warnings}))
        else:
            show(pictures.inspect_table(read, report), piped_width=160)


def _measured(
    scales: "KVScales", texts: str, model: str | None, device: str, options: dict[str, Any]
) -> "CalibrationReport":
    from ..calibration import measure

    source = texts_of(texts)
    loaded, tokenizer = load(model, device)
    found: CalibrationReport = measure(loaded, scales, source, tokenizer=tokenizer, **options)
    return found


def _described(scales: "KVScales", report: "CalibrationReport | None") -> dict[str, Any]:
    """Returns all that is known, as JSON values."""
    from .scales_table import remarks

    layers = {}
    for index, layer in scales.layers.items():
        found = None if report is None else report.layers.get(index)
        layers[str(index)] = {
            "source": layer.source,
            "granularity": layer.granularity,
            "centered": layer.k_center is not None,
            "k": _side(layer.k, None if found is None else found.k),
            "v": _side(layer.v, None if found is None else found.v),
        }
    return {
        **facts(scales),
        "layers": layers,
        "remarks": remarks(scales),
        "report": None if report is None else report.to_dict(),
    }


def _side(scale: "torch.Tensor", found: "SideStatistics | None") -> dict[str, Any]:
    """Returns the scale of K or V of a layer; scales per channel are too many to list."""
    from ..formats import FORMATS

    low, high = float(scale.min()), float(scale.max())
    side = {"shape": list(scale.shape), "min": low, "max": high}
    if scale.ndim == 0 or scale.shape[1] == 1:
        side["values"] = scale.flatten().tolist()
    amax = FORMATS["fp8_e4m3"].max * high if found is None else max(found.amax)
    # Without a measurement it is what the scale stands for.
    side |= {"amax": amax, "amax_from": "scale" if found is None else "text"}
    if found is not None:
        side |= {"saturated": found.saturated, "underflow": found.underflow}
    return side
