"""Tests that run the examples as a user does, and check the numbers that they print.

The fast tier uses the first layers of the demo model, and `make test-all` the whole model.
"""

import ast
import json
import pydoc_data.topics
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_fp8kv import demo_model_path
from tests.helpers.serve_process import save_chat_model
from tests.helpers.shallow import layers, save_first_layers, shallow_model_path  # noqa: F401

pytestmark = pytest.mark.text

FOLDER = Path(__file__).parent.parent / "examples"
# Small values that run the same code.
ARGUMENTS = {
    "calibrate_and_export.py": ["--max-tokens", "512", "--held-out", "256"],
    "chat.py": ["--new-tokens", "6", "--questions", "Name a fruit.", "Another?"],
    "encoder_decoder.py": [],
    "fork_chat.py": ["--characters", "1500"],
    "long_context.py": ["--max-pages", "8", "--chunk", "128"],
    "pipeline.py": ["--new-tokens", "4"],
    "serve_client.py": ["--new-tokens", "8"],
    "quickstart.py": ["--prompt-tokens", "400", "--new-tokens", "8"],
}
# Examples that need other packages, and the commands that run them.
ELSEWHERE = {
    "rl.py": "make rl",
    "ray_serve.py": "docs/serving.md: tried manually, since tests do not install Ray",
    "vllm_serve.py": "tests/vllm/test_processes.py",
}
# KV heads and head size of SmolLM2-135M. Bytes of K and V per token and layer, in bf16 and pages.
HEADS, DIM, PAGE = 3, 64, 64
BF16 = HEADS * 2 * DIM * 2
STORED = HEADS * 2 * (DIM + 2)

Run = Callable[..., str]


@pytest.fixture
def run(layers: int, monkeypatch, capsys) -> Run:  # noqa: F811
    """Return a function that runs an example with arguments, and returns its output."""

    def run_one(name: str, *arguments: str) -> str:
        argv = [str(FOLDER / name), *(arguments or ARGUMENTS[name])]
        monkeypatch.setattr(sys, "argv", argv)
        runpy.run_path(argv[0], run_name="__main__")
        return capsys.readouterr().out

    return run_one


def _numbers(pattern: str, text: str) -> tuple[float, ...]:
    match = re.search(pattern, text)
    assert match, f"{pattern!r} is not in:\n{text}"
    return tuple(float(group.replace(",", "")) for group in match.groups())


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE)


def test_examples_are_short_documented_and_tested():
    scripts = {path.name: path.read_text() for path in FOLDER.glob("*.py")}
    assert sorted(scripts) == sorted({*ARGUMENTS, *ELSEWHERE})
    for name, text in scripts.items():
        assert len(text.splitlines()) <= (80 if name in ELSEWHERE else 60), name
        docstring = ast.get_docstring(ast.parse(text))
        assert docstring, name
        assert f"\n    python examples/{name}\n" in docstring, f"{name} does not show how to run it"
        assert re.search(r'if __name__ == "__main__":\n    main\(\)\n\Z', text), name


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_help_lists_the_options(monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_path(str(FOLDER / name), run_name="__main__")
    assert not exit_info.value.code
    printed = capsys.readouterr().out
    assert "--model" in printed
    assert "None" not in printed


def test_quickstart_counts_both_caches(run, layers):  # noqa: F811
    printed = run("quickstart.py")
    tokens, dense, used, share, kl = _numbers(
        r"tokens held: (\d+)\nin 16 bits: ([\d,]+) bytes\n"
        r"8-bit pages: ([\d,]+) bytes, ([\d.]+) of it\nmean KL .*: (.+)\n",
        printed,
    )
    assert tokens == 400 + 8  # the last new token is never stored
    assert dense == tokens * layers * BF16
    assert used == _pages(int(tokens)) * PAGE * layers * STORED
    assert share == pytest.approx(used / dense, abs=5e-4)
    assert 0 < kl < 0.1
    answers = r"^(?:DynamicCache|FP8PagedCache), [\d.]+ tokens per second: '.+'$"
    assert len(re.findall(answers, printed, re.MULTILINE)) == 2


def test_forks_share_pages_and_give_the_answers_of_separate_caches(run, layers):  # noqa: F811
    printed = run("fork_chat.py")
    assert "the same answers without forks: True" in printed
    answers = re.findall(r"^What is a \w+\? '(.+)'$", printed, re.MULTILINE)
    # The first layers alone hardly depend on the question.
    assert len(answers) == 2
    assert layers < 30 or len(set(answers)) == 2
    shared, pages = _numbers(r"shared: (\d+) tokens in (\d+) pages", printed)
    forked, separate = _numbers(r"pages with forks: (\d+); apart: (\d+)", printed)
    assert shared > 256
    assert pages == _pages(int(shared))
    # Each fork has a separate last page, and at most one more for its question and answer.
    assert pages + 2 <= forked <= pages + 4
    assert separate >= 2 * pages
    assert _numbers(r"seconds with forks: ([\d.]+); apart: ([\d.]+)", printed)
    printed = run("fork_chat.py", "--characters", "300", "--questions", "Who?")
    assert "the same answers without forks: True" in printed


def test_a_chat_computes_only_new_tokens(run):
    turns = re.findall(r"\((\d+) tokens, (\d+) of them reused\)", run("chat.py"))
    (first, zero), (second, reused), (third, again) = [tuple(map(int, turn)) for turn in turns]
    assert zero == 0
    # The cache does not hold the last of the answer's six tokens.
    assert first < reused <= first + 5 < second
    assert (third, again) == (second, second - 1)


def test_an_exhausted_budget_shortens_the_text(run, layers, monkeypatch):  # noqa: F811
    printed = run("long_context.py")
    assert "out of pages: a chunk needs 2, 0 are left" in printed
    read, whole = _numbers(r"read (\d+) of (\d+) tokens", printed)
    assert 8 * PAGE - 40 < read < 8 * PAGE - 24 < whole
    pages, total, share, dense = _numbers(
        r"(\d+) pages: ([\d,]+) bytes, ([\d.]+) of ([\d,]+) unquantized", printed
    )
    assert pages == 8
    assert dense == (8 * PAGE - 1) * layers * BF16
    assert share == pytest.approx(total / dense, abs=5e-4)
    assert 0.515 < share < 0.52
    assert re.search(r"answer: '.+'", printed)
    # A text within the budget is read completely.
    short = pydoc_data.topics.topics["string-methods"][:1000]
    monkeypatch.setitem(pydoc_data.topics.topics, "string-methods", short)
    printed = run("long_context.py")
    assert "out of pages" not in printed
    read, whole = _numbers(r"read (\d+) of (\d+) tokens", printed)
    assert read == whole


def test_an_encoder_decoder_gives_the_same_tokens_in_half_the_bytes(run):
    printed = run("encoder_decoder.py")
    assert "the same tokens with dtype='model': True" in printed
    tokens, different = _numbers(r"(\d+) tokens, (\d+) different ones", printed)
    assert tokens == 251
    assert different > 3
    for part, length in (("self", 250), ("cross", 500)):
        dense, used, share = _numbers(
            rf"{part}_attention_cache: ([\d,]+) bytes in bfloat16, ([\d,]+) in FP8 \(([\d.]+)",
            printed,
        )
        assert dense == 2 * 4 * length * 2 * 64 * 2
        assert used == 2 * 4 * _pages(length) * PAGE * 2 * (64 + 2)
        assert share == pytest.approx(used / dense, abs=5e-4)


def test_a_pipeline_is_enabled_and_disabled(run):
    first, *answers, last = run("pipeline.py").splitlines()
    assert first == "after enable: FP8PagedCache under fp8_paged"
    assert last == "after disable: DynamicCache under sdpa"
    assert len(answers) == 3
    prompts = "London is the capital of", "Water boils at", "The three primary colours are red, "
    for answer, prompt in zip(answers, prompts, strict=True):
        assert answer[2:].strip("'\"").startswith(prompt)
        assert len(answer) > len(prompt) + 6


def test_calibrated_scales_are_saved_and_loaded(run, layers, tmp_path):  # noqa: F811
    # Float32, because most CPUs are six times slower with products of bfloat16.
    model = save_first_layers(demo_model_path(), tmp_path / "model", layers, dtype="float32")
    arguments = [*ARGUMENTS["calibrate_and_export.py"], "--model", str(model)]
    out = tmp_path / "scales"
    printed = run("calibrate_and_export.py", *arguments, "--out", str(out))
    assert re.search(
        rf"^KVScales\({layers} layers, per tensor, .*from \d+ tokens in \d+ s$", printed, re.M
    )
    kl = dict(
        re.findall(r"^(\w.+): KL ([\d.e+-]+), same top-1 [\d.]+%, over \d+ tokens$", printed, re.M)
    )
    assert {"static fp8_e4m3", "dynamic fp8_e4m3", "scale 1.0 fp8_e4m3"} <= kl.keys()
    assert 0 < float(kl["static fp8_e4m3"]) < 0.1
    shared = _numbers(r"json: vllm-json, layer 0: K ([\d.]+), V ([\d.]+)", printed)
    k, v = _numbers(r"copy: compressed-tensors, layer 0: K ([\d.]+), V ([\d.]+)", printed)
    assert shared == (max(k, v), max(k, v))
    assert k != v
    assert "London is the capital of" in printed.splitlines()[-1]
    weights = [path.stat().st_size for path in (out / "copy").glob("*.safetensors")]
    # The complete checkpoint with the scales: two bytes per parameter of embeddings and layers.
    assert sum(weights) > 2 * (28_311_552 + layers * 3_540_096)


def test_the_notebook_measures_each_cache(layers, capsys):  # noqa: F811
    cells = json.loads((FOLDER / "measure_your_model.ipynb").read_text())["cells"]
    first, *remaining = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    exec(first, names)
    assert names.keys() >= {"MODEL", "TOKENS", "SCORED", "TURNS"}
    names |= {"TOKENS": 320, "TURNS": 2}
    for cell in remaining:
        exec(cell, names)
    printed = capsys.readouterr().out
    assert f"LlamaForCausalLM: {layers} layers: {layers} fused" in printed
    for title in ("DynamicCache", "default", "adaptive", "E4M3"):
        (size,) = _numbers(rf"{title} +([\d,]+) bytes per token", printed)
        assert size == layers * (BF16 if title == "DynamicCache" else STORED)
        kl, same = _numbers(rf"{title} +mean KL +([\de.+-]+), .* ([\d.]+)%", printed)
        assert kl == 0 if title == "DynamicCache" else 0 < kl < 0.1
        assert 80 < same <= 100
        assert _numbers(rf"{title} +([\d.]+) ms, ([\d.]+) of DynamicCache", printed)


@pytest.mark.full  # the fast tier of tests/serving has several clients of one server
def test_one_server_answers_sixteen_clients(monkeypatch, capsys, tmp_path):
    # The model is in float32, where answers do not depend on the batch.
    model = save_chat_model(tmp_path)
    arguments = [*ARGUMENTS["serve_client.py"], "--model", model]
    monkeypatch.setattr(sys, "argv", ["serve_client.py", *arguments])
    runpy.run_path(str(FOLDER / "serve_client.py"), run_name="__main__")
    out = capsys.readouterr().out
    streamed = re.findall(r"^streamed (.+)$", out, re.MULTILINE)
    assert len(streamed) == len(set(streamed)) == 8
    assert re.findall(r"^at once  (.+)$", out, re.MULTILINE) == streamed
    assert 'requests_total{status="200"} 16.0\n' in out
    assert _numbers(r"generated_tokens_total (\d+)", out) == (16 * 8,)
    assert "the server ended with 0" in out
