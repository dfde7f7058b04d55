"""Tests of `KVScales` and `LayerScales`: validation, expansion for a layer, copies and files."""

import copy
import pickle
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from hf_fp8kv.errors import FP8KVError, ScaleError
from hf_fp8kv.formats import LayerPlan
from hf_fp8kv.scales import KVScales, LayerScales, describe_kv_scales
from hf_fp8kv.scales.kv_scales import resolve_scales
from tests.scales.test_sources import SCHEME

INF, NAN = float("inf"), float("nan")
ONE = torch.tensor(1.0)
PLAN = LayerPlan.parse("int8 rotated centered", "int8")


def make_scales(num_heads: int = 4, k_dim: int = 3, v_dim: int = 5) -> KVScales:
    """Return scales: layer 0 per tensor, layer 1 per channel with a center. All values differ."""
    channel = LayerScales(
        torch.arange(1.0, 1 + num_heads * k_dim).view(num_heads, k_dim),
        torch.arange(100.0, 100 + num_heads * v_dim).view(num_heads, v_dim),
        -torch.arange(0.0, num_heads * k_dim).view(num_heads, k_dim),
    )
    return KVScales({1: channel, 0: LayerScales(torch.tensor(0.5), torch.tensor(0.25))})


def assert_same_scales(actual: KVScales, expected: KVScales) -> None:
    assert list(actual.layers) == list(expected.layers)
    for index, layer in actual.layers.items():
        for name in ("k", "v", "k_center"):
            tensor, expected_tensor = (
                getattr(each, name) for each in (layer, expected.layers[index])
            )
            assert (tensor is None) == (expected_tensor is None)
            if tensor is not None:
                assert tensor.shape == expected_tensor.shape
                assert tensor.dtype == expected_tensor.dtype == torch.float32
                assert torch.equal(tensor, expected_tensor)


@pytest.mark.parametrize(
    ("shape", "granularity"), [((4, 1), "head"), ((4, 8), "channel"), ((1, 8), "channel")]
)
def test_scales_are_copied_and_keep_two_dimensions(shape, granularity):
    k = torch.full(shape, 3.0, requires_grad=True)
    layer = LayerScales(k, ONE)
    k.detach().zero_()
    assert torch.equal(layer.k, torch.full(shape, 3.0))
    assert layer.granularity == granularity
    assert not layer.k.requires_grad


BAD_TENSORS = {
    "nan": torch.tensor(NAN),
    "infinite": torch.tensor(INF),
    "negative": -ONE,
    "too-small-for-a-reciprocal": torch.tensor(1e-40),
    "too-large-in-float32": torch.tensor(1e300, dtype=torch.float64),
    "one-bad-head": torch.tensor([[1.0], [0.0]]),
    "int8": torch.tensor(1, dtype=torch.int8),
    "meta": torch.ones((), device="meta"),
    "three-dimensions": torch.ones(4, 1, 2),
    "a-float": 0.5,
}


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("value", BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_invalid_scales_are_refused(value, side):
    scales = {"k": ONE, "v": ONE, side: value}
    with pytest.raises(ScaleError, match=rf"{side.upper()} scale \(file.safetensors: name\).*got"):
        LayerScales(**scales, source="file.safetensors: name")


def test_layers_are_sorted_by_index():
    scales = make_scales()
    assert list(scales.layers) == [0, 1]
    assert scales.layers[0].v.item() == 0.25
    assert scales.centered
    assert repr(scales) == (
        "KVScales(2 layers, per channel/tensor, centered=True, format='hf_fp8kv', origin='memory')"
    )


BAD_LAYERS = {
    "empty": {},
    "negative-index": {-1: LayerScales(ONE, ONE)},
    "text-index": {"0": LayerScales(ONE, ONE)},
    "a-tensor": {0: ONE},
}


@pytest.mark.parametrize("layers", BAD_LAYERS.values(), ids=BAD_LAYERS)
def test_invalid_layers_are_refused(layers):
    with pytest.raises(ScaleError, match="expected"):
        KVScales(layers)


@pytest.mark.parametrize("value", [0, True, "1", pytest.param(10**400, id="huge-integer")])
def test_uniform_refuses_an_invalid_constant_or_number_of_layers(value):
    with pytest.raises(ScaleError, match="expected a finite number above 0"):
        KVScales.uniform(1, v=value)
    with pytest.raises(ScaleError, match="num_layers"):
        KVScales.uniform(value if value != 10**400 else 1.0)


@pytest.mark.parametrize(
    "make_copy", [copy.deepcopy, lambda scales: pickle.loads(pickle.dumps(scales))]
)
def test_copies_are_equal(make_copy):
    assert_same_scales(make_copy(make_scales()), make_scales())


@pytest.mark.parametrize(
    ("k", "v", "expanded_k", "expanded_v"),
    [
        (0.5, 0.25, [[0.5] * 2] * 2, [[0.25] * 3] * 2),
        ([[1], [2]], [[10], [20]], [[1, 1], [2, 2]], [[10] * 3, [20] * 3]),
        ([[1, 2]], 1, [[1, 2], [1, 2]], [[1] * 3] * 2),
        ([[1, 2], [3, 4]], [[5, 6, 7]], [[1, 2], [3, 4]], [[5, 6, 7]] * 2),
    ],
)
def test_for_layer_expands_scales(k, v, expanded_k, expanded_v):
    scales = KVScales({0: LayerScales(torch.tensor(k).float(), torch.tensor(v).float())})
    layer = scales.for_layer(0, num_kv_heads=2, k_head_dim=2, v_head_dim=3)
    assert layer.k.tolist() == expanded_k
    assert layer.v.tolist() == expanded_v
    assert layer.k_center is None
    assert layer.k.is_contiguous()
    assert layer.v.is_contiguous()
    layer.k[0] = 9  # expanded scales share no memory with the original scales
    assert torch.equal(scales.layers[0].k, torch.tensor(k).float())


@pytest.mark.parametrize("rank", [0, 1])
def test_for_layer_returns_the_heads_of_its_rank(rank):
    full_layer = replace(make_scales().layers[1], plan=PLAN)
    layer = KVScales({1: full_layer}).for_layer(
        1, num_kv_heads=2, k_head_dim=3, v_head_dim=5, tp_rank=rank, tp_size=2
    )
    heads = slice(2 * rank, 2 * rank + 2)
    assert torch.equal(layer.k, full_layer.k[heads])
    assert torch.equal(layer.v, full_layer.v[heads])
    assert torch.equal(layer.k_center, full_layer.k_center[heads])
    assert layer.plan == PLAN


def test_ranks_share_heads_if_there_are_more_ranks_than_heads():
    layer = make_scales().for_layer(
        1, num_kv_heads=4, k_head_dim=3, v_head_dim=5, tp_rank=1, tp_size=2
    )
    assert torch.equal(layer.k, make_scales().layers[1].k)
    scales = KVScales({0: LayerScales(torch.tensor([[1.0], [2.0]]), ONE)})
    sizes = {"num_kv_heads": 1, "k_head_dim": 1, "v_head_dim": 1, "tp_size": 4}
    for rank, expected in enumerate((1, 1, 2, 2)):
        assert scales.for_layer(0, tp_rank=rank, **sizes).k == expected


BAD_CALLS = {
    "missing-layer": ({"index": 7}, "expected layer 7, got layers 0, 1"),
    "other-heads": ({"num_kv_heads": 3}, "expected 3 heads, got 4"),
    "uneven-heads": ({"num_kv_heads": 3, "tp_size": 2}, r"3 heads \(or 6 of all 2 ranks\), got 4"),
    "other-k-size": ({"k_head_dim": 4}, "K scale of layer 1.*head size of 4 or 1, got 3"),
    "other-v-size": ({"v_head_dim": 4}, "V scale of layer 1.*head size of 4 or 1, got 5"),
    "rank-too-high": ({"tp_rank": 2, "tp_size": 2}, "tp_rank=2 and tp_size=2"),
    "rank-below-zero": ({"tp_rank": -1}, "tp_rank=-1"),
    "rank-not-a-number": ({"tp_rank": "0"}, "expected integers .*tp_rank='0'"),
}


@pytest.mark.parametrize(("change", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_for_layer_refuses_sizes_and_ranks_that_do_not_match(change, message):
    arguments = {"index": 1, "num_kv_heads": 4, "k_head_dim": 3, "v_head_dim": 5} | change
    with pytest.raises(ScaleError, match=message):
        make_scales().for_layer(arguments.pop("index"), **arguments)


def test_the_digest_covers_every_value_and_shape():
    per_tensor, per_head, per_channel = torch.tensor(1.0), torch.ones(2, 1), torch.ones(2, 4)
    sides = [(per_head, per_head), (2 * per_head, per_head), (per_head, 2 * per_head)]
    sides += [(per_tensor, per_head), (per_head, per_tensor), (torch.ones(1, 2), per_head)]
    sides += [(per_head, per_channel), (per_head, per_head, 0 * per_channel)]
    sides += [(per_head, per_head, 1e-6 * per_channel)]
    layers = [LayerScales(*tensors) for tensors in sides]
    all_layers = [{0: layer} for layer in layers] + [
        {1: layers[0]},
        dict.fromkeys((0, 1), layers[0]),
    ]
    assert len({KVScales(layers).digest for layers in all_layers}) == len(all_layers)
    assert KVScales({0: LayerScales(*sides[0])}).digest == KVScales({0: layers[0]}).digest


def test_resolve_accepts_none_scales_constants_and_paths(tmp_path):
    scales = make_scales()
    assert resolve_scales(None) is None
    assert resolve_scales(scales) is scales
    constant = resolve_scales(np.float64(0.25))
    assert (type(constant), constant) == (float, 0.25)
    scales.save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "kv_scales.safetensors", str(tmp_path)):
        assert_same_scales(resolve_scales(path), scales)


BAD_ARGUMENTS = {
    "bool": (True, "finite number"),
    "zero": (0, "finite number"),
    "a-tensor": (ONE, "expected None, a number, KVScales"),
    "missing-file": ("/nowhere/scales.json", "expected a file, got none"),
    "nul-in-the-path": ("scales\0", "expected a folder, a file or a repository id"),
}


@pytest.mark.parametrize(("value", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_resolve_refuses_invalid_arguments(value, message):
    with pytest.raises(ScaleError, match=message) as error:
        resolve_scales(value)
    assert isinstance(error.value, FP8KVError)
    assert isinstance(error.value, ValueError)


COMPRESSED = {"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME}

# test_sources_formats.py tests the declarations that tools write. These are other spellings.
WITH_STATIC_SCALES = {
    "tgi-torch-dtype": {"kv_cache_torch_dtype": torch.float8_e4m3fn},
    "tgi-script": {"kv_cache_dtype": "float8_e4m3fn"},
    "an-object": SimpleNamespace(
        text_config=SimpleNamespace(quantization_config=SimpleNamespace(to_dict=lambda: COMPRESSED))
    ),
    "a-config": LlamaConfig(quantization_config=COMPRESSED),
}
WITHOUT_STATIC_SCALES = {
    "empty": {},
    "weights-only": {"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": None}},
    "dynamic": {
        "quantization_config": COMPRESSED | {"kv_cache_scheme": SCHEME | {"dynamic": True}}
    },
    "int8-algo": {"quantization_config": {"kv_cache_quant_algo": "INT8"}},
    "e5m2": {"kv_cache_torch_dtype": "float8_e5m2"},
    "quark-without-cache": {"quantization_config": {"quant_method": "quark", "export": {}}},
    "not-a-block": {"quantization_config": "fp8"},
}


@pytest.mark.parametrize("config", WITH_STATIC_SCALES.values(), ids=WITH_STATIC_SCALES)
def test_declared_scales_are_described(config):
    assert "kv_cache" in describe_kv_scales(config)


@pytest.mark.parametrize("config", WITHOUT_STATIC_SCALES.values(), ids=WITHOUT_STATIC_SCALES)
def test_configs_without_static_scales_have_no_description(config):
    assert describe_kv_scales(config) is None
