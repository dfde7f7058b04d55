"""Tests of reading static scales: golden files, rules of a checkpoint, invalid files, the Hub."""

import json
import logging
import math
import os
import re
import shutil
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from huggingface_hub.errors import (
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)
from safetensors.torch import load_file, save_file

from hf_fp8kv.errors import ScaleError
from hf_fp8kv.scales import KVScales
from hf_fp8kv.scales.checkpoint import checkpoint as checkpoint_module
from hf_fp8kv.scales.kv_scales import resolve_scales

DATA = Path(__file__).parents[1] / "data" / "scales"
K = (0.0152239128947258, 0.0188860222697258, 0.0354178324341774)
V = (0.0230364128947258, 0.01979283057153225, 0.0241350457072258)
LARGER_KV = (V[0], V[1], K[2])
ATTENTION = "model.layers.{}.self_attn."


def list_values(scales: KVScales, side: str) -> list[float]:
    """Return the scales of one side, by layer."""
    return [getattr(layer, side).item() for layer in scales.layers.values()]


def list_sides(scales: KVScales) -> list[list[float]]:
    """Return the scales of K and the scales of V, by layer."""
    return [list_values(scales, side) for side in "kv"]


def round_values(values: tuple[float, ...], dtype: torch.dtype = torch.float32) -> list[float]:
    """Return values after rounding to the dtype of a file."""
    return torch.tensor(values, dtype=dtype).float().tolist()


@contextmanager
def scale_error(message: str, path: Path | str = "") -> Iterator[pytest.ExceptionInfo[ScaleError]]:
    """Expect a ScaleError that names the path, the expected and the actual value, and a remedy."""
    with pytest.raises(ScaleError, match=message) as error:
        yield error
    text = str(error.value)
    assert str(path) in text
    assert "expected" in text
    assert ", got " in text or ", found " in text
    assert re.search(r"[;.] [A-Z`a-z]", text.split("expected", 1)[1])


def copy_golden(name: str, tmp_path: Path) -> Path:
    """Return a copy of a golden folder."""
    return Path(shutil.copytree(DATA / name, tmp_path / name))


def edit_json(path: Path, **changes: object) -> None:
    """Set top-level entries of a JSON file. None deletes an entry."""
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: x for name, x in data.items() if x is not None}))


def set_scales(folder: Path, layers: Iterable[int], scale: float | None) -> None:
    """Set the scales of K and V of these layers. None deletes them."""
    names = [ATTENTION.format(layer) + f"{side}_scale" for layer in layers for side in "kv"]
    edit_tensors(folder, {n: None if scale is None else torch.tensor(scale) for n in names})


def edit_tensors(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Set tensors of model.safetensors. None deletes a tensor."""
    path = folder / "model.safetensors"
    tensors = load_file(path) | changes
    save_file({name: x for name, x in tensors.items() if x is not None}, path)


# -- golden files ----------------------------------------------------------------------------------

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
HALVED_KV = tuple(scale / 2 for scale in LARGER_KV)


class GoldenFolder(NamedTuple):
    """The format of a golden folder, the scales of K and V by layer, and their stored dtype."""

    format: str
    k: tuple[float, ...]
    v: tuple[float, ...]
    dtype: torch.dtype = F32


FOLDERS = {
    "vllm": GoldenFolder("vllm-json", K, K),
    "vllm-rank0": GoldenFolder("vllm-json", V, V),
    "vllm-two-ranks": GoldenFolder("vllm-json", LARGER_KV, LARGER_KV),
    "tgi": GoldenFolder("tgi", K, V),
    "tgi-kv": GoldenFolder("tgi", LARGER_KV, LARGER_KV),
    "tgi-kv-written": GoldenFolder("tgi", LARGER_KV, LARGER_KV),
    "tgi-kv-fnuz": GoldenFolder("tgi", HALVED_KV, HALVED_KV),
    "autofp8": GoldenFolder("autofp8", K, V),
    "autofp8-kv": GoldenFolder("autofp8", LARGER_KV, LARGER_KV),
    "compressed-tensors": GoldenFolder("compressed-tensors", K, V, BF16),
    "compressed-tensors-old": GoldenFolder("compressed-tensors", K, V, F16),
    "modelopt": GoldenFolder("modelopt", K, V),
    "quark": GoldenFolder("quark", K, V),
    "trtllm": GoldenFolder("trtllm", LARGER_KV, LARGER_KV),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_golden_checkpoint_is_read(name):
    folder = FOLDERS[name]
    scales = KVScales.from_pretrained(DATA / name)
    assert scales.format == folder.format
    assert list(scales.layers) == [0, 1, 2]
    assert list_sides(scales) == [round_values(x, folder.dtype) for x in (folder.k, folder.v)]
    assert all(layer.k_center is None for layer in scales.layers.values())
    assert scales.model_type == (None if name == "vllm-two-ranks" else "llama")


def test_scales_per_head_are_read_from_shards():
    scales = KVScales.from_pretrained(DATA / "compressed-tensors-heads")
    assert scales.format == "compressed-tensors"
    for index, (k, v) in enumerate(zip(K, V, strict=True)):
        layer = scales.layers[index]
        assert layer.granularity == "head"
        assert layer.k.tolist() == [[scale] for scale in round_values((k, 2 * k))]
        assert layer.v.tolist() == [[scale] for scale in round_values((v, 2 * v))]


def test_every_golden_folder_is_tested():
    folders = {path.name for path in DATA.iterdir() if path.is_dir()}
    assert folders - {"__pycache__"} == {*FOLDERS, "compressed-tensors-heads"}


def test_a_single_golden_file_is_read():
    assert KVScales.from_file(DATA / "vllm" / "kv_cache_scales.json").format == "vllm-json"
    assert KVScales.from_file(DATA / "autofp8" / "model.safetensors").format == "autofp8"
    index = DATA / "compressed-tensors-heads" / "model.safetensors.index.json"
    assert list(KVScales.from_file(index).layers) == [0, 1, 2]
    # The source of a layer names the file and the tensors.
    assert KVScales.from_pretrained(DATA / "tgi").layers[1].source == (
        f"{DATA / 'tgi'}/model.safetensors: model.layers.1.self_attn.k_scale, "
        "model.layers.1.self_attn.v_scale"
    )


# -- tensor names ----------------------------------------------------------------------------------


# `test_sources_formats` contains no dialect with these names.
LANGUAGE_MODEL_NAMES = [
    "model.layers.0.self_attn.attn.k_scale",
    "model.layers.0.self_attn.mla_attn.mla_attn.k_scale",
    "language_model.model.layers.0.self_attn.k_scale",
    "model.text_model.layers.0.self_attn.k_scale",
    "model.decoder.layers.0.self_attn.k_scale",
    "transformer.h.0.attn.k_scale",
    "layers.0.self_attn.k_scale",
]
OTHER_NAMES = [
    "model.vision_tower.vision_model.encoder.layers.0.self_attn.k_scale",
    "vision_model.transformer.layers.0.self_attn.k_scale",
    "model.visual.blocks.0.attn.k_scale",
    "visual.layers.0.self_attn.k_scale",
    "model.audio_tower.layers.0.self_attn.k_scale",
    "audio_tower.layers.0.self_attn.k_scale",
    "model.encoder.layers.0.self_attn.k_scale",
    "encoder.layers.0.self_attn.k_scale",
    "model.decoder.layers.0.encoder_attn.k_scale",
    "mtp.layers.0.self_attn.k_scale",
    "model.layers.0.self_attn.q_scale",
    "model.layers.0.self_attn.k_proj.weight_scale",
    "model.layers.0.self_attn.k_proj.input_scale",
    "model.layers.0.self_attn.k_proj.v_scale",
    # Scales of the attention take precedence over scales of projections.
    "model.layers.0.self_attn.k_proj.k_scale",
    "model.layers.0.self_attn.v_proj.v_scale",
    # The config has three layers, so layer 3 belongs to a draft head.
    "model.layers.3.self_attn.k_scale",
    "model.layers.3.self_attn.v_scale",
    "model.layers.x.self_attn.k_scale",
    "model.layers.0.mlp.k_scale",
]


@pytest.mark.parametrize("name", LANGUAGE_MODEL_NAMES)
def test_names_of_the_language_model_are_used(tmp_path, name):
    v_name = name.replace(".k_", ".v_").replace("k_scale", "v_scale")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"num_hidden_layers": 1}')
    save_file({name: torch.tensor(0.5), v_name: torch.tensor(0.25)}, folder / "model.safetensors")
    scales = KVScales.from_pretrained(folder)
    assert list_sides(scales) == [[0.5], [0.25]]


def test_names_of_other_modules_are_ignored(tmp_path):
    folder = copy_golden("autofp8", tmp_path)
    edit_tensors(folder, {name: torch.tensor(9.0) for name in OTHER_NAMES})
    scales = KVScales.from_pretrained(folder)
    assert scales.format == "autofp8"
    assert list(scales.layers) == [0, 1, 2]
    assert list_sides(scales) == [round_values(K), round_values(V)]


# -- rules of a checkpoint -------------------------------------------------------------------------


# Each dtype and each shape once, because dtypes and shapes are independent.
@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.float64, ()), (F32, (1,)), (F16, (1, 1)), (BF16, (1, 1, 1))]
)
def test_a_scalar_of_any_float_dtype_and_shape_is_read(tmp_path, dtype, shape):
    folder = copy_golden("autofp8", tmp_path)
    edit_tensors(folder, {ATTENTION.format(1) + "k_scale": torch.full(shape, 0.3, dtype=dtype)})
    scales = KVScales.from_pretrained(folder)
    assert scales.layers[1].k.shape == ()
    assert scales.layers[1].k.item() == torch.tensor(0.3, dtype=dtype).float().item()


@pytest.mark.parametrize(("kv_scales", "has_warning"), [((9.0,) * 3, True), (LARGER_KV, False)])
def test_a_pair_takes_precedence_over_kv_scale(tmp_path, caplog, kv_scales, has_warning):
    folder = copy_golden("autofp8", tmp_path)
    names = [ATTENTION.format(layer) + "kv_scale" for layer in range(len(kv_scales))]
    edit_tensors(folder, dict(zip(names, map(torch.tensor, kv_scales), strict=True)))
    scales = KVScales.from_pretrained(folder)
    assert list_sides(scales) == [round_values(K), round_values(V)]
    assert ("kv_scale differs from the larger" in caplog.text) == has_warning
    assert len(caplog.records) == has_warning


def test_kv_scale_takes_precedence_over_an_incomplete_pair(tmp_path):
    folder = copy_golden("autofp8-kv", tmp_path)
    edit_tensors(folder, {ATTENTION.format(0) + "k_scale": torch.tensor(9.0)})
    scales = KVScales.from_pretrained(folder)
    assert list_values(scales, "k") == list_values(scales, "v") == round_values(LARGER_KV)


@pytest.mark.parametrize(("side", "other_side", "expected"), [("k", "v", K), ("v", "k", V)])
def test_a_single_side_is_used_for_both_with_one_warning(
    tmp_path, caplog, side, other_side, expected
):
    folder = copy_golden("autofp8", tmp_path)
    edit_tensors(folder, {ATTENTION.format(i) + f"{other_side}_scale": None for i in range(3)})
    assert list_sides(KVScales.from_pretrained(folder)) == 2 * [round_values(expected)]
    assert [r.message for r in caplog.records] == [
        f"{folder}: only {side.upper()} has a scale, which is used for K and V (layers 0, 1, 2)"
    ]


def test_redundant_tensors_are_accepted(tmp_path):
    """Zero points of 0 are redundant, and so is a scale with two names."""
    folder = copy_golden("autofp8", tmp_path)
    zero = torch.zeros(1).to(torch.float8_e4m3fn)
    names = (ATTENTION.format(0) + suffix for suffix in ("k_zero_point", "attn.k_scale"))
    edit_tensors(folder, dict(zip(names, (zero, torch.tensor(K[0])), strict=True)))
    assert list_values(KVScales.from_pretrained(folder), "k") == round_values(K)


def test_consolidated_files_are_ignored_next_to_ordinary_files(tmp_path):
    folder = copy_golden("autofp8", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    changed_tensors = {name: tensor * 8 for name, tensor in tensors.items()}
    save_file(changed_tensors, folder / "consolidated.safetensors")
    assert list_values(KVScales.from_pretrained(folder), "k") == round_values(K)
    (folder / "model.safetensors").unlink()
    assert list_values(KVScales.from_pretrained(folder), "k") == [x * 8 for x in round_values(K)]


UNCACHED_LAYERS = {
    "layer-types": (
        1, {"layer_types": ["full_attention", "linear_attention", "sliding_attention"]}
    ),
    "pattern": (1, {"hybrid_override_pattern": "*M*"}),
    "shared-cache": (2, {"num_kv_shared_layers": 1}),
}  # fmt: skip


@pytest.mark.parametrize(("layer", "config"), UNCACHED_LAYERS.values(), ids=UNCACHED_LAYERS)
def test_layers_without_a_separate_cache_need_no_scales(tmp_path, layer, config):
    folder = copy_golden("autofp8", tmp_path)
    set_scales(folder, [layer], None)
    edit_json(folder / "config.json", **config)
    assert list(KVScales.from_pretrained(folder).layers) == sorted({0, 1, 2} - {layer})


def test_an_undeclared_checkpoint_is_read_with_a_warning(caplog):
    for name in ("autofp8", "tgi-kv"):
        KVScales.from_pretrained(DATA / name)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    KVScales.from_pretrained(DATA / "tgi")
    assert [r.message for r in caplog.records] == [
        f"{DATA / 'tgi'}: the config declares no KV cache. Its KV scales are read as float8_e4m3fn"
    ]


def test_suspicious_scales_are_read_with_a_warning(tmp_path, caplog):
    folder = copy_golden("autofp8", tmp_path)
    set_scales(folder, range(3), 1.0)
    name = ATTENTION.format(0) + "k_quantizer.scale"
    edit_tensors(folder, {name: torch.ones(())})
    assert list_values(KVScales.from_pretrained(folder), "k") == [1, 1, 1]
    assert "every KV scale is exactly 1.0" in caplog.text
    assert f"ignored tensors that look like scales: {name}" in caplog.text


def test_missing_scales_cause_a_warning_without_strict(tmp_path, caplog):
    folder = copy_golden("autofp8", tmp_path)
    set_scales(folder, [1], None)
    scales = KVScales.from_pretrained(folder, strict=False)
    assert f"{folder}: layers without scales: 1" in caplog.text
    with pytest.raises(ScaleError, match="expected layer 1, got layers 0, 2"):
        scales.for_layer(1, num_kv_heads=2, k_head_dim=4, v_head_dim=4)
    (folder / "config.json").unlink()
    assert list(KVScales.from_pretrained(folder, strict=False).layers) == [0, 2]
    assert "no config.json" in caplog.text


# -- choice of the file ----------------------------------------------------------------------------


def test_kv_scales_are_read_before_tensors_and_tensors_before_json(tmp_path, caplog):
    folder = copy_golden("autofp8", tmp_path)
    shutil.copy(DATA / "vllm-rank0" / "kv_cache_scales.json", folder)
    assert KVScales.from_pretrained(tmp_path, subfolder="autofp8").format == "autofp8"
    set_scales(folder, range(3), None)
    edit_tensors(folder, {"vision_tower.layers.0.self_attn.k_scale": torch.ones(())})
    with caplog.at_level(logging.INFO):
        scales = KVScales.from_pretrained(folder)
    assert (scales.format, list_values(scales, "k")) == ("vllm-json", round_values(V))
    assert "reading kv_cache_scales.json" in caplog.text
    write_native(PAIR)(folder)
    scales = KVScales.from_pretrained(folder)
    assert (scales.format, list_values(scales, "k")) == ("hf_fp8kv", [0.5])


# -- kv_cache_scales.json --------------------------------------------------------------------------


def write_scales(path: Path, ranks: object, **changes: object) -> Path:
    """Write a kv_cache_scales.json. `changes` are entries of kv_cache, or model_type."""
    data: dict[str, object] = {"model_type": changes.pop("model_type", "llama")}
    data["kv_cache"] = {"dtype": "float8_e4m3fn", "scaling_factor": ranks} | changes
    path.write_text(json.dumps(data))
    return path


TWO_RANKS = {"0": {"0": 0.5, "1": 0.25}, "1": {"0": 0.125, "1": 1.0}}


def test_variants_of_a_json_are_accepted(tmp_path):
    """Strings as scales, layers in any order, byte order marks and extra entries are valid."""
    ranks = {"0": {str(i): i + 1 for i in (10, 2, 1, 0, *range(3, 10))}}
    ranks["0"] |= {"0": "0.5", "2": " 1e-2 "}
    path = write_scales(tmp_path / "s.json", ranks, more=[1, 2], model_type=None)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"also": {"a": 1}}))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    torch.set_default_dtype(BF16)  # the default dtype must not change the values
    scales = KVScales.from_file(path)
    assert list_values(scales, "v") == round_values((0.5, 2, 0.01, *range(4, 12)))
    assert scales.model_type is None


def test_ranks_of_a_json_are_selected_or_merged(tmp_path, caplog):
    """Each rank reads separate scales. One process reads the largest, and warns if ranks differ."""
    path = write_scales(tmp_path / "s.json", TWO_RANKS)
    for rank, expected in ((0, [0.5, 0.25]), (1, [0.125, 1.0])):
        assert list_values(KVScales.from_file(path, tp_rank=rank, tp_size=2), "k") == expected
    equal_path = write_scales(tmp_path / "t.json", {"rank1": {"0": 0.5}, "rank0": {"0": 0.5}})
    assert list_values(KVScales.from_file(equal_path), "k") == [0.5]
    assert not caplog.records
    assert list_values(KVScales.from_file(path), "k") == [0.5, 1.0]
    assert "the scales of its 2 ranks differ" in caplog.text
    scales = KVScales.from_file(path, tp_rank=3, tp_size=4, strict=False)
    assert list_values(scales, "k") == [0.5, 1.0]


def test_strict_errors_become_warnings_without_strict(tmp_path, caplog):
    ranks = {"0": {"0": 0.5, "2": 0.25, "7": 1.0}}
    write_scales(tmp_path / "kv_cache_scales.json", ranks)
    for config in ({"model_type": "qwen2"}, {"num_hidden_layers": 4}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ScaleError):
            KVScales.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "num_hidden_layers": 4}')
    assert list(KVScales.from_pretrained(tmp_path, strict=False).layers) == [0, 2]
    assert "expected scales of a 'qwen2' model, got 'llama'" in caplog.text
    assert "layers without scales: 1, 3" in caplog.text


# Invalid input. Each entry has a function that damages a valid folder, and the expected message.
# Reading must raise a ScaleError that names the path. It must neither return scales nor raise an
# error of a library.

Corrupt = Callable[[Path], object]


def assert_rejected(folder: Path, corrupt: Corrupt, message: str, path: Path | str = "") -> None:
    """Damage a checkpoint, and assert that reading it raises a ScaleError with this message."""
    corrupt(folder)
    with scale_error(message, path):
        KVScales.from_pretrained(folder)


def corrupt_json(old: str, new: str) -> Corrupt:
    """Return a function that replaces `old` with `new` in kv_cache_scales.json."""

    def corrupt(folder: Path) -> None:
        path = folder / "kv_cache_scales.json"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return corrupt


def corrupt_bytes(file: str, change: Callable[[bytes], bytes]) -> Corrupt:
    """Return a function that changes the bytes of a file."""

    def corrupt(folder: Path) -> None:
        (folder / file).write_bytes(change((folder / file).read_bytes()))

    return corrupt


def truncate(file: str, size: int) -> Corrupt:
    """Return a function that shortens a file to `size` bytes, or by `-size` bytes if negative."""
    return corrupt_bytes(file, lambda data: data[:size])


def delete(name: str) -> Corrupt:
    """Return a function that deletes a file."""
    return lambda folder: (folder / name).unlink()


def corrupt_config(**entries: object) -> Corrupt:
    """Return a function that sets entries of config.json."""
    return lambda folder: edit_json(folder / "config.json", **entries)


def corrupt_tensor(suffix: str, tensor: torch.Tensor | None, layer: int = 1) -> Corrupt:
    """Return a function that sets a tensor of a layer's attention. None deletes the tensor."""
    return corrupt_tensors({suffix: tensor}, layer)


def corrupt_tensors(tensors: dict[str, torch.Tensor | None], layer: int = 1) -> Corrupt:
    """Return a function that sets tensors of a layer's attention. None deletes a tensor."""
    changes = {ATTENTION.format(layer) + suffix: tensor for suffix, tensor in tensors.items()}
    return lambda folder: edit_tensors(folder, changes)


FIRST_ENTRY = '"0": 0.0152239128947258'
BAD_JSON: dict[str, tuple[Corrupt, str]] = {
    "zero": (
        corrupt_json(FIRST_ENTRY, '"0": 0'),
        "rank 0, layer 0: expected a finite number above 0",
    ),
    "nan": (corrupt_json(FIRST_ENTRY, '"0": NaN'), "got nan"),
    "bool": (corrupt_json(FIRST_ENTRY, '"0": true'), "got True"),
    "underflows": (corrupt_json(FIRST_ENTRY, '"0": 1e-45'), "got 1e-45"),
    "endless-integer": (corrupt_json(FIRST_ENTRY, '"0": 1' + "0" * 5000), "expected a JSON file"),
    "missing-layer": (corrupt_json(FIRST_ENTRY + ",", ""), "without layers 0"),
    "layer-beyond-the-model": (corrupt_json('"2"', '"3"'), "without layers 2"),
    "layer-not-a-number": (
        corrupt_json(FIRST_ENTRY, '"zero": 0.5'),
        "expected every layer .*'zero'",
    ),
    "layer-twice": (corrupt_json(FIRST_ENTRY, '"0": 1, "0": 2'), "'0' twice"),
    "layer-twice-in-two-spellings": (
        corrupt_json(FIRST_ENTRY, '"0": 1, "00": 2'),
        "every layer once, .*'00'",
    ),
    "no-layers": (corrupt_json('"scaling_factor"', '"scaling_factor": {"0": {}}, "x"'), "object"),
    "rank-not-a-number": (corrupt_json('"0": {', '"first": {'), "expected every rank .*'first'"),
    "rank-missing": (corrupt_json('"0": {', '"1": {'), "expected the ranks 0 to 0, got 1"),
    "rank-twice": (
        corrupt_json('"0": {', '"rank0": {"0": 1, "1": 1, "2": 1}, "0": {'),
        "every rank once, .*'0'",
    ),
    "ranks-with-other-layers": (
        corrupt_json('"0": {', '"1": {"0": 1}, "0": {'),
        "expected the same layers for every rank, got 3 layers for rank 0 and 1 for rank 1",
    ),
    "rank-not-an-object": (corrupt_json('"0": {', '"1": 0.5, "0": {'), "object of layers, got 0.5"),
    "ranks-not-an-object": (
        corrupt_json('"scaling_factor"', '"scaling_factor": [1], "x"'),
        r"object of ranks, got \[1\]",
    ),
    "dtype-e5m2": (corrupt_json("e4m3fn", "e5m2"), "expected 'float8_e4m3fn', got 'float8_e5m2'"),
    "cache-missing": (corrupt_json('"kv_cache"', '"cache"'), "expected an object 'kv_cache'"),
    "model-type-missing": (corrupt_json('"model_type"', '"type"'), "model_type"),
    "model-type-a-number": (corrupt_json('"llama"', "1"), "model_type: expected a string"),
    "an-array": (corrupt_bytes("kv_cache_scales.json", lambda _: b"[1]"), "JSON object, got list"),
    "very-deep": (
        corrupt_bytes("kv_cache_scales.json", lambda _: b'{"a":' * 10**5),
        "expected a JSON file",
    ),
}


@pytest.mark.parametrize(("corrupt", "message"), BAD_JSON.values(), ids=BAD_JSON)
def test_an_invalid_json_is_rejected(tmp_path, corrupt, message):
    folder = copy_golden("vllm", tmp_path)
    corrupt(folder)
    path = folder / "kv_cache_scales.json"
    for load in (lambda: KVScales.from_file(path), lambda: KVScales.from_pretrained(folder)):
        with scale_error(message, path):
            load()


def test_a_large_json_is_rejected_before_it_is_read(tmp_path):
    path = tmp_path / "kv_cache_scales.json"
    path.touch()
    os.truncate(path, (256 << 20) + 1)
    tracemalloc.start()
    with scale_error("expected a JSON file of at most", path):
        KVScales.from_file(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


def set_scheme(**changes: object) -> Corrupt:
    """Return a function that declares compressed-tensors, with changes to the cache's scheme."""
    quantization_config = {
        "quant_method": "compressed-tensors",
        "kv_cache_scheme": SCHEME | changes,
    }
    return corrupt_config(quantization_config=quantization_config)


BAD_CHECKPOINTS: dict[str, tuple[Corrupt, str]] = {
    "zero": (corrupt_tensor("k_scale", torch.zeros(())), "K scale .*finite numbers above 0.*0.0"),
    "nan": (corrupt_tensor("k_scale", torch.tensor(float("nan"))), "got nan"),
    "int64": (corrupt_tensor("k_scale", torch.ones((), dtype=torch.int64)), r"got torch\.int64"),
    "one-dimension": (corrupt_tensor("k_scale", torch.ones(3)), r"got \[3\]"),
    "sides-with-other-heads": (
        corrupt_tensors({"k_scale": torch.ones(2, 1, 1), "v_scale": torch.ones(3, 1, 1)}),
        r"v_scale: .* heads in config.json \(\[2\]\), got \[3, 1, 1\]",
    ),
    "layer-missing": (
        lambda folder: set_scales(folder, [1], None),
        "expected scales for 3 layers, got 2 without layers 1",
    ),
    "two-names-that-differ": (
        corrupt_tensor("attn.k_scale", torch.tensor(9.0)),
        "expected one scale for K of layer 1, got .*which differ",
    ),
    "zero-point": (
        corrupt_tensor("k_zero_point", torch.ones(1).to(torch.float8_e4m3fn)),
        "k_zero_point: expected a zero point of 0",
    ),
    "bias-of-a-layer": (
        corrupt_tensor("k_proj.k_bias", torch.ones(2)),
        r"k_bias: expected floats of the shape \[1, heads, 1, D\] .*, got torch.float32 \[2\]",
    ),
    "bias-of-more-heads-than-its-scale": (
        corrupt_tensors({"v_scale": torch.ones(2, 1, 1), "v_proj.v_bias": torch.ones(1, 4, 1, 4)}),
        r"v_bias: expected floats of the shape \[1, heads, 1, D\] with heads in \[1, 2\]",
    ),
    "bias-nan": (
        corrupt_tensor("k_proj.k_bias", torch.full((1, 2, 1, 4), float("nan"))),
        "center of K.*got nan",
    ),
    "bias-without-a-scale": (
        corrupt_tensor("k_proj.k_bias", torch.ones(()), layer=9),
        "expected a scale for the layer of model.layers.9.self_attn.k_proj.k_bias, got none",
    ),
    "ascend-int8": (corrupt_tensor("k_proj.kv_cache_scale", torch.ones(8)), "to an INT8 cache"),
    "asymmetric-scheme": (set_scheme(symmetric=False), "asymmetric"),
    "channel-scheme": (set_scheme(strategy="channel"), "strategy channel"),
    "dynamic-local-scheme": (set_scheme(dynamic="local"), "dynamic, which needs no scales"),
    "unknown-word": (corrupt_config(kv_cache_dtype="turbo3"), "'turbo3'"),
    "config-missing": (delete("config.json"), "expected a config.json"),
    "no-scales": (
        lambda folder: save_file({"model.norm": torch.ones(2)}, folder / "model.safetensors"),
        "expected kv_scales.safetensors, kv_cache_scales.json, or scale tensors such as "
        r"self_attn.{k,v}_scale.*got none",
    ),
    "no-weights": (delete("model.safetensors"), "expected kv_scales.safetensors"),
    "pickled-weights-only": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "pickles are never loaded: pytorch_model.bin",
    ),
    "two-files-with-a-scale": (
        lambda folder: (
            shutil.copy(folder / "model.safetensors", folder / "a.safetensors"),
            (folder / "model.safetensors").rename(folder / "b.safetensors"),
        ),
        "in only one file, got it in a.safetensors and b.safetensors",
    ),
}


# Checkpoints that are rejected even with strict=False.
ALWAYS_INVALID = ("zero", "int64", "zero-point", "channel-scheme")


@pytest.mark.parametrize(("corrupt", "message"), BAD_CHECKPOINTS.values(), ids=BAD_CHECKPOINTS)
def test_an_invalid_checkpoint_is_rejected(tmp_path, corrupt, message):
    folder = copy_golden("autofp8", tmp_path)
    assert_rejected(folder, corrupt, message, folder)
    with pytest.raises(ScaleError):
        resolve_scales(str(folder))
    if corrupt in (BAD_CHECKPOINTS[name][0] for name in ALWAYS_INVALID):
        with pytest.raises(ScaleError):
            KVScales.from_pretrained(folder, strict=False)


def edit_index(change: Callable[[dict[str, object]], object]) -> Corrupt:
    """Return a function that changes the weight map of the index."""

    def corrupt(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        weight_map = json.loads(path.read_text())["weight_map"]
        path.write_text(json.dumps({"weight_map": change(weight_map)}))

    return corrupt


def list_in_file(file: object) -> Corrupt:
    """Return a function that lists all tensors of the index in one file."""
    return edit_index(lambda weight_map: dict.fromkeys(weight_map, file))


SHARD = "model-00002-of-00002.safetensors"
BAD_INDICES: dict[str, tuple[Corrupt, str]] = {
    "shard-missing": (delete(SHARD), f"expected the file {SHARD}"),
    "tensor-missing": (
        edit_index(
            lambda weight_map: (
                weight_map
                | dict.fromkeys(list(weight_map)[-1:], "model-00001-of-00002.safetensors")
            )
        ),
        "which the index lists here",
    ),
    "outside": (list_in_file("../x.safetensors"), "expected file names"),
    "not-a-name": (list_in_file(3), "expected file names.*got 3"),
    "empty-map": (edit_index(lambda _: {}), "expected file names of tensors in weight_map"),
    "cut-off": (truncate("model.safetensors.index.json", 50), "expected a JSON file"),
}


@pytest.mark.parametrize(("corrupt", "message"), BAD_INDICES.values(), ids=BAD_INDICES)
def test_an_invalid_index_is_rejected(tmp_path, corrupt, message):
    assert_rejected(copy_golden("compressed-tensors-heads", tmp_path), corrupt, message)


NATIVE_FILE = "kv_scales.safetensors"


def write_native(tensors: dict[str, torch.Tensor], **entries: object) -> Corrupt:
    """Return a function that writes kv_scales.safetensors with these tensors and header entries."""
    header = {"version": 1, "dtype": "float8_e4m3fn", "model_type": None} | entries
    return lambda folder: save_file(
        tensors, folder / NATIVE_FILE, metadata={"hf_fp8kv": json.dumps(header)}
    )


PAIR = {"layers.0.k_scale": torch.tensor(0.5), "layers.0.v_scale": torch.tensor(0.25)}
CENTER = "layers.0.k_center"
BAD_NATIVE_FILES: dict[str, tuple[Corrupt, str]] = {
    "zero": (
        write_native(PAIR | {"layers.0.k_scale": torch.tensor(0.0)}),
        "K scale.*layers.0.*got 0.0",
    ),
    "center-nan": (write_native(PAIR | {CENTER: torch.full((2, 2), math.nan)}), "center of K.*nan"),
    "single-side": (write_native({"layers.0.k_scale": torch.tensor(1.0)}), "V scale.*got NoneType"),
    "other-tensor": (
        write_native(PAIR | {"model.norm": torch.ones(())}),
        "as save_pretrained writes",
    ),
    "other-path": (
        write_native(PAIR | {"vision_tower.0.k_scale": torch.ones(())}),
        "such as layers.0.k_scale, got 'vision_tower.0.k_scale'",
    ),
    "second-spelling": (
        write_native(PAIR | {"layers.00.k_scale": torch.ones(())}),
        "expected 0 as the number of a layer, got '00'",
    ),
    "plan-twice": (write_native(PAIR, plan={"0": ["int8"] * 2, "00": ["int6"] * 2}), "got '00'"),
    "model-type": (write_native(PAIR, model_type=["llama"]), r"model_type, got \['llama'\]"),
    "other-unit": (write_native(PAIR, dtype="float8_e5m2"), "'float8_e5m2'"),
    "no-header": (
        lambda folder: save_file(PAIR, folder / NATIVE_FILE, metadata={"hf_fp8kv": "{"}),
        "as save_pretrained writes it, got JSONDecodeError",
    ),
}


@pytest.mark.parametrize(("corrupt", "message"), BAD_NATIVE_FILES.values(), ids=BAD_NATIVE_FILES)
def test_an_invalid_kv_scales_file_is_rejected_despite_other_scales(tmp_path, corrupt, message):
    folder = copy_golden("autofp8", tmp_path)
    assert_rejected(folder, corrupt, message, folder / NATIVE_FILE)


BAD_FILES = {
    "missing": ("scales.json", "expected a file, found none. Check the path"),
    "a-folder": (".", "expected a file, found none. Use from_pretrained"),
    "pt": ("scales.pt", "pickles are never loaded"),
    "gguf": ("model.gguf", r"expected .json or .safetensors, got '.gguf'"),
}


@pytest.mark.parametrize(("name", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_unsupported_files_are_rejected(tmp_path, name, message):
    path = tmp_path / name
    if name not in (".", "scales.json"):
        torch.save({"a": torch.ones(1)}, path)
    with scale_error(message, path):
        KVScales.from_file(path)


BAD_REQUESTS = {
    "rank-too-high": ({"tp_rank": 2, "tp_size": 2}, "tp_rank=2"),
    "no-ranks": ({"tp_size": 0}, "tp_size=0"),
    "rank-a-text": ({"tp_rank": "0"}, "expected integers"),
    "fewer-ranks": ({"tp_size": 3}, "expected the scales of 3 ranks, got 2"),
}


@pytest.mark.parametrize(("options", "message"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_an_invalid_rank_is_rejected(options, message):
    with scale_error(message):
        KVScales.from_file(DATA / "vllm-two-ranks" / "kv_cache_scales.json", **options)


# -- the Hub without a network: the client reads a cache, or requests are recorded -----------------


def make_hub_cache(tmp_path: Path, name: str) -> Path:
    """Return a Hub cache with a golden folder as the repository "org/model"."""
    repo = tmp_path / "hub" / "models--org--model"
    (repo / "refs").mkdir(parents=True)
    commit = "0123456789abcdef0123456789abcdef01234567"
    (repo / "refs" / "main").write_text(commit)
    shutil.copytree(DATA / name, repo / "snapshots" / commit)
    return tmp_path / "hub"


def test_a_cached_repository_is_read_without_a_network(tmp_path):
    cache_dir = make_hub_cache(tmp_path, "compressed-tensors-heads")
    scales = KVScales.from_pretrained("org/model", cache_dir=cache_dir, local_files_only=True)
    expected = KVScales.from_pretrained(DATA / "compressed-tensors-heads")
    assert (scales.format, scales.digest) == (expected.format, expected.digest)
    assert resolve_scales("org/model", cache_dir=cache_dir).digest == expected.digest


def test_a_repository_outside_the_cache_is_an_error(tmp_path):
    with pytest.raises(ScaleError, match=r"org/model.*offline: cached files only\."):
        KVScales.from_pretrained("org/model", cache_dir=tmp_path, local_files_only=True)


class FakeHub:
    """A fake Hub client that answers two kinds of requests from a folder, and records downloads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fetched: list[str] = []
        self.options: dict[str, object] = {}

    def make_not_found(self, name: str) -> RemoteEntryNotFoundError:
        response = SimpleNamespace(headers={}, request=None)
        return RemoteEntryNotFoundError(f"404: {name}", response=response)

    def hf_hub_download(self, repo: str, name: str, **options: object) -> str:
        assert repo == "org/model"
        self.options = options
        if not (self.folder / name).exists():
            raise self.make_not_found(name)
        self.fetched.append(name)
        return str(self.folder / name)

    def parse_safetensors_file_metadata(self, repo: str, name: str, **_: object) -> object:
        if not (self.folder / name).exists():
            raise self.make_not_found(name)
        return SimpleNamespace(tensors=load_file(self.folder / name))


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Return a function that replaces the Hub's client with a fake for a golden folder."""

    def serve(name: str) -> FakeHub:
        fake = FakeHub(copy_golden(name, tmp_path))
        monkeypatch.setattr(checkpoint_module, "hf_hub_download", fake.hf_hub_download)
        monkeypatch.setattr(checkpoint_module, "HfApi", lambda: fake)
        monkeypatch.setattr(checkpoint_module, "try_to_load_from_cache", lambda *_: None)
        monkeypatch.setattr(checkpoint_module.constants, "HF_HUB_OFFLINE", False)
        return fake

    return serve


def test_options_are_passed_to_the_client_of_the_hub(hub, tmp_path):
    fake = hub("autofp8")
    options = {"revision": "v1", "token": "t", "force_download": True, "cache_dir": tmp_path}
    KVScales.from_pretrained("org/model", **options)
    assert fake.options == options | {"local_files_only": False, "subfolder": None}
    assert sorted(fake.fetched) == ["config.json", "model.safetensors"]  # each file is fetched once


def test_only_files_with_scales_are_fetched(hub):
    fake = hub("compressed-tensors-heads")
    edit_index(lambda names: names | {"model.norm.weight": "model-9.safetensors"})(fake.folder)
    save_file({"model.norm.weight": torch.ones(2)}, fake.folder / "model-9.safetensors")
    assert list(KVScales.from_pretrained("org/model").layers) == [0, 1, 2]
    config_files = {"config.json", "model.safetensors.index.json"}
    assert set(fake.fetched) == config_files | {"model-00001-of-00002.safetensors", SHARD}


def test_a_cached_repository_is_read_if_the_hub_is_unreachable(hub, monkeypatch):
    fake = hub("autofp8")
    error = LocalEntryNotFoundError("no route")
    monkeypatch.setattr(fake, "make_not_found", lambda _: error)
    monkeypatch.setattr(
        checkpoint_module, "try_to_load_from_cache", lambda repo, name, *_: str(fake.folder / name)
    )
    scales = KVScales.from_pretrained("org/model", force_download=False)
    assert list_values(scales, "k") == round_values(K)
    assert scales.origin == "org/model (Hub unreachable)"
    assert fake.options["local_files_only"] is True


def test_a_missing_repository_is_a_scale_error(hub, monkeypatch):
    hub("autofp8")

    def reject(*_: object, **__: object) -> str:
        response = SimpleNamespace(headers={}, request=None)
        raise RepositoryNotFoundError("401 Client Error", response=response)

    monkeypatch.setattr(checkpoint_module, "hf_hub_download", reject)
    with pytest.raises(ScaleError, match=r"org/model: expected a repository.*401 Client Error"):
        KVScales.from_pretrained("org/model")


@pytest.mark.parametrize("name", ["a/b/c", "./model", "org model", ""])
def test_an_invalid_repository_id_causes_no_request(hub, name):
    fake = hub("autofp8")
    with pytest.raises(ScaleError, match="expected a folder, a file or a repository id"):
        KVScales.from_pretrained(name)
    assert not fake.fetched
