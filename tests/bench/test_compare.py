"""The comparison of two source trees: both run the same loops, turn by turn."""

from pathlib import Path

import pytest

from benchmarks.compare import NEW, compare_trees
from benchmarks.hot_loops import LOOPS, make_loops


@pytest.mark.full
def test_two_trees_take_turns():
    rows = compare_trees(NEW, NEW, turns=3, backend="torch", loops="host, update, ")
    assert [row["loop"] for row in rows] == [n for n in LOOPS if n.startswith("host, update, ")]
    for row in rows:
        assert set(row) == {"loop", "old", "new", "ratio", "low", "high"}
        assert row["old"] > 0
        assert row["new"] > 0


@pytest.mark.full
def test_a_tree_without_the_package_says_so(tmp_path: Path, capfd):
    (tmp_path / "hf_fp8kv.py").write_text("raise ImportError('no package here')")
    with pytest.raises(RuntimeError, match="ended with 1"):
        compare_trees(tmp_path, tmp_path, turns=1)
    assert "no package here" in capfd.readouterr().err


def test_a_loop_leaves_its_cache_as_it_was():
    """Turn after turn measures the same lengths."""
    loops = make_loops("torch", "host, update")
    assert all(loop() > 0 for loop in loops.values() for _ in range(2))
