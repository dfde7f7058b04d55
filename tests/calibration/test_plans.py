"""Calibration of how layers are stored: what is chosen, on what scales, and when it is not."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_fp8kv import ConfigError, FP8PagedCache, KVScales, calibrate
from hf_fp8kv.cache.queries import Queries
from hf_fp8kv.calibration import measure, scoring, stages
from hf_fp8kv.calibration.choose import Trial
from hf_fp8kv.calibration.plans import Candidate, choose_candidates
from hf_fp8kv.formats import FORMATS, LayerPlan, SidePlan
from hf_fp8kv.formats.codec import dynamic_scale, round_to_format
from hf_fp8kv.formats.rotation import rotate
from hf_fp8kv.scales import LayerScales
from tests.cache.test_plans import stored
from tests.calibration.test_calibrate import FEW, NONE, QUIET, seen, texts
from tests.helpers.tiny_models import tiny

E4M3 = LayerPlan.parse("fp8_e4m3", "fp8_e4m3")
BY_HAND = {
    0: LayerPlan.parse("int8 rotated centered", "fp8_e3m4 rotated"),
    1: LayerPlan.parse("fp8_e2m5", "auto"),
}
HALF = QUIET | {"held_out": 50}


def model_with_outliers() -> Any:
    """A biased K, and in the first head of layer 0 a pair of channels with 50 times as much."""
    model = tiny("qwen2", key_bias=30.0)[0]
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        for channel in (3, 3 + 8):
            for part in (attention.k_proj.weight, attention.k_proj.bias):
                part[channel] *= 50
            for head in range(model.config.num_attention_heads // 2):
                attention.q_proj.weight[16 * head + channel] /= 50
                attention.q_proj.bias[16 * head + channel] /= 50
    return model


@pytest.fixture(scope="module")
def state(tmp_path_factory: Any) -> Path:
    return tmp_path_factory.mktemp("state") / "state"


@pytest.fixture(scope="module")
def static(biased: Any, state: Path) -> KVScales:
    return calibrate(biased, texts(12), plan="measured", state=state, **HALF)


@pytest.fixture(scope="module")
def dynamic(biased: Any) -> KVScales:
    return calibrate(biased, texts(12), granularity="token", **HALF)


def kl(scales: KVScales, cache: str) -> list[float]:
    rows = (*scales.report.quality, *scales.report.far_quality)
    return [row.kl for row in rows if row.cache == cache]


def test_a_measured_plan_is_closer_near_and_far(static: KVScales, dynamic: KVScales) -> None:
    assert static.report.centers.startswith("Measured plans in 2 of 2 layers: KL")
    assert static.report.dtype == dynamic.report.dtype == "plan"
    assert dynamic.report.granularity == "token"
    for scales in (static, dynamic):
        for plan in scales.plan.values():
            assert plan.k.centered
            assert plan.v.rotated
    at_most = {"static, the plan": 0.3, "dynamic, the plan": 0.1}
    for name, share in at_most.items():
        for found, e4m3 in zip(kl(static, name), kl(static, "dynamic fp8_e4m3"), strict=True):
            assert found < share * e4m3, name
    assert not kl(dynamic, "static, the plan")
    assert len(kl(dynamic, "dynamic, the plan")) == 2


@pytest.mark.parametrize("name", ["static", "by hand"])
def test_scales_cover_the_numbers_that_are_stored(biased: Any, static: Any, name: str) -> None:
    """Those that are rotated and centered, here and at other positions, and little more."""
    windows = [t[:24] for t in texts(12)]
    scales = static
    if name == "by hand":
        scales = calibrate(biased, windows, plan=BY_HAND, **NONE)
        assert scales.plan == BY_HAND
        assert scales.report.centers == "The plan was given."
    for index, (k, v) in seen(biased, windows).items():
        layer = scales.layers[index]
        if layer.plan.k.centered:
            k = k - layer.k_center
        for side, x in (("k", k), ("v", v)):
            plan = getattr(layer.plan, side)
            x = rotate(x) if plan.rotated else x
            amax = x.abs().amax((0, 2))
            reach = 448 * getattr(layer, side)[:, 0]
            # An octave up the scale repeats itself; K may be larger at other positions.
            assert (reach >= amax * (1 - 1e-5) if name == "by hand" else reach > 0.8 * amax).all()
            assert (reach <= (4 if side == "k" else 2.01) * amax).all(), (index, side)


def test_dynamic_scales_are_left_to_the_cache(biased: Any, dynamic: KVScales) -> None:
    assert dynamic.is_dynamic
    assert {layer.k for layer in dynamic.layers.values()} == {None}
    windows, center = [t[:24] for t in texts()[:6]], dynamic.layers[0].k_center
    everywhere = seen(biased, windows, range(0, 169, 24))[0][0].mean(0)
    assert (everywhere - center).norm() < 0.3 * center.norm(), "it is the mean of K, about"
    ids = texts()[0][None]
    biased.set_attn_implementation("fp8_paged")
    cache = FP8PagedCache(biased.config, scales=dynamic, prefill="stored")
    with torch.no_grad():
        biased(ids, past_key_values=cache)
    biased.set_attn_implementation("sdpa")
    assert cache.plan == dynamic.plan
    assert torch.equal(cache.layers[0].k_center[0], center)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("plan", ["int8 rotated centered", "fp8_e2m5 rotated", "fp8_e4m3"])
def test_a_cost_is_that_of_what_is_read_back(plan: str, side: str, dynamic: bool) -> None:
    """In the model's own basis, whatever basis it is stored in."""
    chance = torch.Generator().manual_seed(2)
    x = torch.randn(40, 2, 16, generator=chance) + 2
    q = torch.randn(4, 9, 16, generator=chance)
    queries = Queries.from_states(q, x, torch.arange(31, 40), 0.25, None)
    center = torch.randn(2, 16, generator=chance) if "centered" in plan else None
    how = SidePlan.parse(plan)
    first = 0.01 + torch.rand(2, 1, generator=chance) / 100
    candidate = Candidate(how, Trial(side, first, first, center, "head", how.rotated))
    costs = candidate.measure(x, queries, dynamic=dynamic)
    layer = LayerScales(
        None if dynamic else first / FORMATS[how.format].scale_from_e4m3 * 2**0.25,
        None if dynamic else first, center, plan=LayerPlan(how, SidePlan("int8")),
    )  # fmt: skip
    if dynamic and side == "v":
        back = smallest(x, layer)
    else:
        back = stored(x.transpose(0, 1)[None], layer, "k")[0].transpose(0, 1)
    error = back - x
    weigh = queries.cost_of_keys if side == "k" else queries.cost_of_values
    # Of static scales the second that is tried.
    torch.testing.assert_close(
        costs[0 if dynamic else 1], weigh(error, "head").sum().double(), rtol=1e-3, atol=0
    )


def smallest(x: torch.Tensor, layer: LayerScales) -> torch.Tensor:
    """What is read back of V, in the plan of K, with its dynamic scales: the smallest ones."""
    plan, center = layer.plan.k, 0.0 if layer.k_center is None else layer.k_center
    y = rotate(x - center) if plan.rotated else x - center
    scale = dynamic_scale(y, FORMATS[plan.format]).float()[..., None]
    y = round_to_format(y / scale, FORMATS[plan.format]) * scale
    return (rotate(y) if plan.rotated else y) + center


@pytest.mark.parametrize(
    ("near", "far", "best"),
    [
        ([9.0, 4.0, 2.0], [9.0, 4.0, 2.0], 2),
        ([9.0, 4.0, 2.0], [9.0, 4.0, 8.5], 1),  # what helps near and hardly far is not trusted
        ([9.0, 8.5, 8.2], [9.0, 1.0, 1.0], 0),
        ([9.0, 4.0, 2.0], None, 2),
        ([0.0, 0.0, 0.0], None, 0),
        (None, None, 0),
    ],
)
def test_the_best_where_it_is_worst(near: Any, far: Any, best: int) -> None:
    costs = [None if x is None else torch.tensor(x)[:, None] for x in (near, far)]
    if near is not None and far is not None:
        # The scale that is best near is the one that counts far.
        costs = [torch.cat([costs[0], 2 * costs[0]], 1), torch.cat([costs[1], 0 * costs[1]], 1)]
    measured = {
        name: {} if cost is None else {"0.k": cost}
        for name, cost in zip(("plans", "far plans"), costs, strict=True)
    }
    job: Any = SimpleNamespace(
        options=SimpleNamespace(granularity="head"), run_batches=lambda name, *_: measured[name]
    )
    assert choose_candidates(job, [], [], {0: {"k": [0, 1, 2]}}) == {0: {"k": best}}


@pytest.mark.parametrize("granularity", ["token", pytest.param("head", marks=pytest.mark.full)])
def test_outliers_that_turn_are_not_rotated(granularity: Any) -> None:
    """Rotation spreads them; where they stay alone, a float format has room for them."""
    model = model_with_outliers()
    scales = calibrate(model, texts(12), plan="measured", granularity=granularity, **FEW)
    assert [plan.k.rotated for plan in scales.plan.values()] == [False, True]


def test_keys_stay_as_they_are_where_other_positions_cannot_be_tried(
    biased: Any, monkeypatch: Any
) -> None:
    real = stages.collect_sample

    def sample(job: Any, batches: Any, partners: Any, name: str) -> Any:
        if name.startswith("far"):
            raise ConfigError("it takes no position_ids")
        return real(job, batches, partners, name)

    monkeypatch.setattr(stages, "collect_sample", sample)
    scales = calibrate(biased, texts(8), granularity="token", **FEW)
    assert {plan.k for plan in scales.plan.values()} == {SidePlan("fp8_e3m4")}


def test_a_scale_per_channel_is_one_per_head_where_k_is_rotated(biased: Any) -> None:
    plan = LayerPlan.parse("fp8_e2m5 rotated", "fp8_e3m4")
    scales = calibrate(biased, texts(8), plan=plan, granularity="channel", **FEW)
    assert scales.plan == dict.fromkeys((0, 1), plan)
    assert {layer.k.shape for layer in scales.layers.values()} == {(2, 1)}
    assert {layer.v.shape for layer in scales.layers.values()} == {(2, 16)}


def test_what_does_not_help_for_certain_is_not_taken(biased: Any, monkeypatch: Any) -> None:
    real, places = scoring.score_caches, []

    def score(job: Any, name: str, *args: Any) -> Any:
        scores = real(job, name, *args)
        if name.startswith("far predictions"):  # near it helped
            scores["with"] = scores["without"]
        places.append(name)
        return scores

    monkeypatch.setattr(scoring, "score_caches", score)
    scales = calibrate(biased, texts(8), plan="measured", **FEW)
    assert places[:2] == ["predictions", "far predictions: predictions"]
    assert set(scales.plan.values()) == {E4M3}
    assert "others do not help for certain" in scales.report.centers


def test_a_calibration_with_a_plan_resumes(biased: Any, static: KVScales, state: Path) -> None:
    """It finds everything done."""
    calls: list[Any] = []
    hook = biased.register_forward_pre_hook(lambda *_: calls.append(1))
    again = calibrate(biased, texts(12), plan="measured", state=state, **HALF)
    hook.remove()
    assert (again.digest, calls) == (static.digest, [])
    with pytest.raises(ConfigError, match="another model"):
        calibrate(biased, texts(12), plan=BY_HAND, state=state, **HALF)


def test_planned_scales_can_be_measured(biased: Any, static: KVScales, tmp_path: Path) -> None:
    static.save_pretrained(tmp_path)
    report = measure(biased, tmp_path, texts(6, seed=3), max_length=24, progress=False)
    assert report.dtype == "plan"
    assert [row.cache for row in report.quality][1:3] == ["static, the plan", "dynamic, the plan"]
    assert KVScales.from_pretrained(tmp_path).report.scales_digest == static.digest
    # Errors of the numbers as they are stored: rotated, they would not be those of K itself.
    for layer in report.layers.values():
        assert 0 < layer.k.error["fp8_e2m5"] < layer.k.error["fp8_e4m3"]
    with pytest.raises(ConfigError, match="dtype: expected None"):
        measure(biased, static, texts(6), dtype="fp8", max_length=24, progress=False)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"plan": "measured", "dtype": "fp8"}, "dtype: expected None"),
        ({"granularity": "token", "dtype": "fp8"}, "dtype: expected None"),
        ({"plan": E4M3, "dtype": "fp8"}, "expected it alone"),
        ({"plan": "best"}, "expected a LayerPlan"),
        ({"plan": {0: E4M3}}, "got none for layers 1; add"),
        ({"plan": dict.fromkeys(range(4), E4M3)}, "got some for others 2, 3; leave"),
        ({"plan": BY_HAND, "center": False}, "a plan with centers"),
    ],
    ids=str,
)
def test_plans_that_cannot_be_calibrated(biased: Any, keywords: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        calibrate(biased, texts(8), **QUIET, **keywords)
