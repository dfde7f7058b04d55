"""Measure the ceilings of a device: bandwidth of reads and copies, and rate of matrix products."""

import functools
from typing import Any

import torch

from .record import Record
from .shapes import Sizes
from .stage import Step

SECTION = "ceilings"
# Programs, 4-byte elements in a load, and loads in flight, of the kernel that only reads.
SHAPES = ((4096, 4096, 8), (16384, 2048, 8), (16384, 4096, 4), (65536, 1024, 8))


def measure(record: Record, _sizes: Sizes, backend: str) -> None:
    """Add the bandwidth of a copy and of reads, and the rate of a bf16 matrix product."""
    stage = record.stage
    size = 2**20 if stage.dry else 4 * 2**30
    # Random values, because a device may handle zeros faster.
    limits = torch.iinfo(torch.int32)
    source = torch.empty(size // 4, dtype=torch.int32, device=stage.device)
    source.random_(limits.min, limits.max)

    def add(case: str, name: str, step: Step, **fields: Any) -> None:
        record.measure(SECTION, case, name, lambda: {**stage.time([step]), **fields})

    target = torch.empty_like(source)
    add("copy", "torch", lambda: target.copy_(source), moved=2 * size)
    add("read", "torch", lambda: source.sum(dtype=torch.int32), moved=size)
    if backend == "triton":
        from .read_kernel import read_all

        for shape in ((4, 256, 8),) if stage.dry else SHAPES:
            name = "triton {} x {} x {}".format(*shape)
            add("read", name, functools.partial(read_all, source, *shape), moved=size)
    n = 64 if stage.dry else 8192
    a, b = stage.randn(n, n), stage.randn(n, n)
    out = torch.empty_like(a)
    add("matmul", f"bf16 {n}", lambda: torch.matmul(a, b, out=out), flops=2 * n**3)
