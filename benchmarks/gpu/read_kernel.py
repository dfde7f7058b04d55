"""A kernel that only reads memory. Its bandwidth is the ceiling of a kernel that reads a cache."""

import torch
import triton
import triton.language as tl

from hf_fp8kv.ops.triton.target import launch


def read_all(source: torch.Tensor, programs: int, block: int, unroll: int) -> torch.Tensor:
    """Return, for each program, the largest XOR of every `block`-th value, `[programs]`.

    `source` is `[n]`, int32. Each iteration issues `unroll` independent loads of `block` elements.
    Elements after the last whole iteration are not read.
    """
    out = torch.empty((programs,), dtype=torch.int32, device=source.device)
    iterations = source.numel() // (programs * block * unroll)
    launch(_read, (programs,), source, out, iterations, BLOCK=block, UNROLL=unroll, num_warps=8)
    return out


@triton.jit
def _read(source_ptr, out_ptr, iterations, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    """Store one result for each program of a one-dimensional grid."""
    program = tl.program_id(0).to(tl.int64)
    begin = program * iterations * (BLOCK * UNROLL)
    offsets = tl.arange(0, BLOCK)
    xor = tl.zeros([BLOCK], tl.int32)
    for _ in range(iterations):
        for i in tl.static_range(UNROLL):
            xor ^= tl.load(source_ptr + begin + i * BLOCK + offsets)
        begin += BLOCK * UNROLL
    tl.store(out_ptr + program, tl.max(xor, 0))
