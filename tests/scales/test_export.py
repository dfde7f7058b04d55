"""Tests of saving scales: alone, in a checkpoint, in a copy of a checkpoint, and on the Hub."""

import itertools
import json
import logging
import os
import shutil
import stat
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
from tests.helpers import server_rules
from tests.helpers.server_rules import LoadError
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", SCALE_FORMATS)
def test_saved_scales_are_loaded(tmp_path, caplog, format, kind):
    scales = random_scales(kind)
    paths = scales.save_pretrained(tmp_path, format=format)
    assert sorted(paths) == sorted(tmp_path.iterdir())
    is_lossy = reduce_scales(scales, format).digest != scales.digest
    assert_holds(tmp_path, scales, format)
    assert KVScales.from_pretrained(tmp_path).model_type == "llama"
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


@given(seed=st.integers(0, 2**32), kind=st.sampled_from(KINDS),
       format=st.sampled_from(tuple(SCALE_FORMATS)))  # fmt: skip
def test_reduced_scales_cover_the_same_values(tmp_path_factory, seed, kind, format):
    scales = random_scales(kind, seed, num_layers=1)
    folder = tmp_path_factory.mktemp("reduced")
    scales.save_pretrained(folder, format=format)
    if format == "hf_fp8kv":
        return
    sizes = {"num_kv_heads": NUM_HEADS, "k_head_dim": DIM, "v_head_dim": DIM}
    layer = scales.for_layer(0, **sizes)
    reduced = KVScales.from_pretrained(folder).for_layer(0, **sizes)
    center = torch.zeros(NUM_HEADS, DIM) if layer.k_center is None else layer.k_center
    for sign in (-1, 1):
        assert bool(((center + sign * 448 * layer.k).abs() <= 448 * reduced.k * (1 + 1e-6)).all())
    assert bool((layer.v <= reduced.v).all())


def test_warnings_name_the_folder(tmp_path, caplog):
    KVScales.uniform(2, 1.0, 1.0).save_pretrained(tmp_path / "a", format="autofp8")
    [message] = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    assert message.startswith(f"{tmp_path / 'a'}: every KV scale is exactly 1.0")


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
def test_each_rank_of_the_json_has_the_largest_scale(tmp_path, model_folder, kind, is_copy):
    scales, folder = random_scales(kind), tmp_path / "out"
    checkpoint = model_folder if is_copy else None
    scales.save_pretrained(folder, format="vllm-json", tp_size=3, checkpoint=checkpoint)
    for rank in range(3):
        loaded = KVScales.from_pretrained(folder, tp_rank=rank, tp_size=3)
        assert_same(loaded, reduce_scales(scales, "vllm-json"))
    assert_same(KVScales.from_pretrained(folder), reduce_scales(scales, "vllm-json"))


def test_scales_per_tensor_are_expanded_if_all_heads_match(tmp_path, caplog):
    def make_heads(num_heads: int) -> LayerScales:
        return LayerScales(*(torch.arange(1.0, 1 + num_heads).view(-1, 1) for _ in "kv"))

    def save_and_load(*layers: LayerScales) -> list[list[float]]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        scales = KVScales(dict(enumerate(layers)))
        scales.save_pretrained(folder, format="compressed-tensors")
        return [s.k.flatten().tolist() for s in KVScales.from_pretrained(folder).layers.values()]

    tensor_scales = LayerScales(torch.tensor(7.0), torch.tensor(7.0))
    assert save_and_load(tensor_scales, make_heads(2)) == [[7.0, 7.0], [1.0, 2.0]]
    assert save_and_load(make_heads(2), make_heads(3)) == [[1.0, 2.0], [1.0, 2.0, 3.0]]
    assert "the largest scale of each layer" not in caplog.text
    assert save_and_load(make_heads(2), make_heads(3), tensor_scales) == [[2.0], [3.0], [7.0]]
    assert "the largest scale of each layer is written (layers 0, 1)" in caplog.text


INVALID_OPTIONS = {
    "gaps-in-the-json": ({"format": "vllm-json"}, "expected the layers 0 to 0, got 1"),
    "ranks-of-a-different-format": ({"format": "tgi", "tp_size": 2}, "tp_size: expected 1"),
    "no-ranks": ({"format": "vllm-json", "tp_size": 0}, "got 0"),
    **{
        str(name): ({"format": name}, "format: expected one of vllm-json, tgi, ")
        for name in ("gguf", "", None)
    },
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
def test_existing_files_are_replaced_only_with_overwrite(tmp_path, format):
    scales, new_scales = random_scales("tensor", 1), random_scales("tensor", 2)
    scales.save_pretrained(tmp_path, format=format)
    old_content = read_content(tmp_path)
    with scale_error("pass overwrite=True"):
        new_scales.save_pretrained(tmp_path, format=format)
    assert read_content(tmp_path) == old_content
    new_scales.save_pretrained(tmp_path, format=format, overwrite=True)
    assert read_content(tmp_path) != old_content
    assert set(read_content(tmp_path)) == set(old_content)


@pytest.mark.parametrize("format", TENSOR_FORMATS)
def test_the_files_of_a_checkpoint_are_not_replaced_without_overwrite(folder, format):
    old_content = read_content(folder)
    with scale_error(r"without weights|without config\.json"):
        random_scales("tensor").save_pretrained(folder, format=format)
    assert read_content(folder) == old_content


@pytest.mark.parametrize("format", SCALE_FORMATS)
@pytest.mark.parametrize("index", [0, 2])
def test_a_full_disk_changes_no_files(tmp_path, monkeypatch, format, index):
    random_scales("tensor", 1).save_pretrained(tmp_path, format=format)
    old_content = read_content(tmp_path)
    index = min(index, len(old_content) - 1)
    fail_write(monkeypatch, index, OSError(28, "No space left on device"))
    with pytest.raises(ScaleError, match="No space left"):
        random_scales("tensor", 2).save_pretrained(tmp_path, format=format, overwrite=True)
    assert read_content(tmp_path) == old_content


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


@pytest.mark.parametrize("format", SCALE_FORMATS)
@pytest.mark.parametrize("source", ["model_folder", "sharded_folder"])
def test_a_copy_has_the_same_weights_and_can_be_loaded(tmp_path, request, source, format):
    """transformers, vLLM, SGLang and TGI can load the copy, which is one file or has an index."""
    source = request.getfixturevalue(source)
    old_content = read_content(source)
    kind = "tensor" if format in READERS else "centered-head"
    copy = add_scales(source, tmp_path / "copy", format, kind)
    assert read_content(source) == old_content
    assert read_weights(copy) == read_weights(source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"]
    assert_holds(copy, random_scales(kind), format)
    if source.name.startswith("llama"):
        assert {"tokenizer.json", "original/params.json"} <= set(read_content(copy))
    assert not (copy / ".cache").exists()
    # Servers read the files of the index, or all files without an index.
    _, tensors = server_rules.read_checkpoint(copy)
    has_scale_file = format in ("compressed-tensors", "autofp8", "modelopt", "quark")
    assert any(not name.endswith("weight") for name in tensors) == has_scale_file
    if has_scale_file:
        index = json.loads((copy / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == tensors.keys()
        assert index["metadata"] == {}  # the size of the old tensors was removed
    if format != "quark":  # transformers requires the quark package
        assert_loads_the_same(source, copy)


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


@pytest.mark.parametrize("format", ["modelopt", "hf_fp8kv"])
def test_a_cache_of_the_copy_stores_the_same_bytes(tmp_path, model_folder, format):
    copy = add_scales(model_folder, tmp_path / "copy", format)
    loaded = AutoModelForCausalLM.from_pretrained(copy, attn_implementation="fp8_paged")
    tokens = torch.arange(12).view(1, -1)
    caches = [
        FP8PagedCache.from_pretrained(copy),
        FP8PagedCache(loaded.config, scales=random_scales("tensor")),
        FP8PagedCache(loaded.config, scales=random_scales("tensor", seed=1)),
    ]
    logits = []
    for cache in caches:
        for part in (tokens[:, :8], tokens[:, 8:]):
            with torch.no_grad():
                output = loaded(part, past_key_values=cache)
        logits.append(output.logits)
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])


@pytest.mark.parametrize("kind", ["tensor", "head"])
def test_compressed_tensors_reads_the_written_config(tmp_path, model_folder, kind):
    config = pytest.importorskip("compressed_tensors.quantization")
    copy = add_scales(model_folder, tmp_path / "copy", "compressed-tensors", kind)
    block = json.loads((copy / "config.json").read_text())["quantization_config"]
    loaded = config.QuantizationConfig.model_validate(block)
    scheme = loaded.kv_cache_scheme
    assert (scheme.num_bits, scheme.type, scheme.symmetric) == (8, "float", True)
    assert scheme.strategy == {"tensor": "tensor", "head": "attn_head"}[kind]
    assert not scheme.dynamic


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


@pytest.mark.parametrize("format", ["autofp8", "vllm-json"])
def test_linked_weights_are_the_same_file(tmp_path, model_folder, format):
    copy = add_scales(model_folder, tmp_path / "copy", format, weights="link")
    name = next(p.name for p in copy.glob("model*.safetensors") if "scales" not in p.name)
    assert (copy / name).samefile(model_folder / "model.safetensors")
    assert not (copy / "tokenizer.json").samefile(model_folder / "tokenizer.json")
    assert list_values(KVScales.from_pretrained(copy), "v")


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


@pytest.mark.parametrize("format", TENSOR_FORMATS)
@pytest.mark.parametrize("source", ["model_folder", "sharded_folder"])
def test_scales_are_added_to_a_model(tmp_path, request, source, format):
    source = request.getfixturevalue(source)
    folder = Path(shutil.copytree(source, tmp_path / "folder"))
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"mine": {"nested": [1]}}))
    entries = json.loads(config.read_text())
    old_content = read_content(folder)
    for seed in (0, 1):  # the second call replaces scales
        scales = random_scales("tensor", seed)
        scales.save_pretrained(folder, format=format, overwrite=True)
        assert list_sides(KVScales.from_pretrained(folder)) == list_sides(scales)
    new_entries = json.loads(config.read_text())
    assert {name: new_entries[name] for name in entries} == entries
    assert read_weights(folder) == read_weights(source)
    new_content = read_content(folder)
    weights = {name for name in old_content if name.endswith((".safetensors", ".index.json"))}
    unchanged = {*old_content} - weights - {"config.json"}
    assert all(new_content[name] == old_content[name] for name in unchanged)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder"]
    if format != "quark":  # transformers requires the quark package
        assert_loads_the_same(source, folder)
        loaded = AutoModelForCausalLM.from_pretrained(folder).config.to_dict()
        assert loaded["mine"] == entries["mine"]


@pytest.mark.parametrize("index", [0, 1, 2, 3, pytest.param(4, marks=pytest.mark.full), 5])
def test_an_interrupt_leaves_a_loadable_model(tmp_path, model_folder, folder, monkeypatch, index):
    old_content = read_content(folder)
    replace, calls = Path.replace, []

    def interrupt(self: Path, target: Path) -> None:
        if target.parent == folder:
            calls.append(target.name)
            if len(calls) > index:
                raise KeyboardInterrupt
        replace(self, target)

    monkeypatch.setattr(Path, "replace", interrupt)
    scales = random_scales("tensor")
    with pytest.raises(KeyboardInterrupt):
        scales.save_pretrained(folder, format="modelopt", overwrite=True)
    assert (folder / "config.json").read_bytes() == old_content["config.json"]
    assert_loads_the_same(model_folder, folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder"]
    monkeypatch.undo()
    scales.save_pretrained(folder, format="modelopt", overwrite=True)
    assert list_sides(KVScales.from_pretrained(folder)) == list_sides(scales)
    assert not (folder / "model.safetensors").exists()
    assert_loads_the_same(model_folder, folder)


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
OTHER_TOOLS = [
    {"quant_method": "gptq", "bits": 4},
    {"quant_method": "bitsandbytes", "load_in_4bit": True},
]


@pytest.mark.parametrize(
    "weights", [*QUANTIZED_CONFIGS.values(), *OTHER_TOOLS], ids=lambda x: x["quant_method"]
)
def test_scales_for_tgi_are_read_next_to_quantized_weights(tmp_path, folder, weights):
    corrupt_config(quantization_config=weights)(folder)
    copy = add_scales(folder, tmp_path / "copy", "tgi")
    old_scales, scales = random_scales("tensor", 1), random_scales("tensor")
    for saved_scales in (old_scales, scales):  # the second call replaces scales
        saved_scales.save_pretrained(folder, format="tgi", overwrite=True)
    for path in (copy, folder):
        loaded = KVScales.from_pretrained(path)
        assert list_sides(loaded) == list_sides(scales) != list_sides(old_scales)
        config = json.loads((path / "config.json").read_text())["quantization_config"]
        # An entry without a value declares nothing and may be omitted.
        assert {**dict.fromkeys(weights), **config} == weights


def test_other_files_in_the_folder_of_a_model_are_kept(tmp_path, model_folder, folder):
    other_files = {
        ".hidden.safetensors": b"mine", "pytorch_model.bin": b"weights", "sub/more.pth": b"more",
        "folder.safetensors/part": b"part",
    }  # fmt: skip
    for name, text in other_files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text)
    ambiguous_folder = Path(shutil.copytree(folder, tmp_path / "two"))
    random_scales("tensor").save_pretrained(folder, format="autofp8", overwrite=True)
    new_content = read_content(folder)
    assert {name: new_content[name] for name in other_files} == other_files
    assert_loads_the_same(model_folder, folder)
    # Here, the added scales would replace one of two weight files.
    save_file({"a": torch.ones(1)}, ambiguous_folder / "model-00001-of-00001.safetensors")
    old_content = read_content(ambiguous_folder)
    with scale_error("got two files"):
        random_scales("tensor").save_pretrained(ambiguous_folder, format="autofp8", overwrite=True)
    assert read_content(ambiguous_folder) == old_content


@pytest.mark.parametrize("format", TENSOR_FORMATS)
def test_a_config_without_weights_keeps_its_entries(tmp_path, model_folder, format):
    shutil.copy(model_folder / "config.json", tmp_path)
    entries = json.loads((tmp_path / "config.json").read_text())
    for seed in (0, 1):
        scales = random_scales("tensor", seed)
        scales.save_pretrained(tmp_path, format=format, overwrite=True)
        assert list_sides(KVScales.from_pretrained(tmp_path)) == list_sides(scales)
    new_entries = json.loads((tmp_path / "config.json").read_text())
    assert {name: new_entries[name] for name in entries} == entries


def test_kv_scales_are_saved_in_a_subfolder_next_to_weights(model_folder, folder):
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
    for overwrite, format in ((True, "autofp8"), (False, "tgi")):
        with pytest.raises(ScaleError, match="read before all others"):
            scales.save_pretrained(folder / "kv_scales", format=format, overwrite=overwrite)
        assert read_content(folder) == new_content
    with pytest.raises(ScaleError, match="read before all others"):
        scales.save_pretrained(folder, format="autofp8", overwrite=True)
    assert_loads_the_same(model_folder, folder)


def test_old_scale_files_are_not_copied(tmp_path, folder):
    KVScales.uniform(NUM_LAYERS, k=8.0).save_pretrained(folder, format="vllm-json")
    KVScales.uniform(NUM_LAYERS, k=8.0).save_pretrained(folder)
    (folder / "kv_scales" / "notes.txt").write_text("mine")
    copy = add_scales(folder, tmp_path / "copy", "autofp8")
    assert KVScales.from_pretrained(copy).format == "autofp8"
    assert [path.name for path in (copy / "kv_scales").iterdir()] == ["notes.txt"]


def test_scales_next_to_added_weights_move_to_a_subfolder(tmp_path, model_folder, caplog):
    folder = Path(shutil.copytree(model_folder, tmp_path / "folder"))
    for path in random_scales("head", 1).save_pretrained(tmp_path / "separate"):
        shutil.copy(path, folder)
    scales = random_scales("head", 2)
    scales.save_pretrained(folder, overwrite=True)
    assert {*read_content(folder)} - {*read_content(model_folder)} == {KV_PATH}
    scales.save_pretrained(folder, overwrite=True)
    assert not caplog.text
    assert KVScales.from_pretrained(folder).digest == scales.digest


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


def test_a_folder_with_links_and_without_rights_is_copied(tmp_path, model_folder):
    """The folder has links, as in a Hub cache. Broken or circular links and pipes are skipped."""
    folder, blobs = Path(shutil.copytree(model_folder, tmp_path / "folder")), tmp_path / "blobs"
    blobs.mkdir()
    for index, path in enumerate(sorted(p for p in folder.iterdir() if p.is_file())):
        blob = path.rename(blobs / str(index))
        path.symlink_to(blob)
        blob.chmod(0o444)
    expected = read_content(add_scales(folder, tmp_path / "plain", "tgi"))
    (folder / "circle").symlink_to(folder)
    (folder / "gone").symlink_to("nowhere")
    os.mkfifo(folder / "pipe")
    for path in (folder / "original", folder):
        path.chmod(0o555)
    for weights in ("copy", "link"):
        copy = add_scales(folder, tmp_path / weights, "tgi", weights=weights)
        card, copy_content = expected["README.md"].decode(), read_content(copy)
        assert copy_content == expected | {"README.md": card.replace("plain", weights).encode()}
        assert all(path.stat().st_mode & 0o200 for path in (copy, copy / "original"))
        weights_file = copy / "model-00001-of-00001.safetensors"
        assert weights_file.samefile(folder / "model.safetensors") == (weights == "link")
    folder.chmod(0o755)
    blob_content = read_content(blobs)
    random_scales("tensor").save_pretrained(folder, format="tgi", overwrite=True)
    assert read_content(blobs) == blob_content


def test_a_card_with_a_number_as_a_metadata_key_is_kept(folder):
    text = "---\n1: a\n---\n# Mine\n"
    (folder / "README.md").write_text(text)
    random_scales("tensor").save_pretrained(folder, format="tgi", overwrite=True)
    assert (folder / "README.md").read_text().startswith(text)


@pytest.mark.parametrize("is_nested", [False, True], ids=["top", "text-config"])
@pytest.mark.parametrize("format", QUANTIZED_CONFIGS)
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
    "cut-off": (lambda shard: shard.write_bytes(shard.read_bytes()[:-1]), "a safetensors file"),
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


def test_a_copy_never_replaces_files(tmp_path, model_folder):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    for target in (tmp_path / "mine", tmp_path / "mine" / "file", model_folder):
        with pytest.raises(ScaleError, match=r"new or empty|expected a folder, got a file"):
            add_scales(model_folder, target, "tgi", overwrite=True)
    assert read_content(tmp_path) == {"mine/file": b"mine"}
    (tmp_path / "empty").mkdir()
    assert add_scales(model_folder, tmp_path / "empty", "tgi")


@pytest.mark.parametrize("target", [".", "new/.."])
def test_a_copy_does_not_replace_the_working_folder(tmp_path, model_folder, monkeypatch, target):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with scale_error("or the working folder", target):
        add_scales(model_folder, target, "tgi")
    assert [*tmp_path.rglob("*")] == [tmp_path / "here"]
    assert add_scales(model_folder, Path("../here/copy"), "tgi").is_dir()


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


@pytest.mark.parametrize("index", [0, 1, 3])
@pytest.mark.parametrize("failure", [KeyboardInterrupt(), MemoryError(), OSError("stopped")])
def test_an_interrupted_copy_leaves_no_files(tmp_path, model_folder, monkeypatch, index, failure):
    old_content = read_content(model_folder)
    fail_write(monkeypatch, index, failure)
    with pytest.raises((type(failure), ScaleError)):
        add_scales(model_folder, tmp_path / "copy", "autofp8")
    assert not list(tmp_path.iterdir())
    assert read_content(model_folder) == old_content


def test_old_files_are_complete_at_each_write(tmp_path, model_folder, monkeypatch):
    """A killed process cannot clean up, so no write may leave a partial folder."""
    copy, folder = tmp_path / "copy", tmp_path / "separate"
    random_scales("tensor").save_pretrained(folder, format="autofp8")
    old_content, contents = read_content(folder), []

    def sync(fd: int) -> None:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            contents.append(read_content(folder))
            assert not copy.exists()

    monkeypatch.setattr("os.fsync", sync)
    random_scales("tensor", 1).save_pretrained(folder, format="autofp8", overwrite=True)
    for files in contents:
        assert {n: c for n, c in files.items() if not n.endswith(".part")} == old_content
    assert len(contents) == len(old_content)
    add_scales(model_folder, copy, "autofp8")
    assert len(contents) >= len(old_content) + len(read_content(copy))


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


@pytest.mark.parametrize("format", SCALE_FORMATS)
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


# Each format once, and each kind of weights, or no weights, with one or two formats.
@pytest.mark.parametrize(
    ("format", "weights"),
    [*zip(TENSOR_FORMATS, 2 * (("model.safetensors",), ("pytorch_model.bin",), ()), strict=False)],
)
def test_the_config_of_a_repository_is_never_replaced(hub, format, weights):
    fake = hub("config.json", *weights)
    with scale_error("expected a repository without weights"):
        random_scales("tensor").push_to_hub("org/model", format=format, overwrite=True)
    assert not fake.uploaded


@pytest.mark.parametrize("prefix", ["", "kv_scales/"])
def test_scales_are_not_uploaded_next_to_scales_that_are_read_first(hub, prefix):
    fake = hub(f"{prefix}kv_scales.safetensors", "README.md")
    for format in ("vllm-json", "tgi"):
        with scale_error("read before all others"):
            random_scales("tensor").push_to_hub("org/model", format=format, overwrite=True)
    assert not fake.uploaded


@pytest.mark.parametrize("failing", ["repo org/model None", "list", "commit"])
def test_an_unreachable_hub_is_a_scale_error(hub, failing):
    hub(failing=failing)
    with scale_error(r"org/model: .*no route"):
        random_scales("tensor").push_to_hub("org/model")


# -- rules of servers ------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_copy", "tp_size"), [(False, 1), (True, 2)], ids=["separate", "copy"])
def test_servers_read_the_larger_scale_from_the_json(tmp_path, model_folder, tp_size, is_copy):
    scales, checkpoint = random_scales("tensor"), model_folder if is_copy else None
    scales.save_pretrained(
        tmp_path / "out", format="vllm-json", tp_size=tp_size, checkpoint=checkpoint
    )
    path = tmp_path / "out" / "kv_cache_scales.json"
    options = {"model_type": "llama", "num_ranks": tp_size, "num_layers": NUM_LAYERS}
    for rank in range(tp_size):
        factors = server_rules.read_scaling_factors(path, rank=rank, **options)
        assert list(factors.values()) == [
            max(s.k.item(), s.v.item()) for s in scales.layers.values()
        ]
    with pytest.raises(LoadError):
        server_rules.read_scaling_factors(path, **options | {"num_layers": NUM_LAYERS + 1})
