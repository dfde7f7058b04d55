"""Tests that the docs contain the results of the benchmarks on a GPU."""

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.text
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return the rows of runs on an H200 by section, case and contender."""
    rows = {}
    for name in ("2026-11-26-gpu-h200", "2026-11-27-gpu-h200"):
        for row in json.loads((DOCS / "benchmarks" / f"{name}.json").read_text())["rows"]:
            rows[row["section"], row["case"], row["name"]] = row
    return rows


@pytest.mark.parametrize("case", ["8 x 32k", "64 x 32k", "1 x 256k"])
def test_the_table_of_decode_steps_on_a_gpu_matches_the_results(rows, case):
    cells = []
    for name in ("e4m3", "e3m4", "int8", "bf16 pages"):
        row = rows["decode", case, name]
        time = f"{row['us']:,.0f}" if row["us"] >= 100 else f"{row['us']:.1f}"
        cells.append(f"{time} ({row['of_read']:.2f})")
    assert f"\n| {case} | {' | '.join(cells)} | " in (DOCS / "performance.md").read_text()


DYNAMIC = "DynamicCache flash eager"
COMPILED_AUTO = "FP8PagedCache auto compiled"


@pytest.mark.parametrize(
    ("mode", "baseline", "claim"),
    [
        ("eager", DYNAMIC, "decodes at {:.2f} of its speed"),
        ("compiled", COMPILED_AUTO, "{:.2f} times as fast as our 16-bit cache"),
        ("compiled", DYNAMIC, "{:.1f} times as fast as the script before"),
    ],
)
def test_the_readme_states_the_speed_of_generate_on_a_gpu(rows, mode, baseline, claim):
    readme = " ".join((DOCS.parent / "README.md").read_text().split())
    paged_speed = rows["end to end", "8 x 32k", f"FP8PagedCache {mode}"]["tokens_per_s"]
    baseline_speed = rows["end to end", "8 x 32k", baseline]["tokens_per_s"]
    assert claim.format(round(paged_speed / baseline_speed, 2)) in readme
