"""The Python in docs/quickstart.md and docs/serving.md runs, block by block."""

import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.text

DOCS = Path(__file__).parent.parent / "docs"


def _blocks(page: str) -> list[str]:
    text = (DOCS / page).read_text()
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def after(demo_model_path, tmp_path, monkeypatch, capsys) -> tuple[dict[str, Any], str]:
    """The names that the blocks of the quickstart leave behind, and what they printed."""
    monkeypatch.chdir(tmp_path)  # some write files
    names: dict[str, Any] = {}
    for number, block in enumerate(_blocks("quickstart.md"), 1):
        exec(compile(block, f"quickstart.md, block {number}", "exec"), names)
        if number == 1:
            names["tokens"] = names["out"].shape[1] - 1
    return names, capsys.readouterr().out


def test_the_blocks_of_the_quickstart_run_in_their_order(after):
    names, printed = after
    blocks = _blocks("quickstart.md")
    # A model in 16 bits says something else on another CPU: only the prompt is certain.
    assert printed.startswith("London is the capital of")
    # The comment beside a print() is what it prints, or says what that is.
    said = re.findall(r"^print\(.*\)  # ([^\n]+)$", "\n".join(blocks), re.MULTILINE)
    literal = [x for x in said if not x.startswith(("bytes", "with", "one less"))]
    assert len(literal) == 3
    for text in literal:
        assert text in printed.splitlines()
    assert str(names["tokens"]) in printed.splitlines()
    assert len(names["answers"]) == 2
    assert names["out"].shape[0] == 1
    assert names["fixed"].get_seq_length() == 0
    assert names["model"].config._attn_implementation == "fp8_paged"


def test_the_blocks_of_serving_run_in_their_order(demo_model_path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for number, block in enumerate(_blocks("serving.md"), 1):
        exec(compile(block, f"serving.md, block {number}", "exec"), names)
    printed = capsys.readouterr().out
    for prompt in names["prompts"]:
        assert f"\n{prompt}" in f"\n{printed}"
    said = re.findall(
        r"^print\(.*\)  # (\d[^\n]+)$", "\n".join(_blocks("serving.md")), re.MULTILINE
    )
    assert len(said) == 1
    assert printed.splitlines()[-1] == said[0]
    assert len(names["result"].generated_tokens) == 12
