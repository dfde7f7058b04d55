"""Tests of `hf-fp8kv bench speed` and `bench memory`: rows, checks of outputs, and errors."""

import functools
import json

import pytest

from hf_fp8kv.bench import contenders, memory, speed
from hf_fp8kv.bench.contenders import DYNAMIC, FOLDED, PAGED, QUANTIZED, Heads, Setup
from tests.helpers import command_line

pytestmark = pytest.mark.text
SMALL_SIZES = {"context_lengths": (64,), "first_lengths": (48,), "num_turns": 1}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return command_line.save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run_command(monkeypatch, capsys):
    return command_line.make_runner(monkeypatch, capsys)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_speed_reports_all_caches_and_ratios(
    run_command, model_path, monkeypatch, tmp_path, device
):
    """With one turn, a ratio is the quotient of two times. The model's config gives the shape."""
    measure_small = functools.partial(speed.measure_speed, **SMALL_SIZES)
    monkeypatch.setattr(speed, "measure_speed", measure_small)
    json_path = tmp_path / "speed.json"
    options = ("--model", model_path, "--device", device, "--out", str(json_path))
    code, table, err = run_command("bench", "speed", *options)
    assert code == 0, err
    result = json.loads(json_path.read_text())
    assert all(name in table for name in (*PAGED, DYNAMIC))
    assert {"commit", "idle", "hardware", "versions", "date", "command"} <= result.keys()
    assert result["settings"]["heads"] == [4, 2, 16]
    times = {(row["measure"], row["cache"], row["context"]): row["value"]
             for row in result["rows"] if row["unit"] == "ms"}  # fmt: skip
    assert {measure for measure, _, _ in times} == {"decode step", "first call", "256 tokens more"}
    assert {cache for _, cache, _ in times} >= {*PAGED, DYNAMIC, QUANTIZED, FOLDED}
    for row in result["rows"]:
        if row["unit"] == "×":
            measure = row["measure"].removesuffix(", ratio")
            time, base = (times[measure, row[key], row["context"]] for key in ("cache", "against"))
            assert row["value"] == pytest.approx(time / base)


def test_a_step_with_a_wrong_output_raises_an_error(monkeypatch):
    attention = contenders.fp8_paged_attention

    def swapped_attention(module, query, keys, values, *args, **kwargs):
        return attention(module, query, values, keys, *args, **kwargs)

    monkeypatch.setattr(contenders, "fp8_paged_attention", swapped_attention)
    with pytest.raises(RuntimeError, match="expected torch's attention"):
        contenders.make_steps(64, Setup(Heads(4, 2, 16), "torch"))


def test_memory_counts_the_bytes_of_the_format(run_command, model_path, monkeypatch):
    """A token has K and V of two heads with 16 values, and two bytes per dynamic scale."""
    measure_small = functools.partial(memory.measure_memory, measures_growth=False, num_tokens=2048)
    monkeypatch.setattr(memory, "measure_memory", measure_small)
    options = ("--model", model_path, "--device", "cpu", "--memory", "9GiB", "--json")
    code, out, err = run_command("bench", "memory", *options)
    assert code == 0, err
    result = json.loads(out)
    bytes_per_token = {row["cache"]: row["value"] for row in result["rows"] if row["unit"] == "B"}
    assert bytes_per_token.pop("DynamicCache") == 2 * 2 * 16 * 2
    assert bytes_per_token.keys() == PAGED.keys()
    for name, num_bytes in bytes_per_token.items():
        # The block tables add at most 3 %.
        size = 14 if "int6" in name else 16 if "static" in name else 18
        assert num_bytes == pytest.approx(2 * 2 * size, rel=0.03)
    assert {row["model"] for row in result["capacity"]} == {model_path}
    assert result["settings"]["memory_gib"] == 9


@pytest.mark.full
def test_a_process_grows_by_the_size_of_its_cache(monkeypatch):
    """No dense copy of the pages remains."""
    monkeypatch.setattr(memory, "PAGED", {"FP8PagedCache e4m3": PAGED["FP8PagedCache e4m3"]})
    rows = memory.measure_processes(Setup(Heads(8, 8, 128)), 2048)
    growth_mib = {row["cache"]: row["value"] for row in rows if row["unit"] == "MiB"}
    bf16_mib = 8 * 2048 * 2 * 8 * 128 * 2 / 2**20
    assert 0.95 * bf16_mib < growth_mib["DynamicCache"] < 1.1 * bf16_mib
    assert growth_mib["FP8PagedCache e4m3"] < 0.65 * bf16_mib


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (("quantum",), 2, "No such command"),
        (("speed", "--device", "quantum"), 1, "expected auto, cpu, cuda"),
        (("speed", "--out", "/no/such/folder/speed.json"), 2, "an existing folder"),
    ],
)
def test_invalid_arguments_are_rejected_before_a_measurement(
    run_command, model_path, arguments, exit_code, message
):
    model_arguments = ("--model", model_path) if "speed" in arguments else ()
    code, out, err = run_command("bench", *arguments, *model_arguments)
    assert (code, out) == (exit_code, "")
    assert message in " ".join(err.replace("│", " ").split())
    assert "decode steps" not in err
