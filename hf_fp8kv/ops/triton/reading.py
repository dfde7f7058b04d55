"""A kernel that only reads: what it reaches is the ceiling of a kernel that reads a cache."""

import torch
import triton
import triton.language as tl

from .target import launch

__all__ = ["read_all"]


def read_all(source: torch.Tensor, programs: int, block: int, ahead: int) -> torch.Tensor:
    """Returns the largest of the exclusive-ors that each program took of every `block`-th number.

    Args:
        source: `[n]`, int32; n is a multiple of `programs * block * ahead`, or the rest is not
            read.
        programs: how many.
        block: elements of one load.
        ahead: independent loads of a program's turn.
    """
    found = torch.empty((programs,), dtype=torch.int32, device=source.device)
    turns = source.numel() // (programs * block * ahead)
    launch(
        _read, (programs,), source, found, turns, BLOCK=block, AHEAD=ahead, num_warps=8,
    )  # fmt: skip
    return found


@triton.jit
def _read(source, found, turns, BLOCK: tl.constexpr, AHEAD: tl.constexpr):
    me = tl.program_id(0).to(tl.int64)
    at = me * turns * (BLOCK * AHEAD)
    o = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for _ in range(turns):
        for i in tl.static_range(AHEAD):
            total ^= tl.load(source + at + i * BLOCK + o)
        at += BLOCK * AHEAD
    tl.store(found + me, tl.max(total, 0))
