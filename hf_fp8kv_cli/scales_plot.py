"""Plot static scales: magnitudes of K and V by layer and head, and quantization errors by layer.

matplotlib is imported only when a plot is requested. pyplot is not used, because it would look for
a display and keep figures alive.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hf_fp8kv.formats import FORMATS
from hf_fp8kv.scales import KVScales, ScalesReport
from hf_fp8kv.scales.measured_report import DYNAMIC
from hf_fp8kv.utils.files import write_atomically

from .scales_table import describe_measurement

_E4M3_MAX = FORMATS["fp8_e4m3"].max
# A plot is 1600 pixels wide.
_SIZE_INCHES = (40 / 3, 12)
_DPI = 120
# Colors that color-blind readers can distinguish (Okabe and Ito), and markers for gray prints.
_COLORS = ("#0072b2", "#d55e00", "#56b4e9", "#009e73", "#cc79a7", "#e69f00", "#000000", "#f0e442")
_MARKERS = "osv^DPX*"
_NOT_MEASURED = (
    "not measured\n\n"
    "hf-fp8kv inspect SCALES --model MODEL --texts FILE\nmeasures the scales on your text"
)


def plot_scales(scales: KVScales, report: ScalesReport | None, path: str | Path) -> None:
    """Write a PNG with the magnitudes of K and V and the quantization errors, atomically.

    `report` is the result of `measure`. Without it, the plot shows the largest
    magnitude that E4M3 represents with the scales (448 × scale), and a note on missing errors.
    """
    figure = make_figure(scales, report)
    write_atomically({Path(path): lambda file: figure.savefig(file, dpi=_DPI, format="png")})


def make_figure(scales: KVScales, report: ScalesReport | None) -> Any:
    """Return the matplotlib figure that `plot_scales` writes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    panels = figure.subplot_mosaic([["kv", "kv"], ["k", "v"], ["k error", "v error"]])
    panels["v error"].sharey(panels["k error"])
    quantity = "largest magnitude" if report is not None else f"{_E4M3_MAX:g} × scale"
    panels["kv"].set_title(f"{quantity} of K and V, by layer", loc="left")
    panels["kv"].set_ylabel(quantity)
    for series_index, side in enumerate("kv"):
        name = side.upper()
        head_maxima = _find_head_maxima(scales, report, side)
        layer_maxima = dict(enumerate(np.fmax.reduce(head_maxima, axis=1)))
        _draw_line(panels["kv"], layer_maxima, series_index, label=f"{name}, largest head")
        panels[side].set_title(f"{quantity} of {name}, by layer and head", loc="left")
        _draw_heatmap(figure, panels[side], head_maxima)
        panels[f"{side} error"].set_title(f"quantization error of {name}, by layer", loc="left")
        _draw_errors(panels[f"{side} error"], report, side)
    for name in ("kv", "k error", "v error"):
        if panels[name].lines:
            panels[name].set_yscale("log")
            panels[name].grid(visible=True, alpha=0.3)
        elif not panels[name].texts:
            _show_message(panels[name], "all values are 0")
    style: dict[str, Any] = {"frameon": False}
    handles, labels = panels["kv"].get_legend_handles_labels()
    panels["kv"].legend(handles, labels, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, **style)
    handles, labels = panels["v error"].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(FORMATS), **style)
    # A name may contain "$", which must not be parsed as math.
    figure.suptitle(_make_title(scales, report), parse_math=False)
    return figure


def _make_title(scales: KVScales, report: ScalesReport | None) -> str:
    if report is None:
        model = scales.model_type or "model type unknown"
        return f"{model}, {_shorten(scales.origin)}\nnot measured: {_E4M3_MAX:g} × scale is shown"
    return (
        f"{_shorten(report.model)}\nscales per {report.granularity}, {describe_measurement(report)}"
    )


def _shorten(name: str, max_length: int = 80) -> str:
    """Return `name` on one line, with the start of a long name replaced by dots."""
    name = " ".join(name.split())
    return name if len(name) <= max_length else f"...{name[-max_length:]}"


def _find_head_maxima(scales: KVScales, report: ScalesReport | None, side: str) -> np.ndarray:
    """Return the largest magnitudes, `[layers, heads]`. NaN replaces 0 and missing values."""
    if report is not None:
        amax = {i: np.array(getattr(layer, side).amax) for i, layer in report.layers.items()}
    else:
        tensors = {i: layer.static["kv".index(side)] for i, layer in scales.layers.items()}
        # One maximum for each head, or a single maximum for the layer.
        rows = {i: x.reshape(len(x) if x.ndim else 1, -1).amax(1) for i, x in tensors.items()}
        amax = {i: _E4M3_MAX * row.double().numpy() for i, row in rows.items()}
    num_heads = max(len(row) for row in amax.values())
    head_maxima = np.full((max(amax) + 1, num_heads), np.nan)
    for index, row in amax.items():
        # A single scale applies to all heads, but a single value in a report belongs to one head.
        width = num_heads if report is None and len(row) == 1 else len(row)
        head_maxima[index, :width] = row
    head_maxima[head_maxima <= 0] = np.nan  # because the axes are logarithmic
    return head_maxima


def _draw_line(axes: Any, values: Mapping[int, float], index: int, **style: Any) -> None:
    """Draw positive values by layer as a line, with the color and marker of series `index`."""
    if points := [(layer, value) for layer, value in values.items() if value > 0]:
        style = {"color": _COLORS[index], "marker": _MARKERS[index], "markersize": 3, **style}
        axes.plot(*zip(*points, strict=True), **style)
    _set_integer_axis(axes.xaxis, "layer")


def _set_integer_axis(axis: Any, label: str) -> None:
    axis.set_label_text(label)
    axis.get_major_locator().set_params(integer=True, min_n_ticks=1)


def _draw_heatmap(figure: Any, axes: Any, head_maxima: np.ndarray) -> None:
    _set_integer_axis(axes.yaxis, "KV head")
    axes.set_facecolor("0.85")  # the color of missing values
    if np.isnan(head_maxima).all():
        _show_message(axes, "all values are 0")
        return
    image = axes.imshow(
        np.ma.masked_invalid(head_maxima.T), aspect="auto", norm="log", interpolation="nearest"
    )
    _set_integer_axis(axes.xaxis, "layer")
    figure.colorbar(image, ax=axes)


def _draw_errors(axes: Any, report: ScalesReport | None, side: str) -> None:
    """Draw solid lines for these scales, and dotted lines for dynamic scales."""
    if report is None:
        _show_message(axes, _NOT_MEASURED)
        return
    axes.set_ylabel("relative RMS error, %")
    statistics = {index: getattr(layer, side) for index, layer in report.layers.items()}
    for prefix, linestyle in (("", "-"), (DYNAMIC, ":")):
        for series_index, name in enumerate(FORMATS):
            errors = {i: 100 * x.error.get(prefix + name, 0.0) for i, x in statistics.items()}
            _draw_line(axes, errors, series_index, linestyle=linestyle, label=prefix + name)
    if not axes.lines:
        _show_message(axes, "no error was measured")


def _show_message(axes: Any, text: str) -> None:
    axes.set(xticks=[], yticks=[])
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, color="0.25")
