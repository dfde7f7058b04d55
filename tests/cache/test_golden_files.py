"""Tests of cache files: intact files load and give the same values, invalid files are refused."""

import copy
import functools
import json
import math
import operator
import os
import random
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import DeepseekV32Config

from hf_fp8kv import ConfigError, FP8PagedCache, KVScales, OutOfPagesError
from hf_fp8kv.cache import serialization
from hf_fp8kv.cache.paged_tensor import densify
from hf_fp8kv.utils.digests import compute_digest
from tests.data.caches.make import CASES, append_tokens, continue_cache, make_cache, make_config
from tests.helpers.assertions import assert_same
from tests.helpers.counting import WrittenBytesCounter

FOLDER = Path(__file__).parents[1] / "data" / "caches"


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as file:
        meta = json.loads(file.metadata()["meta"])
        return meta, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict


def assert_same_file(actual: Path, expected: Path) -> None:
    meta, tensors = read_file(actual)
    expected_meta, expected_tensors = read_file(expected)
    assert meta == expected_meta
    assert tensors.keys() == expected_tensors.keys()
    for name, tensor in tensors.items():
        assert_same(tensor, expected_tensors[name], name)


def read_contents(cache: FP8PagedCache) -> list[Any]:
    """Return the length of a cache, and its values with their positions."""
    handles = [handle for layer in cache.layers for handle in (layer.keys, layer.values)]
    values = [None if handle is None else densify(handle).tolist() for handle in handles]
    return [cache.get_seq_length(), *values]


@pytest.mark.parametrize("name", CASES)
def test_a_golden_file_loads_and_continues(name: str, tmp_path: Path) -> None:
    golden = FOLDER / f"{name}.safetensors"
    expected_cache = make_cache(name)
    cache = FP8PagedCache.load(golden)
    assert_same_file(expected_cache.save(tmp_path / "original.safetensors"), golden)
    assert read_contents(cache) == read_contents(expected_cache)
    assert cache.plan == expected_cache.plan
    continue_cache(cache)
    expected = read_contents(FP8PagedCache.load(FOLDER / f"{name}.continued.safetensors"))
    loaded = FP8PagedCache.load(cache.save(tmp_path / "continued.safetensors"))
    assert read_contents(cache) == read_contents(loaded) == expected


def test_every_golden_file_is_tested() -> None:
    stems = {path.stem for path in FOLDER.glob("*.safetensors")}
    assert stems == {*CASES, *(f"{name}.continued" for name in CASES)}


Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]


def write_file(path: Path, meta: Any, tensors: dict[str, torch.Tensor], **header: str) -> Path:
    """Write a file with a valid digest, as an attacker could, unless `header` contains a digest."""
    tensors = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    fields = {"format": "hf_fp8kv.cache", "version": "6", "meta": json.dumps(meta)}
    save_file(tensors, path, metadata=fields | {"digest": compute_digest(fields, tensors)} | header)
    return path


def set_field(value: Any, *path: Any) -> Change:
    def change(meta: dict[str, Any], _: object) -> None:
        parent: Any = functools.reduce(operator.getitem, path[:-1], meta)
        parent[path[-1]] = value

    return change


def edit_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda _, tensors: tensors.update({name: change(tensors[name])})


def shift_window(num_pages: int) -> Change:
    """Return a function that adds `num_pages` pages before the window of all layers."""

    def change(meta: dict[str, Any], _: object) -> None:
        for group in meta["groups"]:
            for layer in group["layers"]:
                layer["length"] += num_pages * 8

    return change


TABLE = "groups.0.table"
CENTER = "scales.0.k_center"
LAYER = ("groups", 0, "layers", 0)
# Each case has the name of a golden file, a change, and a part of the error.
CHANGES: dict[str, tuple[str, Change, str]] = {
    "length beyond the table": ("dynamic", set_field(1000, *LAYER, "length"), f"{TABLE}: first"),
    "negative length": ("dynamic", set_field(-5, *LAYER, "length"), "length: .* got -5"),
    "first page without a window": ("dynamic", shift_window(1), "first page: .* to 0, got 1"),
    "more pages before the window than memory can hold": (
        "sliding.continued", shift_window(1 << 27), f"{TABLE}: entries"
    ),
    "page that does not exist": (
        "dynamic", edit_tensor(TABLE, lambda x: x.clamp(max=0) - 1), f"{TABLE}: pages"
    ),
    "table of a different dtype": ("dynamic", edit_tensor(TABLE, torch.Tensor.long), TABLE),
    "two batches": (
        "two-groups", edit_tensor("groups.1.table", lambda x: x[:1]), "one batch size in all groups"
    ),
    "layer in two groups": (
        "two-groups", set_field(0, "groups", 1, "layers", 0, "index"), "layer once, got 0 twice"
    ),
    "layer that is missing": ("empty", set_field(2, *LAYER, "index"), r"layers or tensors: \[2\]"),
    "missing page": ("dynamic", edit_tensor("layers.1.pages", lambda x: x[:1]), r"1\.pages: "),
    "more heads": ("dynamic", set_field([3, 16, 16], *LAYER, "shape"), r"layers\.0\.pages: "),
    "center of 5 values": ("planned", edit_tensor(CENTER, lambda x: x[:, :5]), "center of K"),
    "no center": ("planned", lambda _, tensors: tensors.pop(CENTER), "got no center"),
    "center without a plan": (
        "dynamic", lambda _, tensors: tensors.update({CENTER: torch.ones(2, 16)}), CENTER
    ),
    "plan without a layer": (
        "planned", lambda meta, _: meta["options"]["plan"].pop("1"), "expected a tensor"
    ),
    "dtype that no model has": ("dynamic", set_field(["uint8"] * 2, *LAYER, "dtypes"), "uint8"),
    "no page_size": ("dynamic", lambda meta, _: meta["options"].pop("page_size"), "options: "),
    "huge length": ("preallocated", set_field(1 << 40, "options", "max_cache_len"), "entries"),
    "window of a stock layer": ("stock-layers", set_field(0, "stock", 0, "window"), "window"),
    "ids of other rows": (
        "dynamic", edit_tensor("tokens.ids", lambda x: x[:1]), r"tokens\.mask: expected a shape"
    ),
    "ids of three rows": (
        "dynamic",
        lambda _, tensors: tensors.update(
            {
                f"tokens.{name}": tensors[f"tokens.{name}"][[0, 1, 1]]
                for name in ("ids", "mask", "features")
            }
        ),
        "tokens: rows",
    ),
    "ids that are not integers": (
        "dynamic", edit_tensor("tokens.ids", torch.Tensor.float), r"tokens\.ids: expected integers"
    ),
    "sample of the model": ("dynamic", set_field(3, "model_sample"), "model_sample"),
    "tokens of a stock layer": ("stock-layers", set_field(5, "stock", 0, "seen"), "seen"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_errors_name_the_invalid_field(name: str, tmp_path: Path) -> None:
    source, change, message = CHANGES[name]
    meta, tensors = read_file(FOLDER / f"{source}.safetensors")
    change(meta, tensors)
    path = write_file(tmp_path / "x", meta, tensors)
    with pytest.raises(ConfigError, match=f"{path}: expected a whole file.*{message}"):
        FP8PagedCache.load(path)


def test_unknown_formats_and_exceeded_budgets_are_refused(tmp_path: Path) -> None:
    meta, tensors = read_file(FOLDER / "dynamic.safetensors")
    invalid_headers = (
        ({"version": "4"}, "version: expected .*'4'.*Compute the cache again"),
        ({"format": "x"}, "format and version: expected .*'x'"),
        ({"digest": 64 * "0"}, "digest: "),
    )
    for header, message in invalid_headers:
        with pytest.raises(ConfigError, match=message):
            FP8PagedCache.load(write_file(tmp_path / "x", meta, tensors, **header))
    meta["options"]["max_pages"] = 1
    with pytest.raises(OutOfPagesError, match="max_pages"):
        FP8PagedCache.load(write_file(tmp_path / "x", meta, tensors))


@contextmanager
def limit_memory(max_bytes: int) -> Iterator[None]:
    """Assert that the tensors that are written and the peak of Python's memory are small."""
    tracemalloc.start()
    try:
        with WrittenBytesCounter() as counter:
            yield
    finally:
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert counter.num_bytes + peak_bytes < max_bytes


VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3, 7, 8, 12, 14, 16, 17, 30, 100, 2**31 - 1, 2**31, 2**63,
    2**70, 0.5, -0.5, math.nan, math.inf, "", "x", "0", "auto", "fp8_e5m2", "int8 rotated",
    "fp8_e4m3 centered", "float16", "int64", "load", "torch", "stored", "paged", "stock",
    "DynamicLayer", "indexer_keys", [], [0], [1, 2], {}, {"k": 1},
]  # fmt: skip
TENSOR_CHANGES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x[:1], lambda x: x[1:], lambda x: x[:0], lambda x: x[None], lambda x: x.flatten(),
    lambda x: torch.cat([x, x]), lambda x: x.mT if x.ndim > 1 else x, lambda x: x.float(),
    lambda x: x.half(), lambda x: x.long(), lambda x: x.to(torch.uint8), lambda x: x + 1,
    lambda x: -x, lambda x: x * 300_000, lambda x: x.flip(0) if x.ndim else x,
    lambda x: x.flatten()[:1], lambda x: x.new_zeros(()), lambda x: x[..., :-1] if x.ndim else x,
    lambda x: x.clone().fill_(0), lambda x: x.new_zeros((0, *x.shape[1:])),
]  # fmt: skip


def list_paths(value: Any) -> list[tuple[Any, ...]]:
    """Return the keys that lead to each value that is nested in dicts and lists."""
    pairs: Any = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        pairs = enumerate(value)
    paths = []
    for key, nested_value in pairs:
        paths += [(key, *path) for path in [(), *list_paths(nested_value)]]
    return paths


def edit_at_random(rng: random.Random, meta: Any, tensors: dict[str, torch.Tensor]) -> None:
    name = rng.choice([*tensors, "new"])
    action = rng.choice(("remove", "copy", "change", "change"))  # changes are most frequent
    if rng.random() < 0.5:
        edit_field_at_random(rng, meta)
    elif name == "new":
        tensors[name] = torch.zeros(1)
    elif action == "remove":
        tensors.pop(name)
    elif action == "copy":
        tensors[rng.choice([*tensors, "layers.0.x", "layers.9.k"])] = tensors[name]
    else:
        tensors[name] = rng.choice(TENSOR_CHANGES)(tensors[name])


def edit_field_at_random(rng: random.Random, meta: Any) -> None:
    *parent_path, key = rng.choice(list_paths(meta))
    parent = functools.reduce(operator.getitem, parent_path, meta)
    action = rng.choice(("remove", "repeat", "replace", "replace"))
    if action == "remove":
        del parent[key]
    elif action == "repeat" and isinstance(parent, list):
        parent.append(copy.deepcopy(parent[key]))
    else:
        parent[key] = rng.choice(VALUES)


@pytest.fixture(scope="module")
def valid_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return golden files, and files of an offloaded cache and of caches with an indexer."""
    folder = tmp_path_factory.mktemp("valid")
    offloaded_cache = FP8PagedCache(make_config("mistral"), page_size=8, offloading=True)
    append_tokens(offloaded_cache, 21, 0)
    paths = [*sorted(FOLDER.glob("*.safetensors")), offloaded_cache.save(folder / "offloaded")]
    for max_len in (None, 32):
        config = DeepseekV32Config(num_hidden_layers=2)
        cache = FP8PagedCache(config, page_size=8, max_cache_len=max_len)
        append_tokens(cache, 21, 0)
        for layer in cache.layers:
            layer.update_indexer(torch.ones(2, 21, 4))
        paths.append(cache.save(folder / f"indexer, {max_len}"))
    return paths


@pytest.mark.parametrize("num_changes", [200, pytest.param(2000, marks=pytest.mark.full)])
def test_changed_files_are_refused_or_load(
    num_changes: int, valid_files: list, tmp_path: Path
) -> None:
    """Every fourth file has a changed byte and may lack its end, and is refused.

    Other files have a valid digest. Loading raises ConfigError, or needs little memory.
    """
    path = tmp_path / "changed"
    num_loaded = 0
    for seed in range(num_changes):
        rng = random.Random(seed)
        source = rng.choice(valid_files)
        if seed % 4:
            meta, tensors = read_file(source)
            for _ in range(rng.choice((1, 1, 2))):
                edit_at_random(rng, meta, tensors)
            write_file(path, meta, tensors)
        else:
            contents = bytearray(source.read_bytes())
            contents[rng.randrange(len(contents))] ^= 1 << rng.randrange(8)
            stop = rng.choice((None, None, rng.randrange(len(contents))))
            path.write_bytes(contents[:stop])
        try:
            with limit_memory(4 * path.stat().st_size + (1 << 20)):
                FP8PagedCache.load(path)
            assert seed % 4, "a damaged file was loaded"
            num_loaded += 1
        except ConfigError:
            pass
        except OutOfPagesError:
            assert meta["options"]["max_pages"], seed
        except Exception as error:
            raise AssertionError(seed) from error
    assert num_changes // 20 < num_loaded < num_changes // 4, num_loaded


@pytest.mark.parametrize(
    ("source", "change", "max_len"),
    [
        ("sliding.continued", shift_window((1 << 20) - 10), 0),
        ("preallocated", set_field(1 << 15, "options", "max_cache_len"), 1 << 15),
    ],
)
def test_a_load_has_bounded_memory(
    source: str, change: Change, max_len: int, tmp_path: Path
) -> None:
    """A block table takes at most 16 MiB, and there are pages for `max_len` tokens."""
    meta, tensors = read_file(FOLDER / f"{source}.safetensors")
    change(meta, tensors)
    path = write_file(tmp_path / "x", meta, tensors)
    # For 2 layers, 2 sequences and 2 heads: K and V of 16 bytes, and two scales of 2 bytes.
    pages_bytes = 8 * max_len * (16 + 16 + 4)
    with limit_memory(4 * path.stat().st_size + (17 << 20) + pages_bytes):
        FP8PagedCache.load(path)


def test_a_file_survives_a_power_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is synced before it is renamed, and the folder afterwards."""
    calls: list[tuple[str, int]] = []

    def record(name: str, function: Callable[..., Any]) -> None:
        def call(file: Any, *args: Any) -> None:
            calls.append((name, os.stat(file).st_ino))
            function(file, *args)

        monkeypatch.setattr(os, name, call)

    record("fsync", os.fsync)
    record("replace", os.replace)
    saves: dict[str, Callable[[Path], object]] = {
        "cache": lambda folder: make_cache("sliding").save(folder / "cache"),
        "scales": KVScales.uniform(2).save_pretrained,
    }
    for folder_name, save in saves.items():
        calls.clear()
        folder = tmp_path / folder_name
        folder.mkdir()
        save(folder)
        inodes = sorted(file.stat().st_ino for file in folder.glob("*"))
        assert sorted(calls[: len(inodes)]) == [("fsync", inode) for inode in inodes]
        assert sorted(calls[len(inodes) : -1]) == [("replace", inode) for inode in inodes]
        assert calls[-1] == ("fsync", folder.stat().st_ino)


def test_a_symlink_at_the_temporary_name_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    file_names = ("kv_scales.safetensors", "cache")
    for name in file_names:
        (tmp_path / f".{name}.{os.getpid()}.part").symlink_to(victim)
    KVScales.uniform(2).save_pretrained(tmp_path)
    make_cache("empty").save(tmp_path / "cache")
    assert victim.read_text() == "precious"
    assert not any((tmp_path / name).is_symlink() for name in file_names)


def test_a_full_disk_raises_an_os_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_disk = SafetensorError("I/O error: No space left on device")
    monkeypatch.setattr(serialization, "save_file", mock.Mock(side_effect=full_disk))
    with pytest.raises(OSError, match="No space left"):
        make_cache("empty").save(tmp_path / "cache")
    assert not list(tmp_path.iterdir())


def test_a_failed_sync_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_cache("empty").save(tmp_path / "cache")
    old_content = path.read_bytes()
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError("no room")))
    for target in (path, tmp_path / "new"):
        with pytest.raises(OSError, match="no room"):
            make_cache("sliding").save(target)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == old_content
