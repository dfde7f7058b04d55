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

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .codec import decode_for_dot, keep
from .places import find_place, load_codes, load_scales
from .products import add_values, join_chunks, multiply_keys, split_chunks
from .rotation import mix
from .softmax import (
    COMPACT,
    COMPLETE,
    HEADROOM,
    LOG2E,
    SUMMED_LATE,
    change_logits,
    find_visible,
    last_before_window,
    of_others,
    of_rows,
    weigh,
)

# Records of device code. Triton specializes kernels for integers within a tuple, so that those that
# differ from step to step are single parameters of kernels, and join a record inside of them.


class Strides(NamedTuple):
    """Strides of batch, head and token; `table` of the batch alone."""

    query: Any
    table: Any
    mask: Any
    bias: Any


class Span(NamedTuple):
    """The positions `low` to `high - 1`, and `start` and `window` of `ops.attend`."""

    low: Any
    high: Any
    start: Any
    window: Any


class Rows(NamedTuple):
    """Query rows of a program. Those past the last also have an existing head and token.

    Attributes:
        b, h: The sequence and the KV head.
        row, head, t, position: `[ROWS]`, the number, query head, token and position of each.
        exists: `[ROWS]`, whether it is one.
        first_q, last_q: The least and the greatest position of those that exist.
    """

    b: Any
    h: Any
    row: Any
    head: Any
    t: Any
    position: Any
    exists: Any
    first_q: Any
    last_q: Any


class View(NamedTuple):
    """What the rows of a program look at.

    Attributes:
        begin, end: The first position that a row may see, and one past the last.
        start, window: As in `Span`.
        table_ptr: The pages of the sequence.
        mask_ptr: The mask of the sequence, or `[ROWS]`, of each row, as its kind says.
        bias_ptr: `[ROWS]`, the bias of each row, or None.
    """

    begin: Any
    end: Any
    start: Any
    window: Any
    table_ptr: Any
    mask_ptr: Any
    bias_ptr: Any


@triton.jit
def find_rows(b, h, block, tokens, length, CALL: tl.constexpr):
    """Return the `Rows` of block number `block` of a sequence of `length` tokens."""
    GROUPS: tl.constexpr = CALL.groups
    ROWS: tl.constexpr = CALL.config.rows
    count = GROUPS * tokens
    first = block * ROWS
    rows = first + tl.arange(0, ROWS)
    row = tl.minimum(rows, count - 1)
    t = row // GROUPS
    before = length - tokens
    last = (tl.minimum(first + ROWS, count) - 1) // GROUPS
    return Rows(
        b, h, row, h * GROUPS + row % GROUPS, t, before + t, rows < count,
        before + first // GROUPS, before + last,
    )  # fmt: skip


@triton.jit
def attend_rows(tensors, factors, rows, span, strides, CALL: tl.constexpr):
    """Return the attention of query rows over the positions of `span`, unfinished.

    That is acc `[ROWS, out_width]`, the sum of weights times codes of values; m_i `[ROWS]`, the
    power of two that weights are relative to; and l_i `[ROWS]`, the sum of weights; all float32.
    With `config.swapped`, products have their operands, and acc its axes, the other way round. With
    `config.chunks`, see latent.py.
    """
    ROWS: tl.constexpr = CALL.config.rows
    TILE: tl.constexpr = CALL.config.tile
    MASKED_TILE: tl.constexpr = CALL.config.masked_tile
    SWAPPED: tl.constexpr = CALL.config.swapped
    CHUNKS: tl.constexpr = CALL.config.chunks
    b = rows.b
    end = span.high
    if CALL.causal:
        end = tl.minimum(end, rows.last_q + 1)
    begin = tl.maximum(span.low, span.start)
    if CALL.windowed:
        begin = tl.maximum(begin, last_before_window(rows.first_q, span.window) + 1)
    begin = tl.maximum(begin, 0)

    # Positions that every row sees: `full` to `full_end - 1`.
    full = begin
    full_end = end
    if CALL.causal:
        full_end = tl.minimum(full_end, rows.first_q + 1)
    if CALL.windowed:
        full = tl.maximum(full, last_before_window(rows.last_q, span.window) + 1)
    mask_ptr = tensors.mask
    if CALL.mask == COMPACT:
        mask_ptr += b.to(tl.int64) * strides.mask[0]
        bounds_ptr = tensors.bounds + b.to(tl.int64) * strides.mask[1]
        begin = tl.maximum(begin, tl.load(bounds_ptr))
        full = tl.maximum(full, tl.load(bounds_ptr + 1))
    elif CALL.mask == COMPLETE:
        mask_ptr += _row_offset(strides.mask, rows)
        full_end = 0
    bias_ptr = tensors.bias
    if bias_ptr is not None:
        bias_ptr += _row_offset(strides.bias, rows)

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

    query = _load_rows(tensors, factors, rows, strides.query, CALL)
    WIDTH: tl.constexpr = CALL.out.width
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
    table_ptr = tensors.table + b.to(tl.int64) * strides.table
    view = View(begin, end, span.start, span.window, table_ptr, mask_ptr, bias_ptr)

    # The number of a tile's page is loaded two tiles ahead, and its offset one: the tile's own
    # loads can then be started as far ahead as there are stages.
    page = tl.load(table_ptr + main * TILE // CALL.page_size, mask=main < main_end, other=0)
    next_place = find_place(tensors.k, tl.maximum(page, 0))
    later = tl.minimum(main + 1, main_end - 1)
    page = tl.load(table_ptr + later * TILE // CALL.page_size, mask=main < main_end, other=0)
    for j in tl.range(main, main_end, num_stages=CALL.config.stages):
        place = next_place
        next_place = find_place(tensors.k, tl.maximum(page, 0))
        later = tl.minimum(j + 2, main_end - 1)
        page = tl.load(table_ptr + later * TILE // CALL.page_size)
        acc, m_i, l_i = _attend_tile(
            acc, m_i, l_i, query, j, place, tensors, factors.softcap, rows, view, CALL,
            MASKED=False,
        )  # fmt: skip
    if ROWS <= SUMMED_LATE:
        l_i = tl.sum(l_i, 0 if SWAPPED else 1)
    for i in tl.range(0, masked, num_stages=1):
        j = tl.where(i < before, first + i, after + i - before)
        page = tl.maximum(tl.load(table_ptr + j * MASKED_TILE // CALL.page_size), 0)
        place = find_place(tensors.k, page)
        acc, m_i, l_i = _attend_tile(
            acc, m_i, l_i, query, j, place, tensors, factors.softcap, rows, view, CALL, MASKED=True
        )  # fmt: skip
    if CHUNKS > 1:
        acc = join_chunks(acc)
    return acc, m_i, l_i


@triton.jit
def _row_offset(strides, rows):
    return (
        rows.b.to(tl.int64) * strides[0]
        + rows.head.to(tl.int64) * strides[1]
        + rows.t.to(tl.int64) * strides[2]
    )


@triton.jit
def _load_rows(tensors, factors, rows, strides, CALL: tl.constexpr):
    """Return the rows as operands of products, a factor for the logits, and q c.

    Of latents: their part of the rows and its factor, and the same two of positions.
    """
    K_CODEC: tl.constexpr = CALL.k_codec
    V_CODEC: tl.constexpr = CALL.v_codec
    # (Triton 3.5 takes no attribute of a record as an argument, unless it is a number.)
    K_SIDE: tl.constexpr = CALL.k
    V_SIDE: tl.constexpr = CALL.v
    CHUNKS: tl.constexpr = CALL.config.chunks
    ptrs = tensors.query + _row_offset(strides, rows)
    q, factor, offset = _load_query(
        ptrs, tensors.k, factors.k_scaling, factors.scaling, rows, CALL.heads, K_SIDE,
        CALL.centered, K_CODEC,
    )  # fmt: skip
    factor *= LOG2E
    # (Triton takes no return before the last statement where other returns differ.)
    if CALL.latent:
        positions, v_factor, _ = _load_query(
            ptrs + K_SIDE.dim, tensors.v, factors.v_scaling, factors.scaling, rows, CALL.heads,
            V_SIDE, False, V_CODEC,
        )  # fmt: skip
        # Else their layout would be made for the sums of rotation.
        q = keep(q, K_CODEC)
        positions = keep(positions, V_CODEC)
        if CHUNKS > 1:
            q = split_chunks(q, CHUNKS)
        return q, factor, positions, v_factor * LOG2E
    else:
        return q, factor, offset * LOG2E


@triton.jit
def _load_query(
    ptrs, side, code_scaling, scaling, rows, HEADS: tl.constexpr, SIDE: tl.constexpr,
    CENTERED: tl.constexpr, CODEC: tl.constexpr,
):  # fmt: skip
    """Return the query rows as the product with codes takes them, what logits lack, and q c.

    Args:
        ptrs: `[ROWS]`, where each row begins.
        side: what the codes are of; SIDE and CODEC are its own.
        code_scaling, scaling: of products with codes, and with keys; see `Factors`.
    """
    DIM: tl.constexpr = SIDE.dim
    d = tl.arange(0, SIDE.width)
    real = rows.exists[:, None] & (d < DIM)[None, :]
    q = tl.load(ptrs[:, None] + d[None, :], mask=real, other=0.0).to(tl.float32)
    offset = tl.zeros([q.shape[0]], tl.float32)
    if CENTERED:
        center_ptr = side.center + (rows.b * HEADS + rows.h).to(tl.int64) * DIM
        center = tl.load(center_ptr + d, mask=d < DIM, other=0.0)
        offset = tl.sum(q * center[None, :], 1) * scaling
    q = mix(q, SIDE.block)
    if side.static_scale is not None:
        scale_ptr = side.static_scale + rows.h * DIM
        q *= tl.load(scale_ptr + d, mask=d < DIM, other=0.0)[None, :]
    # A power of two that brings the largest of a row to between 2^13 and 2^14.
    exponent = (tl.max(tl.abs(q), 1).to(tl.int32, bitcast=True) >> 23) & 0xFF
    up = tl.minimum(tl.maximum(267 - exponent, 1), 253)
    raised = q * (up << 23).to(tl.float32, bitcast=True)[:, None]
    factor = ((254 - up) << 23).to(tl.float32, bitcast=True) * code_scaling
    return raised.to(CODEC.operand), factor, offset


@triton.jit
def _attend_tile(
    acc, m_i, l_i, query, j, place, tensors, softcap, rows, view, CALL: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Return acc, m_i and l_i with tile `j` taken in. MASKED: some row does not see all of it."""
    K_CODEC: tl.constexpr = CALL.k_codec
    V_CODEC: tl.constexpr = CALL.v_codec
    SWAPPED: tl.constexpr = CALL.config.swapped
    TILE: tl.constexpr = CALL.config.masked_tile if MASKED else CALL.config.tile
    position = j * TILE + tl.arange(0, TILE)
    k_codes, v_codes, word_ptrs = load_codes(tensors, j, position, place, rows.h, view, CALL, TILE)
    seen = None
    # Keys do this after the product: one more value through it makes Triton 3.5 spill.
    if MASKED and CALL.latent:
        visible, seen = find_visible(position, rows, view, CALL)
        k_codes = tl.where(tl.expand_dims(seen, 1), k_codes, tl.zeros_like(k_codes))
    k_scale, v_scale = None, None
    if CALL.k_dynamic or CALL.v_dynamic:
        k_scale, v_scale = load_scales(word_ptrs)
    if CALL.latent:
        q, factor, q_positions, v_factor = query
        latents = keep(decode_for_dot(k_codes, K_CODEC), K_CODEC)
        positions = keep(decode_for_dot(v_codes, V_CODEC), V_CODEC)
        if CALL.config.chunks > 1:
            latents = split_chunks(latents, CALL.config.chunks)
        x = multiply_keys(q, latents, CALL)
        y = multiply_keys(q_positions, tl.trans(positions), CALL)
        if CALL.k_dynamic:
            x *= of_others(k_scale, SWAPPED)
        if CALL.v_dynamic:
            y *= of_others(v_scale, SWAPPED)
        x = x * of_rows(factor, SWAPPED) + y * of_rows(v_factor, SWAPPED)
    else:
        q, factor, offset = query
        x = multiply_keys(q, decode_for_dot(k_codes, K_CODEC), CALL)
        if CALL.k_dynamic:
            x *= of_others(k_scale, SWAPPED)
        x = x * of_rows(factor, SWAPPED) + of_rows(offset, SWAPPED)
    x = change_logits(x, softcap, view, position, CALL)
    if MASKED and not CALL.latent:
        visible, seen = find_visible(position, rows, view, CALL)
    if MASKED:
        x = tl.where(visible, x, float("-inf"))
    if CALL.latent:
        weights, alpha, m_i, l_i = weigh(x, m_i, l_i, k_scale, seen, CALL.k_dynamic, SWAPPED)
        acc = add_values(acc, alpha, weights.to(K_CODEC.operand), latents, CALL)
    else:
        weights, alpha, m_i, l_i = weigh(x, m_i, l_i, v_scale, seen, CALL.v_dynamic, SWAPPED)
        if MASKED:
            v_codes = tl.where(tl.expand_dims(seen, 0), v_codes, tl.zeros_like(v_codes))
        v = decode_for_dot(v_codes, V_CODEC)
        acc = add_values(acc, alpha, weights, tl.trans(v), CALL)
    return acc, m_i, l_i


@triton.jit
def write_rows(out_ptr, acc, m_i, l_i, tensors, factors, rows, tokens, CALL: tl.constexpr):
    """Write finished rows to the output, `[B, T, Hq, out_dim]`."""
    SWAPPED: tl.constexpr = CALL.config.swapped
    scale = tensors.k.static_scale if CALL.latent else tensors.v.static_scale
    out = finish(acc, m_i, l_i, tensors.sinks, scale, rows.h, rows.head, factors.out, CALL, SWAPPED)
    d = tl.arange(0, CALL.out.width)
    real = of_rows(rows.exists, SWAPPED) & of_others(d < CALL.out.dim, SWAPPED)
    place = (rows.b * tokens + rows.t) * (CALL.heads * CALL.groups) + rows.head
    offset = place.to(tl.int64) * CALL.out.dim
    out_ptrs = out_ptr + of_rows(offset, SWAPPED) + of_others(d, SWAPPED)
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=real)


@triton.jit
def finish(
    acc, m_i, l_i, sinks_ptr, static_scale_ptr, h, head, out_factor, CALL: tl.constexpr,
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
        d = tl.arange(0, CALL.out.width)
        scale_ptr = static_scale_ptr + h * CALL.out.dim
        scale = tl.load(scale_ptr + d, mask=d < CALL.out.dim, other=0.0)
        out *= of_others(scale, SWAPPED)
    return mix(out, CALL.out.block, SWAPPED)
