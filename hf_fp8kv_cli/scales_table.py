"""Format static scales as JSON values and as a table, with remarks."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rich.console import RenderableType
from rich.text import Text

from hf_fp8kv.formats import FORMATS, count_plans, summarize_plan
from hf_fp8kv.scales import KVScales
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


def describe_layers(scales: KVScales) -> dict[str, Any]:
    """Return the scales of each layer, as JSON values."""
    return {
        str(index): {
            "source": layer.source,
            "granularity": layer.granularity,
            "centered": layer.k_center is not None,
            "plan": None if layer.plan is None else list(map(str, layer.plan)),
            "k": _describe_scale(layer.k),
            "v": _describe_scale(layer.v),
        }
        for index, layer in scales.layers.items()
    }


def _describe_scale(scale: torch.Tensor | None) -> dict[str, Any] | None:
    """Return the scale of K or V of a layer. Scales per channel are not listed.

    `amax` is the largest magnitude that the scale can represent.
    """
    if scale is None:
        return None
    max_scale = float(scale.max())
    entry = {"shape": list(scale.shape), "min": float(scale.min()), "max": max_scale}
    if scale.ndim == 0 or scale.shape[1] == 1:
        entry["values"] = scale.flatten().tolist()
    return {**entry, "amax": _E4M3_MAX * max_scale}


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
    for position, side in enumerate("KV"):
        largest_scales = {
            index: float(sides[position].max()) for index, sides in sides_by_layer.items()
        }
        median = statistics.median(largest_scales.values())
        limit = _OUTLIER_FACTOR * median
        if outliers := [index for index, scale in largest_scales.items() if scale > limit]:
            yield (
                f"{side} of {_name_layers(outliers)}: the scale is over {_OUTLIER_FACTOR} times "
                f"the median of all layers ({format_number(median)}), because of a few huge values "
                "or a faulty file. Compare the heads, and measure the KL with hf-fp8kv card"
            )


def _name_layers(indices: Sequence[object]) -> str:
    return f"layer{'s' if len(indices) > 1 else ''} {format_list(indices)}"


def render_scales(scales: KVScales, width: int) -> list[RenderableType]:
    """Return the headings, the table and the remarks of `hf-fp8kv inspect`, from top to bottom.

    The sources of the scales are omitted if the table is wider than `width` characters.
    """
    rows = list(_list_rows(scales))
    columns = {name: cells for name in rows[0] if any(cells := [row[name] for row in rows])}
    # A column adds two spaces and a vertical line. The table ends with one more line.
    widths = [3 + max(map(len, [name, *cells])) for name, cells in columns.items()]
    if 1 + sum(widths) > width:
        columns.pop("source", None)
    alignments: dict[str, Any] = {
        name: "left" if name in ("stored", "source") else "right" for name in columns
    }
    return [
        *map(Text, _list_headings(scales)),
        build_table(alignments, zip(*columns.values(), strict=True)),
        *(Text(f"! {remark}") for remark in list_remarks(scales)),
    ]


def _list_headings(scales: KVScales) -> Iterator[str]:
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


def _list_rows(scales: KVScales) -> Iterator[dict[str, str]]:
    """Yield the cells of K and of V of each layer by heading. Cells without a value are empty."""
    for index, layer in describe_layers(scales).items():
        # Show the names of the tensors, without the name of their file. K and V may share one.
        tensor_names = layer["source"].rpartition(": ")[2].split(", ")
        plans = layer["plan"] or ("centered" if layer["centered"] else "", "")
        sides = zip("kv", plans, (tensor_names[0], tensor_names[-1]), strict=True)
        for side, plan, tensor_name in sides:
            values = layer[side] or {}
            limits = dict.fromkeys(values[name] for name in ("min", "max") if name in values)
            yield {
                "layer": index,
                "stored": f"{side.upper()} {plan}".rstrip(),
                "scale": " .. ".join(map(format_number, limits)),
                f"{_E4M3_MAX:g} x scale": format_number(values["amax"]) if values else "",
                "source": tensor_name,
            }
