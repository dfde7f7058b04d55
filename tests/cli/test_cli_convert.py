"""Tests of `hf-fp8kv convert`: written files, output and errors."""

import functools
import json
from pathlib import Path

import pytest
import torch

from hf_fp8kv.scales import SCALE_FORMATS, KVScales, LayerScales, kv_scales
from tests.cli.conftest import Command
from tests.scales.test_export import FakeApi, assert_holds, random_scales, reduce_scales
from tests.scales.test_sources import DATA, edit_json


@pytest.fixture
def convert(run, saved_scales, tmp_path):
    """Return a command whose first arguments are `convert`, the saved scales and `out`."""
    first_arguments = ["convert", str(saved_scales), str(tmp_path / "out")]
    return Command(functools.partial(run.run_command, *first_arguments))


@pytest.mark.parametrize("kind", ["tensor", "centered-head"])
@pytest.mark.parametrize("scale_format", [name for name in SCALE_FORMATS if name != "hf_fp8kv"])
def test_scales_are_converted_to_every_format_and_back(run, tmp_path, scale_format, kind):
    source, converted, final = (tmp_path / name for name in ("source", "converted", "final"))
    scales = random_scales(kind)
    scales.save_pretrained(source)
    out, err = run("convert", source, converted, "--to", scale_format)
    assert sorted(map(Path, out.splitlines())) == sorted(converted.iterdir())
    assert_holds(converted, scales, scale_format)
    assert f"hf_fp8kv -> {scale_format}: 3 layers, per {kind.removeprefix('centered-')}" in err
    if kind == "centered-head":
        assert err.count("warning: ") == 1
        assert "enlarged by the centers" in err
    elif scale_format != "vllm-json":
        assert "warning" not in err
    output = run.json("convert", converted, final, "--to", "hf_fp8kv")
    assert (output["from"]["format"], output["from"]["model_type"]) == (scale_format, "llama")
    assert output["to"] == {"format": "hf_fp8kv", "folder": str(final)}
    assert sorted(map(Path, output["files"])) == sorted(final.iterdir())
    assert output["warnings"] == []
    assert_holds(final, reduce_scales(scales, scale_format), "hf_fp8kv")


def test_a_file_is_converted_and_its_warnings_are_printed_once(run, tmp_path):
    path = next((DATA / "vllm-two-ranks").glob("*.json"))
    out, err = run("convert", path, tmp_path / "out", "--to", "autofp8", "--json")
    warnings = json.loads(out)["warnings"]
    assert err.splitlines() == [f"warning: {message}" for message in warnings]
    assert any("ranks differ" in message for message in warnings)


def test_scales_are_converted_into_a_copy_of_a_checkpoint(convert, saved_scales, tmp_path, model):
    layer = LayerScales(torch.tensor(0.5), torch.tensor(0.25))
    KVScales({0: layer, 1: layer}, model_type="llama").save_pretrained(saved_scales, overwrite=True)
    out, _ = convert("--to", "compressed-tensors", "--checkpoint", model, "--weights", "link")
    files = (tmp_path / "out").glob("*.safetensors")
    assert any(path.samefile(Path(model) / "model.safetensors") for path in files)
    assert str(tmp_path / "out" / "model-kv-scales.safetensors") in out.splitlines()
    assert KVScales.from_pretrained(tmp_path / "out").layers[1].k == 0.5


def test_existing_files_are_replaced_only_with_overwrite(convert, tmp_path):
    existing_scales = random_scales("tensor", seed=1)
    existing_scales.save_pretrained(tmp_path / "out", format="vllm-json")
    err = convert.fails("--to", "vllm-json")
    assert err.startswith("hf-fp8kv: error: ")
    assert err.count("\n") == 1
    assert "--overwrite" in err
    assert_holds(tmp_path / "out", existing_scales, "vllm-json")
    convert("--to", "vllm-json", "--overwrite")
    assert_holds(tmp_path / "out", random_scales("tensor"), "vllm-json")


def test_tp_size_writes_the_scales_of_each_rank(convert, tmp_path):
    convert("--tp-size", 4, "--to", "vllm-json")
    json_scales = json.loads((tmp_path / "out" / "kv_cache_scales.json").read_text())
    assert set(json_scales["kv_cache"]["scaling_factor"]) == {"0", "1", "2", "3"}
    assert "tp_size" in convert.fails("--tp-size", 4, "--to", "autofp8")


def test_the_model_type_can_be_set(run, tmp_path):
    untyped_scales = KVScales(random_scales("tensor").layers)
    source, vllm, tgi = (tmp_path / name for name in ("source", "vllm", "tgi"))
    untyped_scales.save_pretrained(source)
    arguments = ["convert", source, vllm, "--to", "vllm-json"]
    _, err = run(*arguments)
    assert "warning: " in err
    assert "model_type is unknown" in err
    assert "is unknown" not in run(*arguments, "--overwrite", "--model-type", "qwen2")[1]
    assert KVScales.from_pretrained(vllm).model_type == "qwen2"
    tgi_arguments = ["convert", vllm, tgi, "--to", "tgi", "--model-type", "llama"]
    err = run.fails(*tgi_arguments)
    assert "'llama'" in err
    assert "--lenient" in err
    assert "warning: " in run(*tgi_arguments, "--lenient")[1]
    assert KVScales.from_pretrained(tgi).model_type == "llama"


def test_missing_layers_require_lenient(run, tmp_path):
    layers = random_scales("tensor").layers
    KVScales({0: layers[0], 2: layers[2]}, model_type="llama").save_pretrained(
        tmp_path / "autofp8", format="autofp8"
    )
    edit_json(tmp_path / "autofp8" / "config.json", num_hidden_layers=3)
    arguments = ["convert", tmp_path / "autofp8", tmp_path / "out", "--to", "tgi"]
    assert "--lenient" in run.fails(*arguments)
    warnings = run.json(*arguments, "--lenient")["warnings"]
    assert any("layers without scales" in message for message in warnings)


def test_converted_scales_are_uploaded(run, saved_scales, monkeypatch):
    monkeypatch.setattr(kv_scales, "HfApi", fake_api := FakeApi("kv_cache_scales.json"))
    arguments = ["convert", saved_scales, "--push-to-hub", "org/name", "--to", "vllm-json"]
    assert "--overwrite" in run.fails(*arguments)
    assert not fake_api.uploaded
    commit_url = "https://hf.co/org/name/Add scales of the KV cache"
    assert run(*arguments, "--overwrite")[0] == f"{commit_url}\n"
    assert sorted(fake_api.uploaded) == ["README.md", "kv_cache_scales.json"]
    assert run.json(*arguments, "--overwrite")["to"]["commit"] == commit_url
