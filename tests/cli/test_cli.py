"""Tests of `generate`, `check`, `--help` and `--version`, and of the exit codes of all commands."""

import json
import re
from pathlib import Path

import pytest
import torch

from hf_fp8kv.utils.environment import find_version
from hf_fp8kv_cli.arguments import parse_size
from tests.helpers import command_line
from tests.scales.test_export import make_random_scales

pytestmark = pytest.mark.text

PROMPT = "London is the capital of"
TEMPLATE = "{% for m in messages %}the {{ m['content'] }} of{% endfor %}"


@pytest.fixture
def generate(run, model_folder):
    def run_generate(
        *arguments: str, prompt: str = PROMPT, stdin: str = "", model_folder: str = model_folder
    ) -> dict:
        fixed_arguments = ("--model", model_folder, "--max-new-tokens", "12", "--backend", "torch")
        return run.json("generate", prompt, *arguments, *fixed_arguments, stdin=stdin)

    return run_generate


def test_auto_gives_the_tokens_and_bytes_of_the_default_cache(generate, tmp_path):
    # In a 16-bit dtype, two attention implementations may choose different tokens.
    output = generate(
        "--kv-cache-dtype", "auto",
        model_folder=command_line.save_tiny_model(tmp_path, torch.float32),
    )  # fmt: skip
    stock_run, paged_run = output["runs"]
    assert paged_run["token_ids"] == stock_run["token_ids"]
    assert abs(output["agreement"].pop("kl")) < 1e-6
    assert output["agreement"] == {"equal": 12, "positions": 12, "first_difference": None}
    assert paged_run["bytes_per_token"] == stock_run["bytes_per_token"]
    assert stock_run["cached_tokens"] == paged_run["cached_tokens"] == 5 + 12 - 1
    # 2 layers, K and V, 2 heads of 16 values, 4 bytes per value.
    assert stock_run["cache_bytes"] == stock_run["cached_tokens"] * 2 * 2 * 2 * 16 * 4
    assert (stock_run["attention"], paged_run["attention"]) == ("sdpa", "fp8_paged")


@pytest.mark.parametrize(
    ("options", "ratio"),
    [
        (["--scales", "1.0"], 1 / 2),
        ([], 1 / 2 + 1 / 16),  # a bf16 scale for the 16 values of each head
        (["--kv-cache-dtype", "fp8_e4m3fn", "--page-size", "16"], 1 / 2 + 1 / 16),
        (["--key-dtype", "auto", "--scales", "1.0"], 3 / 4),
        (["--plan", "fp8_e3m4", "--scales", "1.0"], 1 / 2),
        (["--bits", "6"], 3 / 8 + 1 / 16),
    ],
)
def test_bytes_per_token_match_the_formats(generate, options, ratio):
    stock_run, paged_run = generate(*options)["runs"]
    assert paged_run["bytes_per_token"] / stock_run["bytes_per_token"] == pytest.approx(ratio)
    assert paged_run["scales_title"] == ("1.0" if "--scales" in options else "dynamic")
    for run in (stock_run, paged_run):
        assert run["tokens_that_fit"] == 8 * 2**30 // run["bytes_per_token"]


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_bits_choose_the_formats(run, command):
    assert (
        "--value-dtype: expected no value with --bits 6, which chooses a plan, got 'int8'"
        in run.fails(command, "--bits", "6", "--value-dtype", "int8")
    )


def test_sampling_is_reproducible_with_a_seed(generate):
    first_tokens, repeated_tokens, tokens_of_other_seed = (
        generate("--temperature", "5", "--seed", seed)["runs"][0]["token_ids"] for seed in "112"
    )
    assert first_tokens == repeated_tokens != tokens_of_other_seed


def test_chat_uses_the_template(generate, run, model_folder, tmp_path):
    assert "expected a chat template" in run.fails("generate", "--model", model_folder, "--chat")
    (path := Path(model_folder) / "chat_template.jinja").write_text(TEMPLATE)
    try:
        assert generate("--chat", prompt="capital")["runs"][0]["cached_tokens"] == 3 + 12 - 1
    finally:
        path.unlink()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * 2**30), ("16 GB", 16 * 10**9), ("512m", 512 * 10**6), ("1.5KiB", 1536),
    ],
)  # fmt: skip
def test_sizes_with_units_are_parsed_as_bytes(text, size):
    assert parse_size(text) == size


# SCALES is a folder with scales, MODEL a folder with a model, and OUT a folder that does not exist.
GENERATE = "generate --model MODEL "
CONVERT = "convert SCALES "


@pytest.mark.parametrize(
    ("code", "command", "message"),
    [
        (2, "generate --kv-cache-dtype int3", "--kv-cache-dtype"),
        (2, "generate --temperature -1", "--temperature"),
        (2, CONVERT + "OUT", "--to"),
        (2, CONVERT + "OUT/kv_cache_scales.json --to vllm-json", "expected a folder"),
        (2, CONVERT + "OUT --to tgi --weights link", "--checkpoint"),
        (1, "inspect /no/such/file.json", "/no/such/file.json"),
        (1, GENERATE + "--scales 0", "scale"),
        (1, "generate --model /no/such/folder --plan no_such_plan", "path of a saved plan"),
        (1, "generate --model /no/such/folder --plan int8 --key-dtype fp8", "key_dtype: expected"),
        (2, GENERATE + "--backend abacus", "auto, torch, cpu, triton, got 'abacus'"),
        (1, "check --device cuda:99", "'cuda:99', which is not available"),
        (1, "generate --model MODEL -", "prompt: expected text in UTF-8"),
        (1, "generate --model MODEL once\udce9", "prompt: expected text in UTF-8"),
        (2, "capacity MODEL --memory 1025TiB", "expected at most 1 PiB, got '1025TiB'"),
        (1, "serve MODEL --chat-template LATIN1", "expected a template in UTF-8"),
        (1, "check --model EMPTY_FOLDER", "no config.json in it"),
        (1, GENERATE + "--attn fp8paged", "fp8_paged, got 'fp8paged'. Did you mean 'fp8_paged'?"),
        (1, GENERATE + "EMPTY", "at least one token"),
        (1, "generate --model /no/such/folder", "/no/such/folder"),
    ],
)
def test_usage_errors_exit_with_2_and_other_errors_with_1(
    run, model_folder, tmp_path, code, command, message
):
    output_folder = tmp_path / "out"
    make_random_scales("tensor").save_pretrained(tmp_path / "scales")
    words = {"SCALES": str(tmp_path / "scales"), "OUT": str(output_folder), "MODEL": model_folder}
    words |= {"EMPTY_FOLDER": str(tmp_path / "empty"), "EMPTY": "", "LATIN1": str(tmp_path / "a")}
    (tmp_path / "empty").mkdir()
    (tmp_path / "a").write_bytes(b"\xe9")
    arguments = [
        re.sub("|".join(words), lambda match: words[match[0]], argument)
        for argument in command.split()
    ]
    stderr = run.fails(*arguments, code=code, stdin="\udce9")  # not UTF-8
    if code == 1:
        output, error, stderr = stderr.partition("hf-fp8kv: error: ")
        assert error
        assert command.startswith("generate") or not output
    assert message in stderr
    assert not output_folder.exists()


def test_help_names_the_commands_and_version_prints_the_version(run):
    help_text, _ = run("--help")
    for name in ("generate", "calibrate", "inspect", "convert", "check", "capacity"):
        assert name in help_text
    assert run("--version")[0].strip() == find_version("hf-fp8kv")


def test_the_default_prompt_fills_pages_and_a_short_answer_has_no_speed(run, model_folder):
    command = ("generate", "--model", model_folder, "--backend", "torch", "--max-new-tokens", "9")
    printed, _ = run(*command)
    assert "247 tokens of Python's documentation" in printed  # as far as 256 positions allow
    assert "256 tokens" in printed  # four full pages
    dense_size, paged_size = re.search(r"256 tokens +│ (\S+) KiB +│ (\S+) KiB", printed).groups()
    # K and V of 2 layers, 2 heads, 16 values: 2 bytes, or 1 byte and a bf16 scale per head.
    assert (float(dense_size), float(paged_size)) == (64.0, 36.0)
    assert "tokens/s" not in printed
    assert float(re.search(r"KL of predictions[ │]+(\S+)", printed)[1]) > 0


def test_demo_shows_memory_and_predictions_of_the_demo_model(run, model_folder, monkeypatch):
    monkeypatch.setattr("hf_fp8kv.demo_model_path", lambda: model_folder)
    output = run.json("demo")
    assert output["runs"][0]["cached_tokens"] == 256 - 24 + 24 - 1
    assert output["runs"][1]["bytes_per_token"] / output["runs"][0]["bytes_per_token"] < 0.8


@pytest.mark.parametrize("command", ["check", "generate"])
def test_only_generate_needs_a_tokenizer(run, model_folder, tmp_path, command):
    for path in Path(model_folder).glob("[!t]*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    if command == "check":
        assert "fused" in run(command, "--model", tmp_path)[0]
    else:
        assert f"expected a tokenizer in {tmp_path}, got none" in run.fails(
            command, "--model", tmp_path
        )


def test_check_shows_versions_backends_and_the_bytes_of_a_token(run, model_folder):
    output = run.json("check")
    assert torch.__version__.startswith(output["versions"]["torch"])
    assert output["backends"]["torch"] == "available"
    assert output["token_bytes"] == {"bf16": 131072, "8-bit pages": 66560}
    printed, _ = run("check")
    assert output["versions"]["torch"] in printed
    assert "65.00 KiB per token, 16,132 tokens per GiB" in printed
    # K and V of 2 layers with 2 heads of 16 values, and a scale of 2 bytes per head.
    output = run.json("check", "--model", model_folder)
    assert output["token_bytes"] == {"bf16": 256, "8-bit pages": 144}
    assert "fused" in json.dumps(output["model"])
