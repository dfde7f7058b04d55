"""What `make kernels-ir` stands on: faults are found, and codec.py's assembly is run."""

import re
import sys
from pathlib import Path

import pytest
import torch

if "tests.tools.ir" not in sys.modules:
    pytest.skip("runs in `make kernels-ir`", allow_module_level=True)

import triton
import triton.language as tl
from ttsem.sanitize import KernelFault, Unjudged

from hf_fp8kv.formats import FORMATS, codec
from hf_fp8kv.ops.triton.codec import MOVED_PACKED, codec_for, decode_for_dot
from hf_fp8kv.ops.triton.target import Target
from tests.tools import ir


@triton.jit
def _sum(x, total, PAST: tl.constexpr):
    """Store the number of each of four programs. The last one adds all of them."""
    i = tl.program_id(0)
    tl.store(x + i + PAST, i + 1)
    if i == 3:
        tl.store(total, tl.load(x) + tl.load(x + 1) + tl.load(x + 2) + tl.load(x + 3))


def run_sum(past: int = 0) -> None:
    total = torch.zeros(1, dtype=torch.int32)
    _sum[(4,)](torch.zeros(4, dtype=torch.int32), total, past)


def test_a_race_is_found():
    with pytest.raises(KernelFault, match="both touch element") as found:
        run_sum()
    assert found.value.fault.kind == "race"


def test_a_store_past_the_end_is_found():
    with pytest.raises(KernelFault, match="1 element") as found:
        run_sum(past=1)
    assert found.value.fault.kind == "oob_write"
    assert found.value.__notes__ == ["executed from make_ttir, loop_unroll"]


def test_every_stage_is_executed_up_to_shared_memory(monkeypatch):
    monkeypatch.setattr(ir, "_every_pass", True)
    stages = []
    compile_stages = ir.compile_stages
    monkeypatch.setattr(
        ir, "compile_stages", lambda *args: stages.extend(compile_stages(*args)) or stages
    )
    ran = ir.COUNTS["executed"]
    _pipelined[(1,)](torch.ones(256, dtype=torch.int32), torch.empty(64, dtype=torch.int32))
    assert ir.COUNTS["executed"] - ran == len(stages) > 10
    names = [name for name, _ in stages]
    assert names[0].startswith("make_ttir")
    assert {"make_ttgir, coalesce", "make_ttgir, pipeline"} <= set(names)
    assert names[-1].startswith("make_llir")
    assert "ttg.async_copy_global_to_local" in stages[-1][1]
    assert "allocation.offset" in stages[-1][1]


@triton.jit
def _pipelined(x, out):
    i = tl.arange(0, 64)
    total = tl.zeros([64], tl.int32)
    for j in tl.range(0, 4, num_stages=3):
        total += tl.load(x + j * 64 + i).to(tl.int32)
    tl.store(out + i, total)


def test_a_stage_that_computes_something_else_is_found(monkeypatch):
    compile_stages = ir.compile_stages

    def compile_wrongly(*args):
        first, (name, text) = compile_stages(*args)
        return [first, (name, text.replace("arith.extui", "arith.extsi"))]

    monkeypatch.setattr(ir, "compile_stages", compile_wrongly)
    codes = torch.full((256,), 200, dtype=torch.uint8)
    with pytest.raises(AssertionError, match=r"_pipelined: make_llir.* leaves other numbers"):
        _pipelined[(1,)](codes, torch.empty(64, dtype=torch.int32))


@pytest.mark.parametrize(
    ("rounded", "change", "same"),
    [(False, 0.0, True), (False, 2.0, False), (True, 2.0, True), (True, 64.0, False)],
)
def test_other_rounding_is_allowed_where_a_pass_rounds(rounded, change, same):
    first = torch.tensor([float("nan"), float("-inf"), 1e6, 3.0])
    last = first + torch.tensor([0.0, 0.0, 0.0, change])
    assert ir.are_same(first, last, rounded) is same


@triton.jit
def _rows(x, out):
    i, j = tl.arange(0, 16), tl.arange(0, 32)
    tl.store(out + i, tl.sum(tl.load(x + i[:, None] * 32 + j[None, :]), 1))


def test_a_wrong_layout_is_found():
    name, text = ir.compile_stages(_rows, (torch.ones(512), torch.empty(16)), {})[-1]
    ir.check_layouts(name, text)
    wrong = re.sub(r'("tt.reduce".*axis = )1', r"\g<1>0", text)
    with pytest.raises(AssertionError, match=r"make_llir.*tt\.reduce"):
        ir.check_layouts(name, wrong)


def test_what_is_executed_from_every_pass_exists(request):
    files = {"test_kernels_attention.py", "test_kernels_write.py"}
    if not files <= {Path(name).name for name in request.config.args}:
        pytest.skip("runs with all tests")
    assert {item.name for item in request.session.items} >= ir.FROM_EVERY_PASS


@triton.jit
def _decode(codes, numbers, CODEC: tl.constexpr):
    i = tl.arange(0, 256)
    tl.store(numbers + i, decode_for_dot(tl.load(codes + i), CODEC))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_packed_codes_are_their_numbers(name):
    fmt = FORMATS[name]
    found_codec = codec_for(name, Target.parse("sm_80"), tl.float16, False, True)
    codes = (torch.arange(256) * 37 % 256).to(torch.uint8)
    numbers = torch.empty(256, dtype=torch.float16)
    _decode[(1,)](codes, numbers, found_codec)
    if found_codec.how == MOVED_PACKED:
        numbers = numbers.float() * found_codec.factor
    right = codec.decode(codes, fmt)
    torch.testing.assert_close(numbers.float(), right, rtol=0, atol=0, equal_nan=True)


@triton.jit
def _unknown(x):
    moved = tl.inline_asm_elementwise(
        "brev.b32 $0, $1;", "=r,r", [tl.load(x)], dtype=tl.int32, is_pure=True, pack=1
    )
    tl.store(x, moved)


def test_other_assembly_is_not_judged():
    with pytest.raises(Unjudged, match="PTX"):
        _unknown[(1,)](torch.zeros(1, dtype=torch.int32))
