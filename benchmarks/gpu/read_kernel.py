"""A kernel that only reads. Its bandwidth is the ceiling of a kernel that reads a cache."""

import torch
import triton
import triton.language as tl

from hf_fp8kv.ops.triton.target import launch


def read_all(source: torch.Tensor, programs: int, block: int, ahead: int) -> torch.Tensor:
    """Return the maximum of each program's exclusive-ors over every `block`-th value, `[programs]`.

    `source` is `[n]`, int32. An iteration has `ahead` independent loads of `block` elements. The
    kernel does not read the rest after whole iterations.
    """
    out = torch.empty((programs,), dtype=torch.int32, device=source.device)
    iterations = source.numel() // (programs * block * ahead)
    launch(_read, (programs,), source, out, iterations, BLOCK=block, AHEAD=ahead, num_warps=8)
    return out


@triton.jit
def _read(source_ptr, out_ptr, iterations, BLOCK: tl.constexpr, AHEAD: tl.constexpr):
    """Store one result for each program of a one-dimensional grid."""
    program = tl.program_id(0).to(tl.int64)
    begin = program * iterations * (BLOCK * AHEAD)
    offsets = tl.arange(0, BLOCK)
    combined = tl.zeros([BLOCK], tl.int32)
    for _ in range(iterations):
        for i in tl.static_range(AHEAD):
            combined ^= tl.load(source_ptr + begin + i * BLOCK + offsets)
        begin += BLOCK * AHEAD
    tl.store(out_ptr + program, tl.max(combined, 0))
