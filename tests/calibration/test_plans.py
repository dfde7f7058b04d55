"""Tests of the storage plans that `choose_plan` chooses."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.outliers import _plant_outliers, planted_outliers
from hf_fp8kv import ConfigError, FP8PagedCache, StoragePlan, choose_plan, enable, serving
from hf_fp8kv.attention.switching import paged_attention
from hf_fp8kv.calibration import plan_choice
from hf_fp8kv.calibration.observe import find_paged_layers
from hf_fp8kv.formats import FORMATS, LayerPlan, SidePlan
from tests.calibration.test_calibrate import LONG_CONTEXT, make_texts
from tests.calibration.test_default_plans import make_protected_model
from tests.calibration.test_texts import make_tokenizer
from tests.helpers.divergence import compare_caches
from tests.helpers.tiny_models import VOCAB, build_variant, list_types


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ([[9.0, 9.0], [4.0, 4.0], [2.0, 2.0]], 2),
        ([[9.0, 9.0], [4.0, 4.0], [2.0, 8.7]], 1),  # a gain in one head only does not count
        ([[9.0, 9.0], [8.8, 1.0], [8.6, 1.0]], 0),
        ([[9.0, 9.0], [8.8, 1.0], [8.5, 1.0]], 2),
        ([[0.0], [0.0]], 0),
    ],
)
def test_a_picked_candidate_costs_less_in_all_heads(costs: Any, expected: int) -> None:
    assert plan_choice._pick_candidate(costs, 0.95) == expected


@pytest.fixture(scope="module")
def llama() -> Any:
    return build_variant("llama", **LONG_CONTEXT)[0]


@pytest.fixture(scope="module")
def chosen_plan(llama: Any) -> StoragePlan:
    return choose_plan(llama)


def compare_plans(model: Any, plan: StoragePlan, **options: Any) -> tuple[float, float]:
    """Return the KL of the default and of a plan, in nats, on tokens that were not used before."""
    ids = torch.randint(3, VOCAB, (2, 300), generator=torch.Generator().manual_seed(9))
    factories = {
        name: lambda each_plan=each_plan: FP8PagedCache(model.config, plan=each_plan, **options)
        for name, each_plan in (("default", None), ("plan", plan))
    }
    with paged_attention(model):
        scores = compare_caches(model, ids, factories, num_prefill=150)
    return scores["default"].kl.mean().item(), scores["plan"].kl.mean().item()


def test_gaussian_values_get_narrow_rotated_formats(llama: Any, chosen_plan: StoragePlan) -> None:
    for plan in chosen_plan.plan.values():
        assert plan.k.rotated
        assert plan.v.rotated
        assert {plan.k.format, plan.v.format} <= {"fp8_e2m5", "int8"}
    default_kl, plan_kl = compare_plans(llama, chosen_plan)
    assert plan_kl < 0.5 * default_kl
    assert repr(chosen_plan).startswith("StoragePlan(")
    assert "; chosen on 128 random tokens; KL after a stored prompt " in repr(chosen_plan)


def test_a_plan_is_reproducible(llama: Any, chosen_plan: StoragePlan, tmp_path: Path) -> None:
    # A plan does not depend on the number of threads, and is the same in a file.
    torch.set_num_threads(2)
    assert choose_plan(llama).plan == chosen_plan.plan
    torch.set_num_threads(1)
    assert choose_plan(llama).digest == chosen_plan.digest
    chosen_plan.save_pretrained(tmp_path)
    assert FP8PagedCache(llama.config, plan=tmp_path).plan == chosen_plan.plan
    loaded = StoragePlan.load(tmp_path / "kv_scales.safetensors")
    assert (loaded.digest, loaded.plan) == (chosen_plan.digest, chosen_plan.plan)
    assert loaded.made_for(llama)


def test_rotating_outliers_prevent_a_rotation_of_k() -> None:
    model = build_variant("llama", head_dim=64, **LONG_CONTEXT)[0]
    assert all(layer_plan.k.rotated for layer_plan in choose_plan(model).plan.values())
    with planted_outliers(model, 50.0, head_stride=2):  # one of two heads has outliers
        plan = choose_plan(model)
        assert not any(layer_plan.k.rotated for layer_plan in plan.plan.values())
        default_kl, plan_kl = compare_plans(model, plan)
    assert plan_kl <= default_kl


@pytest.fixture(scope="module")
def protected_model() -> Any:
    return make_protected_model()


def test_layers_in_which_stored_prompts_lose_most_are_protected(
    protected_model: Any, tmp_path: Path
) -> None:
    plan = choose_plan(protected_model)  # K of a layer takes 11 % more bytes
    assert {layer_plan.k.is_auto for layer_plan in plan.plan.values()} == {False}
    assert plan.protection.sides == ()
    assert plan.protection.kl == plan.protection.unprotected_kl > 1e-3
    protected_plan = choose_plan(protected_model, max_extra_bytes=0.15)
    assert all(
        weight.grad is None and weight.requires_grad for weight in protected_model.parameters()
    )
    protection = protected_plan.protection
    assert protection.sides == ("K of layer 0",)
    assert protection.unprotected_kl == plan.protection.kl
    assert 0.1 < protection.extra_bytes < 0.12
    assert protection.kl < protection.unprotected_kl / 20
    layer_plans = dict(plan.plan)
    layer_plans[0] = layer_plans[0]._replace(k=SidePlan("model"))
    assert protected_plan.plan == layer_plans
    _, unprotected_kl = compare_plans(protected_model, plan, prefill="stored")
    _, protected_kl = compare_plans(protected_model, protected_plan, prefill="stored")
    assert protected_kl < unprotected_kl / 20
    assert "(K of layer 0 in 16 bits, +11.1% bytes)" in repr(protected_plan)
    protected_plan.save_pretrained(tmp_path)
    loaded = StoragePlan.load(tmp_path)
    assert (loaded.digest, loaded.protection) == (protected_plan.digest, protection)
    assert choose_plan(protected_model, make_texts(), max_extra_bytes=0.15).protection.sides


def test_six_bits_have_the_error_of_e4m3(llama: Any, chosen_plan: StoragePlan) -> None:
    plan = choose_plan(llama, bits=6, max_extra_bytes=0)
    for side_plan in itertools.chain(*plan.plan.values()):
        assert (side_plan.format, side_plan.rotated) == ("int6", True)
    assert [layer_plan.k.centered for layer_plan in plan.plan.values()] == [
        layer_plan.k.centered for layer_plan in chosen_plan.plan.values()
    ]
    assert re.search(r"error of attention \d\.\d% in layer \d; KL after a stored", repr(plan))
    _, six_bit_kl = compare_plans(llama, plan)
    _, e4m3_kl = compare_plans(llama, LayerPlan.parse("fp8_e4m3", "fp8_e4m3"))
    _, eight_bit_kl = compare_plans(llama, chosen_plan)
    assert six_bit_kl < 1.2 * e4m3_kl
    assert six_bit_kl > 5 * eight_bit_kl


@pytest.mark.parametrize("bits", [6.25, 7, 7.75])
def test_bits_bound_the_mean_of_all_values(protected_model: Any, bits: float) -> None:
    eight_bit_plan = choose_plan(protected_model, max_extra_bytes=0).plan
    plan = choose_plan(protected_model, bits=bits, max_extra_bytes=0)
    all_bits = []
    for index, layer_plan in plan.plan.items():
        for side_plan, eight_bit_side in zip(layer_plan, eight_bit_plan[index], strict=True):
            all_bits.append(FORMATS[side_plan.format].bits)
            if all_bits[-1] == 8 and layer_plan.v.format != "int4":
                assert side_plan == eight_bit_side
    assert bits - 0.5 < sum(all_bits) / len(all_bits) <= bits


def test_layers_that_lose_too_much_have_8_bits() -> None:
    model = build_variant("llama", head_dim=64, num_hidden_layers=6, **LONG_CONTEXT)[0]
    _plant_outliers(model.model.layers[2].self_attn, 50.0, 2)
    with pytest.raises(ConfigError, match=r"at least 6\.34 .* got 6, because in 1 of 6 layers"):
        choose_plan(model, bits=6)
    plan = choose_plan(model, bits=6.34)  # the exact number is 6.333...
    assert [layer_plan.k.format == "int6" for layer_plan in plan.plan.values()] == [
        True, True, False, True, True, True
    ]  # fmt: skip
    assert plan.plan[2] == choose_plan(model, max_extra_bytes=0).plan[2]
    _, e4m3_kl = compare_plans(model, LayerPlan.parse("fp8_e4m3", "fp8_e4m3"))
    assert compare_plans(model, plan)[1] < 1.2 * e4m3_kl


@pytest.mark.parametrize(
    ("call", "bits"),
    [
        *itertools.product(
            (choose_plan, enable, serving.enable), (5.99, 8.01, True, "6", float("nan"))
        ),
        *((choose_plan, None), (enable, None)),  # None is the default of `serving.enable`
    ],
)
def test_invalid_bits_are_refused(llama: Any, call: Any, bits: Any) -> None:
    with pytest.raises(ConfigError, match="bits: expected a number from 6 to 8, got"):
        call(llama, bits=bits)


@pytest.mark.parametrize("name", ["latent", "alibi"])
def test_fewer_bits_need_queries(name: str) -> None:
    with pytest.raises(ConfigError, match="bits: expected 8, because layer 0 stores latents or"):
        choose_plan(build_variant(name, **LONG_CONTEXT)[0], bits=6)


FALLBACK = "fp8_e3m4"
LATENT_PLANS = {"fp8_e3m4", "fp8_e2m5 rotated", "int8 rotated"}


@pytest.mark.parametrize(
    ("name", "k_plans", "v_plans"),
    [
        ("mha", {FALLBACK}, None),  # the model has 256 positions, so far positions cannot be tried
        ("sliding_and_full", {FALLBACK}, None),
        ("gpt2", None, None),  # no RoPE
        ("latent", LATENT_PLANS, {"model"}),
        ("alibi", {FALLBACK}, {FALLBACK}),  # the attention function does not expose queries
        ("cross_attention", {FALLBACK}, {FALLBACK}),
        ("position_bias", {FALLBACK}, {FALLBACK}),
        *(
            pytest.param(name, None, None, marks=pytest.mark.full)
            for name in list_types()
            # Calibration cannot run these models either.
            if name not in ("dory", "seq2seq/switch_transformers")
        ),
    ],
)
def test_every_model_type_gets_a_plan(name: str, k_plans: Any, v_plans: Any) -> None:
    # A model for which no plan can be tried gets the fallback format.
    try:
        model, inputs = build_variant(name)
        find_paged_layers(model)
    except Exception as error:
        pytest.skip(f"{type(error).__name__}: {error}")
    plan = choose_plan(model)
    cache = FP8PagedCache(model.config, plan=plan)
    assert set(plan.plan) == {layer.index for layer in cache.paged_layers}
    for side, expected in (("k", k_plans), ("v", v_plans)):
        plans = {str(getattr(layer_plan, side)) for layer_plan in plan.plan.values()}
        assert expected is None or plans <= expected
    if not model.config.is_encoder_decoder:
        model.generate(**inputs, past_key_values=cache, max_new_tokens=2, do_sample=False)


@pytest.mark.parametrize("name", ["sliding", "latent"])
def test_rotating_keys_are_tried_at_far_positions(name: str) -> None:
    assert all(
        layer_plan.k.rotated
        for layer_plan in choose_plan(build_variant(name, **LONG_CONTEXT)[0]).plan.values()
    )


@pytest.mark.parametrize("accepts_positions", [False, True])
def test_keys_get_the_fallback_if_far_positions_cannot_be_tried(
    llama: Any, monkeypatch: Any, accepts_positions: bool
) -> None:
    # The model does not accept `position_ids`, or fails if they are passed.
    observe_queries = plan_choice.observe_queries

    def observe(model: Any, window: Any, layers: Any, first_position: int | None) -> Any:
        if first_position is not None:
            raise ConfigError("model: position_ids are not supported")
        return observe_queries(model, window, layers)

    monkeypatch.setattr(plan_choice, "observe_queries", observe)
    monkeypatch.setattr(plan_choice, "accepts_argument", lambda *_: accepts_positions)
    for texts in (None, make_texts()):
        plan = choose_plan(llama, texts)
        assert {str(layer_plan.k) for layer_plan in plan.plan.values()} == {FALLBACK}
        assert all(layer_plan.v.rotated for layer_plan in plan.plan.values())


def test_a_plan_can_be_chosen_on_texts(llama: Any) -> None:
    tokenizer = make_tokenizer()
    texts = ["a b c d " * 40, "d c b a " * 30]
    plan = choose_plan(llama, texts, tokenizer=tokenizer)
    assert plan.digest == choose_plan(llama, [tokenizer(text).input_ids for text in texts]).digest
    assert plan.origin == "chosen on 280 tokens of text"
    assert choose_plan(llama, make_texts()).digest != plan.digest


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"texts": []}, "texts: expected"),
        ({"texts": [[5]]}, "of at least 2 tokens"),
        *(
            ({"max_extra_bytes": value}, "max_extra_bytes: expected a share from 0 to 1, got")
            for value in (-0.01, 1.5, float("nan"), True)
        ),
    ],
    ids=str,
)
def test_choose_plan_refuses_invalid_texts_and_budgets(
    llama: Any, keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_plan(llama, **keywords)
