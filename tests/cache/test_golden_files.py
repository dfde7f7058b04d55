"""Files that were saved before: they load, and decoding continues with the same values."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hf_fp8kv import ConfigError, FP8PagedCache
from hf_fp8kv.cache.paged_tensor import densify
from tests.data.caches.make import CASES, continue_cache, make_cache

FOLDER = Path(__file__).parents[1] / "data" / "caches"


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as file:
        meta = json.loads(file.metadata()["meta"])
        return meta, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict


def assert_same_file(found: Path, expected: Path) -> None:
    """Assert the same facts, and the same bytes of every tensor."""
    (meta, tensors), (other_meta, others) = read_file(found), read_file(expected)
    assert meta == other_meta
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == others[name].dtype, name
        assert torch.equal(tensor, others[name]), name


def assert_same_content(found: FP8PagedCache, expected: FP8PagedCache) -> None:
    """Assert the same values at the same positions."""
    assert found.get_seq_length() == expected.get_seq_length()
    for layer, other in zip(found.layers, expected.layers, strict=True):
        for tensor, wanted in ((layer.keys, other.keys), (layer.values, other.values)):
            if wanted is None:
                assert tensor is None
            else:
                assert torch.equal(densify(tensor), densify(wanted))


@pytest.mark.parametrize("name", CASES)
def test_a_golden_file_loads_and_continues(name: str, tmp_path: Path) -> None:
    golden = FOLDER / f"{name}.safetensors"
    made, cache = make_cache(name), FP8PagedCache.load(golden)
    assert_same_file(made.save(tmp_path / "made.safetensors"), golden)
    assert_same_content(cache, made)
    assert cache.plan == made.plan
    continue_cache(cache)
    expected = FP8PagedCache.load(FOLDER / f"{name}.continued.safetensors")
    assert_same_content(cache, expected)
    assert_same_content(
        FP8PagedCache.load(cache.save(tmp_path / "continued.safetensors")), expected
    )


def test_every_golden_file_is_tested() -> None:
    names = {path.name for path in FOLDER.glob("*.safetensors")}
    assert names == {f"{name}{part}.safetensors" for name in CASES for part in ("", ".continued")}


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    golden, later = FOLDER / f"{next(iter(CASES))}.safetensors", tmp_path / "later.safetensors"
    with safe_open(golden, framework="pt") as file:
        header = {**file.metadata(), "version": "3"}
    save_file(read_file(golden)[1], later, metadata=header)
    with pytest.raises(ConfigError, match="version '3'"):
        FP8PagedCache.load(later)
