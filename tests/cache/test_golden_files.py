"""Cache files: intact files load and continue with the same values, changed files are refused."""

import copy
import json
import math
import os
import random
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DeepseekV32Config

from hf_fp8kv import ConfigError, FP8PagedCache, KVScales, OutOfPagesError
from hf_fp8kv.cache.paged_tensor import densify
from hf_fp8kv.formats import FORMATS, SidePlan
from hf_fp8kv.formats.codec import decode
from hf_fp8kv.formats.rotation import rotate
from hf_fp8kv.ops.page_layout import page_layout
from hf_fp8kv.utils.digests import digest_of
from tests.data.caches.make import CASES, continue_cache, feed, make_cache, make_config

FOLDER = Path(__file__).parents[1] / "data" / "caches"


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as file:
        meta = json.loads(file.metadata()["meta"])
        return meta, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict


def assert_same_file(actual: Path, expected: Path) -> None:
    """Assert the same metadata, and the same bytes of every tensor."""
    (meta, tensors), (other_meta, others) = read_file(actual), read_file(expected)
    if other_meta["options"]["plan"] == ["auto", "auto"]:  # the name in earlier versions
        other_meta["options"]["plan"] = ["model", "model"]
    assert meta == other_meta
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == others[name].dtype, name
        assert torch.equal(tensor, others[name]), name


def assert_same_content(actual: FP8PagedCache, expected: FP8PagedCache) -> None:
    """Assert that two caches hold the same values at the same positions."""
    assert actual.get_seq_length() == expected.get_seq_length()
    for layer, other in zip(actual.layers, expected.layers, strict=True):
        for tensor, expected_tensor in ((layer.keys, other.keys), (layer.values, other.values)):
            if expected_tensor is None:
                assert tensor is None
            else:
                assert torch.equal(densify(tensor), densify(expected_tensor))


@pytest.mark.parametrize("name", CASES)
def test_a_golden_file_loads_and_continues(name: str, tmp_path: Path) -> None:
    golden = FOLDER / f"{name}.safetensors"
    original, cache = make_cache(name), FP8PagedCache.load(golden)
    assert_same_file(original.save(tmp_path / "original.safetensors"), golden)
    assert_same_content(cache, original)
    assert cache.plan == original.plan
    continue_cache(cache)
    expected = FP8PagedCache.load(FOLDER / f"{name}.continued.safetensors")
    assert_same_content(cache, expected)
    assert_same_content(
        FP8PagedCache.load(cache.save(tmp_path / "continued.safetensors")), expected
    )


def test_every_golden_file_is_tested() -> None:
    names = {path.name for path in FOLDER.glob("*.safetensors")}
    assert names == {f"{name}{part}.safetensors" for name in CASES for part in ("", ".continued")}


# -- changed files ---------------------------------------------------------------------------------

Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]


def write(path: Path, meta: Any, tensors: dict[str, torch.Tensor], **header: str) -> Path:
    """Write a file with a valid digest, as an attacker can, unless `header` has a digest."""
    tensors = {name: x.clone().contiguous() for name, x in tensors.items()}
    fields = {"format": "hf_fp8kv.cache", "version": "3", "meta": json.dumps(meta)}
    save_file(tensors, path, metadata=fields | {"digest": digest_of(fields, tensors)} | header)
    return path


def set_fact(value: Any, *place: Any) -> Change:
    """Return a change of one entry of the metadata."""

    def change(meta: dict[str, Any], _: object) -> None:
        parent: Any = meta
        for key in place[:-1]:
            parent = parent[key]
        parent[place[-1]] = value

    return change


def set_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Return a change of one tensor."""
    return lambda _, tensors: tensors.update({name: change(tensors[name])})


def move_on(pages: int) -> Change:
    """Return a change that adds pages before the window."""

    def change(meta: dict[str, Any], _: object) -> None:
        for layer in (x for group in meta["groups"] for x in group["layers"]):
            layer["length"] += pages * 8

    return change


TABLE, PAGES, CENTER = "groups.0.table", "layers.1.pages", "layers.0.k_center"
LAYER = ("groups", 0, "layers", 0)
CHANGES: dict[str, tuple[str, Change, str]] = {
    "length beyond the table": ("dynamic", set_fact(1000, *LAYER, "length"), f"{TABLE}: first"),
    "negative length": ("dynamic", set_fact(-5, *LAYER, "length"), "length: .* got -5"),
    "half a token": ("dynamic", set_fact(12.5, *LAYER, "length"), "length: .* got 12.5"),
    "first page of a layer without a window": ("dynamic", move_on(1), "first page: .* to 0, got 1"),
    "more pages before the window than any memory holds": (
        "sliding.continued", move_on(1 << 27), f"{TABLE}: places"
    ),
    "page that does not exist": (
        "dynamic", set_tensor(TABLE, lambda x: x.clamp(max=0) - 1), f"{TABLE}: pages"
    ),
    "page far away": ("dynamic", set_tensor(TABLE, lambda x: x + 300_000), f"{TABLE}: pages"),
    "table of a different dtype": ("dynamic", set_tensor(TABLE, torch.Tensor.long), TABLE),
    "two batches": (
        "two-groups", set_tensor("groups.1.table", lambda x: x[:1]), "numbers of sequences"
    ),
    "layer in two groups": (
        "two-groups", set_fact(0, "groups", 1, "layers", 0, "index"), "layer 0 is in another"
    ),
    "layer that is missing": ("empty", set_fact(2, *LAYER, "index"), r"too many: .*\[2\]"),
    "missing page": ("dynamic", set_tensor(PAGES, lambda x: x[:1]), f"{PAGES}: "),
    "missing byte": ("dynamic", set_tensor(PAGES, lambda x: x[:, :-1]), f"{PAGES}: "),
    "pages of type int8": ("dynamic", set_tensor(PAGES, lambda x: x.view(torch.int8)), PAGES),
    "more heads": ("dynamic", set_fact([3, 16, 16], *LAYER, "shape"), r"layers\.0\.pages: "),
    "center of one value": ("centered", set_tensor(CENTER, lambda x: x[0, 0, :1]), CENTER),
    "center in 16 bits": ("centered", set_tensor(CENTER, torch.Tensor.half), CENTER),
    "no center": ("centered", lambda _, tensors: tensors.pop(CENTER), CENTER),
    "center without a plan": (
        "dynamic", lambda _, tensors: tensors.update({CENTER: torch.ones(2, 2, 16)}), CENTER
    ),
    "plan without a layer": (
        "planned", lambda meta, _: meta["options"]["plan"].pop("1"), "none for layer 1"
    ),
    "dtype that no model has": ("dynamic", set_fact(["uint8"] * 2, *LAYER, "dtypes"), "uint8"),
    "page_size of 0": ("dynamic", set_fact(0, "options", "page_size"), "page_size: "),
    "no room": ("preallocated", set_fact(1 << 40, "options", "max_cache_len"), "places"),
    "turns": ("dynamic", set_fact(-1.0, *LAYER, "turns", "base"), "turns"),
    "window of transformers' layer": ("stock-layers", set_fact(0, "stock", 0, "window"), "window"),
    "tokens of transformers' layer": ("stock-layers", set_fact(5, "stock", 0, "seen"), "seen"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_errors_name_the_invalid_entry(name: str, tmp_path: Path) -> None:
    source, change, message = CHANGES[name]
    meta, tensors = read_file(FOLDER / f"{source}.safetensors")
    change(meta, tensors)
    path = write(tmp_path / "x", meta, tensors)
    with pytest.raises(ConfigError, match=f"{path}: expected a whole file.*{message}"):
        FP8PagedCache.load(path)


def test_unknown_formats_and_missing_files_are_refused(tmp_path: Path) -> None:
    meta, tensors = read_file(FOLDER / "dynamic.safetensors")
    for header, message in (
        ({"version": "2"}, "version: expected .*'2'"),
        ({"format": "x"}, "format and version: expected .*'x'"),
        ({"digest": 64 * "0"}, "digest: "),
    ):
        with pytest.raises(ConfigError, match=message):
            FP8PagedCache.load(write(tmp_path / "x", meta, tensors, **header))
    with pytest.raises(ConfigError, match="nowhere"):
        FP8PagedCache.load(tmp_path / "nowhere")
    meta["options"]["max_pages"] = 1
    with pytest.raises(OutOfPagesError, match="max_pages"):
        FP8PagedCache.load(write(tmp_path / "x", meta, tensors))


def read_values(meta: Any, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[Any, ...]]:
    """Yield each layer's index, its first visible token, and keys and values `[B, H, N, D]`."""
    size, plans, scales = (meta["options"][name] for name in ("page_size", "plan", "scales"))
    static = isinstance(scales, int | float) or any(name.endswith((".k", ".v")) for name in tensors)
    layers = [(g, group, x) for g, group in enumerate(meta["groups"]) for x in group["layers"]]
    for g, group, layer in (x for x in layers if x[2].get("length")):
        i, table = layer["index"], tensors[f"groups.{g}.table"]
        start = max(layer["length"] - (group["window"] or math.inf) + 1, 0)
        at = torch.arange(start, layer["length"])
        longest = max(x.get("length", 0) for x in group["layers"])
        pages = table[:, at // size - (-(-longest // size) - table.shape[1])].long()
        (heads, *dims), sides = layer["shape"], []
        plan = [*map(SidePlan.parse, plans if isinstance(plans, list) else plans[str(i)])]
        dtypes = [getattr(torch, dtype) for dtype in layer["dtypes"]]
        codes = [y if x.is_auto else torch.uint8 for x, y in zip(plan, dtypes, strict=True)]
        has_scales = not static and not all(side.is_auto for side in plan)
        layout = page_layout(heads, size, *dims, *codes, has_scales)
        parts = layout.split(tensors[f"layers.{i}.pages"])
        for side_index, side in enumerate(plan):
            x = (parts["v"].mT if side_index else parts["k"])[pages, :, at % size]
            if not side.is_auto:
                x, name = decode(x, FORMATS[side.format]), f"scales.{i}.{'kv'[side_index]}"
                if has_scales:
                    scale = parts["token_scales"][pages, :, at % size, side_index, None]
                elif name in tensors:
                    scale = tensors[name] * FORMATS[side.format].scale_from_e4m3
                else:
                    scale = torch.tensor(scales)
                x = x * scale.float()
                x = rotate(x) if side.rotated else x
            if not side_index and f"layers.{i}.k_center" in tensors:
                x = x + tensors[f"layers.{i}.k_center"][:, None]
            sides.append(x.transpose(1, 2).to(dtypes[side_index]))
        yield i, start, *sides


def check_values(cache: FP8PagedCache, meta: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Assert that a cache holds the values that are stored in a file."""
    for index, start, *expected in read_values(meta, tensors):
        layer = cache.layers[index]
        for handle, values in zip((layer.keys, layer.values), expected, strict=True):
            first = start - handle.start
            actual = densify(handle)[:, :, first : first + values.shape[2]]
            torch.testing.assert_close(actual, values, equal_nan=True)


class Allocations(TorchDispatchMode):
    """Counts the bytes of new tensors, and the peak of bytes that Python holds."""

    def __enter__(self) -> "Allocations":
        tracemalloc.reset_peak()
        self.bytes, self.before = 0, tracemalloc.get_traced_memory()[0]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.bytes += tracemalloc.get_traced_memory()[1] - self.before

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.device.type == "cpu":
            is_new = all(x.alias_info is None for x in function._schema.returns)
            self.bytes += result.nbytes * is_new
        return result


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


def leaves(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all metadata entries, including nested entries."""
    parts: Any = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        parts = enumerate(value)
    nested = [path for key, part in parts for path in leaves(part, (*place, key))]
    return [place, *nested] if place else nested


def mutate(rng: random.Random, meta: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Change the metadata or a tensor in place, at random."""
    name, kind = rng.choice([*tensors, "none"]), rng.randrange(8)
    if kind < 4 and name == "none":
        tensors[name] = torch.zeros(1)
    elif kind == 0:
        tensors.pop(name)
    elif kind == 1:
        tensors[rng.choice([*tensors, "layers.0.x", "layers.9.k"])] = tensors[name]
    elif kind < 4:
        tensors[name] = rng.choice(TENSOR_CHANGES)(tensors[name])
    else:
        place = rng.choice(leaves(meta))
        parent = meta
        for key in place[:-1]:
            parent = parent[key]
        if kind == 4:
            del parent[place[-1]]
        elif kind == 5 and isinstance(parent, list):
            parent.append(copy.deepcopy(parent[place[-1]]))
        else:
            parent[place[-1]] = rng.choice(VALUES)


@pytest.fixture(scope="module")
def good_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return files of all formats: golden files and new files."""
    folder = tmp_path_factory.mktemp("good")
    golden = sorted(FOLDER.glob("*.safetensors"))
    caches = {path.name: FP8PagedCache.load(path) for path in golden}
    caches["offloaded"] = FP8PagedCache(make_config("mistral"), page_size=8, offloading=True)
    for name, form in (("indexed", {}), ("indexed and preallocated", {"max_cache_len": 32})):
        config = DeepseekV32Config(num_hidden_layers=2)
        caches[name] = FP8PagedCache(config, page_size=8, **form)
    caches["large"] = FP8PagedCache(dtype="fp8_e4m3", page_size=8)
    caches["large"].update(*torch.ones(2, 1, 8, 1024, 128), 0)
    for name in ("offloaded", "indexed", "indexed and preallocated"):
        feed(caches[name], 21, 0)
        for layer in caches[name].layers if "indexed" in name else ():
            layer.update_indexer(torch.ones(2, 21, 4))
    return golden + [cache.save(folder / name) for name, cache in caches.items()]


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.full)])
def test_changed_files(count: int, good_files: list[Path], tmp_path: Path) -> None:
    """A file raises ConfigError, or the cache holds the values of the file.

    In every fourth file a byte is changed, or the end is missing. Other files have a valid digest.
    """
    tracemalloc.start()
    path, loaded = tmp_path / "x", 0
    for number in range(count):
        rng = random.Random(number)
        if number % 4:
            meta, tensors = read_file(rng.choice(good_files))
            for _ in range(rng.choice((1, 1, 2))):
                mutate(rng, meta, tensors)
            write(path, meta, tensors)
        else:
            source = rng.choice(good_files[len(good_files) // 2 :])
            meta, tensors = read_file(source)
            data = bytearray(source.read_bytes())
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data[: rng.choice((None, None, rng.randrange(len(data))))])
        try:
            with Allocations() as allocations:
                cache = FP8PagedCache.load(path)
            loaded += 1
            check_values(cache, meta, tensors)
        except ConfigError:
            pass
        except OutOfPagesError:
            assert meta["options"]["max_pages"], number
        except Exception as error:
            raise AssertionError(number) from error
        assert allocations.bytes < 4 * path.stat().st_size + (1 << 20), number
    tracemalloc.stop()
    assert count // 20 < loaded < count // 4, loaded


@pytest.mark.parametrize(
    ("source", "change", "room"),
    [
        ("sliding.continued", move_on((1 << 20) - 10), 0),
        ("preallocated", set_fact(1 << 15, "options", "max_cache_len"), 1 << 15),
    ],
)
def test_memory_of_a_loaded_cache(source: str, change: Change, room: int, tmp_path: Path) -> None:
    """A block table has at most 16 MiB, and pages have room for `max_cache_len` tokens."""
    meta, tensors = read_file(FOLDER / f"{source}.safetensors")
    change(meta, tensors)
    path = write(tmp_path / "x", meta, tensors)
    tracemalloc.start()
    with Allocations() as allocations:
        cache = FP8PagedCache.load(path)
    tracemalloc.stop()
    check_values(cache, meta, tensors)
    # Two layers of two sequences with 2 heads: K and V of 16 values, and two scales of 2 bytes.
    assert allocations.bytes < 4 * path.stat().st_size + (17 << 20) + 8 * room * (16 + 16 + 4)


# -- writing ---------------------------------------------------------------------------------------


def test_a_file_survives_a_power_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is synced before it is renamed, and the folder afterwards."""
    steps: list[tuple[str, int]] = []
    sync, replace = os.fsync, os.replace

    def record(call: str, inode: int) -> None:
        steps.append((call, inode))

    monkeypatch.setattr(os, "fsync", lambda fd: (record("sync", os.fstat(fd).st_ino), sync(fd)))
    monkeypatch.setattr(
        os, "replace", lambda a, b: (record("replace", os.stat(a).st_ino), replace(a, b))
    )
    for save in (make_cache("sliding").save, KVScales.uniform(2).save_pretrained):
        steps.clear()
        target = tmp_path / save.__name__
        save(target)
        files = [path.stat().st_ino for path in ([target], [*target.glob("*")])[target.is_dir()]]
        folder = target if target.is_dir() else tmp_path
        assert sorted(steps[: len(files)]) == [("sync", inode) for inode in sorted(files)]
        assert sorted(steps[len(files) : -1]) == [("replace", inode) for inode in sorted(files)]
        assert steps[-1] == ("sync", folder.stat().st_ino)


def test_a_symlink_at_the_temporary_name_is_not_followed(tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "shared"
    victim.write_text("precious")
    folder.mkdir()
    for name in ("kv_scales.safetensors", "cache"):
        (folder / f".{name}.{os.getpid()}.part").symlink_to(victim)
    KVScales.uniform(2).save_pretrained(folder)
    make_cache("empty").save(folder / "cache")
    assert victim.read_text() == "precious"
    assert not any((folder / name).is_symlink() for name in ("kv_scales.safetensors", "cache"))


def test_a_failed_sync_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_cache("empty").save(tmp_path / "cache")
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(os, "fsync", fail)
    for target in (path, tmp_path / "new"):
        with pytest.raises(OSError, match="no room"):
            make_cache("sliding").save(target)
    assert [*tmp_path.iterdir()] == [path]
    assert path.read_bytes() == before
