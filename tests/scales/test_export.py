"""Tests of saving scales: alone, in a checkpoint, and in a copy of a checkpoint."""

import itertools
import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_fp8kv.errors import ScaleError
from hf_fp8kv.scales import SCALE_FORMATS, KVScales, LayerScales
from tests.helpers import server_rules
from tests.scales.test_scales import assert_same_scales
from tests.scales.test_sources import corrupt_config, list_sides, scale_error

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


def make_random_scales(kind: str, seed: int = 0, num_layers: int = NUM_LAYERS) -> KVScales:
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
    k = enlarge_k(layer)
    v = layer.v
    if format == "compressed-tensors" and any(
        scale.ndim and scale.shape[0] > 1 for scale in (k, v)
    ):
        return LayerScales(*(scale.amax(1, keepdim=True).expand(NUM_HEADS, 1) for scale in (k, v)))
    if format == "vllm-json":
        return LayerScales(torch.maximum(k.max(), v.max()), torch.maximum(k.max(), v.max()))
    return LayerScales(k.max(), v.max())


def enlarge_k(layer: LayerScales) -> torch.Tensor:
    if layer.k_center is None:
        return layer.k
    margin = layer.k_center.abs() / 448
    return layer.k + (margin if layer.k.ndim else margin.max())


def assert_holds(folder: Path, scales: KVScales, format: str) -> None:
    """Assert that a folder contains the stored scales, and that servers read equal scales."""
    expected = reduce_scales(scales, format)
    loaded = KVScales.from_pretrained(folder)
    assert loaded.format == format
    assert_same_scales(loaded, expected)
    granularities = {layer.granularity for layer in expected.layers.values()}
    if format in READERS and granularities == {"tensor"}:
        server_pairs = [[k.item(), v.item()] for k, v in READERS[format](folder).values()]
        assert torch.tensor(server_pairs).T.tolist() == list_sides(expected)


@pytest.fixture
def folder(model_folder, tmp_path) -> Path:
    return Path(shutil.copytree(model_folder, tmp_path / "folder"))


@pytest.mark.parametrize("format", SCALE_FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_saved_scales_are_loaded(tmp_path, caplog, kind, format):
    scales = make_random_scales(kind)
    assert sorted(scales.save_pretrained(tmp_path, format=format)) == sorted(tmp_path.iterdir())
    assert_holds(tmp_path, scales, format)
    assert KVScales.from_pretrained(tmp_path).model_type == "llama"
    is_lossy = reduce_scales(scales, format).digest != scales.digest
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == is_lossy, "expected one warning if scales are reduced"
    assert all("written as" in record.message for record in warnings)


def test_each_rank_of_the_json_has_the_larger_scale(tmp_path, model_folder):
    scales = make_random_scales("centered-head")
    folder = tmp_path / "out"
    scales.save_pretrained(folder, format="vllm-json", tp_size=3, checkpoint=model_folder)
    expected = reduce_scales(scales, "vllm-json")
    for rank in range(3):
        assert_same_scales(KVScales.from_pretrained(folder, tp_rank=rank, tp_size=3), expected)
    assert_same_scales(KVScales.from_pretrained(folder), expected)


INVALID_OPTIONS = {
    "gaps-in-the-json": ({"format": "vllm-json"}, "expected the layers 0 to 0, got 1"),
    "ranks-of-a-different-format": ({"format": "tgi", "tp_size": 2}, "tp_size: expected 1"),
    "no-ranks": ({"format": "vllm-json", "tp_size": 0}, "got 0"),
    "read-only": (
        {"format": "trtllm"},
        "expected one of vllm-json, tgi, .*, hf_fp8kv, got 'trtllm'.* "
        "trtllm stores scales only with weights",
    ),
    "weights": (
        {"format": "tgi", "checkpoint": ".", "weights": "move"}, "weights: expected 'copy' or "
    ),
    "hub": ({"format": "tgi", "checkpoint": "org/model"}, "snapshot_download"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "message"), INVALID_OPTIONS.values(), ids=INVALID_OPTIONS)
def test_invalid_options_write_no_files(tmp_path, options, message):
    with scale_error(message):
        KVScales({1: make_random_scales("tensor").layers[0]}).save_pretrained(
            tmp_path / "out", **options
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", SCALE_FORMATS)
def test_existing_files_are_replaced_only_with_overwrite(tmp_path, monkeypatch, format):
    scales, new_scales = (make_random_scales("tensor", seed) for seed in (1, 2))
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


def fail_write(monkeypatch, index: int, failure: BaseException) -> None:
    """Make the write of file number `index`, and all later writes, fail."""
    calls = itertools.count()

    def sync(fd: int) -> None:
        if next(calls) >= index:
            raise failure

    monkeypatch.setattr("os.fsync", sync)


def read_content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def sharded_folder(model_folder, tmp_path_factory) -> Path:
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
    make_random_scales(kind).save_pretrained(target, format=format, checkpoint=source, **options)
    return target


# Each format once as a copy or in place, each kind of source, and each place of old scales.
@pytest.mark.parametrize(
    ("source", "old_format", "format", "is_copy"),
    [
        ("model_folder", "hf_fp8kv", "autofp8", True),
        ("model_folder", None, "quark", False),
        ("model_folder", "compressed-tensors", "tgi", True),
        ("model_folder", "modelopt", "modelopt", False),
        ("sharded_folder", "tgi", "compressed-tensors", False),
        ("sharded_folder", "quark", "quark", True),
        ("sharded_folder", "vllm-json", "hf_fp8kv", True),
    ],
)
def test_scales_are_saved_with_a_model(tmp_path, request, source, old_format, format, is_copy):
    # transformers, vLLM, SGLang and TGI can load the folder, which is one file or has an index.
    source_folder = request.getfixturevalue(source)
    folder = Path(shutil.copytree(source_folder, tmp_path / "folder"))
    if old_format is not None:
        make_random_scales("tensor", 9).save_pretrained(folder, format=old_format, overwrite=True)
    old_content = read_content(folder)
    kind = "tensor" if format in READERS else "centered-head"
    target = tmp_path / "copy" if is_copy else folder
    options = {"checkpoint": folder} if is_copy else {}
    make_random_scales(kind).save_pretrained(target, format=format, overwrite=True, **options)
    if is_copy:
        assert read_content(folder) == old_content
        assert not (target / ".cache").exists()
    assert read_weights(target) == read_weights(source_folder)
    assert_holds(target, make_random_scales(kind), format)
    # Without old scales, and as a copy, the config and the names of tensors would be the same.
    direct_folder = add_scales(source_folder, tmp_path / "direct", format, kind)
    config, tensors = server_rules.read_checkpoint(target)
    direct_config, direct_tensors = server_rules.read_checkpoint(direct_folder)
    assert (config, tensors.keys()) == (direct_config, direct_tensors.keys())
    if format in ("compressed-tensors", "autofp8", "modelopt", "quark"):
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == tensors.keys()
        assert index["metadata"] == {}  # the size of the old tensors was removed
    if format != "quark":  # transformers requires the quark package
        assert_loads_the_same(source_folder, target)


def assert_loads_the_same(source: Path, copy: Path) -> None:
    """Assert that transformers loads equal weights from both folders, without missing keys."""
    expected_model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    loaded, loading_info = AutoModelForCausalLM.from_pretrained(
        copy, dtype="auto", output_loading_info=True
    )
    assert not loading_info["missing_keys"]
    assert all(name.endswith("_scale") for name in loading_info["unexpected_keys"])
    expected = expected_model.state_dict()
    weights = {
        name: tensor for name, tensor in loaded.state_dict().items() if not name.endswith("_scale")
    }
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


BAD_SOURCES = {
    "no-config": (lambda folder: (folder / "config.json").unlink(), "config.json, got none"),
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
    "fnuz-declared": (
        corrupt_config(kv_cache_dtype="fp8_e4m3fnuz"),
        "expected to read the written scales",
    ),
    "a-cache-of-latents": (corrupt_config(kv_lora_rank=512), "Its servers cache latents"),
    "two-weight-files": (
        lambda folder: save_file({"a": torch.ones(1)}, folder / "model-00001-of-00001.safetensors"),
        "got two files",
    ),
    "weights-in-the-file-of-scales": (
        lambda folder: save_file(
            {"extra.weight": torch.ones(1)}, folder / "model-kv-scales.safetensors"
        ),
        "expected a file of scales to replace, got .*extra.weight",
    ),
    "weights-of-a-different-tool": (
        corrupt_config(quantization_config={"quant_method": "gptq", "bits": 4}),
        "the quant_method 'fp8', got 'gptq'",
    ),
}


QUANTIZED_CONFIGS = {
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"]}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
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


def test_other_files_in_the_folder_of_a_model_are_kept(model_folder, folder):
    other_files = {
        ".hidden.safetensors": b"mine", "pytorch_model.bin": b"weights", "sub/more.pth": b"more",
        "folder.safetensors/part": b"part",
    }  # fmt: skip
    for name, text in other_files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text)
    make_random_scales("tensor").save_pretrained(folder, format="autofp8", overwrite=True)
    assert read_content(folder).items() >= other_files.items()
    assert_loads_the_same(model_folder, folder)


def test_kv_scales_are_saved_in_a_subfolder_next_to_weights(folder):
    old_content = read_content(folder)
    scales = make_random_scales("centered-head")
    with scale_error(r"expected a place without config\.json"):
        scales.save_pretrained(folder, format="tgi")
    assert scales.save_pretrained(folder) == [folder / KV_PATH]
    assert KVScales.from_pretrained(folder).digest == scales.digest
    new_content = read_content(folder)
    assert new_content == old_content | {KV_PATH: new_content[KV_PATH]}
    with scale_error("read before all others"):
        scales.save_pretrained(folder, format="autofp8", overwrite=True)
    assert read_content(folder) == new_content


def test_nothing_is_written_next_to_scales_that_are_read_first(tmp_path):
    folder = tmp_path / "scales"
    make_random_scales("tensor").save_pretrained(folder, format="tgi")
    content = read_content(folder)
    with scale_error("without scales among its tensors, .* read before kv_cache_scales.json"):
        KVScales.uniform(2).save_pretrained(folder, format="vllm-json", overwrite=True)
    assert read_content(folder) == content


def test_a_folder_of_links_is_copied(tmp_path, folder):
    # The folder has links to files that must not change, as in a Hub cache.
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    files = [path for path in folder.iterdir() if path.is_file()]
    for index, path in enumerate(files):
        blob = path.rename(blobs / str(index))
        path.symlink_to(blob)
        blob.chmod(0o444)
    blob_content = read_content(blobs)
    (folder / "circle").symlink_to(folder)
    for weights in ("copy", "link"):
        copy = add_scales(folder, tmp_path / weights, "tgi", weights=weights)
        assert_holds(copy, make_random_scales("tensor"), "tgi")
        assert (folder / "model.safetensors").samefile(
            copy / "model-00001-of-00001.safetensors"
        ) == (weights == "link")
    make_random_scales("tensor").save_pretrained(folder, format="tgi", overwrite=True)
    assert read_content(blobs) == blob_content


KEPT_FIELDS = (
    "quant_method", "quant_algo", "ignore", "ignored_layers", "config_groups", "activation_scheme",
    "exclude", "global_quant_config",
)  # fmt: skip


@pytest.mark.parametrize(
    ("format", "is_nested"), [("compressed-tensors", True), ("modelopt", True), ("quark", False)]
)
def test_the_config_of_quantized_weights_is_kept(tmp_path, folder, format, is_nested):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = QUANTIZED_CONFIGS[format]
    outer_config = {"model_type": "llava", "text_config": config} if is_nested else config
    (folder / "config.json").write_text(json.dumps(outer_config))
    copy = add_scales(folder, tmp_path / "copy", format)
    new_config = json.loads((copy / "config.json").read_text())
    block = (new_config["text_config"] if is_nested else new_config)["quantization_config"]
    for field in KEPT_FIELDS:
        assert block.get(field) == QUANTIZED_CONFIGS[format].get(field)
    if format == "quark":
        assert block["layer_quant_config"]["*k_proj"]["weight"] == {"dtype": "fp8_e4m3"}
    assert ("quantization_config" in new_config) == (not is_nested)
    assert list_sides(KVScales.from_pretrained(copy)) == list_sides(make_random_scales("tensor"))


def test_a_second_config_that_declares_the_weights_is_extended(tmp_path, folder):
    second_config = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(second_config))
    with pytest.raises(ScaleError, match="expected unquantized weights"):
        add_scales(folder, tmp_path / "copy", "autofp8")
    copy = add_scales(folder, tmp_path / "copy", "modelopt")
    assert json.loads((copy / "hf_quant_config.json").read_text())["quantization"] == {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8",
    }
    assert (copy / "config.json").read_bytes() == (folder / "config.json").read_bytes()


@pytest.mark.parametrize(
    "path", ["model.language_model.layers.{}.self_attn", "transformer.h.{}.attn"]
)
def test_scales_are_named_after_their_attention_module(tmp_path, path):
    source = tmp_path / "source"
    source.mkdir()
    paths = [path.format(index) for index in range(NUM_LAYERS)]
    towers = [f"vision_tower.layers.{index}.self_attn" for index in range(9)]
    weights = {f"{name}.o_proj.weight": torch.ones(1) for name in paths + towers}
    save_file(weights, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"num_hidden_layers": NUM_LAYERS}))
    copy = add_scales(source, tmp_path / "copy", "modelopt")
    scale_names = load_file(copy / "model-kv-scales.safetensors").keys()
    assert scale_names == {f"{name}.{side}_proj.{side}_scale" for name in paths for side in "kv"}


@pytest.mark.parametrize(("spoil", "message"), BAD_SOURCES.values(), ids=BAD_SOURCES)
def test_an_unsuitable_checkpoint_is_refused(tmp_path, folder, spoil, message):
    # No copy is written, and no file is added to the folder.
    spoil(folder)
    old_content = read_content(folder)
    scales = make_random_scales("tensor")
    options_by_target = {tmp_path / "copy": {"checkpoint": folder}}
    if "without KV scales" not in message:  # overwrite=True replaces such scales
        options_by_target[folder] = {"overwrite": True}
    for target, options in options_by_target.items():
        with scale_error(message) as error:
            scales.save_pretrained(target, format="autofp8", **options)
        assert ".part" not in str(error.value)
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
