"""Faulty kernels for the check: violated rules, a wrong variant, and a process that dies.

The kernels resemble the decode kernel. "good" violates no rule. Each other kernel has one fault.
"""

import os
from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
import triton.language as tl

from hf_fp8kv.ops.triton.target import Target

from .check import Row, compile_variants, make_row, set_target
from .variants import Variant

# Changed constants and strides, by the name of a case. None means that `_attend` is not compiled.
CASES = {
    "good": {},
    "strides unknown": {"stride": 64 * 128 + 1},
    "V by rows": {"V_BY_ROWS": True},
    "large": {"ROWS": 64, "HEAD_DIM": 512},
    "converted by bits": {"BY_BITS": True},
    "float64": {"FLOAT64": True},
    "unknown format": None,
    "dies": None,
}


@triton.jit
def _convert(codes, BY_BITS: tl.constexpr):
    if BY_BITS:
        bits = codes.to(tl.int16)
        return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    else:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, table_ptr, out_ptr, stride, length,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr, V_BY_ROWS: tl.constexpr,
    BY_BITS: tl.constexpr, FLOAT64: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM)
    slots = tl.arange(0, TILE)
    q = tl.load(q_ptr + rows[:, None] * HEAD_DIM + dims[None, :])
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    page = tl.load(table_ptr)
    for index in tl.range(0, length, num_stages=3):
        next_page = tl.load(table_ptr + index + 1)
        base = page.to(tl.int64) * stride
        k = tl.load(k_ptr + base + slots[:, None] * HEAD_DIM + dims[None, :])
        logits = tl.dot(q, tl.trans(_convert(k, BY_BITS)))
        if FLOAT64:
            logits = (logits.to(tl.float64) * logits + 1).to(tl.float32)
        if V_BY_ROWS:
            v = tl.load(v_ptr + base + slots[:, None] * HEAD_DIM + dims[None, :])
        else:
            v = tl.trans(tl.load(v_ptr + base + dims[:, None] * TILE + slots[None, :]))
        acc = tl.dot(logits.to(tl.float16), _convert(v, BY_BITS), acc)
        page = next_page
    tl.store(out_ptr + rows[:, None] * HEAD_DIM + dims[None, :], acc)


def compile_bad_kernel(name: str) -> Iterator[Row]:
    """Yield the row of a case for sm_90. Call this in a new process, whose target it sets."""
    set_target("sm_90")
    if name == "dies":
        os.abort()
    if name == "unknown format":
        yield from compile_variants("sm_90", [Variant("decode", k="no format")])
        return
    constants = {
        "ROWS": 16, "HEAD_DIM": 128, "TILE": 64, "V_BY_ROWS": False, "BY_BITS": False,
        "FLOAT64": False, "num_warps": 4, **CASES[name],
    }  # fmt: skip
    stride = constants.pop("stride", 64 * 128)
    pool = torch.zeros(4, 64, 128, dtype=torch.uint8)
    q = torch.zeros(16, 128, dtype=torch.float16)
    table = torch.zeros(64, dtype=torch.int32)
    arguments = (q, pool, pool, table, torch.zeros(16, 128), stride, 63)
    compiled = _attend.warmup(*arguments, grid=(1,), **constants)
    target = replace(Target.parse("sm_90"), parameters={"programs": 3})
    yield make_row(target, Variant("decode", is_main=True), "_attend", compiled, constants)
