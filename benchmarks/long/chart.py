"""Chart of the long suite: mean KL by position, a panel for each model, a line for each cache."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_fp8kv.errors import ConfigError

from .predictions import ALL_KINDS

# Colors that the color-blind can tell apart (Okabe and Ito). Lines of this package are solid.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_MARKERS = "osD^vP*Xhp<>d"
_OURS = ("default", "adaptive", "e3m4", "e4m3", "e2m5", "int8", "e4m3-1.0")
# Of one model by cache: positions, and mean KL and its standard error in 1e-3.
_Lines = dict[str, dict[int, tuple[float, float]]]


def plot(
    results: Sequence[Mapping[str, Any]], path: str | Path, caches: Sequence[str] = ()
) -> None:
    """Write a picture of what `run_long_suite` returned; the end of its name says of which kind.

    Results of the same model share a panel, in which later ones replace earlier ones. Bars are
    standard errors over texts. `caches`: the lines to draw, or empty for all.

    Raises:
        ConfigError: no predictions were scored.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = _collect_lines(results, caches)
    if not lines:
        raise ConfigError("plot: expected scores of texts, got none; measure some --kinds of text")
    titles = {cache["cache"]: cache["title"] for result in results for cache in result["caches"]}
    looks = dict(zip(titles, zip(itertools.cycle(_COLORS), _MARKERS, strict=False), strict=False))
    # Without pyplot: no window system is looked for, and no global figure is kept.
    figure = Figure(figsize=(2.5 + 4 * len(lines), 5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(lines), squeeze=False, sharey=True)[0]
    drawn: dict[str, Any] = {}
    for axes, (model, by_cache) in zip(panels, lines.items(), strict=True):
        for cache, points in by_cache.items():
            color, marker = looks[cache]
            means, errors = zip(*points.values(), strict=True)
            drawn[titles[cache]] = axes.errorbar(
                [*points], means, yerr=errors, color=color, marker=marker, markersize=5, capsize=3,
                linestyle="-" if cache in _OURS else ":",
            )  # fmt: skip
        _format_axes(axes, model, sorted({p for points in by_cache.values() for p in points}))
    panels[0].set_ylabel("mean KL from the unquantised cache, 1e-3")
    figure.legend(drawn.values(), drawn.keys(), loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=100)


def _collect_lines(
    results: Sequence[Mapping[str, Any]], caches: Sequence[str]
) -> dict[str, _Lines]:
    """Return the lines of each model, of all kinds of text, positions in order."""
    lines: dict[str, _Lines] = {}
    rows = [
        (result["settings"]["model"], row) for result in results for row in result["predictions"]
    ]
    for model, row in sorted(rows, key=lambda item: int(item[1]["position"])):
        if row["kind"] == ALL_KINDS and (not caches or row["cache"] in caches):
            point = 1e3 * row["kl"], 1e3 * (row["kl_error"] or 0.0)
            lines.setdefault(model, {}).setdefault(row["cache"], {})[row["position"]] = point
    return lines


def _format_axes(axes: Any, model: str, positions: Sequence[int]) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    axes.set_title(model, loc="left", parse_math=False)
    axes.set_xlabel("position in the text, tokens")
    axes.set_xscale("log")
    axes.set_xlim(positions[0] / 1.2, positions[-1] * 1.2)
    axes.set_xticks(positions, [f"{position:,}" for position in positions])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _place: f"{value:g}"))
    axes.grid(visible=True, alpha=0.3)
