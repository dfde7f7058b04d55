"""The prefix suite: processes with and without a store take turns, and say the same."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.prefix import format_table, run_prefix_suite
from tests.helpers.serve_process import save_chat_model


@pytest.mark.full
def test_the_suite_measures_in_processes_of_their_own(tmp_path: Path) -> None:
    told: list[str] = []
    result = run_prefix_suite(
        model=save_chat_model(tmp_path), tokens=200, rounds=1, progress=told.append
    )
    assert told == [f"round 1 of 1, store: {kind}" for kind in ("none", "empty", "full")]
    found = [(row["store"], row["found"]) for row in result["rows"]]
    assert found == [("none", 0), ("empty", 0), ("full", 192)]
    assert result["difference"] < 0.1
    assert result["files"] == 3
    console = Console(width=140, file=io.StringIO(), record=True)
    console.print(format_table(result))
    assert "times sooner" in console.export_text()
    with pytest.raises(RuntimeError, match="ended with 1"):
        run_prefix_suite(model=str(tmp_path / "none"), rounds=1)
