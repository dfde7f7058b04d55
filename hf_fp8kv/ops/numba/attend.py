"""The attention of the "numba" backend; cpu.py prepares its calls.

A call is one record, `ATTEND`: addresses, strides in bytes, sizes and constants. So the kernel has
one signature, is compiled once for all formats, dtypes and shapes, and costs little to call.
Threads share the record, and take units of work from its counter `next`: a unit is one sequence,
one key head, one block of query rows, and one split of the positions. `finish` adds the splits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .softmax import NOTHING, TILE, add_bias, adjust, hide, soften
from .vectors import (
    BF16,
    F32,
    FP8,
    LANES,
    STAMP,
    Call,
    Code,
    Floats,
    add_four,
    address_of,
    decode,
    div,
    fma,
    jit,
    kernel,
    load,
    load_as,
    load_codes,
    load_i32,
    load_some_codes,
    mul,
    next_unit,
    page_of,
    prefetch,
    record,
    splat,
    store,
    store_as,
    total,
    totals,
    width_of,
)

# Rows (a query token of one query head) that share the decoded bytes.
BLOCK = 64

ATTEND = record(
    "next units batch q_heads heads tokens k_dim v_dim slots start stop causal window "
    "table table_b table_columns lengths center "
    "k k_kind k_shift k_mask k_nan_mask k_nan_code k_scales k_scale "
    "v v_kind v_shift v_mask v_nan_mask v_nan_code v_scales v_scale "
    "q q_kind q_b q_h q_t sinks sinks_kind mask mask_b mask_t "
    "bias bias_kind bias_b bias_h bias_t more more_kind more_b more_h more_t "
    "splits blocks block_tokens work work_rows out out_kind",
    "scaling softcap k_factor v_factor",
)


class Scratch(NamedTuple):
    """What a thread works with: rows, their logits, and what it knows of one tile of positions."""

    q: Floats  # [rows, Dk to a whole vector], float32
    logits: Floats  # [rows, TILE], float32; then weights
    offset: Floats  # [rows], float32, the logit of K's center
    fade: Floats  # [rows], float32: what the older sums are still worth
    k_scales: Floats  # [2 * TILE], float32: a page may end inside a vector, which is stored whole
    v_scales: Floats  # the same
    seen: Floats  # [TILE], int64: whether some query sees the position
    parts: Floats  # [TILE, 4], int64: page and head, slot, first column, one past the last
    lines: Floats  # [TILE / LANES], int64: where each vector of V's first row is
    strip: Floats  # [TILE or Dk, and a vector], float32: one decoded row of K or V
    out: Floats  # [rows / 4, Dv, 4], float32 (or [1, Dv, 1])


@jit
def _dot4(
    source: int, kind: int, code: Code, count: int, x: int, stride: int
) -> tuple[float, float, float, float]:
    """Products of `count` stored numbers, FP8 or F32, with four float32 rows, `stride` apart."""
    zero = splat(np.float32(0))
    a, b, c, d = zero, zero, zero, zero
    whole = count // LANES * LANES
    if kind == FP8:
        for i in range(0, whole, LANES):
            y, at = load_codes(source + i, code), x + 4 * i
            a = fma(y, load(at), a)
            b = fma(y, load(at + stride), b)
            c = fma(y, load(at + 2 * stride), c)
            d = fma(y, load(at + 3 * stride), d)
        if whole < count:
            y, at = load_some_codes(source + whole, code, count - whole), x + 4 * whole
            a = fma(y, load(at), a)
            b = fma(y, load(at + stride), b)
            c = fma(y, load(at + 2 * stride), c)
            d = fma(y, load(at + 3 * stride), d)
    else:
        for i in range(0, count, LANES):
            y, at = load(source + 4 * i), x + 4 * i
            a = fma(y, load(at), a)
            b = fma(y, load(at + stride), b)
            c = fma(y, load(at + 2 * stride), c)
            d = fma(y, load(at + 3 * stride), d)
    found: tuple[float, float, float, float] = totals(a, b, c, d)
    return found


@jit
def _dot1(source: int, kind: int, code: Code, count: int, x: int) -> float:
    """The same with one row."""
    a = splat(np.float32(0))
    whole = count // LANES * LANES
    if kind == FP8:
        for i in range(0, whole, LANES):
            a = fma(load_codes(source + i, code), load(x + 4 * i), a)
        if whole < count:
            y = load_some_codes(source + whole, code, count - whole)
            a = fma(y, load(x + 4 * whole), a)
    else:
        for i in range(0, count, LANES):
            a = fma(load(source + 4 * i), load(x + 4 * i), a)
    found: float = total(a)
    return found


@jit
def _load_queries(c: Call, sequence: int, head: int, token: int, rows: int, s: Scratch) -> None:
    """Rows of `s.q` are then the queries times `scaling` and all that K's codes lack.

    Row i is query token `token + i // G` of query head `head * G + i % G`.
    """
    groups = c.q_heads // c.heads
    width = width_of(c.q_kind)
    scaling, factor = splat(np.float32(c.scaling)), splat(np.float32(c.k_factor))
    for row in range(rows):
        source = c.q + sequence * c.q_b + (head * groups + row % groups) * c.q_h
        source += (token + row // groups) * c.q_t
        sum_ = splat(np.float32(0))
        for i in range(0, c.k_dim, LANES):
            count = c.k_dim - i
            x = mul(load_as(source + width * i, c.q_kind, count), scaling)
            if c.center:
                at = c.center + 4 * ((sequence * c.heads + head) * c.k_dim + i)
                sum_ = fma(x, load_as(at, F32, count), sum_)
            if c.k_scale:
                x = mul(x, load_as(c.k_scale + 4 * (head * c.k_dim + i), F32, count))
            store(address_of(s.q[row]) + 4 * i, mul(x, factor))
        s.offset[row] = total(sum_)


@jit
def _find_parts(c: Call, sequence: int, head: int, low: int, high: int, parts: Floats) -> int:
    """Positions `low` to `high - 1`, page by page; returns how many pages."""
    found, at = 0, low
    while at < high:
        slot = at % c.slots
        end = min(at + c.slots - slot, high)
        part = parts[found]
        part[0] = page_of(c, sequence, at) * c.heads + head
        part[1], part[2], part[3] = slot, at - low, end - low
        found, at = found + 1, end
    return found


@jit
def _load_scales(c: Call, pool: int, parts: Floats, to: int) -> None:
    """The dynamic scales of the parts, float32, and zeros up to a whole vector."""
    count = parts[-1, 3]
    store(to + 4 * ((count - 1) // LANES * LANES), splat(np.float32(0)))
    for part in parts:
        source, begin, size = pool + 2 * (part[0] * c.slots + part[1]), part[2], part[3] - part[2]
        for i in range(0, size, LANES):
            store(to + 4 * (begin + i), load_as(source + 2 * i, BF16, size - i))


@jit
def _logits(c: Call, parts: Floats, rows: int, s: Scratch) -> None:
    """Products of `rows` queries (1, or a multiple of 4) with the positions of the parts."""
    code = (c.k_shift, c.k_mask, c.k_nan_mask, c.k_nan_code)
    size = c.k_dim * width_of(c.k_kind)
    direct = c.k_kind == FP8 and rows <= 4
    kind = FP8 if direct else F32
    q, strip, out = address_of(s.q), address_of(s.strip), s.logits
    stride = 4 * s.q.shape[1]
    for part in parts:
        source = c.k + (part[0] * c.slots + part[1]) * size
        v_size = c.v_dim * width_of(c.v_kind)
        soon = c.v + (part[0] * c.slots + part[1]) * v_size
        for column in range(part[2], part[3]):
            for i in range(0, v_size, 64):
                prefetch(soon + i)
            soon += v_size
            if not direct:
                decode(source, c.k_kind, code, c.k_dim, strip)
            place = source if direct else strip
            if rows == 1:
                out[0, column] = _dot1(place, kind, code, c.k_dim, q)
            else:
                for row in range(0, rows, 4):
                    found = _dot4(place, kind, code, c.k_dim, q + row * stride, stride)
                    for i in range(4):
                        out[row + i, column] = found[i]
            source += size


@jit
def _fade_out(fade: Floats, rows: int, out: Floats) -> None:
    """The rows of `out` times their fade."""
    lanes = out.shape[2]
    pattern = np.empty(LANES, np.float32)
    for block in range(rows // lanes):
        changed = False
        for i in range(LANES):
            pattern[i] = fade[block * lanes + i % lanes]
            changed |= pattern[i] != 1
        if changed:
            factor = load(address_of(pattern))
            place, size = address_of(out[block]), out[block].size
            for i in range(0, size, LANES):
                x = mul(load_as(place + 4 * i, F32, size - i), factor)
                store_as(place + 4 * i, F32, size - i, x)


@jit
def _values(c: Call, parts: Floats, all_seen: bool, rows: int, soon: int, s: Scratch) -> None:
    """Adds weights times V; what no query sees counts as zero even if its bytes are NaN.

    `soon` is where the next tile's K begins, or 0: a page is too short for the CPU to guess that.
    """
    count = parts[-1, 3]
    if c.v_kind == FP8 and rows <= 4 and all_seen and _find_lines(c, parts, s.lines):
        _values_direct(c, count, rows, soon, s)
        return
    code = (c.v_shift, c.v_mask, c.v_nan_mask, c.v_nan_code)
    width = width_of(c.v_kind)
    weights, strip = address_of(s.logits), address_of(s.strip)
    stride = 4 * TILE
    for dim in range(c.v_dim):
        store(strip + 4 * ((count - 1) // LANES * LANES), splat(np.float32(0)))
        for part in parts:
            source = c.v + ((part[0] * c.v_dim + dim) * c.slots + part[1]) * width
            decode(source, c.v_kind, code, part[3] - part[2], strip + 4 * part[2])
        if not all_seen:
            for column in range(count):
                if s.seen[column] == 0:
                    s.strip[column] = 0
        if rows == 1:
            s.out[0, dim, 0] += _dot1(strip, F32, code, count, weights)
        else:
            for row in range(0, rows, 4):
                found = _dot4(strip, F32, code, count, weights + row * stride, stride)
                add_four(address_of(s.out[row // 4, dim]), found)


@jit
def _find_lines(c: Call, parts: Floats, lines: Floats) -> bool:
    """Whether no vector of a tile crosses pages; `lines` is then where each starts, at row 0."""
    for part in parts:
        if part[2] % LANES or (part[3] % LANES and part[3] != parts[-1, 3]):
            return False
        for column in range(part[2], part[3], LANES):
            slot = part[1] + column - part[2]
            lines[column // LANES] = c.v + part[0] * c.v_dim * c.slots + slot
    return True


@jit
def _values_direct(c: Call, count: int, rows: int, soon: int, s: Scratch) -> None:
    """The same for 8 bits and at most four rows: no decoded copy."""
    code = (c.v_shift, c.v_mask, c.v_nan_mask, c.v_nan_code)
    weights, stride, zero = address_of(s.logits), 4 * TILE, splat(np.float32(0))
    whole, rest = count // LANES, count % LANES
    place, lines, out = 0, s.lines, address_of(s.out)
    for dim in range(c.v_dim):
        if soon:
            prefetch(soon + 64 * dim)
        a, b, d, e = zero, zero, zero, zero
        if rows == 1:
            for i in range(whole):
                y = load_codes(lines[i] + place, code)
                a = fma(y, load(weights + 4 * LANES * i), a)
            if rest:
                y = load_some_codes(lines[whole] + place, code, rest)
                a = fma(y, load(weights + 4 * LANES * whole), a)
            s.out[0, dim, 0] += total(a)
        else:
            for i in range(whole):
                y, at = load_codes(lines[i] + place, code), weights + 4 * LANES * i
                a = fma(y, load(at), a)
                b = fma(y, load(at + stride), b)
                d = fma(y, load(at + 2 * stride), d)
                e = fma(y, load(at + 3 * stride), e)
            if rest:
                y, at = (
                    load_some_codes(lines[whole] + place, code, rest),
                    weights + 4 * LANES * whole,
                )
                a = fma(y, load(at), a)
                b = fma(y, load(at + stride), b)
                d = fma(y, load(at + 2 * stride), d)
                e = fma(y, load(at + 3 * stride), e)
            add_four(out + 16 * dim, totals(a, b, d, e))
        place += c.slots


@jit
def _attend_tile(
    c: Call, parts: Floats, sequence: int, head: int, token: int, rows: int, padded: int,
    low: int, high: int, length: int, s: Scratch, top: Floats, sums: Floats,
) -> None:  # fmt: skip
    """Adds positions `low` to `high - 1` to the sums of `rows` rows."""
    count = high - low
    k_scales, v_scales, logits = address_of(s.k_scales), 0, address_of(s.logits)
    _logits(c, parts, padded, s)
    if c.k_scales:
        _load_scales(c, c.k_scales, parts, k_scales)
    if c.k_scales or c.center or c.softcap != 0:
        adjust(c, rows, count, k_scales, s.offset, logits)
    if c.bias:
        place = c.bias + sequence * c.bias_b + (low - c.start) * width_of(c.bias_kind)
        add_bias(c, place, c.bias_kind, c.bias_h, c.bias_t, head, token, rows, count, logits)
    if c.more:
        place = c.more + sequence * c.more_b + (low - c.start) * width_of(c.more_kind)
        add_bias(c, place, c.more_kind, c.more_h, c.more_t, head, token, rows, count, logits)
    found = count
    query = length - c.tokens + token  # the position of the first row
    if c.mask or c.window or (c.causal and high > query + 1):
        found = hide(c, sequence, token, rows, low, count, query, s.seen, s.logits)
    if found == 0:
        return
    if c.v_scales:
        v_scales = address_of(s.v_scales)
        _load_scales(c, c.v_scales, parts, v_scales)
        if found < count:
            for column in range(count):
                if s.seen[column] == 0:
                    s.v_scales[column] = 0
    if soften(rows, count, v_scales, logits, top, sums, s.fade):
        _fade_out(s.fade, padded, s.out)
    soon = 0
    if high // c.slots < c.table_columns:
        place = (page_of(c, sequence, high) * c.heads + head) * c.slots + high % c.slots
        soon = c.k + place * c.k_dim * width_of(c.k_kind)
    _values(c, parts, found == count, padded, soon, s)


@jit
def _scratch(c: Call) -> Scratch:
    rows, lanes = c.work_rows, 1 if c.work_rows == 1 else 4
    width = (c.k_dim + LANES - 1) // LANES * LANES
    floats = np.zeros(4 * TILE + max(width, TILE) + LANES, np.float32)
    return Scratch(
        np.zeros((rows, width), np.float32),
        np.zeros((rows, TILE), np.float32),
        np.zeros(rows, np.float32),
        np.ones(rows, np.float32),
        floats[: 2 * TILE],
        floats[2 * TILE : 4 * TILE],
        np.zeros(TILE, np.int64),
        np.zeros((TILE, 4), np.int64),
        np.zeros(TILE // LANES, np.int64),
        floats[4 * TILE :],
        np.zeros((rows // lanes, c.v_dim, lanes), np.float32),
    )


@jit
def _finish_row(c: Call, sequence: int, head: int, row: int, work: Floats) -> None:
    """One query token of one query head: the splits together, and the sink."""
    groups = c.q_heads // c.heads
    q_head = head * groups + row % groups
    token = row // groups
    block, place = token // c.block_tokens, row % (c.block_tokens * groups)
    begin = ((sequence * c.heads + head) * c.blocks + block) * c.splits
    rows, v_dim = c.work_rows, c.v_dim
    sink = NOTHING
    if c.sinks:
        sink = total(load_as(c.sinks + width_of(c.sinks_kind) * q_head, c.sinks_kind, 1))
    top = sink
    for unit in range(begin, begin + c.splits):
        top = max(top, work[unit, place])
    sum_ = np.exp(sink - top) if sink > NOTHING else np.float32(0)
    weights = np.empty(c.splits, np.float32)
    for split in range(c.splits):
        part = work[begin + split]
        # A split that saw nothing has a sum of zero, or NaN if all that it saw was NaN.
        weight = np.exp(part[place] - top) if part[place] > NOTHING else np.float32(1)
        weights[split] = weight
        sum_ += part[rows + place] * weight
    inverse = splat(np.float32(c.v_factor))
    safe = splat(sum_ if sum_ != 0 else np.float32(1))
    width = width_of(c.out_kind)
    to = c.out + ((sequence * c.tokens + token) * c.q_heads + q_head) * v_dim * width
    for i in range(0, v_dim, LANES):
        x = splat(np.float32(0))
        for split in range(c.splits):
            at = address_of(work[begin + split, 2 * rows + place * v_dim :])
            x = fma(load_as(at + 4 * i, F32, v_dim - i), splat(weights[split]), x)
        x = mul(div(x, safe), inverse)
        if c.v_scale:
            x = mul(x, load_as(c.v_scale + 4 * (head * v_dim + i), F32, v_dim - i))
        store_as(to + width * i, c.out_kind, v_dim - i, x)


def _kernels(stamp: int) -> tuple[Callable[[Any, Any], None], Callable[[Any, Any], None]]:
    """Makes the kernels; `stamp` is a part of what numba's cache knows them by."""

    @kernel
    def attend(calls: Any, work: Any) -> None:
        """Works off units of `calls[0]` until none is left; any number of threads at a time.

        `work` is `[units, 2 * rows + rows * Dv]`, float32: maxima, sums, weighted sums of V.
        """
        c = calls[0]
        s = _scratch(c)
        size, lanes = c.work_rows, s.out.shape[2]
        while stamp:
            unit = next_unit(address_of(calls))
            if unit >= c.units:
                return
            part = work[unit]
            top, sums = part[:size], part[size : 2 * size]
            split, unit = unit % c.splits, unit // c.splits
            block, unit = unit % c.blocks, unit // c.blocks
            head, sequence = unit % c.heads, unit // c.heads
            token = block * c.block_tokens
            tokens = min(c.block_tokens, c.tokens - token)
            rows = tokens * (c.q_heads // c.heads)
            padded = rows if rows == 1 else (rows + 3) // 4 * 4
            top[:], sums[:] = NOTHING, 0

            length = load_i32(c.lengths + 4 * sequence)
            low, high = c.start, min(c.stop, length, c.slots * c.table_columns)
            if c.causal:
                high = min(high, length - c.tokens + token + tokens)
            if c.window:
                low = max(low, length - c.tokens + token - c.window + 1)
            tile, last = low // TILE, (high + TILE - 1) // TILE
            tiles = last - tile
            tile, last = tile + tiles * split // c.splits, tile + tiles * (split + 1) // c.splits
            s.q[:], s.out[:] = 0, 0
            if tile < last:
                _load_queries(c, sequence, head, token, rows, s)
            while tile < last:
                begin, end = max(tile * TILE, low), min((tile + 1) * TILE, high)
                parts = s.parts[: _find_parts(c, sequence, head, begin, end, s.parts)]
                _attend_tile(
                    c, parts, sequence, head, token, rows, padded, begin, end, length, s, top, sums
                )
                tile += 1
            to = 2 * size
            for row in range(rows):
                for dim in range(c.v_dim):
                    part[to] = s.out[row // lanes, dim, row % lanes]
                    to += 1

    @kernel
    def finish(calls: Any, work: Any) -> None:
        """Writes the result of `calls[0]`, after all units are done."""
        c = calls[0]
        if stamp:
            for sequence in range(c.batch):
                for head in range(c.heads):
                    for row in range(c.tokens * (c.q_heads // c.heads)):
                        _finish_row(c, sequence, head, row, work)

    return attend, finish


attend, finish = _kernels(STAMP)
