"""Pages of the site that the repository has in another form, and the picture of the README.

MkDocs calls `on_files` and `on_page_markdown`. Links between files of the repository become links
between pages; a link to a file that is no page fails the build, as in every page.
"""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "docs" / "benchmarks"
CARDS = BENCHMARKS / "cards"
# Files beside docs/ that are pages, and where.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "LICENSE": "license.txt",
    "constraints.txt": "constraints.txt",
}
EXAMPLES = "examples.md"
CSS = ".md-grid{max-width:76rem}.md-typeset table:not([class]){font-size:.68rem}"
POSITION = 2048  # tokens before the predictions in the picture of the README
# The bars of that picture: the name of a cache in the cards, and its label.
OVERVIEW = {
    "bf16": "16 bits (bfloat16)", "fp8": "8 bits, usual FP8 (E4M3)", "default": "8 bits, hf_fp8kv"
}  # fmt: skip
BAR_COLORS = ("#999999", "#e69f00", "#0072b2")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""

    def add(path: str, content: str) -> None:
        files.append(File.generated(config, path, content=content))

    for source, page in PAGES.items():
        add(page, (ROOT / source).read_text())
    add("api.md", "".join(_api()))
    add(EXAMPLES, "".join(_examples()))
    add("site.css", CSS)
    add("benchmarks/index.md", "".join(_benchmarks()))
    add("cards.md", "".join(_board()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page with links to other files of the repository as links to pages."""
    source = page.file.src_uri
    depth = source.count("/")
    here = {page: name for name, page in PAGES.items()}.get(source, f"docs/{source}")

    def link(match: re.Match[str]) -> str:
        target, _, anchor = match[1].partition("#")
        if "://" in target or not target:
            return match[0]
        path = (ROOT / here).parent.joinpath(target).resolve().relative_to(ROOT).as_posix()
        found = _page_of(path)
        return f"]({'../' * depth}{found}{'#' + anchor if anchor else ''})"

    return re.sub(r"\]\(([^)\s]+)\)", link, markdown)


def _page_of(path: str) -> str:
    """Return the page that a file of the repository is on."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("examples"):
        return f"{EXAMPLES}#{Path(path).stem}" if Path(path).suffix else EXAMPLES
    if path == "docs/benchmarks/cards":
        return "cards.md"
    if path == "docs/benchmarks":
        return "benchmarks/index.md"
    return path.removeprefix("docs/")


def _api() -> Iterator[str]:
    """Yield the page of the public names."""
    import hf_fp8kv
    from hf_fp8kv import serving

    yield "# API\n\nThe public names of the package. Everything else may change at any time.\n\n"
    for module in (hf_fp8kv, serving):
        yield f"## `{module.__name__}`\n\n"
        for name in module.__all__:
            if not name.startswith("_") and (callable(getattr(module, name))):
                yield f"::: {module.__name__}.{name}\n    options:\n      heading_level: 3\n\n"


def _examples() -> Iterator[str]:
    yield "# Examples\n\nEach runs from a clone, after `make venv`, with `.venv/bin/python`.\n\n"
    sections = re.split(r"^## (.+)\n", (ROOT / "examples" / "README.md").read_text(), flags=re.M)
    outputs = dict(zip(sections[1::2], sections[2::2], strict=True))
    for path in sorted((ROOT / "examples").glob("*.py")):
        yield f"## {path.name} {{ #{path.stem} }}\n\n```python\n{path.read_text()}```\n\n"
        yield outputs.get(path.name, "")
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        yield f"## {path.name} {{ #{path.stem} }}\n\n"
        for cell in json.loads(path.read_text())["cells"]:
            source = "".join(cell["source"])
            is_code = cell["cell_type"] == "code"
            text = f"```python\n{source}\n```" if is_code else re.sub("(?m)^#", "###", source)
            yield f"{text}\n\n"


def _board() -> Iterator[str]:
    """Yield the page of all cards."""
    from hf_fp8kv.card.rendering import format_markdown, format_verdict

    yield (
        "# Cards\n\nWhat models lose with an 8-bit cache, by `hf-fp8kv card`. "
        "[Accuracy](accuracy.md) explains the columns, and [Contributing](contributing.md) how to "
        "add a card.\n\n"
    )
    cards = {path.stem: json.loads(path.read_text()) for path in sorted(CARDS.glob("*.json"))}
    for name, card in cards.items():
        yield f"* [{card['settings']['model']}](#{name}): {format_verdict(card)}\n"
    for name, card in cards.items():
        title, _, rest = format_markdown(card).partition("\n")
        yield f"\n#{title} {{ #{name} }}\n\n{rest}"


def _benchmarks() -> Iterator[str]:
    """Yield the page of the benchmarks' runs."""
    yield "# Benchmarks\n\n| run | date | command |\n|---|---|---|\n"
    for path in sorted(BENCHMARKS.glob("*.json")):
        run = json.loads(path.read_text())
        yield f"| [{path.stem}]({path.name}) | {run['date'][:10]} | `{run['command']}` |\n"


def draw_overview(cards: list[dict[str, Any]]) -> bytes:
    """Return a PNG with three bars for memory and three for error, the means over the cards."""
    figure = Figure(figsize=(9, 2.2), layout="constrained")
    memory, error = figure.subplots(1, 2, sharey=True)
    panels = (
        (memory, "Memory per token, relative to 16 bits", _read_size, "{:.2f}"),
        (error, "Error of the predictions, relative to usual FP8", _read_error, "{:.2f}"),
    )
    for axes, title, read, label in panels:
        values = [fmean(read(card, cache) for card in cards) for cache in OVERVIEW]
        bars = axes.barh(list(OVERVIEW.values()), values, height=0.7, color=BAR_COLORS)
        axes.bar_label(bars, map(label.format, values), padding=4)
        axes.set_title(title, fontsize=11, loc="left")
        axes.set_xlim(0, 1.15 * max(values))
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.tick_params(bottom=False, labelbottom=False, left=False)
    memory.invert_yaxis()
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return file.getvalue()


def _read_size(card: dict[str, Any], cache: str) -> float:
    return card["caches"][cache]["bytes_per_token"] / card["caches"]["bf16"]["bytes_per_token"]


def _read_error(card: dict[str, Any], cache: str) -> float:
    from hf_fp8kv.card.measure import select_rows

    def read(cache: str) -> float:
        rows = select_rows(card["caches"][cache], "exact")
        return {row["position"]: row["kl"] for row in rows}[POSITION]

    return read(cache) / read("fp8")


if __name__ == "__main__":  # writes the picture of the README
    all_cards = [json.loads(path.read_text()) for path in sorted(CARDS.glob("*.json"))]
    (ROOT / "docs" / "images" / "overview.png").write_bytes(draw_overview(all_cards))
