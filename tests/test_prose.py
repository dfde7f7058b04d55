"""Tests that count phrases that read as translated, and that limit the size of the documentation.

If a pattern matches a correct sentence, rewrite the sentence too, or stay within the allowance.
Lower the allowance after removing matches. CONTRIBUTING.md describes the style.
"""

import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.style
ROOT = Path(__file__).parents[1]
PATTERNS = {
    "what as a noun": r"\b(?:returns?|of|is|are|from|than|and) what\b",
    "fronted Of": r"(?:^|[.;:]\s)Of [a-z]",
    "that of": r"\b(?:that|those|the same) of\b",
    "another one": r"\banother one\b|\bother ones\b|\bthe others?\b",
    "None: ...": r"\b(?:None|True|False): [a-z]",
    "semicolon": r";\s",
    "also in": r"\balso (?:in|of|when|where|for)\b|, too\b",
    "but for": r"\bbut for\b",
    "beside": r"\bbeside\b",
    "know, tell, ask": r"\b(?:is|are|was|be|been) (?:asked|told)\b|\b(?:asks|tells|knows|sees)\b",
    "nobody": r"\b(?:nobody|somebody|whoever)\b",
    "that there is": r"\bthat there (?:is|are)\b|\bthat (?:is|are) there\b",
    "so many": r"\b(?:so|as) (?:many|much)\b",
    "of its own": r"\bof (?:its|their) own\b",
    "is no": r"\b(?:is|are) no [a-z]",
    "is to be": r"\b(?:is|are|has|have) to be\b",
    "idioms": r"\b(?:goes on|gives? back|taken for|meanwhile|by hand|in turns)\b",
}  # fmt: skip
GLOBS = {
    "package": ("hf_fp8kv/**/*.py", "hf_fp8kv_cli/*.py"),
    "docs": ("docs/*.md", "*.md"),
    "tests": ("tests/**/*.py", "benchmarks/**/*.py", "examples/*.py"),
}
# Each model type has a row on this page, and some rows have messages of other packages.
GENERATED_PAGE = ROOT / "docs" / "architectures.md"
# Maximum number of matches of a pattern, 0 for patterns that are not named. It must not grow.
ALLOWED: dict[str, dict[str, int]] = {
    "package": {
        "what as a noun": 1, "another one": 1, "semicolon": 55, "know, tell, ask": 1,
        "that there is": 1, "so many": 1, "of its own": 1, "is no": 5,
    },
    "docs": {},
    "tests": {
        "that of": 1, "another one": 2, "semicolon": 47, "beside": 1, "so many": 1, "is no": 1,
    },
}  # fmt: skip


def extract_prose(path: Path) -> str:
    """Return the comments and strings of a module, or a page without its code and link targets."""
    text = path.read_text()
    if path.suffix == ".md":
        return re.sub(r"```.*?```|`[^`\n]*`|\]\([^)]*\)", "", text, flags=re.DOTALL)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    prose_types = (tokenize.COMMENT, tokenize.STRING)
    return "\n".join(token.string.strip("# \"'") for token in tokens if token.type in prose_types)


def count_matches(texts: list[str]) -> Counter[str]:
    counts = Counter[str]()
    for name, pattern in PATTERNS.items():
        counts[name] = sum(len(re.findall(pattern, text, re.MULTILINE)) for text in texts)
    return counts


@pytest.mark.parametrize("group", GLOBS)
def test_no_pattern_gains_matches(group):
    paths = {path for glob in GLOBS[group] for path in ROOT.glob(glob)}
    paths -= {Path(__file__), GENERATED_PAGE}
    counts = count_matches([extract_prose(path) for path in sorted(paths)])
    print(f'"{group}": {dict(+counts)},')
    excess = counts - Counter(ALLOWED[group])
    assert not excess, f"matches above the allowance: {dict(excess)}. Rewrite the new sentences"


GUIDE_PAGES = [ROOT / "README.md", *sorted({*(ROOT / "docs").glob("*.md")} - {GENERATED_PAGE})]


def count_words(text: str) -> int:
    """Return the number of words, without table bars and other signs."""
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def test_the_documentation_stays_short():
    word_counts = {page.name: count_words(page.read_text()) for page in GUIDE_PAGES}
    print(word_counts, sum(word_counts.values()))
    assert sum(word_counts.values()) <= 25_000
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 120
    assert readme.splitlines().index("## Install") <= 45  # the first screen
    assert len(re.findall(r"(?<![\w-])\d+(?:[.,]\d+)*", readme)) <= 60  # measurements have pages


@pytest.mark.parametrize("page", GUIDE_PAGES, ids=lambda page: page.name)
def test_cells_of_tables_are_short(page: Path):
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = [cell for row in rows for cell in row.split("|")]
    assert not [cell for cell in cells if count_words(cell) > 20]


def test_a_limit_has_at_most_four_sentences():
    text = (ROOT / "docs" / "limits.md").read_text()
    for section in re.split(r"^##+ ", text, flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        assert len(re.findall(r"[.!?](?=\s|$)", body.strip())) <= 4, title
