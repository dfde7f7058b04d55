"""Tests of `calibrate`: observed values, scales, centers, the report, and architectures."""

import itertools
import json
import random

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, MambaConfig, MambaForCausalLM

from hf_fp8kv import ConfigError, FP8PagedCache, KVScales, ScaleError, calibrate, measure
from hf_fp8kv.calibration.observe import Batch
from hf_fp8kv.calibration.scoring import warn_if_worse
from hf_fp8kv.formats import FORMATS
from hf_fp8kv.modeling.model_support import caches_latents
from hf_fp8kv.scales.report import REPORT_FILE
from tests.helpers.tiny_models import VOCAB, build_variant, list_types

pytestmark = pytest.mark.text

OPTIONS = {"max_length": 24, "held_out": 60, "progress": False}
# The comparison of predictions takes most of the time of a calibration. Tests that need none
# hold out little text or no text.
HELD_OUT_24 = OPTIONS | {"held_out": 24}
HELD_OUT_0 = OPTIONS | {"held_out": 0}


def make_texts(num_texts: int = 16, seed: int = 0) -> list[torch.Tensor]:
    """Return texts of 8 to 40 token ids. Texts of more than 24 tokens have two windows."""
    generator = torch.Generator().manual_seed(seed)
    # No text has 25 tokens, because a window of one token is dropped.
    lengths = torch.randint(8, 41, (num_texts,), generator=generator)
    lengths = [n + (n == 25) for n in lengths.tolist()]
    return [torch.randint(3, VOCAB, (length,), generator=generator) for length in lengths]


def observe_kv(model, windows, starts=(0,)) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Return K and V, `[N, H, D]` in float32, of each layer, from a cache of transformers.

    Each window is read once from each position in `starts`.
    """
    states: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for window, start in itertools.product(windows, starts):
        cache = DynamicCache(config=model.config)
        positions = torch.arange(start, start + len(window))[None]
        with torch.no_grad():
            model(input_ids=window[None].long(), position_ids=positions, past_key_values=cache)
        for index, layer in enumerate(cache.layers):
            pair = (layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1))
            states.setdefault(index, []).append(pair)
    return {
        i: (torch.cat([k for k, _ in pairs]).float(), torch.cat([v for _, v in pairs]).float())
        for i, pairs in states.items()
    }


@pytest.fixture(scope="module")
def llama():
    return build_variant("llama", num_hidden_layers=3)[0]


@pytest.fixture(scope="module")
def llama_scales(llama):
    return calibrate(llama, make_texts(), **OPTIONS)


# -- scales ----------------------------------------------------------------------------------------


# Each granularity, format and margin occurs at least once.
@pytest.mark.parametrize(
    ("granularity", "dtype", "margin"),
    [("tensor", "fp8_e4m3", 1.0), ("head", "fp8_e3m4", 2.0), ("channel", "fp8_e4m3", 1.5)],
)
def test_scales_cover_the_observed_values_closely(llama, granularity, dtype, margin):
    windows = [text[:24] for text in make_texts(8)]
    options = {"granularity": granularity, "dtype": dtype, "margin": margin, **HELD_OUT_0}
    scales = calibrate(llama, windows, center=False, **options)
    assert scales.report.margin == margin
    assert (scales.report.quality, scales.report.held_out_tokens) == ((), 0)
    dims = {"tensor": (0, 1, 2), "head": (0, 2), "channel": (0,)}[granularity]
    shape = {"tensor": (), "head": (2, 1), "channel": (2, 16)}[granularity]
    for index, (k, v) in observe_kv(llama, windows).items():
        layer = scales.layers[index]
        # The search covers an octave, and K may be larger at other positions.
        for side, x, limit in (("k", k, 2 * 2**0.5 * 2), ("v", v, 2)):
            scale = getattr(layer, side)
            assert scale.shape == shape
            amax = x.abs().amax(dims, keepdim=True)[0].reshape(shape)
            reach = scale * 448 / amax / margin
            assert (reach >= 1 - 1e-5).all(), (index, side, reach)
            if side == "v" or granularity != "channel":
                assert (reach <= limit + 1e-5).all(), (index, side, reach)


@pytest.mark.parametrize("name", ["llama", "biased_model"])
def test_scales_per_channel_cover_other_positions(request, name):
    """RoPE rotates pairs, so at some position a channel has the value of the paired channel."""
    model, windows = request.getfixturevalue(name), [text[:24] for text in make_texts(16)]
    is_biased, options = name == "biased_model", {"granularity": "channel", **HELD_OUT_0}
    scales = calibrate(model, make_texts(16), center=is_biased, **options)
    assert scales.centered == is_biased
    for index, (k, _) in observe_kv(model, windows[:6], range(0, 231, 11)).items():
        layer = scales.layers[index]
        centered_k = k if layer.k_center is None else k - layer.k_center
        assert (centered_k.abs().amax(0) <= 448 * layer.k * (1 + 1e-4)).all()


def test_a_head_of_zeros_gets_the_scale_of_its_neighbors():
    model = build_variant("llama")[0]
    first, last = (layer.self_attn for layer in model.model.layers)
    with torch.no_grad():
        for zero_head, zero_layer in ((first.k_proj, last.k_proj), (first.v_proj, last.v_proj)):
            zero_head.weight[:16] = 0
            zero_layer.weight[:] = 0
    scales = calibrate(model, make_texts(4), **HELD_OUT_0)
    for scale, zero_scale in (
        (scales.layers[0].k, scales.layers[1].k), (scales.layers[0].v, scales.layers[1].v)
    ):  # fmt: skip
        assert (scale[1] / 16 <= scale[0]).all()
        assert (zero_scale * 448 >= 1).all()
    FP8PagedCache(model.config, scales=scales)


# -- centers ---------------------------------------------------------------------------------------


def test_centers_are_chosen_only_if_k_is_biased(biased_model, llama_scales):
    options = OPTIONS | {"held_out": 100}
    centered, uncentered = (
        calibrate(biased_model, make_texts(24), center=x, **options) for x in (True, False)
    )
    assert centered.centered
    assert centered.report.centers.startswith("Centers in ")
    # The center is the mean over positions up to 192, not the mean within the windows.
    windows = [text[:24] for text in make_texts(24)[:6]]
    window_mean, overall_mean = (
        observe_kv(biased_model, windows, x)[0][0].mean(0) for x in ([0], range(0, 169, 12))
    )
    distance = (centered.layers[0].k_center - overall_mean).abs().max()
    assert distance < 0.25 * overall_mean.abs().max()
    assert distance < 0.5 * (centered.layers[0].k_center - window_mean).abs().max()
    rows = {row.cache: row for row in centered.report.quality}
    assert not uncentered.centered
    assert uncentered.report.centers == "Centers of K were not requested."
    plain_rows = {row.cache: row for row in uncentered.report.quality}
    assert rows["static fp8_e4m3"].kl < plain_rows["static fp8_e4m3"].kl
    assert all(layer.centered for layer in centered.report.layers.values())
    assert not llama_scales.centered
    assert llama_scales.report.centers.startswith("No centers: ")


# -- order of texts --------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [3, pytest.param(1, marks=pytest.mark.full)])
def test_any_order_of_texts_gives_the_same_scales(biased_model, batch_size):
    expected = calibrate(biased_model, make_texts(7), batch_size=batch_size, **HELD_OUT_24)
    shuffled_texts = make_texts(7)
    random.Random(batch_size).shuffle(shuffled_texts)
    actual = calibrate(biased_model, shuffled_texts, batch_size=batch_size, **HELD_OUT_24)
    assert actual.digest == expected.digest
    assert actual.report.quality == expected.report.quality
    assert actual.report.far_quality == expected.report.far_quality


def test_padding_has_no_effect():
    """Token 0 pads a batch, and this model has a far larger embedding for token 0."""
    model = build_variant("llama")[0]
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 1e4 * torch.randn(64)
        for layer in model.model.layers:
            layer.input_layernorm.weight.fill_(1.0)
            layer.input_layernorm.variance_epsilon = 1e12  # so that the norm does not scale it down
    expected, actual = (
        calibrate(model, make_texts(5), batch_size=size, **HELD_OUT_0) for size in (1, 5)
    )
    for index in expected.layers:
        for side in ("k", "v"):
            torch.testing.assert_close(
                getattr(actual.layers[index], side), getattr(expected.layers[index], side),
                rtol=0.05, atol=0,
            )  # fmt: skip


# -- report ----------------------------------------------------------------------------------------


def test_the_report_describes_the_run_and_each_layer(llama, llama_scales):
    scales = llama_scales
    report = scales.report
    assert report.scales_digest == scales.digest
    assert (report.dtype, report.granularity, report.texts) == ("fp8_e4m3", "head", 16)
    assert report.tokens + report.held_out_tokens == sum(map(len, make_texts()))
    assert 30 <= report.held_out_tokens <= 120
    names = [row.cache for row in report.quality]
    assert names == [
        "unquantized", "static fp8_e4m3", "dynamic fp8_e4m3", "scale 1.0 fp8_e4m3"
    ]  # fmt: skip
    unquantized, *quantized = report.quality
    assert unquantized.kl == 0.0
    assert unquantized.top1 == 1.0
    assert all(0 < row.kl < 0.5 and row.tokens == unquantized.tokens for row in quantized)
    for index, layer in report.layers.items():
        for side in (layer.k, layer.v):
            assert len(side.amax) == 2
            assert 0.01 < side.error["fp8_e4m3"] < 0.04
            assert side.error["fp8_e3m4"] < 0.6 * side.error["fp8_e4m3"]
            assert side.error["fp8_e5m2"] > 1.7 * side.error["fp8_e4m3"]
        k, _ = observe_kv(llama, [text[:24] for text in make_texts()])[index]
        assert max(layer.k.amax) <= k.abs().max() * 1.001


def test_a_report_is_saved_and_loaded_with_its_scales(llama_scales, tmp_path, caplog):
    paths = llama_scales.save_pretrained(tmp_path)
    assert tmp_path / REPORT_FILE in paths
    assert KVScales.from_pretrained(tmp_path).report == llama_scales.report
    assert KVScales.from_file(tmp_path / "kv_scales.safetensors").report == llama_scales.report
    assert "report" not in caplog.text
    changed_report = json.loads((tmp_path / REPORT_FILE).read_text()) | {"scales_digest": 64 * "0"}
    (tmp_path / REPORT_FILE).write_text(json.dumps(changed_report))
    assert KVScales.from_pretrained(tmp_path).report is None
    assert "different scales" in caplog.text
    (tmp_path / REPORT_FILE).write_text('{"model": 1}')
    assert KVScales.from_pretrained(tmp_path).report is None
    assert "ignored" in caplog.text


def test_measure_detects_wrong_scales(llama, llama_scales, tmp_path, caplog):
    scales, held_out = llama_scales, make_texts(5, seed=9)
    options = {"max_length": 24, "progress": False}
    scales.save_pretrained(tmp_path)
    report = measure(llama, tmp_path, held_out, **options)
    assert report.scales_digest == scales.digest
    assert (report.texts, report.tokens, report.held_out_tokens) == (0, 0, sum(map(len, held_out)))
    small_scales = KVScales({i: type(s)(s.k / 8, s.v) for i, s in scales.layers.items()})
    small_report = measure(llama, small_scales, held_out, **options)
    for index in scales.layers:
        assert small_report.layers[index].k.saturated > 0.05
        layer, expected_layer = small_report.layers[index], report.layers[index]
        assert layer.k.error["fp8_e4m3"] > 4 * expected_layer.k.error["fp8_e4m3"]
        assert layer.v == expected_layer.v
    caplog.clear()
    large_scales = KVScales({i: type(s)(s.k, s.v * 2.0**14) for i, s in scales.layers.items()})
    large_report = measure(llama, large_scales, held_out, **options)
    assert large_report.layers[0].v.underflow > 0.02
    assert large_report.quality[1].kl > 1.2 * report.quality[1].kl
    ratio = large_report.quality[1].kl / large_report.quality[2].kl
    assert ratio > 1.5
    assert f"{ratio:.1f} times the KL of dynamic" in caplog.text
    with pytest.raises(ConfigError, match="scales: expected KVScales, a path"):
        measure(llama, 1.0, held_out, progress=False)
    with pytest.raises(ScaleError, match="expected scales for every paged layer"):
        measure(llama, KVScales.uniform(2), held_out, progress=False)


@pytest.mark.parametrize(
    ("static_kl", "has_warning"),
    [
        ([0.2, 0.2, 0.2, 0.2], True),
        ([0.14, 0.14, 0.14, 0.14], False),
        ([0.1, 0.1, 0.1, 0.7], False),  # one token is not representative
        ([0.2], False),
    ],
)
def test_static_scales_that_are_much_worse_cause_a_warning(static_kl, has_warning, caplog):
    dynamic_kl = torch.full((len(static_kl),), 0.1)
    batches = [Batch((torch.arange(24),), start) for start in (None, 100)]
    warn_if_worse(torch.tensor(static_kl), dynamic_kl, "fp8_e4m3", batches)
    expected = "up to 124 static scales in fp8_e4m3 have 2.0 times the KL of dynamic scales"
    assert (expected in caplog.text) == has_warning == bool(caplog.records)


# -- models ----------------------------------------------------------------------------------------


YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
ARCHITECTURES = {
    "two-thetas-and-windows": ("gemma3_text", "head", {}, 192),
    "learned-positions": ("gpt2", "channel", {}, 192),
    "alibi": ("bloom", "channel", {}, None),
    "layers-without-rope": ("cohere2", "head", {}, 192),
    "sinks": ("gpt_oss", "channel", {}, 192),
    "yarn": ("llama", "head", {"rope_parameters": YARN}, 192),
    "dynamic-rope": ("llama", "head", {"rope_parameters": DYNAMIC}, 192),
    "a-latent": ("deepseek_v3", "channel", {}, 192),
    "relative-positions": ("seq2seq/t5", "head", {}, None),
    "a-decoder": ("seq2seq/bart", "head", {}, None),
}


# Each architecture once, and two granularities with and without far positions.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full if name in ("dynamic-rope", "a-decoder") else ())
        for name in ARCHITECTURES
    ],
)
def test_every_architecture_is_calibrated(name):
    """Calibration covers positions up to the expected maximum, and a cache accepts the scales."""
    model_type, granularity, config, max_position = ARCHITECTURES[name]
    model, inputs = build_variant(model_type, **config)
    scales = calibrate(model, make_texts(6), granularity=granularity, **HELD_OUT_24)
    cache = FP8PagedCache(model.config, scales=scales)
    assert set(scales.layers) == {layer.index for layer in cache.paged_layers}
    assert 0 < scales.report.quality[1].kl < 0.5
    assert scales.report.max_position == max_position
    if max_position is None:
        assert scales.report.far_quality == ()
    else:
        assert 0 < scales.report.far_quality[1].kl < 0.5
    if model_type.startswith("seq2seq"):
        cache = EncoderDecoderCache(cache, FP8PagedCache())
    model.generate(**inputs, past_key_values=cache, max_new_tokens=4, do_sample=False)


def test_layers_without_keys_and_values_are_rejected():
    if "glm5_next" not in list_types():
        pytest.skip("this version of transformers does not have the model")
    model, _ = build_variant("glm5_next")
    if not caches_latents(model.config.get_text_config(decoder=True)):
        pytest.skip("in this version of transformers, the model has keys and values")
    with pytest.raises(ConfigError, match="layer 1: expected keys and values, got latents without"):
        calibrate(model, make_texts(), **OPTIONS)


@pytest.mark.parametrize(
    "keywords", [{}, pytest.param({"plan": "measured"}, marks=pytest.mark.full)]
)
def test_positions_of_latents_keep_16_bits_and_latents_have_no_center(keywords):
    model, _ = build_variant("deepseek_v3")
    scales = calibrate(model, make_texts(8), **keywords, **HELD_OUT_24)
    cache = FP8PagedCache(model.config, scales=scales)
    assert not scales.centered
    assert {str(plan.v) for plan in cache.plan.values()} == {"model"}
    assert not any(plan.k.is_auto or plan.k.centered for plan in cache.plan.values())


def test_layers_without_attention_need_no_scales():
    model = build_variant("qwen3_next")[0]
    scales = calibrate(model, make_texts(2), **HELD_OUT_0)
    paged_indices = {x.index for x in FP8PagedCache(model.config).paged_layers}
    assert set(scales.layers) == paged_indices < set(range(2))


def test_a_model_with_offloaded_weights_gets_the_same_scales():
    from accelerate import cpu_offload

    expected = calibrate(build_variant("llama")[0], make_texts(4), **HELD_OUT_0)
    model = cpu_offload(build_variant("llama")[0], execution_device=torch.device("cpu"))
    actual = calibrate(model, make_texts(4), **HELD_OUT_0)
    assert actual.digest == expected.digest


def test_calibration_leaves_the_model_unchanged(biased_model):
    biased_model.train()
    biased_model.model.layers[0].eval()
    biased_model.set_attn_implementation("eager")
    try:
        calibrate(biased_model, make_texts(4), **HELD_OUT_24)
        assert biased_model.training
        assert biased_model.model.layers[1].training
        assert not biased_model.model.layers[0].training
        assert biased_model.config._attn_implementation == "eager"
    finally:
        biased_model.eval()
        biased_model.set_attn_implementation("sdpa")


def test_nan_is_an_error_that_names_the_layer():
    model = build_variant("llama")[0]
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0, 0] = torch.nan
    with pytest.raises(ConfigError, match="layer 1: expected finite V, got NaN"):
        calibrate(model, make_texts(), **OPTIONS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"granularity": "row"}, "granularity: expected one of tensor, head, channel"),
        ({"center": "yes"}, "center: expected True or False"),
        ({"dtype": "model"}, "dtype: expected an 8-bit format, got 'model'"),
        ({"dtype": "int4"}, "dtype: expected one of"),
        ({"margin": 0.5}, "margin: expected a factor from 1 to 16"),
        ({"margin": float("nan")}, "margin: expected a factor"),
        ({"batch_size": 0}, "batch_size: expected a whole number"),
        ({"max_length": 0}, "max_length"),
        ({"max_tokens": 1}, "max_tokens"),
        ({"held_out": -1}, "held_out"),
        ({"texts": [[1, 2, 500]]}, f"expected token ids below {VOCAB}.*got 500"),
        ({"texts": ["a text"]}, "tokenizer"),
        ({"model": "llama"}, "expected a PreTrainedModel"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_invalid_arguments_are_rejected(llama, changes, message):
    with pytest.raises(ConfigError, match=message):
        calibrate(**{"model": llama, "texts": make_texts()} | OPTIONS | changes)


def test_a_sub_config_without_an_attention_implementation_is_accepted():
    """dbrx has such a sub-config, and transformers rejects a second assignment."""
    model = build_variant("dbrx")[0]
    implementation = model.config.attn_config._attn_implementation
    assert calibrate(model, make_texts(4), **HELD_OUT_24).report.quality
    assert model.config.attn_config._attn_implementation == implementation


def test_texts_can_be_too_short_for_centers(biased_model):
    scales = calibrate(biased_model, [[5, 6, 7], [8, 9]], progress=False)
    assert not scales.centered
    assert "too short" in scales.report.centers
    assert scales.report.quality == ()


def test_a_layer_without_calls_gets_no_scales(caplog):
    model = build_variant("llama")[0]
    model.config.num_hidden_layers = 3
    scales = calibrate(model, make_texts(4), **HELD_OUT_24)
    assert "skip_layers=[2]" in caplog.text
    assert set(scales.layers) == {0, 1}
    assert scales.report.quality
    FP8PagedCache(model.config, scales=scales, skip_layers=[2])


def test_unsupported_models_are_rejected():
    with pytest.raises(ConfigError, match="expected a model that reads text, got Whisper"):
        calibrate(build_variant("seq2seq/whisper")[0], make_texts(), **OPTIONS)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": VOCAB, "state_size": 4}
    with pytest.raises(ConfigError, match="expected the config of a model that can use this"):
        calibrate(MambaForCausalLM(MambaConfig(**sizes)), make_texts(), **OPTIONS)


def test_a_model_that_accepts_one_token_at_a_time_is_not_scored(caplog):
    """Scales are calibrated, and a warning says that predictions are not compared."""
    scales = calibrate(build_variant("prophetnet")[0], make_texts(6), **HELD_OUT_24)
    assert scales.report.quality == ()
    assert not scales.centered
    assert "the predictions are not compared" in caplog.text


@pytest.mark.full
def test_centers_help_a_trained_model_at_all_positions(real_model):
    """Centers decrease the KL at near and far positions. Static scales are nearly as accurate."""
    from pydoc_data.topics import topics

    model, tokenizer = real_model
    topic_texts = [topics[name] for name in sorted(topics)]
    scales = calibrate(
        model, topic_texts, tokenizer=tokenizer, max_tokens=640, max_length=64, held_out=256,
        progress=False,
    )  # fmt: skip
    report = scales.report
    assert scales.centered, report.centers
    # E4M3 suffices for this model, because no observed value saturates.
    assert all(s.k.amax() * FORMATS["fp8_e4m3"].max < 448 for s in scales.layers.values())
    assert report.max_position == 512
    for rows in (report.quality, report.far_quality):
        unquantized, static, dynamic, constant = rows
        assert unquantized.kl == 0.0
        assert 0 < static.kl < 3 * dynamic.kl, rows
        assert static.kl < 0.9 * constant.kl, rows
        assert static.top1 > 0.85
    for layer in report.layers.values():
        for side in (layer.k, layer.v):
            assert side.saturated < 1e-3
            assert side.error["fp8_e4m3"] < 0.06
