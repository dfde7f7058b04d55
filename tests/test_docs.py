"""The Python in docs/quickstart.md and docs/serving.md runs, block by block.

They run with the first layers of the demo model. The examples of `make test-all` run the whole one.
"""

import re
from pathlib import Path
from typing import Any

import pytest

import hf_fp8kv
from tests.helpers.shallow import layers, save_first_layers  # noqa: F401

pytestmark = [
    pytest.mark.text, pytest.mark.parametrize("layers", ["first layers"], indirect=True)
]  # fmt: skip

DOCS = Path(__file__).parent.parent / "docs"
PROMPT = "London is the capital of"


@pytest.fixture(scope="module")
def shallow_model_path(demo_model_path, tmp_path_factory):
    """In float32: most CPUs take six times as long for products of bfloat16."""
    folder = tmp_path_factory.mktemp("shallow") / "model"
    return save_first_layers(demo_model_path, folder, dtype="float32")


@pytest.fixture
def run(layers, tmp_path, monkeypatch, capsys):  # noqa: F811
    """Run the blocks of a page in order; return the names that they define.

    A comment after a print() must be a line that the block printed. The answers of a model in 16
    bits differ between CPUs, so they have no such comment: only their prompt is certain.
    """
    monkeypatch.chdir(tmp_path)  # some blocks write files

    def scale(number: re.Match[str]) -> str:
        """Layers and their bytes have a factor of 30, the number of layers of the whole model."""
        whole = int(number[0])
        return str(whole if whole % 30 else whole // 30 * layers)

    def run_page(page: str) -> dict[str, Any]:
        names: dict[str, Any] = {}
        text = (DOCS / page).read_text()
        blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        for number, block in enumerate(blocks, 1):
            exec(compile(block, f"{page}, block {number}", "exec"), names)
            printed = capsys.readouterr().out.splitlines()
            for line in re.findall(r"^ *print\(.*\)  # (.+)$", block, re.MULTILINE):
                assert re.sub(r"\b\d+\b", scale, line) in printed, f"{page}, block {number}"
            assert number > 1 or any(line.startswith(PROMPT) for line in printed)
        return names

    return run_page


def test_the_blocks_of_the_quickstart_run_in_their_order(run):
    names = run("quickstart.md")
    shown = {
        "FP8PagedCache",
        "KVScales",
        "PrefixStore",
        "calibrate",
        "check_model",
        "choose_plan",
        "demo_model_path",
        "disable",
        "enable",
    }
    assert {name for name in hf_fp8kv.__all__ if name in names} == shown
    assert len(names["answers"]) == 2
    assert names["fixed"].get_seq_length() == 0
    assert names["model"].config._attn_implementation == "fp8_paged"


def test_the_blocks_of_serving_run_in_their_order(run):
    names = run("serving.md")
    assert [len(answer.generated_tokens) for answer in names["answers"].values()] == [12, 12, 12]
    assert len(names["result"].generated_tokens) == 12
