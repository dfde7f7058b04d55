"""The memory suite, and the shares of bfloat16 that it has to show."""

import io

import pytest
import torch
from rich.console import Console

from benchmarks.memory import MODELS, PROMPTS, TARGET, make_config, run_memory_suite
from hf_fp8kv.bench import memory


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tokens", [1000, 1024])
def test_windows_and_short_texts_take_little_more_than_half(name: str, tokens: int) -> None:
    """Bytes do not depend on the numbers, and these lengths are the hardest."""
    with torch.inference_mode():
        rows = list(memory._rows(name, make_config(name), tokens, "numba"))
    assert {(row["form"], row["prompt"]) for row in rows} == {
        (form, prompt) for form in ("dynamic", "preallocated") for prompt in PROMPTS
    }
    for row in rows:
        assert 0.5 < row["ratio"] <= TARGET, row
        # The stock caches hold what their layers are said to keep.
        config = make_config(name)
        full = sum(kind == "full_attention" for kind in config.layer_types)
        window = config.sliding_window - (row["form"] == "dynamic")
        kept = full * tokens + (config.num_hidden_layers - full) * window
        assert row["stock_held"] >= kept * config.num_key_value_heads * config.head_dim * 4


@pytest.mark.full
def test_the_suite_measures_in_a_process_of_its_own() -> None:
    told: list[str] = []
    result = run_memory_suite(models=("Gemma 3 270M",), tokens=(80,), progress=told.append)
    assert (result["suite"], len(result["rows"]), len(told)) == ("memory", 6, 6)
    assert told[0] == "Gemma 3 270M, 80 tokens"
    for row in result["rows"]:
        assert row["peak"] is None or row["peak"] >= 0
    console = Console(width=140, file=io.StringIO(), record=True)
    console.print(memory.format_table(result))
    assert "one call, stored" in console.export_text()
    with pytest.raises(RuntimeError, match="ended with 1"):
        run_memory_suite(models=("GPT-5",))
