"""Softmax attention over stored pages: the device code that decode.py and extend.py share.

A program takes the query rows of one KV head (query heads of that head times query tokens) and a
range of positions, reads the codes of one tile of tokens after the other, and keeps an online
softmax. What makes it fast is where scales are applied:

    static K       into the query, once                    (per channel, head or tensor alike)
                   after it is rotated as K is
    static V       into the output, once, before it is rotated back
    dynamic K      into a column of logits
    dynamic V      into a column of weights

so that a code only ever becomes the number it encodes. Logits are in powers of two, since `exp2` is
the GPU's exponential. The query is scaled by a power of two per row to just under float16's largest
number, weights to just under 2^14: neither underflows where the result could show it.
"""

import triton
import triton.language as tl

from .codec import decode_for_dot
from .places import find_place, load_codes, load_scales
from .rotation import mix

# What a mask is (`Features.mask`).
NO_MASK = tl.constexpr(0)
COMPACT = tl.constexpr(1)  # [B, 1, 1, N] uint8: which tokens are padding; and `bounds`
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


@triton.jit
def of_rows(x, SWAPPED: tl.constexpr):
    """Return `x`, `[ROWS]`, so that it broadcasts over a block of rows and something else."""
    return x[None, :] if SWAPPED else x[:, None]


@triton.jit
def of_others(x, SWAPPED: tl.constexpr):
    """Return `x`, `[TILE]` or `[v_width]`, so that it broadcasts over a block with rows."""
    return x[:, None] if SWAPPED else x[None, :]


@triton.jit
def last_before_window(q_position, window):
    """Return the last position that is too old for a query's sliding window."""
    return q_position - window


@triton.jit
def attend_rows(
    tensors, factors, b, h, head, t, exists, length, tokens, low, high, first_t, last_t,
    start, window, query_strides, table_b, mask_strides, bias_strides,
    SHAPE: tl.constexpr, FEATURES: tl.constexpr, K_CODEC: tl.constexpr, V_CODEC: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, MASKED_TILE: tl.constexpr, STAGES: tl.constexpr,
    SWAPPED: tl.constexpr,
):  # fmt: skip
    """Return the attention of some query rows over positions `low` to `high - 1`, unfinished.

    That is acc `[ROWS, v_width]`, the sum of weights times codes of V; m_i `[ROWS]`, the power of
    two that weights are relative to; and l_i `[ROWS]`, the sum of weights; all float32. SWAPPED:
    products have their operands, and acc its axes, the other way round. `head`, `t` and `exists`,
    `[ROWS]`, are the query head and token of each row, and whether it is one: rows past the last
    stand for an existing head and token too. `first_t` and `last_t` are the least and the greatest
    `t` that exist.
    """
    q_position = length - tokens + t
    first_q = length - tokens + first_t
    last_q = length - tokens + last_t
    end = high
    if FEATURES.causal:
        end = tl.minimum(end, last_q + 1)
    begin = tl.maximum(low, start)
    if FEATURES.windowed:
        begin = tl.maximum(begin, last_before_window(first_q, window) + 1)
    begin = tl.maximum(begin, 0)

    # Positions that every row sees: `full` to `full_end - 1`.
    full = begin
    full_end = end
    if FEATURES.causal:
        full_end = tl.minimum(full_end, first_q + 1)
    if FEATURES.windowed:
        full = tl.maximum(full, last_before_window(last_q, window) + 1)
    mask_ptr = tensors.mask
    if FEATURES.mask == COMPACT:
        mask_ptr += b.to(tl.int64) * mask_strides[0]
        bounds_ptr = tensors.bounds + b.to(tl.int64) * mask_strides[1]
        begin = tl.maximum(begin, tl.load(bounds_ptr))
        full = tl.maximum(full, tl.load(bounds_ptr + 1))
    elif FEATURES.mask != NO_MASK:
        mask_ptr += _row_offset(mask_strides, b, head, t)
    if FEATURES.mask == COMPLETE:
        full_end = 0
    bias_ptr = tensors.bias
    if bias_ptr is not None:
        bias_ptr += _row_offset(bias_strides, b, head, t)

    # Tiles [main, main_end) need no mask; what is before and after them does, and is read in tiles
    # of another size: a program waits for these, and they take the most registers.
    main = tl.cdiv(full, TILE)
    main_end = tl.maximum(full_end // TILE, main)
    # Where nothing is seen there are none: the table may end before `begin`.
    first = begin // MASKED_TILE
    last = tl.where(begin < end, tl.cdiv(end, MASKED_TILE), first)
    PER_TILE: tl.constexpr = TILE // MASKED_TILE
    before = tl.minimum(main * PER_TILE, last) - first
    after = tl.minimum(main_end * PER_TILE, last)
    masked = before + last - after

    q, factor, offset = _load_query(
        tensors, factors, b, h, head, t, exists, query_strides, SHAPE, FEATURES, K_CODEC
    )
    if not FEATURES.softcapped and bias_ptr is None and FEATURES.mask != ADDITIVE:
        factor *= LOG2E
        offset *= LOG2E
    V_WIDTH: tl.constexpr = SHAPE.v_width
    acc = tl.zeros([V_WIDTH, ROWS] if SWAPPED else [ROWS, V_WIDTH], tl.float32)
    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    # Of few rows weights are summed over tokens once, after the last tile.
    if ROWS > SUMMED_LATE:
        l_i = tl.zeros([ROWS], tl.float32)
    else:
        l_i = tl.zeros([TILE, ROWS] if SWAPPED else [ROWS, TILE], tl.float32)
    table_ptr = tensors.table + b.to(tl.int64) * table_b

    # The number of a tile's page is loaded one tile ahead, or two and its address one: the tile's
    # own loads can then be started as far ahead as `STAGES` says.
    page = tl.load(table_ptr + main * TILE // SHAPE.page_size, mask=main < main_end, other=0)
    LEAD: tl.constexpr = 1 if tensors.k.addresses is None else 2
    if LEAD == 2:
        next_place = find_place(tensors.k, tl.maximum(page, 0))
        later = tl.minimum(main + 1, main_end - 1)
        page = tl.load(table_ptr + later * TILE // SHAPE.page_size, mask=main < main_end, other=0)
    for j in tl.range(main, main_end, num_stages=STAGES):
        if LEAD == 2:
            place = next_place
            next_place = find_place(tensors.k, tl.maximum(page, 0))
        else:
            place = tl.maximum(page, 0)
        later = tl.minimum(j + LEAD, main_end - 1)
        page = tl.load(table_ptr + later * TILE // SHAPE.page_size)
        acc, m_i, l_i = _attend_tile(
            acc, m_i, l_i, q, factor, offset, j, place, table_ptr, h, q_position,
            exists, begin, end, start, window, tensors, mask_ptr, bias_ptr, factors.softcap,
            SHAPE, FEATURES, K_CODEC, V_CODEC, TILE, SWAPPED, MASKED=False,
        )  # fmt: skip
    if ROWS <= SUMMED_LATE:
        l_i = tl.sum(l_i, 0 if SWAPPED else 1)
    for i in tl.range(0, masked, num_stages=1):
        j = tl.where(i < before, first + i, after + i - before)
        page = tl.maximum(tl.load(table_ptr + j * MASKED_TILE // SHAPE.page_size), 0)
        place = find_place(tensors.k, page)
        acc, m_i, l_i = _attend_tile(
            acc, m_i, l_i, q, factor, offset, j, place, table_ptr, h, q_position,
            exists, begin, end, start, window, tensors, mask_ptr, bias_ptr, factors.softcap,
            SHAPE, FEATURES, K_CODEC, V_CODEC, MASKED_TILE, SWAPPED, MASKED=True,
        )  # fmt: skip
    return acc, m_i, l_i


@triton.jit
def _row_offset(strides, b, head, t):
    return (
        b.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + t.to(tl.int64) * strides[2]
    )


@triton.jit
def _load_query(
    tensors, factors, b, h, head, t, exists, strides,
    SHAPE: tl.constexpr, FEATURES: tl.constexpr, K_CODEC: tl.constexpr,
):  # fmt: skip
    """Return the query rows as the dot product takes them, what logits lack, and q c."""
    d = tl.arange(0, SHAPE.k_width)
    real = exists[:, None] & (d < SHAPE.k_dim)[None, :]
    offsets = _row_offset(strides, b, head, t)[:, None] + d[None, :]
    q = tl.load(tensors.query + offsets, mask=real, other=0.0).to(tl.float32)
    offset = tl.zeros([q.shape[0]], tl.float32)
    if FEATURES.centered:
        center_ptr = tensors.k.center + (b * SHAPE.heads + h).to(tl.int64) * SHAPE.k_dim
        center = tl.load(center_ptr + d, mask=d < SHAPE.k_dim, other=0.0)
        offset = tl.sum(q * center[None, :], 1) * factors.scaling
    q = mix(q, SHAPE.k_block)
    if tensors.k.static_scale is not None:
        scale_ptr = tensors.k.static_scale + h * SHAPE.k_dim
        q *= tl.load(scale_ptr + d, mask=d < SHAPE.k_dim, other=0.0)[None, :]
    # A power of two that brings the largest of a row to between 2^13 and 2^14.
    exponent = (tl.max(tl.abs(q), 1).to(tl.int32, bitcast=True) >> 23) & 0xFF
    up = tl.minimum(tl.maximum(267 - exponent, 1), 253)
    raised = q * (up << 23).to(tl.float32, bitcast=True)[:, None]
    factor = ((254 - up) << 23).to(tl.float32, bitcast=True) * factors.k_scaling
    return raised.to(K_CODEC.operand), factor, offset


@triton.jit
def _attend_tile(
    acc, m_i, l_i, q, factor, offset, j, page, table_ptr, h, q_position,
    exists, begin, end, start, window, tensors, mask_ptr, bias_ptr, softcap,
    SHAPE: tl.constexpr, FEATURES: tl.constexpr, K_CODEC: tl.constexpr, V_CODEC: tl.constexpr,
    TILE: tl.constexpr, SWAPPED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return acc, m_i and l_i with tile `j` taken in. MASKED: some row does not see all of it."""
    ROW_AXIS: tl.constexpr = 1 if SWAPPED else 0
    position = j * TILE + tl.arange(0, TILE)
    k_codes, v_codes, word_ptrs = load_codes(
        tensors, j, position, page, table_ptr, h, end, SHAPE, TILE
    )
    k = decode_for_dot(k_codes, K_CODEC)
    if SWAPPED:
        x = tl.dot(k, tl.trans(q), input_precision=FEATURES.precision)
    else:
        x = tl.dot(q, tl.trans(k), input_precision=FEATURES.precision)
    if FEATURES.k_dynamic or FEATURES.v_dynamic:
        k_scale, v_scale = load_scales(word_ptrs)
    if FEATURES.k_dynamic:
        x *= of_others(k_scale, SWAPPED)
    x = _apply_scales_and_softcap(
        x, factor, offset, softcap, mask_ptr, bias_ptr, position, end, start, FEATURES, SWAPPED
    )
    if MASKED:
        visible = _find_visible(
            position, q_position, exists, begin, end, start, window, mask_ptr, FEATURES, SWAPPED
        )
        x = tl.where(visible, x, float("-inf"))
        # Tokens that some row sees.
        seen = tl.max(visible.to(tl.int32), ROW_AXIS) != 0

    if FEATURES.v_dynamic:
        if MASKED:
            # What no row sees must not count even if it is NaN.
            v_scale = tl.where(seen, v_scale, 0.0)
        # log2 to within 0.09, by its bits: exponent, and the mantissa as a straight line. It only
        # sets the reference that weights are relative to.
        bits = tl.maximum(v_scale, LEAST_SCALE).to(tl.int32, bitcast=True)
        log2_scale = bits.to(tl.float32) * 2.0**-23 - 127.0
        m_new = tl.maximum(m_i, tl.max(x + of_others(log2_scale, SWAPPED), 1 - ROW_AXIS))
    else:
        m_new = tl.maximum(m_i, tl.max(x, 1 - ROW_AXIS))
    weights, alpha, l_i = _online_softmax(x, m_i, l_i, m_new, SWAPPED)
    if FEATURES.v_dynamic:
        weights *= of_others(v_scale, SWAPPED)
    if MASKED:
        v_codes = tl.where(seen[None, :], v_codes, tl.zeros_like(v_codes))
    v = decode_for_dot(v_codes, V_CODEC)
    acc = acc * of_rows(alpha, SWAPPED)
    weights = weights.to(V_CODEC.operand)
    if SWAPPED:
        acc = tl.dot(v, weights, acc, input_precision=FEATURES.precision)
    else:
        acc = tl.dot(weights, tl.trans(v), acc, input_precision=FEATURES.precision)
    return acc, m_new, l_i


@triton.jit
def _apply_scales_and_softcap(
    x, factor, offset, softcap, mask_ptr, bias_ptr, position, end, start, FEATURES: tl.constexpr,
    SWAPPED: tl.constexpr,
):  # fmt: skip
    """Return products of q and k as logits in powers of two, with softcap, bias and mask."""
    x = x * of_rows(factor, SWAPPED) + of_rows(offset, SWAPPED)
    if FEATURES.softcapped:
        # softcap * tanh(x / softcap), with tanh(y) = 1 - 2 / (exp(2 y) + 1)
        x = softcap - 2 * softcap / (tl.exp2(x * (2 * LOG2E / softcap)) + 1)
    column = of_others(position - start, SWAPPED)
    within = of_others((position >= start) & (position < end), SWAPPED)
    if bias_ptr is not None:
        x += _load_added(of_rows(bias_ptr, SWAPPED) + column, within)
    if FEATURES.mask == ADDITIVE:
        x += _load_added(of_rows(mask_ptr, SWAPPED) + column, within)
    if FEATURES.softcapped or bias_ptr is not None or FEATURES.mask == ADDITIVE:
        x *= LOG2E
    return x


@triton.jit
def _load_added(ptrs, within):
    """Return what is added to logits.

    The lowest number of bfloat16 stays one in powers of two, so that a row of it is a plain mean.
    """
    x = tl.load(ptrs, mask=within, other=0.0).to(tl.float32)
    return tl.where(x == float("-inf"), x, tl.maximum(x, -2e38))


@triton.jit
def _find_visible(
    position, q_position, exists, begin, end, start, window, mask_ptr, FEATURES: tl.constexpr,
    SWAPPED: tl.constexpr,
):  # fmt: skip
    """Return whether each row sees each token of a tile: `[ROWS, TILE]`, or swapped."""
    seen = (position >= begin) & (position < end)
    if FEATURES.mask == COMPACT:
        seen &= tl.load(mask_ptr + (position - start), mask=seen, other=0) != 0
    visible = of_others(seen, SWAPPED) & of_rows(exists, SWAPPED)
    if FEATURES.causal:
        visible &= of_others(position, SWAPPED) <= of_rows(q_position, SWAPPED)
    if FEATURES.windowed:
        too_old = last_before_window(q_position, window)
        visible &= of_others(position, SWAPPED) > of_rows(too_old, SWAPPED)
    if FEATURES.mask == COMPLETE:
        mask_ptrs = of_rows(mask_ptr, SWAPPED) + of_others(position - start, SWAPPED)
        visible &= tl.load(mask_ptrs, mask=visible, other=0) != 0
    return visible


@triton.jit
def _online_softmax(x, m_i, l_i, m_new, SWAPPED: tl.constexpr):
    """Return a tile's weights relative to `m_new`, what older sums fade by, and the new l_i."""
    # A row that has seen nothing yet: -inf - -inf would be NaN.
    m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)
    weights = tl.exp2(x - of_rows(m_finite - HEADROOM, SWAPPED))
    alpha = tl.exp2(m_i - m_finite)
    if len(l_i.shape) > 1:
        l_i = l_i * of_rows(alpha, SWAPPED) + weights
    else:
        l_i = l_i * alpha + tl.sum(weights, 0 if SWAPPED else 1)
    return weights, alpha, l_i


@triton.jit
def finish(
    acc, m_i, l_i, sinks_ptr, v_static_scale_ptr, h, head, v_factor, SHAPE: tl.constexpr,
    SWAPPED: tl.constexpr,
):  # fmt: skip
    """Return the output rows, shaped like `acc`: with sinks, divided, scaled and rotated back."""
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        m_new = tl.maximum(m_i, sink)
        m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m_i - m_finite)
        l_i = l_i * alpha + tl.exp2(sink - m_finite + HEADROOM)
        acc *= of_rows(alpha, SWAPPED)
    # A row that sees nothing has the sum 0, and gives zeros.
    out = acc * of_rows(v_factor / tl.where(l_i == 0, 1.0, l_i), SWAPPED)
    if v_static_scale_ptr is not None:
        dv = tl.arange(0, SHAPE.v_width)
        scale_ptr = v_static_scale_ptr + h * SHAPE.v_dim
        scale = tl.load(scale_ptr + dv, mask=dv < SHAPE.v_dim, other=0.0)
        out *= of_others(scale, SWAPPED)
    return mix(out, SHAPE.v_block, SWAPPED)
