"""Tests of the statistics in the report of a calibration, and of the digest of scales."""

import pytest
import torch
from tqdm import tqdm

from hf_fp8kv import ConfigError, KVScales, calibrate
from hf_fp8kv.calibration import reporting as reporting_module
from hf_fp8kv.calibration.observe import Batch, measure_range, merge_tensors
from hf_fp8kv.calibration.reporting import compute_head_amax, measure_statistics
from hf_fp8kv.calibration.stages import CalibrationOptions, Job
from hf_fp8kv.formats import FORMATS
from hf_fp8kv.formats.codec import compute_dynamic_scale, decode, encode, search_scale
from hf_fp8kv.scales.layer_scales import LayerScales
from tests.helpers.tiny_models import VOCAB, build_variant

pytestmark = pytest.mark.text

NUM_HEADS = 2
AMAX = {"k": (1.0, 2.0), "v": (3.0, 4.0)}
ENDS = "max", "min"
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

    monkeypatch.setattr(reporting_module, "observe", observe)
    options = CalibrationOptions("head", FORMATS[format_name], 1.0, False)
    job = Job(None, frozenset({0}), options, tqdm(disable=True))
    batches = [Batch((torch.zeros(len(k), dtype=torch.int64),)) for k, _ in texts]
    ranges = {f"{side}_{end}": torch.tensor(AMAX[side])[:, None] for side in "kv" for end in ENDS}
    return measure_statistics(job, batches, KVScales({0: scales}), {0: ranges})[0]


def make_scales(k: object, v: object, center: torch.Tensor | None = None) -> LayerScales:
    return LayerScales(torch.as_tensor(k), torch.as_tensor(v), center)


def make_values(*values: float) -> torch.Tensor:
    """Return values, `[N, 2, 1]`, which are equal for both heads."""
    return torch.tensor(values)[:, None, None].expand(-1, NUM_HEADS, 1).clone()


# -- saturation and underflow ----------------------------------------------------------------------


@pytest.mark.parametrize("name", list(SATURATION_LIMITS))
def test_values_beyond_the_largest_code_saturate(monkeypatch, name):
    """One of four values of K is too large. Values are in units of the format's scale."""
    scale, fmt = 0.25, FORMATS[name]
    unit = scale * fmt.scale_from_e4m3
    limit = SATURATION_LIMITS[name]
    k = make_values(0.999 * limit, -fmt.max, 1.001 * limit, 1.0) * unit
    v = make_values(-1.001 * limit, 1.001 * limit, 0.0, 0.9 * limit) * unit
    stats = measure_layer(monkeypatch, [(k, v)], make_scales(scale, scale), name)
    assert stats.k.saturated == 0.25
    assert stats.v.saturated == 0.5


def test_each_head_and_channel_has_a_separate_scale(monkeypatch):
    x = torch.full((4, NUM_HEADS, 2), 447.0)
    k, v = torch.tensor([[1.0], [0.5]]), torch.tensor([[1.0, 1.0], [1.0, 0.5]])
    stats = measure_layer(monkeypatch, [(x, x)], make_scales(k, v))
    assert (stats.k.saturated, stats.v.saturated) == (0.5, 0.25)


@pytest.mark.parametrize("name", list(SATURATION_LIMITS))
def test_nonzero_values_that_become_zero_underflow(monkeypatch, name):
    fmt = FORMATS[name]
    limit = 0.5 * fmt.min_subnormal * fmt.scale_from_e4m3 * 0.25
    k = make_values(0.99 * limit, -0.99 * limit, 1.01 * limit, 0.0, 0.0)
    v = make_values(0.0, 0.0, 0.0, 1.01 * limit, 1e3 * limit)
    stats = measure_layer(monkeypatch, [(k, v)], make_scales(0.25, 0.25), name)
    assert stats.k.underflow == pytest.approx(2 / 3)
    assert stats.v.underflow == 0.0


def test_saturation_and_underflow_are_relative_to_the_center(monkeypatch):
    """Values near the center do not saturate, and a value at the center does not underflow."""
    center = torch.tensor([[1000.0], [-1000.0]])
    k = center + make_values(0.0, 100.0, 448.0, 0.25 * 2.0**-10)
    stats = measure_layer(monkeypatch, [(k, k)], make_scales(1.0, 1.0, center))
    assert stats.k.saturated == 0.0
    assert stats.k.underflow == pytest.approx(1 / 3)
    assert stats.v.saturated == 1.0  # only K has a center
    assert stats.centered
    assert not measure_layer(monkeypatch, [(k, k)], make_scales(1.0, 1.0)).centered
    opposite_stats = measure_layer(monkeypatch, [(-k, k)], make_scales(1.0, 1.0, center))
    assert opposite_stats.k.saturated == 1.0


def test_shares_are_of_the_values_of_all_texts(monkeypatch):
    """Three of 10 tokens of K saturate, and 6 of 10 tokens of V. The texts have 2 and 8 tokens."""
    short, long = make_values(500.0, 1.0), make_values(*[500.0] * 2, *[1.0] * 6)
    texts = [(short, long[:2]), (long, short.repeat(4, 1, 1))]
    stats = measure_layer(monkeypatch, texts, make_scales(1.0, 1.0))
    assert stats.k.saturated == pytest.approx(0.3)
    assert stats.v.saturated == pytest.approx(0.6)


def test_statistics_of_no_text_and_of_zeros_are_zero(monkeypatch):
    empty_stats = measure_layer(monkeypatch, [], make_scales(1.0, 1.0))
    zeros = make_values(0.0)
    zero_stats = measure_layer(monkeypatch, [(zeros, zeros)], make_scales(1.0, 1.0))
    for side in (empty_stats.k, empty_stats.v, zero_stats.k, zero_stats.v):
        assert (side.saturated, side.underflow) == (0.0, 0.0)
        assert set(side.error.values()) == {0.0}
    assert (empty_stats.k.amax, empty_stats.v.amax) == (AMAX["k"], AMAX["v"])


def test_nan_in_a_text_is_an_error_that_names_the_layer(monkeypatch):
    texts = [(make_values(1.0), make_values(torch.nan))]
    with pytest.raises(ConfigError, match="layer 0: expected finite K and V"):
        measure_layer(monkeypatch, texts, make_scales(1.0, 1.0))


# -- errors ----------------------------------------------------------------------------------------


def compute_error(x: torch.Tensor, stored_x: torch.Tensor, unit: torch.Tensor, fmt) -> float:
    """Return the error of `stored_x` after encoding by the specification, relative to `x`."""
    error = decode(encode(stored_x / unit, fmt), fmt) * unit - stored_x
    return (error.double().square().sum() / x.double().square().sum()).sqrt().item()


@pytest.mark.parametrize("is_centered", [False, True])
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e4m3fnuz"])
def test_errors_of_every_format_match_the_codec(monkeypatch, is_centered, name):
    """K has a scale per head, and V one per channel. K and V have different head sizes."""
    k, v = torch.randn(40, NUM_HEADS, 6) + 1.0, torch.randn(40, NUM_HEADS, 4)
    k[3, 1, 2] = 7.0  # saturates
    k_scale = torch.tensor([[0.008], [0.011]])
    v_scale = torch.linspace(0.006, 0.02, NUM_HEADS * 4).view(NUM_HEADS, 4)
    center = torch.randn(NUM_HEADS, 6) if is_centered else None
    stats = measure_layer(monkeypatch, [(k, v)], make_scales(k_scale, v_scale, center), name)
    names = dict.fromkeys(("fp8_e4m3", "fp8_e5m2", "fp8_e3m4", "fp8_e2m5", "int8", name))
    error_names = [*names, *(f"dynamic {n}" for n in names)]
    assert stats.centered == is_centered
    assert list(stats.k.error) == list(stats.v.error) == error_names
    stored_x = k - center if is_centered else k
    for n in names:
        fmt = FORMATS[n]
        dynamic_k = search_scale(k, fmt).float()[..., None]
        dynamic_v = compute_dynamic_scale(v, fmt).float()[..., None]
        unit = fmt.scale_from_e4m3
        assert stats.k.error[n] == pytest.approx(compute_error(k, stored_x, k_scale * unit, fmt))
        assert stats.v.error[n] == pytest.approx(compute_error(v, v, v_scale * unit, fmt))
        k_error, v_error = compute_error(k, k, dynamic_k, fmt), compute_error(v, v, dynamic_v, fmt)
        assert stats.k.error[f"dynamic {n}"] == pytest.approx(k_error, rel=1e-3)
        assert stats.v.error[f"dynamic {n}"] == pytest.approx(v_error, rel=1e-3)


def test_errors_are_measured_on_a_sample_of_all_texts(monkeypatch):
    """Every second of 2,000 tokens is measured, across the boundaries of texts."""
    texts = [(torch.randn(n, NUM_HEADS, 4), torch.randn(n, NUM_HEADS, 4)) for n in (1301, 699)]
    stats = measure_layer(monkeypatch, texts, make_scales(0.01, 0.01))
    sample = torch.cat([k for k, _ in texts])[::2]
    expected = compute_error(sample, sample, torch.tensor(0.01), FORMATS["fp8_e4m3"])
    assert stats.k.error["fp8_e4m3"] == pytest.approx(expected)


def test_amax_covers_both_signs_and_every_head():
    k = torch.tensor([[[1.0, -5.0], [2.0, 0.5]], [[4.0, 0.0], [3.0, -2.5]]])
    ranges = measure_range(k, -2 * k, None, None)
    assert compute_head_amax(ranges) == {"k": (5.0, 3.0), "v": (10.0, 6.0)}
    merged_ranges = merge_tensors(ranges, measure_range(-3 * k[1:], k[1:], None, None))
    assert compute_head_amax(merged_ranges) == {"k": (12.0, 9.0), "v": (10.0, 6.0)}


# -- the digest of scales --------------------------------------------------------------------------


def test_the_digest_covers_every_value_and_shape():
    k, v, center = torch.ones(2, 1), torch.ones(2, 1), torch.zeros(2, 4)
    changed_center = center.clone()
    changed_center[1, 3] = 1e-6
    one = torch.tensor(1.0)
    sides = [(k, v), (2 * k, v), (k, 2 * v), (one, v), (k, one), (torch.ones(1, 2), v)]
    sides += [(k, torch.ones(2, 4)), (k, torch.ones(1, 2))]
    layers = [make_scales(*kv) for kv in sides]
    layers += [make_scales(k, v, x) for x in (center, changed_center)]
    digests = [KVScales({0: layer}).digest for layer in layers]
    assert len(set(digests)) == len(layers)
    assert KVScales({1: layers[0]}).digest not in digests
    assert KVScales({0: layers[0], 1: layers[0]}).digest not in digests
    assert KVScales({0: make_scales(k.clone(), v.clone())}).digest == digests[0]


# -- the length of texts ---------------------------------------------------------------------------


def test_a_long_text_is_cut_to_the_positions_of_the_model():
    model = build_variant("llama", num_hidden_layers=1, max_position_embeddings=32)[0]
    lengths: list[int] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    text = torch.arange(200) % (VOCAB - 3) + 3
    calibrate(model, [text], max_length=1024, held_out=0, progress=False)
    assert max(lengths) == 32
