"""Tests of `benchmarks/`: the reported values are correct, and every command runs."""

import itertools
import json
import subprocess
import sys

import pytest
import torch

from benchmarks import shared
from benchmarks.memory import PREFILL_MODES, make_config, measure_prompts
from benchmarks.shared import make_environment


def test_a_decode_step_needs_few_calls():
    # Calls are counted, because times depend on the load. The counts and limits are per layer.
    program = """
import json, sys, torch, triton
from collections import Counter
from benchmarks import host
from hf_fp8kv.ops.triton.target import Target, assuming
triton.runtime.driver.set_active(host.make_driver())
host.STORED_TOKENS = 5
num_layers = 32
results = []
with torch.no_grad(), assuming(Target.parse(host.GPU)):
    for batch in (1, 2):
        stack = host.make_stack(num_layers, batch)
        counts = Counter()
        for _ in range(3):
            stack.step()  # a warm-up
        mask = stack.make_mask()
        stack.make_mask = lambda: mask
        sys.setprofile(lambda _frame, event, _argument: counts.update([event]))
        stack.step()
        sys.setprofile(None)
        results.append([counts["call"] / num_layers, counts["c_call"] / num_layers])
print(json.dumps(results))
"""
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=make_environment()
    )
    assert process.returncode == 0, process.stderr
    (unpadded_calls, unpadded_c_calls), (padded_calls, padded_c_calls) = json.loads(process.stdout)
    knobs = pytest.importorskip("triton").knobs
    # From Triton 3.9 on, each of the two launches makes two more calls, to read a setting.
    max_calls = 48 if hasattr(knobs.compilation, "fpsan_homomorphic_casts") else 44
    assert max(unpadded_calls, padded_calls) <= max_calls, process.stdout
    assert unpadded_c_calls <= 45, process.stdout
    assert padded_c_calls <= 50, process.stdout


# The models have different windows. With 1,000 tokens, the last page is partly filled.
@pytest.mark.parametrize(
    "model_name", ["Gemma 3 270M", pytest.param("gpt-oss-20b", marks=pytest.mark.full)]
)
def test_windows_and_short_prompts_need_little_more_than_half_the_memory(model_name):
    config = make_config(model_name)
    with torch.inference_mode():
        rows = list(measure_prompts(model_name, 1000, "torch"))
    expected_rows = itertools.product(("growing", "preallocated"), PREFILL_MODES)
    assert {(row["cache"], row["prompt"]) for row in rows} == set(expected_rows)
    num_full_layers = sum(layer_type == "full_attention" for layer_type in config.layer_types)
    for row in rows:
        assert 0.5 < row["ratio"] <= 0.56, row  # half, and the scales and free slots
        # transformers' caches hold only the tokens inside the window of each layer.
        num_kept = config.sliding_window
        if row["cache"] == "growing":
            num_kept -= 1  # the window includes the next token
        num_window_layers = config.num_hidden_layers - num_full_layers
        num_layer_tokens = num_full_layers * 1000 + num_window_layers * num_kept
        # A value of K or V has 2 bytes.
        token_bytes = 2 * 2 * config.num_key_value_heads * config.head_dim
        assert row["stock_held"] >= num_layer_tokens * token_bytes


def test_a_command_prints_its_rows_and_the_conditions_of_the_run(monkeypatch, capsys):
    def measure(*, turns, progress):
        progress("measuring")
        return {"rows": [{"cache": "a cache", "ms": turns / 3, "values": [1, 2], "low": None}]}

    monkeypatch.setattr(sys, "argv", ["a_benchmark.py", "--turns", "1"])
    shared.main("Description.", measure, shared.TURNS_OPTION)
    output = capsys.readouterr().out
    assert all(text in output for text in ("a cache", "0.3333", "commit: ", "{'turns': 1}"))
    monkeypatch.setattr(sys, "argv", ["a_benchmark.py", "--json", "-", "--turns", "1"])
    shared.main("Description.", measure, shared.TURNS_OPTION)
    result = json.loads(capsys.readouterr().out)
    assert (result["suite"], result["settings"]) == ("a_benchmark", {"turns": 1})
    assert result["rows"] == measure(turns=1, progress=print)["rows"]
