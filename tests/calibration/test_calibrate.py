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
from tests.helpers.tiny_models import VOCAB, tiny, type_names

pytestmark = pytest.mark.text

QUIET = {"max_length": 24, "held_out": 60, "progress": False}
# Comparing predictions takes most of the time of a calibration. Tests that need no comparison
# hold out little text or none.
FEW = QUIET | {"held_out": 24}
NONE = QUIET | {"held_out": 0}


def texts(count: int = 16, seed: int = 0) -> list[torch.Tensor]:
    """Return texts of 8 to 40 token ids. Some texts are cut into two windows."""
    generator = torch.Generator().manual_seed(seed)
    # No text has 25 tokens, because a window of one token is dropped.
    lengths = [n + (n == 25) for n in torch.randint(8, 41, (count,), generator=generator).tolist()]
    return [torch.randint(3, VOCAB, (length,), generator=generator) for length in lengths]


def observed(model, windows, starts=(0,)) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Return K and V, `[N, H, D]` in float32, of every layer, from a cache of transformers.

    Each window is read once from each position in `starts`.
    """
    pairs: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for window, start in itertools.product(windows, starts):
        cache = DynamicCache(config=model.config)
        positions = torch.arange(start, start + len(window))[None]
        with torch.no_grad():
            model(input_ids=window[None].long(), position_ids=positions, past_key_values=cache)
        for index, layer in enumerate(cache.layers):
            pair = (layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1))
            pairs.setdefault(index, []).append(pair)
    return {
        i: (torch.cat([k for k, _ in parts]).float(), torch.cat([v for _, v in parts]).float())
        for i, parts in pairs.items()
    }


@pytest.fixture(scope="module")
def llama():
    return tiny("llama", num_hidden_layers=3)[0]


@pytest.fixture(scope="module")
def llama_scales(llama):
    return calibrate(llama, texts(), **QUIET)


# -- scales ----------------------------------------------------------------------------------------


# Grid: every granularity once, and every format and margin at least once.
@pytest.mark.parametrize(
    ("granularity", "dtype", "margin"),
    [("tensor", "fp8_e4m3", 1.0), ("head", "fp8_e3m4", 2.0), ("channel", "fp8_e4m3", 1.5)],
)
def test_scales_cover_the_observed_values_closely(llama, granularity, dtype, margin):
    windows = [text[:24] for text in texts(8)]
    scales = calibrate(
        llama, windows, granularity=granularity, center=False, dtype=dtype, margin=margin, **NONE
    )
    assert scales.report.margin == margin
    assert (scales.report.quality, scales.report.held_out_tokens) == ((), 0)
    dims = {"tensor": (0, 1, 2), "head": (0, 2), "channel": (0,)}[granularity]
    shape = {"tensor": (), "head": (2, 1), "channel": (2, 16)}[granularity]
    for index, (k, v) in observed(llama, windows).items():
        layer = scales.layers[index]
        # The search covers an octave. K also has room for its values at other positions.
        for side, x, limit in (("k", k, 2 * 2**0.5 * 2), ("v", v, 2)):
            scale = getattr(layer, side)
            assert scale.shape == shape
            amax = x.abs().amax(dims, keepdim=True)[0].reshape(shape)
            reach = scale * 448 / amax / margin
            assert (reach >= 1 - 1e-5).all(), (index, side, reach)
            if side == "v" or granularity != "channel":
                assert (reach <= limit + 1e-5).all(), (index, side, reach)


@pytest.mark.parametrize("name", ["llama", "biased"])
def test_scales_per_channel_cover_other_positions(request, name):
    """RoPE rotates pairs of channels, so at some position a channel has its partner's value."""
    model, windows = request.getfixturevalue(name), [text[:24] for text in texts(16)]
    scales = calibrate(model, texts(16), granularity="channel", center=name == "biased", **NONE)
    assert scales.centered == (name == "biased")
    for index, (k, _) in observed(model, windows[:6], range(0, 231, 11)).items():
        layer = scales.layers[index]
        stored = k if layer.k_center is None else k - layer.k_center
        assert (stored.abs().amax(0) <= 448 * layer.k * (1 + 1e-4)).all()


def test_a_head_of_zeros_gets_the_scale_of_its_neighbors():
    model = tiny("llama")[0]
    first, second = (layer.self_attn for layer in model.model.layers)
    with torch.no_grad():
        for small, zero in ((first.k_proj, second.k_proj), (first.v_proj, second.v_proj)):
            small.weight[:16] = 0
            zero.weight[:] = 0
    scales = calibrate(model, texts(4), **NONE)
    for scale, zero_scale in (
        (scales.layers[0].k, scales.layers[1].k), (scales.layers[0].v, scales.layers[1].v)
    ):  # fmt: skip
        assert (scale[1] / 16 <= scale[0]).all()
        assert (zero_scale * 448 >= 1).all()
    FP8PagedCache(model.config, scales=scales)


# -- centers ---------------------------------------------------------------------------------------


def test_centers_are_chosen_only_if_k_is_biased(biased, llama_scales):
    options = QUIET | {"held_out": 100}
    with_center, without = (
        calibrate(biased, texts(24), center=center, **options) for center in (True, False)
    )
    assert with_center.centered
    assert with_center.report.centers.startswith("Centers in ")
    # The center is the mean over positions up to 192, not the mean within the windows.
    windows = [text[:24] for text in texts(24)[:6]]
    window_mean, overall_mean = (
        observed(biased, windows, starts)[0][0].mean(0) for starts in ([0], range(0, 169, 12))
    )
    distance = (with_center.layers[0].k_center - overall_mean).abs().max()
    assert distance < 0.25 * overall_mean.abs().max()
    assert distance < 0.5 * (with_center.layers[0].k_center - window_mean).abs().max()
    rows = {row.cache: row for row in with_center.report.quality}
    assert not without.centered
    assert without.report.centers == "Centers of K were not requested."
    plain_rows = {row.cache: row for row in without.report.quality}
    assert rows["static fp8_e4m3"].kl < plain_rows["static fp8_e4m3"].kl
    assert all(layer.centered for layer in with_center.report.layers.values())
    assert not llama_scales.centered
    assert llama_scales.report.centers.startswith("No centers: ")


# -- order of texts --------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [3, pytest.param(1, marks=pytest.mark.full)])
def test_any_order_of_texts_gives_the_same_scales(biased, batch_size):
    first = calibrate(biased, texts(7), batch_size=batch_size, **FEW)
    shuffled = texts(7)
    random.Random(batch_size).shuffle(shuffled)
    second = calibrate(biased, shuffled, batch_size=batch_size, **FEW)
    assert second.digest == first.digest
    assert second.report.quality == first.report.quality
    assert second.report.far_quality == first.report.far_quality


def test_padding_has_no_effect():
    """Token 0 pads a batch. In this model its embedding is far larger than other embeddings."""
    model = tiny("llama")[0]
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 1e4 * torch.randn(64)
        for layer in model.model.layers:
            layer.input_layernorm.weight.fill_(1.0)
            layer.input_layernorm.variance_epsilon = 1e12  # keeps the norm from scaling it down
    single, batched = (calibrate(model, texts(5), batch_size=size, **NONE) for size in (1, 5))
    for index in single.layers:
        for side in ("k", "v"):
            torch.testing.assert_close(
                getattr(batched.layers[index], side), getattr(single.layers[index], side),
                rtol=0.05, atol=0,
            )  # fmt: skip


# -- report ----------------------------------------------------------------------------------------


def test_the_report_describes_the_run_and_each_layer(llama, llama_scales):
    scales = llama_scales
    report = scales.report
    assert report.scales_digest == scales.digest
    assert (report.dtype, report.granularity, report.texts) == ("fp8_e4m3", "head", 16)
    assert report.tokens + report.held_out_tokens == sum(map(len, texts()))
    assert 30 <= report.held_out_tokens <= 120
    names = [row.cache for row in report.quality]
    assert names == [
        "unquantized", "static fp8_e4m3", "dynamic fp8_e4m3", "scale 1.0 fp8_e4m3"
    ]  # fmt: skip
    plain, *quantized = report.quality
    assert plain.kl == 0.0
    assert plain.top1 == 1.0
    assert all(0 < row.kl < 0.5 and row.tokens == plain.tokens for row in quantized)
    for index, layer in report.layers.items():
        for side in (layer.k, layer.v):
            assert len(side.amax) == 2
            assert 0.01 < side.error["fp8_e4m3"] < 0.04
            assert side.error["fp8_e3m4"] < 0.6 * side.error["fp8_e4m3"]
            assert side.error["fp8_e5m2"] > 1.7 * side.error["fp8_e4m3"]
        k, _ = observed(llama, [text[:24] for text in texts()])[index]
        assert max(layer.k.amax) <= k.abs().max() * 1.001


def test_a_report_is_saved_and_loaded_with_its_scales(llama_scales, tmp_path, caplog):
    paths = llama_scales.save_pretrained(tmp_path)
    assert tmp_path / REPORT_FILE in paths
    assert KVScales.from_pretrained(tmp_path).report == llama_scales.report
    assert KVScales.from_file(tmp_path / "kv_scales.safetensors").report == llama_scales.report
    assert "report" not in caplog.text
    changed = json.loads((tmp_path / REPORT_FILE).read_text()) | {"scales_digest": 64 * "0"}
    (tmp_path / REPORT_FILE).write_text(json.dumps(changed))
    assert KVScales.from_pretrained(tmp_path).report is None
    assert "different scales" in caplog.text
    (tmp_path / REPORT_FILE).write_text('{"model": 1}')
    assert KVScales.from_pretrained(tmp_path).report is None
    assert "ignored" in caplog.text


def test_measure_detects_wrong_scales(llama, llama_scales, tmp_path, caplog):
    plain, held_out = llama_scales, texts(5, seed=9)
    options = {"max_length": 24, "progress": False}
    plain.save_pretrained(tmp_path)
    good = measure(llama, tmp_path, held_out, **options)
    assert good.scales_digest == plain.digest
    assert (good.texts, good.tokens, good.held_out_tokens) == (0, 0, sum(map(len, held_out)))
    small = KVScales({i: type(s)(s.k / 8, s.v) for i, s in plain.layers.items()})
    bad = measure(llama, small, held_out, **options)
    for index in plain.layers:
        assert bad.layers[index].k.saturated > 0.05
        assert bad.layers[index].k.error["fp8_e4m3"] > 4 * good.layers[index].k.error["fp8_e4m3"]
        assert bad.layers[index].v == good.layers[index].v
    caplog.clear()
    large = KVScales({i: type(s)(s.k, s.v * 2.0**14) for i, s in plain.layers.items()})
    coarse = measure(llama, large, held_out, **options)
    assert coarse.layers[0].v.underflow > 0.02
    assert coarse.quality[1].kl > 1.2 * good.quality[1].kl
    ratio = coarse.quality[1].kl / coarse.quality[2].kl
    assert ratio > 1.5
    assert f"{ratio:.1f} times the KL of dynamic" in caplog.text
    with pytest.raises(ConfigError, match="scales: expected KVScales, a path"):
        measure(llama, 1.0, held_out, progress=False)
    with pytest.raises(ScaleError, match="expected scales for every paged layer"):
        measure(llama, KVScales.uniform(2), held_out, progress=False)


@pytest.mark.parametrize(
    ("static", "warned"),
    [
        ([0.2, 0.2, 0.2, 0.2], True),
        ([0.14, 0.14, 0.14, 0.14], False),
        ([0.1, 0.1, 0.1, 0.7], False),  # one token is not representative
        ([0.2], False),
    ],
)
def test_static_scales_much_worse_than_dynamic_scales_cause_a_warning(static, warned, caplog):
    dynamic = torch.full((len(static),), 0.1)
    batches = [Batch((torch.arange(24),), start) for start in (None, 100)]
    warn_if_worse(torch.tensor(static), dynamic, "fp8_e4m3", batches)
    expected = "up to 124 static scales in fp8_e4m3 have 2.0 times the KL of dynamic scales"
    assert (expected in caplog.text) == warned == bool(caplog.records)


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


# Grid: every architecture once, each granularity with and without other positions.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full if name in ("dynamic-rope", "a-decoder") else ())
        for name in ARCHITECTURES
    ],
)
def test_every_architecture_is_calibrated_up_to_its_reach(name):
    """Every architecture is calibrated up to its reach, and a cache accepts the scales."""
    model_type, granularity, config, reach = ARCHITECTURES[name]
    model, inputs = tiny(model_type, **config)
    scales = calibrate(model, texts(6), granularity=granularity, **FEW)
    cache = FP8PagedCache(model.config, scales=scales)
    assert set(scales.layers) == {layer.index for layer in cache.paged_layers}
    assert 0 < scales.report.quality[1].kl < 0.5
    assert scales.report.max_position == reach
    if reach is None:
        assert scales.report.far_quality == ()
    else:
        assert 0 < scales.report.far_quality[1].kl < 0.5
    if model_type.startswith("seq2seq"):
        cache = EncoderDecoderCache(cache, FP8PagedCache())
    model.generate(**inputs, past_key_values=cache, max_new_tokens=4, do_sample=False)


def test_layers_without_keys_and_values_are_rejected():
    if "glm5_next" not in type_names():
        pytest.skip("this version of transformers has no such model")
    model, _ = tiny("glm5_next")
    if not caches_latents(model.config.get_text_config(decoder=True)):
        pytest.skip("in this version of transformers it has keys and values")
    with pytest.raises(ConfigError, match="layer 1: expected keys and values, got latents without"):
        calibrate(model, texts(), **QUIET)


@pytest.mark.parametrize(
    "keywords", [{}, pytest.param({"plan": "measured"}, marks=pytest.mark.full)]
)
def test_positions_of_latents_keep_16_bits_and_latents_have_no_center(keywords):
    model, _ = tiny("deepseek_v3")
    scales = calibrate(model, texts(8), **keywords, **FEW)
    cache = FP8PagedCache(model.config, scales=scales)
    assert not scales.centered
    assert {str(plan.v) for plan in cache.plan.values()} == {"model"}
    assert not any(plan.k.is_auto or plan.k.centered for plan in cache.plan.values())


def test_layers_without_attention_need_no_scales():
    model = tiny("qwen3_next")[0]
    scales = calibrate(model, texts(2), **NONE)
    paged = {x.index for x in FP8PagedCache(model.config).paged_layers}
    assert set(scales.layers) == paged < set(range(2))


def test_a_model_with_offloaded_weights_gets_the_same_scales():
    from accelerate import cpu_offload

    expected = calibrate(tiny("llama")[0], texts(4), **NONE)
    model = cpu_offload(tiny("llama")[0], execution_device=torch.device("cpu"))
    actual = calibrate(model, texts(4), **NONE)
    assert actual.digest == expected.digest


def test_calibration_leaves_the_model_unchanged(biased):
    biased.train()
    biased.model.layers[0].eval()
    biased.set_attn_implementation("eager")
    try:
        calibrate(biased, texts(4), **FEW)
        assert biased.training
        assert biased.model.layers[1].training
        assert not biased.model.layers[0].training
        assert biased.config._attn_implementation == "eager"
    finally:
        biased.eval()
        biased.set_attn_implementation("sdpa")


def test_nan_is_an_error_that_names_the_layer():
    model = tiny("llama")[0]
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0, 0] = torch.nan
    with pytest.raises(ConfigError, match="layer 1: expected finite V, got NaN"):
        calibrate(model, texts(), **QUIET)


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
        calibrate(**{"model": llama, "texts": texts()} | QUIET | changes)


def test_a_sub_config_without_an_attention_implementation_is_accepted():
    """dbrx has such a sub-config, and transformers rejects setting it again."""
    model = tiny("dbrx")[0]
    before = model.config.attn_config._attn_implementation
    assert calibrate(model, texts(4), **FEW).report.quality
    assert model.config.attn_config._attn_implementation == before


def test_texts_can_be_too_short_for_centers(biased):
    scales = calibrate(biased, [[5, 6, 7], [8, 9]], progress=False)
    assert not scales.centered
    assert "too short" in scales.report.centers
    assert scales.report.quality == ()


def test_a_layer_without_calls_gets_no_scales(caplog):
    model = tiny("llama")[0]
    model.config.num_hidden_layers = 3
    scales = calibrate(model, texts(4), **FEW)
    assert "skip_layers=[2]" in caplog.text
    assert set(scales.layers) == {0, 1}
    assert scales.report.quality
    FP8PagedCache(model.config, scales=scales, skip_layers=[2])


def test_unsupported_models_are_rejected():
    with pytest.raises(ConfigError, match="expected a model that reads text, got Whisper"):
        calibrate(tiny("seq2seq/whisper")[0], texts(), **QUIET)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": VOCAB, "state_size": 4}
    with pytest.raises(ConfigError, match="expected the config of a model that can use this"):
        calibrate(MambaForCausalLM(MambaConfig(**sizes)), texts(), **QUIET)


def test_a_model_that_accepts_one_token_at_a_time_is_not_scored(caplog):
    """The scales are calibrated, and a warning says that the predictions are not compared."""
    scales = calibrate(tiny("prophetnet")[0], texts(6), **FEW)
    assert scales.report.quality == ()
    assert not scales.centered
    assert "the predictions are not compared" in caplog.text


@pytest.mark.full
def test_centers_help_a_trained_model_at_all_positions(real_model):
    """Centers reduce the KL at near and far positions. Static scales are nearly as good."""
    from pydoc_data.topics import topics

    model, tokenizer = real_model
    texts = [topics[name] for name in sorted(topics)]
    scales = calibrate(
        model, texts, tokenizer=tokenizer, max_tokens=640, max_length=64, held_out=256,
        progress=False,
    )  # fmt: skip
    report = scales.report
    assert scales.centered, report.centers
    # E4M3 suffices for this model: no observed value saturates.
    assert all(s.k.amax() * FORMATS["fp8_e4m3"].max < 448 for s in scales.layers.values())
    assert report.max_position == 512
    for rows in (report.quality, report.far_quality):
        plain, static, dynamic, constant = rows
        assert plain.kl == 0.0
        assert 0 < static.kl < 3 * dynamic.kl, rows
        assert static.kl < 0.9 * constant.kl, rows
        assert static.top1 > 0.85
    for layer in report.layers.values():
        for side in (layer.k, layer.v):
            assert side.saturated < 1e-3
            assert side.error["fp8_e4m3"] < 0.06
