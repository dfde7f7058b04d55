"""Tests that run the examples as a user would, and check the numbers that they print.

The fast tier uses the first layers of the demo model, and `make test-all` the whole model.
"""

import ast
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_fp8kv import demo_model_path
from tests.helpers.argument_names import rename_arguments
from tests.helpers.serve_process import save_chat_model
from tests.helpers.shallow import num_layers, save_first_layers, shallow_model_path  # noqa: F401

pytestmark = pytest.mark.text

EXAMPLES = Path(__file__).parent.parent / "examples"
# Arguments that keep each example short. They run the same code as the defaults.
ARGUMENTS = {
    "calibrate_and_export.py": ["--max-tokens", "512"],
    "chat.py": ["--new-tokens", "6", "--questions", "Name a fruit.", "Another?"],
    "encoder_decoder.py": [],
    "fork_chat.py": ["--characters", "1500"],
    "long_context.py": ["--max-pages", "8", "--chunk", "128"],
    "out_of_memory.py": [],
    "pipeline.py": ["--new-tokens", "4"],
    "serve_client.py": ["--new-tokens", "8"],
    "quickstart.py": ["--prompt-tokens", "400", "--new-tokens", "8"],
}
# Examples that need additional packages, and how each is tested.
TESTED_ELSEWHERE = {
    "rl.py": "make rl",
    "ray_serve.py": "docs/serving.md: tried manually, since tests do not install Ray",
    "vllm_serve.py": "tests/vllm/test_processes.py",
}
# Of SmolLM2-135M and its cache.
NUM_KV_HEADS = 3
HEAD_DIM = 64
PAGE_SIZE = 64
# Bytes of K and V per token and layer, in 16 bits and in 8-bit pages.
STOCK_BYTES = NUM_KV_HEADS * 2 * HEAD_DIM * 2
PAGED_BYTES = NUM_KV_HEADS * 2 * (HEAD_DIM + 2)


@pytest.fixture
def run_example(num_layers: int, monkeypatch, capsys) -> Callable[..., str]:  # noqa: F811
    """Return a function that runs an example with arguments, and returns its output."""

    def run_script(name: str, *arguments: str) -> str:
        argv = [str(EXAMPLES / name), *(arguments or ARGUMENTS[name])]
        monkeypatch.setattr(sys, "argv", argv)
        source = rename_arguments(Path(argv[0]).read_text())
        exec(compile(source, argv[0], "exec"), {"__name__": "__main__", "__file__": argv[0]})
        return capsys.readouterr().out

    return run_script


def read_numbers(pattern: str, text: str) -> tuple[float, ...]:
    match = re.search(pattern, text)
    assert match, f"{pattern!r} is not in:\n{text}"
    return tuple(float(group.replace(",", "")) for group in match.groups())


def count_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_SIZE)


def test_examples_are_short_documented_and_tested():
    scripts = {path.name: path.read_text() for path in EXAMPLES.glob("*.py")}
    assert sorted(scripts) == sorted({*ARGUMENTS, *TESTED_ELSEWHERE})
    for name, text in scripts.items():
        assert len(text.splitlines()) <= (80 if name in TESTED_ELSEWHERE else 70), name
        docstring = ast.get_docstring(ast.parse(text))
        assert f"\n    python examples/{name}\n" in docstring, f"{name} does not show how to run it"
    titles = re.findall(
        r"^## (\w+\.py)\n(?:(?!^## ).*\n)*?```text\n",
        (EXAMPLES / "README.md").read_text(),
        re.MULTILINE,
    )
    assert titles == sorted(ARGUMENTS)  # with their output


def test_quickstart_counts_both_caches(run_example, num_layers):  # noqa: F811
    output = run_example("quickstart.py")
    num_tokens, stock_bytes, paged_bytes, ratio, kl = read_numbers(
        r"tokens held: (\d+)\nin 16 bits: ([\d,]+) bytes\n"
        r"8-bit pages: ([\d,]+) bytes, ([\d.]+) of the 16-bit size\nmean KL .*: (.+)\n",
        output,
    )
    assert num_tokens == 400 + 8  # the last new token is never stored
    assert stock_bytes == num_tokens * num_layers * STOCK_BYTES
    assert paged_bytes == count_pages(int(num_tokens)) * PAGE_SIZE * num_layers * PAGED_BYTES
    assert ratio == pytest.approx(paged_bytes / stock_bytes, abs=5e-4)
    assert 0 < kl < 0.1
    answer_pattern = r"^(?:DynamicCache|FP8PagedCache), [\d.]+ tokens per second: '.+'$"
    assert len(re.findall(answer_pattern, output, re.MULTILINE)) == 2


def test_forks_share_pages_and_give_the_answers_of_separate_caches(run_example, num_layers):  # noqa: F811
    output = run_example("fork_chat.py")
    assert "the same answers without forks: True" in output
    answers = re.findall(r"^What is a \w+\? '(.+)'$", output, re.MULTILINE)
    # With only the first layers, answers hardly depend on the question.
    assert len(answers) == 2
    assert num_layers < 30 or len(set(answers)) == 2
    shared_tokens, shared_pages = read_numbers(r"shared: (\d+) tokens in (\d+) pages", output)
    fork_pages, separate_pages = read_numbers(r"pages: (\d+) with forks, (\d+) without", output)
    assert shared_pages == count_pages(int(shared_tokens))
    # Each fork has a separate last page, and at most one more page for its question and answer.
    assert shared_pages + 2 <= fork_pages <= shared_pages + 4
    assert separate_pages >= 2 * shared_pages


def test_a_chat_computes_only_new_tokens(run_example):
    output = run_example("chat.py")
    num_tokens = [int(count) for count in re.findall(r"\((\d+) tokens", output)]
    num_reused = [int(count) for count in re.findall(r"(\d+) of them reused", output)]
    assert len(num_tokens) == len(num_reused) == 3
    assert num_reused[0] == 0
    # The cache does not hold the last of the answer's six tokens.
    assert num_tokens[0] < num_reused[1] <= num_tokens[0] + 5 < num_tokens[1]
    assert (num_tokens[2], num_reused[2]) == (num_tokens[1], num_tokens[1] - 1)


@pytest.mark.full  # the prompts take 25 s of a core, and `--help` is tested in the fast tier
def test_a_prompt_fits_only_in_8_bits():
    """Run a new process, because memory that this process has freed is not limited.

    8-bit pages need 100 MiB, and a `DynamicCache` 150 MiB. Each thread adds a stack and a heap.
    """
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / "out_of_memory.py")]
    options = {
        "capture_output": True, "text": True, "check": True,
        "env": os.environ | {"OMP_NUM_THREADS": "1"},
    }  # fmt: skip
    output = subprocess.run(command, **options).stdout
    assert output.splitlines()[2:] == [
        "transformers: out of memory", "transformers, in chunks: out of memory",
        "8 bits, in chunks: 4,000 tokens read, 8 written",
    ]  # fmt: skip
    command += ["--limit", "1000", "--tokens", "300"]
    output = subprocess.run(command, **options).stdout
    assert output.count("300 tokens read, 8 written") == 5


def test_an_exhausted_budget_shortens_the_text(run_example, num_layers):  # noqa: F811
    output = run_example("long_context.py")
    assert "out of pages: a chunk needs 2, 0 are left" in output
    num_read, num_total = read_numbers(r"read (\d+) of (\d+) tokens", output)
    assert 8 * PAGE_SIZE - 40 < num_read < 8 * PAGE_SIZE - 24 < num_total
    num_pages, paged_bytes, ratio, stock_bytes = read_numbers(
        r"(\d+) pages: ([\d,]+) bytes, ([\d.]+) of ([\d,]+) unquantized", output
    )
    assert num_pages == 8
    assert stock_bytes == (8 * PAGE_SIZE - 1) * num_layers * STOCK_BYTES
    assert ratio == pytest.approx(paged_bytes / stock_bytes, abs=5e-4)


def test_an_encoder_decoder_stores_half_the_bytes(run_example):
    output = run_example("encoder_decoder.py")
    for kind, length in (("self", 250), ("cross", 500)):
        stock_bytes, paged_bytes, percent = read_numbers(
            rf"{kind}_attention_cache: ([\d,]+) bytes in bfloat16, ([\d,]+) in FP8 \(([\d.]+)%",
            output,
        )
        assert stock_bytes == 2 * 4 * length * 2 * 64 * 2
        assert paged_bytes == 2 * 4 * count_pages(length) * PAGE_SIZE * 2 * (64 + 2)
        assert percent == pytest.approx(100 * paged_bytes / stock_bytes, abs=0.05)


def test_a_pipeline_is_enabled_and_disabled(run_example):
    first_line, *answers, last_line = run_example("pipeline.py").splitlines()
    assert first_line == "after enable: FP8PagedCache with fp8_paged"
    assert last_line == "after disable: DynamicCache with sdpa"
    assert len(answers) == 3


def test_calibrated_scales_are_saved_and_loaded(run_example, num_layers, tmp_path):  # noqa: F811
    # The model is in float32, because most CPUs are six times slower with bfloat16.
    model = save_first_layers(demo_model_path(), tmp_path / "model", num_layers, dtype="float32")
    arguments = [*ARGUMENTS["calibrate_and_export.py"], "--model", str(model)]
    scales_folder = tmp_path / "scales"
    output = run_example("calibrate_and_export.py", *arguments, "--out", str(scales_folder))
    assert re.search(
        rf"^KVScales\({num_layers} layers, per tensor, .*calibrated on \d+ tokens'\)$", output, re.M
    )
    json_scales = read_numbers(r"json: vllm-json, layer 0: K ([\d.]+), V ([\d.]+)", output)
    k, v = read_numbers(r"copy: compressed-tensors, layer 0: K ([\d.]+), V ([\d.]+)", output)
    assert json_scales == (max(k, v), max(k, v))  # this format has one scale for K and V
    assert k != v
    assert "London is the capital of" in output.splitlines()[-1]
    sizes = [path.stat().st_size for path in (scales_folder / "copy").glob("*.safetensors")]
    # The copy holds all weights: at least two bytes per parameter of the embeddings and layers.
    assert sum(sizes) > 2 * (28_311_552 + num_layers * 3_540_096)


def test_the_notebook_measures_each_cache(num_layers, capsys):  # noqa: F811
    cells = json.loads((EXAMPLES / "measure_your_model.ipynb").read_text())["cells"]
    code_cells = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    namespace: dict[str, Any] = {}
    exec(code_cells[0], namespace)
    assert namespace.keys() >= {"MODEL", "TOKENS", "SCORED", "TURNS"}
    namespace |= {"TOKENS": 320, "TURNS": 2}
    for source in code_cells[1:]:
        exec(source, namespace)
    output = capsys.readouterr().out
    assert f"LlamaForCausalLM: {num_layers} layers: {num_layers} fused" in output
    for title in ("DynamicCache", "default", "E3M4", "E4M3"):
        (token_bytes,) = read_numbers(rf"{title} +([\d,]+) bytes per token", output)
        is_stock = title == "DynamicCache"
        assert token_bytes == num_layers * (STOCK_BYTES if is_stock else PAGED_BYTES)
        kl, agreement = read_numbers(rf"{title} +mean KL +([\de.+-]+), .* ([\d.]+)%", output)
        assert (kl == 0) == is_stock
        assert 0 <= kl < 0.1
        assert 80 < agreement <= 100


@pytest.mark.full  # in the fast tier, tests/serving tests several clients of one server
def test_one_server_answers_sixteen_clients(monkeypatch, capsys, tmp_path):
    # The model is in float32, where answers do not depend on the batch.
    arguments = [*ARGUMENTS["serve_client.py"], "--model", save_chat_model(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["serve_client.py", *arguments])
    runpy.run_path(str(EXAMPLES / "serve_client.py"), run_name="__main__")
    output = capsys.readouterr().out
    answers = re.findall(r"^streamed (.+)$", output, re.MULTILINE)
    assert len(answers) == len(set(answers)) == 8
    assert re.findall(r"^at once  (.+)$", output, re.MULTILINE) == answers
    assert 'requests_total{status="200"} 16.0\n' in output
    assert read_numbers(r"generated_tokens_total (\d+)", output) == (16 * 8,)
    assert "the server ended with 0" in output
