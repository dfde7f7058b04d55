"""Softmax attention over stored pages: the device code of the kernel in decode.py.

A program computes the query rows of one KV head (query heads of that head times query tokens) over
a range of positions. It reads the codes tile by tile, with an online softmax. It is fast because
it never multiplies codes by scales. The scales multiply smaller tensors:

    static K       the query, once, after it is rotated like K   (per channel, head or tensor)
    static V       the output, once, before it is rotated back
    dynamic K      a column of logits
    dynamic V      a column of weights

A code is only converted to the value that it encodes. A power of two scales each query row so that
its largest value is between 2^13 and 2^14, which fits in float16. Only values too small to show in
the result underflow. softmax.py has the steps between the two products. products.py has the
products, and explains latents.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .codec import AS_IS, decode_for_dot, join_quarters, keep_layout, split_quarters
from .page_access import load_codes, load_page_offset, load_scales
from .products import add_values, multiply_keys, multiply_latents
from .rotation import mix_channels
from .softmax import (
    COMPACT,
    COMPLETE,
    HEADROOM,
    LOG2E,
    MAX_LATE_SUM_ROWS,
    apply_softcap_and_bias,
    find_last_before_window,
    find_visible,
    per_column,
    per_row,
    weigh,
)

# Records of device code. Triton specializes kernels for integers in a tuple. Integers that change
# with each step are therefore separate parameters of a kernel, which packs them into a record.


class Strides(NamedTuple):
    """Strides of batch, head and token. `table` only has the batch stride.

    A compact mask has the batch stride of its bounds in place of the head stride.
    """

    query: Any
    table: Any
    mask: Any
    bias: Any


class Span(NamedTuple):
    """The positions `low` to `high - 1` to read, and `start` and `window` of `ops.attend`."""

    low: Any
    high: Any
    start: Any
    window: Any


class Rows(NamedTuple):
    """Query rows of a program. Rows after the last existing row also have a valid head and token.

    Attributes:
        b, h: The sequence and the KV head.
        row, head, t, position: Index, query head, token and position of each row, `[ROWS]`.
        exists: Whether the row exists, `[ROWS]`.
        first_q, last_q: The smallest and the largest position of existing rows.
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
    """The visible range of a program's rows, and the tensors that limit it further.

    Attributes:
        begin, end: The first position that is visible to any row, and the last position plus one.
        start, window: As in `Span`.
        table_ptr: Page numbers of the sequence.
        mask_ptr: The mask of the sequence (COMPACT), or of each row, `[ROWS]` (COMPLETE).
        bias_ptr: The bias of each row, `[ROWS]`, or None.
    """

    begin: Any
    end: Any
    start: Any
    window: Any
    table_ptr: Any
    mask_ptr: Any
    bias_ptr: Any


@triton.jit
def find_rows(b, h, block, num_tokens, length, CALL: tl.constexpr):
    """Return the `Rows` of block `block` of a sequence of `length` tokens."""
    GROUP_SIZE: tl.constexpr = CALL.group_size
    ROWS: tl.constexpr = CALL.config.rows
    num_rows = GROUP_SIZE * num_tokens
    first_row = block * ROWS
    index = first_row + tl.arange(0, ROWS)
    row = tl.minimum(index, num_rows - 1)
    t = row // GROUP_SIZE
    num_past = length - num_tokens
    last_token = (tl.minimum(first_row + ROWS, num_rows) - 1) // GROUP_SIZE
    return Rows(
        b, h, row, h * GROUP_SIZE + row % GROUP_SIZE, t, num_past + t, index < num_rows,
        num_past + first_row // GROUP_SIZE, num_past + last_token,
    )  # fmt: skip


@triton.jit
def attend_rows(tensors, factors, rows, span, strides, CALL: tl.constexpr):
    """Compute the partial sums of attention of query rows over the positions of `span`.

    Returns:
        acc, m_i and l_i, float32. acc is a tuple that has the sum of weights times codes of values,
        `[ROWS, out_width]`. For latents, it has the quarters of the sum, unless the output is
        rotated. m_i is the exponent of two that weights are relative to, `[ROWS]`. l_i is the sum
        of weights, `[ROWS]`.
        With `config.swapped` the operands of products and the axes of acc are exchanged.
    """
    ROWS: tl.constexpr = CALL.config.rows
    TILE: tl.constexpr = CALL.config.tile
    MASKED_TILE: tl.constexpr = CALL.config.masked_tile
    SWAPPED: tl.constexpr = CALL.config.swapped
    b = rows.b
    end = span.high
    if CALL.causal:
        end = tl.minimum(end, rows.last_q + 1)
    begin = tl.maximum(span.low, span.start)
    if CALL.windowed:
        begin = tl.maximum(begin, find_last_before_window(rows.first_q, span.window) + 1)
    begin = tl.maximum(begin, 0)

    # Positions `full_start` to `full_end - 1` are visible to every row.
    full_start = begin
    full_end = end
    if CALL.causal:
        full_end = tl.minimum(full_end, rows.first_q + 1)
    if CALL.windowed:
        full_start = tl.maximum(full_start, find_last_before_window(rows.last_q, span.window) + 1)
    mask_ptr = tensors.mask
    if CALL.mask == COMPACT:
        mask_ptr += b.to(tl.int64) * strides.mask[0]
        bounds_ptr = tensors.bounds + b.to(tl.int64) * strides.mask[1]
        begin = tl.maximum(begin, tl.load(bounds_ptr))
        full_start = tl.maximum(full_start, tl.load(bounds_ptr + 1))
    elif CALL.mask == COMPLETE:
        mask_ptr += _compute_row_offset(strides.mask, rows)
        full_end = 0
    bias_ptr = tensors.bias
    if bias_ptr is not None:
        bias_ptr += _compute_row_offset(strides.bias, rows)

    # Tiles [main_start, main_end) need no mask. Positions before and after them are read in smaller
    # masked tiles, which are not pipelined and need the most registers.
    main_start = tl.cdiv(full_start, TILE)
    main_end = tl.maximum(full_end // TILE, main_start)
    # If nothing is visible, no masked tile is read, because the table may end before `begin`.
    first_tile = begin // MASKED_TILE
    last_tile = tl.where(begin < end, tl.cdiv(end, MASKED_TILE), first_tile)
    MASKED_PER_TILE: tl.constexpr = TILE // MASKED_TILE
    num_before = tl.minimum(main_start * MASKED_PER_TILE, last_tile) - first_tile
    after_start = tl.minimum(main_end * MASKED_PER_TILE, last_tile)
    num_masked = num_before + last_tile - after_start

    query = _load_rows(tensors, factors, rows, strides.query, CALL)
    WIDTH: tl.constexpr = CALL.out.width
    if CALL.latent:
        quarter = tl.zeros([ROWS, WIDTH // 4], tl.float32)
        acc = (quarter, quarter, quarter, quarter)
    else:
        acc = tl.zeros([WIDTH, ROWS] if SWAPPED else [ROWS, WIDTH], tl.float32)
    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    # With few rows, weights are summed over tokens once, after the last unmasked tile.
    if ROWS > MAX_LATE_SUM_ROWS:
        l_i = tl.zeros([ROWS], tl.float32)
    else:
        l_i = tl.zeros([TILE, ROWS] if SWAPPED else [ROWS, TILE], tl.float32)
    table_ptr = tensors.table + b.to(tl.int64) * strides.table
    view = View(begin, end, span.start, span.window, table_ptr, mask_ptr, bias_ptr)

    # A tile's page number is loaded two tiles ahead, and the page's offset one tile ahead, so that
    # the loads of codes can be pipelined over all stages.
    has_main = main_start < main_end
    page = tl.load(table_ptr + main_start * TILE // CALL.page_size, mask=has_main, other=0)
    next_offset = load_page_offset(tensors.k, tl.maximum(page, 0))
    next_tile = tl.minimum(main_start + 1, main_end - 1)
    page = tl.load(table_ptr + next_tile * TILE // CALL.page_size, mask=has_main, other=0)
    for j in tl.range(main_start, main_end, num_stages=CALL.config.stages):
        page_offset = next_offset
        next_offset = load_page_offset(tensors.k, tl.maximum(page, 0))
        next_tile = tl.minimum(j + 2, main_end - 1)
        page = tl.load(table_ptr + next_tile * TILE // CALL.page_size)
        acc, m_i, l_i = _attend_tile(
            acc,
            m_i,
            l_i,
            query,
            j,
            page_offset,
            tensors,
            factors.softcap,
            rows,
            view,
            CALL,
            MASKED=False,
        )
    if ROWS <= MAX_LATE_SUM_ROWS:
        l_i = tl.sum(l_i, 0 if SWAPPED else 1)
    for i in tl.range(0, num_masked, num_stages=1):
        j = tl.where(i < num_before, first_tile + i, after_start + i - num_before)
        page = tl.maximum(tl.load(table_ptr + j * MASKED_TILE // CALL.page_size), 0)
        page_offset = load_page_offset(tensors.k, page)
        acc, m_i, l_i = _attend_tile(
            acc,
            m_i,
            l_i,
            query,
            j,
            page_offset,
            tensors,
            factors.softcap,
            rows,
            view,
            CALL,
            MASKED=True,
        )
    if not CALL.latent:
        return (acc,), m_i, l_i
    elif CALL.out.rotation_size > 1:
        return (join_quarters(acc[0], acc[1], acc[2], acc[3], TRANSPOSED=False),), m_i, l_i
    else:
        return acc, m_i, l_i


@triton.jit
def _compute_row_offset(strides, rows):
    return (
        rows.b.to(tl.int64) * strides[0]
        + rows.head.to(tl.int64) * strides[1]
        + rows.t.to(tl.int64) * strides[2]
    )


@triton.jit
def _load_rows(tensors, factors, rows, strides, CALL: tl.constexpr):
    """Return query rows as operands, a factor for the logits, and the products with the center.

    For latents, return the latent part of the rows and its factor, then the RoPE part and its
    factor.
    """
    K_CODEC: tl.constexpr = CALL.k_codec
    V_CODEC: tl.constexpr = CALL.v_codec
    # Triton 3.5 accepts attributes of a constexpr as arguments only if they are numbers.
    K_SIDE: tl.constexpr = CALL.k
    V_SIDE: tl.constexpr = CALL.v
    ptrs = tensors.query + _compute_row_offset(strides, rows)
    q, factor, center_logit = _load_query(
        ptrs, tensors.k, factors.k_scaling, factors.scaling, rows, K_SIDE, CALL.centered, K_CODEC
    )
    factor *= LOG2E
    # (Triton does not accept an early return of a different type, so this needs an else.)
    if CALL.latent:
        rope_part, v_factor, _ = _load_query(
            ptrs + K_SIDE.dim,
            tensors.v,
            factors.v_scaling,
            factors.scaling,
            rows,
            V_SIDE,
            False,
            V_CODEC,
        )
        # Otherwise Triton would choose their layout for the sums of the rotation, or hold the
        # operands in registers.
        rope_part = keep_layout(rope_part, V_CODEC)
        q = split_quarters(q)
        q = (
            keep_layout(q[0], K_CODEC),
            keep_layout(q[1], K_CODEC),
            keep_layout(q[2], K_CODEC),
            keep_layout(q[3], K_CODEC),
        )
        return q, factor, rope_part, v_factor * LOG2E
    else:
        return q, factor, center_logit * LOG2E


@triton.jit
def _load_query(
    ptrs,
    side,
    code_scaling,
    scaling,
    rows,
    SIDE: tl.constexpr,
    CENTERED: tl.constexpr,
    CODEC: tl.constexpr,
):
    """Return query rows as an operand, a factor for the logits, and the products with the center.

    Args:
        ptrs: Start of each row, `[ROWS]`.
        side: The side whose codes are multiplied. SIDE and CODEC belong to it.
        code_scaling, scaling: Factors of products with codes and with keys, see `Factors`.
    """
    DIM: tl.constexpr = SIDE.dim
    d = tl.arange(0, SIDE.width)
    in_head = rows.exists[:, None] & (d < DIM)[None, :]
    q = tl.load(ptrs[:, None] + d[None, :], mask=in_head, other=0.0).to(tl.float32)
    center_logit = tl.zeros([q.shape[0]], tl.float32)
    if CENTERED:
        center = tl.load(side.center + rows.h * DIM + d, mask=d < DIM, other=0.0)
        center_logit = tl.sum(q * center[None, :], 1) * scaling
    q = mix_channels(q, SIDE.rotation_size)
    if side.static_scale is not None:
        scale_ptr = side.static_scale + rows.h * DIM
        q *= tl.load(scale_ptr + d, mask=d < DIM, other=0.0)[None, :]
    # A power of two that scales the largest value of a row to between 2^13 and 2^14.
    exponent = (tl.max(tl.abs(q), 1).to(tl.int32, bitcast=True) >> 23) & 0xFF
    scale_bits = tl.minimum(tl.maximum(267 - exponent, 1), 253)
    scaled_q = q * (scale_bits << 23).to(tl.float32, bitcast=True)[:, None]
    factor = ((254 - scale_bits) << 23).to(tl.float32, bitcast=True) * code_scaling
    return scaled_q.to(CODEC.operand_dtype), factor, center_logit


@triton.jit
def _attend_tile(
    acc,
    m_i,
    l_i,
    query,
    j,
    page_offset,
    tensors,
    softcap,
    rows,
    view,
    CALL: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add tile `j` to acc, m_i and l_i. MASKED means that part of it is hidden from some row."""
    K_CODEC: tl.constexpr = CALL.k_codec
    V_CODEC: tl.constexpr = CALL.v_codec
    TILE: tl.constexpr = CALL.config.masked_tile if MASKED else CALL.config.tile
    position = j * TILE + tl.arange(0, TILE)
    k_codes, v_codes, word_ptrs = load_codes(
        tensors, j, position, page_offset, rows.h, view, CALL, TILE
    )
    k_scale, v_scale = None, None
    if CALL.k_dynamic or CALL.v_dynamic:
        k_scale, v_scale = load_scales(word_ptrs)
    if CALL.latent:
        # Other keys are masked after the product, because Triton 3.5 would spill with `visible`
        # alive.
        visible, seen = None, None
        if MASKED:
            visible, seen = find_visible(position, rows, view, CALL)
        k = (
            _decode_latents(k_codes[0], seen, K_CODEC),
            _decode_latents(k_codes[1], seen, K_CODEC),
            _decode_latents(k_codes[2], seen, K_CODEC),
            _decode_latents(k_codes[3], seen, K_CODEC),
        )
        rope_part = _decode_latents(v_codes, None, V_CODEC)
        # Products that depend on each other are laid out together: all groups of four warps would
        # compute the same logits. Only a block separates them, so its condition is always true.
        weights = tl.zeros([CALL.config.rows, TILE], K_CODEC.operand_dtype)
        alpha = m_i
        if j >= 0 if CALL.config.isolated else True:
            q, factor, q_rope, v_factor = query
            factors, rope_factors = factor[:, None], v_factor[:, None]
            if CALL.k_dynamic:
                factors *= per_column(k_scale, False)
            if CALL.v_dynamic:
                rope_factors *= per_column(v_scale, False)
            logits = multiply_latents(q, k, factors, CALL)
            logits += multiply_keys(q_rope, tl.trans(rope_part), CALL) * rope_factors
            logits = apply_softcap_and_bias(logits, softcap, view, position, CALL)
            if MASKED:
                logits = tl.where(visible, logits, float("-inf"))
            weights, alpha, m_i, l_i = weigh(logits, m_i, l_i, k_scale, seen, CALL.k_dynamic, False)
            weights = weights.to(K_CODEC.operand_dtype)
        acc = (
            add_values(acc[0], alpha, weights, k[0], CALL),
            add_values(acc[1], alpha, weights, k[1], CALL),
            add_values(acc[2], alpha, weights, k[2], CALL),
            add_values(acc[3], alpha, weights, k[3], CALL),
        )
    else:
        SWAPPED: tl.constexpr = CALL.config.swapped
        q, factor, center_logit = query
        logits = multiply_keys(q, decode_for_dot(k_codes, K_CODEC), CALL)
        if CALL.k_dynamic:
            logits *= per_column(k_scale, SWAPPED)
        logits = logits * per_row(factor, SWAPPED) + per_row(center_logit, SWAPPED)
        logits = apply_softcap_and_bias(logits, softcap, view, position, CALL)
        seen = None
        if MASKED:
            visible, seen = find_visible(position, rows, view, CALL)
            logits = tl.where(visible, logits, float("-inf"))
        weights, alpha, m_i, l_i = weigh(logits, m_i, l_i, v_scale, seen, CALL.v_dynamic, SWAPPED)
        if MASKED:
            v_codes = tl.where(tl.expand_dims(seen, 0), v_codes, tl.zeros_like(v_codes))
        v = decode_for_dot(v_codes, V_CODEC)
        acc = add_values(acc, alpha, weights, tl.trans(v), CALL)
    return acc, m_i, l_i


@triton.jit
def _decode_latents(codes, seen, CODEC: tl.constexpr):
    """Return codes as an operand of two products. Tokens that are not `seen` become zeros."""
    if seen is not None:
        codes = tl.where(tl.expand_dims(seen, 1), codes, tl.zeros_like(codes))
    if CODEC.method != AS_IS or seen is not None:
        return keep_layout(decode_for_dot(codes, CODEC), CODEC)
    else:
        return codes.to(CODEC.operand_dtype)


@triton.jit
def write_rows(out_ptr, acc, d, m_i, l_i, tensors, factors, rows, num_tokens, CALL: tl.constexpr):
    """Finish channels `d` of rows and write them to the output, `[B, T, Hq, out_dim]`."""
    SWAPPED: tl.constexpr = CALL.config.swapped
    scale = tensors.k.static_scale if CALL.latent else tensors.v.static_scale
    out = finish_rows(
        acc, m_i, l_i, tensors.sinks, scale, rows.h, rows.head, d, factors.out, CALL, SWAPPED
    )
    in_head = per_row(rows.exists, SWAPPED) & per_column(d < CALL.out.dim, SWAPPED)
    index = (rows.b * num_tokens + rows.t) * (CALL.num_heads * CALL.group_size) + rows.head
    row_offset = index.to(tl.int64) * CALL.out.dim
    out_ptrs = out_ptr + per_row(row_offset, SWAPPED) + per_column(d, SWAPPED)
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=in_head)


@triton.jit
def finish_rows(
    acc,
    m_i,
    l_i,
    sinks_ptr,
    static_scale_ptr,
    h,
    head,
    d,
    out_factor,
    CALL: tl.constexpr,
    SWAPPED: tl.constexpr,
):
    """Return channels `d` of output rows, shaped like `acc`: add sinks, divide, scale, rotate."""
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        m_new = tl.maximum(m_i, sink)
        m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m_i - m_finite)
        l_i = l_i * alpha + tl.exp2(sink - m_finite + HEADROOM)
        acc *= per_row(alpha, SWAPPED)
    # A row without visible tokens has the sum 0 and gives zeros.
    out = acc * per_row(out_factor / tl.where(l_i == 0, 1.0, l_i), SWAPPED)
    if static_scale_ptr is not None:
        scale_ptr = static_scale_ptr + h * CALL.out.dim
        scale = tl.load(scale_ptr + d, mask=d < CALL.out.dim, other=0.0)
        out *= per_column(scale, SWAPPED)
    return mix_channels(out, CALL.out.rotation_size, SWAPPED)
