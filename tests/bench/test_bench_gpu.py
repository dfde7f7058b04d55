"""The benchmark for GPUs runs on any machine, in a dry form that measures nothing.

Neither a contender that fails nor a device that is lost may end it, and what computes something
else than attention must not get a time.
"""

import functools
import importlib.machinery
import importlib.util
import inspect
import io
import json
import os
import signal
import subprocess
import sys
import time
import types
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.gpu import (
    baselines,
    cached,
    decode,
    experiments,
    goals,
    other_kernels,
    roofline,
    serving,
    suite,
    table,
    timing,
    vllm_file,
    write,
)
from benchmarks.gpu.end_to_end import STOCK_OFFLOADED
from benchmarks.gpu.record import DeviceLost, Record
from benchmarks.gpu.results import complete
from benchmarks.gpu.shapes import BF16, FULL, KINDS, TINY, Case
from benchmarks.gpu.timing import Stage
from hf_fp8kv import ConfigError, cli, ops
from hf_fp8kv.bench import gpu as bench_gpu
from hf_fp8kv.formats import DISTINCT
from hf_fp8kv.ops.triton import tuning
from tests.helpers.wrong_results import five_percent_more, one_not_written

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
ROOT = Path(__file__).parents[2]
DRY = {"device": "cpu", "backend": "torch", "dry": True}
OURS = {kind.name for kind in KINDS}
E4M3 = KINDS[0]


@pytest.fixture(scope="module")
def result():
    return bench_gpu.run_gpu_suite(**DRY, seconds=600.0)  # compiling takes what it takes


@pytest.fixture
def record() -> Record:
    return Record(Stage("cpu", dry=True), progress=lambda _message: None)


@pytest.fixture
def triton_record(interpreted) -> Record:
    """Where kernels run: in Triton's interpreter, or on a GPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Record(Stage(device, dry=True), progress=lambda _message: None)


def text_of(result) -> str:
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(bench_gpu.format_table(result))
    return console.export_text()


# -- a dry run -----------------------------------------------------------------------------------


def test_every_section_runs_and_nothing_fails(result):
    assert [section["name"] for section in result["sections"]] == list(bench_gpu.SECTIONS)
    assert [section["error"] for section in result["sections"]] == [None] * len(bench_gpu.SECTIONS)
    assert not [row for row in result["rows"] if "failed" in row]
    found = {(row["section"], row["case"]) for row in result["rows"]}
    for section, cases in (("decode", TINY.decode), ("others", TINY.others)):
        assert {(section, str(case)) for case in cases} <= found
        assert {row["name"] for row in result["rows"] if row["section"] == "decode"} >= OURS
    ends = [row["name"] for row in result["rows"] if row["section"] == "end to end"]
    assert {goals.PAGED, *goals.NEEDED, "StaticCache (repeats K and V) compiled"} <= set(ends)
    compiled = [name.endswith("compiled") for name in ends]
    assert compiled == sorted(compiled), "eager ones first: compiling takes most of the time"
    plans = {r["name"]: r["planned_tokens"] for r in result["rows"] if r["section"] == "serving"}
    assert plans["fp8 static"] > plans["fp8 dynamic"] > plans["bf16 sdpa"]


def test_it_is_json_and_says_where_and_how(result):
    assert json.loads(json.dumps(result)) == result
    assert set(result) == {
        "suite", "date", "command", "versions", "hardware", "settings", "ceilings", "sections",
        "rows", "goals", "banned",
    }  # fmt: skip
    assert result["settings"]["dry"]
    assert all(result["ceilings"].values())
    assert {goal["state"] for goal in result["goals"]} == {"not measured"}, "of a dry run"
    assert {goal["why"] for goal in result["goals"]} == {"a dry run"}


def test_what_is_timed_was_checked(result):
    for row in result["rows"]:
        sections = ("decode", "layer", "others", "extend")
        if row["section"] in sections and row["name"] != "split plan":
            assert 0 <= row["error"] < 0.01, row
            assert row["low"] <= row["us"] <= row["high"]
            assert row["gb_per_s"] == pytest.approx(row["moved"] / row["us"] / 1e3)
            assert row["of_read"] == pytest.approx(
                row["gb_per_s"] / result["ceilings"]["read_gb_per_s"]
            )


def test_memory_of_the_caches_end_to_end(result):
    size = {r["name"]: r["cache_bytes"] for r in result["rows"] if r["section"] == "end to end"}
    [(batch, context)] = TINY.generate
    heads = TINY.heads
    # The first new token comes of the last one of the prompt.
    tokens = context + TINY.tokens[False] + TINY.warm[False]
    per_token = 4 * batch * heads.kv * heads.dim * TINY.layers
    assert size[goals.FLASH] == per_token * tokens
    assert size[goals.PAGED] < size[goals.AUTO] * 0.6
    # One page of 64 slots beside 46 positions.
    assert size[goals.PAGED] < size["StaticCache (repeats K and V) compiled"] * 1.2


def test_the_table_and_the_picture(result, tmp_path):
    text = text_of(result)
    for name in ("DRY RUN", "e4m3", "ragged", "TFLOP/s", "not measured", "FP8PagedCache"):
        assert name in text
    assert {row["section"] for row in result["rows"]} <= {"ceilings", *table._TABLES}
    for _cell, title in table._TABLES.values():
        if title != table._TABLES["other kernels"][1]:  # which are not there
            assert title in " ".join(text.split())
    bench_gpu.plot(result, tmp_path / "roofline.png")
    picture = (tmp_path / "roofline.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000
    line = bench_gpu.line(result)
    assert line["dry"]
    assert line["failed"] == 0
    assert "\n" not in json.dumps(line)


def test_a_run_that_was_ended_early_can_be_shown(tmp_path):
    saved = tmp_path / "gpu.json"
    bench_gpu.run_gpu_suite(**DRY, sections=("ceilings",), save=saved)
    result = json.loads(saved.read_text())
    assert "reads" in text_of(result)
    bench_gpu.plot(result, tmp_path / "roofline.png")


def test_without_a_gpu_it_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match=r"expected a CUDA or ROCm device.*finds none"):
        bench_gpu.run_gpu_suite()
    with pytest.raises(ConfigError, match="expected some of ceilings, decode"):
        bench_gpu.run_gpu_suite(**DRY, sections=("speed",))


# -- what is wrong gets no time ------------------------------------------------------------------


def _without_the_last_page(right):
    def wrong(query, pages, lengths, *args, **kwargs):
        return right(query, pages, (lengths - 8).clamp(min=1), *args, **kwargs)

    return wrong


@pytest.mark.parametrize("broken", [five_percent_more, _without_the_last_page, one_not_written])
def test_a_wrong_kernel_fails(record, monkeypatch, broken):
    monkeypatch.setattr(ops, "attend", broken(ops.attend))
    for case in TINY.decode:
        row = decode.measure_pages(record, TINY, "torch", "decode", case, E4M3)
        assert "relative error" in row["failed"], row
    assert not record.find("decode")


@pytest.mark.parametrize("broken", [five_percent_more, one_not_written])
def test_wrong_attention_over_a_cache_fails(record, monkeypatch, broken):
    monkeypatch.setattr(cached, "fp8_paged_attention", broken_pair(broken))
    case = TINY.decode[0]
    cached.measure_attention(record, "decode", case, E4M3, "torch")
    cached.measure_layers(record, replace(TINY, layer=(case,)), "torch")
    assert len(record.rows) == 1 + len(TINY.layer_kinds) + 1
    assert all("relative error" in row["failed"] for row in record.rows), record.rows


def broken_pair(broken):
    """Return the attention function with a broken result beside its weights."""
    right = cached.fp8_paged_attention
    wrong = broken(lambda *args, **kwargs: right(*args, **kwargs)[0])
    return lambda *args, **kwargs: (wrong(*args, **kwargs), None)


@pytest.mark.parametrize("preallocated", [True, False])
def test_padding_that_is_not_hidden_fails(record, monkeypatch, preallocated):
    """What hides padding is the mask; without it, tokens that no model would see count."""
    case = Case((130, 130), TINY.heads, padding=(0, 65))
    measure = functools.partial(
        cached.measure_attention, record, "decode", case, E4M3, "torch", preallocated=preallocated
    )
    measure("right")
    right = cached.fp8_paged_attention
    monkeypatch.setattr(
        cached, "fp8_paged_attention", lambda m, q, k, v, _mask: right(m, q, k, v, None)
    )
    measure("no mask")
    failed = {row["name"]: "failed" in row for row in record.rows}
    assert failed == {"right": False, "no mask": True}
    assert record.rows[0]["read"] == 130 + 65


def test_a_layer_s_steps_go_on_as_generate_goes_on(record):
    """Each step makes its mask for one token more; what was checked is what it began with."""
    filled = cached.fill(record.stage, E4M3, TINY.layer[0], 2, "torch", preallocated=False)
    length = filled.cache.get_seq_length()
    assert length == TINY.layer[0].lengths[0] - 1
    for number in range(3):
        outputs = [filled.step(layer) for layer in range(2)]
        assert filled.cache.get_seq_length() == filled.key.shape[2] == length + number + 1
    assert not torch.equal(*outputs), "layers have tokens of their own"


def test_memory_that_nobody_wrote_to_is_noticed(record, monkeypatch):
    def lazy(query, pages, *args, **kwargs):
        shape = (query.shape[0], query.shape[2], query.shape[1], pages.v.head_dim)
        return query.new_empty(shape)

    monkeypatch.setattr(ops, "attend", lazy)
    row = decode.measure_pages(record, TINY, "torch", "decode", TINY.decode[0], E4M3)
    assert "relative error inf" in row["failed"]


def test_wrong_attention_of_others_fails(record, monkeypatch):
    monkeypatch.setattr(baselines, "_attend_grouped", five_percent_more(baselines._attend_grouped))
    baselines.measure_decode(record, "decode", TINY.decode[0], compiles=True)
    failed = {row["name"]: "failed" in row for row in record.rows}
    assert failed == {"sdpa math": True, "sdpa math folded": False, "flex": False}


def test_a_write_of_one_wrong_byte_fails(record, monkeypatch):
    right = ops.write

    def wrong(pages, *args, **kwargs):
        right(pages, *args, **kwargs)
        pages.v.codes[-1, -1, -1, -1] ^= 1

    monkeypatch.setattr(write.ops, "write", wrong)
    write.measure(record, replace(TINY, writes=(1,), prefill=70), "torch")
    for row in record.rows:
        if "e4m3" in row["name"]:
            assert "expected the reference's bytes, got 1 others in v" in row["failed"]


# -- one that fails does not end the others ------------------------------------------------------


def test_a_contender_that_fails(record, monkeypatch):
    def fails(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    right = ops.attend
    monkeypatch.setattr(ops, "attend", fails)
    row = decode.measure_pages(record, TINY, "torch", "decode", TINY.decode[0], E4M3)
    assert row["failed"] == "out of memory"
    monkeypatch.setattr(ops, "attend", right)
    assert "us" in decode.measure_pages(record, TINY, "torch", "decode", TINY.decode[0], BF16)


def test_a_section_that_fails(monkeypatch):
    def fails(*args):
        raise AttributeError("nobody tried this")

    monkeypatch.setitem(suite.SECTIONS, "write", fails)
    found = bench_gpu.run_gpu_suite(**DRY, sections=("write", "ceilings"))
    assert [s["error"] for s in found["sections"]] == ["AttributeError: nobody tried this", None]
    assert found["ceilings"]["read_gb_per_s"] > 0
    assert bench_gpu.line(found)["errors"] == ["write"]
    assert "section write ended early" in text_of(found)


def test_what_there_is_no_time_for_is_named():
    found = bench_gpu.run_gpu_suite(**DRY, seconds=0.0)
    assert not [row for row in found["rows"] if "us" in row]
    # Kernels of others are not there.
    assert all(section["skipped"] for section in found["sections"])
    assert "no time left" in text_of(found)


def test_what_does_not_fit_is_named(record, monkeypatch):
    monkeypatch.setattr(record.stage, "free", lambda: 1000)
    assert decode.measure_pages(record, TINY, "torch", "decode", TINY.decode[0], E4M3) is None
    assert "GiB are free" in record.skipped[0]


def test_a_lost_device_ends_the_process_s_part_and_the_contender(record, monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(ops, "attend", fails)
    monkeypatch.setattr(record.stage, "is_lost", lambda: True)
    with pytest.raises(DeviceLost):
        decode.measure_pages(record, TINY, "torch", "decode", TINY.decode[0], E4M3)
    assert record.banned == ["e4m3"]
    assert not record.is_wanted("decode", "another", "e4m3")


def test_another_process_goes_on_after_a_lost_device(monkeypatch, tmp_path):
    def loses(record, sizes, backend):
        record.banned.append("e3m4")
        raise DeviceLost("write, 1 x 1 token, e3m4: an illegal memory access")

    monkeypatch.setitem(suite.SECTIONS, "write", loses)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found = bench_gpu.run_gpu_suite(
        **DRY, sections=("ceilings", "write"), save=tmp_path / "gpu.json"
    )
    assert [section["name"] for section in found["sections"]] == ["ceilings", "write", "write"]
    assert found["sections"][1]["error"].startswith("lost the device")
    assert found["sections"][2]["error"] is None
    names = {row["name"] for row in found["rows"] if row["section"] == "write"}
    assert names == OURS - {"e3m4"}
    assert json.loads((tmp_path / "gpu.json").read_text())["rows"] == found["rows"]


def test_engines_that_fail_end_neither_the_section_nor_the_others(record, monkeypatch):
    """An error in the engine's thread, and one while the engine is made."""
    from hf_fp8kv.serving.engines import common

    def fails(*args, **kwargs):
        raise RuntimeError("no such kernel")

    with monkeypatch.context() as changed:
        changed.setattr(common, "attend_layer", fails)
        serving.measure(record, TINY, "torch")
    failed = {row["name"]: row.get("failed") for row in record.rows}
    assert set(failed) == {"fp8 static", "bf16 sdpa", "fp8 dynamic"}
    assert failed.pop("bf16 sdpa") is None
    assert all("no such kernel" in why for why in failed.values())
    small = replace(TINY, served=replace(TINY.served, requests=(2,), page_size=7))
    serving.measure(record, small, "torch")
    failed = {r["name"]: r.get("failed", "") for r in record.rows if r["case"] == "2 requests"}
    assert "power of two" in failed["fp8 static"]
    assert not failed["bf16 sdpa"]


def test_requests_of_engines():
    prompts = serving._make_prompts(FULL.served, 32)
    lengths = sorted(map(len, prompts))
    assert (lengths[0], lengths[-1], len(lengths)) == (200, 2000, 32)
    assert lengths != list(map(len, prompts))
    assert prompts == serving._make_prompts(FULL.served, 32), "every contender gets the same"


# -- numbers -------------------------------------------------------------------------------------


def test_bytes_and_operations_of_a_case():
    case = Case((32768,) * 16)
    assert str(case) == "16 x 32k"
    assert case.moved(BF16) == 16 * 32768 * 8 * 128 * 2 * 2
    assert case.moved(E4M3) == 16 * 32768 * 8 * (128 + 2) * 2
    assert case.flops == 16 * 32768 * 32 * 128 * 4
    # Three new tokens over two: they see three, four and five.
    assert Case((5,), tokens=3).flops == (3 + 4 + 5) * 32 * 128 * 4
    assert Case((1000, 10), window=100, tokens=2).read == 101 + 10
    padded = Case((100,) * 4).pad_left()
    assert padded.padding == (0, 12, 25, 37)
    assert (padded.read, str(padded)) == (400 - 74, "4 x 100")
    assert padded.flops == (400 - 74) * 32 * 128 * 4
    assert Case((100,)).pad_left().padding == (50,)


def test_cases_that_goals_are_about_come_first():
    names = [str(case) for case in FULL.decode]
    assert set(goals.CASES) < set(names[:6])
    assert len(names) == len(set(names))
    batches = {len(case.lengths) for case in FULL.decode if case.read >= goals.LARGE}
    assert {1, 2, 4, 8, 16, 32, 50, 64, 98, 128, 256} <= batches
    assert set(FULL.padded) < set(names)
    rows = {case.heads.query // case.heads.kv * case.tokens for case in FULL.others}
    assert {16, 24, 32, 64} <= rows
    assert str(FULL.layer[0]) == "1 x 1k"


# -- others' attention ---------------------------------------------------------------------------


def test_a_backend_that_takes_equally_many_heads_only(record, monkeypatch):
    right = baselines._attend_grouped

    def refuses(q, k, v):
        if q.shape[1] != k.shape[1]:
            raise RuntimeError("No available kernel. Aborting execution.")
        return right(q, k, v)

    monkeypatch.setattr(baselines, "_attend_grouped", refuses)
    baselines.measure_decode(record, "decode", TINY.decode[0])
    [row] = record.find("decode", name="sdpa math")
    assert row["note"] == "KV heads repeated"


class _Wrapper:
    """FlashInfer's, as far as it is used."""

    def __init__(self, workspace, layout, use_tensor_cores):
        assert layout == "HND"

    def plan(self, starts, numbers, last, query_heads, heads, dim, page_size, **dtypes):
        self.lengths = (starts.diff() - 1) * page_size + last
        self.starts, self.numbers, self.groups = starts, numbers, query_heads // heads

    def run(self, query, pools):
        out = torch.empty_like(query)
        for b, length in enumerate(self.lengths.tolist()):
            chosen = self.numbers[self.starts[b] : self.starts[b + 1]].long()
            k, v = (
                pool[chosen].float().transpose(0, 1).flatten(1, 2)[:, :length]
                .repeat_interleave(self.groups, 0)
                for pool in pools
            )  # fmt: skip
            logits = query[b, :, None].float() @ k.transpose(1, 2) * query.shape[-1] ** -0.5
            out[b] = (logits.softmax(-1) @ v)[:, 0]
        return out


def _attend_by_table(query, k, v, table, lengths):
    """Attend to `[P, H, S, D]` by a block table; in float32."""
    out, groups = torch.empty_like(query), query.shape[1] // k.shape[1]
    for b, length in enumerate(lengths.tolist()):
        dense = (
            x[table[b].long()].float().transpose(0, 1).flatten(1, 2)[:, :length]
            .repeat_interleave(groups, 0)
            for x in (k, v)
        )  # fmt: skip
        k_dense, v_dense = dense
        logits = query[b, :, None].float() @ k_dense.transpose(1, 2) * query.shape[-1] ** -0.5
        out[b] = (logits.softmax(-1) @ v_dense)[:, 0]
    return out


def _xqa(
    *, query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale,
    bmm2_scale, out, kv_layout,
):  # fmt: skip
    assert (kv_layout, max_seq_len, bmm2_scale) == ("HND", seq_lens.max(), 1.0)
    assert bmm1_scale == query.shape[-1] ** -0.5
    assert not workspace_buffer.any()
    out.copy_(_attend_by_table(query, *kv_cache, block_tables, seq_lens))


@pytest.fixture
def flashinfer(monkeypatch):
    """A stand-in for FlashInfer, as far as it is used."""
    for name, content in (
        ("flashinfer", {"BatchDecodeWithPagedKVCacheWrapper": _Wrapper}),
        ("flashinfer.decode", {"xqa_batch_decode_with_kv_cache": _xqa}),
    ):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(other_kernels, "WORKSPACE", 64)


@pytest.mark.usefixtures("flashinfer")
def test_flashinfer_where_there_is_one(record, monkeypatch):
    other_kernels.measure(record, TINY, "torch")
    plain = [*TINY.decode, TINY.others[0]]
    for name in ("flashinfer xqa", "flashinfer wrapper"):
        for dtype in (" bf16", " e4m3"):
            rows = record.find("other kernels", name=name + dtype)
            assert [row["case"] for row in rows] == list(map(str, plain)), record.rows
    assert "vLLM is not installed" in record.skipped[0]


@pytest.mark.usefixtures("flashinfer")
def test_wrong_attention_of_a_kernel_of_others_fails(record, monkeypatch):
    wrong = five_percent_more(_attend_by_table)
    monkeypatch.setitem(globals(), "_attend_by_table", wrong)
    other_kernels.measure(record, TINY, "torch")
    failed = {row["name"] for row in record.rows if "failed" in row}
    assert failed == {"flashinfer xqa bf16", "flashinfer xqa e4m3"}


# As vLLM's file begins: what it imports, and the names that it uses of it when it is imported.
_VLLM_FILE = """
import torch
import vllm.envs as envs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.triton_attention_helpers import attend
from vllm.v1.kv_cache_interface import KVQuantMode

logger = init_logger(__name__)
is_batch_invariant = envs.VLLM_BATCH_INVARIANT
float8_info = torch.finfo(current_platform.fp8_dtype())

def unified_attention(
    q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal,
    window_size, block_table, softcap, q_descale, k_descale, v_descale, seq_threshold_3D=None,
    num_par_softmax_segments=None, softmax_segm_output=None, softmax_segm_max=None,
    softmax_segm_expsum=None, kv_quant_mode=KVQuantMode.NONE, k_scale_cache=None,
    v_scale_cache=None,
):
    assert not is_batch_invariant
    assert (kv_quant_mode == KVQuantMode.NONE) == (k.dtype == torch.bfloat16)
    assert cu_seqlens_q.tolist() == list(range(len(q) + 1))
    if kv_quant_mode == KVQuantMode.FP8_PER_TOKEN_HEAD:
        k, v = k.float() * k_scale_cache[..., None], v.float() * v_scale_cache[..., None]
    out.copy_(attend(q, k.transpose(1, 2), v.transpose(1, 2), block_table, seqused_k))
"""


def test_vllm_s_kernel_from_a_file(record, monkeypatch, tmp_path):
    pytest.importorskip("triton")
    file = tmp_path / "triton_unified_attention.py"
    file.write_text(_VLLM_FILE)
    helpers = tmp_path / "triton_attention_helpers.py"
    helpers.write_text(
        f"import torch\n{inspect.getsource(_attend_by_table)}\nattend = _attend_by_table\n"
    )
    monkeypatch.setenv(vllm_file.VARIABLE, str(file))
    other_kernels.measure(record, TINY, "torch")
    names = {row["name"] for row in record.find("other kernels")}
    assert names == {"vllm triton bf16", "vllm triton e4m3", "vllm triton e4m3 per token"}
    assert not [row for row in record.rows if "failed" in row]
    assert "vllm" not in sys.modules
    monkeypatch.setenv(vllm_file.VARIABLE, str(tmp_path / "none.py"))
    other_kernels.measure(record, TINY, "torch")
    assert "none.py" in " ".join(record.skipped)


# -- with Triton's interpreter -------------------------------------------------------------------


def test_the_kernel_that_only_reads(triton_record):
    from benchmarks.gpu.read_kernel import read_all

    source = torch.randint(-(2**31), 2**31 - 1, (4 * 3 * 2 * 64,), dtype=torch.int32)
    found = read_all(source.to(triton_record.stage.device), 4, 64, 2)
    expected = np.bitwise_xor.reduce(source.numpy().reshape(4, 6, 64), axis=1).max(1)
    assert found.tolist() == expected.tolist()


def test_kernels_in_a_dry_run(triton_record, monkeypatch):
    record = triton_record
    monkeypatch.setattr(decode, "KINDS", (E4M3, BF16))
    monkeypatch.setattr(write, "KINDS", (E4M3, BF16))
    case = Case((70,), TINY.heads, label="1 x 70")
    sizes = replace(TINY, decode=(case,), writes=(1,), prefill=20, extend=((3, 40),))
    decode.measure(record, sizes, "triton")
    decode.measure_extend(record, sizes, "triton")
    write.measure(record, sizes, "triton")
    assert not [row for row in record.rows if "failed" in row]
    assert record.find("decode", name="split plan")


def test_every_launch_parameter_is_a_switch():
    switches = experiments.LATENT_SWITCHES
    tried = {key for values in switches.values() for value in values for key in value}
    fields = {*tuning.LaunchConfig.__dataclass_fields__, *tuning.PlanConfig.__dataclass_fields__}
    assert tried == fields | {"programs"}
    # Elsewhere rows follow from the call.
    assert switches.keys() - experiments.SWITCHES.keys() == {"rows", "chunks"}
    assert set(experiments.LATENT_CASES) < set(map(str, FULL.latents))
    for values in switches.values():
        for value in values:
            with tuning.override(**value):
                pass


def test_experiments(triton_record, monkeypatch):
    record = triton_record
    switches = {"tile": ({"tile": 32}, {"tile": 64}), "combine": ({"combine": "last"},)}
    monkeypatch.setattr(experiments, "SWITCHES", switches)
    more = {"chunks": ({"chunks": 1}, {"chunks": 2}), "rows": ({"rows": 32},)}
    monkeypatch.setattr(experiments, "LATENT_SWITCHES", more)
    sizes = replace(TINY, decode=(Case((70,), TINY.heads, label="1 x 70"),))
    experiments.measure(record, sizes, "triton")
    assert not [row for row in record.rows if "failed" in row], record.rows
    latents = record.find("experiments", case=str(TINY.latents[0]))
    assert len(latents) == 4
    assert latents[-1]["parameters"]["rows"] == 32
    rows = record.find("experiments", case="1 x 70")
    tried = [row["parameters"] for row in rows]
    assert tried[:3] == [{}, {"tile": 32}, {"tile": 64}]
    best = min(rows[:3], key=lambda row: row["us"])["parameters"]
    assert tried[3:] == [{**best, "combine": "last"}]
    found = complete({
        "settings": {"dry": True, "device": "cpu"}, "hardware": {}, "date": "", "sections": [],
        "rows": record.rows,
    })  # fmt: skip
    assert "launch parameters" in text_of(found)


# -- as on a GPU, with a stand-in for it ---------------------------------------------------------


class _Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)


class _Graph:
    """Runs nothing when it is replayed, as long as nobody looks at the results."""

    replays = 0

    def replay(self):
        _Graph.replays += 1


@pytest.fixture
def gpu(monkeypatch):
    """torch.cuda, as far as the benchmark uses it, over tensors of the CPU."""
    if torch.cuda.is_available():
        pytest.skip("there is a real one")
    nothing = types.SimpleNamespace(wait_stream=lambda _other: None)

    @contextmanager
    def inside(_thing):
        yield

    facts = types.SimpleNamespace(
        name="stand-in", major=9, minor=0, multi_processor_count=4, total_memory=2**34,
        L2_cache_size=2**14,
    )  # fmt: skip
    for name, value in {
        "Stream": lambda: nothing, "current_stream": lambda: nothing, "stream": inside,
        "graph": inside, "CUDAGraph": _Graph, "Event": _Event,
        "synchronize": lambda *_: None, "empty_cache": lambda: None,
        "mem_get_info": lambda _device: (2**40, 2**40),
        "memory_reserved": lambda _device: 2**20, "memory_allocated": lambda _device: 2**19,
        "get_device_properties": lambda _device: facts,
        "reset_peak_memory_stats": lambda _device: None,
        "max_memory_allocated": lambda _device: 12345,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(Stage, "is_gpu", property(lambda _self: True))
    monkeypatch.setattr(timing, "REPLAYED", 1.0)
    monkeypatch.setattr(timing, "GRAPH", 1e-6)
    # cuDNN is for GPUs only.
    monkeypatch.setattr(
        baselines, "_backends", lambda _stage: {"flash": baselines.SDPBackend.FLASH_ATTENTION}
    )


@pytest.mark.usefixtures("gpu")
def test_all_sections_as_on_a_gpu():
    _Graph.replays = 0
    found = bench_gpu.run_gpu_suite(**DRY)
    # transformers' own offloaded cache makes a stream of CUDA, of which there is no stand-in.
    assert {row["name"] for row in found["rows"] if "failed" in row} <= {STOCK_OFFLOADED}
    assert [section["error"] for section in found["sections"]] == [None] * len(found["sections"])
    assert found["hardware"]["gpu"] == "stand-in"
    assert found["hardware"]["capability"] == "9.0"
    assert _Graph.replays > 100
    ends = [row for row in found["rows"] if row["section"] == "end to end"]
    assert {row["peak_bytes"] for row in ends} == {12345}
    assert not [row for row in found["rows"] if "note" in row]


@pytest.mark.usefixtures("gpu")
def test_what_cannot_be_captured_is_timed_without_a_graph(monkeypatch):
    @contextmanager
    def refuses(_graph):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")
        yield

    monkeypatch.setattr(torch.cuda, "graph", refuses)
    found = Stage("cpu").time([lambda: time.sleep(1e-4)])
    assert found.note == "no graph: operation not permitted when stream is capturing"
    assert found.us > 100  # as long as the call slept; a busy machine adds to it


@pytest.mark.usefixtures("gpu")
def test_a_graph_is_long_enough_for_a_clock(monkeypatch):
    calls = []
    monkeypatch.setattr(timing, "GRAPH", 2.0)
    monkeypatch.setattr(timing, "_events", lambda run, count: [400.0] * count)
    found = Stage("cpu").time([lambda: calls.append(1)] * 3)
    # Twice to warm up, once to see how long, then so often that it takes two milliseconds.
    assert found.calls == 3 * 6
    assert len(calls) == 2 * 3 + 3 + 3 * 6


@pytest.mark.usefixtures("gpu")
def test_buffers_are_so_many_that_no_cache_holds_them():
    stage = Stage("cpu")
    assert stage.copies(2**14) == 4
    assert stage.copies(2**30) == 1
    assert stage.copies(16) == 256


# -- the command line ----------------------------------------------------------------------------


def test_the_options_of_the_command_line(monkeypatch, tmp_path, result):
    given = {}

    def stand_in(**arguments):
        given.update(arguments)
        return result

    monkeypatch.setattr(bench_gpu, "run_gpu_suite", stand_in)
    saved, picture = tmp_path / "gpu.json", tmp_path / "gpu.png"
    options = ["--dry", "--experiments", "--seconds", "7", "--json", str(saved), "--device", "cpu"]
    ended = CliRunner().invoke(cli.app, ["bench", "--suite", "gpu", *options])
    assert ended.exit_code == 0, ended.output
    del given["progress"]
    assert given == {
        "dry": True, "seconds": 7.0, "save": saved, "sections": ("ceilings", "experiments"),
        "device": "cpu", "backend": "triton" if os.environ.get("TRITON_INTERPRET") else "torch",
    }  # fmt: skip
    assert json.loads(saved.read_text()) == result
    again = ["bench", "--suite", "gpu", "--from", str(saved), "--plot", str(picture)]
    ended = CliRunner().invoke(cli.app, again)
    assert ended.exit_code == 0, ended.output
    assert "DRY RUN" in ended.output
    assert picture.exists()
    ended = CliRunner().invoke(cli.app, ["bench", "--plot", str(picture)])
    assert ended.exit_code == 2
    assert "--suite gpu" in ended.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--suite", "gpu", "--dry", "--device", "foo"], "'foo'"),
        (["--suite", "gpu", "--from", "text"], "expected what --suite gpu wrote"),
        (["--suite", "gpu", "--from", "other.json"], "expected what --suite gpu wrote"),
        (["--suite", "cpu", "--from", "other.json"], "expected --suite gpu or long"),
        (["--suite", "cpu", "--positions", "1024"], "requires --suite long, got cpu"),
        (["--suite", "quality", "--thorough"], "requires --suite long, got quality"),
    ],
    ids=" ".join,
)
def test_options_that_make_no_sense(monkeypatch, tmp_path, options, said):
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("no JSON")
    Path("other.json").write_text('{"suite": "quality"}')
    ended = CliRunner().invoke(cli.app, ["bench", *options])
    assert ended.exit_code == 2, ended.output
    assert said in " ".join(ended.output.replace("\u2502", " ").split())


# -- make gpu ------------------------------------------------------------------------------------


@pytest.fixture
def runner():
    spec = importlib.util.spec_from_file_location("run", ROOT / "tests" / "gpu" / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_make_gpu_without_one():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    script = [sys.executable, str(ROOT / "tests" / "gpu" / "run.py")]
    ended = subprocess.run(script, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == {"gpu": None}
    assert "No GPU" in ended.stdout


def test_all_parts_fit_into_eight_minutes(runner):
    for limits in (runner.LIMITS, runner.EXPERIMENTS):
        assert sum(limits.values()) + len(limits) * runner.END + runner.START <= runner.TOTAL == 480
    # As the sections of the benchmark have it, and it has it from them.
    asked = runner.LIMITS["benchmark"] - runner.GRACE
    assert sum(FULL.seconds.values()) == asked
    assert set(FULL.seconds) == set(bench_gpu.SECTIONS)


def test_tests_that_were_not_run_are_named(runner, tmp_path):
    ended = tmp_path / "test_ended.py"
    ended.write_text(
        "def test_bad(): assert 1 == 2\n"
        "def test_ends(): raise KeyboardInterrupt\n"
        "def test_late(): pass\n"
    )
    options = ["-m", "pytest", "-p", "tests.gpu.unfinished", "-p", "no:cacheprovider", "-q"]
    assert runner.run([*options, str(ended), "--rootdir", str(tmp_path)], tmp_path / "log", 60) == 2
    said = (tmp_path / "log").read_text()
    assert "failed: test_ended.py::test_bad" in said
    assert "assert 1 == 2" in said
    assert "not run, or not to its end: 2 of test_ended.py" in said


def test_what_was_measured_before_the_end_is_kept(runner, tmp_path):
    """Killed in the middle of a section: the file has all rows, and names what is missing."""
    script = (
        "import time; from pathlib import Path; from hf_fp8kv.bench import gpu;"
        "from benchmarks.gpu import suite\n"
        "def hangs(record, sizes, backend):\n"
        "    record.measure('write', 'a', 'b', lambda: {'us': 1.0})\n"
        "    time.sleep(100)\n"
        "suite.SECTIONS['write'] = hangs\n"
        f"gpu.run_gpu_suite(device='cpu', backend='torch', dry=True, "
        f"sections=('ceilings', 'write', 'decode'), save=Path({str(tmp_path / 'gpu.json')!r}))"
    )
    saved = tmp_path / "gpu.json"
    with subprocess.Popen(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(ROOT)}
    ) as process:
        while not (saved.exists() and '"b"' in saved.read_text()):
            assert process.poll() is None
            time.sleep(0.1)
        process.kill()
    found = json.loads(saved.read_text())
    assert found["rows"][-1]["us"] == 1.0
    assert [s["seconds"] is None for s in found["sections"]] == [False, True, True]
    assert bench_gpu.line(found)["unfinished"] == ["write", "decode"]
    text = text_of(found)
    assert "not measured, or not all of it: write: the run was ended" in text
    assert "not measured, or not all of it: decode" in text
    assert {goal["state"] for goal in found["goals"]} == {"not measured"}


def test_a_part_that_takes_too_long_is_ended(runner, tmp_path, capsys):
    log = tmp_path / "log"
    assert runner.run(["-c", "import time; time.sleep(60)"], log, 0.5) == 124
    assert "ended after" in log.read_text()
    assert runner.run(["-c", "raise SystemExit(3)"], log, 60) == 3
    assert "exit code 3" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_runs_ends_with_make_gpu(tmp_path, number):
    slow = tmp_path / "test_slow.py"
    slow.write_text(
        "import os, pathlib, time\n"
        "def test_slow():\n"
        "    pathlib.Path(__file__).with_name('pid').write_text(str(os.getpid()))\n"
        "    time.sleep(100)\n"
    )
    script = [sys.executable, str(ROOT / "tests" / "gpu" / "run.py"), "--dry", str(slow)]
    with subprocess.Popen(
        [*script, "--out", "here"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        # A shell's background jobs ignore SIGINT, and so does what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as runs:  # fmt: skip
        pid = tmp_path / "pid"
        while not (pid.exists() and pid.read_text()):
            assert runs.poll() is None, runs.stdout.read()
            time.sleep(0.1)
        runs.send_signal(number)
        assert runs.wait(30) not in (0, None)
    assert (tmp_path / "here" / "kernels.log").exists()
    for _ in range(100):
        try:
            os.kill(int(pid.read_text()), 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("a test still runs")


@pytest.mark.parametrize(("failing", "code"), [("none", 0), ("tests", 1), ("benchmark", 2)])
def test_the_exit_code_and_the_last_line(
    runner, monkeypatch, capsys, tmp_path, result, failing, code
):
    def run(command, log, seconds):
        log.write_text("the log\n")
        if "pytest" in command:
            return 1 if failing == "tests" and "-m" not in command[2:] else 5
        if "--from" not in command:
            (tmp_path / "gpu.json").write_text(json.dumps(result))
        return 2 if failing == "benchmark" else 0

    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(sys, "argv", ["run.py", "--dry", "--out", str(tmp_path)])
    assert runner.main() == code
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["tests_exit_code"] == (failing == "tests")
    assert last["benchmark_exit_code"] == (2 if failing == "benchmark" else 0)
    assert last["goals"]


def test_every_format_is_measured_and_every_contender_has_a_color():
    assert {kind.format for kind in KINDS} == {"auto", *(fmt.name for fmt in DISTINCT)}
    assert {kind.name for kind in KINDS} <= roofline._LOOKS.keys()
    assert roofline._looks([{"name": "new"}]) == [("new", *roofline._OTHER)]
