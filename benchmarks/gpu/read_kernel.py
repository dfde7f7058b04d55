"""A kernel that only reads memory. Its bandwidth is a bound for kernels that read a cache."""

import torch
import triton
import triton.language as tl

from hf_fp8kv.ops.triton.target import launch


def read_all(source: torch.Tensor, programs: int, block: int, loads: int) -> torch.Tensor:
    """Return the maximum lane of each program after an XOR of its values in `block` lanes.

    `source` is `[n]`, int32. Each iteration issues `loads` independent loads of `block` elements.
    Elements after the last full iteration are not read. The result, `[programs]`, only prevents the
    compiler from removing the loads.
    """
    out = torch.empty((programs,), dtype=torch.int32, device=source.device)
    iterations = source.numel() // (programs * block * loads)
    launch(_read, (programs,), source, out, iterations, BLOCK=block, LOADS=loads, num_warps=8)
    return out


@triton.jit
def _read(source_ptr, out_ptr, iterations, BLOCK: tl.constexpr, LOADS: tl.constexpr):
    """Store one result for each program of a one-dimensional grid."""
    program = tl.program_id(0).to(tl.int64)
    start = program * iterations * (BLOCK * LOADS)
    lanes = tl.arange(0, BLOCK)
    xor = tl.zeros([BLOCK], tl.int32)
    for _ in range(iterations):
        for i in tl.static_range(LOADS):
            xor ^= tl.load(source_ptr + start + i * BLOCK + lanes)
        start += BLOCK * LOADS
    tl.store(out_ptr + program, tl.max(xor, 0))
