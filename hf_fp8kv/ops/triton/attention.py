"""Softmax attention over stored pages: the device code that decode.py and extend.py share.

A program takes the query rows of one KV head (query heads of that head times query tokens) and a
range of positions, reads the codes of one tile of tokens after the other, and keeps an online
softmax. What makes it fast is where scales are applied:

    static K       into the query, once                    (per channel, head or tensor alike)
                   after it is rotated as K is
    static V       into the output, once, before it is rotated back
    dynamic K      into a column of logits
    dynamic V      into a column of weights

so that a code only ever becomes the number it encodes. The query is scaled by a power of two per
row to just under float16's largest number: it does not underflow where the result could show it.
What happens between the two products is in softmax.py; latents, which are both, in latent.py.
"""

import triton
import triton.language as tl

from .codec import decode_for_dot, keep
from .latent import attend_latents, join_chunks, split_chunks
from .places import find_place, load_codes, load_scales
from .rotation import mix
from .softmax import (
    COMPACT,
    COMPLETE,
    HEADROOM,
    LOG2E,
    NO_MASK,
    SUMMED_LATE,
    change_logits,
    find_visible,
    last_before_window,
    of_others,
    of_rows,
    weigh,
)


@triton.jit
def attend_rows(
    tensors, factors, b, h, head, t, exists, length, tokens, low, high, first_t, last_t,
    start, window, query_strides, table_b, mask_strides, bias_strides,
    SHAPE: tl.constexpr, FEATURES: tl.constexpr, K_CODEC: tl.constexpr, V_CODEC: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, MASKED_TILE: tl.constexpr, STAGES: tl.constexpr,
    SWAPPED: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Return the attention of some query rows over positions `low` to `high - 1`, unfinished.

    That is acc `[ROWS, out_width]`, the sum of weights times codes of values; m_i `[ROWS]`, the
    power of two that weights are relative to; and l_i `[ROWS]`, the sum of weights; all float32.
    SWAPPED: products have their operands, and acc its axes, the other way round. CHUNKS: see
    latent.py. `head`, `t` and `exists`, `[ROWS]`, are the query head and token of each row, and
    whether it is one: rows past the last stand for an existing head and token too. `first_t` and
    `last_t` are the least and the greatest `t` that exist.
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

    query_ptrs = tensors.query + _row_offset(query_strides, b, head, t)
    q, factor, offset = _load_query(
        query_ptrs, tensors.k, factors.k_scaling, factors.scaling, b, h, exists, SHAPE.heads,
        SHAPE.k_dim, SHAPE.k_width, SHAPE.k_block, FEATURES.centered, K_CODEC,
    )  # fmt: skip
    factor *= LOG2E
    offset *= LOG2E
    if FEATURES.latent:
        positions, v_factor, _ = _load_query(
            query_ptrs + SHAPE.k_dim, tensors.v, factors.v_scaling, factors.scaling, b, h, exists,
            SHAPE.heads, SHAPE.v_dim, SHAPE.v_width, SHAPE.v_block, False, V_CODEC,
        )  # fmt: skip
        v_factor *= LOG2E
        # Else their layout would be made for what rotation computes with.
        q = keep(q, K_CODEC)
        positions = keep(positions, V_CODEC)
        if CHUNKS > 1:
            q = split_chunks(q, CHUNKS)
        query = (q, factor, positions, v_factor)
    else:
        query = (q, factor, offset, None)
    WIDTH: tl.constexpr = SHAPE.out_width
    if CHUNKS > 1:
        acc = tl.zeros([CHUNKS, ROWS, WIDTH // CHUNKS], tl.float32)
    else:
        acc = tl.zeros([WIDTH, ROWS] if SWAPPED else [ROWS, WIDTH], tl.float32)
    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    # Of few rows weights are summed over tokens once, after the last tile.
    if ROWS > SUMMED_LATE:
        l_i = tl.zeros([ROWS], tl.float32)
    else:
        l_i = tl.zeros([TILE, ROWS] if SWAPPED else [ROWS, TILE], tl.float32)
    table_ptr = tensors.table + b.to(tl.int64) * table_b

    # The number of a tile's page is loaded two tiles ahead, and its offset one: the tile's own
    # loads can then be started as far ahead as `STAGES` says.
    page = tl.load(table_ptr + main * TILE // SHAPE.page_size, mask=main < main_end, other=0)
    next_place = find_place(tensors.k, tl.maximum(page, 0))
    later = tl.minimum(main + 1, main_end - 1)
    page = tl.load(table_ptr + later * TILE // SHAPE.page_size, mask=main < main_end, other=0)
    for j in tl.range(main, main_end, num_stages=STAGES):
        place = next_place
        next_place = find_place(tensors.k, tl.maximum(page, 0))
        later = tl.minimum(j + 2, main_end - 1)
        page = tl.load(table_ptr + later * TILE // SHAPE.page_size)
        acc, m_i, l_i = _attend_tile(
            acc, m_i, l_i, query, j, place, table_ptr, h, q_position, exists, begin, end, start,
            window, tensors, mask_ptr, bias_ptr, factors.softcap, SHAPE, FEATURES, K_CODEC,
            V_CODEC, TILE, SWAPPED, CHUNKS, MASKED=False,
        )  # fmt: skip
    if ROWS <= SUMMED_LATE:
        l_i = tl.sum(l_i, 0 if SWAPPED else 1)
    for i in tl.range(0, masked, num_stages=1):
        j = tl.where(i < before, first + i, after + i - before)
        page = tl.maximum(tl.load(table_ptr + j * MASKED_TILE // SHAPE.page_size), 0)
        place = find_place(tensors.k, page)
        acc, m_i, l_i = _attend_tile(
            acc, m_i, l_i, query, j, place, table_ptr, h, q_position, exists, begin, end, start,
            window, tensors, mask_ptr, bias_ptr, factors.softcap, SHAPE, FEATURES, K_CODEC,
            V_CODEC, MASKED_TILE, SWAPPED, CHUNKS, MASKED=True,
        )  # fmt: skip
    if CHUNKS > 1:
        acc = join_chunks(acc)
    return acc, m_i, l_i


@triton.jit
def _row_offset(strides, b, head, t):
    return (
        b.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + t.to(tl.int64) * strides[2]
    )


@triton.jit
def _load_query(
    ptrs, side, code_scaling, scaling, b, h, exists, HEADS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, CENTERED: tl.constexpr, CODEC: tl.constexpr,
):  # fmt: skip
    """Return the query rows as the product with codes takes them, what logits lack, and q c.

    Args:
        ptrs: `[ROWS]`, where each row begins.
        side: what the codes are of; DIM, WIDTH, BLOCK and CODEC are its own.
        code_scaling, scaling: of products with codes, and with keys; see `Factors`.
    """
    d = tl.arange(0, WIDTH)
    real = exists[:, None] & (d < DIM)[None, :]
    q = tl.load(ptrs[:, None] + d[None, :], mask=real, other=0.0).to(tl.float32)
    offset = tl.zeros([q.shape[0]], tl.float32)
    if CENTERED:
        center_ptr = side.center + (b * HEADS + h).to(tl.int64) * DIM
        center = tl.load(center_ptr + d, mask=d < DIM, other=0.0)
        offset = tl.sum(q * center[None, :], 1) * scaling
    q = mix(q, BLOCK)
    if side.static_scale is not None:
        scale_ptr = side.static_scale + h * DIM
        q *= tl.load(scale_ptr + d, mask=d < DIM, other=0.0)[None, :]
    # A power of two that brings the largest of a row to between 2^13 and 2^14.
    exponent = (tl.max(tl.abs(q), 1).to(tl.int32, bitcast=True) >> 23) & 0xFF
    up = tl.minimum(tl.maximum(267 - exponent, 1), 253)
    raised = q * (up << 23).to(tl.float32, bitcast=True)[:, None]
    factor = ((254 - up) << 23).to(tl.float32, bitcast=True) * code_scaling
    return raised.to(CODEC.operand), factor, offset


@triton.jit
def _attend_tile(
    acc, m_i, l_i, query, j, page, table_ptr, h, q_position, exists, begin, end, start, window,
    tensors, mask_ptr, bias_ptr, softcap, SHAPE: tl.constexpr, FEATURES: tl.constexpr,
    K_CODEC: tl.constexpr, V_CODEC: tl.constexpr, TILE: tl.constexpr, SWAPPED: tl.constexpr,
    CHUNKS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return acc, m_i and l_i with tile `j` taken in. MASKED: some row does not see all of it."""
    if FEATURES.latent:
        acc, m_i, l_i = attend_latents(
            acc, m_i, l_i, query, j, page, table_ptr, h, q_position, exists, begin, end, start,
            window, tensors, mask_ptr, bias_ptr, softcap, SHAPE, FEATURES, K_CODEC, V_CODEC, TILE,
            SWAPPED, CHUNKS, MASKED,
        )  # fmt: skip
    else:
        acc, m_i, l_i = _attend_keys(
            acc, m_i, l_i, query, j, page, table_ptr, h, q_position, exists, begin, end, start,
            window, tensors, mask_ptr, bias_ptr, softcap, SHAPE, FEATURES, K_CODEC, V_CODEC, TILE,
            SWAPPED, MASKED,
        )  # fmt: skip
    return acc, m_i, l_i


@triton.jit
def _attend_keys(
    acc, m_i, l_i, query, j, page, table_ptr, h, q_position, exists, begin, end, start, window,
    tensors, mask_ptr, bias_ptr, softcap, SHAPE: tl.constexpr, FEATURES: tl.constexpr,
    K_CODEC: tl.constexpr, V_CODEC: tl.constexpr, TILE: tl.constexpr, SWAPPED: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Do what `_attend_tile` does, of keys and values."""
    ROW_AXIS: tl.constexpr = 1 if SWAPPED else 0
    position = j * TILE + tl.arange(0, TILE)
    k_codes, v_codes, word_ptrs = load_codes(
        tensors, j, position, page, table_ptr, h, end, SHAPE, TILE
    )
    q, factor, offset, _ = query
    k = decode_for_dot(k_codes, K_CODEC)
    if SWAPPED:
        x = tl.dot(k, tl.trans(q), input_precision=FEATURES.precision)
    else:
        x = tl.dot(q, tl.trans(k), input_precision=FEATURES.precision)
    k_scale, v_scale = None, None
    if FEATURES.k_dynamic or FEATURES.v_dynamic:
        k_scale, v_scale = load_scales(word_ptrs)
    if FEATURES.k_dynamic:
        x *= of_others(k_scale, SWAPPED)
    x = x * of_rows(factor, SWAPPED) + of_rows(offset, SWAPPED)
    x = change_logits(x, softcap, mask_ptr, bias_ptr, position, end, start, FEATURES, SWAPPED)
    seen = None
    if MASKED:
        visible = find_visible(
            position, q_position, exists, begin, end, start, window, mask_ptr, FEATURES, SWAPPED
        )
        x = tl.where(visible, x, float("-inf"))
        # Tokens that some row sees.
        seen = tl.max(visible.to(tl.int32), ROW_AXIS) != 0
    weights, alpha, m_i, l_i = weigh(x, m_i, l_i, v_scale, seen, FEATURES.v_dynamic, SWAPPED)
    if MASKED:
        v_codes = tl.where(tl.expand_dims(seen, 0), v_codes, tl.zeros_like(v_codes))
    v = decode_for_dot(v_codes, V_CODEC)
    acc = acc * of_rows(alpha, SWAPPED)
    weights = weights.to(V_CODEC.operand)
    if SWAPPED:
        acc = tl.dot(v, weights, acc, input_precision=FEATURES.precision)
    else:
        acc = tl.dot(weights, tl.trans(v), acc, input_precision=FEATURES.precision)
    return acc, m_i, l_i


@triton.jit
def finish(
    acc, m_i, l_i, sinks_ptr, static_scale_ptr, h, head, out_factor, SHAPE: tl.constexpr,
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
    out = acc * of_rows(out_factor / tl.where(l_i == 0, 1.0, l_i), SWAPPED)
    if static_scale_ptr is not None:
        d = tl.arange(0, SHAPE.out_width)
        scale_ptr = static_scale_ptr + h * SHAPE.out_dim
        scale = tl.load(scale_ptr + d, mask=d < SHAPE.out_dim, other=0.0)
        out *= of_others(scale, SWAPPED)
    return mix(out, SHAPE.out_block, SWAPPED)
