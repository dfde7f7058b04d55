"""Tests of calibration at positions beyond the windows, at which centers must help as well."""

import pytest
import torch

from hf_fp8kv import ConfigError, FP8PagedCache, KVScales, calibrate, measure
from hf_fp8kv.calibration.divergence import compare_caches
from hf_fp8kv.calibration.rope import FarPositions, find_max_positions, get_last_position, has_rope
from tests.calibration.test_calibrate import OPTIONS, YARN
from tests.helpers.tiny_models import VOCAB, build_variant

pytestmark = pytest.mark.text


def make_texts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCAB, (24,), generator=generator) for _ in range(16)]


@pytest.fixture(scope="module")
def rotating_model():
    """Return a model whose K has a bias that is nearly constant in a window, and rotates beyond it.

    Rotations take 200 to 400 positions, except that the first pair rotates 1 radian per position.
    """
    model = build_variant("qwen2", num_hidden_layers=2)[0]
    periods = (200, 230, 260, 300, 330, 360, 400)
    model.model.rotary_emb.inv_freq.copy_(torch.tensor([1.0, *(2 * torch.pi / n for n in periods)]))
    with torch.no_grad():
        for layer in model.model.layers:
            bias = torch.full((2, 16), 30.0)
            bias[:, [0, 8]] = 0.0
            layer.self_attn.k_proj.bias.copy_(bias.flatten())
    return model


@pytest.fixture(scope="module")
def near_scales(rotating_model):
    """Return scales calibrated only on the windows. The center is the mean of the windows."""
    return calibrate(rotating_model, make_texts(), max_position=24, **OPTIONS)


@pytest.fixture(scope="module")
def uncentered_scales(rotating_model):
    return calibrate(rotating_model, make_texts(), center=False, **OPTIONS)


def measure_kl(model, scales, first_position: int | None) -> float:
    model.set_attn_implementation("fp8_paged")
    factories = {"static": lambda: FP8PagedCache(model.config, dtype="fp8_e4m3", scales=scales)}
    ids = torch.stack(make_texts()[:8])
    scores = compare_caches(model, ids, factories, num_prefill=12, first_position=first_position)
    model.set_attn_implementation("sdpa")
    return scores["static"].summarize().kl


def test_centers_that_help_only_in_windows_are_rejected(
    rotating_model, near_scales, uncentered_scales
):
    scales = calibrate(rotating_model, make_texts(), **OPTIONS)
    assert scales.report.max_position == 192
    assert near_scales.centered
    assert near_scales.report.max_position is None
    assert near_scales.report.far_quality == ()
    # The test is valid only if such centers help within the windows and hurt beyond them.
    kl, uncentered_kl = (
        measure_kl(rotating_model, x, None) for x in (near_scales, uncentered_scales)
    )
    assert kl < 0.7 * uncentered_kl
    for position in (100, 168):
        uncentered_kl = measure_kl(rotating_model, uncentered_scales, position)
        assert measure_kl(rotating_model, near_scales, position) > 1.3 * uncentered_kl
        assert measure_kl(rotating_model, scales, position) <= 1.02 * uncentered_kl


def test_the_report_compares_far_positions(rotating_model, near_scales, uncentered_scales):
    report = uncentered_scales.report
    names = [row.cache for row in report.far_quality]
    assert names == [row.cache for row in report.quality]
    assert report.far_quality[0].kl == 0.0
    assert report.far_quality[1].tokens == report.quality[1].tokens > 0
    # Centers of the windows decrease the KL at near positions and increase it at far positions.
    near_report = measure(rotating_model, near_scales, make_texts(), max_length=24, progress=False)
    assert near_report.max_position == 192
    assert near_report.far_quality[1].kl > 1.3 * near_report.quality[1].kl
    assert near_report.far_quality[2].kl < 1.3 * near_report.quality[2].kl  # dynamic scales


def test_positions_at_which_the_model_fails_are_skipped(rotating_model, monkeypatch, caplog):
    """Scales are calibrated without centers if the model fails at far positions."""
    rope_forward = rotating_model.model.rotary_emb.forward

    def forward(x, position_ids):
        # The rotation is measured at positions up to 128, which is half of 256.
        if int(position_ids.max()) >= 160:
            raise IndexError("no such position")
        return rope_forward(x, position_ids)

    monkeypatch.setattr(rotating_model.model.rotary_emb, "forward", forward)
    scales = calibrate(rotating_model, make_texts(), **OPTIONS)
    assert not scales.centered
    assert scales.report.centers.startswith("No centers: ")
    assert "RoPE rotates K with the position, and " in scales.report.centers
    assert "no such position" in scales.report.centers
    assert scales.report.quality
    assert scales.report.far_quality == ()
    assert "positions up to 192 are not tried" in caplog.text


def test_windows_are_placed_over_the_whole_range_of_positions():
    windows = [torch.arange(n) for n in (24, 20, 10)]
    batches = FarPositions(200).place(windows, 8)
    assert [batch.num_tokens for batch in batches] == [24, 20, 10] * 2 + [24, 20]
    starts = [batch.first_position for batch in batches]
    assert starts[0] == 176  # the last token is at position 199
    assert all(0 < batch.first_position <= 200 - batch.num_tokens for batch in batches)
    # The starts cover the range, at irregular distances.
    fractions = sorted(x.first_position / (200 - x.num_tokens) for x in batches)
    gaps = [upper - lower for lower, upper in zip([0.0, *fractions], fractions, strict=False)]
    assert max(gaps) < 0.2
    assert min(gaps) > 0.05
    assert len({round(gap, 2) for gap in gaps}) > 1
    assert [batch.first_position for batch in FarPositions(200).place(windows)] == starts[:3]
    assert [batch.num_tokens for batch in FarPositions(24).place(windows)] == [20, 10]
    assert FarPositions(10).place(windows, 8) == []
    assert FarPositions(200, "cannot").place(windows, 8) == []


def test_far_positions_are_limited_by_the_model():
    model = build_variant("llama")[0]  # 256 positions
    assert [get_last_position(model, n, None) for n in (8, 24, 100, 1000)] == [64, 192, 256, 256]
    assert get_last_position(model, 24, 256) == 256
    assert get_last_position(model, 24, 10) == 10
    with pytest.raises(ConfigError, match=r"max_position: expected at most 256.*got 257"):
        calibrate(model, make_texts(), max_position=257, **OPTIONS)
    with pytest.raises(ConfigError, match="max_position: expected a whole number"):
        measure(model, KVScales.uniform(2), make_texts(), max_position=0)
    bloom, _ = build_variant("bloom")  # its config has no number of positions
    assert get_last_position(bloom, 24, 10**6) == 10**6


def test_position_limit_and_rope_are_read_from_the_config():
    variants = ("llama", {"rope_parameters": YARN}), ("llama", {}), ("gpt2", {})
    models = [build_variant(name, **fields)[0] for name, fields in variants]
    assert [find_max_positions(model) for model in models] == [256, 256, 256]
    assert [has_rope(model) for model in models] == [True, True, False]
    assert has_rope(build_variant("gemma3_text")[0])
