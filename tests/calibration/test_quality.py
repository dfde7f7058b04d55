"""Tests of `measure`: statistics of K and V, errors of formats, predictions, and the digest."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm

from hf_fp8kv import ConfigError, KVScales, ScaleError, calibrate, measure
from hf_fp8kv.calibration import quality
from hf_fp8kv.formats import FORMATS
from hf_fp8kv.formats.codec import compute_dynamic_scale, decode, encode, search_scale
from hf_fp8kv.scales.layer_scales import LayerScales
from tests.calibration.test_calibrate import EXPLICIT_PLAN, OPTIONS, make_texts
from tests.helpers.tiny_models import build_variant

pytestmark = pytest.mark.text

NUM_HEADS = 2
# A value saturates above this limit, which is half a step above the largest code.
SATURATION_LIMITS = {
    "fp8_e4m3": 464.0, "fp8_e5m2": 61440.0, "fp8_e3m4": 31.5, "fp8_e4m3fnuz": 248.0,
    "fp8_e2m5": 7.9375, "int8": 127.5,
}  # fmt: skip


def measure_layer(monkeypatch, texts, scales: LayerScales, format_name="fp8_e4m3"):
    """Return the statistics of a layer from K and V, `[N, Hkv, D]`, of each text."""
    remaining = iter(texts)

    def observe(model, batch, layers, on_layer):
        on_layer(0, *next(remaining))

    monkeypatch.setattr(quality, "observe", observe)
    job = quality._Job(None, frozenset({0}), FORMATS[format_name], tqdm(disable=True))
    windows = [torch.zeros(len(k), dtype=torch.int64) for k, _ in texts]
    return quality._measure_statistics(job, windows, KVScales({0: scales}))[0]


def make_scales(k: object, v: object, center: torch.Tensor | None = None) -> LayerScales:
    return LayerScales(torch.as_tensor(k), torch.as_tensor(v), center)


def test_nan_in_a_text_is_an_error_that_names_the_layer(monkeypatch):
    k = torch.ones(1, NUM_HEADS, 1)
    with pytest.raises(ConfigError, match="layer 0: expected finite K and V"):
        measure_layer(monkeypatch, [(k, k * torch.nan)], make_scales(1.0, 1.0))


def compute_error(
    values: torch.Tensor, stored_values: torch.Tensor, scale: torch.Tensor, fmt
) -> float:
    """Return the RMS error of `stored_values` after encoding, relative to the RMS of `values`."""
    error = decode(encode(stored_values / scale, fmt), fmt) * scale - stored_values
    return (error.double().square().sum() / values.double().square().sum()).sqrt().item()


@pytest.mark.parametrize(("name", "is_centered"), [("fp8_e4m3", True), ("fp8_e4m3fnuz", False)])
def test_errors_of_every_format_match_the_codec(monkeypatch, is_centered, name):
    """K has a scale per head, and V a scale per channel. K and V have different head sizes."""
    k, v = torch.randn(40, NUM_HEADS, 6) + 1.0, torch.randn(40, NUM_HEADS, 4)
    k[3, 1, 2] = -7.0  # saturates, with and without a center
    k_scale = torch.tensor([[0.008], [0.011]])
    v_scale = torch.linspace(0.006, 0.02, NUM_HEADS * 4).view(NUM_HEADS, 4)
    center = torch.randn(NUM_HEADS, 6) if is_centered else None
    stats = measure_layer(monkeypatch, [(k, v)], make_scales(k_scale, v_scale, center), name)
    names = dict.fromkeys(("fp8_e4m3", "fp8_e5m2", "fp8_e3m4", "fp8_e2m5", "int8", name))
    error_names = [*names, *(f"dynamic {format_name}" for format_name in names)]
    assert list(stats.k.error) == list(stats.v.error) == error_names
    stored_k = k - center if is_centered else k
    units = stored_k / (k_scale * FORMATS[name].scale_from_e4m3)
    saturated_share = (units.abs() > SATURATION_LIMITS[name]).double().mean().item()
    assert stats.k.saturated == pytest.approx(saturated_share)
    assert stats.k.amax == tuple(k.abs().amax((0, 2)).tolist())
    for format_name in names:
        fmt = FORMATS[format_name]
        dynamic_k = search_scale(k, fmt).float()[..., None]
        dynamic_v = compute_dynamic_scale(v, fmt).float()[..., None]
        factor = fmt.scale_from_e4m3
        assert stats.k.error[format_name] == pytest.approx(
            compute_error(k, stored_k, k_scale * factor, fmt)
        )
        assert stats.v.error[format_name] == pytest.approx(
            compute_error(v, v, v_scale * factor, fmt)
        )
        k_error, v_error = compute_error(k, k, dynamic_k, fmt), compute_error(v, v, dynamic_v, fmt)
        assert stats.k.error[f"dynamic {format_name}"] == pytest.approx(k_error, rel=1e-3)
        assert stats.v.error[f"dynamic {format_name}"] == pytest.approx(v_error, rel=1e-3)


@pytest.fixture(scope="module")
def llama() -> Any:
    return build_variant("llama", num_hidden_layers=3)[0]


@pytest.fixture(scope="module")
def llama_scales(llama: Any) -> KVScales:
    return calibrate(llama, make_texts(), **OPTIONS)


def test_the_report_describes_the_run_and_each_layer(llama, llama_scales):
    texts = make_texts(5, seed=9)
    report = measure(llama, llama_scales, texts, **OPTIONS)
    assert report.scales_digest == llama_scales.digest
    assert (report.dtype, report.granularity) == ("fp8_e4m3", "head")
    assert report.tokens == sum(map(len, texts))
    unquantized, *quantized = report.quality
    assert (unquantized.kl, unquantized.top1) == (0.0, 1.0)
    assert all(0 < row.kl < 0.5 and row.tokens == unquantized.tokens for row in quantized)
    assert set(report.layers) == set(llama_scales.layers)
    assert 0.01 < report.layers[0].v.error["fp8_e4m3"] < 0.04
    assert report.to_dict()["layers"]["0"]["k"]["amax"] == list(report.layers[0].k.amax)


def test_measure_detects_wrong_scales(llama, llama_scales, tmp_path, caplog):
    scales, texts = llama_scales, make_texts(5, seed=9)
    scales.save_pretrained(tmp_path)
    report = measure(llama, tmp_path, texts, **OPTIONS)
    assert report.scales_digest == scales.digest
    small_scales = KVScales({i: type(x)(x.k / 8, x.v) for i, x in scales.layers.items()})
    for index, layer in measure(llama, small_scales, texts, **OPTIONS).layers.items():
        assert layer.k.saturated > 0.05
        assert layer.v == report.layers[index].v
    large_scales = KVScales({i: type(x)(x.k, x.v * 2.0**14) for i, x in scales.layers.items()})
    large_report = measure(llama, large_scales, texts, **OPTIONS)
    assert large_report.layers[0].v.underflow > 0.02
    ratio = large_report.quality[1].kl / large_report.quality[2].kl
    assert ratio > 1.5
    assert f"{ratio:.1f} times the KL of dynamic" in caplog.text


@pytest.mark.parametrize(
    ("scales", "options", "error", "message"),
    [
        (1.0, {}, ConfigError, "scales: expected KVScales, a path"),
        (KVScales.uniform(2), {}, ScaleError, "expected scales for every paged layer"),
        (KVScales.uniform(3), {"dtype": "model"}, ConfigError, "dtype: expected an 8-bit format"),
        (KVScales.uniform(3), {"dtype": "int3"}, ConfigError, "dtype: expected one of"),
    ],
)
def test_scales_that_cannot_be_measured_are_rejected(llama, scales, options, error, message):
    with pytest.raises(error, match=message):
        measure(llama, scales, make_texts(2), **OPTIONS, **options)


def test_planned_scales_can_be_measured(llama: Any, tmp_path: Path) -> None:
    scales = calibrate(llama, make_texts(6), plan=EXPLICIT_PLAN | {2: EXPLICIT_PLAN[0]}, **OPTIONS)
    scales.save_pretrained(tmp_path)
    report = measure(llama, tmp_path, make_texts(6, seed=3), **OPTIONS)
    assert report.dtype == "plan"
    assert [row.cache for row in report.quality][1:3] == ["static, the plan", "dynamic, the plan"]
    # Errors are measured on stored values, and rotated values have different errors.
    for index in (0, 2):
        error = report.layers[index].k.error
        assert 0 < error["fp8_e2m5"] < error["fp8_e4m3"]
    with pytest.raises(ConfigError, match="dtype: expected None"):
        measure(llama, scales, make_texts(6), dtype="fp8", progress=False)


def test_the_digest_covers_every_value_and_shape():
    per_tensor, per_head, per_channel = torch.tensor(1.0), torch.ones(2, 1), torch.ones(2, 4)
    sides = [(per_head, per_head), (2 * per_head, per_head), (per_head, 2 * per_head)]
    sides += [(per_tensor, per_head), (per_head, per_tensor), (torch.ones(1, 2), per_head)]
    sides += [(per_head, per_channel), (per_head, per_head, 0 * per_channel)]
    sides += [(per_head, per_head, 1e-6 * per_channel)]
    layers = [make_scales(*tensors) for tensors in sides]
    all_layers = [{0: layer} for layer in layers] + [
        {1: layers[0]},
        dict.fromkeys((0, 1), layers[0]),
    ]
    assert len({KVScales(layers).digest for layers in all_layers}) == len(all_layers)
    assert KVScales({0: make_scales(*sides[0])}).digest == KVScales({0: layers[0]}).digest


def test_errors_are_measured_on_a_sample_of_all_texts(monkeypatch):
    """Every second of 2,000 tokens is measured, across the boundaries of texts."""
    texts = [(torch.randn(n, NUM_HEADS, 4), torch.randn(n, NUM_HEADS, 4)) for n in (1301, 699)]
    stats = measure_layer(monkeypatch, texts, make_scales(0.01, 0.01))
    all_k = torch.cat([k for k, _ in texts])
    assert stats.k.amax == tuple(all_k.abs().amax((0, 2)).tolist())
    sample = all_k[::2]
    expected = compute_error(sample, sample, torch.tensor(0.01), FORMATS["fp8_e4m3"])
    assert stats.k.error["fp8_e4m3"] == pytest.approx(expected)
