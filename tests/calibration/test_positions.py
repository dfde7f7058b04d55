"""Tests of calibration at positions beyond the windows, where centers must also help."""

import pytest
import torch

from hf_fp8kv import ConfigError, FP8PagedCache, KVScales, calibrate, measure
from hf_fp8kv.calibration.divergence import compare_caches
from hf_fp8kv.calibration.rope import FarPositions, find_max_positions, has_rope, resolve_limit
from tests.calibration.test_calibrate import QUIET, YARN
from tests.helpers.tiny_models import VOCAB, tiny

pytestmark = pytest.mark.text


def texts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCAB, (24,), generator=generator) for _ in range(16)]


@pytest.fixture(scope="module")
def rotating():
    """Return a model whose K has a bias that is constant within a window and rotates beyond it.

    All pairs take 200 to 400 positions per turn, except the first pair, which rotates by 1 radian.
    """
    model = tiny("qwen2", num_hidden_layers=2)[0]
    inverse = torch.tensor([1.0] + [2 * torch.pi / n for n in (200, 230, 260, 300, 330, 360, 400)])
    model.model.rotary_emb.inv_freq.copy_(inverse)
    with torch.no_grad():
        for layer in model.model.layers:
            bias = torch.full((2, 16), 30.0)
            bias[:, [0, 8]] = 0.0
            layer.self_attn.k_proj.bias.copy_(bias.flatten())
    return model


@pytest.fixture(scope="module")
def near(rotating):
    """Return scales calibrated only on the windows. Their center is the mean of the windows."""
    return calibrate(rotating, texts(), max_position=24, **QUIET)


@pytest.fixture(scope="module")
def plain(rotating):
    return calibrate(rotating, texts(), center=False, **QUIET)


def kl_at(model, scales, first: int | None) -> float:
    model.set_attn_implementation("fp8_paged")
    caches = {"static": lambda: FP8PagedCache(model.config, dtype="fp8_e4m3", scales=scales)}
    ids = torch.stack(texts()[:8])
    scores = compare_caches(model, ids, caches, prefill=12, first_position=first)
    model.set_attn_implementation("sdpa")
    return scores["static"].summarize().kl


def test_centers_that_hold_only_within_the_windows_are_rejected(rotating, near, plain):
    scales = calibrate(rotating, texts(), **QUIET)
    assert scales.report.max_position == 192
    assert near.centered
    assert near.report.max_position is None
    assert near.report.far_quality == ()
    # The test case is valid: such centers help in the windows and hurt beyond them.
    assert kl_at(rotating, near, None) < 0.7 * kl_at(rotating, plain, None)
    for first in (100, 168):
        best = kl_at(rotating, plain, first)
        assert kl_at(rotating, near, first) > 1.3 * best
        assert kl_at(rotating, scales, first) <= 1.02 * best


def test_the_report_compares_other_positions(rotating, near, plain):
    good = plain.report
    names = [row.cache for row in good.far_quality]
    assert names == [row.cache for row in good.quality]
    assert good.far_quality[0].kl == 0.0
    assert good.far_quality[1].tokens == good.quality[1].tokens > 0
    # Centers of the windows are good at near positions and bad at far positions.
    bad = measure(rotating, near, texts(), max_length=24, progress=False)
    assert bad.max_position == 192
    assert bad.far_quality[1].kl > 1.3 * bad.quality[1].kl
    assert bad.far_quality[2].kl < 1.3 * bad.quality[2].kl  # dynamic scales


def test_failing_positions_are_skipped(rotating, monkeypatch, caplog):
    """Scales are calibrated without centers if the model fails at far positions."""
    original = rotating.model.rotary_emb.forward

    def forward(x, position_ids):
        # The rotation is measured at positions up to 128, half of 256.
        if int(position_ids.max()) >= 160:
            raise IndexError("no such position")
        return original(x, position_ids)

    monkeypatch.setattr(rotating.model.rotary_emb, "forward", forward)
    scales = calibrate(rotating, texts(), **QUIET)
    assert not scales.centered
    assert scales.report.centers.startswith("No centers: ")
    assert "RoPE rotates K with the position, and " in scales.report.centers
    assert "no such position" in scales.report.centers
    assert scales.report.quality
    assert scales.report.far_quality == ()
    assert "positions up to 192 are not tried" in caplog.text


def test_windows_are_spread_over_all_positions():
    windows = [torch.arange(n) for n in (24, 20, 10)]
    batches = FarPositions(200).place(windows, 8)
    assert [batch.tokens for batch in batches] == [24, 20, 10] * 2 + [24, 20]
    starts = [batch.start for batch in batches]
    assert starts[0] == 176  # its last token is at 199
    assert all(
        0 < start <= 200 - batch.tokens for start, batch in zip(starts, batches, strict=True)
    )
    # The starts cover the range without a period.
    fractions = sorted(s / (200 - b.tokens) for s, b in zip(starts, batches, strict=True))
    gaps = [b - a for a, b in zip([0.0, *fractions], fractions, strict=False)]
    assert max(gaps) < 0.2
    assert min(gaps) > 0.05
    assert len({round(gap, 2) for gap in gaps}) > 1
    assert [batch.start for batch in FarPositions(200).place(windows)] == starts[:3]
    assert [batch.tokens for batch in FarPositions(24).place(windows)] == [20, 10]
    assert FarPositions(10).place(windows, 8) == []
    assert FarPositions(200, "cannot").place(windows, 8) == []


def test_the_reach_is_at_most_the_positions_of_the_model():
    model = tiny("llama")[0]  # 256 positions
    assert [resolve_limit(model, n, None) for n in (8, 24, 100, 1000)] == [64, 192, 256, 256]
    assert resolve_limit(model, 24, 256) == 256
    assert resolve_limit(model, 24, 10) == 10
    with pytest.raises(ConfigError, match=r"max_position: expected at most 256.*got 257"):
        calibrate(model, texts(), max_position=257, **QUIET)
    with pytest.raises(ConfigError, match="max_position: expected a whole number"):
        measure(model, KVScales.uniform(2), texts(), max_position=0)
    assert resolve_limit(tiny("bloom")[0], 24, 10**6) == 10**6  # bloom has no largest position


def test_position_limit_and_rope_are_read_from_the_config():
    yarn_llama, llama, gpt2 = (
        tiny(name, **config)[0]
        for name, config in (("llama", {"rope_parameters": YARN}), ("llama", {}), ("gpt2", {}))
    )
    assert [find_max_positions(model) for model in (yarn_llama, llama, gpt2)] == [256, 256, 256]
    assert [has_rope(model) for model in (yarn_llama, llama, gpt2)] == [True, True, False]
    assert has_rope(tiny("gemma3_text")[0])
