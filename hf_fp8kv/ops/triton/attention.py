"""Softmax attention over stored pages: the device code that decode.py and extend.py share.

A program takes the query rows of one KV head (query heads of that head times query tokens) and a
range of positions, reads the codes of one tile of tokens after the other, and keeps an online
softmax. What makes it fast is where scales are applied:

    static K       into the query, once                    (per channel, head or tensor alike)
    static V       into the output, once
    dynamic K      into a column of logits
    dynamic V      into a column of weights

so that a code only ever becomes the number it encodes. Logits are in powers of two, since `exp2` is
the GPU's exponential. The query is scaled by a power of two per row to just under float16's largest
number, weights to just under 2^14: neither underflows where the result could show it.
"""

import triton
import triton.language as tl

from .codec import numbers

__all__ = [
    "ADDITIVE",
    "COMPACT",
    "COMPLETE",
    "HEADROOM",
    "LOG2E",
    "NO_MASK",
    "attend_rows",
    "finish",
]

# What a mask is (a constexpr of the kernels).
NO_MASK = tl.constexpr(0)
COMPACT = tl.constexpr(1)  # [B, 1, 1, N] uint8: which tokens are padding
COMPLETE = tl.constexpr(2)  # [B, 1, T, N] uint8
ADDITIVE = tl.constexpr(3)  # [1 | B, 1 | Hq, 1 | T, N] floating

LOG2E = tl.constexpr(1.4426950408889634)
# Weights are up to 2 to this power: float16 then holds those down to 2^-38 of the largest.
HEADROOM = tl.constexpr(14.0)
# A vector V of zeros has the smallest scale there is. Below this one a scale does not lower the
# reference that weights are relative to, or their sum could overflow.
LEAST_SCALE = tl.constexpr(2.0**-40)
# Up to so many rows weights are summed over a tile's tokens once, after the last tile: a sum over
# warps costs three barriers.
SUMMED_LATE = tl.constexpr(16)
# Positions whose mask bytes are looked at together.
SCAN = tl.constexpr(1024)


@triton.jit
def _query(
    query, k_scale, center, q_b, q_h, q_t, b, h, head, t, exists, k_scaling, scaling,
    HEADS: tl.constexpr, DK: tl.constexpr, WIDE: tl.constexpr, OPERAND: tl.constexpr,
    CENTER: tl.constexpr,
):  # fmt: skip
    """Returns the query rows as the dot product takes them, what logits lack, and q c."""
    d = tl.arange(0, WIDE)
    real = exists[:, None] & (d < DK)[None, :]
    place = b.to(tl.int64) * q_b + head.to(tl.int64) * q_h + t.to(tl.int64) * q_t
    place = place[:, None] + d[None, :]
    q = tl.load(query + place, mask=real, other=0.0).to(tl.float32)
    offset = tl.zeros([q.shape[0]], tl.float32)
    if CENTER:
        c = tl.load(center + (b * HEADS + h).to(tl.int64) * DK + d, mask=d < DK, other=0.0)
        offset = tl.sum(q * c[None, :], 1) * scaling
    if k_scale is not None:
        q *= tl.load(k_scale + h * DK + d, mask=d < DK, other=0.0)[None, :]
    # A power of two that brings the largest of a row to between 2^13 and 2^14.
    exponent = (tl.max(tl.abs(q), 1).to(tl.int32, bitcast=True) >> 23) & 0xFF
    up = tl.minimum(tl.maximum(267 - exponent, 1), 253)
    raised = q * (up << 23).to(tl.float32, bitcast=True)[:, None]
    factor = ((254 - up) << 23).to(tl.float32, bitcast=True) * k_scaling
    return raised.to(OPERAND), factor, offset


@triton.jit
def _scan(mask, begin, end, start):
    """Returns the first visible position, and one past the last hidden one, of a compact mask."""
    first = end
    hidden = begin
    for at in range(begin, end, SCAN):
        position = at + tl.arange(0, SCAN)
        inside = position < end
        seen = tl.load(mask + (position - start), mask=inside, other=1) != 0
        first = tl.minimum(first, tl.min(tl.where(seen & inside, position, end), 0))
        hidden = tl.maximum(hidden, tl.max(tl.where(seen, begin, position + 1), 0))
    return first, hidden


@triton.jit
def _added(at, within):
    """What is added to logits. The lowest number of bfloat16 stays one in powers of two, so that a
    row of it is a plain mean.
    """
    x = tl.load(at, mask=within, other=0.0).to(tl.float32)
    return tl.where(x == float("-inf"), x, tl.maximum(x, -2e38))


@triton.jit
def _step(
    q, factor, offset, acc, top, total,
    j, page, row, h, at, exists, begin, end, start,
    k_pool, v_pool, k_scales, v_scales, mask, bias, softcap, window,
    HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, WIDE_K: tl.constexpr, WIDE_V: tl.constexpr,
    K_HOW: tl.constexpr, K_SHIFT: tl.constexpr, K_NAN: tl.constexpr, K_OPERAND: tl.constexpr,
    V_HOW: tl.constexpr, V_SHIFT: tl.constexpr, V_NAN: tl.constexpr, V_OPERAND: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Takes in tile `j`. MASKED: some row does not see all of it."""
    n = tl.arange(0, TILE)
    position = j * TILE + n
    d = tl.arange(0, WIDE_K)
    dv = tl.arange(0, WIDE_V)
    if PAGE % TILE == 0:
        # One page, known by one number: the addresses of a tile are one base and constants.
        place = page.to(tl.int64) * HEADS + h
        slot = (j % (PAGE // TILE)) * TILE
        scale_at = place * PAGE + slot + n
        k_at = k_pool + (place * PAGE + slot) * DK + (n[:, None] * DK + d[None, :])
        v_at = v_pool + (place * (DV * PAGE) + slot) + (dv[:, None] * PAGE + n[None, :])
    else:
        # Past the end the last page is read again: with a mask loads would be of single bytes.
        last = tl.maximum(end - 1, 0) // PAGE
        number = tl.load(row + tl.minimum(position // PAGE, last))
        number = tl.maximum(number, 0)
        if PAGE % 16 == 0:
            # Triton 3.6 loses sight of it on AMD: 16 tokens are in one page.
            number = tl.max_constancy(number, 16)
        place = number.to(tl.int64) * HEADS + h
        slot = position % PAGE
        scale_at = place * PAGE + slot
        v_at = (place * (DV * PAGE) + slot)[None, :] + dv[:, None] * PAGE
        k_at = k_pool + ((scale_at * DK)[:, None] + d[None, :])
        v_at = v_pool + v_at
    if WIDE_K == DK:
        k_codes = tl.load(k_at)
    else:
        k_codes = tl.load(k_at, mask=(d < DK)[None, :], other=0)
    if WIDE_V == DV:
        v_codes = tl.load(v_at)
    else:
        v_codes = tl.load(v_at, mask=(dv < DV)[:, None], other=0)

    k = numbers(k_codes, K_HOW, K_SHIFT, K_NAN, K_OPERAND)
    x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if k_scales is not None:
        x *= tl.load(k_scales + scale_at).to(tl.float32)[None, :]
    x = x * factor[:, None] + offset[:, None]
    if SOFTCAP:
        # softcap * tanh(x / softcap), with tanh(y) = 1 - 2 / (exp(2 y) + 1)
        x = softcap - 2 * softcap / (tl.exp2(x * (2 * LOG2E / softcap)) + 1)
    column = (position - start)[None, :]
    within = (position < end)[None, :]
    if bias is not None:
        x += _added(bias[:, None] + column, within)
    if MASK == ADDITIVE:
        x += _added(mask[:, None] + column, within)
    if SOFTCAP or bias is not None or MASK == ADDITIVE:
        x *= LOG2E
    if MASKED:
        seen = (position >= begin) & (position < end)
        if MASK == COMPACT:
            seen &= tl.load(mask + (position - start), mask=seen, other=0) != 0
        visible = seen[None, :] & exists[:, None]
        if CAUSAL:
            visible &= position[None, :] <= at[:, None]
        if WINDOWED:
            visible &= position[None, :] > at[:, None] - window
        if MASK == COMPLETE:
            visible &= tl.load(mask[:, None] + column, mask=visible, other=0) != 0
        x = tl.where(visible, x, float("-inf"))

    if v_scales is not None:
        scale = tl.load(v_scales + scale_at).to(tl.float32)
        if MASKED:
            # What no row sees must not count even if it is NaN.
            scale = tl.where(tl.max(visible.to(tl.int32), 0) != 0, scale, 0.0)
        # log2 to within 0.09, by its bits: exponent, and the mantissa as a straight line. It only
        # sets the reference that weights are relative to.
        bits = tl.maximum(scale, LEAST_SCALE).to(tl.int32, bitcast=True)
        least = bits.to(tl.float32) * 2.0**-23 - 127.0
        best = tl.maximum(top, tl.max(x + least[None, :], 1))
    else:
        best = tl.maximum(top, tl.max(x, 1))
    # A row that has seen nothing yet: -inf - -inf would be NaN.
    known = tl.where(best == float("-inf"), 0.0, best)
    weights = tl.exp2(x - (known - HEADROOM)[:, None])
    fade = tl.exp2(top - known)
    if q.shape[0] <= SUMMED_LATE:
        total = total * fade[:, None] + weights
    else:
        total = total * fade + tl.sum(weights, 1)
    if v_scales is not None:
        weights *= scale[None, :]
    if MASKED:
        hidden = (tl.max(visible.to(tl.int32), 0) == 0)[None, :]
        v_codes = tl.where(hidden, tl.zeros_like(v_codes), v_codes)
    v = numbers(v_codes, V_HOW, V_SHIFT, V_NAN, V_OPERAND)
    acc = acc * fade[:, None]
    acc = tl.dot(weights.to(V_OPERAND), tl.trans(v), acc, input_precision=PRECISION)
    return acc, best, total


@triton.jit
def attend_rows(
    query, k_pool, v_pool, k_scales, v_scales, k_scale, center, table, mask, bias,
    b, h, head, t, exists, length, tokens, low, high, first_t, last_t,
    k_scaling, scaling, softcap, start, window,
    q_b, q_h, q_t, table_b, mask_b, mask_h, mask_t, bias_b, bias_h, bias_t,
    ROWS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, WIDE_K: tl.constexpr, WIDE_V: tl.constexpr,
    K_HOW: tl.constexpr, K_SHIFT: tl.constexpr, K_NAN: tl.constexpr, K_OPERAND: tl.constexpr,
    V_HOW: tl.constexpr, V_SHIFT: tl.constexpr, V_NAN: tl.constexpr, V_OPERAND: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr,
    CENTER: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attention of some query rows over positions `low` to `high - 1`.

    Args:
        b, h: the sequence and the KV head.
        head, t, exists: `[ROWS]`: the query head and query token of each row, and whether it is
            one; those that are none stand for an existing head and token too.
        length: tokens stored; the queries are the last `tokens` of them.
        low, high: a part of the sequence; rows need not see all of it.
        first_t, last_t: the least and the greatest of `t` where `exists`.

    Returns:
        The sum of weights times codes of V `[ROWS, WIDE_V]`, the weights' reference (a power of
        two) and their sum `[ROWS]`; all relative to the reference.
    """
    at = length - tokens + t
    first_at = length - tokens + first_t
    last_at = length - tokens + last_t
    end = high
    if CAUSAL:
        end = tl.minimum(end, last_at + 1)
    begin = tl.maximum(low, start)
    if WINDOWED:
        begin = tl.maximum(begin, first_at - window + 1)
    begin = tl.maximum(begin, 0)

    # Positions that every row sees: `full` to `full_end - 1`.
    full = begin
    full_end = end
    if CAUSAL:
        full_end = tl.minimum(full_end, first_at + 1)
    if WINDOWED:
        full = tl.maximum(full, last_at - window + 1)
    if MASK == COMPACT:
        mask += b.to(tl.int64) * mask_b
        begin, hidden = _scan(mask, begin, end, start)
        full = tl.maximum(full, hidden)
    elif MASK != NO_MASK:
        mask += b.to(tl.int64) * mask_b + head.to(tl.int64) * mask_h + t.to(tl.int64) * mask_t
    if MASK == COMPLETE:
        full_end = 0
    if bias is not None:
        bias += b.to(tl.int64) * bias_b + head.to(tl.int64) * bias_h + t.to(tl.int64) * bias_t

    # Tiles [main, main_end) need no mask; those before and after do.
    # Where nothing is seen there are none: the table may end before `begin`.
    first = begin // TILE
    last = tl.where(begin < end, tl.cdiv(end, TILE), first)
    main = tl.minimum(tl.maximum(tl.cdiv(full, TILE), first), last)
    main_end = tl.maximum(full_end // TILE, main)
    before = main - first
    masked = before + last - main_end

    q, factor, offset = _query(
        query, k_scale, center, q_b, q_h, q_t, b, h, head, t, exists, k_scaling, scaling,
        HEADS, DK, WIDE_K, K_OPERAND, CENTER,
    )  # fmt: skip
    if not SOFTCAP and bias is None and MASK != ADDITIVE:
        factor *= LOG2E
        offset *= LOG2E
    acc = tl.zeros([ROWS, WIDE_V], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS, TILE] if ROWS <= SUMMED_LATE else [ROWS], tl.float32)
    row = table + b.to(tl.int64) * table_b

    # The number of a tile's page is loaded one tile ahead: the tile's own loads can then be
    # started as far ahead as `STAGES` says.
    page = tl.load(row + main * TILE // PAGE, mask=main < main_end, other=0)
    for j in tl.range(main, main_end, num_stages=STAGES):
        following = tl.load(row + tl.minimum(j + 1, main_end - 1) * TILE // PAGE)
        acc, top, total = _step(
            q, factor, offset, acc, top, total, j, tl.maximum(page, 0), row, h, at, exists,
            begin, end, start, k_pool, v_pool, k_scales, v_scales, mask, bias, softcap, window,
            HEADS, DK, DV, PAGE, TILE, WIDE_K, WIDE_V,
            K_HOW, K_SHIFT, K_NAN, K_OPERAND, V_HOW, V_SHIFT, V_NAN, V_OPERAND,
            CAUSAL, WINDOWED, SOFTCAP, MASK, PRECISION, MASKED=False,
        )  # fmt: skip
        page = following
    for i in tl.range(0, masked, num_stages=1):
        j = tl.where(i < before, first + i, main_end + i - before)
        page = tl.maximum(tl.load(row + j * TILE // PAGE), 0)
        acc, top, total = _step(
            q, factor, offset, acc, top, total, j, page, row, h, at, exists, begin, end,
            start, k_pool, v_pool, k_scales, v_scales, mask, bias, softcap, window,
            HEADS, DK, DV, PAGE, TILE, WIDE_K, WIDE_V,
            K_HOW, K_SHIFT, K_NAN, K_OPERAND, V_HOW, V_SHIFT, V_NAN, V_OPERAND,
            CAUSAL, WINDOWED, SOFTCAP, MASK, PRECISION, MASKED=True,
        )  # fmt: skip
    if ROWS <= SUMMED_LATE:
        total = tl.sum(total, 1)
    return acc, top, total


@triton.jit
def finish(acc, top, total, sinks, v_scale, h, head, factor, DV: tl.constexpr, WIDE: tl.constexpr):
    """Returns the output rows `[ROWS, WIDE]`: with sinks, divided by the sum, and scaled."""
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        best = tl.maximum(top, sink)
        known = tl.where(best == float("-inf"), 0.0, best)
        fade = tl.exp2(top - known)
        total = total * fade + tl.exp2(sink - known + HEADROOM)
        acc *= fade[:, None]
    # A row that sees nothing has the sum 0, and gives zeros.
    out = acc * (factor / tl.where(total == 0, 1.0, total))[:, None]
    if v_scale is not None:
        dv = tl.arange(0, WIDE)
        out *= tl.load(v_scale + h * DV + dv, mask=dv < DV, other=0.0)[None, :]
    return out
