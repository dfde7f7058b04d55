"""Tests that run the blocks of README.md, the tutorial and the how-to pages.

The blocks use the first layers of the demo model. The tests of examples/ also run all its layers.
"""

import re
from pathlib import Path
from typing import Any

import pytest

import hf_fp8kv
from hf_fp8kv import demo_model_path
from tests.helpers.argument_names import rename_arguments
from tests.helpers.shallow import num_layers, save_first_layers  # noqa: F401

pytestmark = [
    pytest.mark.text, pytest.mark.parametrize("num_layers", ["first layers"], indirect=True)
]  # fmt: skip

ROOT = Path(__file__).parent.parent
PROMPT = "London is the capital of"


@pytest.fixture(scope="module")
def shallow_model_path(demo_model_path, tmp_path_factory):
    """Save the first layers in float32, because most CPUs are six times slower with bfloat16."""
    folder = tmp_path_factory.mktemp("shallow") / "model"
    return save_first_layers(demo_model_path, folder, dtype="float32")


@pytest.fixture
def run_blocks(num_layers, tmp_path, monkeypatch, capsys):  # noqa: F811
    """Return a function that runs the blocks of a page with a dict of global variables.

    A "diff" is run as the script with the added lines, and with the demo model.

    A comment after a print() must be a line that the block prints. The answers of 16-bit models
    differ between CPUs, so the calls that print them have no comment. Only the prompt is checked.
    """
    monkeypatch.chdir(tmp_path)  # some blocks write files

    def scale_number(match: re.Match[str]) -> str:
        """Scale counts of layers and of bytes, which are multiples of the model's 30 layers."""
        number = int(match[0])
        return str(number if number % 30 else number // 30 * num_layers)

    def run_page(page: str, namespace: dict[str, Any]) -> list[str]:
        text = (ROOT / page).read_text()
        blocks = re.findall(r"^```(python|diff)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        assert blocks
        output_lines: list[str] = []
        for number, (kind, block) in enumerate(blocks, 1):
            if kind == "diff":  # a user's script, whose model is not available here
                block = re.sub("^[ +]", "", block, flags=re.MULTILINE)
                block = re.sub('"meta-llama/.*"', repr(str(demo_model_path())), block)
            block = rename_arguments(block)
            exec(compile(block, f"{page}, block {number}", "exec"), namespace)
            block_lines = capsys.readouterr().out.splitlines()
            for comment in re.findall(r"^ *print\(.*\)  # (.+)$", block, re.MULTILINE):
                expected = re.sub(r"\b\d+\b", scale_number, comment)
                assert expected in block_lines, f"{page}, block {number}"
            output_lines += block_lines
        return output_lines

    return run_page


def test_the_block_of_the_readme_runs(run_blocks):
    namespace: dict[str, Any] = {}
    assert any(line.startswith(PROMPT) for line in run_blocks("README.md", namespace))
    assert namespace["output"].shape == (1, 25)


def test_the_blocks_of_the_tutorial_and_then_of_each_page_run(run_blocks):
    tutorial: dict[str, Any] = {}
    assert any(line.startswith(PROMPT) for line in run_blocks("docs/quickstart.md", tutorial))
    public_names = {"FP8PagedCache", "check_model", "demo_model_path", "disable", "enable"}
    assert {name for name in hf_fp8kv.__all__ if name in tutorial} == public_names
    # The page about training is the last, because it changes the weights.
    for page in ("calibrate", "formats", "memory", "migrating", "reuse", "training"):
        namespace = dict(tutorial)
        run_blocks(f"docs/{page}.md", namespace)
        # The attention of the tutorial remains, because each page disables the caches it enables.
        assert namespace["model"].config._attn_implementation == "fp8_paged", page


def test_the_blocks_of_serving_run_in_order(run_blocks):
    namespace: dict[str, Any] = {}
    run_blocks("docs/serving.md", namespace)
    answers = namespace["answers"].values()
    assert [len(answer.generated_tokens) for answer in answers] == [12, 12, 12]
    assert len(namespace["result"].generated_tokens) == 12
