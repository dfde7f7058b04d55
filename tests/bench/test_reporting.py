"""What the suites share: quartiles, numbers, tables, bytes of a cache, and the formats measured."""

import io

import pytest
import torch
from rich.console import Console
from transformers import DynamicCache

from benchmarks.gpu.shapes import KINDS
from hf_fp8kv import FP8PagedCache
from hf_fp8kv.bench import accuracy, contenders, quality
from hf_fp8kv.bench.reporting import build_table, count_bytes, format_number, quartiles
from hf_fp8kv.formats import DISTINCT, FORMATS
from tests.helpers.tiny_models import tiny


def test_quartiles():
    assert quartiles([3.0]) == (3.0, None, None)
    assert quartiles([5.0, 1.0, 2.0, 4.0, 3.0]) == (3.0, 2.0, 4.0)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.12345, "0.123"), (12.345, "12.3"), (99.96, "100"), (12345.6, "12346")],
)
def test_numbers(value, text):
    assert format_number(value) == text


def test_a_section_shows_its_first_cell_once():
    rows = [("a", "1"), ("a", "2"), ("b", "3"), ("a", "4")]
    table = build_table({"name": "left", "count": "right"}, rows, grouped=True, title="counts")
    console = Console(width=60, file=io.StringIO())
    console.print(table)
    lines = console.file.getvalue().splitlines()
    cells = [tuple(map(str.strip, x.split("│")[1:-1])) for x in lines if "│" in x]
    assert cells == [("a", "1"), ("", "2"), ("b", "3"), ("a", "4")]
    assert "counts" in lines[0]
    assert sum("├" in line for line in lines) == 2


def test_bytes_of_caches():
    config = tiny("llama")[0].config
    states = torch.zeros(1, config.num_key_value_heads, 5, config.head_dim)
    plain = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        plain.update(states, states, layer)
    assert count_bytes(plain) == 2 * config.num_hidden_layers * states.nbytes
    ours = FP8PagedCache(config, backend="torch")
    ours.update(states, states, 0)
    assert count_bytes(ours) == ours.memory_footprint()["total"]


def test_every_format_that_rounds_differently_is_measured():
    """A new one in FORMATS needs no other list."""
    distinct = {fmt.name for fmt in DISTINCT}
    assert distinct == FORMATS.keys() - {"fp8_e4m3fnuz"}
    assert set(accuracy.MEASURED) == distinct <= quality.CACHES.keys()
    assert {options["dtype"] for options in contenders.PAGED.values()} == distinct
    assert {kind.format for kind in KINDS} == {"auto", *distinct}
