"""Schedule: the tokens of each program of the attention kernel, computed on the device per step.

All sequences are concatenated, and the result is cut into ranges of equal length. The number of
ranges is the number of programs that the GPU runs at once, divided by the H KV heads. It is smaller
if merging a sequence's parts would take longer than it saves. A sequence has one part in each range
that it overlaps. The GPU starts parts in the order of the schedule as programs finish. Longer parts
come first, and shorter parts fill the gaps at the end. If splitting gains less than it costs, each
sequence is a single part.

A schedule is int32, `[max_parts + B, 4]`:

    row i < max_parts    (sequence, first token, last token + 1, index of its sums). Unused rows
                         are -1. The index of a sequence's only part is -1.
    row max_parts + b    (index of the first sums of sequence b, number of its parts, 0, 0)

The first part of a sequence begins at 0, and the last part has no end. A schedule that was made for
other lengths or another window therefore still assigns every position to exactly one program, and
is only less balanced.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from .replay import Variables, describe_shape, replayed
from .softmax import find_last_before_window
from .target import cdiv, get_target, launch, next_power_of_2
from .tuning import MAX_DECODE_TOKENS, ScheduleConfig, choose_schedule_config, estimate_programs

NO_END = tl.constexpr(2**31 - 1)
# Added to the sort key of a part, so that the part comes before all parts without the bonus.
EARLY_BONUS = tl.constexpr(2**30)
# CUDA's limit for the second axis of a grid.
MAX_PARTS = 65_535
# Number of parts of a sequence that are merged in 1 us. More parts are a reason for longer ranges.
FAST_MERGE_PARTS = tl.constexpr(32)


def count_schedule_rows(
    device: torch.device,
    batch: int,
    num_head_blocks: int,
    length: int | None = None,
    num_query_rows: int = 1,
    programs_per_sm: int = 0,
) -> int:
    """Return the number of rows of a schedule.

    Args:
        device: Device of the schedule.
        batch: Number of sequences, B.
        num_head_blocks: Number of KV heads, H, times the number of blocks of query rows.
        length: Number of tokens to read per sequence, if it is fixed and the same for all. The
            schedule then has no room for parts that are not needed. None means that lengths differ
            or grow.
        num_query_rows: Query rows per KV head.
        programs_per_sm: Number of programs that an SM runs at once. 0 means the number for the
            decode kernel with `num_query_rows` rows.
    """
    target = get_target(device)
    capacity = target.sm_count * (programs_per_sm or estimate_programs(target, num_query_rows))
    num_ranges = max(1, min(capacity // num_head_blocks, MAX_PARTS + 1 - batch))
    if length is not None and not _should_split_equal(
        length, batch * num_head_blocks, capacity, choose_schedule_config(target)
    ):
        num_ranges = 1
    return 2 * batch + num_ranges - 1


def get_max_parts(schedule: torch.Tensor, batch: int) -> int:
    """Return the number of parts that a schedule has room for. It is `batch` without splits."""
    max_parts = schedule.shape[0] - batch
    assert schedule.shape[1] == 4
    assert max_parts >= batch, (
        f"expected a schedule for {batch} sequences, got {tuple(schedule.shape)}"
    )
    return max_parts


def describe_layout(
    schedule: torch.Tensor,
    lengths: torch.Tensor,
    num_tokens: int,
    window: int,
    start: int,
    num_head_blocks: int,
    programs_per_sm: int = 0,
    latent: bool = False,
) -> tuple[Any, ...] | None:
    """Return the properties that a recorded launch depends on, or None if it is not recorded."""
    if programs_per_sm or num_tokens > MAX_DECODE_TOKENS:
        return None
    return describe_shape(schedule), lengths.shape, num_tokens, window, num_head_blocks


def list_variables(
    schedule: torch.Tensor, lengths: torch.Tensor, num_tokens: int, window: int, start: int, *_: int
) -> Variables:
    """Return the tensors and integers that differ in each call of a recorded launch."""
    return (schedule, lengths), {"start": start}


@replayed(describe_layout, list_variables)
def fill_schedule(
    schedule: torch.Tensor,
    lengths: torch.Tensor,
    num_tokens: int,
    window: int,
    start: int,
    num_head_blocks: int,
    programs_per_sm: int = 0,
    latent: bool = False,
) -> None:
    """Overwrite a schedule with `count_schedule_rows` rows, like `ops.fill_schedule`."""
    batch = lengths.shape[0]
    target = get_target(lengths.device)
    config = choose_schedule_config(target, latent=latent)
    assert schedule.is_contiguous()
    max_parts = get_max_parts(schedule, batch)
    capacity = target.sm_count * (programs_per_sm or estimate_programs(target))
    num_ranges = max(1, capacity // num_head_blocks)
    max_ranges = max_parts - batch + 1
    if 1 < max_ranges < num_ranges:
        # The schedule was sized for fewer programs.
        capacity = max_ranges * num_head_blocks
    num_ranges = min(num_ranges, max_ranges)
    launch(
        _fill_schedule, (batch,), schedule, lengths, batch, num_tokens, window, start,
        num_head_blocks, num_ranges, capacity, max_parts, config.split_cost, config.merge_cost,
        config.max_growth, PARTS_WIDTH=next_power_of_2(max_ranges), UNIT=config.unit,
        BATCH_WIDTH=next_power_of_2(batch), WINDOWED=window > 0, num_warps=1,
    )  # fmt: skip


def _should_split_equal(length: int, grid_size: int, capacity: int, config: ScheduleConfig) -> bool:
    """Return the result of `_should_split` for sequences of equal length, without a kernel."""
    num_tail = grid_size % capacity
    num_idle = max(capacity // 2 - num_tail, 0) if num_tail else 0
    saved_time = num_idle * cdiv(length, config.unit)
    split_cost = config.split_cost // (2 if grid_size > capacity else 1)
    return saved_time * config.unit > split_cost * capacity


@triton.jit
def _should_split(units, total, longest, batch, num_head_blocks, capacity, UNIT, split_cost):
    """Return whether splitting into ranges saves more time than it costs.

    The unit of time is the time in which a full GPU (`capacity` programs) reads one unit of tokens.
    If fewer than half of them run, which is common at the end of a launch, each reads up to twice
    as fast, even if its SM is full. (Half of the programs reach a bandwidth of 8 TB/s, and two of
    five reach 4.8 TB/s.)

    Args:
        units: Number of units of UNIT tokens in each sequence, `[>= B]`.
        total, longest: Sum and maximum of `units`.
        split_cost: As in `ScheduleConfig`. It is halved if not all programs start at once, because
            other programs read during that time.
    """
    grid_size = batch * num_head_blocks
    num_tail = grid_size % capacity
    half = (capacity // 2).to(tl.int64)
    split_time = total.to(tl.int64) * num_head_blocks
    longest = longest.to(tl.int64)
    tail_time = tl.where(num_tail > 0, tl.maximum(num_tail, half), 0)
    unsplit_time = longest * (grid_size - num_tail + tail_time)
    if grid_size <= capacity:
        # All programs start at once and share the bandwidth while more than half of them run. The
        # maximum over several times finds the time from which fewer than half run.
        unsplit_time = tl.maximum(longest * half, split_time)
        for i in tl.static_range(1, 8):
            limit = longest * i // 8
            units_read = tl.sum(tl.minimum(units.to(tl.int64), limit), 0)
            time = units_read * num_head_blocks + (longest - limit) * half
            unsplit_time = tl.maximum(unsplit_time, time)
    else:
        split_cost = split_cost // 2
    return (unsplit_time - split_time) * UNIT > split_cost.to(tl.int64) * capacity


@triton.jit(
    do_not_specialize=[
        "batch",
        "num_tokens",
        "window",
        "start",
        "num_head_blocks",
        "num_ranges",
        "capacity",
        "max_parts",
        "split_cost",
        "merge_cost",
        "max_growth",
    ]
)
def _fill_schedule(
    schedule_ptr, lengths_ptr, batch, num_tokens, window, start, num_head_blocks, num_ranges,
    capacity, max_parts, split_cost, merge_cost, max_growth, PARTS_WIDTH: tl.constexpr,
    UNIT: tl.constexpr, BATCH_WIDTH: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Write a schedule. Each sequence has a program, which computes all parts and writes its own.

    Args:
        schedule_ptr: Schedule, `[max_parts + B, 4]`, int32.
        lengths_ptr: Number of stored tokens, `[B]`, int32.
        batch, num_head_blocks: As in `count_schedule_rows`.
        num_tokens, window, start: As in `ops.fill_schedule`.
        num_ranges: Maximum number of ranges. 1 means that no sequence is split.
        capacity: Number of programs that the GPU runs at once.
        split_cost, merge_cost, max_growth, UNIT: As in `ScheduleConfig`.
    """
    own_b = tl.program_id(0)
    b = tl.arange(0, BATCH_WIDTH)
    is_sequence = b < batch
    lengths = tl.load(lengths_ptr + b, mask=is_sequence, other=0)
    first_token = tl.zeros([BATCH_WIDTH], tl.int32) + start
    if WINDOWED:
        first_visible = find_last_before_window(lengths - num_tokens, window) + 1
        first_token = tl.maximum(first_token, first_visible)
    first_unit = tl.maximum(first_token, 0) // UNIT
    # An empty sequence also has a part, because a program must write its output.
    units = tl.where(is_sequence, tl.maximum(tl.cdiv(lengths, UNIT) - first_unit, 1), 0)

    # The place of each sequence in the concatenation, in units.
    place_stop = tl.cumsum(units, 0)
    place_start = place_stop - units
    total = tl.sum(units, 0)
    longest = tl.max(units, 0)
    # `min_tokens` minimizes the time to read a range and to merge the longest sequence's parts.
    min_tokens = tl.sqrt_rn((longest * UNIT).to(tl.float32) * merge_cost)
    even_units = tl.cdiv(total, num_ranges)
    range_units = tl.maximum(even_units, (min_tokens / UNIT).to(tl.int32))
    # Ranges are longer if the longest sequence would have more than FAST_MERGE_PARTS parts.
    range_units = tl.maximum(
        range_units, tl.minimum(even_units * max_growth, longest // FAST_MERGE_PARTS)
    )
    is_split = _should_split(
        units, total, longest, batch, num_head_blocks, capacity, UNIT, split_cost
    )
    range_units = tl.where(is_split, range_units, total)

    first_range = place_start // range_units
    num_parts = tl.where(is_sequence, (place_stop - 1) // range_units - first_range + 1, 0)
    sums_index = tl.cumsum(num_parts, 0) - num_parts
    total_parts = tl.sum(num_parts, 0)
    # Parts in the middle of a sequence are whole ranges.
    num_middle = tl.maximum(num_parts - 2, 0)
    middle_row = tl.cumsum(num_middle, 0) - num_middle
    total_middle = tl.sum(num_middle, 0)
    # The sort key of a part is its length, and the longest part comes first. If most programs read
    # whole sequences, possibly of equal length, a bonus puts parts that begin a range first. Their
    # lengths differ, so that programs do not all end, and leave the memory idle, at the same time.
    puts_starts_first = (longest <= range_units) | (batch * num_head_blocks >= 2 * capacity)
    bonus = tl.where(puts_starts_first, EARLY_BONUS, 0)
    first_key = tl.minimum(place_stop, (first_range + 1) * range_units) - place_start
    first_key += tl.where(place_start == first_range * range_units, bonus, 0)
    first_key = tl.where(is_sequence, first_key, 0)
    last_key = place_stop - (place_stop - 1) // range_units * range_units + bonus
    last_key = tl.where(num_parts > 1, last_key, 0)

    is_own = b == own_b
    own_place = _pick_own(place_start, is_own)
    own_unit = _pick_own(first_unit, is_own)
    own_range = _pick_own(first_range, is_own)
    own_parts = _pick_own(num_parts, is_own)
    own_sums_index = _pick_own(sums_index, is_own)
    own_first_key = _pick_own(first_key, is_own)
    own_last_key = _pick_own(last_key, is_own)
    first_row = total_middle + _count_before(
        first_key, last_key, own_first_key, b < own_b, b < own_b
    )
    last_row = total_middle + _count_before(
        first_key, last_key, own_last_key, b <= own_b, b < own_b
    )

    i = tl.arange(0, PARTS_WIDTH)
    row = tl.where(i == own_parts - 1, last_row, _pick_own(middle_row, is_own) + i - 1)
    row = tl.where(i == 0, first_row, row)
    part_start = ((own_range + i) * range_units - own_place + own_unit) * UNIT
    part_stop = part_start + range_units * UNIT
    row_ptrs = schedule_ptr + row * 4
    is_own_part = i < own_parts
    tl.store(row_ptrs, own_b, mask=is_own_part)
    tl.store(row_ptrs + 1, tl.where(i == 0, 0, part_start), mask=is_own_part)
    tl.store(row_ptrs + 2, tl.where(i == own_parts - 1, NO_END, part_stop), mask=is_own_part)
    tl.store(row_ptrs + 3, tl.where(own_parts > 1, own_sums_index + i, -1), mask=is_own_part)
    sequence_ptr = schedule_ptr + (max_parts + own_b) * 4
    tl.store(sequence_ptr, own_sums_index)
    tl.store(sequence_ptr + 1, own_parts)

    if own_b == batch - 1:
        unused_rows = (total_parts + i)[:, None]
        unused_ptrs = schedule_ptr + unused_rows * 4 + tl.arange(0, 4)[None, :]
        tl.store(unused_ptrs, -1, mask=unused_rows < max_parts)


@triton.jit
def _pick_own(values, is_own):
    return tl.sum(tl.where(is_own, values, 0), 0)


@triton.jit
def _count_before(first_key, last_key, key, tied_first, tied_last):
    """Return the number of first and last parts that come before a part with the sort key `key`.

    These are parts with a larger key, and parts with this key in `tied_first` and `tied_last`.
    """
    is_before = (first_key > key) | ((first_key == key) & tied_first)
    num_first = tl.sum(is_before.to(tl.int32), 0)
    is_before = (last_key > key) | ((last_key == key) & tied_last)
    return num_first + tl.sum(is_before.to(tl.int32), 0)
