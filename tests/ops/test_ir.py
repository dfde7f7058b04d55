"""What `make kernels-ir` stands on: faults are found, and codec.py's assembly is run."""

import sys

import pytest
import torch

if "tests.helpers.ir" not in sys.modules:
    pytest.skip("runs in `make kernels-ir`", allow_module_level=True)

import triton
import triton.language as tl
from ttsem.sanitize import KernelFault, Unjudged

from hf_fp8kv.formats import FORMATS, codec
from hf_fp8kv.ops.triton.codec import MOVED_PACKED, codec_for, decode_for_dot
from hf_fp8kv.ops.triton.target import Target


@triton.jit
def _sum(x, total, counter, ORDER: tl.constexpr, BY: tl.constexpr, PAST: tl.constexpr):
    """Each of four programs stores a number; who counts last adds them. BY: 4 share a counter."""
    i = tl.program_id(0)
    tl.store(x + i + PAST, i + 1)
    if tl.atomic_add(counter + i // BY, 1, sem=ORDER) == 3:
        found = 0
        for j in range(4):
            found += tl.load(x + j)
        tl.store(total, found)
        tl.store(counter, 0)


def run_sum(order: str = "acq_rel", by: int = 4, past: int = 0) -> int:
    x, counter = torch.zeros(4, dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
    total = torch.zeros(1, dtype=torch.int32)
    _sum[(4,)](x, total, counter, order, by, past)
    return int(total)


def test_a_counter_orders_programs():
    assert run_sum() == 10


@pytest.mark.parametrize(
    ("order", "by"), [("relaxed", 4), ("acquire", 4), ("release", 4), ("acq_rel", 2)]
)
def test_a_race_is_found(order, by):
    with pytest.raises(KernelFault, match="both touch element") as found:
        run_sum(order, by)
    assert found.value.fault.kind == "race"


def test_a_store_past_the_end_is_found():
    with pytest.raises(KernelFault, match="1 element") as found:
        run_sum(past=1)
    assert found.value.fault.kind == "oob_write"


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
