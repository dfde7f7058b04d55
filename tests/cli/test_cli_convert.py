"""Tests of `hf-fp8kv convert`: written files, output and errors."""

import functools
from pathlib import Path

import pytest
import torch

from hf_fp8kv.scales import KVScales, LayerScales, kv_scales
from tests.cli.conftest import Command
from tests.scales.test_export import FakeApi, assert_holds, random_scales, reduce_scales


@pytest.fixture
def convert(run, saved_scales, tmp_path):
    """Return a command whose first arguments are `convert`, the saved scales and `out`."""
    first_arguments = ["convert", str(saved_scales), str(tmp_path / "out")]
    return Command(functools.partial(run.run_command, *first_arguments))


@pytest.mark.parametrize(
    ("kind", "scale_format"), [("tensor", "autofp8"), ("centered-head", "compressed-tensors")]
)
def test_scales_are_converted_to_a_format_and_back(run, tmp_path, scale_format, kind):
    source, converted, final = (tmp_path / name for name in ("source", "converted", "final"))
    scales = random_scales(kind)
    scales.save_pretrained(source)
    out, err = run("convert", source, converted, "--to", scale_format)
    assert sorted(map(Path, out.splitlines())) == sorted(converted.iterdir())
    assert_holds(converted, scales, scale_format)
    assert f"hf_fp8kv -> {scale_format}: 3 layers, per {kind.removeprefix('centered-')}" in err
    assert err.count("warning: ") == (kind == "centered-head")
    output = run.json("convert", converted, final, "--to", "hf_fp8kv")
    assert (output["from"]["format"], output["from"]["model_type"]) == (scale_format, "llama")
    assert output["to"] == {"format": "hf_fp8kv", "folder": str(final)}
    assert sorted(map(Path, output["files"])) == sorted(final.iterdir())
    assert output["warnings"] == []
    assert_holds(final, reduce_scales(scales, scale_format), "hf_fp8kv")


def test_scales_are_converted_into_a_checkpoint(convert, saved_scales, tmp_path, model_folder):
    layer = LayerScales(torch.tensor(0.5), torch.tensor(0.25))
    KVScales({0: layer, 1: layer}, model_type="llama").save_pretrained(saved_scales, overwrite=True)
    options = ("--checkpoint", model_folder, "--weights", "link")
    out, _ = convert("--to", "compressed-tensors", *options)
    files = (tmp_path / "out").glob("*.safetensors")
    assert any(path.samefile(Path(model_folder) / "model.safetensors") for path in files)
    assert str(tmp_path / "out" / "model-kv-scales.safetensors") in out.splitlines()
    assert KVScales.from_pretrained(tmp_path / "out").layers[1].k == 0.5


def test_model_type_and_tp_size_and_overwrite_reach_the_library(run, tmp_path):
    source, target = (tmp_path / name for name in ("source", "target"))
    KVScales(random_scales("tensor").layers).save_pretrained(source)
    arguments = ("convert", source, target, "--to", "vllm-json", "--tp-size", 2)
    _, err = run(*arguments)
    assert "model_type is unknown" in err
    assert "--overwrite" in run.fails(*arguments)
    run(*arguments, "--overwrite", "--model-type", "qwen2")
    path = target / "kv_cache_scales.json"
    assert KVScales.from_file(path, tp_rank=1, tp_size=2).model_type == "qwen2"


def test_scales_of_another_model_require_lenient(run, tmp_path):
    source, target = (tmp_path / name for name in ("source", "target"))
    random_scales("tensor").save_pretrained(source)
    arguments = ["convert", source, target, "--to", "tgi", "--model-type", "qwen2"]
    assert "--lenient" in run.fails(*arguments)
    warnings = run.json(*arguments, "--lenient")["warnings"]
    assert any("'llama'" in message for message in warnings)
    assert KVScales.from_pretrained(target).model_type == "qwen2"


def test_converted_scales_are_uploaded(run, saved_scales, monkeypatch):
    monkeypatch.setattr(kv_scales, "HfApi", fake_api := FakeApi("kv_cache_scales.json"))
    arguments = ["convert", saved_scales, "--push-to-hub", "org/name", "--to", "vllm-json"]
    assert "--overwrite" in run.fails(*arguments)
    assert not fake_api.uploaded
    commit_url = "https://hf.co/org/name/Add scales of the KV cache"
    assert run(*arguments, "--overwrite")[0] == f"{commit_url}\n"
    assert sorted(fake_api.uploaded) == ["README.md", "kv_cache_scales.json"]
    assert run.json(*arguments, "--overwrite")["to"]["commit"] == commit_url
