"""Tests of the GPU benchmark in dry runs, which have tiny shapes, any device and no timing.

A contender with a wrong result must not get a time, and a failing contender must not end the run.
"""

import functools
import inspect
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks.gpu import (
    attention,
    baselines,
    cached,
    end_to_end,
    first,
    latent,
    rival_files,
    rival_kernels,
    suite,
    write,
)
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.record import Record, summarize
from benchmarks.gpu.shapes import BF16, E3M4, E4M3, FULL, PAGE_FORMATS, TINY, Case
from benchmarks.gpu.stage import Stage
from hf_fp8kv import ops

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
DRY_RUN = {"device": "cpu", "backend": "torch", "is_dry": True}
# Names of contenders.
LATENT_STEPS = {"e3m4", "e4m3", "bf16 pages"}
LATENT_KERNELS = {f"{name} kernel" for name in LATENT_STEPS}


@pytest.fixture
def record() -> Record:
    return Record(Stage("cpu", is_dry=True))


def find_failures(record, measure, *args):
    """Measure a section, assert that failed contenders have no time, and return their names."""
    with torch.no_grad():
        measure(record, *args)
    assert record.rows
    assert all(("failed" in row) != ("us" in row) for row in record.rows), record.rows
    return {row["name"] for row in record.rows if "failed" in row}


# -- dry runs --------------------------------------------------------------------------------------


def test_every_section_has_rows_and_can_be_printed(monkeypatch, tmp_path, capsys):
    """Compiled caches are left to the full tier."""
    monkeypatch.setattr(end_to_end, "CONTENDERS", end_to_end.CONTENDERS[:2])
    monkeypatch.setattr(end_to_end, "OTHER_CONTENDERS", [])
    monkeypatch.setattr(suite, "TINY", replace(TINY, write_batches=(1,)))
    json_path = tmp_path / "gpu.json"
    result = suite.run_suite(**DRY_RUN, json_path=json_path)
    assert json.loads(json_path.read_text()) == json.loads(json.dumps(result))
    assert not [row for row in result["rows"] if "failed" in row]
    # No kernels of other projects are installed.
    assert {row["section"] for row in result["rows"]} == {*suite.SECTIONS} - {"other kernels"}
    assert len([row for row in result["rows"] if row["case"].startswith("first token")]) == 3
    decode_names = {row["name"] for row in result["rows"] if row["section"] == "decode"}
    assert decode_names == {
        "e4m3", "e3m4", "int8", "bf16 pages", "sdpa math", "sdpa math folded",
        *(f"{name} left padded" for name in ("e4m3", "e3m4", "bf16 pages")),
    }  # fmt: skip
    extend_names = {row["name"] for row in result["rows"] if row["section"] == "extend"}
    assert {"e4m3 preallocated", "e4m3 left padded"} < extend_names
    for row in result["rows"]:
        if row["section"] in ("decode", "layer", "extend"):
            assert 0 <= row["error"] < 0.01, row
            rate = row["moved"] / row["us"] / 1e3
            read_rate = result["ceilings"]["read_gb_per_s"]
            assert (row["gb_per_s"], row["of_read"]) == pytest.approx((rate, rate / read_rate))
    assert main(["--from", str(json_path)]) == 0
    output = capsys.readouterr().out
    for text in ("DRY RUN", "decode: us, share of the read bandwidth", "2 x 70", "not measured"):
        assert text in output


@pytest.fixture
def fake_cuda(monkeypatch):
    """Replace torch.cuda with a fake for CPU tensors, whose events are 1 ms apart."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    cuda = mock.MagicMock()
    cuda.Event.return_value.elapsed_time.return_value = 1.0
    properties = {"name": "stand-in", "major": 9, "minor": 0, "multi_processor_count": 4}
    cuda.get_device_properties.return_value = mock.Mock(total_memory=2**34, L2_cache_size=2**14)
    cuda.get_device_properties.return_value.configure_mock(**properties)
    for name in (
        "Stream", "current_stream", "stream", "graph", "CUDAGraph", "Event", "synchronize",
        "get_device_properties",
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(Stage, "is_gpu", property(lambda _self: True))
    return cuda


@pytest.mark.full
def test_a_dry_run_measures_every_contender():
    result = suite.run_suite(**DRY_RUN, seconds=1200.0)
    assert {section["error"] for section in result["sections"]} == {None}
    # The offloaded cache of transformers creates a CUDA stream.
    failed_names = {row["name"] for row in result["rows"] if "failed" in row}
    assert failed_names <= {end_to_end.STOCK_OFFLOADED}
    rows = {row["name"]: row for row in result["rows"] if row["section"] == "end to end"}
    paged, paged_auto = rows[end_to_end.PAGED], rows[end_to_end.PAGED_AUTO]
    assert {
        end_to_end.FLASH,
        *(contender.name for contender in end_to_end.CONTENDERS),
    } <= rows.keys()
    assert paged["cache_bytes"] < 0.6 * paged_auto["cache_bytes"]


def test_kernels_are_timed_in_graphs(fake_cuda):
    """The fake clock measures 0.4 ms for any interval. A note has the reason for no graph."""
    calls = []
    fake_cuda.Event.return_value.elapsed_time.return_value = 0.4
    timing = Stage("cpu").time_steps([lambda: calls.append(1)] * 3)
    # Two rounds warm up, one round estimates the time, and the graph has rounds for 2 ms.
    assert timing["calls"] == 3 * 6
    assert len(calls) == 2 * 3 + 3 + 3 * 6
    assert timing["us"] == pytest.approx(400 / 18)
    assert [Stage("cpu").count_buffers(size) for size in (2**14, 2**30, 16)] == [4, 1, 256]
    fake_cuda.graph.side_effect = RuntimeError("operation not permitted when capturing\nmore")
    timing = Stage("cpu").time_steps([lambda: None])
    assert timing["note"] == "no graph: operation not permitted when capturing"


def test_the_command_line_rejects_invalid_arguments(tmp_path, capsys):
    (quality_file := tmp_path / "other.json").write_text('{"suite": "quality"}')
    cases = [(["--from", str(quality_file)], "that --json wrote")]
    if not torch.cuda.is_available():
        cases.append(([], "expected a CUDA"))
    for arguments, message in cases:
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        assert message in capsys.readouterr().err


def test_contenders_of_generate_alternate_in_rounds(record, monkeypatch):
    """A contender that fails in a round has no more rounds, and all others continue."""
    names, generate = [], end_to_end.Run._generate

    def generate_or_fail(run):
        names.append(run.contender.name)
        if len(names) == 5:
            raise ValueError("lost\na page")
        return generate(run)

    monkeypatch.setattr(end_to_end.Run, "_generate", generate_or_fail)
    model = end_to_end.make_model(TINY, record)
    contenders, sizes = end_to_end.CONTENDERS[:2], replace(TINY, num_rounds=3)
    end_to_end._measure_contenders(record, "s", model, sizes, "torch", contenders, ((2, 40),))
    first, second = (contender.name for contender in contenders)
    assert names == [first, second] * 2 + [first, second, second]
    assert [row["rounds"] for row in record.rows] == [1, 3]
    assert record.rows[0]["failed"] == "ValueError: lost\na page"
    row = record.rows[1]
    assert 0 < row["low_per_s"] <= row["tokens_per_s"] <= row["high_per_s"]
    assert row["first_ms"] <= 1e3 * row["full_speed_s"]


# -- wrong results ---------------------------------------------------------------------------------


# Each of these functions returns the given function with a defect.


def scale_output(function):
    def call_and_scale(*args, **kwargs):
        output = function(*args, **kwargs)
        return (output[0] * 1.05, *output[1:]) if isinstance(output, tuple) else output * 1.05

    return call_and_scale


def make_one_value_nan(function):
    def call_and_change(*args, **kwargs):
        output = function(*args, **kwargs)
        output[-1, -1, 0, 0] = torch.nan
        return output

    return call_and_change


def drop_last_tokens(function):
    def attend_to_fewer_tokens(query, pages, lengths, *args, **kwargs):
        return function(query, pages, (lengths - 8).clamp(min=1), *args, **kwargs)

    return attend_to_fewer_tokens


def drop_mask(function):
    return lambda module, query, key, value, _mask: function(module, query, key, value, None)


def flip_bit(function):
    def write_and_flip(pages, *args, **kwargs):
        function(pages, *args, **kwargs)
        pages.v_codes.view(torch.uint8)[-1, -1, -1, -1] ^= 1

    return write_and_flip


# Measurements: a function, and its arguments after the record.
LATENT_CALL = (latent.measure, TINY, "torch")
PADDED_CASE = Case((130, 130), TINY.heads, padding=(0, 65))
CACHED_CALL = (cached.measure_attention, "decode", PADDED_CASE, E4M3, "torch")
RAGGED_CASE = Case((1, 33, 130), TINY.heads, label="ragged")
RAGGED_CALL = (attention.measure_pages, TINY, "torch", "decode", RAGGED_CASE, E4M3)
WRITE_CALL = (write.measure, replace(TINY, write_batches=(1,), written_tokens=70), "torch")
SDPA_CALL = (functools.partial(baselines.measure_decode, with_gqa=True), TINY.decode_cases[0])
# A module, its function, a defect for it, the measurement, and the contenders that must fail.
DEFECTS = [
    (ops, "attend", scale_output, LATENT_CALL, LATENT_STEPS | LATENT_KERNELS),
    (ops, "attend", drop_last_tokens, RAGGED_CALL, {"e4m3"}),
    (ops, "attend", make_one_value_nan, RAGGED_CALL, {"e4m3"}),
    (ops, "write", flip_bit, WRITE_CALL, {fmt.name for fmt in PAGE_FORMATS}),
    (cached, "fp8_paged_attention", drop_mask, CACHED_CALL, {"e4m3"}),
    (latent, "fp8_paged_attention", scale_output, LATENT_CALL, LATENT_STEPS),
    (latent, "sdpa_attention_forward", scale_output, LATENT_CALL, {latent.STOCK}),
    # Attention to expanded latents is correct, but the row is for stored latents.
    (latent.latent, "reads_stored_latents", lambda _: lambda *_: False, LATENT_CALL, LATENT_STEPS),
    (baselines, "attend_grouped", scale_output, SDPA_CALL, {"sdpa math"}),
]  # fmt: skip


@pytest.mark.parametrize(("module", "name", "add_defect", "measure", "failed_names"), DEFECTS)
def test_a_wrong_contender_fails_without_a_time(
    record, monkeypatch, module, name, add_defect, measure, failed_names
):
    function = getattr(module, name)
    monkeypatch.setattr(module, name, functools.wraps(function)(add_defect(function)))
    assert find_failures(record, *measure) == failed_names


# -- failures --------------------------------------------------------------------------------------


def test_a_failure_ends_neither_the_section_nor_the_run(record, monkeypatch):
    monkeypatch.setattr(ops, "attend", mock.Mock(side_effect=ValueError("no such kernel")))
    assert find_failures(record, *RAGGED_CALL) == {"e4m3"}
    assert record.rows[0]["failed"] == "ValueError: no such kernel"
    failing_section = mock.Mock(side_effect=AttributeError("a mistake"))
    monkeypatch.setitem(suite.SECTIONS, "write", failing_section)
    result = suite.run_suite(**DRY_RUN, sections=("write", "ceilings"))
    errors = [section["error"] for section in result["sections"]]
    assert errors == ["AttributeError: a mistake", None]
    assert result["ceilings"]["read_gb_per_s"] > 0
    assert summarize(result)["errors"] == ["write"]


# -- compiling first -------------------------------------------------------------------------------


def test_each_row_is_compiled_by_exactly_one_process(monkeypatch):
    """Compiling measures no times, and calls no attention of torch or transformers."""
    timed = []
    monkeypatch.setattr(Stage, "time_steps", lambda *args, **_kwargs: timed.append(args) or {})

    def count_rows(index, num_processes):
        rows = suite.compile_shard(
            "cpu", "torch", index, num_processes, tuple(suite.SECTIONS), TINY, True
        )
        assert not [row for row in rows if "failed" in row]
        return Counter((row["section"], row["case"], row["name"]) for row in rows)

    counts = count_rows(0, 1)
    assert len(timed) == counts.total()
    assert count_rows(0, 2) + count_rows(1, 2) == counts
    assert {section for section, *_ in counts} == set(suite.COMPILED_SECTIONS)
    rows = {(section, name) for section, _, name in counts}
    sections, formats = ("decode", "write", "latent"), ("e4m3", "e3m4", "bf16 pages")
    assert rows >= set(itertools.product(sections, formats))
    names = {name for _, name in rows}
    assert not {latent.STOCK, latent.ABSORBED} & names
    assert not [name for name in names if name.startswith("sdpa")]


def hang(*_args):
    time.sleep(600)


def test_a_process_that_hangs_does_not_end_the_run(monkeypatch):
    monkeypatch.setattr(suite, "compile_shard", hang)
    monkeypatch.setattr(suite, "COMPILE_SECONDS", 0.5)
    result = suite.run_suite(
        **DRY_RUN, sections=("ceilings", "write"), seconds=1000.0, num_processes=2
    )
    compiling = result["settings"]["compiling"]
    assert (compiling["processes"], compiling["failed"]) == (2, 2)
    assert result["rows"]
    assert not multiprocessing.active_children()


def test_a_case_counts_the_bytes_and_operations_of_visible_tokens():
    case = Case((32768,) * 16)
    assert case.bytes_read(E4M3) == case.tokens_read * 8 * 130 * 2
    assert case.flops == case.tokens_read * 32 * 128 * 4
    # Three new tokens after two stored tokens attend to three, four and five tokens.
    assert Case((5,), num_new_tokens=3).flops == (3 + 4 + 5) * 32 * 128 * 4
    assert Case((100,) * 4).pad_left().tokens_read == 400 - 74
    # A token has 512 codes, two scales, and a RoPE part of 64 values in 16 bits.
    latent_case = FULL.latent_cases[0]
    assert latent_case.bytes_read(E3M4) == latent_case.tokens_read * 644


# -- Triton and other projects ---------------------------------------------------------------------


def test_kernels_run_in_the_interpreter(interpreted):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    record = Record(Stage(device, is_dry=True))
    pages_call = (attention.measure_pages, TINY, "triton", "", TINY.decode_cases[0], BF16)
    assert not find_failures(record, *pages_call)
    from benchmarks.gpu.read_kernel import read_all

    source = torch.randint(-(2**31), 2**31 - 1, (4 * 3 * 2 * 64,), dtype=torch.int32)
    expected = functools.reduce(torch.bitwise_xor, source.view(4, 6, 64).unbind(1)).amax(1)
    assert read_all(source.to(device), 4, 64, 2).tolist() == expected.tolist()


def attend_by_table(query, k, v, table, lengths):
    """Return attention of queries `[B, Hq, D]` to pages `[P, H, S, D]` with a block table."""
    group_size = query.shape[1] // k.shape[1]
    out = query.new_empty(*query.shape[:2], v.shape[-1])
    for b, length in enumerate(lengths.tolist()):
        dense = (x[table[b].long()].float().transpose(0, 1).flatten(1, 2) for x in (k, v))
        keys, values = (states[:, :length].repeat_interleave(group_size, 0) for states in dense)
        logits = query[b, :, None].float() @ keys.transpose(1, 2) * query.shape[-1] ** -0.5
        out[b] = (logits.softmax(-1) @ values)[:, 0]
    return out


# A stand-in for vLLM's file, with the same imports, and with the arguments of the function.
VLLM_FILE = """
import torch
import vllm.envs as envs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.helpers import attend_by_table
from vllm.v1.kv_cache_interface import KVQuantMode

assert init_logger(__name__) and not envs.VLLM_BATCH_INVARIANT and not current_platform.is_rocm()
torch.finfo(current_platform.fp8_dtype())

def unified_attention(q, k, v, out, seqused_k, block_table, kv_quant_mode, k_scale_cache,
                      v_scale_cache):
    assert (kv_quant_mode == KVQuantMode.NONE) == (k.dtype == torch.bfloat16)
    assert (kv_quant_mode == KVQuantMode.INT8_PER_TOKEN_HEAD) == (k.dtype == torch.int8)
    if kv_quant_mode >= KVQuantMode.INT8_PER_TOKEN_HEAD:
        k, v = k.float() * k_scale_cache[..., None], v.float() * v_scale_cache[..., None]
    out.copy_(attend_by_table(q, k.transpose(1, 2), v.transpose(1, 2), block_table, seqused_k))
"""
VLLM_NAMES = {f"vllm triton {fmt}" for fmt in ("bf16", "e4m3", "e4m3 per token", "int8 per token")}

# A stand-in for SGLang's file. Tokens are found by their slots, which begin at `starts`.
SGLANG_FILE = """
import torch
from sglang.kernels.ops.attention.helpers import attend_by_table
from sglang.srt.environ import envs
import sglang.srt.utils as utils

assert not utils.is_hip() and not envs.SGLANG_MLA_DECODE_TUNE.get()

def decode_attention_fwd_grouped(): pass

def decode_attention_fwd(q, k, v, out, starts, slots, sums, lse, splits, max_splits, scale, k_scale,
                         v_scale):
    assert sums.shape == (*q.shape[:2], max_splits, v.shape[-1]) and k_scale == v_scale == 1
    lengths = starts.diff()
    table = torch.nn.utils.rnn.pad_sequence(slots.split(lengths.tolist()), batch_first=True)
    out.copy_(attend_by_table(q, k[:, :, None], v[:, :, None], table, lengths))
"""


def test_kernels_of_other_projects_are_measured_and_checked(record, monkeypatch, tmp_path):
    """Stand-ins replace the files. Their functions have the arguments of the real functions."""
    pytest.importorskip("triton")
    (helpers := tmp_path / "helpers.py").write_text(
        f"import torch\n{inspect.getsource(attend_by_table)}"
    )
    (file := tmp_path / "triton_unified_attention.py").write_text(VLLM_FILE)
    (tmp_path / "decode_attention.py").write_text(SGLANG_FILE)
    paths = rival_files.find_rival_files(tmp_path)
    assert paths[rival_files.VLLM.variable] == str(file)
    for variable, path in paths.items():
        monkeypatch.setenv(variable, path)
    sglang_names = {
        f"sglang triton {fmt}, {splits} splits" for fmt in ("bf16", "e4m3") for splits in (8, 32)
    }
    names = VLLM_NAMES | sglang_names
    sizes = replace(TINY, decode_cases=(TINY.decode_cases[0], RAGGED_CASE))
    assert not find_failures(record, rival_kernels.measure, sizes, "torch"), record.rows
    assert {row["name"] for row in record.rows} == names
    helpers.write_text(helpers.read_text().replace("return out", "return out * 1.05"))
    sizes = replace(TINY, decode_cases=(Case((70, 3), TINY.heads, label="again"),))
    # A kernel that rounds the weights to 8 bits may have an error of 10 %.
    failed_names = {name for name in names if "sglang triton e4m3" not in name}
    assert find_failures(record, rival_kernels.measure, sizes, "torch") == failed_names
    assert not {"vllm", "sglang"} & sys.modules.keys()
    monkeypatch.setenv(rival_files.VLLM.variable, str(tmp_path / "none.py"))
    rival_kernels.measure(record, TINY, "torch")
    assert any("none.py" in message for message in record.skipped)


def test_flash_mla_reads_latents_with_their_rope_parts(record, monkeypatch):
    """A stand-in replaces the package."""

    def attend(query, pool, table, lengths, dim, *_):
        keys = pool.transpose(1, 2)
        return attend_by_table(query[:, 0], keys, keys[..., :dim], table, lengths)[:, None], None

    stand_in = mock.Mock(flash_mla_with_kvcache=attend)
    stand_in.get_mla_metadata.return_value = (None, None)
    monkeypatch.setitem(sys.modules, "flash_mla", stand_in)
    assert not find_failures(record, rival_kernels.measure, TINY, "torch")
    assert {row["name"] for row in record.rows} == {"flash_mla bf16"}


# -- the first minutes on a GPU --------------------------------------------------------------------


@pytest.fixture
def fake_steps(monkeypatch):
    """Replace the processes of `first`. Return the names of their logs, and the exit codes."""

    def fake_run_python(command, log, _limit, tool=()):
        name = log.stem.removeprefix("first-")
        logs.append(name)
        log.write_text("the summary\n")
        if "--json" in command:
            rows = [{"name": name, "tokens_per_s": 2.0, "late_per_s": 3.0}]
            sections = [{"name": name, "skipped": ["vllm: not installed: no module"]}]
            result = json.dumps({"rows": rows, "sections": sections})
            Path(command[command.index("--json") + 1]).write_text(result)
        elif "pytest" in command:
            outcome = "failed" if exit_codes.get(name) else "passed"
            row = {"name": f"{command[-3]}::test[0]", "outcome": outcome, "message": "NaN"}
            Path(os.environ["HF_FP8KV_RESULTS"]).write_text(json.dumps(row) + "\n")
        else:
            assert tool[2] == name
        return exit_codes.get(name, 0)

    logs, exit_codes = [], {}
    monkeypatch.setattr(first, "run_python", fake_run_python)
    monkeypatch.setattr(first.shutil, "which", lambda _name: "/usr/bin/tool")
    for variable in ("HF_FP8KV_RESULTS", "HF_FP8KV_REPEAT"):
        monkeypatch.setenv(variable, "")
    return logs, exit_codes


def read_lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_first_run_continues_after_the_last_step(fake_steps, tmp_path):
    assert sum(step.seconds for step in first.STEPS) <= 480
    logs, exit_codes = fake_steps
    results = tmp_path / "first.jsonl"
    exit_codes["latent"] = 3
    assert main(["--first", "--dry", "--json", str(results)]) == 3
    names = [step.name for step in first.STEPS]
    assert logs == [name.replace(" ", "-") for name in names]
    lines = read_lines(results)
    assert [line["step"] for line in lines if "exit_code" in line] == names
    assert {"section": "latent", "name": "vllm", "note": "not installed: no module"} in [
        line["row"] for line in lines if line["step"] == "latent" and "row" in line
    ]
    assert lines[-1]["row"] | {"gains": 0} == {
        "name": "late stop check", "captured_equal": True, "gains": 0, "open": True,
    }  # fmt: skip
    # The last two steps did not end.
    results.write_text("".join(f"{json.dumps(line)}\n" for line in lines[:-5]))
    logs.clear()
    main(["--first", "--dry", "--json", str(results)])
    assert logs == [name.replace(" ", "-") for name in names[-2:]]
    assert read_lines(results)[-1]["step"] == "late stop"


def test_the_stop_check_is_not_late_if_captured_steps_differ(fake_steps, monkeypatch, tmp_path):
    logs, exit_codes = fake_steps
    exit_codes["captured"] = 1
    monkeypatch.setattr(first.shutil, "which", lambda _name: None)
    results = tmp_path / "first.jsonl"
    assert main(["--first", "--dry", "--json", str(results)]) == 1
    lines = read_lines(results)
    rows = {line["step"]: line["row"] for line in lines if "row" in line}
    assert rows["captured"]["messages"] == ["NaN"]
    assert not rows["late stop"]["open"]
    assert rows["racecheck"] == {"name": "compute-sanitizer", "note": "not installed"}
    assert not {"racecheck", "initcheck"} & set(logs)
