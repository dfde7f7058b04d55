"""Tests of scales and their report as JSON and as tables."""

import io
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

from hf_fp8kv.formats import FORMATS
from hf_fp8kv.scales import KVScales, LayerScales
from hf_fp8kv.scales.measured_report import (
    DYNAMIC,
    LayerStatistics,
    QualityRow,
    ScalesReport,
    SideStatistics,
)  # fmt: skip
from hf_fp8kv_cli.scales_table import list_remarks, render_scales

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


def render(scales: KVScales, report: ScalesReport | None, width: int = 200) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    for part in render_scales(scales, report, width):
        console.print(part)
    return console.export_text()


def read_rows(text: str) -> list[list[str]]:
    """Return the cells of the headings and rows of all tables."""
    lines = [line for line in text.splitlines() if line.startswith(("┃", "│"))]
    return [[cell.strip() for cell in re.split("[┃│]", line)[1:-1]] for line in lines]


def test_the_tables_of_a_measurement_have_all_measurements():
    report = make_report(2)
    text = render(make_scales(report, centered=(1,)), report)
    assert text.splitlines()[:3] == [
        "hf_fp8kv, llama, 2 layers, per head, K centered in 1 of 2 layers",
        "from a: b/kv.safetensors",
        "a model: measured as fp8_e4m3 on 400 tokens; 2026-11-21",
    ]
    assert read_rows(text) == [
        ["layer", "stored", "scale", "amax", "saturated", "underflow", "source"],
        ["0", "K", "0.0223 .. 0.0229", "10.2", "0.003 %", "12.5 %", "layers.0"],
        ["0", "V", "0.00223 .. 0.00279", "1.25", "0.003 %", "12.5 %", "layers.0"],
        ["1", "K centered", "0.0246 .. 0.0251", "11.2", "0.003 %", "12.5 %", "layers.1"],
        ["1", "V", "0.00446 .. 0.00502", "2.25", "0.003 %", "12.5 %", "layers.1"],
        ["", "mean", "largest", "same", "", ""],
        ["cache", "KL", "KL", "top-1", "perplexity", "tokens"],
        ["unquantized", "0", "0", "100.00%", "12.5", "400"],
        ["static fp8_e4m3", "3.00e-03", "2.00e-01", "96.25%", "12.53", "400"],
    ]


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
        (make_per_tensor([0.5, 0.75], [0.5, 0.75]), "K and V have the same scale in every layer"),
        (make_per_tensor([0.5, 0.75], [0.5, 0.7]), None),
        (
            make_per_tensor([1.0, 2.0, 2.0, 20.1, 3.0]),
            "K of layer 3: the scale is over 10 times the median",
        ),
        (make_per_tensor([1.0, 2.0, 2.0, 20.0, 3.0]), None),
        (KVScales({**make_per_tensor([1.0] * 3).layers, 1: HEAD_LAYER}), "K of layer 1:"),
        (KVScales(dict.fromkeys((1, 2, 5), LAYER)), "no scales for layers 0, 3, 4 of 0 to 5"),
        (KVScales(dict.fromkeys((0, 1), LAYER)), None),
    ],
)
def test_remarks_on_unusual_scales_follow_the_table(scales, remark):
    assert [text[: len(remark or "")] for text in list_remarks(scales)] == (
        [remark] if remark else []
    )
    text = render(scales, None)
    assert text.find(f"! {remark}") > text.index("└") if remark else "! " not in text
