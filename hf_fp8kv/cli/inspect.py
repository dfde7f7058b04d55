"""`hf-fp8kv inspect`: static scales, their quality on a text, and how a cache is stored."""

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ScaleError
from .shared import describe_scales, load_model, print_parts, report_problems
from .texts import (
    TEXTS_HELP,
    ChatTemplate,
    Dtype,
    MaxLength,
    MaxPosition,
    MaxTokens,
    TextColumn,
    drop_unset,
    load_texts,
)
from .values import (
    Device,
    Json,
    Model,
    ModelDtype,
    Scales,
    check_choice,
    check_plot,
    model_dtypes,
    parse_format,
)

if TYPE_CHECKING:
    import torch

    from ..scales.kv_scales import KVScales
    from ..scales.report import CalibrationReport, SideStatistics


def inspect(
    scales: Scales,
    model: Model = None,
    texts: Annotated[
        str | None,
        typer.Option(metavar="FILE", help=f"Measure the scales on these texts. {TEXTS_HELP}"),
    ] = None,
    plot: Annotated[str | None, typer.Option(metavar="PATH", help="Plot each layer (PNG).")] = None,
    dtype: Dtype = None,
    max_tokens: MaxTokens = None,
    max_length: MaxLength = None,
    max_position: MaxPosition = None,
    text_column: TextColumn = None,
    chat_template: ChatTemplate = None,
    device: Device = "auto",
    model_dtype: ModelDtype = "auto",
    as_json: Json = False,
) -> None:
    """Show static scales, one row per layer, and anything odd about them.

    With --texts they are measured; else the report of their calibration is shown, if there is one.
    Of a file that a cache was saved to, show how each layer is stored.
    """
    from ..scales.kv_scales import resolve

    options = drop_unset(
        dtype=dtype and parse_format(dtype, "--dtype"),
        max_tokens=max_tokens,
        max_length=max_length,
        max_position=max_position,
        text_column=text_column,
        chat_template=chat_template,
    )
    if texts is None and (model is not None or options):
        option = "--model" if model else f"--{next(iter(options)).replace('_', '-')}"
        raise typer.BadParameter("requires --texts", param_hint=option)
    check_choice(model_dtype, model_dtypes(), "--model-dtype")
    check_plot(plot)
    if plot is not None and Path(plot).suffix.lower() != ".png":
        message = f"expected a file that ends in .png, got {plot!r}"
        raise typer.BadParameter(message, param_hint="--plot")
    with report_problems() as warnings:
        if _is_cache(scales):
            if texts is not None or plot is not None:
                option = "--texts" if texts is not None else "--plot"
                raise typer.BadParameter("requires scales, got a saved cache", param_hint=option)
            _show_cache(scales, as_json)
            return
        # Show what is wrong with a file instead of refusing it, if possible.
        source: Any = resolve(scales, strict=False)
        report = getattr(source, "report", None)
        if texts is not None:
            report = _measure(source, texts, (model, device, model_dtype), options)
        if plot is not None:
            from .scales_plot import plot_scales

            plot_scales(source, report, plot)
        if as_json:
            print(json.dumps(_describe(source, report) | {"warnings": warnings}))
        else:
            from .scales_table import inspect_table

            print_parts(inspect_table(source, report), piped_width=160)


def _is_cache(path: str) -> bool:
    """Return whether this is a file of `FP8PagedCache.save`."""
    from ..utils.files import CACHE_FORMAT, read_header

    if not Path(path).is_file():
        return False
    with suppress(ScaleError):  # whoever reads scales says what is wrong with the file
        return read_header(Path(path))[1].get("format") == CACHE_FORMAT
    return False


def _show_cache(path: str, as_json: bool) -> None:
    from ..cache.cache import FP8PagedCache
    from ..utils.terminal import format_size, make_table

    cache = FP8PagedCache.load(path)
    sizes = cache.memory_footprint()
    if as_json:
        layers = {str(index): list(map(str, plan)) for index, plan in cache.plan.items()}
        print(json.dumps({"origin": path, **vars(sizes), "layers": layers}))
        return
    rows = [
        {"layer": str(index), "K stored as": str(plan.k), "V stored as": str(plan.v)}
        for index, plan in cache.plan.items()
    ]
    print(f"{cache}\n{sizes.tokens} tokens, {format_size(sizes.used_bytes)} in pages")
    print_parts([make_table(rows)], piped_width=160)


def _measure(
    scales: "KVScales", texts: str, model: tuple[str | None, str, str], options: dict[str, Any]
) -> "CalibrationReport":
    from ..calibration import measure

    source = load_texts(texts)
    loaded, tokenizer = load_model(*model)
    report: CalibrationReport = measure(loaded, scales, source, tokenizer=tokenizer, **options)
    return report


def _describe(scales: "KVScales", report: "CalibrationReport | None") -> dict[str, Any]:
    """Return everything known about the scales, as JSON values."""
    from .scales_table import list_remarks

    layers = {}
    for index, layer in scales.layers.items():
        statistics = None if report is None else report.layers.get(index)
        layers[str(index)] = {
            "source": layer.source,
            "granularity": layer.granularity,
            "centered": layer.k_center is not None,
            "plan": None if layer.plan is None else list(map(str, layer.plan)),
            "k": _describe_side(layer.k, None if statistics is None else statistics.k),
            "v": _describe_side(layer.v, None if statistics is None else statistics.v),
        }
    return {
        **describe_scales(scales),
        "layers": layers,
        "remarks": list_remarks(scales),
        "report": None if report is None else report.to_dict(),
    }


def _describe_side(
    scale: "torch.Tensor | None", statistics: "SideStatistics | None"
) -> dict[str, Any] | None:
    """Return the scale of K or V of a layer; scales per channel are too many to list."""
    from ..formats import FORMATS

    if scale is None:
        return None
    low, high = float(scale.min()), float(scale.max())
    side = {"shape": list(scale.shape), "min": low, "max": high}
    if scale.ndim == 0 or scale.shape[1] == 1:
        side["values"] = scale.flatten().tolist()
    amax = FORMATS["fp8_e4m3"].max * high if statistics is None else max(statistics.amax)
    # Without a measurement, amax is the largest magnitude that the scale can represent.
    side |= {"amax": amax, "amax_from": "scale" if statistics is None else "text"}
    if statistics is not None:
        side |= {"saturated": statistics.saturated, "underflow": statistics.underflow}
    return side
