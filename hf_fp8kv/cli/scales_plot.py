"""Plot of static scales: magnitudes of K and V by layer and head, and the errors of 8 bits.

matplotlib is imported when a plot is requested. pyplot is not used: it would look for a window
system and keep figures alive.
"""

import io
import itertools
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..formats import FORMATS
from ..scales.kv_scales import KVScales
from ..scales.report import DYNAMIC, CalibrationReport
from ..utils.files import write_all

_LARGEST = FORMATS["fp8_e4m3"].max
# 1600 pixels wide, where matplotlib's fonts are 17 to 20 pixels high; _ROW inches a row of panels.
_WIDTH, _ROW, _DPI = 40 / 3, 4, 120
# Colors that the color-blind can tell apart (Okabe and Ito), and markers for print without color.
# Lines may coincide: the first is drawn wide, the others thin on top of it.
_SIDES = {"k": ("K", "#0072b2", "o", 2.5), "v": ("V", "#d55e00", "s", 1.5)}
_LOOKS = (("#56b4e9", "o"), ("#0072b2", "v"), ("#d55e00", "^"), ("#009e73", "D"),
          ("#cc79a7", "P"), ("#e69f00", "X"))  # fmt: skip
_FORMAT_LOOKS = {
    fmt: (*look, 1.5 if number else 5.0)
    for number, (fmt, look) in enumerate(zip(FORMATS, itertools.cycle(_LOOKS), strict=False))
}
# Legends are placed outside the panels, where they hide nothing.
_ABOVE = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "frameon": False, "borderpad": 0}
_BELOW = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "frameon": False}
_NOT_MEASURED = (
    "not measured: these scales come without\na calibration report\n\n"
    "hf-fp8kv inspect SCALES --model MODEL --texts FILE\nmeasures them on your text"
)
_TITLE_LENGTH = 80


def plot_scales(scales: KVScales, report: CalibrationReport | None, path: str | Path) -> None:
    """Write a PNG with the magnitudes of K and V and the errors of 8 bits, atomically.

    Args:
        scales: the scales.
        report: of their calibration, or of `measure`. None: the plot shows the largest magnitude
            that the scales represent (448 × scale), and says that errors were not measured.
        path: the file; it ends in ".png".

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    path = Path(path)
    if path.suffix.lower() != ".png":
        raise ConfigError(f"plot: expected a file that ends in .png, got {str(path)!r}; rename it")
    if not path.parent.is_dir():
        raise ConfigError(
            f"plot: expected a file in a folder that exists, got {str(path)!r}; create the folder"
        )
    picture = io.BytesIO()
    scales_figure(scales, report).savefig(picture, dpi=_DPI, format="png")
    try:
        write_all({path: picture.getvalue()})
    except OSError as error:
        raise ConfigError(
            f"plot: expected a writable file, got {str(path)!r}: {error}; choose another"
        ) from error


def scales_figure(scales: KVScales, report: CalibrationReport | None) -> Any:
    """Return the matplotlib figure that `plot_scales` writes.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "plot: matplotlib is not installed; install it: pip install 'hf-fp8kv[plot]'"
        ) from error
    # Without a report the last row holds only text.
    last = 1.0 if report is not None else 0.4
    figure = Figure(figsize=(_WIDTH, _ROW * (2 + last)), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.add_gridspec(3, 2, height_ratios=(1, 1, last))
    sides = {side: _amax_by_head(scales, report, side) for side in _SIDES}
    _draw_layers(figure.add_subplot(rows[0, :]), sides, report)
    for column, side in enumerate(_SIDES):
        _draw_heads(figure, figure.add_subplot(rows[1, column]), side, sides[side], report)
    _draw_errors([figure.add_subplot(rows[2, column]) for column in (0, 1)], report)
    # A name may contain "$", which is not math here.
    figure.suptitle(_title(scales, report), parse_math=False)
    return figure


def _title(scales: KVScales, report: CalibrationReport | None) -> str:
    if report is None:
        model = scales.model_type or "model type unknown"
        return (
            f"{model}, {_shorten(scales.origin)}\nno text measured: {_LARGEST:g} × scale is shown"
        )
    texts = f"{report.texts} text{'' if report.texts == 1 else 's'}"
    source = (
        f"from {report.tokens} tokens of {texts}, errors on {report.held_out_tokens} other tokens"
    )
    if not report.tokens:
        source = f"measured on {report.held_out_tokens} tokens"
    return f"{_shorten(report.model)}\nscales per {report.granularity}, {source}"


def _shorten(name: str) -> str:
    """Return a name on one line; of a long path, its end."""
    name = " ".join(name.split())
    return name if len(name) <= _TITLE_LENGTH else f"...{name[-_TITLE_LENGTH:]}"


def _amax_by_head(scales: KVScales, report: CalibrationReport | None, side: str) -> np.ndarray:
    """Return `[layers, heads]`, the largest magnitudes; NaN if missing, or 0 (log axes)."""
    amax: dict[int, np.ndarray] = {}
    if report is not None:
        for index, layer in report.layers.items():
            amax[index] = np.array(getattr(layer, side).amax)
    else:
        for index, layer_scales in scales.layers.items():
            scale = dict(zip("kv", layer_scales.static, strict=True))[side]
            largest = scale.reshape(1) if scale.ndim == 0 else scale.amax(dim=1)
            amax[index] = _LARGEST * largest.double().numpy()
    heads = max(len(row) for row in amax.values())
    table = np.full((max(amax) + 1, heads), np.nan)
    for index, row in amax.items():
        # A layer's single scale is for all heads; a single number in a report is for one head.
        spread = heads if report is None and len(row) == 1 else len(row)
        table[index, :spread] = row
    table[table <= 0] = np.nan
    return table


def _draw_layers(axes: Any, sides: dict[str, np.ndarray], report: CalibrationReport | None) -> None:
    """Draw a line for the largest head, and a dot for each head."""
    for side, (name, color, marker, width) in _SIDES.items():
        table = sides[side]
        layers, heads = table.shape
        if heads > 1:
            size = 8 if heads <= 8 else 5
            axes.plot(
                np.repeat(np.arange(layers), heads), table.ravel(), ".", color=color, alpha=0.4,
                markersize=size, markeredgewidth=0, label=f"{name}: each head",
            )  # fmt: skip
        label = f"{name}: largest head" if heads > 1 else name
        _draw_line(
            axes, _row_maxima(table), color=color, marker=marker, linewidth=width, label=label
        )
    what = "largest magnitude" if report is not None else f"{_LARGEST:g} × scale"
    axes.set_title(f"{what} of K and V, by layer", loc="left")
    axes.set_ylabel(f"{what}\n(in units of K and V)")
    _format_layer_axis(axes, len(next(iter(sides.values()))), 30)
    _set_log_axis(axes, np.concatenate([table.ravel() for table in sides.values()]))
    axes.legend(**_ABOVE, ncols=4)


def _draw_line(axes: Any, line: np.ndarray, **look: Any) -> None:
    """Draw a line through the layers that exist."""
    layers = np.flatnonzero(~np.isnan(line))
    axes.plot(layers, line[layers], markersize=4 if len(line) <= 40 else 2.5, **look)


def _row_maxima(table: np.ndarray) -> np.ndarray:
    """Return the largest number of each row; NaN for a row of NaN."""
    filled = np.where(np.isnan(table), -np.inf, table).max(axis=1)
    return np.where(np.isinf(filled), np.nan, filled)


def _draw_heads(
    figure: Any, axes: Any, side: str, table: np.ndarray, report: CalibrationReport | None
) -> None:
    """Draw a heat map: layers from left to right, heads from top to bottom."""
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    name = _SIDES[side][0]
    what = "largest magnitude" if report is not None else f"{_LARGEST:g} × scale"
    axes.set_title(f"{what} of {name}, by layer and head", loc="left")
    axes.set_ylabel("KV head")
    axes.set_facecolor("0.85")  # missing values
    _format_layer_axis(axes, len(table), 12)
    axes.yaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    if report is None and table.shape[1] == 1:
        axes.set_yticks([0], ["all"])
    if np.isnan(table).all():
        axes.set_yticks([])
        _write_text(axes, "0 everywhere")
        return
    low, high = _bounds(table)
    image = axes.imshow(
        np.ma.masked_invalid(table.T), aspect="auto", cmap="viridis", norm=LogNorm(low, high),
        interpolation="nearest",
    )  # fmt: skip
    bar = figure.colorbar(image, ax=axes, label=f"in units of {name}")
    _set_log_ticks(bar.ax.yaxis, low, high)


def _draw_errors(panels: list[Any], report: CalibrationReport | None) -> None:
    """Draw solid lines for these scales, dotted ones for dynamic scales; K and V share an axis."""
    for axes, (name, *_) in zip(panels, _SIDES.values(), strict=True):
        axes.set_title(f"error of {name} in 8 bits, by layer", loc="left")
    keys = {} if report is None else _errors(report)
    if report is None or not keys:
        for axes in panels:
            axes.set_xticks([])
            axes.set_yticks([])
            _write_text(axes, _NOT_MEASURED if report is None else "no error was measured")
        return
    drawn = []
    for axes, side in zip(panels, _SIDES, strict=True):
        for key, (fmt, dynamic) in keys.items():
            line = np.full(max(report.layers) + 1, np.nan)
            for index, layer in report.layers.items():
                line[index] = 100 * getattr(layer, side).error.get(key, np.nan)
            line[line <= 0] = np.nan
            color, marker, width = _FORMAT_LOOKS[fmt]
            _draw_line(
                axes, line, color=color, marker=marker, linewidth=width, label=key,
                linestyle=":" if dynamic else "-", markerfacecolor="none" if dynamic else color,
            )  # fmt: skip
            drawn.append(line)
        _format_layer_axis(axes, max(report.layers) + 1, 12)
    for axes in panels:
        axes.set_ylabel("relative RMS error, %")
        _set_log_axis(axes, np.concatenate(drawn))
    _error_legends(panels, list(keys.values()))


def _errors(report: CalibrationReport) -> dict[str, tuple[str, bool]]:
    """Return the errors that occur in a report: key -> format, and whether scales were dynamic."""
    keys = {
        key for layer in report.layers.values() for side in (layer.k, layer.v) for key in side.error
    }
    both = {f"{start}{fmt}": (fmt, bool(start)) for start in ("", DYNAMIC) for fmt in _FORMAT_LOOKS}
    return {key: known for key, known in both.items() if key in keys}


def _error_legends(panels: list[Any], drawn: list[tuple[str, bool]]) -> None:
    """Draw legends below the panels: the colors on the left, solid and dotted on the right."""
    from matplotlib.lines import Line2D

    formats = [
        Line2D([], [], color=color, marker=marker, linewidth=width, label=fmt)
        for fmt, (color, marker, width) in _FORMAT_LOOKS.items()
        if any(fmt == of for of, _ in drawn)
    ]  # fmt: skip
    looks: list[Any] = [("-", "these scales", False), (":", "dynamic scales", True)]
    styles = [
        Line2D([], [], color="black", linestyle=style, label=label)
        for style, label, is_dynamic in looks if any(dynamic == is_dynamic for _, dynamic in drawn)
    ]  # fmt: skip
    panels[0].legend(handles=formats, **_BELOW, ncols=4)
    panels[1].legend(handles=styles, **_BELOW, ncols=2)


def _write_text(axes: Any, text: str) -> None:
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, color="0.25")


def _format_layer_axis(axes: Any, layers: int, ticks: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("layer")
    axes.set_xlim(-0.5, layers - 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(ticks, integer=True, min_n_ticks=1))


def _bounds(values: np.ndarray) -> tuple[float, float]:
    """Return the smallest and largest number, moved apart if they are almost equal."""
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    return (low, high) if high > 1.5 * low else (low / 1.5, high * 1.5)


def _set_log_axis(axes: Any, values: np.ndarray) -> None:
    """Make an axis logarithmic, with labels even if the numbers are close together."""
    if np.isnan(values).all():
        axes.set_yticks([])
        _write_text(axes, "0 everywhere")
        return
    axes.set_yscale("log")
    axes.grid(visible=True, alpha=0.3)
    low, high = _bounds(values)
    axes.set_ylim(low / 1.25, high * 1.25)
    _set_log_ticks(axes.yaxis, low / 1.25, high * 1.25)


def _set_log_ticks(axis: Any, low: float, high: float) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    span = high / low
    subs = (1, 1.5, 2, 3, 4, 5, 6, 7, 8) if span < 8 else (1, 2, 5) if span < 1000 else (1,)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _place: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
