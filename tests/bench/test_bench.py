"""The benchmark runs, says what it measured, and does not time what is wrong.

Speed itself is asserted only in the full tier: a busy machine is no reason for a red test.
"""

import io
import json

import pytest
import torch
from rich.console import Console

from hf_fp8kv.bench import contenders, cpu, cpu_memory, latent
from hf_fp8kv.cache import first_write
from hf_fp8kv.formats import DISTINCT

SMALL = {
    "context": (64, 128), "heads": (4, 2, 16), "pairs": 2, "backend": "torch",
    "latent_context": (200,), "latent_heads": (4,),
}  # fmt: skip


@pytest.fixture(scope="module")
def chosen() -> list[torch.Size]:
    """The queries of every choice that was made."""
    return []


@pytest.fixture(scope="module")
def result(chosen) -> dict[str, object]:
    choose = first_write.choose_plan

    def count(query, *args):
        chosen.append(query.shape)
        return choose(query, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_write, "choose_plan", count)
        patch.setattr(cpu, "_FIRST_TOKENS", (48, 64))
        return cpu.run_cpu_suite(**SMALL, memory_tokens=None)


def test_it_is_json(result):
    assert json.loads(json.dumps(result)) == result


def test_it_says_where_and_how(result):
    assert set(result) == {
        "suite", "date", "command", "versions", "hardware", "settings", "rows"
    }  # fmt: skip
    assert result["hardware"]["threads"] == torch.get_num_threads()
    assert result["hardware"]["cpu"]
    # A build for GPUs has its CUDA in `torch.__version__` alone.
    assert torch.__version__.startswith(result["versions"]["torch"])
    assert result["settings"]["pairs"] == 2


def test_every_pair_is_measured_at_every_context(result):
    found = {
        (row["cache"], row["against"], row["context"])
        for row in result["rows"]
        if row["measure"] == "ratio"
    }
    for cache in cpu.PAGED:
        for other in (cpu.DYNAMIC, cpu.QUANTIZED, cpu.FOLDED):
            for context in SMALL["context"]:
                assert (cache, other, context) in found


def test_latents_are_compared_with_expanding_and_with_torch(result):
    rows = [row for row in result["rows"] if row["measure"] == "latent, 4 heads"]
    found = {(row["cache"], row["against"]) for row in rows}
    names = {*latent.PAGED, latent.ABSORBED, latent.DYNAMIC}
    assert found == {(name, None) for name in names} | {
        (name, other) for name in latent.PAGED for other in (latent.ABSORBED, latent.DYNAMIC)
    }


def test_a_wrong_step_over_latents_is_not_timed(monkeypatch):
    right = latent.fp8_paged_attention

    def wrong(*args, **kwargs):
        out, weights = right(*args, **kwargs)
        return out * 1.2, weights

    monkeypatch.setattr(latent, "fp8_paged_attention", wrong)
    with pytest.raises(RuntimeError, match="expected absorbed attention"):
        latent.make_steps(latent.make_module(4), 4, 70, "torch")


def test_rows_are_alike(result):
    keys = {"measure", "cache", "context", "against", "value", "unit", "low", "high", "target"}
    for row in result["rows"]:
        assert set(row) == keys
        assert row["value"] > 0
        assert row["low"] is None or row["low"] <= row["value"] <= row["high"]
    measures = {row["measure"] for row in result["rows"]}
    assert measures == {
        "decode step", "ratio", "cost per token", "256 tokens more", "first call", "update",
        "deepcopy",
        "reorder 4 beams", "host, per layer", "bytes per token", "latent, 4 heads",
    }  # fmt: skip


def test_every_format_is_measured(result):
    cached = {row["cache"] for row in result["rows"] if row["measure"] == "decode step"}
    for fmt in DISTINCT:
        assert f"FP8PagedCache {fmt.name.removeprefix('fp8_')}" in cached


def test_targets_are_those_of_the_longest_context(result):
    speed = [row for row in result["rows"] if row["against"] in cpu.TARGETS]
    for row in speed:
        expected = cpu.TARGETS[row["against"]] if row["context"] == 128 else None
        assert row["target"] == expected


def test_rotated_formats_are_held_against_e3m4(result):
    rows = [row for row in result["rows"] if row["against"] == cpu.E3M4]
    names = ("FP8PagedCache e2m5", "FP8PagedCache int8")
    expected = {(name, context) for name in names for context in SMALL["context"]}
    assert {(row["cache"], row["context"]) for row in rows} == expected
    assert {row["target"] for row in rows} == {1.05}
    for name in names:
        cache = contenders.make_paged((4, 2, 16), "auto", name)
        assert all(side.rotated for plan in cache.plan.values() for side in plan)


def test_first_calls_with_a_choice_are_held_against_those_without(result, chosen):
    rows = [row for row in result["rows"] if row["measure"] == "first call"]
    default, safe = "FP8PagedCache default", "FP8PagedCache e3m4, K centered"
    expected = [(name, tokens) for tokens in (48, 64) for name in (default, safe)]
    assert [(row["cache"], row["context"]) for row in rows] == expected
    against = [row for row in result["rows"] if row["against"] == safe]
    assert [(row["cache"], row["context"]) for row in against] == [(default, 48), (default, 64)]
    # In each turn, the one before the first among them, one of the two decides.
    assert chosen == [(4, 48, 16)] * 3 + [(4, 64, 16)] * 3


def test_the_table(result):
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(cpu.format_table(result))
    text = console.export_text()
    for name in (*cpu.PAGED, cpu.DYNAMIC, cpu.FOLDED, "bytes per token", "≤ 0.35"):
        assert name in text


def test_turns_are_interleaved_in_changing_order():
    order = []
    steps = {name: lambda name=name: order.append(name) for name in "abc"}
    seconds = contenders.take_turns(steps, 5)
    turns = ["".join(order[i : i + 3]) for i in range(0, 18, 3)]
    assert {"".join(sorted(turn)) for turn in turns} == {"abc"}
    assert len(set(turns)) > 2
    assert {len(taken) for taken in seconds.values()} == {5}


def test_what_is_wrong_is_not_timed(monkeypatch):
    right = contenders.fp8_paged_attention

    def wrong(*args, **kwargs):
        out, weights = right(*args, **kwargs)
        return out * 1.05, weights

    monkeypatch.setattr(contenders, "fp8_paged_attention", wrong)
    with pytest.raises(RuntimeError, match="expected torch's attention"):
        contenders.make_steps(64, (4, 2, 16), "torch")


def test_bytes_meet_their_targets():
    rows = cpu_memory.measure_bytes((32, 8, 128), "torch")
    ratios = [row for row in rows if row["measure"] == "ratio"]
    assert len(ratios) == len(cpu.PAGED)
    for row in ratios:
        assert row["value"] <= row["target"]


@pytest.mark.full
def test_memory_of_processes():
    """Two processes that grow: no dense copy of the pages stays anywhere."""
    rows = cpu_memory.measure_processes(2048, (8, 8, 128), "auto")
    grown = {row["cache"]: row["value"] for row in rows if row["unit"] == "MiB"}
    stored = 8 * 2048 * 2 * 8 * 128 * 2 / 2**20
    assert 0.95 * stored < grown["DynamicCache"] < 1.1 * stored
    assert grown["FP8PagedCache e4m3"] < 0.65 * stored


@pytest.mark.full
def test_a_process_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(cpu_memory, "PAGED", {"FP8PagedCache e4m3": {}})
    with pytest.raises(RuntimeError, match="BackendError"):
        cpu_memory.measure_processes(64, (4, 2, 16), "no such backend")


@pytest.mark.full
def test_the_speed_that_is_promised():
    result = cpu.run_cpu_suite(context=(1024, 16384), memory_tokens=None, latent_context=())
    for row in result["rows"]:
        if row["target"] is not None:
            assert row["value"] <= row["target"], row
    [growth] = [row for row in result["rows"] if row["measure"] == "cost per token"]
    assert growth["value"] < 1.5
    updates = {
        row["context"]: row["value"]
        for row in result["rows"]
        if row["measure"] == "update" and "FP8" in row["cache"]
    }
    assert updates[16384] < 2 * updates[64]
