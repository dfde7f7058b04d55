"""Tables of static scales and their calibration report, and remarks on odd scales."""

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch

from ..formats import FORMATS, summarize_plan
from ..scales.kv_scales import KVScales
from ..scales.layer_scales import Granularity
from ..scales.report import CalibrationReport, LayerStatistics, QualityRow
from ..utils.text import format_list

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table

_LARGEST = FORMATS["fp8_e4m3"].max
# A layer whose scale exceeds the median of all layers by this factor gets a remark.
_OUTLIER = 10
# Wide enough for every table; used to measure the width that a table needs.
_ANY_WIDTH = 10_000


def inspect_table(scales: KVScales, report: CalibrationReport | None) -> "list[RenderableType]":
    """Return the parts of `hf-fp8kv inspect`'s output, from top to bottom.

    Args:
        scales: the scales.
        report: of their calibration, or of `measure`; None: show only the scales.
    """
    from rich.text import Text

    parts: list[RenderableType] = [Text(line, overflow="fold") for line in _heading(scales, report)]
    parts.append(_LayerTables(scales, report))
    parts += [Text(f"! {remark}") for remark in list_remarks(scales)]
    if report is not None and report.quality:
        parts.append(_quality_table("held-out text, against the unquantised cache", report.quality))
    if report is not None and report.far_quality:
        title = f"the same at other positions, up to {report.max_position}"
        parts.append(_quality_table(title, report.far_quality))
    if report is not None and report.centers:
        parts.append(Text(report.centers))
    return parts


def list_remarks(scales: KVScales) -> list[str]:
    """Return a sentence for everything that looks odd about scales; empty if nothing does."""
    layers = scales.layers
    remarks = [] if scales.is_dynamic else _list_remarks_on_numbers(scales)
    missing = sorted(set(range(max(layers) + 1)) - set(layers))
    if missing:
        remarks.append(
            f"no scales for {_layers(missing)}, of 0 to {max(layers)}: correct for layers without "
            "their own KV cache; exclude other layers with skip_layers"
        )
    return remarks


def _list_remarks_on_numbers(scales: KVScales) -> list[str]:
    layers = {index: dict(zip("kv", s.static, strict=True)) for index, s in scales.layers.items()}
    remarks = []
    if all(bool((side == 1).all()) for layer in layers.values() for side in layer.values()):
        remarks.append(
            "every scale is exactly 1.0, as tools write without calibration: calibrate, or use "
            "dynamic scales (scales=None)"
        )
    elif all(torch.equal(layer["k"], layer["v"]) for layer in layers.values()):
        remarks.append(
            "K and V have the same scale in every layer: one number shared by both sides wastes "
            "range on the smaller one; calibrate for one scale each"
        )
    for side, name in (("k", "K"), ("v", "V")):
        largest = {index: float(layer[side].max()) for index, layer in layers.items()}
        median = statistics.median(largest.values())
        outliers = [index for index, scale in largest.items() if scale > _OUTLIER * median]
        if outliers:
            remarks.append(
                f"{name} of {_layers(outliers)}: the scale is over {_OUTLIER} times the median "
                f"of all layers ({_short(median)}): a few huge values, or a faulty file; compare "
                "the heads, and measure the error there"
            )
    return remarks


def _layers(indices: list[int]) -> str:
    return f"layer{'s' if len(indices) > 1 else ''} {format_list(indices)}"


def _heading(scales: KVScales, report: CalibrationReport | None) -> Iterator[str]:
    layers = scales.layers
    order = (*get_args(Granularity), "token")
    kinds = sorted({layer.granularity for layer in layers.values()}, key=order.index)
    centered = sum(layer.k_center is not None for layer in layers.values())
    count = f"{len(layers)} layer{'s' if len(layers) > 1 else ''}"
    centers = "K not centered"
    if centered:
        centers = "K centered" + (f" in {centered} of {count}" if centered < len(layers) else "")
    model = scales.model_type or "model type unknown"
    yield f"{scales.format}, {model}, {count}, per {'/'.join(kinds)}, {centers}"
    yield f"from {scales.origin}"
    if scales.plan is not None:
        yield f"stored as {summarize_plan(scales.plan)}"
    if scales.weights_digest is not None:
        yield f"for weights with the fingerprint {scales.weights_digest}"
    if report is not None:
        texts = f"{report.texts} text{'' if report.texts == 1 else 's'}"
        made = f"{report.tokens} tokens of {texts}, margin {report.margin:g}; checked"
        # Scales from elsewhere are measured only.
        made, other = (made, "other ") if report.tokens else ("measured", "")
        yield (
            f"{report.model}: {made} as {report.dtype} on {report.held_out_tokens} {other}tokens; "
            f"{report.date[:10]}"
        )


@dataclass(frozen=True)
class _Column:
    """A column with a cell for each layer; numbers are aligned right, words left."""

    header: str
    cells: list[str]
    justify: Literal["left", "right"] = "right"


class _LayerTables:
    """A row for each layer: one table if it fits, else several below each other."""

    def __init__(self, scales: KVScales, report: CalibrationReport | None) -> None:
        self._first = _Column("layer", [str(index) for index in scales.layers])
        groups = [
            [column for column in group if any(column.cells)] for group in _groups(scales, report)
        ]
        self._groups = [group for group in groups if group]
        sources = [_tensors(layer.source) for layer in scales.layers.values()]
        self._source = _Column("source", sources, "left")

    def __rich_console__(
        self, console: "Console", options: "ConsoleOptions"
    ) -> "Iterator[RenderableType]":
        def fits(columns: list[_Column]) -> bool:
            table = self._table(columns)
            wide = options.update(width=_ANY_WIDTH)
            return console.measure(table, options=wide).maximum <= options.max_width

        everything = [column for group in self._groups for column in group]
        if fits([*everything, self._source]):
            yield self._table([*everything, self._source])
            return
        row: list[_Column] = []
        for group in self._groups:
            if fits([*row, *group]):
                row += group
                continue
            # Keep a group together if possible.
            if row and fits(group):
                yield self._table(row)
                row = group
                continue
            for column in group:
                if row and not fits([*row, column]):
                    yield self._table(row)
                    row = []
                row = [*row, column]
        yield self._table(row)

    def _table(self, columns: list[_Column]) -> "Table":
        from rich.table import Table
        from rich.text import Text

        all_columns = [self._first, *columns]
        table = Table()
        for column in all_columns:
            table.add_column(Text(column.header), justify=column.justify, no_wrap=True)
        for cells in zip(*(column.cells for column in all_columns), strict=True):
            table.add_row(*map(Text, cells))
        return table


def _groups(scales: KVScales, report: CalibrationReport | None) -> Iterator[list[_Column]]:
    """Yield groups of columns that belong together; a cell is empty where nothing is known."""
    layers = list(scales.layers.values())

    def measured(cell: Callable[[LayerStatistics], str]) -> list[str]:
        known = {} if report is None else report.layers
        return [cell(known[index]) if index in known else "" for index in scales.layers]

    def reach(scale: torch.Tensor | None) -> str:
        return "" if scale is None else _short(_LARGEST * float(scale.max()))

    if scales.plan is not None:
        plans = list(scales.plan.values())
        yield [
            _Column("K stored as", [str(plan.k) for plan in plans], "left"),
            _Column("V stored as", [str(plan.v) for plan in plans], "left"),
        ]

    if report is None:
        title = f"{_LARGEST:g} x"
        amax = [
            _Column(f"{title}\nK scale", [reach(layer.k) for layer in layers]),
            _Column(f"{title}\nV scale", [reach(layer.v) for layer in layers]),
        ]
    else:
        amax = [
            _Column("amax\nK", measured(lambda layer: _short(max(layer.k.amax)))),
            _Column("amax\nV", measured(lambda layer: _short(max(layer.v.amax)))),
        ]
    yield [
        _Column("K scale", [_range(layer.k) for layer in layers]),
        _Column("V scale", [_range(layer.v) for layer in layers]),
        *amax,
    ]
    if scales.centered and scales.plan is None:
        yield [_Column("centered", ["no" if x.k_center is None else "yes" for x in layers])]
    if report is not None and report.held_out_tokens:
        yield [
            _Column("saturated\nK", measured(lambda layer: _share(layer.k.saturated))),
            _Column("saturated\nV", measured(lambda layer: _share(layer.v.saturated))),
            _Column("underflow\nK", measured(lambda layer: _share(layer.k.underflow))),
            _Column("underflow\nV", measured(lambda layer: _share(layer.v.underflow))),
        ]


def _tensors(source: str) -> str:
    """Return the names of the tensors without the file, the common prefix only once."""
    names = source.rpartition(": ")[2].split(", ")
    stem = names[0].rpartition(".")[0]
    return ", ".join([names[0], *(name.removeprefix(f"{stem}.") for name in names[1:])])


def _range(scale: torch.Tensor | None) -> str:
    if scale is None:  # dynamic
        return ""
    low, high = float(scale.min()), float(scale.max())
    return f"{low:.4g}" if low == high else f"{_short(low)} .. {_short(high)}"


def _short(number: float) -> str:
    """Return three significant digits, without an exponent up to a million."""
    if number == 0 or 999.5 <= number < 1e6:
        return f"{number:.0f}"
    return f"{number:#.3g}".removesuffix(".")


def _share(share: float) -> str:
    """Return a share in percent; exactly 0 is "0"."""
    percent = 100 * share
    if 0 < percent < 0.001:
        return "<0.001 %"
    return "0" if not percent else f"{percent:.2g} %" if percent < 1 else f"{percent:.3g} %"


def _quality_table(title: str, rows: Iterable[QualityRow]) -> "RenderableType":
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title)
    table.add_column("cache")
    for column in ("mean\nKL", "largest\nKL", "same\ntop-1", "perplexity", "tokens"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            Text(row.cache), _divergence(row.kl), _divergence(row.kl_max), f"{row.top1:.2%}",
            f"{row.perplexity:.4g}", str(row.tokens),
        )  # fmt: skip
    return table


def _divergence(kl: float) -> str:
    return f"{kl:.2e}" if kl else "0"
