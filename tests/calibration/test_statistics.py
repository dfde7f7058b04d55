"""Statistics in the report of a calibration, and the digest of scales."""

import pytest
import torch
from tqdm import tqdm

from hf_fp8kv import ConfigError, KVScales, calibrate
from hf_fp8kv.calibration import reporting as module
from hf_fp8kv.calibration.observe import Batch, measure_range, merge_tensors
from hf_fp8kv.calibration.reporting import head_amax, measure_statistics
from hf_fp8kv.calibration.stages import CalibrationOptions, Job
from hf_fp8kv.formats import FORMATS
from hf_fp8kv.formats.codec import decode, dynamic_scale, encode, search_scale
from hf_fp8kv.scales.layer_scales import LayerScales
from tests.helpers.tiny_models import VOCAB, tiny

pytestmark = pytest.mark.text

HEADS = 2
AMAX = {"k": (1.0, 2.0), "v": (3.0, 4.0)}
ENDS = "max", "min"
# What a number of each format must pass to be cut off: half a step above the largest.
OVER = {
    "fp8_e4m3": 464.0, "fp8_e5m2": 61440.0, "fp8_e3m4": 31.5, "fp8_e4m3fnuz": 248.0,
    "fp8_e2m5": 7.9375, "int8": 127.5,
}  # fmt: skip


def found_of(monkeypatch, texts, scales: LayerScales, fmt="fp8_e4m3"):
    """The statistics of one layer whose K and V are `texts`, a list of pairs `[N, Hkv, D]`."""
    left = iter(texts)

    def observe(model, batch, layers, seen):
        seen(0, *next(left))

    monkeypatch.setattr(module, "observe", observe)
    options = CalibrationOptions("head", FORMATS[fmt], 1.0, False)
    job = Job(None, frozenset({0}), options, tqdm(disable=True))
    batches = [Batch((torch.zeros(len(k), dtype=torch.int64),)) for k, _ in texts]
    ranges = {f"{side}_{end}": torch.tensor(AMAX[side])[:, None] for side in "kv" for end in ENDS}
    return measure_statistics(job, batches, KVScales({0: scales}), {0: ranges})[0]


def of(k: object, v: object, center: torch.Tensor | None = None) -> LayerScales:
    return LayerScales(torch.as_tensor(k), torch.as_tensor(v), center)


def filled(*numbers: float) -> torch.Tensor:
    """`[N, 2, 1]`, the same for both heads."""
    return torch.tensor(numbers)[:, None, None].expand(-1, HEADS, 1).clone()


# -- what saturates, and what vanishes -------------------------------------------------------------


@pytest.mark.parametrize("name", list(OVER))
def test_saturated_is_what_is_cut_off_in_this_format(monkeypatch, name):
    """One number of four is past the largest, in numbers as the scale's format holds them."""
    scale, fmt = 0.25, FORMATS[name]
    unit = scale * fmt.scale_from_e4m3
    edge = OVER[name]
    k = filled(0.999 * edge, -fmt.max, 1.001 * edge, 1.0) * unit
    v = filled(-1.001 * edge, 1.001 * edge, 0.0, 0.9 * edge) * unit
    found = found_of(monkeypatch, [(k, v)], of(scale, scale), name)
    assert found.k.saturated == 0.25
    assert found.v.saturated == 0.5


def test_each_head_and_channel_has_its_own_scale(monkeypatch):
    x = torch.full((4, HEADS, 2), 447.0)
    k, v = torch.tensor([[1.0], [0.5]]), torch.tensor([[1.0, 1.0], [1.0, 0.5]])
    found = found_of(monkeypatch, [(x, x)], of(k, v))
    assert (found.k.saturated, found.v.saturated) == (0.5, 0.25)


@pytest.mark.parametrize("name", list(OVER))
def test_underflow_is_what_becomes_zero_and_was_not(monkeypatch, name):
    fmt = FORMATS[name]
    half = 0.5 * fmt.min_subnormal * fmt.scale_from_e4m3 * 0.25
    k = filled(0.99 * half, -0.99 * half, 1.01 * half, 0.0, 0.0)
    v = filled(0.0, 0.0, 0.0, 1.01 * half, 1e3 * half)
    found = found_of(monkeypatch, [(k, v)], of(0.25, 0.25), name)
    assert found.k.underflow == pytest.approx(2 / 3)
    assert found.v.underflow == 0.0


def test_a_center_is_subtracted_first(monkeypatch):
    """Neither saturates what is near the center, nor does the center itself vanish."""
    center = torch.tensor([[1000.0], [-1000.0]])
    k = center + filled(0.0, 100.0, 448.0, 0.25 * 2.0**-10)
    found = found_of(monkeypatch, [(k, k)], of(1.0, 1.0, center))
    assert found.k.saturated == 0.0
    assert found.k.underflow == pytest.approx(1 / 3)
    assert found.v.saturated == 1.0  # a center is of K alone
    assert found.centered
    assert not found_of(monkeypatch, [(k, k)], of(1.0, 1.0)).centered
    away = found_of(monkeypatch, [(-k, k)], of(1.0, 1.0, center))
    assert away.k.saturated == 1.0


def test_texts_add_up(monkeypatch):
    """By their numbers: three of 10 tokens saturate, whichever text they are in."""
    one, two = filled(500.0, 1.0), filled(*[500.0] * 2, *[1.0] * 6)
    found = found_of(monkeypatch, [(one, two[:2]), (two, one.repeat(4, 1, 1))], of(1.0, 1.0))
    assert found.k.saturated == pytest.approx(0.3)
    assert found.v.saturated == pytest.approx(0.6)


def test_no_text_and_nothing_but_zeros(monkeypatch):
    nothing = found_of(monkeypatch, [], of(1.0, 1.0))
    zeros = found_of(monkeypatch, [(filled(0.0), filled(0.0))], of(1.0, 1.0))
    for side in (nothing.k, nothing.v, zeros.k, zeros.v):
        assert (side.saturated, side.underflow) == (0.0, 0.0)
        assert set(side.error.values()) == {0.0}
    assert (nothing.k.amax, nothing.v.amax) == (AMAX["k"], AMAX["v"])


def test_nan_is_an_error_that_names_the_layer(monkeypatch):
    with pytest.raises(ConfigError, match="layer 0: expected finite K and V"):
        found_of(monkeypatch, [(filled(1.0), filled(torch.nan))], of(1.0, 1.0))


# -- errors ----------------------------------------------------------------------------------------


def naive_error(x: torch.Tensor, kept: torch.Tensor, unit: torch.Tensor, fmt) -> float:
    """Of `kept`, stored by the specification, in relation to `x`."""
    lost = decode(encode(kept / unit, fmt), fmt) * unit - kept
    return (lost.double().square().sum() / x.double().square().sum()).sqrt().item()


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e4m3fnuz"])
def test_errors_of_every_format(monkeypatch, centered, name):
    """Heads and channels have scales of their own, and K and V other head sizes."""
    k, v = torch.randn(40, HEADS, 6) + 1.0, torch.randn(40, HEADS, 4)
    k[3, 1, 2] = 7.0  # saturates
    k_scale = torch.tensor([[0.008], [0.011]])
    v_scale = torch.linspace(0.006, 0.02, HEADS * 4).view(HEADS, 4)
    center = torch.randn(HEADS, 6) if centered else None
    found = found_of(monkeypatch, [(k, v)], of(k_scale, v_scale, center), name)
    names = dict.fromkeys(("fp8_e4m3", "fp8_e5m2", "fp8_e3m4", "fp8_e2m5", "int8", name))
    both = [*names, *(f"dynamic {n}" for n in names)]
    assert found.centered == centered
    assert list(found.k.error) == list(found.v.error) == both
    kept = k - center if centered else k
    for n in names:
        fmt = FORMATS[n]
        dynamic_k = search_scale(k, fmt).float()[..., None]
        dynamic_v = dynamic_scale(v, fmt).float()[..., None]
        unit = fmt.scale_from_e4m3
        assert found.k.error[n] == pytest.approx(naive_error(k, kept, k_scale * unit, fmt))
        assert found.v.error[n] == pytest.approx(naive_error(v, v, v_scale * unit, fmt))
        assert found.k.error[f"dynamic {n}"] == pytest.approx(
            naive_error(k, k, dynamic_k, fmt), rel=1e-3
        )
        assert found.v.error[f"dynamic {n}"] == pytest.approx(
            naive_error(v, v, dynamic_v, fmt), rel=1e-3
        )


def test_errors_of_some_tokens_of_every_text(monkeypatch):
    """Of 2,000 tokens every second one is measured, whichever text it is in."""
    texts = [(torch.randn(n, HEADS, 4), torch.randn(n, HEADS, 4)) for n in (1301, 699)]
    found = found_of(monkeypatch, texts, of(0.01, 0.01))
    some = torch.cat([k for k, _ in texts])[::2]
    fmt = FORMATS["fp8_e4m3"]
    expected = naive_error(some, some, torch.tensor(0.01), fmt)
    assert found.k.error["fp8_e4m3"] == pytest.approx(expected)


def test_amax_of_both_signs_and_every_head():
    k = torch.tensor([[[1.0, -5.0], [2.0, 0.5]], [[4.0, 0.0], [3.0, -2.5]]])
    parts = measure_range(k, -2 * k, None, None)
    assert head_amax(parts) == {"k": (5.0, 3.0), "v": (10.0, 6.0)}
    both = merge_tensors(parts, measure_range(-3 * k[1:], k[1:], None, None))
    assert head_amax(both) == {"k": (12.0, 9.0), "v": (10.0, 6.0)}


# -- the digest of scales --------------------------------------------------------------------------


def test_the_digest_is_of_every_number_and_shape():
    one, two, center = torch.ones(2, 1), torch.ones(2, 1), torch.zeros(2, 4)
    other = center.clone()
    other[1, 3] = 1e-6
    layers = [
        of(one, two),
        of(2 * one, two),
        of(one, 2 * two),
        of(one, two, center),
        of(one, two, other),
        of(torch.tensor(1.0), two),
        of(one, torch.tensor(1.0)),
        of(torch.ones(1, 2), two),
        of(one, torch.ones(2, 4)),
        of(one, torch.ones(1, 2)),
    ]
    digests = [KVScales({0: layer}).digest for layer in layers]
    assert len(set(digests)) == len(layers)
    assert KVScales({1: layers[0]}).digest not in digests
    assert KVScales({0: layers[0], 1: layers[0]}).digest not in digests
    assert KVScales({0: of(one.clone(), two.clone())}).digest == digests[0]


# -- the length of texts ---------------------------------------------------------------------------


def test_a_long_text_is_cut_to_the_positions_of_the_model():
    model = tiny("llama", num_hidden_layers=1, max_position_embeddings=32)[0]
    asked: list[int] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: asked.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    text = torch.arange(200) % (VOCAB - 3) + 3
    calibrate(model, [text], max_length=1024, held_out=0, progress=False)
    assert max(asked) == 32
