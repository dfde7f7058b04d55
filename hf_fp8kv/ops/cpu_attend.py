"""The attention of the "numba" backend; cpu.py prepares its calls.

A call is one record, `ATTEND`: addresses, strides in bytes, sizes and constants. So the kernel has
one signature, is compiled once for all formats, dtypes and shapes, and costs little to call.
Threads share the record, and take units of work from its counter `next`: a unit is one sequence,
one key head, one block of query rows, and one split of the positions. `finish` adds the splits.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from .cpu_vectors import (
    BF16,
    F32,
    FP8,
    LANES,
    STAMP,
    Call,
    Code,
    Floats,
    add,
    decode,
    div,
    first,
    fma,
    jit,
    kernel,
    larger,
    largest,
    load,
    load_codes,
    load_i32,
    load_u8,
    mul,
    negative,
    next_unit,
    page_of,
    power,
    record,
    rint,
    splat,
    store,
    sub,
    total,
    where_less,
    width_of,
)  # fmt: skip

__all__ = ["ATTEND", "BLOCK", "TILE", "attend", "finish"]

# Tokens whose logits are held at a time; a multiple of LANES.
TILE = 64
# Rows (a query token of one query head) that share the decoded bytes.
BLOCK = 64

_NOTHING = np.float32(-np.inf)


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

_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_E0, _E1, _E2 = (
    np.float32(1.9875691500e-4),
    np.float32(1.3981999507e-3),
    np.float32(8.3334519073e-3),
)
_E3, _E4, _E5 = (
    np.float32(4.1665795894e-2),
    np.float32(1.6666665459e-1),
    np.float32(5.0000001201e-1),
)
_LEAST = np.float32(-87.0)


@jit
def _exp(x: Floats) -> Floats:
    """e to the power of x <= 0, within 2 units of the last place; 0 below -87; NaN stays NaN."""
    one = splat(np.float32(1))
    n = rint(mul(where_less(x, splat(_LEAST), splat(_LEAST), x), splat(_LOG2E)))
    r = fma(n, splat(-_LN2_LOW), fma(n, splat(-_LN2_HIGH), x))
    y = fma(splat(_E0), r, splat(_E1))
    y = fma(y, r, splat(_E2))
    y = fma(y, r, splat(_E3))
    y = fma(y, r, splat(_E4))
    y = fma(y, r, splat(_E5))
    y = add(fma(mul(r, r), y, r), one)
    return where_less(x, splat(_LEAST), splat(np.float32(0)), mul(y, power(n)))


_T0, _T1 = np.float32(-5.70498872745e-3), np.float32(2.06390887954e-2)
_T2, _T3 = np.float32(-5.37397155531e-2), np.float32(1.33314422036e-1)
_T4 = np.float32(-3.33332819422e-1)


@jit
def _tanh(x: Floats) -> Floats:
    """tanh, within a few units of the last place."""
    one, zero = splat(np.float32(1)), splat(np.float32(0))
    size = where_less(x, zero, sub(zero, x), x)
    square = mul(x, x)
    y = fma(splat(_T0), square, splat(_T1))
    y = fma(y, square, splat(_T2))
    y = fma(y, square, splat(_T3))
    y = fma(y, square, splat(_T4))
    near = fma(mul(square, size), y, size)
    e = _exp(mul(size, splat(np.float32(-2))))
    far = div(sub(one, e), add(one, e))
    return negative(where_less(size, splat(np.float32(0.625)), near, far), x)


@jit
def _dot4(
    source: int, kind: int, code: Code, count: int, x: int, stride: int
) -> tuple[float, float, float, float]:
    """Products of `count` stored numbers, FP8 or F32, with four float32 rows, `stride` apart."""
    zero = splat(np.float32(0))
    a, b, c, d = zero, zero, zero, zero
    if kind == FP8:
        for i in range(0, count, LANES):
            y = load_codes(source + i, code, count - i)
            at = x + 4 * i
            a = fma(y, load(at, F32, LANES), a)
            b = fma(y, load(at + stride, F32, LANES), b)
            c = fma(y, load(at + 2 * stride, F32, LANES), c)
            d = fma(y, load(at + 3 * stride, F32, LANES), d)
    else:
        for i in range(0, count, LANES):
            y = load(source + 4 * i, F32, LANES)
            at = x + 4 * i
            a = fma(y, load(at, F32, LANES), a)
            b = fma(y, load(at + stride, F32, LANES), b)
            c = fma(y, load(at + 2 * stride, F32, LANES), c)
            d = fma(y, load(at + 3 * stride, F32, LANES), d)
    return total(a), total(b), total(c), total(d)


@jit
def _dot1(source: int, kind: int, code: Code, count: int, x: int) -> float:
    """The same with one row."""
    a = splat(np.float32(0))
    if kind == FP8:
        for i in range(0, count, LANES):
            a = fma(load_codes(source + i, code, count - i), load(x + 4 * i, F32, LANES), a)
    else:
        for i in range(0, count, LANES):
            a = fma(load(source + 4 * i, F32, LANES), load(x + 4 * i, F32, LANES), a)
    found: float = total(a)
    return found


@jit
def _load_queries(
    c: Call, sequence: int, head: int, token: int, rows: int, q: int, stride: int, offset: Floats
) -> None:
    """Rows of `q` are then the queries times `scaling` and all that K's codes lack.

    Row i is query token `token + i // G` of query head `head * G + i % G`. `offset[i]` is the
    logit of K's centre.
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
            x = mul(load(source + width * i, c.q_kind, count), scaling)
            if c.center:
                at = c.center + 4 * ((sequence * c.heads + head) * c.k_dim + i)
                sum_ = fma(x, load(at, F32, count), sum_)
            if c.k_scale:
                x = mul(x, load(c.k_scale + 4 * (head * c.k_dim + i), F32, count))
            store(q + row * stride + 4 * i, F32, LANES, mul(x, factor))
        offset[row] = total(sum_)


@jit
def _load_scales(
    c: Call, pool: int, sequence: int, head: int, low: int, high: int, to: int
) -> None:
    """The scales of positions `low` to `high - 1`, float32, and zeros up to a whole vector."""
    store(to + 4 * ((high - low - 1) // LANES * LANES), F32, LANES, splat(np.float32(0)))
    at = low
    while at < high:
        slot = at % c.slots
        end = min(at + c.slots - slot, high)
        source = pool + 2 * ((page_of(c, sequence, at) * c.heads + head) * c.slots + slot)
        for i in range(0, end - at, LANES):
            store(to + 4 * (at - low + i), F32, LANES, load(source + 2 * i, BF16, end - at - i))
        at = end


@jit
def _logits(
    c: Call, sequence: int, head: int, low: int, high: int,
    q: int, stride: int, rows: int, strip: int, out: Floats,
) -> None:  # fmt: skip
    """Products of `rows` queries (1, or a multiple of 4) with positions `low` to `high - 1`."""
    code = (c.k_shift, c.k_mask, c.k_nan_mask, c.k_nan_code)
    size = c.k_dim * width_of(c.k_kind)
    direct = c.k_kind == FP8 and rows <= 4
    kind = FP8 if direct else F32
    at = low
    while at < high:
        slot = at % c.slots
        end = min(at + c.slots - slot, high)
        source = c.k + ((page_of(c, sequence, at) * c.heads + head) * c.slots + slot) * size
        for column in range(at - low, end - low):
            if not direct:
                decode(source, c.k_kind, code, c.k_dim, strip)
            place = source if direct else strip
            if rows == 1:
                out[column] = _dot1(place, kind, code, c.k_dim, q)
            else:
                for row in range(0, rows, 4):
                    found = _dot4(place, kind, code, c.k_dim, q + row * stride, stride)
                    to = row * TILE + column
                    out[to], out[to + TILE], out[to + 2 * TILE], out[to + 3 * TILE] = found
            source += size
        at = end


@jit
def _adjust(c: Call, rows: int, count: int, scales: int, offset: Floats, logits: int) -> None:
    """Dynamic scales, the centre's share, softcap."""
    cap = splat(np.float32(c.softcap))
    for row in range(rows):
        extra = splat(offset[row])
        for i in range(0, count, LANES):
            at = logits + 4 * (row * TILE + i)
            x = load(at, F32, LANES)
            if c.k_scales:
                x = mul(x, load(scales + 4 * i, F32, LANES))
            if c.center:
                x = add(x, extra)
            if c.softcap != 0:
                x = mul(_tanh(div(x, cap)), cap)
            store(at, F32, LANES, x)


@jit
def _add_bias(
    c: Call, bias: int, kind: int, stride_h: int, stride_t: int,
    head: int, token: int, rows: int, low: int, high: int, logits: int,
) -> None:  # fmt: skip
    """Adds a bias, or a mask of floats; `bias` is this sequence's, at position `start`."""
    groups, width, count = c.q_heads // c.heads, width_of(kind), high - low
    for row in range(rows):
        source = bias + (head * groups + row % groups) * stride_h
        source += (token + row // groups) * stride_t + (low - c.start) * width
        for i in range(0, count, LANES):
            at = logits + 4 * (row * TILE + i)
            x = load(source + width * i, kind, count - i)
            store(at, F32, LANES, add(load(at, F32, LANES), x))


@jit
def _hide(
    c: Call, sequence: int, token: int, rows: int, low: int, high: int, length: int,
    seen: Floats, logits: Floats,
) -> int:  # fmt: skip
    """Logits of what a query may not see become -inf; returns how many columns some query sees.

    `seen` says which, where there is a mask; without one, some query sees each of them.
    """
    groups, count = c.q_heads // c.heads, high - low
    if c.mask:
        seen[:count] = 0
    for row in range(0, rows, groups):
        at = length - c.tokens + token + row // groups
        begin = max(at - c.window + 1 - low, 0) if c.window else 0
        end = min(at + 1 - low, count) if c.causal else count
        mask = c.mask + sequence * c.mask_b + (token + row // groups) * c.mask_t
        mask += low - c.start
        for column in range(count):
            shown = begin <= column < end
            if c.mask and load_u8(mask + column) == 0:
                shown = False
            if shown:
                seen[column] = 1
            else:
                for group in range(min(groups, rows - row)):
                    logits[(row + group) * TILE + column] = _NOTHING
    if not c.mask:
        return count
    found = 0
    for column in range(count):
        found += seen[column] != 0
    return found


@jit
def _soften(
    rows: int, count: int, scales: int, logits: int, top: Floats, sums: Floats, out: int, v_dim: int
) -> None:
    """Logits become weights; `top`, `sums` and the rows of `out` follow the new maximum.

    `scales`, the dynamic scales of V or 0, are multiplied into the weights that `_values` reads.
    """
    for row in range(rows):
        at = logits + 4 * row * TILE
        tail = (count - 1) // LANES * LANES
        store(
            at + 4 * tail,
            F32,
            LANES,
            first(load(at + 4 * tail, F32, LANES), count - tail, _NOTHING),
        )
        best = splat(top[row])
        for i in range(0, count, LANES):
            best = larger(load(at + 4 * i, F32, LANES), best)
        old, new = top[row], largest(best)
        if new > old:
            top[row] = new
            if old > _NOTHING:
                # total: one lane, the others are zero.
                fade = total(first(_exp(splat(old - new)), 1, np.float32(0)))
                sums[row] *= fade
                for i in range(0, v_dim, LANES):
                    place = out + 4 * (row * v_dim + i)
                    faded = mul(load(place, F32, v_dim - i), splat(fade))
                    store(place, F32, v_dim - i, faded)
        # A row that has seen nothing: -inf - 0 gives weights of zero, where -inf - -inf gives NaN.
        base = splat(top[row] if top[row] > _NOTHING else np.float32(0))
        sum_ = splat(np.float32(0))
        for i in range(0, count, LANES):
            weight = _exp(sub(load(at + 4 * i, F32, LANES), base))
            sum_ = add(sum_, weight)
            if scales:
                weight = mul(weight, load(scales + 4 * i, F32, LANES))
            store(at + 4 * i, F32, LANES, weight)
        sums[row] += total(sum_)


@jit
def _values(
    c: Call, sequence: int, head: int, low: int, high: int, seen: Floats, all_seen: bool,
    weights: int, rows: int, strip: int, strip_array: Floats, out: Floats,
) -> None:  # fmt: skip
    """Adds weights times V; what no query sees counts as zero even if its bytes are NaN."""
    code = (c.v_shift, c.v_mask, c.v_nan_mask, c.v_nan_code)
    width, count, v_dim = width_of(c.v_kind), high - low, c.v_dim
    line = c.slots * width
    one_page = low // c.slots == (high - 1) // c.slots
    direct = c.v_kind == FP8 and rows <= 4 and one_page and all_seen
    kind = FP8 if direct else F32
    tail = (count - 1) // LANES * LANES
    stride = 4 * TILE
    for dim in range(v_dim):
        place = strip
        if direct:
            row_of_page = (page_of(c, sequence, low) * c.heads + head) * v_dim + dim
            place = c.v + row_of_page * line + low % c.slots
        else:
            store(strip + 4 * tail, F32, LANES, splat(np.float32(0)))
            at = low
            while at < high:
                slot = at % c.slots
                end = min(at + c.slots - slot, high)
                row_of_page = (page_of(c, sequence, at) * c.heads + head) * v_dim + dim
                source = c.v + row_of_page * line + slot * width
                decode(source, c.v_kind, code, end - at, strip + 4 * (at - low))
                at = end
            if not all_seen:
                for column in range(count):
                    if seen[column] == 0:
                        strip_array[column] = 0
        if rows == 1:
            out[dim] += _dot1(place, kind, code, count, weights)
        else:
            for row in range(0, rows, 4):
                a, b, d, e = _dot4(place, kind, code, count, weights + row * stride, stride)
                to = row * v_dim + dim
                out[to] += a
                out[to + v_dim] += b
                out[to + 2 * v_dim] += d
                out[to + 3 * v_dim] += e


@jit
def _attend_unit(
    c: Call, unit: int, q: Floats, logits: Floats, offset: Floats, scales: Floats, seen: Floats,
    strip: Floats, top: Floats, sums: Floats, out: Floats,
) -> None:  # fmt: skip
    split, unit = unit % c.splits, unit // c.splits
    block, unit = unit % c.blocks, unit // c.blocks
    head, sequence = unit % c.heads, unit // c.heads
    token = block * c.block_tokens
    tokens = min(c.block_tokens, c.tokens - token)
    rows = tokens * (c.q_heads // c.heads)
    padded = rows if rows == 1 else (rows + 3) // 4 * 4
    top[:], sums[:], out[:] = _NOTHING, 0, 0

    length = load_i32(c.lengths + 4 * sequence)
    low, high = c.start, min(c.stop, length, c.slots * c.table_columns)
    if c.causal:
        high = min(high, length - c.tokens + token + tokens)
    if c.window:
        low = max(low, length - c.tokens + token - c.window + 1)
    tile, last = low // TILE, (high + TILE - 1) // TILE
    tile, last = (
        tile + (last - tile) * split // c.splits,
        tile + (last - tile) * (split + 1) // c.splits,
    )
    if tile >= last or low >= high:
        return
    stride = 4 * (q.size // c.work_rows)
    q_at, logits_at, strip_at = q.ctypes.data, logits.ctypes.data, strip.ctypes.data
    k_scales = scales.ctypes.data
    v_scales = k_scales + 4 * 2 * TILE
    q[:] = 0
    _load_queries(c, sequence, head, token, rows, q_at, stride, offset)
    while tile < last:
        begin, end = max(tile * TILE, low), min((tile + 1) * TILE, high)
        count = end - begin
        tile += 1
        _logits(c, sequence, head, begin, end, q_at, stride, padded, strip_at, logits)
        if c.k_scales:
            _load_scales(c, c.k_scales, sequence, head, begin, end, k_scales)
        if c.k_scales or c.center or c.softcap != 0:
            _adjust(c, rows, count, k_scales, offset, logits_at)
        if c.bias:
            at = c.bias + sequence * c.bias_b
            _add_bias(
                c, at, c.bias_kind, c.bias_h, c.bias_t, head, token, rows, begin, end, logits_at
            )
        if c.more:
            at = c.more + sequence * c.more_b
            _add_bias(
                c, at, c.more_kind, c.more_h, c.more_t, head, token, rows, begin, end, logits_at
            )
        found = count
        if c.mask or c.window or (c.causal and end > length - c.tokens + token + 1):
            found = _hide(c, sequence, token, rows, begin, end, length, seen, logits)
        if found == 0:
            continue
        weight_scales = 0
        if c.v_scales:
            weight_scales = v_scales
            _load_scales(c, c.v_scales, sequence, head, begin, end, v_scales)
            if found < count:
                for column in range(count):
                    if seen[column] == 0:
                        scales[2 * TILE + column] = 0
        _soften(rows, count, weight_scales, logits_at, top, sums, out.ctypes.data, c.v_dim)
        _values(
            c,
            sequence,
            head,
            begin,
            end,
            seen,
            found == count,
            logits_at,
            padded,
            strip_at,
            strip,
            out,
        )


@jit
def _attend(c: Call, counter: int, work: Floats) -> None:
    rows = c.work_rows
    width = (c.k_dim + LANES - 1) // LANES * LANES
    q = np.zeros(rows * width, np.float32)
    logits = np.zeros(rows * TILE, np.float32)
    offset = np.zeros(rows, np.float32)
    # A segment of a page may end in the middle of a vector, which is stored whole.
    scales = np.zeros(4 * TILE, np.float32)
    seen = np.zeros(TILE, np.uint8)
    strip = np.zeros(max(width, TILE) + LANES, np.float32)
    while True:
        unit = next_unit(counter)
        if unit >= c.units:
            return
        part = work[unit]
        _attend_unit(
            c,
            unit,
            q,
            logits,
            offset,
            scales,
            seen,
            strip,
            part[:rows],
            part[rows : 2 * rows],
            part[2 * rows :],
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
    sink = _NOTHING
    if c.sinks:
        sink = total(load(c.sinks + width_of(c.sinks_kind) * q_head, c.sinks_kind, 1))
    top = sink
    for unit in range(begin, begin + c.splits):
        top = max(top, work[unit, place])
    sum_ = np.exp(sink - top) if sink > _NOTHING else np.float32(0)
    weights = np.empty(c.splits, np.float32)
    for split in range(c.splits):
        part = work[begin + split]
        # A split that saw nothing has a sum of zero, or NaN if all that it saw was NaN.
        weight = np.exp(part[place] - top) if part[place] > _NOTHING else np.float32(1)
        weights[split] = weight
        sum_ += part[rows + place] * weight
    inverse = splat(np.float32(c.v_factor))
    safe = splat(sum_ if sum_ != 0 else np.float32(1))
    width = width_of(c.out_kind)
    to = c.out + ((sequence * c.tokens + token) * c.q_heads + q_head) * v_dim * width
    for i in range(0, v_dim, LANES):
        x = splat(np.float32(0))
        for split in range(c.splits):
            at = work[begin + split, 2 * rows + place * v_dim :].ctypes.data
            x = fma(load(at + 4 * i, F32, v_dim - i), splat(weights[split]), x)
        x = mul(div(x, safe), inverse)
        if c.v_scale:
            x = mul(x, load(c.v_scale + 4 * (head * v_dim + i), F32, v_dim - i))
        store(to + width * i, c.out_kind, v_dim - i, x)


def _kernels(stamp: int) -> tuple[Callable[[Any, Any], None], Callable[[Any, Any], None]]:
    """Makes the kernels; `stamp` is a part of what numba's cache knows them by."""

    @kernel
    def attend(calls: Any, work: Any) -> None:
        """Works off units of `calls[0]` until none is left; any number of threads at a time.

        `work` is `[units, 2 * rows + rows * Dv]`, float32: maxima, sums, weighted sums of V.
        """
        if stamp:
            _attend(calls[0], calls.ctypes.data, work)

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
