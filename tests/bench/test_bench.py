"""Tests of `hf-fp8kv bench speed` and `memory`: correct values, and no time for a wrong step."""

import functools
import json

import pytest

from hf_fp8kv.bench import contenders, memory, speed
from hf_fp8kv.bench.contenders import DYNAMIC, FOLDED, PAGED, QUANTIZED, Setup, take_turns
from hf_fp8kv.bench.reporting import quartiles
from hf_fp8kv.formats import DISTINCT
from tests.helpers import command_line

pytestmark = pytest.mark.text
SMALL = {"context": (64,), "first": (48,), "turns": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return command_line.save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(monkeypatch, capsys):
    return command_line.runner(monkeypatch, capsys)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_speed_reports_every_cache_and_its_ratios(run, model, monkeypatch, tmp_path, device):
    """A ratio of one turn is the quotient of two times. The model's config gives the shape."""
    small = functools.partial(speed.measure_speed, **SMALL)
    monkeypatch.setattr(speed, "measure_speed", small)
    path = tmp_path / "speed.json"
    options = ("--model", model, "--device", device, "--json", str(path))
    code, table, err = run("bench", "speed", *options)
    assert code == 0, err
    assert "decode steps at 64 tokens" in err
    result = json.loads(path.read_text())
    assert {row["cache"] for row in result["rows"] if row["cache"] in table} >= {*PAGED, DYNAMIC}
    assert {"commit", "idle", "hardware", "versions", "date", "command"} <= result.keys()
    assert result["command"].startswith("hf-fp8kv bench speed")
    assert result["hardware"]["device"] == device
    assert result["settings"]["heads"] == [4, 2, 16]
    times = {(row["measure"], row["cache"], row["context"]): row["value"]
             for row in result["rows"] if row["unit"] == "ms"}  # fmt: skip
    assert all(value > 0 for value in times.values())
    steps = {cache for measure, cache, _ in times if measure == "decode step"}
    names = {f"FP8PagedCache {fmt.name.removeprefix('fp8_')}" for fmt in DISTINCT}
    assert steps == {*names, *PAGED, DYNAMIC, QUANTIZED, FOLDED}
    assert {measure for measure, _, _ in times} == {"decode step", "first call", "256 tokens more"}
    ratio_rows = [row for row in result["rows"] if row["unit"] == "×"]
    assert len(ratio_rows) == 3 * len(PAGED) + 2
    for row in ratio_rows:
        measure = row["measure"].removesuffix(", ratio")
        time, base = (times[measure, row[name], row["context"]] for name in ("cache", "against"))
        assert row["value"] == pytest.approx(time / base)


def test_a_wrong_step_is_not_timed(monkeypatch):
    correct = contenders.fp8_paged_attention

    def swapped(module, query, keys, values, *args, **kwargs):
        return correct(module, query, values, keys, *args, **kwargs)

    monkeypatch.setattr(contenders, "fp8_paged_attention", swapped)
    with pytest.raises(RuntimeError, match="expected torch's attention"):
        contenders.make_steps(64, Setup((4, 2, 16), "torch"))


def test_turns_alternate_in_changing_order():
    order = []
    steps = {name: lambda name=name: order.append(name) for name in "abc"}
    seconds = take_turns(steps, 5)
    turns = ["".join(order[i : i + 3]) for i in range(0, 18, 3)]
    assert {"".join(sorted(turn)) for turn in turns} == {"abc"}
    assert len(set(turns)) > 2
    assert {len(durations) for durations in seconds.values()} == {5}
    assert quartiles([3.0]) == (3.0, None, None)
    assert quartiles([5.0, 1.0, 2.0, 4.0, 3.0]) == (3.0, 2.0, 4.0)


def test_memory_counts_the_bytes_of_the_format(run, model, monkeypatch, tmp_path):
    """A token has K and V of two heads of 16 values, and two bytes per dynamic scale."""
    small = functools.partial(memory.measure_memory, grow=False, tokens=2048)
    monkeypatch.setattr(memory, "measure_memory", small)
    path = tmp_path / "memory.json"
    options = ("--model", model, "--device", "cpu", "--memory-gib", "9")
    code, out, err = run("bench", "memory", *options, "--json", str(path))
    assert code == 0, err
    assert "bytes per token" in out
    assert "fp8, dynamic scales" in out
    result = json.loads(path.read_text())
    assert {"commit", "idle", "hardware", "versions", "date", "command"} <= result.keys()
    bytes_per_token = {row["cache"]: row["value"] for row in result["rows"] if row["unit"] == "B"}
    assert bytes_per_token.pop("DynamicCache") == 2 * 2 * 16 * 2
    assert bytes_per_token.keys() == PAGED.keys()
    for name, value in bytes_per_token.items():
        # The cache's own tables are small.
        assert value == pytest.approx(2 * 2 * (16 if "static" in name else 18), rel=0.03)
    assert {row["model"] for row in result["capacity"]} == {model}
    assert result["settings"]["memory_gib"] == 9
    code, out, err = run("bench", "memory", *options, "--json", "-")
    assert json.loads(out)["rows"] == result["rows"], "expected JSON instead of the table"


@pytest.mark.full
def test_a_process_grows_by_the_size_of_its_cache(monkeypatch):
    """No dense copy of the pages remains. A process that fails explains why."""
    rows = memory.measure_processes(Setup((8, 8, 128)), 2048)
    growth = {row["cache"]: row["value"] for row in rows if row["unit"] == "MiB"}
    stored = 8 * 2048 * 2 * 8 * 128 * 2 / 2**20
    assert 0.95 * stored < growth["DynamicCache"] < 1.1 * stored
    assert growth["FP8PagedCache e4m3"] < 0.65 * stored
    monkeypatch.setattr(memory, "PAGED", {"FP8PagedCache e4m3": {}})
    with pytest.raises(RuntimeError, match="BackendError"):
        memory.measure_processes(Setup((4, 2, 16), "no such backend"), 64)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("quantum",), 2, "No such command"),
        (("speed", "--device", "quantum"), 2, "expected auto, cpu, cuda"),
        (("speed", "--json", "/no/such/folder/speed.json"), 2, "an existing folder"),
    ],
)
def test_invalid_options_are_rejected(run, model, options, code, message):
    arguments = () if options[0] == "quantum" else ("--model", model)
    exit_code, out, err = run("bench", *options, *arguments)
    assert (exit_code, out) == (code, "")
    assert message in " ".join(err.replace("│", " ").split())
    assert "decode steps" not in err
