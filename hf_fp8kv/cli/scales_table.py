"""Static scales and their calibration report: JSON values, tables, and remarks on odd scales."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import torch
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..formats import FORMATS, count_plans, summarize_plan
from ..scales import CalibrationReport, Granularity, KVScales
from ..scales.report import SideStatistics
from ..utils.text import format_list

_LARGEST = FORMATS["fp8_e4m3"].max
# A layer whose scale exceeds the median of all layers by this factor gets a remark.
_OUTLIER = 10


def describe_scales(scales: KVScales) -> dict[str, Any]:
    """Return what all layers have in common, as JSON values."""
    kinds = {layer.granularity for layer in scales.layers.values()}
    return {
        "format": scales.format,
        "origin": scales.origin,
        "model_type": scales.model_type,
        "num_layers": len(scales.layers),
        "granularity": "/".join(x for x in (*get_args(Granularity), "token") if x in kinds),
        "centered": scales.centered,
        "plan": None if scales.plan is None else count_plans(scales.plan),
        "weights_digest": scales.weights_digest,
    }


def describe_layers(scales: KVScales, report: CalibrationReport | None) -> dict[str, Any]:
    """Return everything known about each layer, as JSON values."""
    layers = {}
    for index, layer in scales.layers.items():
        measured = None if report is None else report.layers.get(index)
        layers[str(index)] = {
            "source": layer.source,
            "granularity": layer.granularity,
            "centered": layer.k_center is not None,
            "plan": None if layer.plan is None else list(map(str, layer.plan)),
            "k": _describe_side(layer.k, None if measured is None else measured.k),
            "v": _describe_side(layer.v, None if measured is None else measured.v),
        }
    return layers


def _describe_side(
    scale: torch.Tensor | None, measured: SideStatistics | None
) -> dict[str, Any] | None:
    """Return the scale of K or V of a layer; scales per channel are too many to list."""
    side: dict[str, Any] = {}
    if scale is not None:
        low, high = float(scale.min()), float(scale.max())
        side = {"shape": list(scale.shape), "min": low, "max": high}
        if scale.ndim == 0 or scale.shape[1] == 1:
            side["values"] = scale.flatten().tolist()
        # Without a measurement, the largest magnitude that the scale can represent.
        side |= {"amax": _LARGEST * high, "amax_from": "scale"}
    if measured is not None:
        side |= {"amax": max(measured.amax), "amax_from": "text"}
        side |= {"saturated": measured.saturated, "underflow": measured.underflow}
    return side or None


def list_remarks(scales: KVScales) -> list[str]:
    """Return a sentence for everything that looks odd about scales; empty if nothing does."""
    layers = scales.layers
    remarks = [] if scales.is_dynamic else list(_remark_on_numbers(scales))
    if missing := sorted(set(range(max(layers) + 1)) - set(layers)):
        remarks.append(
            f"no scales for {_layers(missing)}, of 0 to {max(layers)}: correct for layers without "
            "their own KV cache; exclude other layers with skip_layers"
        )
    return remarks


def _remark_on_numbers(scales: KVScales) -> Iterator[str]:
    layers = {index: layer.static for index, layer in scales.layers.items()}
    if all(bool((side == 1).all()) for pair in layers.values() for side in pair):
        yield (
            "every scale is exactly 1.0, as tools write without calibration: calibrate, or use "
            "dynamic scales (scales=None)"
        )
    elif all(torch.equal(*pair) for pair in layers.values()):
        yield (
            "K and V have the same scale in every layer: one number shared by both sides wastes "
            "range on the smaller one; calibrate for one scale each"
        )
    for side, name in enumerate("KV"):
        largest = {index: float(pair[side].max()) for index, pair in layers.items()}
        median = statistics.median(largest.values())
        if outliers := [index for index, x in largest.items() if x > _OUTLIER * median]:
            yield (
                f"{name} of {_layers(outliers)}: the scale is over {_OUTLIER} times the median "
                f"of all layers ({_short(median)}): a few huge values, or a faulty file; compare "
                "the heads, and measure the error there"
            )


def _layers(indices: Sequence[object]) -> str:
    return f"layer{'s' if len(indices) > 1 else ''} {format_list(indices)}"


def inspect_table(
    scales: KVScales, report: CalibrationReport | None, width: int
) -> list[RenderableType]:
    """Return the parts of `hf-fp8kv inspect`'s output, from top to bottom.

    Without a report only the scales are shown. The table of layers is cut into several that fit
    into `width` columns of the terminal.
    """
    parts: list[RenderableType] = [Text(line, overflow="fold") for line in _heading(scales, report)]
    layers = describe_layers(scales, report)
    tables = [[first := ("layer", list(layers))]]
    columns = [column for column in _columns(scales, layers, report) if any(column[1])]
    sources = [_tensors(layer["source"]) for layer in layers.values()]
    if _width([first, *columns, ("source", sources)]) <= width:
        columns.append(("source", sources))
    for column in columns:
        if len(tables[-1]) > 1 and _width([*tables[-1], column]) > width:
            tables.append([first])
        tables[-1].append(column)
    for cut in tables:
        parts.append(table := Table())
        for header, _ in cut:
            side: Any = "left" if header == "source" or "stored" in header else "right"
            table.add_column(header, justify=side, no_wrap=True)
        for cells in zip(*(cells for _, cells in cut), strict=True):
            table.add_row(*map(Text, cells))
    parts += [Text(f"! {remark}") for remark in list_remarks(scales)]
    if report is not None:
        parts += quality_parts(report)
    return parts


def _heading(scales: KVScales, report: CalibrationReport | None) -> Iterator[str]:
    about = describe_scales(scales)
    total = about["num_layers"]
    centered = sum(layer.k_center is not None for layer in scales.layers.values())
    some = f" in {centered} of {total} layers" if centered < total else ""
    yield (
        f"{scales.format}, {scales.model_type or 'model type unknown'}, "
        f"{total} layer{'s' if total > 1 else ''}, per {about['granularity']}, "
        f"{f'K centered{some}' if centered else 'K not centered'}"
    )
    yield f"from {scales.origin}"
    if scales.plan is not None:
        yield f"stored as {summarize_plan(scales.plan)}"
    if scales.weights_digest is not None:
        yield f"for weights with the digest {scales.weights_digest}"
    if report is not None:
        yield f"{report.model}: {describe_source(report)}; {report.date[:10]}"


def describe_source(report: CalibrationReport) -> str:
    """Return the texts of a report. Scales from elsewhere are measured only."""
    texts = f"{report.texts} text{'' if report.texts == 1 else 's'}"
    made = f"{report.tokens} tokens of {texts}, margin {report.margin:g}; checked"
    made, other = (made, "other ") if report.tokens else ("measured", "")
    return f"{made} as {report.dtype} on {report.held_out_tokens} {other}tokens"


Column = tuple[str, list[str]]


def _columns(
    scales: KVScales, layers: dict[str, Any], report: CalibrationReport | None
) -> Iterator[Column]:
    """Yield headings and cells, which are empty if nothing is known."""

    def cells(side: str, field: str) -> list[str]:
        sides = [layer[side] or {} for layer in layers.values()]
        if field == "scale":
            ends = [dict.fromkeys(x[end] for end in ("min", "max") if end in x) for x in sides]
            return [" .. ".join(map(_short, different)) for different in ends]
        if field == "amax":
            origin = "scale" if report is None else "text"
            return [_short(x["amax"]) if x.get("amax_from") == origin else "" for x in sides]
        return [f"{100 * x[field]:.3g} %" if field in x else "" for x in sides]

    pairs = [("k", "K"), ("v", "V")]
    if scales.plan is not None:
        for place, (_, name) in enumerate(pairs):
            yield f"{name} stored as", [layer["plan"][place] for layer in layers.values()]
    for side, name in pairs:
        yield f"{name} scale", cells(side, "scale")
    for side, name in pairs:
        heading = f"{_LARGEST:g} x\n{name} scale" if report is None else f"amax\n{name}"
        yield heading, cells(side, "amax")
    if scales.centered and scales.plan is None:
        yield "centered", ["yes" if layer["centered"] else "no" for layer in layers.values()]
    if report is not None and report.held_out_tokens:
        for field in ("saturated", "underflow"):
            for side, name in pairs:
                yield f"{field}\n{name}", cells(side, field)


def _width(columns: Sequence[Column]) -> int:
    """Return the width of a table: each column has two spaces and a line, and one line is left."""
    return 1 + sum(3 + max(map(len, [*header.split("\n"), *cells])) for header, cells in columns)


def _tensors(source: str) -> str:
    """Return the names of the tensors without the file, the common prefix only once."""
    names = source.rpartition(": ")[2].split(", ")
    stem = names[0].rpartition(".")[0]
    return ", ".join([names[0], *(name.removeprefix(f"{stem}.") for name in names[1:])])


def _short(number: float) -> str:
    """Return three significant digits, without an exponent up to a million."""
    return f"{number:.0f}" if 999.5 <= number < 1e6 else f"{number:.3g}"


def quality_parts(report: CalibrationReport) -> list[RenderableType]:
    """Return the quality on held-out text, here and at other positions, and the centers."""
    parts: list[RenderableType] = []
    for title, rows in (
        ("held-out text, against the unquantised cache", report.quality),
        (f"the same at other positions, up to {report.max_position}", report.far_quality),
    ):
        if rows:
            parts.append(table := Table(title=title))
            table.add_column("cache")
            for column in ("mean\nKL", "largest\nKL", "same\ntop-1", "perplexity", "tokens"):
                table.add_column(column, justify="right", no_wrap=True)
        for row in rows:
            kl, kl_max = (f"{x:.2e}" if x else "0" for x in (row.kl, row.kl_max))
            cells = kl, kl_max, f"{row.top1:.2%}", f"{row.perplexity:.4g}", str(row.tokens)
            table.add_row(Text(row.cache), *cells)
    return [*parts, Text(report.centers)] if report.centers else parts
