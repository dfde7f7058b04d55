"""Tests of `benchmarks/`: the reported values are correct, and every command runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from benchmarks import host, latent, serve, shared
from benchmarks.compare import THIS_TREE, compare_trees
from benchmarks.hot_loops import LOOPS, make_loops
from benchmarks.memory import PREFILL_MODES, make_config, measure_prompts, measure_windows
from benchmarks.prefix import measure_prefix
from benchmarks.serve_clients import Answer, Load, Server
from benchmarks.shared import make_environment
from tests.helpers.serve_process import save_chat_model

SMALL_LOAD = Load("small", clients=3, requests=6, words=4, new_tokens=8, blocks=64, long_words=30,
                  streamed=40)  # fmt: skip

# Prefix of the loop "host, update, DynamicCache".
LOOP_PREFIX = "host, update, "


def ignore_progress(*_: object) -> None:
    """Discard a progress message."""


def test_latents_are_compared_with_absorbed_attention_and_dynamic_cache(monkeypatch, capsys):
    """The command prints rows and the conditions of the run, or JSON."""

    def measure_small(**kwargs):
        return latent.measure_latents(
            context_lengths=(70,), head_counts=(4,), backend="torch", **kwargs
        )

    monkeypatch.setattr(sys, "argv", ["latent", "--turns", "1"])
    shared.main("Description.", measure_small, shared.TURNS_OPTION)
    out = capsys.readouterr().out
    assert all(name in out for name in (*latent.PAGED, "commit: ", "'turns': 1"))
    monkeypatch.setattr(sys, "argv", ["latent", "--json", "-", "--turns", "1"])
    shared.main("Description.", measure_small, shared.TURNS_OPTION)
    rows = json.loads(capsys.readouterr().out)["rows"]
    values = {(row["cache"], row["against"]): row["value"] for row in rows}
    baselines = (latent.ABSORBED, latent.DYNAMIC)
    assert values.keys() == {(name, None) for name in (*latent.PAGED, *baselines)} | {
        (name, baseline) for name in latent.PAGED for baseline in baselines
    }
    for name in latent.PAGED:
        ratio = values[name, None] / values[latent.ABSORBED, None]
        assert values[name, latent.ABSORBED] == pytest.approx(ratio)


def test_latent_attention_with_a_wrong_output_raises_an_error(monkeypatch):
    attention = latent.fp8_paged_attention

    def wrong_attention(*args, **kwargs):
        return (attention(*args, **kwargs)[0] * 1.2,)

    monkeypatch.setattr(latent, "fp8_paged_attention", wrong_attention)
    with pytest.raises(RuntimeError, match="expected absorbed attention"):
        latent.make_steps(latent.make_module(num_heads := 4), num_heads, 70, "torch")


def test_a_decode_step_needs_few_calls():
    """Calls are counted, because times depend on the load. Limits are per layer, of 32 layers.

    From Triton 3.9 on, each of two launches reads a setting from the environment by two calls.
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
    command = [sys.executable, "-c", program]
    process = subprocess.run(command, capture_output=True, text=True, env=make_environment())
    assert process.returncode == 0, process.stderr
    plain, padded = json.loads(process.stdout)
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
    command = [sys.executable, "-c", program]
    process = subprocess.run(command, capture_output=True, text=True, env=make_environment())
    assert process.returncode == 0, process.stderr
    kernels, length = json.loads(process.stdout)
    # The two layers share a schedule.
    assert (kernels.count("_schedule"), kernels.count("_attend")) == (1, 2), kernels
    assert length == host.STORED_TOKENS + 1
    rows = host.measure_host(turns=2, progress=ignore_progress)["rows"]
    values = {(row["cache"], row["layers"]): row["value"] for row in rows}
    stock_name = f"{host.STOCK}, tiny"
    assert values.keys() == {
        (host.PAGED, 1),
        *((name, 32) for name in (host.PAGED, *host.REPLACEMENTS, stock_name)),
        *((f"{name}, padded", 32) for name in (host.PAGED, stock_name)),
    }  # fmt: skip
    assert all(value > 0 for value in values.values())


# The models have different windows. With 1,000 tokens, the last page is partly filled.
@pytest.mark.parametrize(
    "model_name", ["Gemma 3 270M", pytest.param("gpt-oss-20b", marks=pytest.mark.full)]
)
def test_windows_and_short_prompts_need_little_more_than_half_the_memory(model_name):
    config = make_config(model_name)
    with torch.inference_mode():
        rows = list(measure_prompts(model_name, 1000, "torch"))
    assert {(row["form"], row["prompt"]) for row in rows} == {
        (form, mode) for form in ("dynamic", "preallocated") for mode in PREFILL_MODES
    }
    num_full_layers = sum(layer_type == "full_attention" for layer_type in config.layer_types)
    for row in rows:
        assert 0.5 < row["ratio"] <= 0.56, row  # half, and the scales and free slots
        # transformers' caches hold only the tokens inside the window of each layer.
        window = config.sliding_window - (row["form"] == "dynamic")
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
def test_a_prefix_store_is_measured_in_separate_processes(tmp_path: Path):
    model_path = save_chat_model(tmp_path)
    result = measure_prefix(model=model_path, prefix_tokens=200, rounds=1, progress=ignore_progress)
    found_tokens = [(row["store"], row["found"]) for row in result["rows"]]
    # Whole pages of 64 tokens are found.
    assert found_tokens == [("none", 0), ("empty", 0), ("full", 3 * 64)]
    assert result["difference"] < 0.1
    assert result["files"] == 3


def test_summary_has_medians_of_turns_and_percentiles_of_answers():
    servers = {}
    for name, factor in zip(serve.SERVER_NAMES, (1.0, 2.0, 1.5), strict=True):
        server = servers[name] = Server(None, 0, "model")  # type: ignore[arg-type]
        times = [seconds / factor for seconds in range(1, 101)]
        server.answers = [
            Answer(first_time=time, last_time=3 * time, num_tokens=3) for time in times
        ]
        server.throughputs = [10 * factor, 12 * factor, 14 * factor]
    servers[serve.OURS].metrics = {"pages_used": 5, "pages_total": 15, "bytes_total": 2**21}
    servers[serve.STOCK].num_failed = 1
    summary = serve.summarize_load(SMALL_LOAD, servers)
    rows = {(row["measure"], row["server"]): row for row in summary}
    # The stock server's first tokens take 1 to 100 s. A row of a token is in ms, of an answer in s.
    assert rows["first token, p50", serve.STOCK]["value"] == 1000 * 50
    assert rows["first token, p99", serve.STOCK]["value"] == 1000 * 99
    assert rows["next token, p50", serve.OURS]["value"] == 1000 * 50 / 2
    assert rows["whole answer, p90", serve.OURS]["value"] == 3 * 90 / 2
    throughput = rows["throughput", serve.STOCK]
    assert (throughput["value"], throughput["low"], throughput["high"]) == (12, 11, 13)
    assert throughput["failed"] == 1
    assert rows["throughput ratio", serve.UNQUANTIZED]["value"] == 1.5
    assert rows["pages in use, of 15", serve.OURS]["value"] == 5


def test_all_servers_get_pages_of_the_same_total_size(tmp_path):
    config = LlamaConfig(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
                         hidden_size=256, dtype="bfloat16")  # fmt: skip
    config.save_pretrained(tmp_path)
    # A vector of 64 values takes 128 bytes in 16 bits, or 66 bytes in 8 bits with its scale. So 100
    # pages in 16 bits have the bytes of 193 pages in 8 bits.
    stock_bytes, fp8_bytes = 100 * 64 * 2, 193 * (64 + 2)
    assert serve.count_equal_pages(str(tmp_path), 100, 16, "fp8") == 193
    assert fp8_bytes <= stock_bytes < fp8_bytes + 66


@pytest.mark.full
def test_all_servers_answer_under_load(tmp_path):
    model_path = save_chat_model(tmp_path)
    result = serve.measure_serving(
        model=model_path, device="cpu", loads=[SMALL_LOAD], page_size=16, turns=1, batch_tokens=64,
        progress=ignore_progress,
    )  # fmt: skip
    rows = {(row["measure"], row["server"]): row for row in result["rows"]}
    for server in serve.SERVER_NAMES:
        assert rows["throughput", server]["failed"] == 0
        for measure in ("throughput", "first token, p50", "largest gap of a stream"):
            assert rows[measure, server]["value"] > 0
    stock_mib = rows["bytes of all pages", serve.STOCK]["value"]
    our_mib = rows["bytes of all pages", serve.OURS]["value"]
    assert our_mib <= stock_mib < 1.1 * our_mib


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
