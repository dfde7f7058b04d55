"""Tests that the names in the docs exist, and that the docs can list all arguments."""

import inspect
import pydoc
import re
from pathlib import Path

import pytest

from hf_fp8kv import FP8PagedCache

ROOT = Path(__file__).parent.parent
DOC_PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
TOP_LEVEL_FOLDERS = ("benchmarks", "docs", "examples", "hf_fp8kv", "hf_fp8kv_cli", "tests")
# Paths relative to the root of the repository. They start with "/", so that the name "pages.py"
# matches the end of "/hf_fp8kv/cache/pages.py".
KNOWN_PATHS = [
    f"/{path.relative_to(ROOT)}"
    for folder in TOP_LEVEL_FOLDERS
    for path in (ROOT / folder).rglob("*")
]

for_each_page = pytest.mark.parametrize("page", DOC_PAGES, ids=lambda page: page.name)


def find_anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


@for_each_page
def test_link_targets_exist(page: Path):
    # "[memory](limits.md#memory)" has the target "limits.md" and the anchor "memory".
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        if target.startswith("https://"):
            continue
        path = page.parent / target if target else page
        assert path.exists(), target
        assert not anchor or anchor in find_anchors(path), f"{target}#{anchor}"


@for_each_page
def test_named_files_and_folders_exist(page: Path):
    text = page.read_text()
    shown_scripts = re.findall(r"^# (\w+\.py)$", text, re.MULTILINE)  # titles of code blocks
    names = set(re.findall(r"(?<![\w./*-])\w[\w/]*\.py\b", text)) - set(shown_scripts)
    names |= set(re.findall(rf"`((?:{'|'.join(TOP_LEVEL_FOLDERS)})/[\w./-]+?)/?`", text))
    for name in sorted(names):
        assert any(path.endswith(f"/{name}") for path in KNOWN_PATHS), name


@for_each_page
def test_named_modules_exist(page: Path):
    text = page.read_text()
    names = set(re.findall(r"\bhf_fp8kv(?:\.[a-zA-Z_]\w*)+", text))
    names |= set(re.findall(r"python -m ((?:benchmarks|tests)\b\.[a-z][\w.]*)", text))
    # Subpackages whose names are not also names of variables in the docs.
    package_pattern = "attention|calibration|formats|ops|paging|serving"
    dotted_names = re.findall(rf"`((?:{package_pattern})(?:\.(?!py\b)[a-z]\w*)+)", text)
    names |= {f"hf_fp8kv.{name}" for name in dotted_names}
    assert not [name for name in sorted(names) if pydoc.locate(name) is None]


@for_each_page
def test_named_functions_exist(page: Path):
    # For example "`ops/pages.py`, `read_pages`".
    for path, name in re.findall(r"`(\w+/[\w/]+\.py)`, `([\w.]+)`", page.read_text()):
        assert f"def {name.rpartition('.')[2]}(" in (ROOT / "hf_fp8kv" / path).read_text(), name


@for_each_page
def test_cache_keywords_exist(page: Path):
    calls = re.findall(r"FP8PagedCache\(([^`\n]*)\)", page.read_text())
    keywords = {name for call in calls for name in re.findall(r"(\w+)=", call)}
    assert keywords <= inspect.signature(FP8PagedCache).parameters.keys()
