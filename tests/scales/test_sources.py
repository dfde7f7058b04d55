"""Tests of reading static scales: golden files, rules of a checkpoint, invalid files, the Hub.

Each golden folder has the tensor names, shapes, dtypes and config fields that one tool writes. Its
scales of K and V are from two files of vLLM's tests. They differ, so code that confuses K with V
fails.
"""

import json
import logging
import os
import re
import shutil
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

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

DATA = Path(__file__).parents[1] / "data" / "scales"
K = (0.0152239128947258, 0.0188860222697258, 0.0354178324341774)
V = (0.0230364128947258, 0.01979283057153225, 0.0241350457072258)
LARGER_KV = (V[0], V[1], K[2])
ATTENTION = "model.layers.{}.self_attn."


def list_values(scales: KVScales, side: str) -> list[float]:
    return [getattr(layer, side).item() for layer in scales.layers.values()]


def list_sides(scales: KVScales) -> list[list[float]]:
    return [list_values(scales, side) for side in "kv"]


def round_values(values: Sequence[float], dtype: torch.dtype = torch.float32) -> list[float]:
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
    return Path(shutil.copytree(DATA / name, tmp_path / name))


def edit_json(path: Path, **changes: object) -> None:
    """Set top-level entries of a JSON file. None deletes an entry."""
    entries = json.loads(path.read_text()) | changes
    kept_entries = {name: value for name, value in entries.items() if value is not None}
    path.write_text(json.dumps(kept_entries))


def set_scales(folder: Path, layers: Iterable[int], scale: float | None) -> None:
    """Set the scales of K and V of these layers. None deletes them."""
    names = [ATTENTION.format(index) + f"{side}_scale" for index in layers for side in "kv"]
    edit_tensors(folder, dict.fromkeys(names, None if scale is None else torch.tensor(scale)))


def edit_tensors(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Set tensors of model.safetensors. None deletes a tensor."""
    path = folder / "model.safetensors"
    tensors = load_file(path) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}

F16, BF16 = torch.float16, torch.bfloat16
HALVED_KV = tuple(scale / 2 for scale in LARGER_KV)
ONES = (1.0, 1.0, 1.0)


# The format of a golden folder, and the scales of K and of V by layer.
FOLDERS = {
    "vllm": ("vllm-json", K, K),
    "vllm-rank0": ("vllm-json", V, V),
    "vllm-two-ranks": ("vllm-json", LARGER_KV, LARGER_KV),
    "tgi": ("tgi", K, V),
    "tgi-kv": ("tgi", LARGER_KV, LARGER_KV),
    "tgi-kv-written": ("tgi", LARGER_KV, LARGER_KV),
    "tgi-kv-fnuz": ("tgi", HALVED_KV, HALVED_KV),
    "autofp8": ("autofp8", K, V),
    "autofp8-kv": ("autofp8", LARGER_KV, LARGER_KV),
    "compressed-tensors": ("compressed-tensors", round_values(K, BF16), round_values(V, BF16)),
    "compressed-tensors-old": ("compressed-tensors", round_values(K, F16), round_values(V, F16)),
    "compressed-tensors-heads": (  # in two files
        "compressed-tensors",
        [(k, 2 * k) for k in K],
        [(v, 2 * v) for v in V],
    ),
    "modelopt": ("modelopt", K, V),
    "quark": ("quark", K, V),
    "trtllm": ("trtllm", LARGER_KV, LARGER_KV),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_golden_checkpoint_is_read(caplog, name):
    format, *sides = FOLDERS[name]
    scales = KVScales.from_pretrained(DATA / name)
    assert scales.format == format
    assert list(scales.layers) == [0, 1, 2]
    assert all(layer.k_center is None for layer in scales.layers.values())
    for side, values in zip("kv", sides, strict=True):
        actual = torch.stack([getattr(layer, side).squeeze() for layer in scales.layers.values()])
        assert torch.equal(actual, torch.tensor(values))
    assert scales.model_type == (None if name == "vllm-two-ranks" else "llama")
    undeclared = "the config declares no KV cache. Its KV scales are read as float8_e4m3fn"
    assert (undeclared in caplog.text) == (name == "tgi")


def test_a_single_golden_file_is_read():
    assert KVScales.from_file(DATA / "vllm" / "kv_cache_scales.json").format == "vllm-json"
    assert KVScales.from_file(DATA / "autofp8" / "model.safetensors").format == "autofp8"
    scales = KVScales.from_file(DATA / "compressed-tensors-heads" / INDEX_FILE)
    assert list(scales.layers) == [0, 1, 2]
    # The source of a layer names the file and the tensors.
    assert KVScales.from_pretrained(DATA / "tgi").layers[1].source == (
        f"{DATA / 'tgi'}/model.safetensors: model.layers.1.self_attn.k_scale, "
        "model.layers.1.self_attn.v_scale"
    )


# `test_sources_formats` contains no dialect with these names.
LANGUAGE_MODEL_NAMES = [
    "model.layers.0.self_attn.mla_attn.mla_attn.k_scale",
    "language_model.model.layers.0.self_attn.k_scale",
    "model.decoder.layers.0.self_attn.k_scale",
    "transformer.h.0.attn.k_scale",
    "layers.0.self_attn.k_scale",
]
OTHER_NAMES = [
    "vision_model.transformer.layers.0.self_attn.k_scale",
    "model.visual.blocks.0.attn.k_scale",
    "audio_tower.layers.0.self_attn.k_scale",
    "model.encoder.layers.0.self_attn.k_scale",
    "model.decoder.layers.0.encoder_attn.k_scale",
    "mtp.layers.0.self_attn.k_scale",
    "model.layers.0.self_attn.q_scale",
    "model.layers.0.self_attn.k_proj.weight_scale",
    "model.layers.0.self_attn.k_proj.v_scale",
    # Scales of the attention take precedence over scales of projections.
    "model.layers.0.self_attn.k_proj.k_scale",
    # The config has three layers, so layer 3 belongs to a draft head.
    "model.layers.3.self_attn.k_scale",
    "model.layers.x.self_attn.k_scale",
]


@pytest.mark.parametrize("name", LANGUAGE_MODEL_NAMES)
def test_names_of_the_language_model_are_used(tmp_path, name):
    v_name = name.replace(".k_", ".v_").replace("k_scale", "v_scale")
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 1}')
    save_file({name: torch.tensor(0.5), v_name: torch.tensor(0.25)}, tmp_path / "model.safetensors")
    assert list_sides(KVScales.from_pretrained(tmp_path)) == [[0.5], [0.25]]


@pytest.fixture
def folder(tmp_path):
    return copy_golden("autofp8", tmp_path)


def test_names_of_other_modules_are_ignored(folder):
    edit_tensors(folder, {name: torch.tensor(9.0) for name in OTHER_NAMES})
    scales = KVScales.from_pretrained(folder)
    assert scales.format == "autofp8"
    assert list(scales.layers) == [0, 1, 2]
    assert list_sides(scales) == [round_values(K), round_values(V)]


@pytest.mark.parametrize(
    ("changes", "k", "v", "warning"),
    [
        ({"kv_scale": (9.0,) * 3}, K, V, "kv_scale differs from the larger"),
        ({"kv_scale": LARGER_KV, "k_scale": None}, LARGER_KV, LARGER_KV, None),
        ({"v_scale": None}, K, K, "only K has a scale, which is used for K and V (layers 0, 1, 2)"),
        ({"k_zero_point": (0.0,) * 3, "attn.k_scale": K}, K, V, None),  # both are redundant
        (dict.fromkeys(("k_scale", "v_scale"), ONES), ONES, ONES, "every KV scale is exactly 1.0"),
        ({"k_quantizer.scale": ONES}, K, V, "ignored tensors that look like scales: model.layers."),
    ],
    ids=str,
)
def test_a_pair_takes_precedence_over_a_shared_scale(folder, caplog, changes, k, v, warning):
    # The tensors in `changes` are added to all layers, or deleted. `warning` may be None.
    for suffix, values in changes.items():
        names = [ATTENTION.format(index) + suffix for index in range(3)]
        tensors = [None] * 3 if values is None else map(torch.tensor, values)
        edit_tensors(folder, dict(zip(names, tensors, strict=True)))
    assert list_sides(KVScales.from_pretrained(folder)) == [round_values(k), round_values(v)]
    assert len(caplog.records) == (warning is not None)
    assert warning is None or f"{folder}: {warning}" in caplog.text


UNCACHED_LAYERS = {
    "layer-types": (
        1, {"layer_types": ["full_attention", "linear_attention", "sliding_attention"]}
    ),
    "pattern": (1, {"hybrid_override_pattern": "*M*"}),
    "shared-cache": (2, {"num_kv_shared_layers": 1}),
}  # fmt: skip


@pytest.mark.parametrize(("index", "config"), UNCACHED_LAYERS.values(), ids=UNCACHED_LAYERS)
def test_layers_without_a_separate_cache_need_no_scales(folder, index, config):
    set_scales(folder, [index], None)
    edit_json(folder / "config.json", **config)
    assert list(KVScales.from_pretrained(folder).layers) == sorted({0, 1, 2} - {index})


def test_kv_scales_are_read_before_tensors_and_tensors_before_json(tmp_path, folder, caplog):
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


def write_scales(path: Path, ranks: object) -> Path:
    cache = {"dtype": "float8_e4m3fn", "scaling_factor": ranks}
    path.write_text(json.dumps({"model_type": "llama", "kv_cache": cache}))
    return path


TWO_RANKS = {"0": {"0": 0.5, "1": 0.25}, "1": {"0": 0.125, "1": 1.0}}


def test_variants_of_a_json_are_accepted(tmp_path):
    # Strings as scales, layers in any order, byte order marks and extra entries are valid.
    factors = {str(index): index + 1 for index in (10, 2, 1, 0, *range(3, 10))}
    factors |= {"0": "0.5", "2": " 1e-2 "}
    cache = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": factors}, "more": [1, 2]}
    content = json.dumps({"model_type": None, "kv_cache": cache, "also": {"a": 1}})
    path = tmp_path / "s.json"
    path.write_bytes(b"\xef\xbb\xbf" + content.encode())
    torch.set_default_dtype(BF16)  # the default dtype must not change the values
    scales = KVScales.from_file(path)
    assert list_values(scales, "v") == round_values((0.5, 2, 0.01, *range(4, 12)))
    assert scales.model_type is None


def test_ranks_of_a_json_are_selected_or_merged(tmp_path, caplog):
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
    with scale_error("expected the scales of 4 ranks, got 2"):
        KVScales.from_file(path, tp_rank=3, tp_size=4)


def test_strict_errors_become_warnings_without_strict(tmp_path, caplog):
    write_scales(tmp_path / "kv_cache_scales.json", {"0": {"0": 0.5, "2": 0.25, "7": 1.0}})
    config_path = tmp_path / "config.json"
    config_path.write_text('{"model_type": "qwen2"}')
    with scale_error("got 'llama'"):
        KVScales.from_pretrained(tmp_path)
    config_path.write_text('{"n_layer": 4}')
    with scale_error("layers 7"):
        KVScales.from_pretrained(tmp_path)
    config_path.write_text('{"model_type": "qwen2", "n_layer": 4}')
    assert list(KVScales.from_pretrained(tmp_path, strict=False).layers) == [0, 2]
    assert "expected scales of a 'qwen2' model, got 'llama'" in caplog.text
    assert "layers without scales: 1, 3" in caplog.text
    folder = copy_golden("autofp8", tmp_path)
    (folder / "config.json").unlink()
    assert list(KVScales.from_pretrained(folder, strict=False).layers) == [0, 1, 2]
    assert "no config.json" in caplog.text


# Invalid input. Each entry has a golden folder, a function that damages it, and the message that is
# expected. Each rule of the readers has an entry. Reading must raise a ScaleError that names the
# path. It must neither return scales nor raise an error of a library.

Corrupt = Callable[[Path], object]
JSON_FILE, NATIVE_FILE = "kv_cache_scales.json", "kv_scales.safetensors"
SHARD, INDEX_FILE = "model-00002-of-00002.safetensors", "model.safetensors.index.json"


def corrupt_json(old_text: str, new_text: str) -> Corrupt:
    """Return a function that replaces `old_text` in kv_cache_scales.json."""

    def corrupt(folder: Path) -> None:
        contents = (folder / JSON_FILE).read_text()
        assert old_text in contents
        (folder / JSON_FILE).write_text(contents.replace(old_text, new_text, 1))

    return corrupt


def delete(name: str) -> Corrupt:
    return lambda folder: (folder / name).unlink()


def corrupt_config(**entries: object) -> Corrupt:
    return lambda folder: edit_json(folder / "config.json", **entries)


def corrupt_tensors(tensors: dict[str, torch.Tensor], index: int = 1) -> Corrupt:
    changes = {ATTENTION.format(index) + suffix: tensor for suffix, tensor in tensors.items()}
    return lambda folder: edit_tensors(folder, changes)


def edit_index(change: Callable[[dict[str, object]], object]) -> Corrupt:
    def corrupt(folder: Path) -> None:
        weight_map = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
        edit_json(folder / INDEX_FILE, weight_map=change(weight_map))

    return corrupt


def write_native(tensors: dict[str, torch.Tensor], **entries: object) -> Corrupt:
    """Return a function that writes kv_scales.safetensors with these tensors and header entries."""
    header = {"version": 1, "dtype": "float8_e4m3fn", "model_type": None} | entries
    return lambda folder: save_file(
        tensors, folder / NATIVE_FILE, metadata={"hf_fp8kv": json.dumps(header)}
    )


FIRST_ENTRY = '"0": 0.0152239128947258'
PAIR = {"layers.0.k_scale": torch.tensor(0.5), "layers.0.v_scale": torch.tensor(0.25)}
BAD_JSON = {
    "zero": (corrupt_json(FIRST_ENTRY, '"0": 0'), "rank 0, layer 0: expected a finite number"),
    "endless-integer": (corrupt_json(FIRST_ENTRY, '"0": 1' + "0" * 5000), "expected a JSON file"),
    "missing-layer": (corrupt_json(FIRST_ENTRY + ",", ""), "without layers 0"),
    "layer-not-a-number": (corrupt_json(FIRST_ENTRY, '"zero": 0.5'), "every layer .*'zero'"),
    "layer-twice": (corrupt_json(FIRST_ENTRY, '"0": 1, "0": 2'), "'0' twice"),
    "layer-in-two-spellings": (corrupt_json(FIRST_ENTRY, '"0": 1, "00": 2'), "once, .*'00'"),
    "rank-missing": (corrupt_json('"0": {', '"1": {'), "expected the ranks 0 to 0, got 1"),
    "ranks-with-other-layers": (
        corrupt_json('"0": {', '"1": {"0": 1}, "0": {'),
        "expected the same layers for every rank, got 3 layers for rank 0 and 1 for rank 1",
    ),
    "ranks-not-an-object": (
        corrupt_json('"scaling_factor"', '"scaling_factor": [1], "x"'),
        r"object of ranks, got \[1\]",
    ),
    "dtype-e5m2": (corrupt_json("e4m3fn", "e5m2"), "expected 'float8_e4m3fn', got 'float8_e5m2'"),
    "model-type": (corrupt_json('"llama"', "1"), "model_type: expected a string"),
    "an-array": (lambda folder: (folder / JSON_FILE).write_text("[1]"), "JSON object, got list"),
}
BAD_CHECKPOINTS = {
    "zero": (
        corrupt_tensors({"k_scale": torch.zeros(())}),
        "K scale .*finite numbers above 0.*0.0",
    ),
    "int64": (corrupt_tensors({"k_scale": torch.tensor(1)}), r"got torch\.int64"),
    "shape": (corrupt_tensors({"k_scale": torch.ones(3)}), r"heads in config.json.*got \[3\]"),
    "layer-missing": (
        lambda folder: set_scales(folder, [1], None),
        "expected scales for 3 layers, got 2 without layers 1",
    ),
    "two-names-that-differ": (
        corrupt_tensors({"attn.k_scale": torch.tensor(9.0)}),
        "expected one scale for K of layer 1, got .*which differ",
    ),
    "zero-point": (
        corrupt_tensors({"k_zero_point": torch.ones(1).to(torch.float8_e4m3fn)}),
        "k_zero_point: expected a zero point of 0",
    ),
    "bias-of-more-heads-than-its-scale": (
        corrupt_tensors({"v_scale": torch.ones(2, 1, 1), "v_proj.v_bias": torch.ones(1, 4, 1, 4)}),
        r"v_bias: expected floats of the shape \[1, heads, 1, D\] with heads in \[1, 2\]",
    ),
    "bias-without-a-scale": (
        corrupt_tensors({"k_proj.k_bias": torch.ones(())}, index=9),
        "expected a scale for the layer of model.layers.9.self_attn.k_proj.k_bias, got none",
    ),
    "config-missing": (delete("config.json"), "expected a config.json"),
    "no-scales": (
        lambda folder: save_file({"model.norm": torch.ones(2)}, folder / "model.safetensors"),
        "expected kv_scales.safetensors, kv_cache_scales.json, or scale tensors such as "
        r"self_attn.{k,v}_scale.*got none",
    ),
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
    "native-single-side": (write_native({"layers.0.k_scale": torch.tensor(1.0)}), "V scale.*None"),
    "native-other-path": (
        write_native(PAIR | {"vision_tower.0.k_scale": torch.ones(())}),
        "such as layers.0.k_scale, got 'vision_tower.0.k_scale'",
    ),
    "native-second-spelling": (
        write_native(PAIR | {"layers.00.k_scale": torch.ones(())}),
        "expected 0 as the number of a layer, got '00'",
    ),
    "native-model-type": (write_native(PAIR, model_type=["llama"]), r"model_type, got \['llama'\]"),
}
BAD_INDICES = {
    "shard-missing": (delete(SHARD), f"expected the file {SHARD}"),
    "tensor-missing": (
        edit_index(lambda files: dict.fromkeys(files, SHARD)), "which the index lists here"
    ),
    "outside": (edit_index(lambda files: dict.fromkeys(files, "../x")), "expected file names"),
    "not-a-name": (edit_index(lambda files: dict.fromkeys(files, 3)), "expected file names.*got 3"),
}  # fmt: skip
BAD_CASES = {
    "vllm": BAD_JSON, "autofp8": BAD_CHECKPOINTS, "compressed-tensors-heads": BAD_INDICES,
}  # fmt: skip
INVALID_FOLDERS = {
    f"{golden}-{name}": (golden, *case)
    for golden, cases in BAD_CASES.items() for name, case in cases.items()
}  # fmt: skip
# Checkpoints that are refused even with strict=False.
ALWAYS_INVALID = ("autofp8-zero", "autofp8-int64", "autofp8-zero-point")


@pytest.mark.parametrize("name", INVALID_FOLDERS)
def test_an_invalid_folder_is_refused(tmp_path, name):
    golden, corrupt, message = INVALID_FOLDERS[name]
    folder = copy_golden(golden, tmp_path)
    corrupt(folder)
    path = folder / NATIVE_FILE if "native" in name else folder
    with scale_error(message, path):
        KVScales.from_pretrained(folder)
    if name in ALWAYS_INVALID:
        with pytest.raises(ScaleError):
            KVScales.from_pretrained(folder, strict=False)


def test_a_large_json_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / JSON_FILE
    path.touch()
    os.truncate(path, (256 << 20) + 1)
    tracemalloc.start()
    with scale_error("expected a JSON file of at most", path):
        KVScales.from_file(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("scales.json", "expected a file, got none. Check the path"),
        ("", "expected a file, got a folder. Use from_pretrained"),
        ("scales.pt", "pickles are never loaded"),
    ],
)
def test_unsupported_files_are_refused(tmp_path, name, message):
    (tmp_path / "scales.pt").touch()
    with scale_error(message, tmp_path / name):
        KVScales.from_file(tmp_path / name)


def test_a_cached_repository_is_read_without_a_network(tmp_path):
    repo = tmp_path / "hub" / "models--org--model"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0123456789abcdef0123456789abcdef01234567")
    golden = DATA / "compressed-tensors-heads"
    shutil.copytree(golden, repo / "snapshots" / "0123456789abcdef0123456789abcdef01234567")
    scales = KVScales.from_pretrained(
        "org/model", cache_dir=tmp_path / "hub", local_files_only=True
    )
    expected = KVScales.from_pretrained(golden)
    assert (scales.format, scales.digest) == (expected.format, expected.digest)
    with pytest.raises(ScaleError, match=r"org/model.*offline: cached files only\."):
        KVScales.from_pretrained("org/model", cache_dir=tmp_path, local_files_only=True)


RESPONSE = SimpleNamespace(headers={}, request=None)
NOT_FOUND = RemoteEntryNotFoundError("404", response=RESPONSE)


@pytest.fixture
def serve(monkeypatch, tmp_path):
    """Return a function that makes a repository of a golden folder.

    It returns the folder and the mock of downloads. Files that do not exist raise `error`.
    """

    def serve_folder(golden: str, error: Exception = NOT_FOUND) -> tuple[Path, mock.Mock]:
        folder = copy_golden(golden, tmp_path)

        def find_file(repo: str, name: str, **_: object) -> str:
            if not (folder / name).exists():
                raise error
            return str(folder / name)

        download = mock.Mock(side_effect=find_file)
        api = mock.Mock()
        api().parse_safetensors_file_metadata.side_effect = lambda *names, **_: SimpleNamespace(
            tensors=load_file(find_file(*names))
        )
        monkeypatch.setattr(checkpoint_module, "hf_hub_download", download)
        monkeypatch.setattr(checkpoint_module, "HfApi", api)
        monkeypatch.setattr(checkpoint_module, "try_to_load_from_cache", lambda *_: None)
        monkeypatch.setattr(checkpoint_module.constants, "HF_HUB_OFFLINE", False)
        return folder, download

    return serve_folder


def test_only_files_with_scales_are_fetched(serve, tmp_path):
    folder, download = serve("compressed-tensors-heads")
    edit_index(lambda files: files | {"model.norm.weight": "model-9.safetensors"})(folder)
    save_file({"model.norm.weight": torch.ones(2)}, folder / "model-9.safetensors")
    options = {"revision": "v1", "token": "t", "force_download": True, "cache_dir": tmp_path}
    assert list(KVScales.from_pretrained("org/model", **options).layers) == [0, 1, 2]
    assert download.call_args.kwargs == options | {"local_files_only": False, "subfolder": None}
    requested_files = [call.args[1] for call in download.call_args_list]
    fetched_files = sorted(file for file in requested_files if (folder / file).exists())
    assert fetched_files == ["config.json", SHARD.replace("2", "1", 1), SHARD, INDEX_FILE]
    serve("autofp8")  # in one file
    assert list_values(KVScales.from_pretrained("org/model"), "k") == round_values(K)


def test_a_cached_repository_is_read_if_the_hub_is_unreachable(serve, monkeypatch):
    folder, download = serve("autofp8", LocalEntryNotFoundError("no route"))
    monkeypatch.setattr(
        checkpoint_module, "try_to_load_from_cache", lambda repo, name, *_: str(folder / name)
    )
    scales = KVScales.from_pretrained("org/model", force_download=False)
    assert list_values(scales, "k") == round_values(K)
    assert scales.origin == "org/model (Hub unreachable)"
    assert download.call_args.kwargs["local_files_only"] is True


def test_a_missing_repository_is_a_scale_error(serve):
    serve("autofp8", RepositoryNotFoundError("401 Client Error", response=RESPONSE))
    with pytest.raises(ScaleError, match=r"org/model: expected a repository.*401 Client Error"):
        KVScales.from_pretrained("org/model")
