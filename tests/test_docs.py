"""The Python in docs/quickstart.md and docs/serving.md runs, block by block."""

import re
from pathlib import Path
from typing import Any

import pytest

import hf_fp8kv

pytestmark = pytest.mark.text

DOCS = Path(__file__).parent.parent / "docs"
PROMPT = "London is the capital of"


@pytest.fixture
def run(demo_model_path, tmp_path, monkeypatch, capsys):
    """Run the blocks of a page in order; return the names that they leave behind.

    A comment after a print() must be a line of what the block printed. What a model in 16 bits says
    differs between CPUs, so its answers have no such comment: only their prompt is certain.
    """
    monkeypatch.chdir(tmp_path)  # some blocks write files

    def run_page(page: str) -> dict[str, Any]:
        names: dict[str, Any] = {}
        text = (DOCS / page).read_text()
        blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        for number, block in enumerate(blocks, 1):
            exec(compile(block, f"{page}, block {number}", "exec"), names)
            printed = capsys.readouterr().out.splitlines()
            for line in re.findall(r"^ *print\(.*\)  # (.+)$", block, re.MULTILINE):
                assert line in printed, f"{page}, block {number}"
            assert number > 1 or any(line.startswith(PROMPT) for line in printed)
        return names

    return run_page


def test_the_blocks_of_the_quickstart_run_in_their_order(run):
    names = run("quickstart.md")
    shown = {
        "FP8PagedCache",
        "KVScales",
        "LayerPlan",
        "PrefixStore",
        "calibrate",
        "check_model",
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
