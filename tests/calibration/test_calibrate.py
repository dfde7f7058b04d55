"""Calibration: the observed values, the scales that follow, and the report."""

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
# Predictions are compared in most of the time of a calibration: tests of something else hold out
# little text or none.
FEW = QUIET | {"held_out": 24}
NONE = QUIET | {"held_out": 0}


def texts(count: int = 16, seed: int = 0) -> list[torch.Tensor]:
    """Token ids, 8 to 40 of them: some texts are cut into two windows."""
    chance = torch.Generator().manual_seed(seed)
    # None of 25: a window of one token is left out.
    lengths = [n + (n == 25) for n in torch.randint(8, 41, (count,), generator=chance).tolist()]
    return [torch.randint(3, VOCAB, (length,), generator=chance) for length in lengths]


def seen(model, windows, starts=(0,)) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """K and V `[N, H, D]` of every layer, float32, from a cache of transformers' own.

    Each window is read once from each of the positions `starts`.
    """
    found: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for window, start in itertools.product(windows, starts):
        cache = DynamicCache(config=model.config)
        positions = torch.arange(start, start + len(window))[None]
        with torch.no_grad():
            model(input_ids=window[None].long(), position_ids=positions, past_key_values=cache)
        for index, layer in enumerate(cache.layers):
            pair = (layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1))
            found.setdefault(index, []).append(pair)
    return {
        i: (torch.cat([k for k, _ in ps]).float(), torch.cat([v for _, v in ps]).float())
        for i, ps in found.items()
    }


@pytest.fixture(scope="module")
def llama():
    return tiny("llama", num_hidden_layers=3)[0]


@pytest.fixture(scope="module")
def of_llama(llama):
    return calibrate(llama, texts(), **QUIET)


# -- the scales ------------------------------------------------------------------------------------


# Grid: every granularity once, each format and margin at least once.
@pytest.mark.parametrize(
    ("granularity", "dtype", "margin"),
    [("tensor", "fp8_e4m3", 1.0), ("head", "fp8_e3m4", 2.0), ("channel", "fp8_e4m3", 1.5)],
)
def test_scales_cover_what_was_seen_and_little_more(llama, granularity, dtype, margin):
    windows = [t[:24] for t in texts(8)]
    scales = calibrate(
        llama, windows, granularity=granularity, center=False, dtype=dtype, margin=margin, **NONE
    )
    assert scales.report.margin == margin
    assert (scales.report.quality, scales.report.held_out_tokens) == ((), 0)
    over = {"tensor": (0, 1, 2), "head": (0, 2), "channel": (0,)}[granularity]
    shape = {"tensor": (), "head": (2, 1), "channel": (2, 16)}[granularity]
    for index, (k, v) in seen(llama, windows).items():
        layer = scales.layers[index]
        # An octave up the scale repeats itself. K also has room for what RoPE may make of it.
        for side, x, most in (("k", k, 2 * 2**0.5 * 2), ("v", v, 2)):
            scale = getattr(layer, side)
            assert scale.shape == shape
            amax = x.abs().amax(over, keepdim=True)[0].reshape(shape)
            reach = scale * 448 / amax / margin
            assert (reach >= 1 - 1e-5).all(), (index, side, reach)
            if side == "v" or granularity != "channel":
                assert (reach <= most + 1e-5).all(), (index, side, reach)


@pytest.mark.parametrize("name", ["llama", "biased"])
def test_scales_per_channel_hold_at_other_positions(request, name):
    """RoPE rotates pairs: a channel has at a position what its partner has at a different one."""
    model, known = request.getfixturevalue(name), [t[:24] for t in texts(16)]
    scales = calibrate(model, texts(16), granularity="channel", center=name == "biased", **NONE)
    assert scales.centered == (name == "biased")
    for index, (k, _) in seen(model, known[:6], range(0, 231, 11)).items():
        layer = scales.layers[index]
        stored = k if layer.k_center is None else k - layer.k_center
        assert (stored.abs().amax(0) <= 448 * layer.k * (1 + 1e-4)).all()


def test_a_head_of_zeros_gets_the_scale_of_its_neighbors():
    model = tiny("llama")[0]
    first, second = (layer.self_attn for layer in model.model.layers)
    with torch.no_grad():
        for one, all_ in ((first.k_proj, second.k_proj), (first.v_proj, second.v_proj)):
            one.weight[:16] = 0
            all_.weight[:] = 0
    scales = calibrate(model, texts(4), **NONE)
    for found, of_zeros in (
        (scales.layers[0].k, scales.layers[1].k), (scales.layers[0].v, scales.layers[1].v)
    ):  # fmt: skip
        assert (found[1] / 16 <= found[0]).all()
        assert (of_zeros * 448 >= 1).all()
    FP8PagedCache(model.config, scales=scales)


# -- centers ---------------------------------------------------------------------------------------


def test_centers_where_k_is_biased_and_not_elsewhere(biased, of_llama):
    options = QUIET | {"held_out": 100}
    of_biased, without = (
        calibrate(biased, texts(24), center=center, **options) for center in (True, False)
    )
    assert of_biased.centered
    assert of_biased.report.centers.startswith("Centers in ")
    # The mean over the positions up to 192, not that within the windows.
    windows = [t[:24] for t in texts(24)[:6]]
    near, everywhere = (
        seen(biased, windows, starts)[0][0].mean(0) for starts in ([0], range(0, 169, 12))
    )
    off = (of_biased.layers[0].k_center - everywhere).abs().max()
    assert off < 0.25 * everywhere.abs().max()
    assert off < 0.5 * (of_biased.layers[0].k_center - near).abs().max()
    rows = {row.cache: row for row in of_biased.report.quality}
    assert not without.centered
    assert without.report.centers == "Centers of K were not requested."
    bare = {row.cache: row for row in without.report.quality}
    assert rows["static fp8_e4m3"].kl < bare["static fp8_e4m3"].kl
    assert all(layer.centered for layer in of_biased.report.layers.values())
    assert not of_llama.centered
    assert of_llama.report.centers.startswith("No centers: ")


# -- the same for any order ------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [3, pytest.param(1, marks=pytest.mark.full)])
def test_any_order_of_texts_gives_the_same_scales(biased, batch_size):
    one = calibrate(biased, texts(7), batch_size=batch_size, **FEW)
    other = texts(7)
    random.Random(batch_size).shuffle(other)
    again = calibrate(biased, other, batch_size=batch_size, **FEW)
    assert again.digest == one.digest
    assert again.report.quality == one.report.quality
    assert again.report.far_quality == one.report.far_quality


def test_padding_is_not_looked_at():
    """Token 0 fills up a batch; here it is far larger than any other."""
    model = tiny("llama")[0]
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 1e4 * torch.randn(64)
        for layer in model.model.layers:
            layer.input_layernorm.weight.fill_(1.0)
            layer.input_layernorm.variance_epsilon = 1e12  # no longer made small again
    one, five = (calibrate(model, texts(5), batch_size=size, **NONE) for size in (1, 5))
    for index in one.layers:
        for side in ("k", "v"):
            torch.testing.assert_close(
                getattr(five.layers[index], side), getattr(one.layers[index], side),
                rtol=0.05, atol=0,
            )  # fmt: skip


# -- the report ------------------------------------------------------------------------------------


def test_the_report(llama, of_llama):
    scales = of_llama
    report = scales.report
    assert report.scales_digest == scales.digest
    assert (report.dtype, report.granularity, report.texts) == ("fp8_e4m3", "head", 16)
    assert report.tokens + report.held_out_tokens == sum(map(len, texts()))
    assert 30 <= report.held_out_tokens <= 120
    names = [row.cache for row in report.quality]
    assert names == [
        "unquantized", "static fp8_e4m3", "dynamic fp8_e4m3", "scale 1.0 fp8_e4m3"
    ]  # fmt: skip
    plain, *others = report.quality
    assert plain.kl == 0.0
    assert plain.top1 == 1.0
    assert all(0 < row.kl < 0.5 and row.tokens == plain.tokens for row in others)
    for index, layer in report.layers.items():
        for side in (layer.k, layer.v):
            assert len(side.amax) == 2
            assert 0.01 < side.error["fp8_e4m3"] < 0.04
            assert side.error["fp8_e3m4"] < 0.6 * side.error["fp8_e4m3"]
            assert side.error["fp8_e5m2"] > 1.7 * side.error["fp8_e4m3"]
        k, _ = seen(llama, [t[:24] for t in texts()])[index]
        assert max(layer.k.amax) <= k.abs().max() * 1.001


def test_it_lies_beside_the_scales_and_is_read_with_them(of_llama, tmp_path, caplog):
    paths = of_llama.save_pretrained(tmp_path)
    assert tmp_path / REPORT_FILE in paths
    assert KVScales.from_pretrained(tmp_path).report == of_llama.report
    assert KVScales.from_file(tmp_path / "kv_scales.safetensors").report == of_llama.report
    assert "report" not in caplog.text
    other = json.loads((tmp_path / REPORT_FILE).read_text()) | {"scales_digest": 64 * "0"}
    (tmp_path / REPORT_FILE).write_text(json.dumps(other))
    assert KVScales.from_pretrained(tmp_path).report is None
    assert "different scales" in caplog.text
    (tmp_path / REPORT_FILE).write_text('{"model": 1}')
    assert KVScales.from_pretrained(tmp_path).report is None
    assert "ignored" in caplog.text


def test_measure_sees_scales_that_are_wrong(llama, of_llama, tmp_path, caplog):
    plain, other = of_llama, texts(5, seed=9)
    options = {"max_length": 24, "progress": False}
    plain.save_pretrained(tmp_path)
    good = measure(llama, tmp_path, other, **options)
    assert good.scales_digest == plain.digest
    assert (good.texts, good.tokens, good.held_out_tokens) == (0, 0, sum(map(len, other)))
    small = KVScales({i: type(s)(s.k / 8, s.v) for i, s in plain.layers.items()})
    bad = measure(llama, small, other, **options)
    for index in plain.layers:
        assert bad.layers[index].k.saturated > 0.05
        assert bad.layers[index].k.error["fp8_e4m3"] > 4 * good.layers[index].k.error["fp8_e4m3"]
        assert bad.layers[index].v == good.layers[index].v
    caplog.clear()
    large = KVScales({i: type(s)(s.k, s.v * 2.0**14) for i, s in plain.layers.items()})
    coarse = measure(llama, large, other, **options)
    assert coarse.layers[0].v.underflow > 0.02
    assert coarse.quality[1].kl > 1.2 * good.quality[1].kl
    ratio = coarse.quality[1].kl / coarse.quality[2].kl
    assert ratio > 1.5
    assert f"{ratio:.1f} times the KL of dynamic" in caplog.text
    with pytest.raises(ConfigError, match="scales: expected KVScales, a path"):
        measure(llama, 1.0, other, progress=False)
    with pytest.raises(ScaleError, match="expected scales for every paged layer"):
        measure(llama, KVScales.uniform(2), other, progress=False)


@pytest.mark.parametrize(
    ("static", "warned"),
    [
        ([0.2, 0.2, 0.2, 0.2], True),
        ([0.14, 0.14, 0.14, 0.14], False),
        ([0.1, 0.1, 0.1, 0.7], False),  # one token says nothing of others
        ([0.2], False),
    ],
)
def test_static_scales_that_are_much_worse_than_dynamic_ones_are_named(static, warned, caplog):
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
OTHERS = {
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
        for name in OTHERS
    ],
)
def test_other_architectures(name):
    """How far each can be run beyond its windows, and that a cache takes the scales."""
    kind, granularity, more, reach = OTHERS[name]
    model, inputs = tiny(kind, **more)
    scales = calibrate(model, texts(6), granularity=granularity, **FEW)
    cache = FP8PagedCache(model.config, scales=scales)
    assert set(scales.layers) == {layer.index for layer in cache.paged_layers}
    assert 0 < scales.report.quality[1].kl < 0.5
    assert scales.report.max_position == reach
    if reach is None:
        assert scales.report.far_quality == ()
    else:
        assert 0 < scales.report.far_quality[1].kl < 0.5
    if kind.startswith("seq2seq"):
        cache = EncoderDecoderCache(cache, FP8PagedCache())
    model.generate(**inputs, past_key_values=cache, max_new_tokens=4, do_sample=False)


def test_layers_without_positions_are_refused():
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


def test_layers_that_are_not_attention_need_no_scales():
    model = tiny("qwen3_next")[0]
    scales = calibrate(model, texts(2), **NONE)
    paged = {x.index for x in FP8PagedCache(model.config).paged_layers}
    assert set(scales.layers) == paged < set(range(2))


def test_parts_of_the_model_on_disk():
    from accelerate import cpu_offload

    expected = calibrate(tiny("llama")[0], texts(4), **NONE)
    model = cpu_offload(tiny("llama")[0], execution_device=torch.device("cpu"))
    found = calibrate(model, texts(4), **NONE)
    assert found.digest == expected.digest


def test_the_model_is_left_as_it_was(biased):
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
    ("more", "message"),
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
def test_arguments_that_cannot_be(llama, more, message):
    with pytest.raises(ConfigError, match=message):
        calibrate(**{"model": llama, "texts": texts()} | QUIET | more)


def test_parts_without_an_attention_implementation(capsys):
    """dbrx has a sub-config that names none, which transformers will not set again."""
    model = tiny("dbrx")[0]
    before = model.config.attn_config._attn_implementation
    assert calibrate(model, texts(4), **FEW).report.quality
    assert model.config.attn_config._attn_implementation == before


def test_texts_that_are_too_short_to_try_centers_on(biased):
    scales = calibrate(biased, [[5, 6, 7], [8, 9]], progress=False)
    assert not scales.centered
    assert "too short" in scales.report.centers
    assert scales.report.quality == ()


def test_a_layer_that_is_never_reached(caplog):
    model = tiny("llama")[0]
    model.config.num_hidden_layers = 3
    scales = calibrate(model, texts(4), **FEW)
    assert "skip_layers=[2]" in caplog.text
    assert set(scales.layers) == {0, 1}
    assert scales.report.quality
    FP8PagedCache(model.config, scales=scales, skip_layers=[2])


def test_models_that_cannot_be_calibrated():
    with pytest.raises(ConfigError, match="expected a model that reads text, got Whisper"):
        calibrate(tiny("seq2seq/whisper")[0], texts(), **QUIET)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": VOCAB, "state_size": 4}
    with pytest.raises(ConfigError, match="expected the config of a model that can use this"):
        calibrate(MambaForCausalLM(MambaConfig(**sizes)), texts(), **QUIET)


def test_a_model_that_takes_one_token_at_a_time(caplog):
    """It cannot be scored; its scales are made all the same, and a warning says so."""
    scales = calibrate(tiny("prophetnet")[0], texts(6), **FEW)
    assert scales.report.quality == ()
    assert not scales.centered
    assert "the predictions are not compared" in caplog.text


@pytest.mark.full
def test_a_real_model(real_model):
    """Centers help, and hold; and static scales lose little more than dynamic ones."""
    from pydoc_data.topics import topics

    model, tokenizer = real_model
    texts = [topics[name] for name in sorted(topics)]
    scales = calibrate(
        model, texts, tokenizer=tokenizer, max_tokens=640, max_length=64, held_out=256,
        progress=False,
    )  # fmt: skip
    report = scales.report
    assert scales.centered, report.centers
    # E4M3 is enough for it: nothing that was seen saturates.
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
