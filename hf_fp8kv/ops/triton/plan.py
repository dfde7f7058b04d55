"""Split plan: which program of the decode kernel reads which tokens, made on the device each step.

All sequences are laid one behind the other, and the line is cut into ranges of equal length: as
many as the GPU holds programs at once, for each of H KV heads (fewer where a sequence would be in
so many that merging them takes longer). A sequence that lies in several ranges is read in as many
parts. The GPU starts parts in the plan's order, each where a place is free: longer ones come before
shorter ones, which fill the gaps at the end. Where that gains less than it costs, each sequence is
one part.

A plan is int32, `[max_parts + B, 4]`:

    row i < max_parts    (sequence, first token, last token + 1, slot of its sums); rows that are
                         left over have the sequence -1; the slot is -1 if it is the only part
    row max_parts + b    (first slot of sequence b, its parts, 0, 0)

The first part of a sequence begins at 0 and the last one has no end: whatever lengths and window a
plan was made for, it gives every position to one program, and is at worst badly balanced.
"""

import torch
import triton
import triton.language as tl

from .softmax import last_before_window
from .target import cdiv, launch, next_power_of_2, target_of
from .tuning import PlanConfig, expected_programs, plan_config

NO_END = tl.constexpr(2**31 - 1)
# Parts that begin a range are before all that are shorter than this: all.
EARLY = tl.constexpr(2**30)
# CUDA starts at most that many programs along the second axis of a grid.
MOST_PARTS = 65_535
# Merging so many parts takes 1 us.
MANY_PARTS = tl.constexpr(32)


def plan_rows(
    device: torch.device,
    batch: int,
    heads: int,
    length: int | None = None,
    rows: int = 1,
    programs: int = 0,
) -> int:
    """Return the rows of a plan.

    Args:
        device: of the plan.
        batch: B.
        heads: H, the KV heads, times blocks of query rows where there are several.
        length: what every sequence has to read, where that is known: the plan then has no room for
            parts that are not needed. None: lengths differ, or grow.
        rows: query rows per KV head.
        programs: what a processor holds at once; 0: of the decode kernel for `rows`.
    """
    target = target_of(device)
    places = target.processors * (programs or expected_programs(target, rows))
    ranges = max(1, min(places // heads, MOST_PARTS + 1 - batch))
    if length is not None and not gains_if_even(length, batch, heads, places, plan_config(target)):
        ranges = 1
    return 2 * batch + ranges - 1


def max_parts(plan: torch.Tensor, batch: int) -> int:
    """Return how many parts a plan has room for; `batch`: no sequence can be split."""
    parts = plan.shape[0] - batch
    assert plan.shape[1] == 4
    assert parts >= batch, f"a plan for another launch: {tuple(plan.shape)}, {batch} sequences"
    return parts


def make_plan(
    plan: torch.Tensor,
    lengths: torch.Tensor,
    tokens: int,
    window: int,
    start: int,
    heads: int,
    programs: int = 0,
) -> None:
    """Overwrite `plan`, `[plan_rows, 4]`, int32; arguments as in `ops.make_plan`, `plan_rows`."""
    batch, target = lengths.shape[0], target_of(lengths.device)
    config = plan_config(target)
    assert plan.is_contiguous()
    parts = max_parts(plan, batch)
    places = target.processors * (programs or expected_programs(target))
    ranges, room = max(1, places // heads), parts - batch + 1
    if 1 < room < ranges:
        # It is for fewer places.
        places = room * heads
    ranges = min(ranges, room)
    launch(
        _plan, (batch,), plan, lengths, batch, tokens, window, start, heads, ranges, places,
        parts, config.split_cost, config.merge_cost, PARTS_WIDTH=next_power_of_2(parts - batch + 1),
        UNIT=config.unit, BATCH_WIDTH=next_power_of_2(batch), WINDOWED=window > 0, num_warps=1,
    )  # fmt: skip


def gains_if_even(length: int, batch: int, heads: int, places: int, config: PlanConfig) -> bool:
    """Return what `_gains` returns for sequences of one length."""
    units, count = cdiv(length, config.unit), batch * heads
    late, few, cost = count % places, places // 2, config.split_cost
    if count <= places:
        whole = units * max(few, count)
    else:
        whole = units * (count - late + (max(late, few) if late else 0))
        cost //= 2
    return (whole - units * count) * config.unit > cost * places


@triton.jit
def _gains(units, total, longest, batch, heads, places, unit, cost):
    """Return whether ranges are done sooner than whole sequences, by more than they cost.

    Time is counted in units that a program reads if all `places` are taken, times `places`. If
    fewer than half are, one is up to twice as fast: also with as many as fit on its processor, as
    the last that start often have. (Half of them reach 8 TB/s, 2 of 5 reach 4.8.)

    Args:
        units: `[>= B]`, of each sequence.
        total, longest: of them.
        unit: tokens in one.
        cost: of splitting, in tokens: of another part for each place, and of the merging. Half as
            much where programs do not all start at once: then others read meanwhile.
    """
    count = batch * heads
    late = count % places
    few = (places // 2).to(tl.int64)
    even = total.to(tl.int64) * heads
    longest = longest.to(tl.int64)
    last = tl.where(late > 0, tl.maximum(late, few), 0)
    whole = longest * (count - late + last)
    if count <= places:
        # All start at once: while more than half of them run they share the bandwidth. When so
        # few are left is found by trying: any other time gives less.
        whole = tl.maximum(longest * few, even)
        for i in tl.static_range(1, 8):
            until = longest * i // 8
            read = tl.sum(tl.minimum(units.to(tl.int64), until), 0)
            whole = tl.maximum(whole, read * heads + (longest - until) * few)
    else:
        cost = cost // 2
    return (whole - even) * unit > cost.to(tl.int64) * places


@triton.jit(
    do_not_specialize=[
        "batch", "tokens", "window", "start", "heads", "ranges", "places", "max_parts", "cost",
        "merge_cost",
    ]
)  # fmt: skip
def _plan(
    plan_ptr, lengths_ptr, batch, tokens, window, start, heads, ranges, places, max_parts, cost,
    merge_cost, PARTS_WIDTH: tl.constexpr, UNIT: tl.constexpr, BATCH_WIDTH: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """Write a plan. One program per sequence: each works out all parts and writes its own.

    Args:
        plan_ptr: `[max_parts + B, 4]`, int32.
        lengths_ptr: `[B]`, int32.
        batch, heads: B and H.
        tokens, window, start: as in `ops.make_plan`.
        ranges: how many there may be; 1: no sequence is split.
        places: programs that the GPU holds at once.
        cost: as in `_gains`.
        merge_cost: what a program may read while another part of a sequence is merged.
    """
    me = tl.program_id(0)
    b = tl.arange(0, BATCH_WIDTH)
    exists = b < batch
    ends = tl.load(lengths_ptr + b, mask=exists, other=0)
    low = tl.zeros([BATCH_WIDTH], tl.int32) + start
    if WINDOWED:
        low = tl.maximum(low, last_before_window(ends - tokens, window) + 1)
    low = tl.maximum(low, 0) // UNIT
    # Each sequence has a part even if it holds nothing, since some program must write its output.
    units = tl.where(exists, tl.maximum(tl.cdiv(ends, UNIT) - low, 1), 0)

    stop = tl.cumsum(units, 0)
    begin = stop - units
    total = tl.sum(units, 0)
    longest = tl.max(units, 0)
    # Reading a range of n tokens and merging `longest / n` parts take the least time together.
    least = tl.sqrt_rn((longest * UNIT).to(tl.float32) * merge_cost)
    length = tl.maximum(tl.cdiv(total, ranges), (least / UNIT).to(tl.int32))
    # Half of the places are enough for the bandwidth, where many parts would have to be merged.
    length = tl.maximum(length, tl.minimum(tl.cdiv(total, ranges) * 2, longest // MANY_PARTS))
    split = _gains(units, total, longest, batch, heads, places, UNIT, cost)
    length = tl.where(split, length, total)

    first_range = begin // length
    num_parts = tl.where(exists, (stop - 1) // length - first_range + 1, 0)
    slot = tl.cumsum(num_parts, 0) - num_parts
    total_parts = tl.sum(num_parts, 0)
    # Parts in the middle of a sequence are whole ranges.
    num_middle = tl.maximum(num_parts - 2, 0)
    middle = tl.cumsum(num_middle, 0) - num_middle
    total_middle = tl.sum(num_middle, 0)
    # The longest is first. Where most programs read whole sequences, which may be of one length,
    # parts that begin a range come before all: of different lengths, so that not all programs end,
    # and read nothing, together.
    alike = (longest <= length) | (batch * heads >= 2 * places)
    early = tl.where(alike, EARLY, 0)
    head = tl.minimum(stop, (first_range + 1) * length) - begin
    head += tl.where(begin == first_range * length, early, 0)
    head = tl.where(exists, head, 0)
    tail = stop - (stop - 1) // length * length + early
    tail = tl.where(num_parts > 1, tail, 0)

    mine = b == me
    my_begin = _pick(begin, mine)
    my_low = _pick(low, mine)
    my_range = _pick(first_range, mine)
    my_parts = _pick(num_parts, mine)
    my_slot = _pick(slot, mine)
    my_head = _pick(head, mine)
    my_tail = _pick(tail, mine)
    head_row = total_middle + _count_before(head, tail, my_head, b < me, b < me)
    tail_row = total_middle + _count_before(head, tail, my_tail, b <= me, b < me)

    i = tl.arange(0, PARTS_WIDTH)
    row = tl.where(i == my_parts - 1, tail_row, _pick(middle, mine) + i - 1)
    row = tl.where(i == 0, head_row, row)
    part_begin = ((my_range + i) * length - my_begin + my_low) * UNIT
    part_end = part_begin + length * UNIT
    row_ptrs = plan_ptr + row * 4
    own = i < my_parts
    tl.store(row_ptrs, me, mask=own)
    tl.store(row_ptrs + 1, tl.where(i == 0, 0, part_begin), mask=own)
    tl.store(row_ptrs + 2, tl.where(i == my_parts - 1, NO_END, part_end), mask=own)
    tl.store(row_ptrs + 3, tl.where(my_parts > 1, my_slot + i, -1), mask=own)
    sequence_ptr = plan_ptr + (max_parts + me) * 4
    tl.store(sequence_ptr, my_slot)
    tl.store(sequence_ptr + 1, my_parts)

    if me == batch - 1:
        left = total_parts + i
        tl.store(plan_ptr + left * 4, -1, mask=left < max_parts)


@triton.jit
def _pick(x, mine):
    """Return the element of `x` where `mine` is true."""
    return tl.sum(tl.where(mine, x, 0), 0)


@triton.jit
def _count_before(head, tail, size, heads_first, tails_first):
    """Return how many first and last parts come before one of `size`.

    Those are the larger ones, and of equal ones those of `heads_first` and `tails_first`.
    """
    before = (head > size) | ((head == size) & heads_first)
    count = tl.sum(before.to(tl.int32), 0)
    before = (tail > size) | ((tail == size) & tails_first)
    return count + tl.sum(before.to(tl.int32), 0)
