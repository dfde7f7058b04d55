"""Tests of `hf-fp8kv convert`: written files, output and errors."""

from pathlib import Path

from hf_fp8kv.scales import KVScales
from tests.scales.test_export import assert_holds, make_random_scales, reduce_scales


def test_scales_are_converted_to_a_format_and_back(run, tmp_path):
    source, converted, final = (tmp_path / name for name in ("source", "converted", "final"))
    scales = make_random_scales("centered-head")
    scales.save_pretrained(source)
    printed, stderr = run("convert", source, converted, "--to", "compressed-tensors")
    assert sorted(map(Path, printed.splitlines())) == sorted(converted.iterdir())
    assert_holds(converted, scales, "compressed-tensors")
    assert "hf_fp8kv -> compressed-tensors: 3 layers, per head" in stderr
    assert stderr.count("warning: ") == 1
    output = run.json("convert", converted, final, "--to", "hf_fp8kv")
    assert output["from"]["format"] == "compressed-tensors"
    assert output["to"] == {"format": "hf_fp8kv", "folder": str(final)}
    assert sorted(map(Path, output["files"])) == sorted(final.iterdir())
    assert output["warnings"] == []
    assert_holds(final, reduce_scales(scales, "compressed-tensors"), "hf_fp8kv")


def test_scales_are_converted_into_a_checkpoint(run, tmp_path, model_folder):
    source, target = (tmp_path / name for name in ("source", "target"))
    scales = make_random_scales("tensor", num_layers=2)
    scales.save_pretrained(source)
    out, _ = run(
        "convert", source, target, "--to", "compressed-tensors", "--checkpoint", model_folder,
        "--weights", "link",
    )  # fmt: skip
    assert str(target / "model-kv-scales.safetensors") in out.splitlines()
    assert any(
        path.samefile(Path(model_folder) / "model.safetensors")
        for path in target.glob("*.safetensors")
    )
    assert_holds(target, scales, "compressed-tensors")


def test_model_type_and_tp_size_and_overwrite_reach_the_library(run, tmp_path):
    source, target = (tmp_path / name for name in ("source", "target"))
    KVScales(make_random_scales("tensor").layers).save_pretrained(source)
    arguments = ("convert", source, target, "--to", "vllm-json", "--tp-size", 2)
    assert "model_type is unknown" in run(*arguments)[1]
    assert "--overwrite" in run.fails(*arguments)
    run(*arguments, "--overwrite", "--model-type", "qwen2")
    assert (
        KVScales.from_file(target / "kv_cache_scales.json", tp_rank=1, tp_size=2).model_type
        == "qwen2"
    )


def test_scales_of_another_model_require_lenient(run, tmp_path):
    source, target = (tmp_path / name for name in ("source", "target"))
    make_random_scales("tensor").save_pretrained(source)
    arguments = ["convert", source, target, "--to", "tgi", "--model-type", "qwen2"]
    assert "--lenient" in run.fails(*arguments)
    assert any("'llama'" in message for message in run.json(*arguments, "--lenient")["warnings"])
    assert KVScales.from_pretrained(target).model_type == "qwen2"
