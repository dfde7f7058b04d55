"""Measure the ceilings of a device: bandwidth of reads and copies, rate of matrix products."""

import functools
from typing import Any

import torch

from .record import Record
from .shapes import RunSizes
from .stage import Step

# Arguments of `read_all`: numbers of programs, of elements per load, and of loads per iteration.
READ_ARGUMENTS = ((4096, 4096, 8), (16384, 2048, 8), (16384, 4096, 4), (65536, 1024, 8))


def measure(record: Record, _sizes: RunSizes, backend: str) -> None:
    """Add rows for the bandwidth of a copy and of reads, and the rate of a bf16 matrix product."""
    stage = record.stage
    num_bytes = 2**20 if stage.is_dry else 4 * 2**30
    # The values are random, because a device may handle zeros faster.
    source = torch.empty(num_bytes // 4, dtype=torch.int32, device=stage.device)
    source.random_(-(2**31), 2**31 - 1)

    def add_row(case: str, name: str, step: Step, **fields: Any) -> None:
        record.measure("ceilings", case, name, lambda: {**stage.time_steps([step]), **fields})

    target = torch.empty_like(source)
    add_row("copy", "torch", lambda: target.copy_(source), moved=2 * num_bytes)
    add_row("read", "torch", lambda: source.sum(dtype=torch.int32), moved=num_bytes)
    if backend == "triton":
        from .read_kernel import read_all

        all_arguments = ((4, 256, 8),) if stage.is_dry else READ_ARGUMENTS
        for arguments in all_arguments:
            name = "triton {} x {} x {}".format(*arguments)
            add_row("read", name, functools.partial(read_all, source, *arguments), moved=num_bytes)
    size = 64 if stage.is_dry else 8192
    a, b = (stage.randn(size, size) for _ in range(2))
    out = torch.empty_like(a)
    add_row("matmul", f"bf16 {size}", lambda: torch.matmul(a, b, out=out), flops=2 * size**3)
