"""The data model of static scales: what it accepts, how it is spread, converted and kept."""

import copy
import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from hf_fp8kv.errors import Fp8KVError, ScaleError
from hf_fp8kv.formats import FORMATS
from hf_fp8kv.scales import KVScales, LayerScales, declared_kv_scales
from hf_fp8kv.scales.kv_scales import resolve

INF, NAN = float("inf"), float("nan")
ONE = torch.tensor(1.0)


def two_layers(heads: int = 4, k_dim: int = 3, v_dim: int = 5) -> KVScales:
    """Layer 0 per tensor; layer 1 per channel with centers; no two numbers are the same."""
    channel = LayerScales(
        torch.arange(1.0, 1 + heads * k_dim).view(heads, k_dim),
        torch.arange(100.0, 100 + heads * v_dim).view(heads, v_dim),
        -torch.arange(0.0, heads * k_dim).view(heads, k_dim),
    )
    return KVScales({1: channel, 0: LayerScales(torch.tensor(0.5), torch.tensor(0.25))})


def assert_same(left: KVScales, right: KVScales) -> None:
    """The same layers, shapes and bits."""
    assert list(left.layers) == list(right.layers)
    for index, layer in left.layers.items():
        other = right.layers[index]
        for a, b in ((layer.k, other.k), (layer.v, other.v), (layer.k_center, other.k_center)):
            assert (a is None) == (b is None)
            if a is not None:
                assert a.shape == b.shape
                assert a.dtype == b.dtype == torch.float32
                assert torch.equal(a, b)


# One layer.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1)])
def test_one_number_becomes_a_float32_scalar(dtype, shape):
    layer = LayerScales(torch.full(shape, 0.5, dtype=dtype), torch.full(shape, 2.0, dtype=dtype))
    assert layer.k.shape == layer.v.shape == ()
    assert layer.k.dtype == layer.v.dtype == torch.float32
    assert (layer.k.item(), layer.v.item()) == (0.5, 2.0)
    assert layer.granularity == "tensor"


@pytest.mark.parametrize(
    ("shape", "granularity"), [((4, 1), "head"), ((4, 8), "channel"), ((1, 8), "channel")]
)
def test_two_dimensions_are_kept(shape, granularity):
    layer = LayerScales(torch.full(shape, 3.0), ONE)
    assert layer.k.shape == shape
    assert layer.granularity == granularity


def test_a_layer_does_not_share_memory_with_what_it_was_made_of():
    k = torch.ones(4, 1)
    layer = LayerScales(k, k)
    k.zero_()
    assert layer.k.min() == 1


def test_a_layer_takes_no_gradient():
    assert not LayerScales(torch.ones((), requires_grad=True), ONE).k.requires_grad


BAD_TENSORS = {
    "zero": torch.tensor(0.0),
    "negative": torch.tensor(-1.0),
    "nan": torch.tensor(NAN),
    "infinity": torch.tensor(INF),
    "too-small-for-a-reciprocal": torch.tensor(1e-40),
    "too-large-in-float32": torch.tensor(1e300, dtype=torch.float64),
    "zero-in-float32": torch.tensor(1e-300, dtype=torch.float64),
    "one-bad-head": torch.tensor([[1.0], [0.0]]),
    "int8": torch.tensor(1, dtype=torch.int8),
    "bool": torch.tensor(True),
    "float8": torch.ones(()).to(torch.float8_e4m3fn),
    "complex": torch.tensor(1j),
    "meta": torch.ones((), device="meta"),
    "one-dimension": torch.ones(4),
    "three-dimensions": torch.ones(4, 1, 2),
    "empty": torch.ones(0, 4),
    "a-float": 0.5,
    "none": None,
    "a-list": [0.5],
}


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("bad", BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_bad_scales_are_refused(bad, side):
    good = {"k": ONE, "v": ONE, "source": "file.safetensors: name"}
    with pytest.raises(ScaleError, match=rf"{side.upper()} scale \(file.safetensors: name\).*got"):
        LayerScales(**(good | {side: bad}))


@pytest.mark.parametrize(
    "bad",
    [torch.full((2, 4), NAN), torch.full((2, 4), INF), torch.ones(4), ONE, torch.ones(2, 4).int()],
    ids=["nan", "infinity", "one-dimension", "scalar", "int32"],
)
def test_bad_centers_are_refused(bad):
    with pytest.raises(ScaleError, match="center of K"):
        LayerScales(ONE, ONE, bad)


@pytest.mark.parametrize(
    ("k", "v", "center"),
    [
        (torch.ones(4, 1), torch.ones(2, 1), None),
        (torch.ones(4, 8), torch.ones(2, 8), None),
        (torch.ones(4, 1), ONE, torch.zeros(2, 8)),
    ],
    ids=["per-head", "per-channel", "center"],
)
def test_sides_with_other_heads_are_refused(k, v, center):
    with pytest.raises(ScaleError, match="one number of heads"):
        LayerScales(k, v, center)


# From one format to another.


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("fp8_e4m3", 1.0),
        ("fp8_e4m3fnuz", 2.0),
        ("fp8_e3m4", 448 / 31),
        ("fp8_e5m2", 448 / 57344),
        ("fp8_e2m5", 448 / 7.875),
        ("int8", 448 / 127),
    ],
)
def test_conversion_multiplies_the_scales_and_leaves_the_centers(name, factor):
    layer = two_layers().layers[1]
    converted = layer.convert(FORMATS[name])
    torch.testing.assert_close(converted.k, layer.k * factor, rtol=1e-7, atol=0)
    torch.testing.assert_close(converted.v, layer.v * factor, rtol=1e-7, atol=0)
    assert torch.equal(converted.k_center, layer.k_center)


def test_conversion_with_another_format_for_each_side():
    layer = LayerScales(torch.tensor(3.0), torch.tensor(5.0))
    converted = layer.convert(FORMATS["fp8_e4m3fnuz"], FORMATS["fp8_e5m2"])
    assert (converted.k.item(), converted.v.item()) == (6.0, 5 / 128)


@pytest.mark.parametrize("name", FORMATS)
def test_the_largest_number_stays_representable(name):
    """real = stored * scale: amax / 448 in E4M3FN, and no more than max in the other formats."""
    fmt = FORMATS[name]
    amax = 100.0
    scale = LayerScales(torch.tensor(amax / 448), ONE).convert(fmt).k.item()
    assert amax / scale <= fmt.max * (1 + 1e-6)
    # FNUZ keeps half a binade free, since doubling makes the same bits mean the same number.
    assert amax / scale >= fmt.max * 0.9


# A model.


def test_layers_are_sorted_and_checked():
    scales = two_layers()
    assert list(scales.layers) == [0, 1]
    assert scales.layers[0].v.item() == 0.25
    assert scales.centered
    assert repr(scales) == (
        "KVScales(2 layers, per channel/tensor, centered=True, format='hf_fp8kv', origin='memory')"
    )


BAD_LAYERS = {
    "empty": {},
    "a-list": [LayerScales(ONE, ONE)],
    "negative-index": {-1: LayerScales(ONE, ONE)},
    "text-index": {"0": LayerScales(ONE, ONE)},
    "bool-index": {True: LayerScales(ONE, ONE)},
    "a-tensor": {0: ONE},
}


@pytest.mark.parametrize("layers", BAD_LAYERS.values(), ids=BAD_LAYERS)
def test_bad_layers_are_refused(layers):
    with pytest.raises(ScaleError, match="expected"):
        KVScales(layers)


def test_an_unknown_format_is_refused():
    with pytest.raises(ScaleError, match="format"):
        KVScales({0: LayerScales(ONE, ONE)}, format="gguf")


def test_uniform():
    scales = KVScales.uniform(3, k=0.5, v=0.25)
    assert list(scales.layers) == [0, 1, 2]
    assert {(s.k.item(), s.v.item()) for s in scales.layers.values()} == {(0.5, 0.25)}


def test_uniform_does_not_depend_on_the_default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        scale = KVScales.uniform(1, k=0.0152239128947258).layers[0].k
    finally:
        torch.set_default_dtype(torch.float32)
    assert scale.item() == torch.tensor(0.0152239128947258).item()


@pytest.mark.parametrize("count", [0, -1, True, 1.0, None])
def test_uniform_refuses_a_bad_number_of_layers(count):
    with pytest.raises(ScaleError, match="num_layers"):
        KVScales.uniform(count)


@pytest.mark.parametrize(
    "value", [0, -1.0, NAN, INF, True, "1", None, 1e-40, pytest.param(10**400, id="huge-integer")]
)
def test_a_bad_constant_is_refused(value):
    with pytest.raises(ScaleError, match="expected a finite number above 0"):
        KVScales.uniform(1, v=value)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_copies_are_equal(clone):
    assert_same(clone(two_layers()), two_layers())


# For an operation.


def test_for_layer_spreads_a_tensor_scale():
    layer = two_layers().for_layer(0, num_kv_heads=4, k_head_dim=3, v_head_dim=5)
    assert torch.equal(layer.k, torch.full((4, 3), 0.5))
    assert torch.equal(layer.v, torch.full((4, 5), 0.25))
    assert layer.k_center is None
    assert layer.k.is_contiguous()
    assert layer.v.is_contiguous()


def test_for_layer_spreads_a_head_scale_over_its_channels_only():
    heads = torch.tensor([[1.0], [2.0]])
    scales = KVScales({0: LayerScales(heads, heads * 10)})
    layer = scales.for_layer(0, num_kv_heads=2, k_head_dim=2, v_head_dim=3)
    assert layer.k.tolist() == [[1, 1], [2, 2]]
    assert layer.v.tolist() == [[10, 10, 10], [20, 20, 20]]


def test_for_layer_spreads_a_channel_scale_over_the_heads():
    channels = torch.tensor([[1.0, 2.0, 3.0]])
    scales = KVScales({0: LayerScales(channels, ONE)})
    layer = scales.for_layer(0, num_kv_heads=2, k_head_dim=3, v_head_dim=1)
    assert layer.k.tolist() == [[1, 2, 3], [1, 2, 3]]
    layer.k[0] = 9
    assert scales.layers[0].k.tolist() == [[1, 2, 3]]


@pytest.mark.parametrize("rank", [0, 1])
def test_for_layer_takes_the_heads_of_its_rank(rank):
    whole = two_layers().layers[1]
    layer = two_layers().for_layer(
        1, num_kv_heads=2, k_head_dim=3, v_head_dim=5, tp_rank=rank, tp_size=2
    )
    mine = slice(2 * rank, 2 * rank + 2)
    assert torch.equal(layer.k, whole.k[mine])
    assert torch.equal(layer.v, whole.v[mine])
    assert torch.equal(layer.k_center, whole.k_center[mine])


def test_for_layer_with_the_heads_of_one_rank_takes_them_all():
    layer = two_layers().for_layer(
        1, num_kv_heads=4, k_head_dim=3, v_head_dim=5, tp_rank=1, tp_size=2
    )
    assert torch.equal(layer.k, two_layers().layers[1].k)


def test_for_layer_with_more_ranks_than_heads_repeats_the_heads():
    scales = KVScales({0: LayerScales(torch.tensor([[1.0], [2.0]]), ONE)})
    got = [
        scales.for_layer(
            0, num_kv_heads=1, k_head_dim=1, v_head_dim=1, tp_rank=rank, tp_size=4
        ).k.item()
        for rank in range(4)
    ]
    assert got == [1, 1, 2, 2]


BAD_CALLS = {
    "missing-layer": ({"index": 7}, "expected layer 7, got layers 0, 1"),
    "other-heads": ({"num_kv_heads": 3}, "expected 3 heads, got 4"),
    "uneven-heads": ({"num_kv_heads": 3, "tp_size": 2}, r"3 heads \(or 6 of all 2 ranks\), got 4"),
    "more-heads-than-there-are": ({"num_kv_heads": 8}, "expected 8 heads, got 4"),
    "other-k-size": ({"k_head_dim": 4}, "K scale of layer 1.*head size of 4 or 1, got 3"),
    "other-v-size": ({"v_head_dim": 4}, "V scale of layer 1.*head size of 4 or 1, got 5"),
    "rank-too-high": ({"tp_rank": 2, "tp_size": 2}, "tp_rank=2 and tp_size=2"),
    "rank-below-zero": ({"tp_rank": -1}, "tp_rank=-1"),
    "no-ranks": ({"tp_size": 0}, "tp_size=0"),
    "rank-not-a-number": ({"tp_rank": "0"}, "expected integers, got '0'"),
}


@pytest.mark.parametrize(("change", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_for_layer_refuses_another_model(change, message):
    call = {"index": 1, "num_kv_heads": 4, "k_head_dim": 3, "v_head_dim": 5} | change
    with pytest.raises(ScaleError, match=message):
        two_layers().for_layer(call.pop("index"), **call)


# Our own file.

SCALES = st.floats(2.0**-100, 2.0**100, width=32)
CENTERS = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)


@st.composite
def layers(draw) -> LayerScales:
    """One layer of any granularity."""
    heads, k_dim, v_dim = (draw(st.integers(1, 3)) for _ in range(3))

    def tensor(numbers, shape):
        count = int(np.prod(shape))
        values = draw(st.lists(numbers, min_size=count, max_size=count))
        return torch.tensor(values, dtype=torch.float32).reshape(shape)

    k_shape = draw(st.sampled_from([(), (heads, 1), (1, k_dim), (heads, k_dim)]))
    v_shape = draw(st.sampled_from([(), (heads, 1), (1, v_dim), (heads, v_dim)]))
    center = tensor(CENTERS, (heads, k_dim)) if draw(st.booleans()) else None
    return LayerScales(tensor(SCALES, k_shape), tensor(SCALES, v_shape), center)


@given(st.dictionaries(st.integers(0, 10**6), layers(), min_size=1, max_size=4))
def test_what_is_saved_is_read_back_exactly(tmp_path_factory, by_index):
    folder = tmp_path_factory.mktemp("own")
    scales = KVScales(by_index, model_type="llama", origin="a test")
    scales.save_pretrained(folder)
    read = KVScales.from_pretrained(folder)
    assert_same(read, scales)
    assert (read.format, read.model_type) == ("hf_fp8kv", "llama")


def test_save_writes_two_files_and_nothing_else(tmp_path):
    folder = tmp_path / "deep" / "folder"
    paths = two_layers().save_pretrained(folder)
    assert sorted(paths) == sorted(folder.iterdir())
    assert {p.name for p in paths} == {"kv_scales.json", "kv_scales.safetensors"}
    summary = json.loads((folder / "kv_scales.json").read_text())
    assert summary["layers"] == [0, 1]
    assert summary["scales"]["0"]["k"] == 0.5
    assert summary["scales"]["1"] == {
        "k": 12.0,
        "v": 119.0,
        "granularity": "channel",
        "centered": True,
        "source": "given",
    }


def test_saving_twice_replaces_when_asked(tmp_path):
    two_layers().save_pretrained(tmp_path)
    with pytest.raises(ScaleError, match="pass overwrite=True"):
        KVScales.uniform(5, k=0.5).save_pretrained(tmp_path)
    assert_same(KVScales.from_pretrained(tmp_path), two_layers())
    KVScales.uniform(5, k=0.5).save_pretrained(tmp_path, overwrite=True)
    assert_same(KVScales.from_pretrained(tmp_path), KVScales.uniform(5, k=0.5))


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    two_layers().save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ScaleError, match="No space left"):
        KVScales.uniform(5).save_pretrained(tmp_path, overwrite=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_saving_into_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ScaleError, match="expected a folder that can be written"):
        two_layers().save_pretrained(tmp_path / "file")


@pytest.mark.parametrize("name", ["gguf", "vllm", "", None])
def test_other_formats_cannot_be_written_and_write_nothing(tmp_path, name):
    with pytest.raises(ScaleError, match=r"format: expected one of vllm-json, tgi, .*got"):
        two_layers().save_pretrained(tmp_path, format=name)
    assert not list(tmp_path.iterdir())


# The argument of a cache.


def test_resolve_passes_on_what_is_ready():
    scales = two_layers()
    assert resolve(None) is None
    assert resolve(scales) is scales


@pytest.mark.parametrize("value", [0.5, 2, np.float64(0.25)])
def test_resolve_takes_a_constant(value):
    constant = resolve(value)
    assert type(constant) is float
    assert constant == value


@pytest.mark.parametrize("turn", [str, Path])
def test_resolve_reads_a_folder_and_a_file(tmp_path, turn):
    two_layers().save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "kv_scales.safetensors"):
        assert_same(resolve(turn(path)), two_layers())


BAD_ARGUMENTS = {
    "bool": (True, "finite number"),
    "zero": (0, "finite number"),
    "negative": (-0.5, "finite number"),
    "nan": (NAN, "finite number"),
    "infinity": (INF, "finite number"),
    "a-tensor": (ONE, "expected None, a number, KVScales"),
    "a-dict": ({0: 1.0}, "expected None, a number, KVScales"),
    "one-layer": (LayerScales(ONE, ONE), "expected None, a number, KVScales"),
    "empty-text": ("", "expected a folder, a file or a repository id"),
    "missing-file": ("/nowhere/scales.json", "expected a file, found none"),
    "missing-folder": ("/nowhere/at/all", "expected a folder, a file or a repository id"),
    "nul-in-the-path": ("scales\0", "expected a folder, a file or a repository id"),
    "bytes": (b"scales.json", "expected None, a number, KVScales"),
}


@pytest.mark.parametrize(("value", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_resolve_refuses(value, message):
    with pytest.raises(ScaleError, match=message):
        resolve(value)


def test_errors_are_ours_and_value_errors():
    with pytest.raises(Fp8KVError):
        resolve(0)
    with pytest.raises(ValueError, match="finite"):
        resolve(0)


# What a config declares.

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
COMPRESSED = {"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME}
QUARK = {
    "quant_method": "quark",
    "export": {"kv_cache_group": ["*k_proj"]},
    "layer_quant_config": {
        "*k_proj": {"output_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}
    },
}

DECLARING = {
    "compressed-tensors": {"quantization_config": COMPRESSED},
    "compressed-tensors-per-head": {
        "quantization_config": COMPRESSED | {"kv_cache_scheme": SCHEME | {"strategy": "attn_head"}}
    },
    "compression-config": {"compression_config": COMPRESSED},
    "text-config": {"text_config": {"quantization_config": COMPRESSED}},
    "autofp8": {"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": "static"}},
    "modelopt-scheme": {
        "quantization_config": {
            "quant_method": "modelopt",
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        }
    },
    "modelopt-word": {
        "quantization_config": {"quant_method": "modelopt", "kv_cache_scheme": "FP8"}
    },
    "modelopt-algo": {
        "quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}
    },
    "modelopt-inner-algo": {
        "quantization_config": {
            "quant_method": "modelopt",
            "quantization": {"kv_cache_quant_algo": "FP8"},
        }
    },
    "tgi": {"kv_cache_torch_dtype": "float8_e4m3fn"},
    "tgi-torch-dtype": {"kv_cache_torch_dtype": torch.float8_e4m3fn},
    "tgi-fnuz": {"kv_cache_torch_dtype": "float8_e4m3fnuz"},
    "tgi-as-its-script-writes-it": {"kv_cache_dtype": "float8_e4m3fn"},
    "hifp8": {"quantization_config": {"quant_method": "hifp8", "kv_cache_dtype": "fp8_e4m3fn"}},
    "quark": {"quantization_config": QUARK},
    "trtllm": {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}},
}
SILENT = {
    "empty": {},
    "weights-only": {"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": None}},
    "dynamic": {
        "quantization_config": COMPRESSED | {"kv_cache_scheme": SCHEME | {"dynamic": True}}
    },
    "dynamic-word": {"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": "dynamic"}},
    "int8": {"quantization_config": COMPRESSED | {"kv_cache_scheme": SCHEME | {"type": "int"}}},
    "int8-by-default": {"quantization_config": COMPRESSED | {"kv_cache_scheme": {"num_bits": 8}}},
    "nvfp4": {"quantization_config": {"quant_method": "modelopt", "kv_cache_scheme": "NVFP4"}},
    "int8-algo": {"quantization_config": {"kv_cache_quant_algo": "INT8"}},
    "e5m2": {"kv_cache_torch_dtype": "float8_e5m2"},
    "auto": {"kv_cache_dtype": "auto"},
    "quark-without-cache": {"quantization_config": {"quant_method": "quark", "export": {}}},
    "not-a-block": {"quantization_config": "fp8"},
    "odd-type": {"quantization_config": {"kv_cache_quant_algo": 8}},
}


def as_objects(config: dict) -> SimpleNamespace:
    """The config as transformers holds it: attributes, and blocks with to_dict."""
    blocks = ("quantization_config", "compression_config")

    def turn(name, value):
        if name == "text_config":
            return as_objects(value)
        if name in blocks and isinstance(value, dict):
            return SimpleNamespace(to_dict=lambda: value)
        return value

    return SimpleNamespace(**{name: turn(name, value) for name, value in config.items()})


@pytest.mark.parametrize("turn", [dict, as_objects], ids=["dict", "objects"])
@pytest.mark.parametrize("config", DECLARING.values(), ids=DECLARING)
def test_declared_scales_are_seen(config, turn):
    what = declared_kv_scales(turn(config))
    assert what is not None
    assert "kv_cache" in what


@pytest.mark.parametrize("turn", [dict, as_objects], ids=["dict", "objects"])
@pytest.mark.parametrize("config", SILENT.values(), ids=SILENT)
def test_other_configs_declare_no_static_scales(config, turn):
    assert declared_kv_scales(turn(config)) is None


def test_a_config_of_transformers_is_read():
    from transformers import LlamaConfig

    assert declared_kv_scales(LlamaConfig()) is None
    config = LlamaConfig(quantization_config=COMPRESSED)
    assert declared_kv_scales(config) == (
        "quantization_config.kv_cache_scheme: 8-bit float, strategy tensor, symmetric, static"
    )
    assert declared_kv_scales(LlamaConfig(kv_cache_torch_dtype="float8_e4m3fn")) == (
        "kv_cache_torch_dtype = 'float8_e4m3fn'"
    )
