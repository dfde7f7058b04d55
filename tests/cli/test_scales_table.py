"""What a calibration found: as JSON and back, as tables, and as a picture."""

import io
import itertools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from rich.console import Console

from hf_fp8kv.cli.scales_plot import plot_scales, scales_figure
from hf_fp8kv.cli.scales_table import inspect_table, list_remarks
from hf_fp8kv.errors import ConfigError, ScaleError
from hf_fp8kv.formats import FORMATS
from hf_fp8kv.scales import KVScales, LayerScales
from hf_fp8kv.scales.report import (
    DYNAMIC,
    REPORT_FILE,
    CalibrationReport,
    LayerStatistics,
    QualityRow,
    SideStatistics,
)

NAN, INF = float("nan"), float("inf")
ERRORS = [start + name for start in ("", DYNAMIC) for name in FORMATS]
WIDTHS = (40, 60, 80, 100, 140, 200)


def side(amax: list[float], error: float) -> SideStatistics:
    """One side; no two of its errors are the same."""
    errors = {name: error * (1 + place / 10) for place, name in enumerate(ERRORS)}
    return SideStatistics(tuple(amax), 0.00003, 0.125, errors)


def found(layers: int = 4, heads: int = 3, **changes: Any) -> CalibrationReport:
    """A report in which no two layers, heads and sides are the same."""
    report = CalibrationReport(
        model="a model", dtype="fp8_e4m3", granularity="head", margin=1.0, texts=2, tokens=5000,
        held_out_tokens=400, seconds=12.5, date="2026-11-21T10:00:00+00:00",
        versions={"torch": "2.13"}, hardware={"cpu": "a cpu", "cores": 2, "gpus": []},
        scales_digest="0f" * 32, centers="No center was kept.",
        layers={
            i: LayerStatistics(
                side([10.0 + i + h / 8 for h in range(heads)], 0.02 + i / 1000),
                side([1.0 + i + h / 8 for h in range(heads)], 0.01 + i / 1000),
                False,
                None,
            )
            for i in range(layers)
        },
        quality=(
            QualityRow("unquantised", 0.0, 0.0, 1.0, 12.5, 400),
            QualityRow("static fp8_e4m3", 0.003, 0.2, 0.9625, 12.53125, 400),
        ),
    )  # fmt: skip
    return replace(report, **changes)


def scales_of(report: CalibrationReport, centered: tuple[int, ...] = ()) -> KVScales:
    """Per head, as a calibration makes them."""
    layers = {}
    for index, layer in report.layers.items():
        k, v = (torch.tensor(s.amax).view(-1, 1) / 448 for s in (layer.k, layer.v))
        center = torch.zeros(len(k), 2) if index in centered else None
        layers[index] = LayerScales(k, v, center, f"a: b/kv.safetensors: layers.{index}")
    return KVScales(layers, model_type="llama", origin="a: b/kv.safetensors")


# -- as JSON and back ------------------------------------------------------------------------------

magnitudes = st.floats(0, 1e300)
shares = st.floats(0, 1)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
sides = st.builds(
    SideStatistics,
    st.lists(magnitudes, min_size=1, max_size=4).map(tuple),
    shares,
    shares,
    st.dictionaries(st.sampled_from(ERRORS), magnitudes),
)
qualities = st.lists(
    st.builds(
        QualityRow, st.text(), magnitudes, magnitudes, shares, st.floats(1, 1e300), st.integers(0)
    ),
    max_size=3,
).map(tuple)
reports = st.builds(
    CalibrationReport,
    model=st.text(), dtype=st.sampled_from(list(FORMATS)),
    granularity=st.sampled_from(["tensor", "head", "channel", "tensor/head"]),
    margin=st.floats(1e-3, 10), texts=st.integers(0), tokens=st.integers(0),
    held_out_tokens=st.integers(0), seconds=magnitudes,
    date=st.datetimes().map(lambda date: date.isoformat()),
    versions=st.dictionaries(st.text(), st.text(), max_size=3),
    hardware=st.dictionaries(st.text(), json_values, max_size=3),
    scales_digest=st.text("0123456789abcdef", min_size=64, max_size=64), centers=st.text(),
    layers=st.dictionaries(
        st.integers(0, 999_999),
        st.builds(LayerStatistics, sides, sides, st.booleans(), st.none() | magnitudes),
        min_size=1, max_size=4,
    ),
    quality=qualities, far_quality=qualities, max_position=st.none() | st.integers(0),
)  # fmt: skip


@given(reports)
def test_a_report_is_the_same_after_json(report):
    data = report.to_dict()
    text = json.dumps(data, allow_nan=False)
    assert json.loads(text) == data
    again = CalibrationReport.from_dict(json.loads(text), REPORT_FILE)
    assert again == report
    # 2 == 2.0 and True == 1: the types too are those of the report
    assert repr(again.to_dict()) == repr(data)
    assert list(again.layers) == sorted(report.layers)


def test_what_is_made_of_a_report_is_not_part_of_it():
    report = found()
    data = report.to_dict()
    data["layers"]["0"]["k"]["error"].clear()
    data["hardware"]["gpus"].append("a gpu")
    assert report == found()
    data = report.to_dict()
    again = CalibrationReport.from_dict(data, REPORT_FILE)
    data["hardware"]["gpus"].append("a gpu")
    assert again == found()


def test_integers_are_read_where_json_has_lost_the_point():
    data = found().to_dict()
    data["seconds"], data["layers"]["0"]["k"]["amax"][0] = 12, 10
    report = CalibrationReport.from_dict(data, REPORT_FILE)
    assert isinstance(report.seconds, float)
    assert isinstance(report.layers[0].k.amax[0], float)


DROPPED = object()
K = ("layers", "2", "k")
# where it is malformed, with what, and what the message says
MALFORMED: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "no-object": ((), [1], r"x\.json: expected an object with model, dtype, .*, got \[1\]"),
    "null": ((), None, r"x\.json: expected an object"),
    "no-margin": (("margin",), DROPPED, r"x\.json: expected the entry margin"),
    "unknown-entry": (("colour",), "red", r"x\.json: expected only model, .*, got 'colour'"),
    "model-no-text": (("model",), 3, r"x\.json: model: expected text, got 3"),
    "dtype": (("dtype",), "int4", r"dtype: expected one of fp8_e4m3, .*, got 'int4'"),
    "dtype-list": (("dtype",), ["fp8_e4m3"], r"dtype: expected one of"),
    "granularity": (("granularity",), "row", r"granularity: expected one of tensor, head"),
    "margin-zero": (("margin",), 0.0, r"margin: expected a finite number above 0, got 0\.0"),
    "margin-nan": (("margin",), NAN, r"margin: expected a finite number above 0, got nan"),
    "margin-infinite": (("margin",), INF, r"margin: .* got inf"),
    "margin-huge": (("margin",), 10**400, r"margin: .* got 1000"),
    "texts-float": (("texts",), 2.0, r"texts: expected an integer of at least 0, got 2\.0"),
    "tokens-bool": (("tokens",), True, r"tokens: expected an integer of at least 0, got True"),
    "tokens-negative": (("held_out_tokens",), -1, r"held_out_tokens: .* got -1"),
    "seconds-text": (("seconds",), "12", r"seconds: expected a finite number .*, got '12'"),
    "date": (("date",), "yesterday", r"date: expected a date as ISO 8601 writes it"),
    "date-number": (("date",), 20261121, r"date: expected a date"),
    "versions": (("versions",), [], r"versions: expected an object with names, got \[\]"),
    "a-version": (("versions", "torch"), 2.13, r"versions\.torch: expected text, got 2\.13"),
    "hardware": (("hardware",), "a cpu", r"hardware: expected an object with names"),
    "hardware-nan": (
        ("hardware", "gpus"),
        [{"gb": NAN}],
        r"hardware\.gpus: expected a value .* nan",
    ),
    "hardware-set": (("hardware", "cpu"), {1}, r"hardware\.cpu: expected a value that JSON can"),
    "hardware-key": (("hardware", 3), 1, r"hardware: expected an object with names"),
    "digest-short": (("scales_digest",), "0f", r"scales_digest: expected a sha256"),
    "digest-capitals": (("scales_digest",), "0F" * 32, r"scales_digest: expected a sha256"),
    "centers": (("centers",), None, r"centers: expected text, got None"),
    "layers-list": (("layers",), [], r"layers: expected an object with a layer"),
    "no-layer": (("layers",), {}, r"layers: expected an object with a layer"),
    "layer-minus": (("layers", "-1"), {}, r"layers: expected the indices .*, got '-1'"),
    "layer-word": (("layers", "first"), {}, r"layers: expected the indices .*, got 'first'"),
    "layer-float": (("layers", "1.0"), {}, r"layers: expected the indices .*, got '1\.0'"),
    "layer-zeros": (("layers", "01"), {}, r"layers: expected the indices .*, got '01'"),
    "layer-other-digit": (("layers", "\u0663"), {}, r"layers: expected the indices"),
    "layer-number": (("layers", 5), {}, r"layers: expected an object with a layer"),
    "layer-null": (("layers", "2"), None, r"layers\.2: expected an object with k, v, centered"),
    "no-v": (("layers", "2", "v"), DROPPED, r"layers\.2: expected the entry v"),
    "unknown-side": (("layers", "2", "q"), {}, r"layers\.2: expected only k, .*, got 'q'"),
    "centered": (("layers", "2", "centered"), 1, r"layers\.2\.centered: expected true or false"),
    "gain": (("layers", "2", "center_gain"), -0.5, r"layers\.2\.center_gain: .* got -0\.5"),
    "gain-nan": (("layers", "2", "center_gain"), NAN, r"layers\.2\.center_gain: .* got nan"),
    "side": (K, 3, r"layers\.2\.k: expected an object with amax, saturated"),
    "no-amax": ((*K, "amax"), DROPPED, r"layers\.2\.k: expected the entry amax"),
    "amax-empty": ((*K, "amax"), [], r"layers\.2\.k\.amax: expected a list with a number for each"),
    "amax-number": ((*K, "amax"), 3.0, r"layers\.2\.k\.amax: expected a list"),
    "amax-nan": ((*K, "amax"), [1.0, NAN], r"layers\.2\.k\.amax\[1\]: .* got nan"),
    "amax-negative": ((*K, "amax"), [-1.0], r"layers\.2\.k\.amax\[0\]: .* got -1\.0"),
    "share-negative": ((*K, "saturated"), -1e-9, r"k\.saturated: expected a number from 0 to 1"),
    "share-above": ((*K, "underflow"), 1.5, r"k\.underflow: expected a number from 0 to 1"),
    "share-nan": ((*K, "underflow"), NAN, r"k\.underflow: .* got nan"),
    "error-format": ((*K, "error", "int4"), 0.1, r"k\.error: expected only fp8_e4m3, .* 'int4'"),
    "error-prefix": ((*K, "error", "static fp8_e4m3"), 0.1, r"k\.error: expected only"),
    "error-text": ((*K, "error", "fp8_e4m3"), "0", r"k\.error\.fp8_e4m3: expected a finite"),
    "quality-object": (("quality",), {}, r"quality: expected a list, got \{\}"),
    "quality-row": (("quality", 1), [], r"quality\[1\]: expected an object with cache"),
    "no-kl": (("quality", 1, "kl"), DROPPED, r"quality\[1\]: expected the entry kl"),
    "kl-negative": (("quality", 1, "kl"), -0.1, r"quality\[1\]\.kl: .* got -0\.1"),
    "top1-percent": (("quality", 1, "top1"), 96.0, r"quality\[1\]\.top1: .* from 0 to 1"),
    "perplexity": (("quality", 1, "perplexity"), 0, r"quality\[1\]\.perplexity: .* above 0"),
    "far-quality": (("far_quality",), None, r"far_quality: expected a list, got None"),
    "max-position": (("max_position",), -1, r"max_position: expected an integer of at least 0"),
    "unknown-quality": (("quality", 1, "bleu"), 0, r"quality\[1\]: expected only .* 'bleu'"),
}


@pytest.mark.parametrize(("path", "value", "message"), MALFORMED.values(), ids=MALFORMED)
def test_what_is_malformed_is_refused_by_its_name(path, value, message):
    data: Any = found().to_dict()
    if path:
        inner = data
        for name in path[:-1]:
            inner = inner[name]
        if value is DROPPED:
            del inner[path[-1]]
        else:
            inner[path[-1]] = value
    else:
        data = value
    with pytest.raises(ScaleError, match=message) as error:
        CalibrationReport.from_dict(data, "x.json")
    assert str(error.value).startswith("x.json: ")
    assert len(str(error.value)) < 600


def test_endless_json_is_refused():
    data = found().to_dict()
    data["hardware"]["cpu"] = data["hardware"]
    with pytest.raises(ScaleError, match=r"x\.json: hardware\.cpu: expected a value"):
        CalibrationReport.from_dict(data, "x.json")


def test_no_report_is_written_that_could_not_be_read():
    row = QualityRow("static fp8_e4m3", NAN, 0.2, 0.96, 12.5, 400)
    with pytest.raises(ScaleError, match=r"the report of a calibration: quality\[0\]\.kl: .* nan"):
        found(quality=(row,)).to_dict()


# -- as tables -------------------------------------------------------------------------------------


def shown(scales: KVScales, report: CalibrationReport | None, width: int = 200) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    for part in inspect_table(scales, report):
        console.print(part)
    return console.export_text()


def rows(text: str) -> list[list[list[str]]]:
    """The tables of a text: rows of cells."""
    tables: list[list[list[str]]] = []
    for line in text.splitlines():
        if line.startswith("┏"):
            tables.append([])
        elif line[:1] in ("┃", "│"):
            tables[-1].append([cell.strip() for cell in re.split("[┃│]", line)[1:-1]])
    return tables


def columns(text: str) -> dict[str, list[str]]:
    """The cells of the tables with layers, by what stands above them."""
    result = {}
    for table in rows(text):
        first = [row[0] for row in table]
        if "layer" in first:
            start = first.index("layer") + 1
            for place in range(len(table[0])):
                name = " ".join(row[place] for row in table[:start]).strip()
                result[name] = [row[place] for row in table[start:]]
    return result


def test_a_table_of_what_was_measured():
    report = found(2)
    layers = {**report.layers, 1: replace(report.layers[1], centered=True, center_gain=2.5)}
    report = replace(report, layers=layers)
    text = shown(scales_of(report, centered=(1,)), report)
    assert columns(text) == {
        "layer": ["0", "1"],
        "K scale": ["0.0223 .. 0.0229", "0.0246 .. 0.0251"],
        "V scale": ["0.00223 .. 0.00279", "0.00446 .. 0.00502"],
        "amax K": ["10.2", "11.2"],
        "amax V": ["1.25", "2.25"],
        "centered, gain": ["no", "yes, 2.50 x"],
        "saturated K": ["0.003 %"] * 2,
        "saturated V": ["0.003 %"] * 2,
        "underflow K": ["12.5 %"] * 2,
        "underflow V": ["12.5 %"] * 2,
        "source": ["layers.0", "layers.1"],
    }
    lines = text.splitlines()
    assert lines[0] == "hf_fp8kv, llama, 2 layers, per head, K centered in 1 of 2 layers"
    assert lines[1] == "from a: b/kv.safetensors"
    assert lines[2] == (
        "a model: 5000 tokens of 2 texts, margin 1; checked as fp8_e4m3 on 400 other tokens; "
        "2026-11-21"
    )
    assert lines[-1] == "No center was kept."
    assert rows(text)[-1] == [
        ["", "mean", "largest", "same", "", ""],
        ["cache", "KL", "KL", "top-1", "perplexity", "tokens"],
        ["unquantised", "0", "0", "100.00%", "12.5", "400"],
        ["static fp8_e4m3", "3.00e-03", "2.00e-01", "96.25%", "12.53", "400"],
    ]


def test_a_table_of_scales_alone_says_what_they_stand_for():
    text = shown(KVScales.uniform(2, k=0.015625, v=1.0), None)
    assert columns(text) == {
        "layer": ["0", "1"],
        "K scale": ["0.01562", "0.01562"],
        "V scale": ["1", "1"],
        "448 x K scale": ["7.00", "7.00"],
        "448 x V scale": ["448", "448"],
        "source": ["uniform", "uniform"],
    }
    assert text.splitlines()[0] == (
        "hf_fp8kv, model type unknown, 2 layers, per tensor, K not centered"
    )
    assert len(rows(text)) == 1


def test_without_text_held_out_there_are_no_shares():
    report = found(held_out_tokens=0, quality=(), centers="")
    text = shown(scales_of(report), report)
    assert set(columns(text)) == {
        "layer", "K scale", "V scale", "amax K", "amax V", "source",
    }  # fmt: skip
    assert len(rows(text)) == 1


def test_the_quality_at_other_positions_has_a_table_of_its_own():
    far = (QualityRow("static fp8_e4m3", 0.007, 0.3, 0.9375, 13.0, 200),)
    report = found(far_quality=far, max_position=8192)
    text = shown(scales_of(report), report)
    assert "the same at other positions, up to 8192" in text
    assert text.index("3.00e-03") < text.index("up to 8192") < text.index("7.00e-03")
    assert "other positions" not in shown(scales_of(report), replace(report, far_quality=()))


def test_a_report_from_before_other_positions_were_tried():
    data = found().to_dict()
    del data["far_quality"], data["max_position"]
    report = CalibrationReport.from_dict(data, REPORT_FILE)
    assert report == found()


def test_scales_from_elsewhere_were_measured_only():
    report = found(texts=0, tokens=0, quality=())
    heading = shown(scales_of(report), report).splitlines()[2]
    assert heading == "a model: measured as fp8_e4m3 on 400 tokens; 2026-11-21"
    title = scales_figure(scales_of(report), report).get_suptitle()
    assert title == "a model\nscales per head, measured on 400 tokens"


def test_a_layer_without_a_measurement_has_empty_cells():
    report = found(3)
    scales = scales_of(report)
    part = replace(report, layers={1: report.layers[1]})
    assert columns(shown(scales, part))["amax K"] == ["", "11.2", ""]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("measured", [True, False])
def test_no_number_is_cut_at_any_width(width, measured):
    report = found(12)
    layers = {i: replace(layer, center_gain=1.25) for i, layer in report.layers.items()}
    report = replace(report, layers=layers)
    scales = scales_of(report, centered=(3,))
    text = shown(scales, report if measured else None, width)
    assert max(map(len, text.splitlines())) <= width
    wide, here = columns(shown(scales, report if measured else None)), columns(text)
    assert set(wide) - set(here) <= {"source"}
    assert here == {name: cells for name, cells in wide.items() if name in here}
    if width >= 80:
        assert len(rows(text)) - measured <= 2


def test_the_source_is_shown_where_there_is_room():
    names = "model.layers.{0}.self_attn.k_scale, model.layers.{0}.self_attn.v_scale"
    layers = {
        i: LayerScales(
            torch.tensor(0.5 + i), torch.tensor(0.25), None, f"/x: y/z: {names}".format(i)
        )
        for i in range(2)
    }
    scales = KVScales(layers, format="autofp8")
    assert "source" not in columns(shown(scales, None, 80))
    assert columns(shown(scales, None, 100))["source"] == [
        "model.layers.0.self_attn.k_scale, v_scale",
        "model.layers.1.self_attn.k_scale, v_scale",
    ]


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0"), (1e-9, "<0.001 %"), (0.00001234, "0.0012 %"), (0.005, "0.5 %"),
     (0.01, "1 %"), (0.1234, "12.3 %"), (0.9996, "100 %"), (1.0, "100 %")],
)  # fmt: skip
def test_shares_are_read_at_a_glance(share, text):
    report = found(1)
    k = replace(report.layers[0].k, saturated=share)
    report = replace(report, layers={0: replace(report.layers[0], k=k)})
    assert columns(shown(scales_of(report), report))["saturated K"] == [text]


@pytest.mark.parametrize(
    ("amax", "text"),
    [(0.0, "0"), (1.5e-7, "1.50e-07"), (0.0123, "0.0123"), (99.96, "100"), (999.7, "1000"),
     (57344.0, "57344"), (3e38, "3.00e+38")],
)  # fmt: skip
def test_magnitudes_are_read_at_a_glance(amax, text):
    report = found(1)
    k = replace(report.layers[0].k, amax=(0.0, amax))
    scales = KVScales.uniform(1, k=0.5)
    report = replace(report, layers={0: replace(report.layers[0], k=k)})
    assert columns(shown(scales, report))["amax K"] == [text]


def test_a_terminal_that_knows_only_ascii_gets_the_same_table():
    report = found()
    layers = {i: replace(layer, center_gain=1.25) for i, layer in report.layers.items()}
    report = replace(report, layers=layers)
    for measured in (report, None):
        file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        console = Console(width=200, file=file)
        for part in inspect_table(scales_of(report), measured):
            console.print(part)
        file.flush()


def test_markup_in_a_name_is_text():
    layer = LayerScales(torch.tensor(0.5), torch.tensor(0.25), None, "x: [bold]a[/bold]")
    text = shown(KVScales({0: layer}, origin="[red]x[/red]"), found(1, model="[/b]"))
    assert "from [red]x[/red]" in text
    assert "[/b]: 5000 tokens" in text
    assert columns(text)["source"] == ["[bold]a[/bold]"]


# -- remarks ---------------------------------------------------------------------------------------


def per_layer(k: list[float], v: list[float] | None = None) -> KVScales:
    v = [0.25 + i for i in range(len(k))] if v is None else v
    return KVScales(
        {
            i: LayerScales(torch.tensor(a), torch.tensor(b))
            for i, (a, b) in enumerate(zip(k, v, strict=True))
        }
    )


def test_nothing_odd_is_said_of_what_a_calibration_makes():
    assert list_remarks(scales_of(found())) == []


def test_scales_of_one_are_not_calibrated():
    (remark,) = list_remarks(KVScales.uniform(3))
    assert remark.startswith("every scale is exactly 1.0")
    assert list_remarks(per_layer([1.0, 1.0, 1.5], [1.0, 1.0, 1.0])) == []


def test_one_scale_for_both_sides_is_said():
    (remark,) = list_remarks(per_layer([0.5, 0.75], [0.5, 0.75]))
    assert remark.startswith("K and V have the same scale in every layer")
    assert list_remarks(per_layer([0.5, 0.75], [0.5, 0.7])) == []


def test_a_scale_far_above_the_others_is_said():
    (remark,) = list_remarks(per_layer([1.0, 2.0, 2.0, 20.1, 3.0]))
    assert remark.startswith("K of layer 3: the scale is over 10 times the median")
    assert "(2.00)" in remark
    assert list_remarks(per_layer([1.0, 2.0, 2.0, 20.0, 3.0])) == []
    (remark,) = list_remarks(per_layer([0.5] * 6, [1.0, 11.0, 1.0, 12.0, 1.0, 1.0]))
    assert remark.startswith("V of layers 1, 3:")


def test_the_largest_head_counts():
    layers = dict(per_layer([1.0, 1.0, 1.0]).layers)
    layers[1] = LayerScales(torch.tensor([[1.0], [11.0]]), torch.tensor(0.5))
    (remark,) = list_remarks(KVScales(layers))
    assert remark.startswith("K of layer 1:")


def test_missing_layers_are_said():
    layer = LayerScales(torch.tensor(0.5), torch.tensor(0.25))
    (remark,) = list_remarks(KVScales(dict.fromkeys((1, 2, 5), layer)))
    assert remark.startswith("no scales for layers 0, 3, 4, of 0 to 5")
    assert list_remarks(KVScales(dict.fromkeys((0, 1), layer))) == []


def test_remarks_stand_below_the_table():
    text = shown(KVScales.uniform(2), None)
    assert text.index("└") < text.index("! every scale is exactly 1.0")


# -- as a picture ----------------------------------------------------------------------------------


def panels(figure: Any) -> dict[str, Any]:
    """The panels by their titles; a colour bar has none."""
    return {axes.get_title(loc="left"): axes for axes in figure.axes if axes.get_title(loc="left")}


def lines(axes: Any) -> dict[str, Any]:
    return {line.get_label(): line for line in axes.get_lines()}


def test_lines_and_dots_are_the_magnitudes():
    report = found(5, 3)
    axes = panels(scales_figure(scales_of(report), report))[
        "largest magnitude of K and V, by layer"
    ]
    drawn = lines(axes)
    assert axes.get_yscale() == "log"
    for name, base in (("K", 10.0), ("V", 1.0)):
        table = base + np.arange(5)[:, None] + np.arange(3) / 8
        largest, each = drawn[f"{name}: largest head"], drawn[f"{name}: each head"]
        np.testing.assert_array_equal(largest.get_xydata(), np.c_[np.arange(5), table[:, 2]])
        expected = np.c_[np.repeat(np.arange(5), 3), table.ravel()]
        np.testing.assert_array_equal(each.get_xydata(), expected)
        assert largest.get_color() == each.get_color()
    assert drawn["K: largest head"].get_color() != drawn["V: largest head"].get_color()
    low, high = axes.get_ylim()
    assert low < 1.0
    assert high > 14.25


def test_heat_maps_have_a_cell_for_each_layer_and_head():
    report = found(5, 3)
    shown_panels = panels(scales_figure(scales_of(report), report))
    # where numbers are as close as those of K, the colours do not make much of it
    for name, base, limits in (("K", 10.0, (10 / 1.5, 14.25 * 1.5)), ("V", 1.0, (1.0, 5.25))):
        (image,) = shown_panels[f"largest magnitude of {name}, by layer and head"].get_images()
        table = base + np.arange(5)[:, None] + np.arange(3) / 8
        np.testing.assert_array_equal(image.get_array(), table.T)
        assert (image.norm.vmin, image.norm.vmax) == limits


def test_errors_are_solid_under_these_scales_and_dotted_under_dynamic_ones():
    report = found(5, 3)
    shown_panels = panels(scales_figure(scales_of(report), report))
    for name, base in (("K", 0.02), ("V", 0.01)):
        axes = shown_panels[f"error of {name} in 8 bits, by layer"]
        drawn = lines(axes)
        assert set(drawn) == set(ERRORS)
        for place, key in enumerate(ERRORS):
            line = drawn[key]
            expected = 100 * (base + np.arange(5) / 1000) * (1 + place / 10)
            np.testing.assert_allclose(line.get_ydata(), expected, rtol=1e-12)
            assert line.get_linestyle() == (":" if key.startswith(DYNAMIC) else "-")
            assert line.get_color() == drawn[key.removeprefix(DYNAMIC)].get_color()
        assert len({drawn[fmt].get_color() for fmt in FORMATS}) == len(FORMATS)
        # both panels have the axis of both: no line is cut off
        low, high = axes.get_ylim()
        assert low < 1.0
        assert high > 100 * 0.024 * 1.7


def test_without_a_report_the_picture_is_of_the_scales_and_says_so():
    scales = scales_of(found(4, 2))
    figure = scales_figure(scales, None)
    shown_panels = panels(figure)
    (image,) = shown_panels["448 × scale of K, by layer and head"].get_images()
    expected = 10.0 + np.arange(4)[:, None] + np.arange(2) / 8
    np.testing.assert_allclose(image.get_array(), expected.T, rtol=1e-6)
    for name in ("K", "V"):
        axes = shown_panels[f"error of {name} in 8 bits, by layer"]
        (words,) = axes.texts
        assert "not measured" in words.get_text()
        assert "inspect SCALES --model MODEL --texts FILE" in words.get_text()
        assert not axes.get_lines()
    assert "no text measured" in figure.get_suptitle()


def test_one_scale_is_that_of_all_heads():
    scales = per_layer([0.5, 0.75])
    axes = panels(scales_figure(scales, None))["448 × scale of K, by layer and head"]
    np.testing.assert_array_equal(axes.get_images()[0].get_array(), [[224.0, 336.0]])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["all"]
    # beside layers with a scale for each head, it is drawn for each
    mixed = KVScales({0: scales.layers[0], 1: LayerScales(torch.ones(3, 1), torch.ones(3, 1))})
    axes = panels(scales_figure(mixed, None))["448 × scale of K, by layer and head"]
    np.testing.assert_array_equal(axes.get_images()[0].get_array(), [[224.0, 448.0]] * 3)


def test_scales_per_channel_are_drawn_by_their_largest_channel():
    k = torch.tensor([[1.0, 2.0], [4.0, 3.0]])
    figure = scales_figure(KVScales({0: LayerScales(k, torch.tensor(1.0))}), None)
    (image,) = panels(figure)["448 × scale of K, by layer and head"].get_images()
    np.testing.assert_array_equal(image.get_array(), [[896.0], [1792.0]])


def test_missing_layers_and_zeros_are_left_out():
    report = found(6, 2)
    k = replace(report.layers[4].k, amax=(0.0, 3.0), error={"fp8_e4m3": 0.0})
    layers = {1: report.layers[1], 4: replace(report.layers[4], k=k)}
    report = replace(report, layers=layers)
    shown_panels = panels(scales_figure(scales_of(found(6, 2)), report))
    (image,) = shown_panels["largest magnitude of K, by layer and head"].get_images()
    missing = np.ones((2, 5), dtype=bool)
    missing[:, 1] = missing[1, 4] = False
    np.testing.assert_array_equal(np.ma.getmaskarray(image.get_array()), missing)
    line = lines(shown_panels["largest magnitude of K and V, by layer"])["K: largest head"]
    np.testing.assert_array_equal(line.get_xydata(), [[1, 11.125], [4, 3.0]])
    line = lines(shown_panels["error of K in 8 bits, by layer"])["fp8_e4m3"]
    np.testing.assert_allclose(line.get_xydata(), [[1, 2.1]])


def test_a_side_of_nothing_is_said(tmp_path):
    report = found(2, 2)
    k = SideStatistics((0.0, 0.0), 0.0, 0.0, {})
    layers = {i: replace(layer, k=k, v=k) for i, layer in report.layers.items()}
    empty = replace(report, layers=layers)
    shown_panels = panels(scales_figure(scales_of(report), empty))
    for title in ("largest magnitude of {}, by layer and head", "error of {} in 8 bits, by layer"):
        for name in ("K", "V"):
            assert shown_panels[title.format(name)].texts
    plot_scales(scales_of(report), empty, tmp_path / "x.png")


SIZES = [(1, 1), (30, 3), (80, 8), (80, 128)]
OTHERS = [size for size in itertools.product((1, 30, 80), (1, 3, 8, 32, 128)) if size not in SIZES]


@pytest.mark.parametrize("report", [True, False])
@pytest.mark.parametrize(
    ("layers", "heads"), SIZES + [pytest.param(*size, marks=pytest.mark.full) for size in OTHERS]
)
def test_no_label_lies_on_another(layers, heads, report):
    measured = found(layers, heads, model="org/" + "a-long-name-" * 20)
    figure = scales_figure(scales_of(measured), measured if report else None)
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    width, height = figure.canvas.get_width_height()
    boxes = [figure._suptitle.get_window_extent(renderer)]
    for axes in figure.axes:
        texts = [axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            low, high = sorted(limits)
            ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
            texts += [text for tick in ticks for text in (tick.label1, tick.label2)]
        if axes.get_legend() is not None:
            texts += axes.get_legend().get_texts()
        boxes += [
            text.get_window_extent(renderer)
            for text in texts if text.get_visible() and text.get_text()
        ]  # fmt: skip
    assert len(boxes) > 20
    for i, box in enumerate(boxes):
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= width
        assert box.y1 <= height
        for other in boxes[i + 1 :]:
            apart = (
                box.x1 <= other.x0 or other.x1 <= box.x0 or box.y1 <= other.y0 or other.y1 <= box.y0
            )
            assert apart, (i, box, other)


def test_a_png_is_written_1600_pixels_wide(tmp_path):
    report = found()
    path = tmp_path / "scales.PNG"
    plot_scales(scales_of(report), report, path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert data.endswith(b"IEND\xaeB`\x82")
    assert int.from_bytes(data[16:20], "big") == 1600
    plot_scales(scales_of(report), None, str(path))
    assert path.read_bytes() != data
    assert list(tmp_path.iterdir()) == [path]


def test_signs_of_formulas_in_a_name_are_drawn_as_they_are(tmp_path):
    report = found(model="C:\\models\\$x_{1$ and\nmore")
    title = scales_figure(scales_of(report), report).get_suptitle()
    assert title.splitlines() == [
        r"C:\models\$x_{1$ and more",
        "scales per head, from 5000 tokens of 2 texts, errors on 400 other tokens",
    ]
    plot_scales(scales_of(report), report, tmp_path / "x.png")


def test_pyplot_is_neither_asked_nor_left_with_a_figure(tmp_path):
    import matplotlib as mpl

    settings = dict(mpl.rcParams)
    plotted_before = "matplotlib.pyplot" in sys.modules
    plot_scales(KVScales.uniform(2), None, tmp_path / "x.png")
    assert ("matplotlib.pyplot" in sys.modules) == plotted_before
    assert dict(mpl.rcParams) == settings


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing/x.png", r"expected a file in a folder that exists, got .*; create"),
        ("file/x.png", r"expected a file in a folder that exists"),
        ("x.pdf", r"expected a file that ends in \.png, got"),
        ("x", r"expected a file that ends in \.png, got"),
        ("folder.png", r"expected a writable file, got"),
    ],
)
def test_a_wrong_path_is_an_error_and_leaves_nothing(tmp_path, name, message):
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ConfigError, match=f"plot: {message}"):
        plot_scales(KVScales.uniform(2), None, tmp_path / name)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder.png"]


def test_a_picture_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    path = tmp_path / "x.png"
    path.write_bytes(b"before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        plot_scales(KVScales.uniform(2), None, path)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"not installed; .*: pip install 'hf-fp8kv\[plot\]'"):
        plot_scales(KVScales.uniform(2), None, tmp_path / "x.png")
    assert list(tmp_path.iterdir()) == []
    # tables do without
    assert "448" in shown(KVScales.uniform(2), None)
