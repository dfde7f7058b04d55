"""The Python in docs/quickstart.md and serving.md runs, block by block; links lead somewhere."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from hf_fp8kv import FP8PagedCache

DOCS = Path(__file__).parent.parent / "docs"
PAGES = (
    "quickstart.md", "migrating.md", "limits.md", "distributed.md", "serving.md", "operations.md",
)  # fmt: skip


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
    return names, capsys.readouterr().out


def test_the_blocks_of_the_quickstart_run_in_their_order(after):
    names, printed = after
    blocks = _blocks("quickstart.md")
    assert len(blocks) == 9
    assert printed.startswith("London is the capital of the United Kingdom")
    # The comment beside a print() is what it prints, or says what that is.
    said = re.findall(r"^print\(.*\)  # ([^\n]+)$", "\n".join(blocks), re.MULTILINE)
    literal = [x.split(": the last")[0] for x in said if not x.startswith(("bytes", "with"))]
    assert len(literal) == 4
    for text in literal:
        assert text in printed.splitlines()
    assert len(set(names["answers"])) == 2
    assert names["out"].shape[0] == 1
    assert names["fixed"].get_seq_length() == 0
    assert names["model"].config._attn_implementation == "fp8_paged"


def test_the_blocks_of_serving_run_in_their_order(demo_model_path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for number, block in enumerate(_blocks("serving.md"), 1):
        exec(compile(block, f"serving.md, block {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert printed.startswith("London is the capital of the United Kingdom")
    said = re.findall(
        r"^print\(.*\)  # (\d[^\n]+)$", "\n".join(_blocks("serving.md")), re.MULTILINE
    )
    assert len(said) == 1
    assert printed.splitlines()[-1] == said[0]
    assert len(names["result"].generated_tokens) == 12


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target, part in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", (DOCS / page).read_text()):
        path = DOCS / (target or page)
        assert path.exists(), target
        if part:
            titles = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", x).lower().replace(" ", "-") for x in titles]
            assert part in anchors, f"{target}#{part}"


@pytest.mark.parametrize("page", PAGES)
def test_every_keyword_of_a_cache_exists(page):
    known = inspect.signature(FP8PagedCache).parameters
    calls = re.findall(r"FP8PagedCache\(([^`\n]*)\)", (DOCS / page).read_text())
    keywords = {name for call in calls for name in re.findall(r"(\w+)=", call)}
    assert keywords <= known.keys()
    assert calls or page == "operations.md"
