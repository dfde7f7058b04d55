"""Kernels that break the rules of `check --kernels`, so that a rule that never fires is noticed.

    python -m tests.helpers.bad_kernels sm_90

compiles each and prints what its machine code holds, as JSON: one kernel in the manner of the
decode kernel, good as it stands, and made bad by one thing at a time.
"""

import json
import sys
from dataclasses import asdict

import torch
import triton
import triton.language as tl

from hf_fp8kv.kernel_check.assembly import read_assembly
from hf_fp8kv.kernel_check.check import set_target

PAGE, TILE, DIM = 64, 64, 128
# name -> what is changed
CASES = {
    "good": {},
    "strides unknown": {"stride": PAGE * DIM + 1},
    "V by rows": {"V_BY_ROWS": True},
    "large": {"ROWS": 128, "WIDE": 512, "num_warps": 4},
    "converted by bits": {"BY_BITS": True},
    "float64": {"DOUBLE": True},
}


@triton.jit
def _paged(
    q_ptr, k_ptr, v_ptr, table_ptr, out_ptr, stride, length,
    ROWS: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    V_BY_ROWS: tl.constexpr, BY_BITS: tl.constexpr,
    DOUBLE: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, ROWS)
    d = tl.arange(0, WIDE)
    n = tl.arange(0, TILE)
    q = tl.load(q_ptr + rows[:, None] * WIDE + d[None, :])
    acc = tl.zeros([ROWS, WIDE], tl.float32)
    page = tl.load(table_ptr)
    for j in tl.range(0, length, num_stages=3):
        next_page = tl.load(table_ptr + j + 1)
        base = page.to(tl.int64) * stride
        k = tl.load(k_ptr + base + n[:, None] * WIDE + d[None, :])
        if BY_BITS:
            wide = k.to(tl.int16)
            k = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
        else:
            k = k.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        x = tl.dot(q, tl.trans(k))
        if DOUBLE:
            x = (x.to(tl.float64) * x + 1).to(tl.float32)
        if V_BY_ROWS:
            v = tl.load(v_ptr + base + n[:, None] * WIDE + d[None, :])
        else:
            v = tl.trans(tl.load(v_ptr + base + d[:, None] * PAGE + n[None, :]))
        if BY_BITS:
            wide = v.to(tl.int16)
            v = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
        else:
            v = v.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        acc = tl.dot(x.to(tl.float16), v, acc)
        page = next_page
    tl.store(out_ptr + rows[:, None] * WIDE + d[None, :], acc)


def main(target: str) -> None:
    set_target(target)
    facts = {}
    for name, changed in CASES.items():
        constants = {
            "ROWS": 16, "WIDE": DIM, "PAGE": PAGE, "TILE": TILE,
            "V_BY_ROWS": False, "BY_BITS": False, "DOUBLE": False, "num_warps": 4, **changed,
        }  # fmt: skip
        stride = constants.pop("stride", PAGE * DIM)
        pool = torch.zeros(4, PAGE, DIM, dtype=torch.uint8)
        compiled = _paged.warmup(
            torch.zeros(16, DIM, dtype=torch.float16), pool, pool,
            torch.zeros(64, dtype=torch.int32), torch.zeros(16, DIM), stride, 63,
            grid=(1,), **constants,
        )  # fmt: skip
        facts[name] = {**asdict(read_assembly(compiled.asm)), "shared": compiled.metadata.shared}
    sys.stdout.write(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1])
