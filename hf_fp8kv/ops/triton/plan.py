"""Which program of the decode kernel reads which tokens: decided on the device, once per step.

A plan is int32, `[capacity + B + ceil(B * H / 4), 4]`, with H the KV heads (times blocks of query
rows, where there are several):

    row i < capacity     (sequence, first token, last token + 1, parts of that sequence); rows that
                         are left over have the sequence -1
    row capacity + b     (first row of sequence b, its parts, 0, 0)
    the rest             a counter for each sequence and H, 0: how many parts are done

`capacity` is what the GPU holds at once, divided by H. Parts are as short as fits into
it and about equally long, so that a batch of ragged lengths ends together. The first part of a
sequence begins at 0 and the last one has no end: whatever lengths and window a plan was made for,
it gives every position to one program, and is at worst badly balanced.
"""

import torch
import triton
import triton.language as tl

from .target import Target, launch, next_power_of_2, target_of
from .tuning import programs_per_processor

__all__ = ["UNIT", "capacity", "make", "rows"]

# Tokens: parts begin at multiples of it, and only a last one is shorter. A multiple of every tile
# of the decode kernel.
UNIT = 128
NO_END = tl.constexpr(2**31 - 1)


def capacity(batch: int, heads: int, target: Target, programs: int = 0) -> int:
    """Returns the parts that there is room for: one wave, or as many as `batch` needs anyway.

    Args:
        batch: sequences, B.
        heads: H.
        target: the GPU.
        programs: what one processor holds at once; 0: that of the decode kernel.
    """
    wave = max(1, target.processors * (programs or programs_per_processor(target)) // heads)
    return wave * -(-batch // wave)


def rows(batch: int, heads: int, target: Target, programs: int = 0) -> int:
    """Returns the rows of a plan; arguments as in `capacity`."""
    return capacity(batch, heads, target, programs) + batch + -(-batch * heads // 4)


def make(
    plan: torch.Tensor,
    lengths: torch.Tensor,
    tokens: int,
    window: int,
    start: int,
    heads: int,
    programs: int = 0,
) -> None:
    """Overwrites `plan`; arguments as in `ops.make_plan` and `capacity`."""
    batch = lengths.shape[0]
    target = target_of(lengths.device)
    slots = capacity(batch, heads, target, programs)
    assert plan.shape == (rows(batch, heads, target, programs), 4)
    assert plan.is_contiguous()
    launch(
        _plan, (batch,), plan, lengths, batch, tokens, window, start, heads, slots,
        SPAN=next_power_of_2(slots), UNIT=UNIT,
        SEQUENCES=next_power_of_2(batch), WINDOWED=window > 0, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["batch", "tokens", "window", "start", "heads", "slots"])
def _plan(
    plan, lengths, batch, tokens, window, start, heads, slots,
    SPAN: tl.constexpr, UNIT: tl.constexpr, SEQUENCES: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """One program per sequence; each works out all sequences' parts and writes its own."""
    me = tl.program_id(0)
    b = tl.arange(0, SEQUENCES)
    ends = tl.load(lengths + b, mask=b < batch, other=0)
    low = tl.zeros([SEQUENCES], tl.int32) + start
    if WINDOWED:
        low = tl.maximum(low, ends - tokens - window + 1)
    low = tl.maximum(low, 0) // UNIT
    units = tl.maximum(tl.cdiv(ends, UNIT) - low, 0)
    units = tl.where(b < batch, units, 0)

    # The shortest part with which all parts fit into the slots, by bisection. Each sequence has a
    # part even if it holds nothing, since somebody must write its output.
    least = 1
    most = tl.maximum(tl.max(units, 0), 1)
    while least < most:
        middle = (least + most) // 2
        parts = tl.where(b < batch, tl.maximum(tl.cdiv(units, middle), 1), 0)
        fits = tl.sum(parts, 0) <= slots
        most = tl.where(fits, middle, most)
        least = tl.where(fits, least, middle + 1)
    parts = tl.maximum(tl.cdiv(units, most), 1)
    # Even parts: 5 units in parts of at most 4 are 3 and 2.
    length = tl.maximum(tl.cdiv(units, parts), 1)
    parts = tl.where(b < batch, tl.maximum(tl.cdiv(units, length), 1), 0)
    first = tl.cumsum(parts, 0) - parts

    mine = b == me
    my_first = tl.sum(tl.where(mine, first, 0), 0)
    my_parts = tl.sum(tl.where(mine, parts, 0), 0)
    my_length = tl.sum(tl.where(mine, length, 0), 0) * UNIT
    my_low = tl.sum(tl.where(mine, low, 0), 0) * UNIT
    i = tl.arange(0, SPAN)
    begin = my_low + i * my_length
    row = plan + (my_first + i) * 4
    own = i < my_parts
    tl.store(row, me, mask=own)
    tl.store(row + 1, tl.where(i == 0, 0, begin), mask=own)
    tl.store(row + 2, tl.where(i == my_parts - 1, NO_END, begin + my_length), mask=own)
    tl.store(row + 3, my_parts, mask=own)
    sequence = plan + (slots + me) * 4
    tl.store(sequence, my_first)
    tl.store(sequence + 1, my_parts)

    if me == batch - 1:
        left = (i >= my_first + my_parts) & (i < slots)
        tl.store(plan + i * 4, -1, mask=left)
    counters = plan + (slots + batch) * 4 + me * heads
    for head in range(heads):
        tl.store(counters + head, 0)
