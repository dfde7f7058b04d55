"""Tests of `benchmarks/`: the reported values are correct, and every command runs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import host, shared
from benchmarks.compare import THIS_TREE, compare_trees
from benchmarks.hot_loops import LOOPS, make_loops
from benchmarks.memory import PREFILL_MODES, make_config, measure_prompts, measure_windows
from benchmarks.reproducible import measure_reproducibility
from benchmarks.shared import make_environment

# The names of the loops that these tests run begin with this.
LOOP_PREFIX = "host, update"


def ignore_progress(*_: object) -> None:
    """Discard a progress message."""


def run_program(program: str) -> Any:
    """Run a program in a process that compiles kernels. Return the JSON that it prints."""
    command = [sys.executable, "-c", program]
    process = subprocess.run(command, capture_output=True, text=True, env=make_environment())
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def test_a_command_prints_its_rows_and_the_conditions_of_the_run(monkeypatch, capsys):
    def measure(*, turns, progress):
        progress("measuring")
        return {"rows": [{"cache": "a cache", "ms": turns / 3, "values": [1, 2], "low": None}]}

    monkeypatch.setattr(sys, "argv", ["a_benchmark.py", "--turns", "1"])
    shared.main("Description.", measure, shared.TURNS_OPTION)
    out = capsys.readouterr().out
    assert all(text in out for text in ("a cache", "0.3333", "commit: ", "{'turns': 1}"))
    monkeypatch.setattr(sys, "argv", ["a_benchmark.py", "--json", "-", "--turns", "1"])
    shared.main("Description.", measure, shared.TURNS_OPTION)
    result = json.loads(capsys.readouterr().out)
    assert (result["suite"], result["settings"]) == ("a_benchmark", {"turns": 1})
    assert result["rows"] == measure(turns=1, progress=ignore_progress)["rows"]


def test_a_decode_step_needs_few_calls():
    """Calls are counted, because times depend on the load. Limits are per layer, of 32 layers.

    From Triton 3.9 on, each of the two launches makes two more calls, to read a setting.
    """
    program = """
import json, sys, torch, triton
from collections import Counter
from benchmarks import host
from hf_fp8kv.ops.triton.target import Target, assuming
triton.runtime.driver.set_active(host.make_driver())
host.STORED_TOKENS, results = 5, []
with torch.no_grad(), assuming(Target.parse(host.GPU)):
    for batch in (1, 2):
        stack, counts = host.make_stack(32, batch), Counter()
        for _ in range(3):
            stack.step()
        mask = stack.make_mask()
        stack.make_mask = lambda: mask
        sys.setprofile(lambda _frame, event, _argument: counts.update([event]))
        stack.step()
        sys.setprofile(None)
        results.append([counts["call"] / 32, counts["c_call"] / 32])
print(json.dumps(results))
"""
    plain, padded = run_program(program)
    knobs = pytest.importorskip("triton").knobs
    limit = 64 if hasattr(knobs.compilation, "fpsan_homomorphic_casts") else 60
    assert plain[0] <= limit, plain
    assert plain[1] <= 45, plain
    assert padded[0] <= limit, padded
    assert padded[1] <= 50, padded


@pytest.mark.full
def test_the_host_benchmark_launches_only_the_kernels_of_a_step():
    """Triton runs in a separate process, with a driver that ignores launches."""
    program = """
import json, torch, triton
from benchmarks import host
from hf_fp8kv.ops.triton.target import Target, assuming, recording
triton.runtime.driver.set_active(host.make_driver())
with torch.no_grad(), assuming(Target.parse(host.GPU)):
    stack = host.make_stack(2)
    with recording(dry_run=True) as recorded:
        stack.step()
kernels = [launch.kernel.__name__ for launch in recorded.launches]
print(json.dumps([kernels, stack.cache.host_length()]))
"""
    kernels, length = run_program(program)
    # The two layers share a schedule.
    assert (kernels.count("_schedule"), kernels.count("_attend")) == (1, 2), kernels
    assert length == host.STORED_TOKENS + 1
    rows = host.measure_host(turns=2, progress=ignore_progress)["rows"]
    names = [host.PAGED, f"{host.STOCK}, tiny"]
    assert [row["cache"] for row in rows] == [*names, *(f"{name}, padded" for name in names)]
    assert all(row["value"] > 0 for row in rows)


# The models have different windows. With 1,000 tokens, the last page is partly filled.
@pytest.mark.parametrize(
    "model_name", ["Gemma 3 270M", pytest.param("gpt-oss-20b", marks=pytest.mark.full)]
)
def test_windows_and_short_prompts_need_little_more_than_half_the_memory(model_name):
    config = make_config(model_name)
    with torch.inference_mode():
        rows = list(measure_prompts(model_name, 1000, "torch"))
    assert {(row["cache"], row["prompt"]) for row in rows} == {
        (kind, mode) for kind in ("growing", "preallocated") for mode in PREFILL_MODES
    }
    num_full_layers = sum(layer_type == "full_attention" for layer_type in config.layer_types)
    for row in rows:
        assert 0.5 < row["ratio"] <= 0.56, row  # half, and the scales and free slots
        # transformers' caches hold only the tokens inside the window of each layer.
        window = config.sliding_window - (row["cache"] == "growing")
        cached_tokens = num_full_layers * 1000
        cached_tokens += (config.num_hidden_layers - num_full_layers) * window
        assert row["stock_held"] >= cached_tokens * config.num_key_value_heads * config.head_dim * 4


@pytest.mark.full
def test_memory_is_measured_in_a_separate_process():
    result = measure_windows(
        models=("Gemma 3 270M",), prompt_lengths=(80,), progress=ignore_progress
    )
    assert len(result["rows"]) == 6
    assert all(row["peak"] is None or row["peak"] >= 0 for row in result["rows"])
    with pytest.raises(RuntimeError, match="ended with exit code 1"):
        measure_windows(models=("GPT-5",), progress=ignore_progress)


@pytest.mark.full
def test_all_calls_of_a_deterministic_model_give_the_same_bits():
    """A prefix store and an engine read the plan of the model, as the compared caches do."""
    result = measure_reproducibility(
        combinations=1, models="llama", dtypes="float32", progress=ignore_progress
    )
    differences = {row["kind"]: row["logits"] + row["pages"] for row in result["rows"]}
    assert {"prefix", "engine"} < differences.keys()
    assert set(differences.values()) == {0}, differences


def test_loops_can_run_again():
    """A loop removes the tokens that it adds, so all turns measure the same length."""
    loops = make_loops("torch", LOOP_PREFIX)
    assert all(loop() > 0 for loop in loops.values() for _ in range(2))


@pytest.mark.full
def test_two_trees_are_measured_alternately(tmp_path: Path, capfd):
    options = {"turns": 2, "progress": ignore_progress}
    result = compare_trees(THIS_TREE, backend="torch", loop_prefix=LOOP_PREFIX, **options)
    rows = result["rows"]
    assert [row["loop"] for row in rows] == [name for name in LOOPS if name.startswith(LOOP_PREFIX)]
    assert all(row["old"] > 0 and row["new"] > 0 for row in rows)
    (tmp_path / "hf_fp8kv.py").write_text("raise ImportError('no package here')")
    with pytest.raises(RuntimeError, match="ended with exit code 1"):
        compare_trees(tmp_path, tmp_path, **options)
    assert "no package here" in capfd.readouterr().err
