"""How layers are stored: what is chosen, by a calibration with its scales or for a model alone."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from benchmarks.first_call import Operations
from benchmarks.outliers import planted_outliers
from hf_fp8kv import (
    ConfigError,
    FP8PagedCache,
    KVScales,
    StoragePlan,
    calibrate,
    choose_plan,
    enable,
    serving,
)
from hf_fp8kv.attention.switching import paged_attention
from hf_fp8kv.calibration import measure, plan_choice, scoring, stages
from hf_fp8kv.calibration.choose import Candidate, pick_candidate
from hf_fp8kv.calibration.divergence import compare_caches
from hf_fp8kv.calibration.observe import paged_layers
from hf_fp8kv.calibration.queries import Queries
from hf_fp8kv.formats import FORMATS, LayerPlan, SidePlan
from hf_fp8kv.formats.rotation import rotate
from hf_fp8kv.modeling.model_support import CACHE
from hf_fp8kv.scales import LayerScales
from tests.cache.test_plans import stored
from tests.calibration.test_calibrate import FEW, NONE, QUIET, seen, texts
from tests.calibration.test_texts import words
from tests.helpers.tiny_models import VOCAB, tiny, type_names

E4M3 = LayerPlan.parse("fp8_e4m3", "fp8_e4m3")
BY_HAND = {
    0: LayerPlan.parse("int8 rotated centered", "fp8_e3m4 rotated"),
    1: LayerPlan.parse("fp8_e2m5", "auto"),
}
HALF = QUIET | {"held_out": 50}
# The positions at which `choose_plan` reads.
LONG = {"max_position_embeddings": 8192}


def model_with_outliers() -> Any:
    """A biased K, and in the first head of layer 0 a pair of channels with 50 times as much."""
    model = tiny("qwen2", key_bias=30.0, **LONG)[0]
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
def static(biased: Any) -> KVScales:
    return calibrate(biased, texts(12), plan="measured", **HALF)


def kl(scales: KVScales, cache: str) -> list[float]:
    rows = (*scales.report.quality, *scales.report.far_quality)
    return [row.kl for row in rows if row.cache == cache]


def test_a_measured_plan_is_closer_near_and_far(static: KVScales) -> None:
    assert static.report.centers.startswith("Measured plans in 2 of 2 layers: KL")
    assert static.report.dtype == "plan"
    for plan in static.plan.values():
        assert plan.k.centered
        assert plan.v.rotated
    at_most = {"static, the plan": 0.3, "dynamic, the plan": 0.1}
    for name, share in at_most.items():
        for found, e4m3 in zip(kl(static, name), kl(static, "dynamic fp8_e4m3"), strict=True):
            assert found < share * e4m3, name


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


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("plan", ["int8 rotated centered", "fp8_e2m5 rotated", "fp8_e4m3"])
def test_a_cost_is_that_of_what_is_read_back(plan: str, side: str) -> None:
    """In the model's own basis, whatever basis it is stored in."""
    chance = torch.Generator().manual_seed(2)
    x = torch.randn(40, 2, 16, generator=chance) + 2
    q = torch.randn(4, 9, 16, generator=chance)
    queries = Queries.from_states(q, x, torch.arange(31, 40), 0.25, None)
    center = torch.randn(2, 16, generator=chance) if "centered" in plan else None
    how = SidePlan.parse(plan)
    first = 0.01 + torch.rand(2, 1, generator=chance) / 100
    candidate = Candidate(side, how, center, first, first)
    scale = first / FORMATS[how.format].scale_from_e4m3
    cost = candidate.measure(x, queries, scale).sum().double()
    layer = LayerScales(scale, first, center, plan=LayerPlan(how, SidePlan("int8")))
    error = stored(x.transpose(0, 1)[None], layer, "k")[0].transpose(0, 1) - x
    expected = queries.cost(side, error, "head").sum().double()
    torch.testing.assert_close(cost, expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("near", "far", "best"),
    [
        ([9.0, 4.0, 2.0], [9.0, 4.0, 2.0], 2),
        ([9.0, 4.0, 2.0], [9.0, 4.0, 8.5], 1),  # what helps near and hardly far is not trusted
        ([9.0, 8.8, 8.6], [9.0, 1.0, 1.0], 0),
        ([9.0, 8.8, 8.5], [9.0, 1.0, 1.0], 2),
        ([9.0, 4.0, 2.0], None, 2),
        ([0.0, 0.0, 0.0], None, 0),
        (None, None, 0),
    ],
)
def test_the_best_where_it_is_worst(near: Any, far: Any, best: int) -> None:
    costs = [of_stage for of_stage in (near, far) if of_stage is not None]
    assert pick_candidate([*zip(*costs, strict=True)], 0.95) == best


@pytest.mark.full
def test_static_scales_of_outliers_that_turn_are_not_rotated() -> None:
    """Rotation spreads them; where they stay alone, a float format has room for them."""
    scales = calibrate(model_with_outliers(), texts(12), plan="measured", **FEW)
    assert [plan.k.rotated for plan in scales.plan.values()] == [False, True]


def test_keys_stay_as_they_are_where_other_positions_cannot_be_tried(
    biased: Any, monkeypatch: Any
) -> None:
    real = stages.collect_ranges

    def collect(job: Any, name: str, *args: Any) -> Any:
        if name.startswith("far"):
            raise ConfigError("it takes no position_ids")
        return real(job, name, *args)

    monkeypatch.setattr(stages, "collect_ranges", collect)
    scales = calibrate(biased, texts(8), plan="measured", **FEW)
    assert {plan.k.rotated or plan.k.centered for plan in scales.plan.values()} == {False}


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
    assert places[:2] == ["predictions", "far predictions"]
    assert set(scales.plan.values()) == {E4M3}
    assert "the gain is uncertain" in scales.report.centers


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
        ({"plan": E4M3, "dtype": "fp8"}, "dtype: expected None"),
        ({"granularity": "token"}, "granularity: expected one of"),
        ({"plan": "best"}, "expected the path of a saved plan, or text that begins with"),
        ({"plan": {0: E4M3}}, "got none for layer 1; add"),
        ({"plan": dict.fromkeys(range(4), E4M3)}, r"got \[2, 3\]"),
        ({"plan": BY_HAND, "center": False}, "a plan with centers"),
    ],
    ids=str,
)
def test_plans_that_cannot_be_calibrated(biased: Any, keywords: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        calibrate(biased, texts(8), **QUIET, **keywords)


# -- a plan for a model alone ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("llama", **LONG)[0]


@pytest.fixture(scope="module")
def chosen(llama: Any) -> StoragePlan:
    return choose_plan(llama)


def compare(model: Any, plan: StoragePlan, tokens: int = 300) -> tuple[float, float]:
    """Return the KL of predictions with the default and with a plan, on other tokens."""
    ids = torch.randint(3, VOCAB, (2, tokens), generator=torch.Generator().manual_seed(9))
    caches = {
        name: lambda how=how: FP8PagedCache(model.config, **how)
        for name, how in (("default", {}), ("plan", {"plan": plan}))
    }
    with paged_attention(model):
        scores = compare_caches(model, ids, caches, prefill=tokens // 2)
    return scores["default"].summarize().kl, scores["plan"].summarize().kl


def test_gaussian_numbers_get_narrow_rotated_formats(llama: Any, chosen: StoragePlan) -> None:
    for plan in chosen.plan.values():
        assert plan.k.rotated
        assert plan.v.rotated
        assert {plan.k.format, plan.v.format} <= {"fp8_e2m5", "int8"}
    default, planned = compare(llama, chosen)
    assert planned < 0.5 * default
    assert repr(chosen).startswith("StoragePlan(")
    assert repr(chosen).endswith(" chosen on 128 random tokens)")


def test_a_plan_is_the_same_each_time(llama: Any, chosen: StoragePlan, tmp_path: Path) -> None:
    """In train mode, under another attention and from files. The model stays as it was."""
    llama.train()
    llama.set_attn_implementation("eager")
    state = torch.get_rng_state()
    try:
        assert choose_plan(llama).digest == chosen.digest
        assert llama.training
        assert llama.config._attn_implementation == "eager"
        assert torch.equal(torch.get_rng_state(), state)
        torch.set_num_threads(2)
        other = choose_plan(llama)
    finally:
        torch.set_num_threads(1)
        llama.eval()
        llama.set_attn_implementation("sdpa")
    assert other.plan == chosen.plan
    chosen.save_pretrained(tmp_path)
    cache = FP8PagedCache(llama.config, plan=tmp_path)
    assert cache.plan == chosen.plan
    for place in (tmp_path, str(tmp_path), tmp_path / "kv_scales.safetensors"):
        found = StoragePlan.load(place)
        assert (found.digest, found.plan) == (chosen.digest, chosen.plan)
        assert found.made_for(llama)


@pytest.mark.full
def test_another_process_chooses_the_same_plan(chosen: StoragePlan) -> None:
    code = (
        f"import torch\ntorch.set_num_threads({torch.get_num_threads()})\n"
        "from hf_fp8kv import choose_plan\nfrom tests.helpers.tiny_models import tiny\n"
        f"print(choose_plan(tiny('llama', **{LONG})[0]).digest)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert found.stdout.split()[-1] == chosen.digest


def test_outliers_that_turn_refuse_a_rotation_of_k() -> None:
    model = tiny("llama", head_dim=64, **LONG)[0]
    assert all(layer.k.rotated for layer in choose_plan(model).plan.values())
    with planted_outliers(model, 50.0, every=2):  # in one of two heads
        plan = choose_plan(model)
        assert not any(layer.k.rotated for layer in plan.plan.values())
        default, planned = compare(model, plan)
    assert planned <= default


SAFE, LATENT = "fp8_e3m4", {"fp8_e3m4", "fp8_e2m5 rotated", "int8 rotated"}


@pytest.mark.parametrize(
    ("name", "k", "v"),
    [
        ("mha", {SAFE}, None),  # 256 positions: none of the others can be tried
        ("sliding_and_full", {SAFE}, None),
        ("gpt2", None, None),  # nothing turns
        ("latent", LATENT, {"model"}),
        ("alibi", {SAFE}, {SAFE}),  # its attention shows no queries
        ("cross_attention", {SAFE}, {SAFE}),
        ("position_bias", {SAFE}, {SAFE}),
        *(
            pytest.param(name, None, None, marks=pytest.mark.full)
            for name in type_names()
            # Calibration cannot run these models either.
            if name not in ("dory", "seq2seq/switch_transformers")
        ),
    ],
)
def test_every_kind_of_model_gets_a_plan(name: str, k: Any, v: Any) -> None:
    """Where nothing can be tried, it has the safe format."""
    try:
        model, inputs = tiny(name)
        paged_layers(model)
    except Exception as error:
        pytest.skip(f"{type(error).__name__}: {error}")
    plan = choose_plan(model)
    cache = FP8PagedCache(model.config, plan=plan)
    assert set(plan.plan) == {layer.index for layer in cache.paged_layers}
    for side, expected in (("k", k), ("v", v)):
        found = {str(getattr(layer, side)) for layer in plan.plan.values()}
        assert expected is None or found <= expected
    if not model.config.is_encoder_decoder:
        model.generate(**inputs, past_key_values=cache, max_new_tokens=2, do_sample=False)


@pytest.mark.parametrize("name", ["sliding", "mqa", "latent"])
def test_keys_that_turn_are_tried_at_other_positions(name: str) -> None:
    plan = choose_plan(tiny(name, **LONG)[0])
    assert all(layer.k.rotated for layer in plan.plan.values())


@pytest.mark.parametrize("named", [False, True])
def test_keys_stay_where_no_other_position_can_be_tried(
    llama: Any, monkeypatch: Any, named: bool
) -> None:
    """The model takes no `position_ids`, or takes them and fails."""
    real = plan_choice.observe_queries

    def observe(model: Any, batch: Any, layers: Any, on_layer: Any) -> None:
        if batch.start is not None:
            raise ConfigError("it takes no position_ids")
        real(model, batch, layers, on_layer)

    monkeypatch.setattr(plan_choice, "observe_queries", observe)
    monkeypatch.setattr(plan_choice, "accepts", lambda *_: named)
    for given in (None, texts()):
        plan = choose_plan(llama, given)
        assert {str(layer.k) for layer in plan.plan.values()} == {SAFE}
        assert all(layer.v.rotated for layer in plan.plan.values())


def test_a_plan_on_texts(llama: Any) -> None:
    tokenizer, text = words(), ["a b c d " * 40, "d c b a " * 30]
    plan = choose_plan(llama, text, tokenizer=tokenizer)
    ids = [tokenizer(t).input_ids for t in text]
    assert plan.digest == choose_plan(llama, ids).digest
    assert plan.origin == "chosen on 280 tokens of text"
    assert choose_plan(llama, texts()).digest != plan.digest
    rows = [{"body": t} for t in text]
    by_column = choose_plan(llama, rows, tokenizer=tokenizer, text_column="body")
    assert by_column.digest == plan.digest


def test_a_plan_on_few_tokens_is_one_warning(llama: Any, caplog: Any) -> None:
    choose_plan(llama, [[5, 6, 7], list(range(3, 75))])
    (message,) = caplog.messages
    assert "chosen on 75 tokens, fewer than the 128 random tokens" in message
    choose_plan(llama, [list(range(3, 67))] * 2)
    assert caplog.messages == [message]


def test_what_no_plan_can_be_chosen_on(llama: Any) -> None:
    for given, message in (([], "texts: expected"), ([[5]], "of at least 2 tokens")):
        with pytest.raises(ConfigError, match=message):
            choose_plan(llama, given)
    model = tiny("llama", **LONG)[0]
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[3, 5] = torch.nan
    with pytest.raises(ConfigError, match="layer 1: expected finite K and V"):
        choose_plan(model)


def test_an_adaptive_model_keeps_one_plan_for_its_weights(chosen: StoragePlan) -> None:
    model, inputs = tiny("llama", **LONG)
    calls: list[Any] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))

    def plan_of(**keywords: Any) -> Any:
        enable(model, dtype="adaptive", **keywords)
        found = model.generate(**inputs, max_new_tokens=1, return_dict_in_generate=True)
        return found.past_key_values.options.scales.digest

    assert plan_of() == chosen.digest
    asked = len(calls)
    assert plan_of(page_size=16) == chosen.digest
    serving.enable(model, dtype="adaptive", probe=False)
    serving.disable(model)
    assert len(calls) == asked + 1, "nothing but generate() ran the model"
    for module in (model.model.embed_tokens, model.model.layers[0].self_attn.k_proj):
        before = plan_of()
        with torch.no_grad():
            module.weight.mul_(-2)
        assert plan_of() == choose_plan(model).digest != before
    for switch in (enable, serving.enable):
        with pytest.raises(ConfigError, match="plan: expected None with dtype='adaptive'"):
            switch(model, dtype="adaptive", plan=chosen)
    with pytest.raises(ConfigError, match="choose_plan"):
        FP8PagedCache(model.config, dtype="adaptive")


@pytest.mark.parametrize(("given", "reads"), [(None, 3), (8 * [list(range(3, 67))], 24)])
def test_a_choice_takes_few_operations(given: Any, reads: int) -> None:
    """For each layer 60 to compare, 11 for each call of the model, and 6 for each weight."""

    def count(layers: int) -> tuple[int, int]:
        model, calls = tiny("llama", num_hidden_layers=layers, **LONG)[0], []
        hook = model.register_forward_pre_hook(
            lambda _, args, keywords: calls.append(keywords), with_kwargs=True
        )
        with Operations() as operations:
            choose_plan(model, given)
        hook.remove()
        with Operations() as alone, torch.no_grad():
            for keywords in calls:
                model(**keywords | {CACHE: DynamicCache(config=model.config)})
        assert len(calls) == reads
        return operations.count - alone.count, len([*model.model.layers.parameters()]) // layers

    _, (few, weights), (more, _) = map(count, (2, 2, 4))  # the first time, tables are made
    assert more - few <= 2 * (60 + 11 * reads + 6 * weights)
