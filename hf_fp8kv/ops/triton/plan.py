"""Split plan: which program of the decode kernel reads which tokens, made on the device each step.

A plan is int32, `[max_splits + B + ceil(B * H / 4), 4]`, with H the KV heads (times blocks of query
rows, where there are several):

    row i < max_splits   (sequence, first token, last token + 1, splits of that sequence); rows that
                         are left over have the sequence -1
    row max_splits + b   (first row of sequence b, its splits, 0, 0)
    the rest             a counter for each sequence and H, 0: how many splits are done

`max_splits` is what the GPU holds at once, divided by H. Splits are as short as fits into
it and about equally long, so that a batch of ragged lengths ends together. The first split of a
sequence begins at 0 and the last one has no end: whatever lengths and window a plan was made for,
it gives every position to one program, and is at worst badly balanced.
"""

import torch
import triton
import triton.language as tl

from .attention import last_before_window
from .target import Target, launch, next_power_of_2, target_of
from .tuning import programs_per_processor

# Tokens: splits begin at multiples of it, and only a last one is shorter. A multiple of every tile
# of the decode kernel.
UNIT = 128
NO_END = tl.constexpr(2**31 - 1)


def max_splits(batch: int, heads: int, target: Target, programs: int = 0) -> int:
    """Return the splits that there is room for: one wave, or as many as `batch` needs anyway.

    `heads` is H, `programs` what one processor holds at once; 0: that of the decode kernel.
    """
    wave = max(1, target.processors * (programs or programs_per_processor(target)) // heads)
    return wave * -(-batch // wave)


def plan_rows(batch: int, heads: int, target: Target, programs: int = 0) -> int:
    """Return the rows of a plan; arguments as in `max_splits`."""
    return max_splits(batch, heads, target, programs) + batch + -(-batch * heads // 4)


def make_plan(
    plan: torch.Tensor,
    lengths: torch.Tensor,
    tokens: int,
    window: int,
    start: int,
    heads: int,
    programs: int = 0,
) -> None:
    """Overwrite `plan`, `[plan_rows, 4]`, int32; arguments as in `ops.make_plan`, `max_splits`."""
    batch = lengths.shape[0]
    target = target_of(lengths.device)
    splits = max_splits(batch, heads, target, programs)
    assert plan.shape == (plan_rows(batch, heads, target, programs), 4)
    assert plan.is_contiguous()
    launch(
        _plan, (batch,), plan, lengths, batch, tokens, window, start, heads, splits,
        SPLITS_WIDTH=next_power_of_2(splits), UNIT=UNIT,
        BATCH_WIDTH=next_power_of_2(batch), WINDOWED=window > 0, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["batch", "tokens", "window", "start", "heads", "max_splits"])
def _plan(
    plan_ptr, lengths_ptr, batch, tokens, window, start, heads, max_splits,
    SPLITS_WIDTH: tl.constexpr, UNIT: tl.constexpr, BATCH_WIDTH: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """Write a plan. One program per sequence: each works out all splits and writes its own.

    Args:
        plan_ptr: `[max_splits + B + ceil(B * H / 4), 4]`, int32.
        lengths_ptr: `[B]`, int32.
        batch, heads: B and H.
        tokens, window, start: as in `ops.make_plan`.
    """
    me = tl.program_id(0)
    b = tl.arange(0, BATCH_WIDTH)
    ends = tl.load(lengths_ptr + b, mask=b < batch, other=0)
    low = tl.zeros([BATCH_WIDTH], tl.int32) + start
    if WINDOWED:
        low = tl.maximum(low, last_before_window(ends - tokens, window) + 1)
    low = tl.maximum(low, 0) // UNIT
    units = tl.maximum(tl.cdiv(ends, UNIT) - low, 0)
    units = tl.where(b < batch, units, 0)

    # The shortest split with which all fit into the plan, by bisection. Each sequence has a
    # split even if it holds nothing, since some program must write its output.
    shortest = 1
    longest = tl.maximum(tl.max(units, 0), 1)
    while shortest < longest:
        middle = (shortest + longest) // 2
        num_splits = tl.where(b < batch, tl.maximum(tl.cdiv(units, middle), 1), 0)
        fits = tl.sum(num_splits, 0) <= max_splits
        longest = tl.where(fits, middle, longest)
        shortest = tl.where(fits, shortest, middle + 1)
    num_splits = tl.maximum(tl.cdiv(units, longest), 1)
    # Even splits: 5 units in splits of at most 4 are 3 and 2.
    length = tl.maximum(tl.cdiv(units, num_splits), 1)
    num_splits = tl.where(b < batch, tl.maximum(tl.cdiv(units, length), 1), 0)
    first = tl.cumsum(num_splits, 0) - num_splits

    mine = b == me
    my_first = tl.sum(tl.where(mine, first, 0), 0)
    my_splits = tl.sum(tl.where(mine, num_splits, 0), 0)
    my_length = tl.sum(tl.where(mine, length, 0), 0) * UNIT
    my_low = tl.sum(tl.where(mine, low, 0), 0) * UNIT
    i = tl.arange(0, SPLITS_WIDTH)
    begin = my_low + i * my_length
    row_ptrs = plan_ptr + (my_first + i) * 4
    own = i < my_splits
    tl.store(row_ptrs, me, mask=own)
    tl.store(row_ptrs + 1, tl.where(i == 0, 0, begin), mask=own)
    tl.store(row_ptrs + 2, tl.where(i == my_splits - 1, NO_END, begin + my_length), mask=own)
    tl.store(row_ptrs + 3, my_splits, mask=own)
    sequence_ptr = plan_ptr + (max_splits + me) * 4
    tl.store(sequence_ptr, my_first)
    tl.store(sequence_ptr + 1, my_splits)

    if me == batch - 1:
        left = (i >= my_first + my_splits) & (i < max_splits)
        tl.store(plan_ptr + i * 4, -1, mask=left)
    counters_ptr = plan_ptr + (max_splits + batch) * 4 + me * heads
    for head in range(heads):
        tl.store(counters_ptr + head, 0)
