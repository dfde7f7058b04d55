"""Tests of scales as a table, and of remarks on them."""

import io
import re

import pytest
import torch
from rich.console import Console

from hf_fp8kv.scales import KVScales, LayerScales
from hf_fp8kv_cli.scales_table import list_remarks, render_scales


def render(scales: KVScales, width: int = 200) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    for part in render_scales(scales, width):
        console.print(part)
    return console.export_text()


def read_rows(text: str) -> list[list[str]]:
    row_lines = [line for line in text.splitlines() if line.startswith(("┃", "│"))]
    return [[cell.strip() for cell in re.split("[┃│]", line)[1:-1]] for line in row_lines]


def test_the_table_has_a_row_for_each_side():
    center = torch.zeros(2, 4)
    layers = {}
    for index in range(2):
        k, v = (torch.tensor([[amax], [amax + 0.5]]) / 448 for amax in (10.0 + index, 1.0 + index))
        layers[index] = LayerScales(k, v, center if index else None, f"a: b: layers.{index}")
    scales = KVScales(layers, model_type="llama", origin="a: b/kv.safetensors")
    text = render(scales)
    assert text.splitlines()[:2] == [
        "hf_fp8kv, llama, 2 layers, per head, K centered in 1 of 2 layers",
        "from a: b/kv.safetensors",
    ]
    rows = [
        ["layer", "stored", "scale", "448 x scale", "source"],
        ["0", "K", "0.0223 .. 0.0234", "10.5", "layers.0"],
        ["0", "V", "0.00223 .. 0.00335", "1.5", "layers.0"],
        ["1", "K centered", "0.0246 .. 0.0257", "11.5", "layers.1"],
        ["1", "V", "0.00446 .. 0.00558", "2.5", "layers.1"],
    ]
    assert read_rows(text) == rows
    width = text.splitlines()[2].index("┓") + 1
    assert read_rows(render(scales, width)) == rows
    assert read_rows(render(scales, width - 1)) == [row[:-1] for row in rows]


def make_per_tensor(k: list[float], v: list[float] | None = None) -> KVScales:
    """Return scales per tensor. By default, the scales of V differ between layers."""
    v = v or [0.25 + index for index in range(len(k))]
    pairs = zip(torch.tensor(k), torch.tensor(v), strict=True)
    return KVScales({index: LayerScales(*pair) for index, pair in enumerate(pairs)})


LAYER = LayerScales(torch.tensor(0.5), torch.tensor(0.25))
HEAD_LAYER = LayerScales(torch.tensor([[1.0], [11.0]]), torch.tensor(0.5))


@pytest.mark.parametrize(
    ("scales", "expected_prefixes"),
    [
        (KVScales.uniform(3), ["every scale is exactly 1.0"]),
        (make_per_tensor([0.5, 0.75], [0.5, 0.75]), ["K and V have the same scale in every layer"]),
        (make_per_tensor([0.5, 0.75], [0.5, 0.7]), []),
        (
            make_per_tensor([1.0, 2.0, 2.0, 20.1, 3.0]),
            ["K of layer 3: the scale is over 10 times the median"],
        ),
        (make_per_tensor([1.0, 2.0, 2.0, 20.0, 3.0]), []),
        (KVScales({**make_per_tensor([1.0] * 3).layers, 1: HEAD_LAYER}), ["K of layer 1:"]),
        (KVScales(dict.fromkeys((1, 2, 5), LAYER)), ["no scales for layers 0, 3, 4 of 0 to 5"]),
        (KVScales(dict.fromkeys((0, 1), LAYER)), []),
    ],
)
def test_remarks_on_unusual_scales_follow_the_table(scales, expected_prefixes):
    table_end = render(scales).rpartition("└")[2]
    for remark, prefix in zip(list_remarks(scales), expected_prefixes, strict=True):
        assert remark.startswith(prefix)
        assert f"! {prefix}" in table_end
    assert table_end.count("! ") == len(expected_prefixes)
