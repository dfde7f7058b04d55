"""Tests of `hf-fp8kv calibrate` with a fake calibration: options, output and errors."""

from pathlib import Path
from unittest import mock

import pytest
import torch

import hf_fp8kv.calibration
from hf_fp8kv.errors import ConfigError
from hf_fp8kv.scales import KVScales
from tests.scales.test_export import make_random_scales

from .conftest import Command


@pytest.fixture
def calibration(monkeypatch) -> mock.Mock:
    """Replace `calibrate` with a mock that returns scales."""
    calibrate = mock.create_autospec(hf_fp8kv.calibration.calibrate)
    calibrate.return_value = make_random_scales("head", num_layers=2)
    monkeypatch.setattr(hf_fp8kv.calibration, "calibrate", calibrate)
    return calibrate


@pytest.fixture
def text_file(tmp_path) -> Path:
    (path := tmp_path / "text.txt").write_text("the capital of London\n" * 50)
    return path


@pytest.fixture
def run_calibrate(run, model_folder, text_file, tmp_path) -> Command:
    """Return a command that runs `calibrate`, by default with a small model, text and folder."""

    def run_command(*arguments: str, **kwargs: str) -> tuple[int, str, str]:
        defaults = {
            "--model": model_folder, "--texts": str(text_file), "--out": str(tmp_path / "out"),
            "--device": "cpu",
        }  # fmt: skip
        added = [f"{name}={value}" for name, value in defaults.items() if name not in arguments]
        return run.run_command("calibrate", *added, *arguments, **kwargs)

    return Command(run_command)


def test_every_option_reaches_the_library(run_calibrate, calibration, tmp_path):
    options = {
        "granularity": "channel", "margin": 1.25, "max_tokens": 100, "plan": "int8 rotated",
        "max_length": 32, "batch_size": 3, "text_column": "body",
    }  # fmt: skip
    arguments = (f"--{name.replace('_', '-')}={value}" for name, value in options.items())
    run_calibrate(*arguments, "--no-center", "--chat-template", "--model-dtype", "float16")
    keywords = calibration.call_args.kwargs
    assert calibration.call_args.args[0].dtype == torch.float16
    assert {name: keywords[name] for name in options} == options
    assert (keywords["center"], keywords["chat_template"]) == (False, True)


@pytest.mark.parametrize(
    ("scale_format", "options", "expected"),
    [
        ("hf_fp8kv", [], {}),
        ("vllm-json", [], {"granularity": "tensor", "center": False}),
        ("compressed-tensors", [], {"granularity": "head", "center": False}),
        (
            "modelopt",
            ["--granularity", "head", "--center"],
            {"granularity": "head", "center": True},
        ),
    ],
)
def test_calibration_matches_the_format(
    run_calibrate, calibration, scale_format, options, expected
):
    run_calibrate("--format", scale_format, *options)
    assert calibration.call_args.kwargs == expected | {"tokenizer": mock.ANY}


def test_scales_are_saved_in_a_copy_of_the_checkpoint(
    run_calibrate, calibration, model_folder, tmp_path
):
    old_folder = tmp_path / "old"
    make_random_scales("tensor", num_layers=2).save_pretrained(
        old_folder, format="compressed-tensors", checkpoint=model_folder
    )
    options = ("--checkpoint", old_folder, "--format", "compressed-tensors")
    assert "--overwrite" in run_calibrate.fails(*options)
    assert not calibration.called
    printed, _ = run_calibrate(*options, "--overwrite")
    folder = tmp_path / "out"
    checkpoint = folder / "checkpoint"
    scales, copied_scales = (KVScales.from_pretrained(path) for path in (folder, checkpoint))
    assert (scales.format, copied_scales.format) == ("hf_fp8kv", "compressed-tensors")
    assert scales.digest == copied_scales.digest
    assert (checkpoint / "tokenizer.json").is_file()
    assert str(checkpoint / "model-kv-scales.safetensors") in printed.splitlines()


def test_scales_that_a_format_cannot_store_are_saved_as_hf_fp8kv(
    run_calibrate, calibration, tmp_path
):
    layers = make_random_scales("tensor").layers
    calibration.return_value = KVScales({0: layers[0], 2: layers[2]}, model_type="llama")
    assert f"The scales are in {tmp_path / 'out'}" in run_calibrate.fails("--format", "vllm-json")
    assert set(KVScales.from_pretrained(tmp_path / "out").layers) == {0, 2}


def test_existing_scales_are_refused_before_calibration(run_calibrate, calibration, tmp_path):
    existing_scales = make_random_scales("tensor")
    existing_scales.save_pretrained(tmp_path / "out")
    assert "--overwrite" in run_calibrate.fails()
    assert KVScales.from_pretrained(tmp_path / "out").layers[0].k == existing_scales.layers[0].k
    # kv_scales.safetensors is read first, so scales in a different format would be ignored.
    assert "read before all others" in run_calibrate.fails("--format", "vllm-json", "--overwrite")
    (tmp_path / "file").write_text("")
    assert "expected a folder" in run_calibrate.fails("--out", tmp_path / "file")
    assert not calibration.called
    run_calibrate("--overwrite")
    assert KVScales.from_pretrained(tmp_path / "out").layers[0].granularity == "head"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "hf-fp8kv: interrupted"),
        (ConfigError("texts: expected more texts, got 1."), 1, "error: texts: expected more"),
        (torch.OutOfMemoryError("tried to allocate 80 GiB"), 1, "--batch-size"),
    ],
)
def test_an_error_is_one_message_and_writes_no_files(
    run_calibrate, calibration, tmp_path, error, code, message
):
    calibration.side_effect = error
    assert message in run_calibrate.fails(code=code)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--granularity", "token"], "tensor, head, channel"),
        (["--plan", "int8", "--format", "tgi"], "requires --format hf_fp8kv"),
        (["--model-dtype", "int8"], "bfloat16"),
        (["--batch-size", "0"], "--batch-size"),
        (["--checkpoint", "/no/such/folder"], "does not exist"),
        (["--format", "trtllm"], "vllm-json, tgi"),
    ],
)
def test_usage_errors_exit_with_2(run_calibrate, calibration, tmp_path, arguments, message):
    assert message in run_calibrate.fails(*arguments, code=2)
    assert not calibration.called
    assert not (tmp_path / "out").exists()


def test_missing_texts_are_refused_before_calibration(run_calibrate, calibration):
    assert "pydoc" in run_calibrate.fails("--texts", "/no/such/file")
    assert not calibration.called
    run_calibrate("--texts", "pydoc")
    assert len(calibration.call_args.args[1]) > 50


def test_calibrated_scales_are_shown_by_inspect(run, run_calibrate, tmp_path):
    printed, _ = run_calibrate(
        "--max-length", "64", "--max-tokens", "160", "--granularity", "tensor"
    )
    assert printed.splitlines() == [str(tmp_path / "out" / "kv_scales.safetensors")]
    layers = KVScales.from_pretrained(tmp_path / "out").layers
    output = run.json("inspect", tmp_path / "out")
    assert output["layers"]["1"]["v"]["values"] == [layers[1].v.item()]
