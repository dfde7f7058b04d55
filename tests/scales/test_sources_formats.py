"""Tests of reading checkpoints in the dialects of tools, and of refusing similar invalid folders.

`test_sources` has golden files, and `test_tools` has files that tools wrote. The tests here write
folders that differ from those files only in a tensor's name or an entry of the config.
"""

import contextlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from safetensors.torch import load_file, save_file

from hf_fp8kv.errors import ScaleError
from hf_fp8kv.scales import KVScales, describe_kv_scales
from tests.scales.test_sources import DATA, FOLDERS, SCHEME, list_sides, list_values, scale_error

K, V = (0.5, 0.75, 0.25), (0.0625, 0.125, 0.3125)
LARGER_KV = tuple(max(pair) for pair in zip(K, V, strict=True))
LLAMA = {"model_type": "llama", "num_hidden_layers": 3, "num_key_value_heads": 2}
GROUPS = {"group_0": {"targets": ["Linear"], "weights": SCHEME, "output_activations": None}}
OUTPUT_GROUP = {
    "targets": ["re:.*k_proj", "re:.*v_proj"], "weights": None, "output_activations": SCHEME
}  # fmt: skip
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": GROUPS}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
ALGO = {"producer": {"name": "modelopt"}, "quantization": {"kv_cache_quant_algo": "FP8"}}
AUTOFP8 = {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"}
FP8_SPEC = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": True}
TENSORRT = {
    "architecture": "LlamaForCausalLM",
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
}
Tensors = dict[str, torch.Tensor]


def make_tensors(name: str, shape: tuple[int, ...] = (), prefix: str = "model.layers") -> Tensors:
    """Return scales of all layers: for K and for V if `name` has "{side}", else shared scales."""
    side_scales = {"k": K, "v": V} if "{side}" in name else {"kv": LARGER_KV}
    tensors = {}
    for side, scales in side_scales.items():
        for index, scale in enumerate(scales):
            tensors[f"{prefix}.{index}.{name.format(side=side)}"] = torch.full(shape, scale)
    return tensors


def make_quark(*layers: str, **changes: object) -> dict[str, object]:
    """Return a quantization config of Quark, which quantizes the outputs of these layers."""
    entry = {"weight": None, "output_tensors": FP8_SPEC | changes}
    return {
        "quant_method": "quark",
        "export": {"kv_cache_group": ["*k_proj", "*v_proj"], "min_kv_scale": 0.0},
        "layer_quant_config": dict.fromkeys(layers or ("*k_proj", "*v_proj"), entry),
        "kv_cache_post_rope": True,
    }


def write_folder(
    folder: Path,
    config: dict[str, object] | None,
    tensors: Tensors | dict[str, Tensors],
    second_config: dict[str, object] | None = None,
) -> Path:
    """Write a checkpoint with a config, one or several files, and ModelOpt's second config."""
    folder.mkdir(exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if second_config is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(second_config))
    has_files = any(isinstance(entry, dict) for entry in tensors.values())
    files = tensors if has_files else {"model": tensors}
    for name, file_tensors in files.items():
        save_file(file_tensors, folder / f"{name}.safetensors")
    return folder


def make_llama(**entries: object) -> dict[str, object]:
    return LLAMA | {"quantization_config": entries}


ATTENTION = "self_attn.{side}_scale"
PROJECTION = "self_attn.{side}_proj.{side}_scale"
OUTPUT = "self_attn.{side}_proj.output_scale"
TOWERS = {
    **make_tensors("self_attn.{side}_scale", prefix="vision_tower.layers"),
    **make_tensors("self_attn.{side}_scale", prefix="model.vision_tower.encoder.layers"),
    **make_tensors("attn.{side}_proj.{side}_scale", prefix="model.visual.blocks"),
    **make_tensors("self_attn.{side}_proj.output_scale", prefix="audio_tower.layers"),
}
TOWERS = {name: tensor * 64 for name, tensor in TOWERS.items()}


# An entry has the format, a config, tensors or files, and ModelOpt's second config if it exists.
VALID_FOLDERS: dict[str, tuple[Any, ...]] = {
    "compressed-tensors-with-null-strategy": (
        "compressed-tensors",
        make_llama(**COMPRESSED, kv_cache_scheme=SCHEME | {"strategy": None, "observer": "minmax"}),
        make_tensors(ATTENTION, (1,)),
    ),
    "output-activations": (
        "compressed-tensors",
        make_llama(**COMPRESSED | {"config_groups": GROUPS | {"group_1": OUTPUT_GROUP}}),
        make_tensors(OUTPUT, (1,)),
    ),
    "text-config": (
        "compressed-tensors",
        {
            "model_type": "llava",
            "text_config": make_llama(**COMPRESSED, kv_cache_scheme=SCHEME),
            "vision_config": {"num_hidden_layers": 24, "num_attention_heads": 16},
        },
        {**make_tensors(ATTENTION, (1,), "model.language_model.layers"), **TOWERS},
    ),
    "thinker-config": (
        "autofp8",
        {
            "model_type": "qwen2_5_omni",
            "thinker_config": {"text_config": make_llama(**AUTOFP8)},
            "talker_config": {"num_hidden_layers": 24},
        },
        {
            **make_tensors(ATTENTION, (), "thinker.model.layers"),
            **make_tensors(ATTENTION, (), "talker.model.layers"),
            **TOWERS,
        },
    ),
    "modelopt-two-configs": ("modelopt", make_llama(**MODELOPT), make_tensors(PROJECTION), ALGO),
    "modelopt-stacked-qkv": (
        "modelopt",
        LLAMA,
        make_tensors("self_attn.qkv_proj.{side}_scale"),
        ALGO,
    ),
    "modelopt-nemotron": (
        "modelopt",
        LLAMA | {"model_type": "nemotron_h", "hybrid_override_pattern": "***M"},
        make_tensors("mixer.{side}_proj.{side}_scale", (), "backbone.layers"),
        ALGO,
    ),
    **{
        f"quark-fused-{module}": (
            "quark",
            make_llama(**make_quark(f"*{module}") | {"export": {"kv_cache_group": [f"*{module}"]}}),
            make_tensors(f"{attention}.{module}.output_scale", (), prefix),
        )
        for prefix, attention, module in (
            ("model.layers", "self_attn", "qkv_proj"),
            ("gpt_neox.layers", "attention", "query_key_value"),
            ("transformer.h", "attn", "c_attn"),
        )
    },
    "quark-entries-by-layer": (
        "quark",
        make_llama(
            **make_quark(*(f"model.layers.{i}.self_attn.{s}_proj" for i in range(3) for s in "kv"))
        ),
        {
            **make_tensors(OUTPUT),
            "model.layers.0.self_attn.q_proj.output_scale": torch.ones(()),
            "model.layers.0.self_attn.prob_output_scale": torch.ones(()),
        },
    ),
    "trtllm-pair": (
        "trtllm",
        TENSORRT,
        {
            "rank0": {
                **make_tensors("attention.{side}_cache_scaling_factor", (1,), "transformer.layers"),
                **make_tensors("attention.kv_cache_scaling_factor", (1,), "transformer.layers"),
            }
        },
    ),
}


@pytest.mark.parametrize("name", VALID_FOLDERS)
def test_a_folder_in_each_dialect_is_read(tmp_path, caplog, name):
    format, config, tensors, *second_config = VALID_FOLDERS[name]
    folder = write_folder(tmp_path, config, tensors, *second_config)
    scales = KVScales.from_pretrained(folder)
    assert scales.format == format
    names = [name for path in folder.glob("*.safetensors") for name in load_file(path)]
    is_shared = not any("k_" in name or "k." in name for name in names)
    assert list_sides(scales) == [list(LARGER_KV if is_shared else side) for side in (K, V)]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert scales.model_type == config.get("model_type")
    # Scales for FNUZ formats are halved.
    write_folder(
        tmp_path, config | {"kv_cache_torch_dtype": "float8_e4m3fnuz"}, tensors, *second_config
    )
    fnuz_scales = KVScales.from_pretrained(folder)
    assert list_sides(fnuz_scales) == (torch.tensor(list_sides(scales)) / 2).tolist()
    if not second_config and format != "trtllm":  # other files declare these scales
        assert "kv_" in (describe_kv_scales(config) or "")


def test_a_vector_is_read_as_one_scale_per_head(tmp_path):
    scheme = SCHEME | {"strategy": "attn_head"}
    tensors = {
        name: torch.stack([scale, scale / 2]) for name, scale in make_tensors(ATTENTION).items()
    }
    folder = write_folder(tmp_path, make_llama(**COMPRESSED, kv_cache_scheme=scheme), tensors)
    layers = KVScales.from_pretrained(folder).layers.values()
    assert [layer.k.tolist() for layer in layers] == [[[k], [k / 2]] for k in K]
    assert [layer.v.tolist() for layer in layers] == [[[v], [v / 2]] for v in V]


RANK = make_tensors("attention.kv_cache_scaling_factor", (1,), "transformer.layers")


def scale_rank(change: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    return {name: change(scale) for name, scale in RANK.items()}


def make_ranks(*factors: float) -> dict[str, Tensors]:
    """Return a file for each rank, with scales that are multiplied by the rank's factor."""
    return {
        f"rank{rank}": scale_rank(lambda scale, factor=factor: scale * factor)
        for rank, factor in enumerate(factors)
    }


def test_ranks_of_tensorrt_are_selected_or_merged(tmp_path, caplog):
    folder = write_folder(tmp_path / "two", TENSORRT, make_ranks(1.0, 4.0))
    for rank, factor in enumerate((1, 4)):
        scales = KVScales.from_pretrained(folder, tp_rank=rank, tp_size=2)
        assert list_values(scales, "v") == [factor * scale for scale in LARGER_KV]
        assert f"rank{rank}.safetensors" in scales.layers[0].source
    assert not caplog.records
    folder = write_folder(tmp_path / "three", TENSORRT, make_ranks(1.0, 4.0, 2.0))
    assert list_values(KVScales.from_pretrained(folder), "k") == [4 * scale for scale in LARGER_KV]
    assert "the scales of its 3 ranks differ" in caplog.text


LAYER_1 = "model.layers.1.self_attn."


PAIR = make_tensors(ATTENTION, (1,))
PER_TENSOR = make_llama(**COMPRESSED, kv_cache_scheme=SCHEME)


# Each rule of the readers once. An entry has a config, tensors, the message, and a second config.
INVALID_FOLDERS = {
    "a-dynamic-word-of-vllm": (
        make_llama(**COMPRESSED, kv_cache_dtype="fp8_per_token_head"),
        {"model.layers.0.self_attn.k_proj.weight": torch.ones(1)},
        "needs no scales",
    ),
    "scheme-a-list": (make_llama(**COMPRESSED, kv_cache_scheme=[SCHEME]), PAIR, "got .*num_b"),
    "zero-point-of-the-projection": (
        make_llama(**make_quark()),
        make_tensors(OUTPUT) | {LAYER_1 + "k_proj.output_zero_point": torch.ones(1)},
        "output_zero_point: expected a zero point of 0",
    ),
    "global-scale": (PER_TENSOR, PAIR | {LAYER_1 + "v_global_scale": torch.ones(1)}, "NVFP4"),
    "offset-of-ascend": (
        PER_TENSOR,
        PAIR | {LAYER_1 + "v_proj.kv_cache_offset": torch.ones(4)},
        "INT8",
    ),
    "output-scales-undeclared": (LLAMA, make_tensors(OUTPUT), "which no format has"),
    "quark-asymmetric": (
        make_llama(**make_quark(symmetric=False)),
        make_tensors(OUTPUT),
        "asymmetric",
    ),
    "quark-one-layer-of-int8": (
        make_llama(
            **make_quark()
            | {
                "layer_quant_config": {
                    "*k_proj": {"output_tensors": FP8_SPEC},
                    "model.layers.1.self_attn.k_proj": {
                        "output_tensors": FP8_SPEC | {"dtype": "int8"}
                    },
                    "*v_proj": {"output_tensors": FP8_SPEC},
                }
            }
        ),
        make_tensors(OUTPUT),
        "dtype 'int8'",
    ),
    "modelopt-two-configs-that-differ": (
        make_llama(**MODELOPT, kv_cache_scheme="NVFP4"),
        make_tensors(PROJECTION),
        "'NVFP4'",
        ALGO,
    ),
    "e5m2": (LLAMA | {"kv_cache_torch_dtype": "float8_e5m2"}, make_tensors(ATTENTION), "e5m2"),
    "only-layers-past-the-last": (
        PER_TENSOR,
        {f"model.layers.{i}.self_attn.{s}_scale": torch.ones(1) for i in (3, 4) for s in "kv"},
        "expected scales for 3 layers, got 0",
    ),
    "layers-with-a-huge-index": (
        PER_TENSOR,
        {f"model.layers.{'9' * 4000}.self_attn.k_scale": torch.ones(1)},
        "which no format has",
    ),
    "trtllm-rank-missing": (
        TENSORRT,
        {"rank0": RANK, "rank2": RANK},
        "expected the ranks 0 to 1, got 0, 2",
    ),
    "trtllm-fewer-ranks-than-declared": (
        TENSORRT | {"mapping": {"tp_size": 4}},
        make_ranks(1.0, 1.0),
        "got tp_size = 4",
    ),
    "trtllm-pipeline": (
        TENSORRT | {"mapping": {"pp_size": 2}},
        make_ranks(1.0, 1.0),
        "pp_size = 2",
    ),
    "trtllm-rank-without-scales": (
        TENSORRT,
        {"rank0": RANK, "rank1": {"a.weight": torch.ones(1)}},
        "got none",
    ),
    "trtllm-per-head": (
        TENSORRT,
        dict.fromkeys(("rank0", "rank1"), scale_rank(lambda scale: scale.repeat(2).view(2, 1, 1))),
        "expected one number for K and for V",
    ),
    "trtllm-reciprocals": (
        TENSORRT,
        {"rank0": {name.replace("scaling", "rcp_scaling"): scale for name, scale in RANK.items()}},
        "got none|which no format has",
    ),
    "asymmetric": (
        make_llama(**COMPRESSED, kv_cache_scheme=SCHEME | {"symmetric": False}),
        PAIR,
        "asymmetric",
    ),
    "layers-not-an-integer": (
        PER_TENSOR | {"num_hidden_layers": True},
        PAIR,
        "num_hidden_layers: expected an integer",
    ),
}


@pytest.mark.parametrize("name", INVALID_FOLDERS)
def test_an_invalid_folder_is_refused(tmp_path, name):
    config, tensors, message, *second_config = INVALID_FOLDERS[name]
    folder = write_folder(tmp_path, config, tensors, *second_config)
    with scale_error(message, folder):
        KVScales.from_pretrained(folder)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "fp8", "static", "x"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner),
    max_leaves=3,
)


def insert_junk(value: Any, junk: object, data: st.DataObject) -> Any:
    """Return a copy of a JSON value in which junk replaces a nested value."""
    damaged = value.copy()
    key = data.draw(st.sampled_from(list(value) if isinstance(value, dict) else range(len(value))))
    is_nested = isinstance(damaged[key], dict | list) and damaged[key] and data.draw(st.booleans())
    damaged[key] = insert_junk(damaged[key], junk, data) if is_nested else junk
    return damaged


@given(name=st.sampled_from(sorted(VALID_FOLDERS)), data=st.data(), junk=JUNK)
def test_a_config_with_junk_is_refused_or_read_correctly(tmp_path_factory, name, data, junk):
    _, config, tensors, *second_config = VALID_FOLDERS[name]
    folder = write_folder(
        tmp_path_factory.mktemp("junk"), insert_junk(config, junk, data), tensors, *second_config
    )
    with contextlib.suppress(ScaleError):
        scales = KVScales.from_pretrained(folder)
        folder = write_folder(tmp_path_factory.mktemp("good"), config, tensors, *second_config)
        expected = KVScales.from_pretrained(folder)
        for index, layer in scales.layers.items():
            assert torch.equal(layer.k, expected.layers[index].k)
            assert torch.equal(layer.v, expected.layers[index].v)


@given(name=st.sampled_from(sorted(FOLDERS)), data=st.data())
def test_a_file_with_changed_bytes_is_refused_or_valid(tmp_path_factory, name, data):
    folder = tmp_path_factory.mktemp("bytes")
    for path in (DATA / name).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    target = data.draw(st.sampled_from(sorted(folder.iterdir())))
    content = bytearray(target.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    target.write_bytes(bytes(content[: data.draw(st.sampled_from([len(content), 100]))]))
    with contextlib.suppress(ScaleError):
        layers = KVScales.from_pretrained(folder).layers.values()
        values = torch.cat([scale.flatten() for layer in layers for scale in layer.static])
        assert bool((values.isfinite() & (values > 0)).all())
        assert not bool((values == 1).all())
