"""The softmax between the two products of attend.py, a tile of logits at a time.

`logits` is `[rows, TILE]`, float32; its rows are G query heads of one query token after the other.
"""

import numpy as np

from .. import visibility
from .arithmetic import (
    add,
    copy_sign,
    div,
    fma,
    keep_first,
    max_lane,
    maximum,
    mul,
    power_of_two,
    rint,
    splat,
    sub,
    sum_lanes,
    where_less,
)
from .lanes import LANES, Call, Floats, jit
from .memory import load, load_as, load_u8, store, width_of

# Positions whose logits are held at a time; a multiple of LANES.
TILE = 64
NOTHING = np.float32(-np.inf)

first_visible = jit(visibility.first_visible)
_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_E0, _E1 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3)
_E2, _E3 = np.float32(8.3334519073e-3), np.float32(4.1665795894e-2)
_E4, _E5 = np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
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
    return where_less(x, splat(_LEAST), splat(np.float32(0)), mul(y, power_of_two(n)))


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
    return copy_sign(where_less(size, splat(np.float32(0.625)), near, far), x)


@jit
def adjust_logits(c: Call, rows: int, count: int, scales: int, offset: Floats, logits: int) -> None:
    """Apply dynamic scales (0: none), the center's share, and the softcap to logits."""
    cap = splat(np.float32(c.softcap))
    for row in range(rows):
        extra = splat(offset[row])
        for i in range(0, count, LANES):
            place = logits + 4 * (row * TILE + i)
            x = load(place)
            if scales:
                x = mul(x, load(scales + 4 * i))
            if c.k_center:
                x = add(x, extra)
            if c.softcap != 0:
                x = mul(_tanh(div(x, cap)), cap)
            store(place, x)


@jit
def add_bias(
    c: Call, bias: int, kind: int, stride_h: int, stride_t: int,
    head: int, token: int, rows: int, count: int, logits: int,
) -> None:  # fmt: skip
    """Add a bias, or a mask of floats; `bias` is this sequence's, at the tile's first position."""
    groups, width = c.q_heads // c.heads, width_of(kind)
    for row in range(rows):
        source = bias + (head * groups + row % groups) * stride_h
        source += (token + row // groups) * stride_t
        for i in range(0, count, LANES):
            place = logits + 4 * (row * TILE + i)
            store(place, add(load(place), load_as(source + width * i, kind, count - i)))


@jit
def hide_invisible(
    c: Call, sequence: int, token: int, rows: int, low: int, count: int, query: int,
    seen: Floats, logits: Floats,
) -> int:  # fmt: skip
    """Make logits -inf where a query may not look, and return how many columns some query sees.

    `token` is the query token of the first row and `query` its position; `low` is the position of
    the first column. `seen`, `[TILE]`: where there is a mask, whether some query sees the column;
    without one, some query sees each of them.
    """
    groups = c.q_heads // c.heads
    if c.mask_data:
        seen[:count] = 0
    for row in range(0, rows, groups):
        position = query + row // groups
        begin = max(first_visible(position, c.window) - low, 0) if c.window else 0
        end = min(position + 1 - low, count) if c.causal else count
        mask = c.mask_data + sequence * c.mask_b + (token + row // groups) * c.mask_t
        mask += low - c.start
        for column in range(count):
            if begin <= column < end and not (c.mask_data and load_u8(mask + column) == 0):
                seen[column] = 1
            else:
                for group in range(groups):
                    logits[row + group, column] = NOTHING
    if not c.mask_data:
        return count
    seen_columns = 0
    for column in range(count):
        seen_columns += seen[column] != 0
    return seen_columns


@jit
def update_softmax(
    rows: int, count: int, scales: int, logits: int, m_i: Floats, l_i: Floats, alpha: Floats
) -> bool:
    """Turn logits into weights, relative to the largest logit so far.

    `scales` are V's dynamic scales, multiplied into the weights, or 0. Each row's largest logit
    `m_i` and sum of weights without scales `l_i` are updated; results made with the previous `m_i`
    are to be multiplied by `alpha`. Return whether any alpha is not 1.
    """
    rescales = False
    tail = (count - 1) // LANES * LANES
    for row in range(rows):
        line = logits + 4 * row * TILE
        last = keep_first(load(line + 4 * tail), count - tail, NOTHING)
        store(line + 4 * tail, last)
        best = splat(m_i[row])
        for i in range(0, count, LANES):
            best = maximum(load(line + 4 * i), best)
        old, new = m_i[row], max_lane(best)
        alpha[row] = 1
        if new > old:
            m_i[row] = new
            if old > NOTHING:
                # sum_lanes: of one lane, the others are zero.
                alpha[row] = sum_lanes(keep_first(_exp(splat(old - new)), 1, np.float32(0)))
                l_i[row] *= alpha[row]
                rescales = True
        # A row that has seen nothing: -inf - 0 gives weights of zero, where -inf - -inf gives NaN.
        base = splat(m_i[row] if m_i[row] > NOTHING else np.float32(0))
        sum_ = splat(np.float32(0))
        for i in range(0, count, LANES):
            weight = _exp(sub(load(line + 4 * i), base))
            sum_ = add(sum_, weight)
            if scales:
                weight = mul(weight, load(scales + 4 * i))
            store(line + 4 * i, weight)
        l_i[row] += sum_lanes(sum_)
    return rescales
