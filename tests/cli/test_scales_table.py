"""Tests of scales and their report as JSON, as tables and as a plot."""

import io
import itertools
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from hf_fp8kv.formats import FORMATS
from hf_fp8kv.scales import KVScales, LayerScales
from hf_fp8kv.scales.report import (
    DYNAMIC,
    LayerStatistics,
    QualityRow,
    ScalesReport,
    SideStatistics,
)  # fmt: skip
from hf_fp8kv_cli.scales_plot import make_figure, plot_scales
from hf_fp8kv_cli.scales_table import list_remarks, make_tables

ERRORS = [prefix + name for prefix in ("", DYNAMIC) for name in FORMATS]


def make_side(amax: list[float], error: float) -> SideStatistics:
    """Return statistics of K or V in which the error of each format is different."""
    errors = {name: error * (1 + index / 10) for index, name in enumerate(ERRORS)}
    return SideStatistics(tuple(amax), 0.00003, 0.125, errors)


def make_report(num_layers: int = 4, num_heads: int = 3, **changes: Any) -> ScalesReport:
    """Return a report in which all layers, heads and sides have different statistics."""
    report = ScalesReport(
        model="a model", dtype="fp8_e4m3", granularity="head", tokens=400, seconds=12.5,
        date="2026-11-21T10:00:00+00:00", versions={"torch": "2.13"},
        hardware={"cpu": "a cpu", "cores": 2, "gpus": []}, scales_digest="0f" * 32,
        layers={
            i: LayerStatistics(
                make_side([10.0 + i + h / 8 for h in range(num_heads)], 0.02 + i / 1000),
                make_side([1.0 + i + h / 8 for h in range(num_heads)], 0.01 + i / 1000),
            )
            for i in range(num_layers)
        },
        quality=(
            QualityRow("unquantized", 0.0, 0.0, 1.0, 12.5, 400),
            QualityRow("static fp8_e4m3", 0.003, 0.2, 0.9625, 12.53125, 400),
        ),
    )  # fmt: skip
    return replace(report, **changes)


def make_scales(report: ScalesReport, centered: tuple[int, ...] = ()) -> KVScales:
    """Return the scales per head of the magnitudes in a report."""
    layers = {}
    for index, layer in report.layers.items():
        k, v = (torch.tensor(side.amax).view(-1, 1) / 448 for side in (layer.k, layer.v))
        center = torch.zeros(len(k), 2) if index in centered else None
        layers[index] = LayerScales(k, v, center, f"a: b/kv.safetensors: layers.{index}")
    return KVScales(layers, model_type="llama", origin="a: b/kv.safetensors")


# -- as JSON ---------------------------------------------------------------------------------------


def test_a_report_is_written_as_json():
    report = make_report(model="\u2603 \x00", hardware={"": None, "gpus": [{"gb": 80.0}]})
    fields = report.to_dict()
    assert fields["hardware"] == {"": None, "gpus": [{"gb": 80.0}]}
    assert list(fields["layers"]) == ["0", "1", "2", "3"]
    assert fields["layers"]["1"]["k"]["amax"] == list(report.layers[1].k.amax)
    assert fields["quality"][1]["kl"] == 0.003
    fields["layers"]["3"]["k"]["error"].clear()  # the JSON must not share objects with the report
    assert report.layers[3].k.error


# -- as tables -------------------------------------------------------------------------------------


def render(scales: KVScales, report: ScalesReport | None, width: int = 200) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    for part in make_tables(scales, report, width):
        console.print(part)
    return console.export_text()


def parse_tables(text: str) -> list[dict[str, list[str]]]:
    """Return the cells of each table, by heading."""
    tables = []
    for table in text.split("┏")[1:]:
        headings, rows = (
            [re.split("[┃│]", line)[1:-1] for line in table.splitlines() if line.startswith(bar)]
            for bar in "┃│"
        )
        names = (" ".join(" ".join(cells).split()) for cells in zip(*headings, strict=True))
        cells = ([cell.strip() for cell in column] for column in zip(*rows, strict=True))
        tables.append(dict(zip(names, cells, strict=True)))
    return tables


def read_columns(text: str) -> dict[str, list[str]]:
    """Return the cells, by heading, of all tables with rows for K and V of each layer."""
    tables = [table for table in parse_tables(text) if "layer" in table]
    return {name: cells for table in tables for name, cells in table.items()}


def test_the_table_of_a_measurement_has_all_measurements():
    report = make_report(2)
    text = render(make_scales(report, centered=(1,)), report)
    assert read_columns(text) == {
        "layer": ["0", "0", "1", "1"],
        "stored": ["K", "V", "K centered", "V"],
        "scale": [
            "0.0223 .. 0.0229", "0.00223 .. 0.00279", "0.0246 .. 0.0251", "0.00446 .. 0.00502",
        ],
        "amax": ["10.2", "1.25", "11.2", "2.25"],
        "saturated": ["0.003 %"] * 4, "underflow": ["12.5 %"] * 4,
        "source": ["layers.0"] * 2 + ["layers.1"] * 2,
    }  # fmt: skip
    assert text.splitlines()[:3] == [
        "hf_fp8kv, llama, 2 layers, per head, K centered in 1 of 2 layers",
        "from a: b/kv.safetensors",
        "a model: measured as fp8_e4m3 on 400 tokens; 2026-11-21",
    ]
    assert parse_tables(text)[-1] == {
        "cache": ["unquantized", "static fp8_e4m3"], "mean KL": ["0", "3.00e-03"],
        "largest KL": ["0", "2.00e-01"], "same top-1": ["100.00%", "96.25%"],
        "perplexity": ["12.5", "12.53"], "tokens": ["400", "400"],
    }  # fmt: skip


def test_a_table_without_a_report_shows_the_scales():
    scales = KVScales.uniform(2, k=0.015625, v=0.5)
    assert read_columns(render(scales, None)) == {
        "layer": ["0", "0", "1", "1"], "stored": ["K", "V"] * 2, "scale": ["0.0156", "0.5"] * 2,
        "448 x scale": ["7", "224"] * 2, "source": ["uniform"] * 4,
    }  # fmt: skip
    heading = "hf_fp8kv, model type unknown, 2 layers, per tensor, K not centered"
    assert render(scales, None).splitlines()[0] == heading
    console = Console(width=200, file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    for part in make_tables(scales, make_report(2), 200):
        console.print(part)  # the table must be encodable in ASCII
    layer = LayerScales(torch.tensor(0.5), torch.tensor(0.25), None, "x: [bold]a[/bold]")
    scales = KVScales({0: layer}, origin="[red]x[/red]")  # names are not markup
    text = render(scales, make_report(1, model="[/b]"))
    assert "from [red]x[/red]\n[/b]: measured as" in text
    assert read_columns(text)["source"] == ["[bold]a[/bold]"] * 2
    layer = replace(layer, source="a/b.safetensors: layers.0.k_scale, layers.0.v_scale")
    sources = read_columns(render(KVScales({0: layer}), None))["source"]
    assert sources == ["layers.0.k_scale", "layers.0.v_scale"]


def test_a_table_omits_missing_measurements():
    report = make_report(3)
    scales = make_scales(report)
    assert len(parse_tables(render(scales, replace(report, quality=())))) == 1
    one_layer = replace(report, layers={1: report.layers[1]})
    assert read_columns(render(scales, one_layer))["amax"] == ["", "", "11.2", "2.25", "", ""]


@pytest.mark.parametrize("width", [40, 80, 140])
@pytest.mark.parametrize("report", [make_report(12), None], ids=["measured", "scales"])
def test_no_cell_is_truncated_at_any_width(width, report):
    scales = make_scales(make_report(12), centered=(3,))
    text = render(scales, report, width)
    assert max(map(len, text.splitlines())) <= width
    all_columns, columns = read_columns(render(scales, report)), read_columns(text)
    assert set(all_columns) - set(columns) <= {"source"}
    assert columns == {name: cells for name, cells in all_columns.items() if name in columns}
    assert width < 80 or len(parse_tables(text)) - bool(report) <= 2


@pytest.mark.parametrize(
    ("fraction", "fraction_text", "amax", "amax_text"),
    [(0.0, "0 %", 0.0, "0"), (1e-9, "1e-07 %", 1.5e-7, "1.5e-07"),
     (0.00001234, "0.00123 %", 0.0123, "0.0123"), (0.005, "0.5 %", 99.96, "100"),
     (0.1234, "12.3 %", 57344.0, "57344"), (0.9996, "100 %", 3e38, "3e+38")],
)  # fmt: skip
def test_values_are_short_and_readable(fraction, fraction_text, amax, amax_text):
    report = make_report(1)
    k = replace(report.layers[0].k, saturated=fraction, amax=(0.0, amax))
    report = replace(report, layers={0: replace(report.layers[0], k=k)})
    cells = read_columns(render(KVScales.uniform(1, k=0.5), report))
    assert (cells["saturated"][0], cells["amax"][0]) == (fraction_text, amax_text)


def make_per_tensor(k: list[float], v: list[float] | None = None) -> KVScales:
    """Return scales per tensor with the scales of K, and of V or distinct default scales of V."""
    layers = zip(torch.tensor(k), torch.tensor(v or [0.25 + i for i in range(len(k))]), strict=True)
    return KVScales({index: LayerScales(*scales) for index, scales in enumerate(layers)})


LAYER = LayerScales(torch.tensor(0.5), torch.tensor(0.25))
HEAD_LAYER = LayerScales(torch.tensor([[1.0], [11.0]]), torch.tensor(0.5))


@pytest.mark.parametrize(
    ("scales", "remark"),
    [
        (KVScales.uniform(3), "every scale is exactly 1.0"),
        (make_per_tensor([1.0, 1.0, 1.5], [1.0, 1.0, 1.0]), None),
        (make_per_tensor([0.5, 0.75], [0.5, 0.75]), "K and V have the same scale in every layer"),
        (make_per_tensor([0.5, 0.75], [0.5, 0.7]), None),
        (
            make_per_tensor([1.0, 2.0, 2.0, 20.1, 3.0]),
            "K of layer 3: the scale is over 10 times the median",
        ),
        (make_per_tensor([1.0, 2.0, 2.0, 20.0, 3.0]), None),
        (make_per_tensor([0.5] * 6, [1.0, 11.0, 1.0, 12.0, 1.0, 1.0]), "V of layers 1, 3:"),
        (KVScales({**make_per_tensor([1.0] * 3).layers, 1: HEAD_LAYER}), "K of layer 1:"),
        (KVScales(dict.fromkeys((1, 2, 5), LAYER)), "no scales for layers 0, 3, 4, of 0 to 5"),
        (KVScales(dict.fromkeys((0, 1), LAYER)), None),
    ],
)
def test_remarks_on_unusual_scales_follow_the_table(scales, remark):
    assert [x[: len(remark or "")] for x in list_remarks(scales)] == ([remark] if remark else [])
    text = render(scales, None)
    assert text.find(f"! {remark}") > text.index("└") if remark else "! " not in text


# -- as a plot -------------------------------------------------------------------------------------


def get_panels(scales: KVScales, report: ScalesReport | None) -> dict[str, Any]:
    """Return the panels of a plot by title. A color bar has no title."""
    axes = make_figure(scales, report).axes
    return {panel.get_title(loc="left"): panel for panel in axes if panel.get_title(loc="left")}


def get_points(axes: Any) -> dict[str, list[list[float]]]:
    return {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}


def test_a_plot_has_the_magnitudes_and_errors_of_each_layer_and_head():
    panels = get_panels(make_scales(make_report(5, 3)), make_report(5, 3))
    magnitudes = get_points(panels["largest magnitude of K and V, by layer"])
    for name, amax, error in (("K", 10.0, 0.02), ("V", 1.0, 0.01)):
        table = amax + np.arange(5)[:, None] + np.arange(3) / 8
        (image,) = panels[f"largest magnitude of {name}, by layer and head"].get_images()
        assert image.get_array().tolist() == table.T.tolist()
        largest = [[layer, heads[2]] for layer, heads in enumerate(table)]
        assert magnitudes[f"{name}, largest head"] == largest
        axes = panels[f"quantization error of {name}, by layer"]
        styles = {line.get_label(): line.get_linestyle() for line in axes.get_lines()}
        assert styles == {key: ":" if key.startswith(DYNAMIC) else "-" for key in ERRORS}
        for index, key in enumerate(ERRORS):
            expected = 100 * (error + np.arange(5) / 1000) * (1 + index / 10)
            np.testing.assert_allclose([y for _, y in get_points(axes)[key]], expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("scales", "expected"),
    [
        (make_per_tensor([0.5, 0.75]), [[224.0, 336.0]]),
        (KVScales({0: LAYER, 1: HEAD_LAYER}), [[224.0, 448.0], [224.0, 4928.0]]),
        (KVScales({0: LayerScales(torch.ones(2, 3).cumsum(1), LAYER.v)}), [[1344.0], [1344.0]]),
    ],
    ids=["tensor", "tensor and head", "largest channel"],
)
def test_a_plot_without_a_report_shows_the_scales(scales, expected):
    (image,) = get_panels(scales, None)["448 × scale of K, by layer and head"].get_images()
    assert image.get_array().tolist() == expected
    (note,) = get_panels(scales, None)["quantization error of V, by layer"].texts
    assert "inspect SCALES --model MODEL --texts FILE" in note.get_text()


def test_a_plot_omits_missing_layers_and_zeros():
    report = make_report(6, 2)
    k = replace(report.layers[4].k, amax=(0.0, 3.0), error={"fp8_e4m3": 0.0})
    partial = replace(report, layers={1: report.layers[1], 4: replace(report.layers[4], k=k)})
    panels = get_panels(make_scales(report), partial)
    magnitudes = get_points(panels["largest magnitude of K and V, by layer"])
    assert magnitudes["K, largest head"] == [[1, 11.125], [4, 3.0]]
    zeros = SideStatistics((0.0, 0.0), 0.0, 0.0, {})
    layers = {i: replace(layer, k=zeros, v=zeros) for i, layer in report.layers.items()}
    panels = get_panels(make_scales(report), replace(report, layers=layers))
    assert panels["quantization error of K, by layer"].texts


# Labels overlap first with many layers and heads. Both plots are tested, with errors and a note.
@pytest.mark.parametrize(
    ("num_layers", "num_heads", "is_measured"), [(80, 8, True), (80, 128, False)]
)
def test_no_labels_overlap(num_layers, num_heads, is_measured):
    report = make_report(num_layers, num_heads, model="org/" + "a-long-name-" * 20)
    figure = make_figure(make_scales(report), report if is_measured else None)
    figure.draw_without_rendering()
    texts = [figure._suptitle]
    for axes in figure.axes:
        texts += [axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            ticks = [t for t in axis.get_major_ticks() if min(limits) <= t.get_loc() <= max(limits)]
            texts += [text for tick in ticks for text in (tick.label1, tick.label2)]
        texts += axes.get_legend().get_texts() if axes.get_legend() is not None else []
    boxes = [t.get_window_extent() for t in texts if t.get_visible() and t.get_text()]
    assert len(boxes) > 20
    width, height = figure.canvas.get_width_height()
    assert all(b.x0 >= 0 and b.x1 <= width and b.y0 >= 0 and b.y1 <= height for b in boxes)
    for box, other_box in itertools.combinations(boxes, 2):
        are_beside = box.x1 <= other_box.x0 or other_box.x1 <= box.x0
        assert are_beside or box.y1 <= other_box.y0 or other_box.y1 <= box.y0, (box, other_box)


def test_a_png_is_written_1600_pixels_wide(tmp_path):
    report = make_report(model="C:\\models\\$x_{1$ and\nmore")  # formulas are not rendered
    title = make_figure(make_scales(report), report).get_suptitle()
    assert title.splitlines()[0] == r"C:\models\$x_{1$ and more"
    was_imported = "matplotlib.pyplot" in sys.modules
    plot_scales(make_scales(report), report, path := tmp_path / "scales.png")
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(path.read_bytes()[16:20], "big") == 1600
    assert list(tmp_path.iterdir()) == [path]
    assert ("matplotlib.pyplot" in sys.modules) == was_imported


def test_a_full_disk_leaves_the_old_plot(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "old.png").write_bytes(b"before")
    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        plot_scales(KVScales.uniform(2), None, tmp_path / "old.png")
    assert (tmp_path / "old.png").read_bytes() == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["old.png"]
