"""Format static scales and their report as JSON values and tables, with remarks."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rich.console import RenderableType
from rich.text import Text

from hf_fp8kv.formats import FORMATS, count_plans, summarize_plan
from hf_fp8kv.scales import KVScales, ScalesReport
from hf_fp8kv.scales.measured_report import SideStatistics
from hf_fp8kv.utils.terminal import build_table, format_number
from hf_fp8kv.utils.text import format_list

_E4M3_MAX = FORMATS["fp8_e4m3"].max
# A scale that exceeds the median of all layers by this factor gets a remark.
_OUTLIER_FACTOR = 10


def describe_scales(scales: KVScales) -> dict[str, Any]:
    """Return the properties that the layers share, as JSON values."""
    return {
        "format": scales.format,
        "origin": scales.origin,
        "model_type": scales.model_type,
        "num_layers": len(scales.layers),
        "granularity": scales.granularity,
        "centered": scales.centered,
        "plan": None if scales.plan is None else count_plans(scales.plan),
        "weights_digest": scales.weights_digest,
    }


def describe_layers(scales: KVScales, report: ScalesReport | None) -> dict[str, Any]:
    """Return the scales and statistics of each layer, as JSON values."""
    layers = {}
    for index, layer in scales.layers.items():
        layer_statistics = None if report is None else report.layers.get(index)
        layers[str(index)] = {
            "source": layer.source,
            "granularity": layer.granularity,
            "centered": layer.k_center is not None,
            "plan": None if layer.plan is None else list(map(str, layer.plan)),
            "k": _describe_side(layer.k, None if layer_statistics is None else layer_statistics.k),
            "v": _describe_side(layer.v, None if layer_statistics is None else layer_statistics.v),
        }
    return layers


def _describe_side(
    scale: torch.Tensor | None, side_statistics: SideStatistics | None
) -> dict[str, Any] | None:
    """Return the scale and statistics of K or V of a layer. Scales per channel are not listed."""
    entry: dict[str, Any] = {}
    if scale is not None:
        min_scale = float(scale.min())
        max_scale = float(scale.max())
        entry = {"shape": list(scale.shape), "min": min_scale, "max": max_scale}
        if scale.ndim == 0 or scale.shape[1] == 1:
            entry["values"] = scale.flatten().tolist()
        # Without a measurement, show the largest magnitude that the scale can represent.
        entry |= {"amax": _E4M3_MAX * max_scale, "amax_from": "scale"}
    if side_statistics is not None:
        entry |= {"amax": max(side_statistics.amax), "amax_from": "text"}
        entry |= {"saturated": side_statistics.saturated, "underflow": side_statistics.underflow}
    return entry or None


def list_remarks(scales: KVScales) -> Iterator[str]:
    """Yield a sentence about each unusual property of the scales."""
    last_layer = max(scales.layers)
    if missing_layers := sorted(set(range(last_layer + 1)) - set(scales.layers)):
        yield (
            f"no scales for {_name_layers(missing_layers)} of 0 to {last_layer}. This is right "
            "if they do not have a KV cache. Otherwise, exclude them with skip_layers"
        )
    if scales.is_dynamic:
        return
    sides_by_layer = {index: layer.static for index, layer in scales.layers.items()}
    if all(bool((scale == 1).all()) for sides in sides_by_layer.values() for scale in sides):
        yield (
            "every scale is exactly 1.0, which tools write without calibration. Calibrate, or "
            "use dynamic scales (scales=None)"
        )
    elif all(torch.equal(k_scale, v_scale) for k_scale, v_scale in sides_by_layer.values()):
        yield (
            "K and V have the same scale in every layer, which wastes range on the smaller side. "
            "Calibrate separate scales for K and V"
        )
    for n, side in enumerate("KV"):
        largest_scales = {index: float(x[n].max()) for index, x in sides_by_layer.items()}
        median = statistics.median(largest_scales.values())
        if outliers := [
            i for i, scale in largest_scales.items() if scale > _OUTLIER_FACTOR * median
        ]:
            yield (
                f"{side} of {_name_layers(outliers)}: the scale is over {_OUTLIER_FACTOR} times "
                f"the median of all layers ({format_number(median)}), because of a few huge values "
                "or a faulty file. Compare the heads, and measure the error there"
            )


def _name_layers(indices: Sequence[object]) -> str:
    return f"layer{'s' if len(indices) > 1 else ''} {format_list(indices)}"


def render_scales(
    scales: KVScales, report: ScalesReport | None, width: int
) -> list[RenderableType]:
    """Return the headings, tables and remarks of `hf-fp8kv inspect`, from top to bottom.

    Without a report, only the scales are shown. The sources of the scales are omitted if the table
    of layers is wider than `width` characters. Columns that do not fit are in further tables.
    """
    output: list[RenderableType] = [Text(line) for line in _list_headings(scales, report)]
    rows = list(_list_rows(scales, report))
    columns = {name: cells for name in rows[0] if any(cells := [row[name] for row in rows])}
    # A column adds two spaces and a vertical line. The table ends with one more line.
    widths = {name: 3 + max(map(len, [name, *cells])) for name, cells in columns.items()}
    if 1 + sum(widths.values()) > width:
        columns.pop("source", None)
    fixed_columns = [*columns][:2]  # the layer, and how it is stored
    other_columns = [*columns][2:]
    tables = [[*fixed_columns]]
    for name in other_columns:
        if (
            len(tables[-1]) > 2
            and 1 + sum(widths[column] for column in [*tables[-1], name]) > width
        ):
            tables.append([*fixed_columns])
        tables[-1].append(name)
    left_columns = ("stored", "source")
    for names in tables:
        alignments: dict[str, Any] = {n: "left" if n in left_columns else "right" for n in names}
        table_rows = zip(*(columns[name] for name in names), strict=True)
        padding = (0, 1, 0, int(len(tables) == 1))
        output.append(build_table(alignments, table_rows, padding=padding))
    output += [Text(f"! {remark}") for remark in list_remarks(scales)]
    if report is not None:
        output += format_quality(report)
    return output


def _list_headings(scales: KVScales, report: ScalesReport | None) -> Iterator[str]:
    num_layers = len(scales.layers)
    num_centered = sum(layer.k_center is not None for layer in scales.layers.values())
    layer_share = f" in {num_centered} of {num_layers} layers" if num_centered < num_layers else ""
    yield (
        f"{scales.format}, {scales.model_type or 'model type unknown'}, "
        f"{num_layers} layer{'s' if num_layers > 1 else ''}, per {scales.granularity}, "
        f"{f'K centered{layer_share}' if num_centered else 'K not centered'}"
    )
    yield f"from {scales.origin}"
    if scales.plan is not None:
        yield f"stored as {summarize_plan(scales.plan)}"
    if scales.protection is not None:
        yield f"{scales.protection}"
    if scales.weights_digest is not None:
        yield f"for weights with the digest {scales.weights_digest}"
    if report is not None:
        yield f"{report.model}: {describe_measurement(report)}; {report.date[:10]}"


def describe_measurement(report: ScalesReport) -> str:
    """Return the format and the number of tokens with which the scales were measured."""
    return f"measured as {report.dtype} on {report.tokens} tokens"


def _list_rows(scales: KVScales, report: ScalesReport | None) -> Iterator[dict[str, str]]:
    """Yield the cells of K and of V of each layer by heading. Cells without a value are empty."""
    heading, amax_from = (f"{_E4M3_MAX:g} x scale", "scale") if report is None else ("amax", "text")
    for index, layer in describe_layers(scales, report).items():
        for n, side in enumerate("kv"):
            values = layer[side] or {}
            center = "centered" if layer["centered"] and side == "k" else ""
            plan = center if layer["plan"] is None else layer["plan"][n]
            limits = dict.fromkeys(values[name] for name in ("min", "max") if name in values)
            row = {"layer": index, "stored": f"{side.upper()} {plan}".rstrip()}
            row["scale"] = " .. ".join(map(format_number, limits))
            has_amax = values.get("amax_from") == amax_from
            row[heading] = format_number(values["amax"]) if has_amax else ""
            for name in ("saturated", "underflow") if report is not None else ():
                row[name] = f"{100 * values[name]:.3g} %" if name in values else ""
            # Show the name of the tensor, without the name of its file.
            row["source"] = layer["source"].rpartition(": ")[2].split(", ")[-n]
            yield row


def format_quality(report: ScalesReport) -> list[RenderableType]:
    """Return a table of the quality, or nothing if predictions were not compared."""
    if not report.quality:
        return []
    measures = ("mean\nKL", "largest\nKL", "same\ntop-1", "perplexity", "tokens")
    cells = (
        (
            row.cache,
            *(f"{x:.2e}" if x else "0" for x in (row.kl, row.kl_max)),
            f"{row.top1:.2%}",
            f"{row.perplexity:.4g}",
            str(row.tokens),
        )
        for row in report.quality
    )
    alignments: dict[str, Any] = {"cache": "left", **dict.fromkeys(measures, "right")}
    return [build_table(alignments, cells, title="compared with the unquantized cache")]
