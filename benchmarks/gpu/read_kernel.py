"""A kernel that only reads memory and XORs what it reads.

Its bandwidth is a bound for kernels that read a cache.
"""

import torch
import triton
import triton.language as tl

from hf_fp8kv.ops.triton.target import launch


def read_all(
    source: torch.Tensor, num_programs: int, block_size: int, num_loads: int
) -> torch.Tensor:
    """XOR the elements that each program reads, and return the largest lane of each program.

    `source` is `[n]`, int32. A program has `block_size` lanes. Each iteration issues `num_loads`
    independent loads of an element per lane. Elements after the last full iteration are not read.
    The result, `[num_programs]`, only prevents the compiler from removing the loads.
    """
    out = torch.empty((num_programs,), dtype=torch.int32, device=source.device)
    num_iterations = source.numel() // (num_programs * block_size * num_loads)
    launch(
        _read, (num_programs,), source, out, num_iterations, BLOCK_SIZE=block_size,
        NUM_LOADS=num_loads, num_warps=8,
    )  # fmt: skip
    return out


@triton.jit
def _read(source_ptr, out_ptr, num_iterations, BLOCK_SIZE: tl.constexpr, NUM_LOADS: tl.constexpr):
    """XOR the elements of a program into `BLOCK_SIZE` lanes, and store the largest lane."""
    program = tl.program_id(0).to(tl.int64)
    start = program * num_iterations * (BLOCK_SIZE * NUM_LOADS)
    offsets = tl.arange(0, BLOCK_SIZE)
    lane_values = tl.zeros([BLOCK_SIZE], tl.int32)
    for _ in range(num_iterations):
        for i in tl.static_range(NUM_LOADS):
            lane_values ^= tl.load(source_ptr + start + i * BLOCK_SIZE + offsets)
        start += BLOCK_SIZE * NUM_LOADS
    tl.store(out_ptr + program, tl.max(lane_values, 0))
