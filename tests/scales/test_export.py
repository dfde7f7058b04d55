"""Tests of saving scales: alone, in a checkpoint, in a copy of a checkpoint, and on the Hub."""

import itertools
import json
import logging
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from huggingface_hub import CommitOperationAdd
from hypothesis import given
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_fp8kv import FP8PagedCache
from hf_fp8kv.errors import ScaleError
from hf_fp8kv.scales import SCALE_FORMATS, KVScales, LayerScales, kv_scales
from hf_fp8kv.scales.checkpoint.checkpoint import LocalFolder
from tests.helpers import server_rules
from tests.scales.test_scales import assert_same
from tests.scales.test_sources import corrupt_config, list_sides, list_values, scale_error

TENSOR_FORMATS = ("tgi", "compressed-tensors", "autofp8", "modelopt", "quark")
# Functions that read a format in the same way as a server.
READERS = {
    "autofp8": server_rules.read_as_sglang,
    "compressed-tensors": server_rules.read_as_sglang,
    "modelopt": server_rules.read_as_sglang,
    "quark": server_rules.read_as_sglang,
    "tgi": server_rules.read_as_tgi,
}
NUM_LAYERS = 3
NUM_HEADS = 2
DIM = 4  # head size
KV_PATH = "kv_scales/kv_scales.safetensors"


def random_scales(kind: str, seed: int = 0, num_layers: int = NUM_LAYERS) -> KVScales:
    """Return random scales of a kind in `KINDS`. All values are different."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator) / 8 + 2**-10

    shapes = {"tensor": (), "head": (NUM_HEADS, 1), "channel": (NUM_HEADS, DIM), "row": (1, DIM)}
    shape = shapes[kind.removeprefix("centered-")]
    layers = {}
    for index in range(num_layers):
        k, v = draw(*shape), draw(*shape)
        center = None
        if kind.startswith("centered"):
            center = (draw(NUM_HEADS, DIM) - 0.06) * 400  # values of both signs, up to 26
        layers[index] = LayerScales(k, v, center)
    return KVScales(layers, model_type="llama")


KINDS = ["tensor", "head", "channel", "row", "centered-tensor", "centered-head", "centered-channel"]


def reduce_scales(scales: KVScales, format: str) -> KVScales:
    """Return the scales that a format stores after the documented reduction."""
    if format == "hf_fp8kv":
        return scales
    return KVScales({index: reduce_layer(layer, format) for index, layer in scales.layers.items()})


def reduce_layer(layer: LayerScales, format: str) -> LayerScales:
    k, v = enlarge_k(layer), layer.v
    if format == "compressed-tensors" and any(x.ndim and x.shape[0] > 1 for x in (k, v)):
        return LayerScales(*(x.amax(1, keepdim=True).expand(NUM_HEADS, 1) for x in (k, v)))
    k, v = k.max(), v.max()
    return LayerScales(*(torch.maximum(k, v),) * 2 if format == "vllm-json" else (k, v))


def enlarge_k(layer: LayerScales) -> torch.Tensor:
    """Return the scale of K, enlarged by the center."""
    if layer.k_center is None:
        return layer.k
    margin = layer.k_center.abs() / 448
    return layer.k + (margin if layer.k.ndim else margin.max())


def assert_holds(folder: Path, scales: KVScales, format: str) -> None:
    """Assert that a folder contains the stored scales, and that servers read equal scales."""
    loaded, expected = KVScales.from_pretrained(folder), reduce_scales(scales, format)
    assert loaded.format == format
    assert_same(loaded, expected)
    if format in READERS and {x.granularity for x in expected.layers.values()} == {"tensor"}:
        server_sides = zip(*READERS[format](folder).values(), strict=True)
        assert [[t.item() for t in side] for side in server_sides] == list_sides(expected)


@pytest.fixture
def folder(model_folder, tmp_path) -> Path:
    """Return the folder of a copy of the checkpoint."""
    return Path(shutil.copytree(model_folder, tmp_path / "folder"))


# -- scales without weights ------------------------------------------------------------------------


@pytest.mark.parametrize("format", SCALE_FORMATS)
def test_saved_scales_are_loaded(tmp_path, caplog, format):
    for kind in KINDS:
        folder, scales = tmp_path / kind, random_scales(kind)
        caplog.clear()
        paths = scales.save_pretrained(folder, format=format)
        assert sorted(paths) == sorted(folder.iterdir())
        is_lossy = reduce_scales(scales, format).digest != scales.digest
        assert_holds(folder, scales, format)
        assert KVScales.from_pretrained(folder).model_type == "llama"
        warnings = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
        assert len(warnings) == is_lossy, "expected one warning if scales are reduced"
        assert all("written as" in message for message in warnings)


@given(
    values=st.lists(st.tuples(*[st.floats(2**-60, 2**60, width=32)] * 2), min_size=1, max_size=4),
    format=st.sampled_from([name for name in SCALE_FORMATS if name != "vllm-json"]),
)
def test_any_scales_of_k_and_v_are_loaded_bitwise(tmp_path_factory, values, format):
    folder = tmp_path_factory.mktemp("pair")
    # Layers without attention have no scales.
    layers = {
        1 + 3 * i: LayerScales(torch.tensor(k), torch.tensor(v)) for i, (k, v) in enumerate(values)
    }
    KVScales(layers).save_pretrained(folder, format=format)
    loaded = KVScales.from_pretrained(folder)
    assert list(loaded.layers) == list(layers)
    assert list(zip(*list_sides(loaded), strict=True)) == values


def test_warnings_describe_the_loss(tmp_path, caplog):
    random_scales("centered-channel").save_pretrained(tmp_path / "a", format="vllm-json")
    assert [r.message for r in caplog.records] == [
        f"{tmp_path / 'a'}: written as vllm-json: K's scales are enlarged by the centers, which "
        "are left out (layers 0, 1, 2); the largest scale of each layer is written (layers 0, 1, 2)"
        "; K and V share the larger scale (layers 0, 1, 2)"
    ]
    KVScales.uniform(2, k=0.5, v=0.5).save_pretrained(tmp_path / "b", format="vllm-json")
    assert KVScales.from_pretrained(tmp_path / "b").model_type is None
    assert "model_type is unknown and written as null" in caplog.text


@pytest.mark.parametrize(("kind", "is_copy"), [("tensor", False), ("centered-head", True)])
def test_each_rank_of_the_json_has_the_larger_scale(tmp_path, model_folder, kind, is_copy):
    scales, folder = random_scales(kind), tmp_path / "out"
    checkpoint = model_folder if is_copy else None
    scales.save_pretrained(folder, format="vllm-json", tp_size=3, checkpoint=checkpoint)
    expected = reduce_scales(scales, "vllm-json")
    path = folder / "kv_cache_scales.json"
    options = {"model_type": "llama", "num_ranks": 3, "num_layers": NUM_LAYERS}
    for rank in range(3):
        assert_same(KVScales.from_pretrained(folder, tp_rank=rank, tp_size=3), expected)
        factors = server_rules.read_scaling_factors(path, rank=rank, **options)
        assert list(factors.values()) == list_values(expected, "k")
    assert_same(KVScales.from_pretrained(folder), expected)


@pytest.mark.parametrize(
    ("head_counts", "expected", "is_lossy"),
    [
        ((0, 2), [[7.0, 7.0], [1.0, 2.0]], False),
        ((2, 3), [[1.0, 2.0], [1.0, 2.0, 3.0]], False),
        ((2, 3, 0), [[2.0], [3.0], [7.0]], True),
    ],
)
def test_scales_per_tensor_are_expanded_if_all_heads_match(
    tmp_path, caplog, head_counts, expected, is_lossy
):
    layers = {}
    for index, num_heads in enumerate(head_counts):
        scale = torch.arange(1.0, 1 + num_heads).view(-1, 1) if num_heads else torch.tensor(7.0)
        layers[index] = LayerScales(scale, scale)
    KVScales(layers).save_pretrained(tmp_path, format="compressed-tensors")
    loaded = KVScales.from_pretrained(tmp_path)
    assert [layer.k.flatten().tolist() for layer in loaded.layers.values()] == expected
    assert ("the largest scale of each layer" in caplog.text) == is_lossy


INVALID_OPTIONS = {
    "gaps-in-the-json": ({"format": "vllm-json"}, "expected the layers 0 to 0, got 1"),
    "ranks-of-a-different-format": ({"format": "tgi", "tp_size": 2}, "tp_size: expected 1"),
    "no-ranks": ({"format": "vllm-json", "tp_size": 0}, "got 0"),
    "no-format": ({"format": None}, "format: expected one of vllm-json, tgi, "),
    "read-only": (
        {"format": "trtllm"},
        "expected one of vllm-json, tgi, .*, hf_fp8kv, got 'trtllm'.* nothing reads scales in it",
    ),
}


@pytest.mark.parametrize(("options", "message"), INVALID_OPTIONS.values(), ids=INVALID_OPTIONS)
def test_invalid_options_write_no_files(tmp_path, options, message):
    scales = KVScales({1: random_scales("tensor").layers[0]})
    with scale_error(message):
        scales.save_pretrained(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", SCALE_FORMATS)
def test_existing_files_are_replaced_only_with_overwrite(tmp_path, monkeypatch, format):
    scales, new_scales = random_scales("tensor", 1), random_scales("tensor", 2)
    scales.save_pretrained(tmp_path, format=format)
    old_content = read_content(tmp_path)
    with scale_error("pass overwrite=True"):
        new_scales.save_pretrained(tmp_path, format=format)
    for index in range(len(old_content)):
        with monkeypatch.context() as patch:
            fail_write(patch, index, OSError(28, "No space left on device"))
            with pytest.raises(ScaleError, match="No space left"):
                new_scales.save_pretrained(tmp_path, format=format, overwrite=True)
        assert read_content(tmp_path) == old_content
    new_scales.save_pretrained(tmp_path, format=format, overwrite=True)
    assert read_content(tmp_path) != old_content
    assert set(read_content(tmp_path)) == set(old_content)


@pytest.mark.parametrize("format", ["tgi", "autofp8"])
def test_the_files_of_a_checkpoint_are_not_replaced_without_overwrite(folder, format):
    old_content = read_content(folder)
    with scale_error(r"without weights|without config\.json"):
        random_scales("tensor").save_pretrained(folder, format=format)
    assert read_content(folder) == old_content


def fail_write(monkeypatch, index: int, failure: BaseException) -> None:
    """Make the write of file number `index`, and all later writes, fail."""
    calls = itertools.count()

    def sync(fd: int) -> None:
        if next(calls) >= index:
            raise failure

    monkeypatch.setattr("os.fsync", sync)


def read_content(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files in a folder, keyed by relative paths."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# -- copies of checkpoints -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sharded_folder(model_folder, tmp_path_factory) -> Path:
    """Return the folder of a checkpoint in several files with an index."""
    folder = tmp_path_factory.mktemp("shards")
    AutoModelForCausalLM.from_pretrained(model_folder).save_pretrained(folder, max_shard_size="1KB")
    assert (folder / "model.safetensors.index.json").exists()
    return folder


def read_weights(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all tensors that servers read, except scales."""
    _, tensors = server_rules.read_checkpoint(folder)
    return {
        name: tensor.view(torch.uint8).numpy().tobytes()
        for name, tensor in tensors.items()
        if not name.endswith("_scale")
    }


def add_scales(source: Path, target: Path, format: str, kind: str = "tensor", **options) -> Path:
    """Copy a checkpoint, add random scales to the copy, and return the path of the copy."""
    random_scales(kind).save_pretrained(target, format=format, checkpoint=source, **options)
    return target


# Each format once as a copy or in place, each kind of source, and each place of old scales.
@pytest.mark.parametrize(
    ("source", "old_format", "format", "is_copy"),
    [
        ("model_folder", None, "vllm-json", True),
        ("model_folder", "hf_fp8kv", "autofp8", True),
        ("model_folder", None, "quark", False),
        ("model_folder", "compressed-tensors", "tgi", True),
        ("model_folder", "modelopt", "modelopt", False),
        ("sharded_folder", "tgi", "compressed-tensors", False),
        ("sharded_folder", "quark", "quark", True),
        ("sharded_folder", "vllm-json", "hf_fp8kv", True),
        ("sharded_folder", None, "tgi", False),
    ],
)
def test_scales_are_saved_with_a_model(tmp_path, request, source, old_format, format, is_copy):
    """transformers, vLLM, SGLang and TGI can load the folder, which is one file or has an index."""
    source = request.getfixturevalue(source)
    folder = Path(shutil.copytree(source, tmp_path / "folder"))
    if old_format is not None:
        random_scales("tensor", 9).save_pretrained(folder, format=old_format, overwrite=True)
    old_content = read_content(folder)
    kind = "tensor" if format in READERS else "centered-head"
    target = tmp_path / "copy" if is_copy else folder
    options = {"checkpoint": folder} if is_copy else {}
    random_scales(kind).save_pretrained(target, format=format, overwrite=True, **options)
    if is_copy:
        assert read_content(folder) == old_content
        assert not (target / ".cache").exists()
    assert read_weights(target) == read_weights(source)
    assert_holds(target, random_scales(kind), format)
    # Without old scales, and as a copy, the configs and the names of tensors would be the same.
    direct = add_scales(source, tmp_path / "direct", format, kind)
    assert_same_json(target / "config.json", direct / "config.json")
    tensor_names, expected_names = (
        server_rules.read_checkpoint(path)[1].keys() for path in (target, direct)
    )
    assert tensor_names == expected_names
    if format in ("compressed-tensors", "autofp8", "modelopt", "quark"):
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == tensor_names
        assert index["metadata"] == {}  # the size of the old tensors was removed
    if format != "quark":  # transformers requires the quark package
        assert_loads_the_same(source, target)


def assert_same_json(actual: Path, expected: Path) -> None:
    assert json.loads(actual.read_text()) == json.loads(expected.read_text())


def assert_loads_the_same(source: Path, copy: Path) -> None:
    """Assert that transformers loads equal weights from both folders, without missing keys."""
    expected_model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    loaded, info = AutoModelForCausalLM.from_pretrained(
        copy, dtype="auto", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert all(name.endswith("_scale") for name in info["unexpected_keys"])
    state, expected = loaded.state_dict(), expected_model.state_dict()
    assert {n for n in state if not n.endswith("_scale")} == set(expected)
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_a_cache_of_the_copy_stores_the_same_bytes(tmp_path, model_folder):
    copy = add_scales(model_folder, tmp_path / "copy", "modelopt")
    loaded = AutoModelForCausalLM.from_pretrained(copy, attn_implementation="fp8_paged")
    logits = []
    for cache in (
        FP8PagedCache.from_pretrained(copy),
        FP8PagedCache(loaded.config, scales=random_scales("tensor")),
        FP8PagedCache(loaded.config, scales=random_scales("tensor", seed=1)),
    ):
        for tokens in torch.arange(12).view(1, -1).split(8, dim=1):
            with torch.no_grad():
                output = loaded(tokens, past_key_values=cache)
        logits.append(output.logits)
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])


@pytest.mark.parametrize(("kind", "strategy"), [("tensor", "tensor"), ("head", "attn_head")])
def test_compressed_tensors_reads_the_written_config(tmp_path, model_folder, kind, strategy):
    config = pytest.importorskip("compressed_tensors.quantization")
    copy = add_scales(model_folder, tmp_path / "copy", "compressed-tensors", kind)
    block = json.loads((copy / "config.json").read_text())["quantization_config"]
    scheme = config.QuantizationConfig.model_validate(block).kv_cache_scheme
    assert (scheme.num_bits, scheme.type, scheme.symmetric) == (8, "float", True)
    assert (scheme.strategy, scheme.dynamic) == (strategy, False)


def test_the_config_for_quark_has_the_entries_that_its_package_requires(tmp_path, model_folder):
    copy = add_scales(model_folder, tmp_path / "copy", "quark")
    config = json.loads((copy / "config.json").read_text())["quantization_config"]
    tools = Path(__file__).parents[1] / "data" / "tools"
    path = tools / "quark-0.13" / "llama-fp8-kv-postrope" / "config.json"
    expected = json.loads(path.read_text())["quantization_config"]
    assert config["layer_type_quant_config"] == {}
    assert config["kv_cache_post_rope"] is True  # otherwise, readers apply the scales before RoPE
    for entry in ("layer_quant_config", "kv_cache_quant_config"):
        for projection in ("*k_proj", "*v_proj"):
            assert set(config[entry][projection]) == set(expected[entry][projection])


BAD_SOURCES = {
    "no-config": (lambda folder: (folder / "config.json").unlink(), "config.json, got none"),
    "config-cut-off": (
        lambda folder: (folder / "config.json").write_text("{"),
        "expected a JSON file",
    ),
    "weights-cut-off": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"x"),
        "expected a safetensors file",
    ),
    "pickled-weights": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "expected weights in safetensors",
    ),
    "existing-scales": (
        lambda folder: save_file(
            load_file(folder / "model.safetensors")
            | {"model.layers.0.self_attn.k_scale": torch.ones(1)},
            folder / "model.safetensors",
        ),
        "expected a checkpoint without KV scales",
    ),
    "a-different-model": (corrupt_config(model_type="qwen2"), "expected a 'llama' model"),
    "more-layers": (corrupt_config(num_hidden_layers=9), "without layers 3, 4"),
    "no-attention": (
        lambda folder: save_file(
            {"model.norm.weight": torch.ones(1)}, folder / "model.safetensors"
        ),
        "expected one attention module in layer 0, got none",
    ),
    "int8-cache-declared": (corrupt_config(kv_cache_dtype="int8"), "'int8'"),
    "fnuz-declared": (
        corrupt_config(kv_cache_dtype="fp8_e4m3fnuz"),
        "expected to read the written scales",
    ),
    "a-cache-of-latents": (corrupt_config(kv_lora_rank=512), "Its servers cache latents"),
    "weights-of-a-different-tool": (
        corrupt_config(quantization_config={"quant_method": "gptq", "bits": 4}),
        "the quant_method 'fp8', got 'gptq'",
    ),
}


# -- folders of models -----------------------------------------------------------------------------


QUANTIZED_CONFIGS = {
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"]}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    },
    "autofp8": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "ignored_layers": ["lm_head"],
    },
    "modelopt": {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "ignore": ["lm_head"],
        "kv_cache_quant_algo": None,
    },
    "quark": {
        "quant_method": "quark",
        "export": {"kv_cache_group": [], "pack_method": "reorder"},
        "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}, "output_tensors": None},
        "layer_quant_config": {},
        "exclude": ["lm_head"],
    },
}


@pytest.mark.parametrize(
    "weights",
    [QUANTIZED_CONFIGS["modelopt"], {"quant_method": "gptq", "bits": 4}],
    ids=lambda x: x["quant_method"],
)
def test_scales_for_tgi_are_read_next_to_quantized_weights(folder, weights):
    corrupt_config(quantization_config=weights)(folder)
    for seed in (1, 0):  # the second call replaces scales
        scales = random_scales("tensor", seed)
        scales.save_pretrained(folder, format="tgi", overwrite=True)
        assert list_sides(KVScales.from_pretrained(folder)) == list_sides(scales)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    # An entry without a value declares nothing and may be omitted.
    assert {**dict.fromkeys(weights), **config} == weights


def test_other_files_in_the_folder_of_a_model_are_kept(model_folder, folder):
    other_files = {
        ".hidden.safetensors": b"mine", "pytorch_model.bin": b"weights", "sub/more.pth": b"more",
        "folder.safetensors/part": b"part",
    }  # fmt: skip
    for name, text in other_files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text)
    random_scales("tensor").save_pretrained(folder, format="autofp8", overwrite=True)
    new_content = read_content(folder)
    assert {name: new_content[name] for name in other_files} == other_files
    assert_loads_the_same(model_folder, folder)


def test_added_scales_do_not_replace_one_of_two_weight_files(folder):
    save_file({"a": torch.ones(1)}, folder / "model-00001-of-00001.safetensors")
    old_content = read_content(folder)
    with scale_error("got two files"):
        random_scales("tensor").save_pretrained(folder, format="autofp8", overwrite=True)
    assert read_content(folder) == old_content


def test_kv_scales_are_saved_in_a_subfolder_next_to_weights(folder):
    old_content = read_content(folder)
    scales, new_scales = random_scales("centered-head", 1), random_scales("channel", 2)
    paths = scales.save_pretrained(folder)
    assert paths == [folder / "kv_scales" / "kv_scales.safetensors"]
    with pytest.raises(ScaleError, match="pass overwrite=True"):
        new_scales.save_pretrained(folder)
    new_scales.save_pretrained(folder, overwrite=True)
    assert KVScales.from_pretrained(folder).digest == new_scales.digest
    new_content = read_content(folder)
    assert {*new_content} - {*old_content} == {KV_PATH}
    assert {name: new_content[name] for name in old_content} == old_content
    for target in (folder / "kv_scales", folder):
        with pytest.raises(ScaleError, match="read before all others"):
            scales.save_pretrained(target, format="autofp8", overwrite=True)
    assert read_content(folder) == new_content


def test_old_scale_files_are_not_copied(tmp_path, folder):
    KVScales.uniform(NUM_LAYERS, k=8.0).save_pretrained(folder, format="vllm-json")
    KVScales.uniform(NUM_LAYERS, k=8.0).save_pretrained(folder)
    (folder / "kv_scales" / "notes.txt").write_text("mine")
    copy = add_scales(folder, tmp_path / "copy", "autofp8")
    assert KVScales.from_pretrained(copy).format == "autofp8"
    assert [path.name for path in (copy / "kv_scales").iterdir()] == ["notes.txt"]


def test_scales_next_to_added_weights_move_to_a_subfolder(model_folder, folder):
    random_scales("head", 1).save_pretrained(folder / "separate")
    (folder / "separate" / "kv_scales.safetensors").rename(folder / "kv_scales.safetensors")
    scales = random_scales("head", 2)
    scales.save_pretrained(folder, overwrite=True)
    assert {*read_content(folder)} - {*read_content(model_folder)} == {KV_PATH}
    assert KVScales.from_pretrained(folder).digest == scales.digest


@pytest.mark.parametrize("old", ["tgi", "compressed-tensors"])
def test_nothing_is_written_next_to_scales_that_are_read_first(tmp_path, old, hub, monkeypatch):
    folder = tmp_path / "scales"
    random_scales("tensor").save_pretrained(folder, format=old)
    content = read_content(folder)
    for overwrite in (False, True):
        with scale_error("without scales among its tensors, .* read before kv_cache_scales.json"):
            KVScales.uniform(2, k=8.0).save_pretrained(
                folder, format="vllm-json", overwrite=overwrite
            )
    assert read_content(folder) == content
    fake = hub(*content)
    monkeypatch.setattr(kv_scales, "HubFolder", lambda *_: LocalFolder(folder))
    with scale_error("without scales among its tensors"):
        KVScales.uniform(2, k=8.0).push_to_hub("org/model", format="vllm-json")
    assert not fake.uploaded


# Each replaced format once, and each way to declare a cache.
@pytest.mark.parametrize(
    ("old", "new", "has_entries"),
    [
        ("modelopt", "quark", False),
        ("quark", "compressed-tensors", False),
        ("compressed-tensors", "autofp8", True),
        ("tgi", "modelopt", True),
    ],
)
def test_scales_without_weights_can_change_format(tmp_path, model_folder, old, new, has_entries):
    folder = tmp_path / "folder"
    if has_entries:  # the folder has the config of a model without weights
        folder.mkdir()
        shutil.copy(add_scales(model_folder, tmp_path / "copy", old) / "config.json", folder)
    else:
        random_scales("tensor", 1).save_pretrained(folder, format=old)
    scales = random_scales("tensor", 2)
    scales.save_pretrained(folder, format=new, overwrite=True)
    assert list_sides(KVScales.from_pretrained(folder)) == list_sides(scales)


def test_weights_in_a_file_with_the_name_of_scales_are_kept(tmp_path, sharded_folder):
    folder = Path(shutil.copytree(sharded_folder, tmp_path / "folder"))
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["extra.weight"] = "model-kv-scales.safetensors"
    path.write_text(json.dumps(index))
    save_file({"extra.weight": torch.ones(1)}, folder / "model-kv-scales.safetensors")
    old_content = read_content(folder)
    for target, options in ((folder, {}), (tmp_path / "copy", {"checkpoint": folder})):
        with scale_error("expected a file of scales to replace, got .*extra.weight"):
            random_scales("tensor").save_pretrained(target, format="tgi", overwrite=True, **options)
    assert read_content(folder) == old_content


def test_a_folder_with_links_and_without_rights_is_copied(tmp_path, folder):
    """The folder has links, as in a Hub cache. Broken or circular links and pipes are skipped."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for index, path in enumerate(sorted(p for p in folder.iterdir() if p.is_file())):
        blob = path.rename(blobs / str(index))
        path.symlink_to(blob)
        blob.chmod(0o444)
    blob_content = read_content(blobs)
    expected_names = set(read_content(add_scales(folder, tmp_path / "plain", "tgi")))
    (folder / "circle").symlink_to(folder)
    (folder / "gone").symlink_to("nowhere")
    os.mkfifo(folder / "pipe")
    for path in (folder / "original", folder):
        path.chmod(0o555)
    for weights in ("copy", "link"):
        copy = add_scales(folder, tmp_path / weights, "tgi", weights=weights)
        assert set(read_content(copy)) == expected_names
        assert all(path.stat().st_mode & 0o200 for path in (copy, copy / "original"))
        weights_file = copy / "model-00001-of-00001.safetensors"
        assert weights_file.samefile(folder / "model.safetensors") == (weights == "link")
    folder.chmod(0o755)
    random_scales("tensor").save_pretrained(folder, format="tgi", overwrite=True)
    assert read_content(blobs) == blob_content


@pytest.mark.parametrize(
    ("format", "is_nested"),
    [("compressed-tensors", True), ("autofp8", False), ("modelopt", True), ("quark", False)],
)
def test_the_config_of_quantized_weights_is_kept(tmp_path, folder, format, is_nested):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = QUANTIZED_CONFIGS[format]
    config = {"model_type": "llava", "text_config": config} if is_nested else config
    (folder / "config.json").write_text(json.dumps(config))
    copy = add_scales(folder, tmp_path / "copy", format)
    new_config = json.loads((copy / "config.json").read_text())
    block = (new_config["text_config"] if is_nested else new_config)["quantization_config"]
    for entry in ("quant_method", "quant_algo", "ignore", "ignored_layers", "config_groups",
                  "activation_scheme", "exclude", "global_quant_config"):  # fmt: skip
        assert block.get(entry) == QUANTIZED_CONFIGS[format].get(entry)
    if format == "quark":
        assert block["layer_quant_config"]["*k_proj"]["weight"] == {"dtype": "fp8_e4m3"}
    assert ("quantization_config" in new_config) == (not is_nested)
    assert KVScales.from_pretrained(copy).format == format


def test_a_second_config_that_declares_the_weights_is_extended(tmp_path, folder):
    second_config = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(second_config))
    with pytest.raises(ScaleError, match="expected unquantized weights"):
        add_scales(folder, tmp_path / "copy", "autofp8")
    copy = add_scales(folder, tmp_path / "copy", "modelopt")
    saved_config = json.loads((copy / "hf_quant_config.json").read_text())
    assert saved_config["quantization"] == {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    assert (copy / "config.json").read_bytes() == (folder / "config.json").read_bytes()


@pytest.mark.parametrize(
    "prefix", ["model.language_model.layers", "transformer.h", "backbone.layers"]
)
def test_scales_are_named_after_their_attention_module(tmp_path, prefix):
    module = {"transformer.h": "attn", "backbone.layers": "mixer"}.get(prefix, "self_attn")
    source = tmp_path / "source"
    source.mkdir()
    names = [f"{prefix}.{i}.{module}.o_proj.weight" for i in range(NUM_LAYERS)]
    tower = [f"vision_tower.layers.{i}.self_attn.o_proj.weight" for i in range(9)]
    save_file({n: torch.ones(1) for n in names + tower}, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"num_hidden_layers": NUM_LAYERS}))
    copy = add_scales(source, tmp_path / "copy", "modelopt")
    scales = load_file(copy / "model-kv-scales.safetensors")
    assert set(scales) == {
        f"{prefix}.{i}.{module}.{s}_proj.{s}_scale" for i in range(NUM_LAYERS) for s in "kv"
    }


@pytest.mark.parametrize(("spoil", "message"), BAD_SOURCES.values(), ids=BAD_SOURCES)
def test_an_unsuitable_checkpoint_is_rejected(tmp_path, folder, spoil, message):
    """No copy is written, and no file is added to the folder."""
    spoil(folder)
    old_content = read_content(folder)
    scales, options = random_scales("tensor"), {"format": "autofp8"}
    calls = [lambda: scales.save_pretrained(tmp_path / "copy", checkpoint=folder, **options)]
    if "without KV scales" not in message:  # overwrite=True replaces such scales
        calls.append(lambda: scales.save_pretrained(folder, overwrite=True, **options))
    for call in calls:
        with scale_error(message) as error:
            call()
        assert ".part" not in str(error.value)
        assert ".new" not in str(error.value)
        assert read_content(folder) == old_content
        assert sorted(path.name for path in tmp_path.iterdir()) == ["folder"]


SHARD = "model-00002-of"
BAD_SHARDS = {
    "missing": (lambda shard: shard.unlink(), "expected a safetensors file"),
    "different-tensors": (
        lambda shard: save_file({"a": torch.ones(1)}, shard),
        "expected the tensors of the index, found none named model",
    ),
}


@pytest.mark.parametrize(("spoil", "message"), BAD_SHARDS.values(), ids=BAD_SHARDS)
def test_an_incomplete_checkpoint_is_not_copied(tmp_path, sharded_folder, spoil, message):
    source = Path(shutil.copytree(sharded_folder, tmp_path / "source"))
    spoil(next(path for path in source.iterdir() if path.name.startswith(SHARD)))
    with scale_error(message, SHARD):
        add_scales(source, tmp_path / "copy", "tgi")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_copy_never_replaces_files(tmp_path, model_folder, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    for target in (tmp_path / "mine", tmp_path / "mine" / "file", model_folder):
        with pytest.raises(ScaleError, match=r"new or empty|expected a folder, got a file"):
            add_scales(model_folder, target, "tgi", overwrite=True)
    assert read_content(tmp_path) == {"mine/file": b"mine"}
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for target in (".", "new/.."):
        with scale_error("or the working folder", target):
            add_scales(model_folder, target, "tgi")
    monkeypatch.chdir(tmp_path)
    assert add_scales(model_folder, tmp_path / "empty", "tgi")


COPY_OPTIONS = {
    "weights": ({"format": "tgi", "weights": "move"}, "weights: expected 'copy' or 'link'"),
    "hub": ({"format": "tgi", "checkpoint": "org/model"}, "snapshot_download"),
}


@pytest.mark.parametrize(("options", "message"), COPY_OPTIONS.values(), ids=COPY_OPTIONS)
def test_invalid_options_of_a_copy_are_rejected(tmp_path, model_folder, options, message):
    with scale_error(message):
        random_scales("tensor").save_pretrained(
            tmp_path / "copy", **{"checkpoint": model_folder} | options
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("index", "failure"), [(0, KeyboardInterrupt()), (1, MemoryError()), (3, OSError("stopped"))]
)
def test_an_interrupted_copy_leaves_no_files(tmp_path, model_folder, monkeypatch, index, failure):
    old_content = read_content(model_folder)
    fail_write(monkeypatch, index, failure)
    with pytest.raises((type(failure), ScaleError)):
        add_scales(model_folder, tmp_path / "copy", "autofp8")
    assert not list(tmp_path.iterdir())
    assert read_content(model_folder) == old_content


# -- the Hub, without a network --------------------------------------------------------------------


class FakeApi:
    """A fake `HfApi` that records the requests of an upload, and lists `files`."""

    def __init__(self, *files: str, failing: str = "") -> None:
        self.files, self.failing = list(files), failing
        self.requests: list[str] = []
        self.uploaded: dict[str, bytes] = {}
        self.token: object = None

    def __call__(self, token: object) -> "FakeApi":
        self.token = token
        return self

    def _record_request(self, name: str) -> None:
        self.requests.append(name)
        if name == self.failing:
            raise OSError("no route to the host")

    def create_repo(self, repo_id: str, *, private: bool | None, exist_ok: bool) -> None:
        assert exist_ok
        self._record_request(f"repo {repo_id} {private}")

    def create_branch(self, repo_id: str, *, branch: str, exist_ok: bool) -> None:
        assert exist_ok
        self._record_request(f"branch {branch}")

    def list_repo_files(self, repo_id: str, *, revision: str | None) -> list[str]:
        self._record_request("list")
        return self.files

    def hf_hub_download(self, repo_id: str, name: str, *, revision: str | None) -> str:
        self._record_request("card")
        path = self.folder / name
        path.write_text("---\nlicense: mit\n---\n# Mine\n")
        return str(path)

    def create_commit(self, repo_id: str, operations: list, **options: object):
        self._record_request("commit")
        added = [x for x in operations if isinstance(x, CommitOperationAdd)]
        self.uploaded = {x.path_in_repo: x.path_or_fileobj for x in added}
        self.deleted = [x.path_in_repo for x in operations if x not in added]
        return SimpleNamespace(commit_url=f"https://hf.co/{repo_id}/{options['commit_message']}")


@pytest.fixture
def hub(monkeypatch, tmp_path_factory):
    """Return a function that replaces the Hub's client with a fake that lists the given files."""

    def install(*files: str, **options: str) -> FakeApi:
        fake = FakeApi(*files, **options)
        fake.folder = tmp_path_factory.mktemp("hub")
        monkeypatch.setattr(kv_scales, "HfApi", fake)
        return fake

    return install


@pytest.mark.parametrize("format", ["hf_fp8kv", "modelopt"])
def test_uploaded_files_match_saved_files(tmp_path, hub, format):
    fake = hub("README.md")
    scales = random_scales("tensor")
    address = scales.push_to_hub("org/new", format=format, private=True, token="t")
    assert address == "https://hf.co/org/new/Add scales of the KV cache"
    assert (fake.requests, fake.token) == (["repo org/new True", "list", "card", "commit"], "t")
    scales.save_pretrained(tmp_path, format=format)
    card = fake.uploaded.pop("README.md").decode()
    assert fake.uploaded == read_content(tmp_path)
    assert card.startswith("---\nlicense: mit\ntags:\n- fp8\n- kv-cache\n")
    assert "# Mine" in card
    assert 'scales="org/new"' in card
    fake = hub()
    random_scales("tensor").push_to_hub("org/new", revision="fp8")
    assert fake.requests == ["repo org/new None", "branch fp8", "list", "commit"]


def test_files_of_a_repository_are_replaced_only_with_overwrite(hub):
    fake = hub("kv_scales.safetensors", "model.safetensors", "config.json")
    with scale_error("pass overwrite=True"):
        random_scales("tensor").push_to_hub("org/model")
    assert not fake.uploaded
    random_scales("tensor").push_to_hub("org/model", overwrite=True)
    assert set(fake.uploaded) == {"README.md", KV_PATH}
    assert fake.deleted == ["kv_scales.safetensors"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("config.json",), "expected a repository without weights"),
        (("config.json", "pytorch_model.bin"), "expected a repository without weights"),
        (("kv_scales/kv_scales.safetensors",), "read before all others"),
    ],
)
def test_an_unsuitable_repository_is_rejected(hub, files, message):
    fake = hub(*files)
    with scale_error(message):
        random_scales("tensor").push_to_hub("org/model", format="autofp8", overwrite=True)
    assert not fake.uploaded


@pytest.mark.parametrize("failing", ["repo org/model None", "list", "commit"])
def test_an_unreachable_hub_is_a_scale_error(hub, failing):
    hub(failing=failing)
    with scale_error(r"org/model: .*no route"):
        random_scales("tensor").push_to_hub("org/model")
