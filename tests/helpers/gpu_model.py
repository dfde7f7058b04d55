"""A simulation of a GPU that runs the decode kernel, to compute the time of a work plan.

The model has the properties of an H200 (132 SMs, 4.3 TB/s of usable bandwidth) that a good plan
depends on. Programs start in order, each on an SM that has room for it. An SM with one to six
programs reads a fixed number of bytes per clock cycle, and all SMs together cannot read more than
the memory delivers. A program reads nothing at its beginning and end. A second kernel merges parts
after the last program. Nothing else is modeled, so only ratios of times are meaningful.

Six programs of two warps read 40 bytes per cycle, according to a cycle model of one SM that runs
the machine code of the main loop. The rate of one program, 10 bytes, is an estimate: its warps have
489 instructions for a tile, and an earlier program of four warps had 464 and reached 10.7 in the
cycle model. The remaining rates lie in between.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hf_fp8kv.ops.triton.tuning import PlanConfig

__all__ = ["UNIT_TOKENS", "Part", "compute_best_time", "compute_lower_bound", "compute_plan_time"]

# Bytes of K and V per token and head: 2 x 128 codes, and two scales of 2 bytes.
BYTES_PER_TOKEN = 260
UNIT_TOKENS = PlanConfig().unit

NUM_SMS = 132
# Bytes per cycle that an SM with one to six programs reads. An SM has room for six programs.
SM_RATES = (10.0, 18.0, 25.0, 31.0, 36.0, 40.0)
CLOCK_MHZ = 1980.0
BYTES_PER_US = 4.3e6  # memory bandwidth
# Microseconds before a program's first bytes (its launch, its row of the plan, the page table, the
# query) and after its last bytes (sums over warps, and the stores).
START_US, END_US = 1.5, 0.5
# Estimated microseconds of the second kernel: its start, and each part of the sequence that has the
# most parts.
MERGE_US, PART_US = 1.9, 0.033


class Part(NamedTuple):
    """A row of a plan: units `begin` to `end - 1` of a sequence, or all its units (`is_whole`)."""

    sequence: int
    begin: int
    end: int
    is_whole: bool


class _Timer(NamedTuple):
    """The time at which a program begins to read, or at which it ends if `size` is None."""

    time: float
    order: int  # decides between equal times
    sm_index: int
    program: int
    size: float | None  # bytes to read


class _Drain(NamedTuple):
    """The value of `flow` at which the next program of an SM has read all its bytes."""

    flow: float
    sm_index: int
    version: int  # of the SM. A drain of an older version is outdated


@dataclass
class _SM:
    """An SM and its programs.

    Attributes:
        bytes_read: Bytes that a program has read if it has run since the start.
        update_flow: `flow` at the last update of `bytes_read`.
        targets: Heap of the programs, by the value of `bytes_read` at which each has read all.
        version: Number of changes of `targets`.
    """

    bytes_read: float = 0.0
    update_flow: float = 0.0
    targets: list[tuple[float, int]] = field(default_factory=list)
    version: int = 0


def simulate_programs(sizes: Iterable[int]) -> float:
    """Return the microseconds until all programs end. Program `i` reads `sizes[i]` bytes.

    `flow` is the time in cycles that would have passed if the memory did not limit the SMs' rates.
    """
    programs = enumerate(sizes)
    sms = [_SM() for _ in range(NUM_SMS)]
    timers: list[_Timer] = []  # a heap
    drains: list[_Drain] = []  # a heap
    order = itertools.count()
    time = flow = demand = 0.0
    num_running = 0
    bytes_per_cycle = BYTES_PER_US / CLOCK_MHZ

    def start_program(index: int) -> int:
        program, size = next(programs, (0, None))
        if size is None:
            return 0
        timer = _Timer(time + START_US, next(order), index, program, float(size))
        heapq.heappush(timers, timer)
        return 1

    def get_rate(num_programs: int) -> float:
        return SM_RATES[num_programs - 1] if num_programs else 0.0

    def update_reads(index: int) -> _SM:
        sm = sms[index]
        num_programs = len(sm.targets)
        if num_programs:
            sm.bytes_read += (flow - sm.update_flow) * get_rate(num_programs) / num_programs
        sm.update_flow = flow
        return sm

    def schedule_drain(index: int) -> None:
        sm = sms[index]
        num_programs = len(sm.targets)
        sm.version += 1
        if num_programs:
            bytes_left = (sm.targets[0][0] - sm.bytes_read) * num_programs
            drain_flow = flow + bytes_left / get_rate(num_programs)
            heapq.heappush(drains, _Drain(drain_flow, index, sm.version))

    for _ in SM_RATES:
        for index in range(NUM_SMS):
            num_running += start_program(index)
    while num_running:
        while drains and drains[0].version != sms[drains[0].sm_index].version:
            heapq.heappop(drains)
        speed = CLOCK_MHZ * min(1.0, bytes_per_cycle / demand) if demand else CLOCK_MHZ
        drain_time = time + (drains[0].flow - flow) / speed if drains else float("inf")
        timer_time = timers[0].time if timers else float("inf")
        flow += (min(drain_time, timer_time) - time) * speed
        time = min(drain_time, timer_time)
        if timer_time <= drain_time:
            _, _, index, program, size = heapq.heappop(timers)
            if size is None:
                num_running += start_program(index) - 1
                continue
            sm = update_reads(index)
            demand -= get_rate(len(sm.targets))
            heapq.heappush(sm.targets, (sm.bytes_read + size, program))
        else:
            index = heapq.heappop(drains).sm_index
            sm = update_reads(index)
            demand -= get_rate(len(sm.targets))
            _, program = heapq.heappop(sm.targets)
            heapq.heappush(timers, _Timer(time + END_US, next(order), index, program, None))
        demand += get_rate(len(sm.targets))
        schedule_drain(index)
    return time


def compute_plan_time(parts: Sequence[Part], lengths: Sequence[int], num_heads: int) -> float:
    """Return the microseconds that a plan takes for sequences of these lengths."""
    part_lengths = [
        min(part.end * UNIT_TOKENS, lengths[part.sequence]) - part.begin * UNIT_TOKENS
        for part in parts
    ]
    sizes = [length * BYTES_PER_TOKEN for length in part_lengths for _ in range(num_heads)]
    read_us = simulate_programs(sizes)
    part_counts = Counter(part.sequence for part in parts if not part.is_whole)
    return read_us + (MERGE_US + PART_US * max(part_counts.values()) if part_counts else 0.0)


def compute_lower_bound(lengths: Sequence[int], num_heads: int) -> float:
    """Return the microseconds in which the memory can deliver all bytes."""
    return sum(lengths) * num_heads * BYTES_PER_TOKEN / BYTES_PER_US


def compute_best_time(lengths: Sequence[int], num_heads: int) -> float:
    """Return the time in microseconds of the fastest plan, of plans that split sequences evenly."""

    def cut_evenly(max_parts: int) -> list[Part]:
        max_part_units = -(-max(lengths) // (UNIT_TOKENS * max_parts))
        parts = []
        for sequence, length in enumerate(lengths):
            num_units = max(1, -(-length // UNIT_TOKENS))
            num_parts = -(-num_units // max_part_units)
            step = -(-num_units // num_parts)
            spans = [(i, min(i + step, num_units)) for i in range(0, num_units, step)]
            parts += [Part(sequence, *span, len(spans) == 1) for span in spans]
        return sorted(parts, key=lambda part: part.begin - part.end)

    part_limits = (1, 2, 3, 4, 5, 6, 8, 11, 16, 24, 48)
    return min(compute_plan_time(cut_evenly(n), lengths, num_heads) for n in part_limits)
