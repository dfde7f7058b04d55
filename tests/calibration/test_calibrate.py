"""Tests of `calibrate`: observed values, scales, centers, plans, and architectures."""

import gc
import itertools
import math
from collections import defaultdict

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

from hf_fp8kv import ConfigError, FP8PagedCache, StoragePlan, calibrate, choose_plan
from hf_fp8kv.calibration import plan_choice
from hf_fp8kv.calibration.observe import observe
from hf_fp8kv.calibration.queries import Queries
from hf_fp8kv.calibration.static_scales import compute_scale, search_head_scales
from hf_fp8kv.formats import FORMATS, LayerPlan, SidePlan
from hf_fp8kv.formats.codec import decode, encode
from hf_fp8kv.formats.rotation import rotate
from hf_fp8kv.modeling.model_support import caches_latents
from tests.helpers.divergence import compare_caches
from tests.helpers.tiny_models import VOCAB, build_variant, list_types

pytestmark = pytest.mark.text

OPTIONS = {"max_length": 24, "progress": False}
# Calibration also reads windows at far positions. This config has room for two of them.
LONG_CONTEXT = {"max_position_embeddings": 8192}
WINDOW_STARTS = (0, 1024, 4096)
EXPLICIT_PLAN = {
    0: LayerPlan.parse("int8 rotated centered", "fp8_e3m4 rotated"),
    1: LayerPlan.parse("fp8_e2m5", "auto"),
}


def make_texts(num_texts: int = 16, seed: int = 0) -> list[torch.Tensor]:
    """Return texts of 8 to 40 token ids. Texts of more than 24 tokens have two windows."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(8, 41, (num_texts,), generator=generator)
    lengths[lengths == 25] = 26  # because a window of one token is dropped
    return [torch.randint(3, VOCAB, (length,), generator=generator) for length in lengths.tolist()]


@torch.no_grad()
def observe_kv(model, windows, starts=(0,)) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Return K and V, `[N, H, D]` in float32, of each layer, from a cache of transformers.

    Each window is read once from each position in `starts`.
    """
    states: dict[int, list[torch.Tensor]] = defaultdict(list)
    for window, start in itertools.product(windows, starts):
        cache = DynamicCache(config=model.config)
        positions = torch.arange(start, start + len(window))[None]
        model(input_ids=window[None].long(), position_ids=positions, past_key_values=cache)
        for index, layer in enumerate(cache.layers):
            # `[2, N, H, D]`, because K and V have the same shape.
            states[index].append(torch.cat([layer.keys, layer.values]).transpose(1, 2))
    return {index: torch.cat(kv_parts, 1).float().unbind() for index, kv_parts in states.items()}


@pytest.fixture(scope="module")
def llama():
    return build_variant("llama", num_hidden_layers=3, **LONG_CONTEXT)[0]


@pytest.fixture(scope="module")
def biased_model():
    """Return a tiny model whose keys have a large bias, which RoPE rotates."""
    return build_variant("qwen2", key_bias=30.0, **LONG_CONTEXT)[0]


# Each granularity and margin occurs once, because they are independent.
@pytest.mark.parametrize(
    ("granularity", "margin"), [("tensor", 1.0), ("head", 2.0), ("channel", 1.5)]
)
def test_a_scale_is_the_largest_magnitude_times_the_margin(llama, granularity, margin):
    windows = [text[:24] for text in make_texts(6)]
    scales = calibrate(
        llama, windows, center=False, granularity=granularity, margin=margin, **OPTIONS
    )
    assert scales.granularity == granularity
    assert scales.origin == f"calibrated on {sum(map(len, windows))} tokens"
    assert scales.made_for(llama)
    dims = {"tensor": (0, 1, 2), "head": (0, 2), "channel": (0,)}[granularity]
    shape = {"tensor": (), "head": (2, 1), "channel": (2, 16)}[granularity]
    for index, states in observe_kv(llama, windows, WINDOW_STARTS).items():
        for scale, values in zip(scales.layers[index].static, states, strict=True):
            expected = values.abs().amax(dims, keepdim=True)[0].reshape(shape) * margin / 448
            if granularity == "head":
                assert ((scale >= 0.999 * expected) & (scale < 2 * expected)).all()
            else:
                torch.testing.assert_close(scale, expected)


def test_a_long_text_is_cut_to_the_positions_of_the_model():
    model = build_variant("llama", num_hidden_layers=1, max_position_embeddings=32)[0]
    lengths: list[int] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    calibrate(model, [torch.arange(200) % (VOCAB - 3) + 3], max_length=1024, progress=False)
    assert max(lengths) == 32


@pytest.mark.parametrize(
    ("granularity", "expected"),
    [("tensor", 4.0), ("head", [[2.0], [4.0]]), ("channel", [[2.0, 1.0], [4.0, 4.0]])],
)
def test_zeros_get_the_largest_scale(granularity, expected):
    amax = 448 * torch.tensor([[2.0, 1.0], [4.0, 0.0]])
    assert compute_scale(amax, granularity).tolist() == expected
    assert (compute_scale(torch.zeros(2, 2), granularity) == torch.tensor(1 / 448)).all()


@pytest.mark.parametrize(
    ("plan", "side"),
    [("fp8_e4m3", "k"), ("int8 rotated", "k"), ("int8 rotated", "v"), ("fp8_e3m4", "v")],
)
def test_the_scale_of_a_head_costs_least(plan, side):
    # The cost is computed for dequantized values, in the basis of the model.
    generator = torch.Generator().manual_seed(2)
    k, v = torch.randn(2, 40, 2, 16, generator=generator) + 2
    queries = Queries.from_states(
        torch.randn(4, 9, 16, generator=generator), k, torch.arange(31, 40), 0.25, None
    )
    side_plan = SidePlan.parse(plan)
    min_scale = torch.tensor([[0.011], [0.013]])
    scale = search_head_scales(side, min_scale, [(k, v, queries)], side_plan)
    fmt = FORMATS[side_plan.format]
    values = k if side == "k" else v
    stored = rotate(values) if side_plan.rotated else values
    scales = torch.stack([min_scale * 2.0 ** (step / 16) for step in range(16)])
    costs = []
    for candidate in scales * fmt.scale_from_e4m3:
        decoded = decode(encode(stored / candidate, fmt), fmt) * candidate
        decoded = rotate(decoded) if side_plan.rotated else decoded
        costs.append(queries.compute_cost(side, decoded - values))
    is_chosen = (scales == scale)[..., 0]
    chosen_costs = torch.where(is_chosen, torch.stack(costs), math.inf).min(0).values
    assert is_chosen.sum(0).tolist() == [1, 1]
    assert (chosen_costs <= torch.stack(costs).min(0).values * 1.001).all()


# Shapes of scales of K per head, and of V per channel.
SHAPES = {((2, 1), (2, 16))}


def test_rotated_values_and_unknown_positions_have_no_scale_per_channel(biased_model, caplog):
    plan = LayerPlan.parse("fp8_e2m5 rotated", "fp8_e3m4")
    scales = calibrate(biased_model, make_texts(4), plan=plan, granularity="channel", **OPTIONS)
    assert scales.plan == dict.fromkeys((0, 1), plan)
    assert {(layer.k.shape, layer.v.shape) for layer in scales.layers.values()} == SHAPES
    assert not caplog.messages
    # This model has 256 positions.
    scales = calibrate(build_variant("llama")[0], make_texts(4), granularity="channel", **OPTIONS)
    assert not scales.centered
    assert {(layer.k.shape, layer.v.shape) for layer in scales.layers.values()} == SHAPES
    assert "K has a scale for each head, not for each channel" in caplog.text


def test_a_center_is_the_mean_at_all_positions(biased_model):
    centered, uncentered = (
        calibrate(biased_model, make_texts(8), center=center, **OPTIONS) for center in (True, False)
    )
    assert centered.centered
    assert not uncentered.centered
    all_windows = [window for text in make_texts(8) for window in text.split(24)]
    sampled_windows = plan_choice.sample_windows(sorted(all_windows, key=len, reverse=True))
    for index, (k, _) in observe_kv(biased_model, sampled_windows, WINDOW_STARTS).items():
        layer = centered.layers[index]
        # Windows of the same length are in a different order, so the samples differ.
        assert (layer.k_center - k.mean(0)).abs().max() < 0.05 * k.abs().max()
        all_k, _ = observe_kv(biased_model, all_windows, (0,))[index]
        assert ((all_k - layer.k_center).abs() <= 448 * layer.k * (1 + 1e-5)).all()


def test_scales_cover_the_stored_values_of_a_plan(biased_model):
    # Scales are taken after the center and the rotation.
    windows = [text[:24] for text in make_texts(6)]
    scales = calibrate(biased_model, windows, plan=EXPLICIT_PLAN, granularity="tensor", **OPTIONS)
    assert scales.plan == EXPLICIT_PLAN
    for index, (k, v) in observe_kv(biased_model, windows, WINDOW_STARTS).items():
        layer = scales.layers[index]
        assert (layer.k_center is not None) == layer.plan.k.centered
        if layer.plan.k.centered:
            k = k - layer.k_center
        for side, values in (("k", k), ("v", v)):
            values = rotate(values) if getattr(layer.plan, side).rotated else values
            torch.testing.assert_close(
                getattr(layer, side), values.abs().amax() / 448, rtol=1e-4, atol=0
            )


def test_scales_of_a_chosen_plan_keep_its_centers(biased_model, tmp_path):
    plan = choose_plan(biased_model)
    assert plan.centered
    plan.save_pretrained(tmp_path)
    scales, loaded_scales = (
        calibrate(biased_model, make_texts(6), plan=each_plan, **OPTIONS)
        for each_plan in (plan, tmp_path)
    )
    assert scales.digest == loaded_scales.digest
    assert not isinstance(scales, StoragePlan)
    for index, layer in plan.layers.items():
        assert scales.layers[index].plan == layer.plan
        if layer.k_center is not None:
            assert torch.equal(scales.layers[index].k_center, layer.k_center)


@torch.no_grad()
def test_padding_does_not_affect_scales():
    # Token 0 pads a batch. In this model, it has by far the largest embedding.
    model = build_variant("llama")[0]
    model.get_input_embeddings().weight[0] = 1e4 * torch.randn(64)
    for layer in model.model.layers:
        layer.input_layernorm.weight.fill_(1.0)
        layer.input_layernorm.variance_epsilon = 1e12  # so that the norm does not scale it down
    expected, actual = (
        calibrate(model, make_texts(5), batch_size=size, **OPTIONS) for size in (1, 5)
    )
    for index in expected.layers:
        for side in ("k", "v"):
            torch.testing.assert_close(
                getattr(actual.layers[index], side), getattr(expected.layers[index], side),
                rtol=0.05, atol=0,
            )  # fmt: skip


YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64
}  # fmt: skip


ARCHITECTURES = {
    "two-thetas-and-windows": ("gemma3_text", "head", LONG_CONTEXT),
    "learned-positions": ("gpt2", "channel", {}),
    "alibi": ("bloom", "channel", {}),
    "sinks": ("gpt_oss", "channel", LONG_CONTEXT),
    "yarn": ("llama", "head", {"rope_parameters": YARN}),
    "latents": ("deepseek_v3", "channel", LONG_CONTEXT),
    "layers-without-attention": ("qwen3_next", "head", {}),
    "relative-positions": ("seq2seq/t5", "head", {}),
}


# Each architecture occurs once, with one of two granularities.
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_is_calibrated(name):
    model_type, granularity, config = ARCHITECTURES[name]
    model, inputs = build_variant(model_type, **config)
    scales = calibrate(model, make_texts(6), granularity=granularity, **OPTIONS)
    cache = FP8PagedCache(model.config, scales=scales)
    assert set(scales.layers) == {layer.index for layer in cache.paged_layers}
    assert not (scales.centered and caches_latents(model.config))
    if model_type.startswith("seq2seq"):
        cache = EncoderDecoderCache(cache, FP8PagedCache())
    else:
        factories = {"static": lambda: FP8PagedCache(model.config, scales=scales)}
        ids = torch.randint(3, VOCAB, (2, 24), generator=torch.Generator().manual_seed(3))
        scores = compare_caches(model, ids, factories, num_prefill=12)["static"]
        assert 0 < scores.kl.mean() < 0.5
    model.generate(**inputs, past_key_values=cache, max_new_tokens=4, do_sample=False)


def test_layers_without_keys_and_values_are_refused():
    if "glm5_next" not in list_types():
        pytest.skip("this version of transformers does not have the model")
    model, _ = build_variant("glm5_next")
    if not caches_latents(model.config.get_text_config(decoder=True)):
        pytest.skip("in this version of transformers, the model has keys and values")
    with pytest.raises(ConfigError, match="layer 1: expected keys and values, got latents without"):
        calibrate(model, make_texts(), **OPTIONS)


def test_calibration_leaves_the_model_unchanged():
    model = build_variant("llama", attn_implementation="eager")[0].train()
    model.model.layers[0].eval()
    calibrate(model, make_texts(4), **OPTIONS)
    assert model.model.layers[1].training
    assert not model.model.layers[0].training
    assert model.config._attn_implementation == "eager"


@torch.no_grad()
@pytest.mark.parametrize("side", ["k", "v"])
def test_nan_is_an_error_that_names_the_layer(side):
    model = build_variant("llama")[0]
    getattr(model.model.layers[1].self_attn, f"{side}_proj").weight[0, 0] = torch.nan
    with pytest.raises(ConfigError, match=f"layer 1: expected finite {side.upper()}, got NaN"):
        calibrate(model, make_texts(), **OPTIONS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"granularity": "row"}, "granularity: expected one of tensor, head, channel"),
        ({"center": "yes"}, "center: expected True or False"),
        ({"margin": 0.5}, "margin: expected a factor from 1 to 16"),
        ({"margin": float("nan")}, "margin: expected a factor"),
        ({"batch_size": 0}, "batch_size: expected a whole number"),
        ({"max_length": 0}, "max_length"),
        ({"max_tokens": 1}, "max_tokens"),
        ({"texts": [[1, 2, 500]]}, f"expected token ids below {VOCAB}.*got 500"),
        ({"texts": ["a text"]}, "tokenizer"),
        ({"model": "llama"}, "expected a PreTrainedModel"),
        ({"plan": "best"}, "expected the path of a saved plan, or text that begins with"),
        ({"plan": {0: LayerPlan.parse("int8", "int8")}}, r"got none for layer 1\. Add"),
        ({"plan": dict.fromkeys(range(4), EXPLICIT_PLAN[0])}, r"also got \[2, 3\]"),
        ({"plan": EXPLICIT_PLAN, "center": False}, "a plan with centers"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_invalid_arguments_are_refused(biased_model, changes, message):
    with pytest.raises(ConfigError, match=message):
        calibrate(**{"model": biased_model, "texts": make_texts()} | OPTIONS | changes)


def test_a_layer_without_calls_gets_no_scales(caplog):
    model = build_variant("llama")[0]
    model.config.num_hidden_layers = 3
    scales = calibrate(model, make_texts(4), **OPTIONS)
    assert "skip_layers=[2]" in caplog.text
    assert set(scales.layers) == {0, 1}
    FP8PagedCache(model.config, scales=scales, skip_layers=[2])


def test_speech_models_are_refused():
    with pytest.raises(ConfigError, match="expected a model that reads text, got Whisper"):
        calibrate(build_variant("seq2seq/whisper")[0], make_texts(), **OPTIONS)


def test_observed_states_are_freed_without_a_collection():
    model, _ = build_variant("llama")
    gc.collect()
    gc.disable()
    try:
        observe(model, make_texts(2), frozenset({0}), lambda *_: None)
        caches = [item for item in gc.get_objects() if isinstance(item, DynamicCache)]
    finally:
        gc.enable()
    assert not caches
