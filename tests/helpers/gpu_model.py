"""A model of a GPU that runs the decode kernel: which share of its bandwidth a plan reaches.

`python -m tests.helpers.gpu_model` prints the table of docs/kernels.md.

It knows of an H200 (132 processors, 4.3 TB/s that can be reached) what the plan decides about: that
programs are started in order, each where a place is free; that a processor with one to six of them
reads so many bytes per clock; that all of them together cannot read more than the memory gives;
and that the program that is done last with a sequence merges its parts. A program reads nothing at
its beginning and end. Nothing else is modelled: trust ratios.

Six programs of two warps read 40 bytes per clock, by a cycle model of one processor that runs the
machine code of the main loop. One alone reads 10, an estimate: its warps have as many instructions
for a tile as those of four warps had before, 489 and 464, for which the cycle model gave 10.7. The
others lie between.
"""

import heapq
import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hf_fp8kv.ops.triton.tuning import PlanConfig

__all__ = [
    "BYTES_PER_TOKEN", "H200", "Gpu", "Part", "best_time", "bound", "cut", "least_time",
    "run_parts", "time_of",
]  # fmt: skip

# K and V of a token and head: 2 x 128 bytes, and two scales of two.
BYTES_PER_TOKEN = 260
CONFIG = PlanConfig()


@dataclass(frozen=True)
class Gpu:
    """A GPU; times in microseconds.

    Attributes:
        processors: of them each has `len(rates)` places for programs.
        rates: bytes per clock of a processor with one program, with two, ...
        clock: in MHz.
        bandwidth: of the memory, bytes per microsecond.
        start: what passes until a program's first bytes come: its launch, its row of the plan, the
            page table, the query.
        end: and after its last: sums over warps, and what it stores.
        merge: of merging a sequence, by its last program: atomics and latencies,
        merge_step: and each part: 4 rows of 128 float32 at 40 bytes per clock, and their sums.
    """

    processors: int = 132
    rates: tuple[float, ...] = (10.0, 18.0, 25.0, 31.0, 36.0, 40.0)
    clock: float = 1980.0
    bandwidth: float = 4.3e6
    start: float = 1.5
    end: float = 0.5
    merge: float = 1.2
    merge_step: float = 0.033

    @property
    def places(self) -> int:
        return self.processors * len(self.rates)


H200 = Gpu()


class Part(NamedTuple):
    """A row of a plan: units `begin` to `end - 1` of a sequence, and whether it is all of it."""

    sequence: int
    begin: int
    end: int
    whole: bool


def cut(
    lengths: Sequence[int], heads: int, places: int, *, split: bool | None = None
) -> list[Part]:
    """Return the parts that a plan should have, in its order. `split`: None: if it gains."""
    unit, cost = CONFIG.unit, CONFIG.split_cost
    units = [max(1, -(-n // unit)) for n in lengths]
    if split is None:
        saved = (_whole_time(units, heads, places) - sum(units) * heads) * unit
        split = saved > (cost if len(units) * heads <= places else cost // 2) * places
    least = int(math.sqrt(max(units) * unit * CONFIG.merge_cost) / unit)
    even = -(-sum(units) // max(1, places // heads))
    length = max(even, least, min(even * 2, max(units) // 32)) if split else sum(units)
    alike = max(units) <= length or len(units) * heads >= 2 * places
    parts = []
    stops = list(itertools.accumulate(units))
    for b, (stop, count) in enumerate(zip(stops, units, strict=True)):
        begin = stop - count
        cuts = [begin, *range((begin // length + 1) * length, stop, length), stop]
        for first, last in itertools.pairwise(cuts):
            part = Part(b, first - begin, last - begin, len(cuts) == 2)
            middle = first != begin and last != stop
            late = alike and first % length != 0
            parts.append(((not middle, late, first - last), part))
    return [part for _, part in sorted(parts, key=lambda keyed: keyed[0])]


def _whole_time(units: Sequence[int], heads: int, places: int) -> int:
    """Return the time that whole sequences are expected to take, see `plan._gains`."""
    longest, count = max(units), len(units) * heads
    late, few = count % places, places // 2
    if count > places:
        return longest * (count - late + (max(late, few) if late else 0))
    untils = [longest * i // 8 for i in range(9)]
    reads = [sum(min(n, until) for n in units) * heads for until in untils]
    return max(read + (longest - until) * few for read, until in zip(reads, untils, strict=True))


@dataclass
class _Processor:
    """What it has read for each of its programs, and how much that is when which are done."""

    read: float = 0.0
    since: float = 0.0
    ends: list[tuple[float, int]] = field(default_factory=list)
    version: int = 0


def run_parts(
    sizes: Iterable[int], gpu: Gpu = H200, merged: Sequence[int | None] | None = None
) -> float:
    """Return the microseconds until programs that read so many bytes are done.

    `merged`: for each of them, whose parts are merged with it, or None. `flow` is time in which the
    memory were fast enough: all processors then go by their own rates.
    """
    waiting = enumerate(sizes)
    left = Counter(merged or ())
    counts = dict(left)
    processors = [_Processor() for _ in range(gpu.processors)]
    # When, order, processor, program, bytes to read.
    timers: list[tuple[float, int, int, int, float | None]] = []
    drained: list[tuple[float, int, int]] = []  # flow, processor, its version
    order = itertools.count()
    now = flow = demand = 0.0
    running = 0
    most = gpu.bandwidth / gpu.clock

    def issue(p: int) -> int:
        program, size = next(waiting, (0, None))
        if size is None:
            return 0
        heapq.heappush(timers, (now + gpu.start, next(order), p, program, float(size)))
        return 1

    def merge(program: int) -> float:
        whose = merged[program] if merged else None
        left[whose] -= 1
        if whose is None or left[whose]:
            return 0.0
        return gpu.merge + gpu.merge_step * counts[whose]

    def rate(count: int) -> float:
        return gpu.rates[count - 1] if count else 0.0

    def settle(p: int) -> _Processor:
        one, count = processors[p], len(processors[p].ends)
        if count:
            one.read += (flow - one.since) * rate(count) / count
        one.since = flow
        return one

    def expect(p: int) -> None:
        one, count = processors[p], len(processors[p].ends)
        one.version += 1
        if count:
            ends = flow + (one.ends[0][0] - one.read) * count / rate(count)
            heapq.heappush(drained, (ends, p, one.version))

    for _ in gpu.rates:
        for p in range(gpu.processors):
            running += issue(p)
    while running:
        while drained and drained[0][2] != processors[drained[0][1]].version:
            heapq.heappop(drained)
        speed = gpu.clock * min(1.0, most / demand) if demand else gpu.clock
        done = now + (drained[0][0] - flow) / speed if drained else float("inf")
        timer = timers[0][0] if timers else float("inf")
        flow += (min(done, timer) - now) * speed
        now = min(done, timer)
        if timer <= done:
            _, _, p, program, size = heapq.heappop(timers)
            if size is None:
                running += issue(p) - 1
                continue
            one = settle(p)
            demand -= rate(len(one.ends))
            heapq.heappush(one.ends, (one.read + size, program))
        else:
            p = heapq.heappop(drained)[1]
            one = settle(p)
            demand -= rate(len(one.ends))
            _, program = heapq.heappop(one.ends)
            until = now + gpu.end + merge(program)
            heapq.heappush(timers, (until, next(order), p, program, None))
        demand += rate(len(one.ends))
        expect(p)
    return now


def time_of(parts: Sequence[Part], lengths: Sequence[int], heads: int, gpu: Gpu = H200) -> float:
    """Return the microseconds of a plan."""
    unit = CONFIG.unit
    sizes = [(min(p.end * unit, lengths[p.sequence]) - p.begin * unit) for p in parts]
    merged = [None if p.whole else p.sequence * heads + h for p in parts for h in range(heads)]
    return run_parts([size * BYTES_PER_TOKEN for size in sizes for _ in range(heads)], gpu, merged)


def bound(lengths: Sequence[int], heads: int, gpu: Gpu = H200) -> float:
    """Return the microseconds in which the memory can give all bytes."""
    return sum(lengths) * heads * BYTES_PER_TOKEN / gpu.bandwidth


def least_time(lengths: Sequence[int], heads: int, gpu: Gpu = H200) -> float:
    """Return a time below which no plan gets: a program's, and its bytes' at the best rate.

    Sequences must be split, and merged, if there are too few for the bandwidth; otherwise one of
    the longest may have to.
    """
    fixed = gpu.start + gpu.end
    whole = max(lengths) * BYTES_PER_TOKEN / (gpu.rates[0] * gpu.clock)
    best = float("inf")
    for count in range(1, gpu.places + 1):
        full, rest = divmod(count, gpu.processors)
        more = gpu.rates[full] * rest if rest else 0.0
        rate = (gpu.rates[full - 1] if full else 0.0) * (gpu.processors - rest) + more
        # No part is smaller than a unit.
        unit = CONFIG.unit * BYTES_PER_TOKEN / (gpu.rates[0] * gpu.clock)
        all_bytes = bound(lengths, heads, gpu) * gpu.bandwidth
        best = min(best, max(unit, all_bytes / min(rate * gpu.clock, gpu.bandwidth)))
    return fixed + min(max(best, whole), best + gpu.merge + 2 * gpu.merge_step)


def best_time(lengths: Sequence[int], heads: int, gpu: Gpu = H200) -> float:
    """Return the best time of many plans: whole sequences, even parts of any number, ranges."""

    def cut_evenly(count: int) -> list[Part]:
        longest = -(-max(lengths) // CONFIG.unit)
        size = -(-longest // count)
        parts = []
        for b, length in enumerate(lengths):
            units = max(1, -(-length // CONFIG.unit))
            number = -(-units // size)
            step = -(-units // number)
            spans = [(i, min(i + step, units)) for i in range(0, units, step)]
            parts += [Part(b, *span, len(spans) == 1) for span in spans]
        return sorted(parts, key=lambda p: p.begin - p.end)

    tried: list[Callable[[], list[Part]]] = [
        *(lambda n=n: cut(lengths, heads, n, split=True) for n in _places(gpu, heads)),
        *(lambda n=n: cut_evenly(n) for n in (1, 2, 3, 4, 5, 6, 8, 11, 16, 24, 48)),
    ]
    return min(time_of(make(), lengths, heads, gpu) for make in tried)


def _places(gpu: Gpu, heads: int) -> list[int]:
    return sorted({max(heads, gpu.places * share // 6) for share in (2, 3, 4, 5, 6, 12)})


def main() -> None:
    """Print which share of the time that the memory needs, and of the best, plans reach."""
    rows = [
        "| KV heads | batch x tokens | memory, µs | whole, µs | plan, µs | of memory | of best |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    cases = [
        (8, 1, 1), (8, 1, 32), (8, 8, 32), (8, 25, 32), (8, 32, 32), (8, 50, 32), (8, 64, 32),
        (8, 64, 4), (8, 100, 4), (8, 256, 1), (16, 25, 32), (32, 16, 32), (2, 256, 32), (1, 8, 128),
    ]  # fmt: skip
    for heads, batch, length in cases:
        lengths = [length * 1024] * batch

        def run(split: bool | None, lengths: list[int] = lengths, heads: int = heads) -> float:
            parts = cut(lengths, heads, H200.places, split=split)
            return time_of(parts, lengths, heads)

        took, whole = run(None), run(False)
        least, best = bound(lengths, heads), min(took, best_time(lengths, heads))
        rows.append(
            f"| {heads} | {batch} x {length}k | {least:.1f} | {whole:.1f} | {took:.1f} | "
            f"{least / took:.0%} | {best / took:.0%} |"
        )
    sys.stdout.write("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
