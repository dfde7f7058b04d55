"""Attention over stored tokens; backend.py prepares its calls.

A call is one record, `ATTEND`: addresses, strides in bytes, sizes and constants. So the kernel has
one signature, is compiled once for all formats, dtypes and shapes, and costs little to call.
Threads share the record, and take units of work from its counter `next`: a unit is one sequence,
one key head, one block of query rows, and one split of the positions. `finish` adds the splits.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from .arithmetic import div, fma, mul, splat, sum_lanes
from .lanes import LANES, STAMP, Call, Floats, jit, kernel
from .latent import JUMP, add_latents, count_vectors, multiply_latents, turn_queries
from .memory import (
    F32,
    address_of,
    load,
    load_as,
    load_halves,
    load_i32,
    next_unit,
    page_of,
    store,
    store_as,
    width_of,
)
from .products import Scratch, multiply_keys, multiply_values, rescale
from .records import DECODING, STORED, STRIDED, TABLE, Record
from .rotation import rotate_line
from .softmax import (
    NOTHING,
    TILE,
    add_bias,
    adjust_logits,
    first_visible,
    hide_invisible,
    update_softmax,
)

# Rows (a query token of one query head) that share the decoded bytes.
BLOCK = 64

ATTEND = Record(
    ("", "next units batch q_heads heads tokens start stop"),
    ("", "causal window scaling:f8 softcap:f8"),
    ("", TABLE),
    ("k_", STORED), ("k_", DECODING), ("v_", STORED), ("v_", DECODING),
    ("", "latent"), ("p_", STORED), ("p_", DECODING),  # where K holds latents: their positions
    ("q_", STRIDED),
    ("", "sinks sinks_kind"),
    ("mask_", STRIDED), ("bias_", STRIDED), ("more_", STRIDED),
    ("", "bounds bounds_b"),
    ("", "splits blocks block_tokens work_rows out out_kind"),
)  # fmt: skip


@jit
def _load_queries(c: Call, sequence: int, head: int, token: int, rows: int, s: Scratch) -> None:
    """Load rows of `s.q`: the queries times `scaling` and all that K's codes lack.

    Row i is query token `token + i // G` of query head `head * G + i % G`. Of latents, the part of
    their positions follows, at the next whole vector.
    """
    groups = c.q_heads // c.heads
    width = width_of(c.q_dtype)
    for row in range(rows):
        source = c.q_data + sequence * c.q_b + (head * groups + row % groups) * c.q_h
        source += (token + row // groups) * c.q_t
        line, to = address_of(s.q[row]), head * c.k_dim
        center = c.k_center + 4 * (sequence * c.heads * c.k_dim + to) if c.k_center else 0
        scale = c.k_static_scale + 4 * to if c.k_static_scale else 0
        s.offset[row] = _load_query(
            c, source, c.k_dim, line, c.k_factor, center, c.k_rotation, scale
        )
        if c.latent:
            source, line = source + width * c.k_dim, line + 4 * count_vectors(c.k_dim) * LANES
            scale = c.p_static_scale + 4 * head * c.p_dim if c.p_static_scale else 0
            _load_query(c, source, c.p_dim, line, c.p_factor, 0, c.p_rotation, scale)


@jit
def _load_query(
    c: Call, source: int, dim: int, to: int, factor: float, center: int, rotation: int, scales: int
) -> float:
    """Load `dim` numbers of a query, and return their product with a center, if there is one."""
    width, scaling = width_of(c.q_dtype), splat(np.float32(c.scaling))
    factors = splat(np.float32(factor))
    sum_ = splat(np.float32(0))
    for i in range(0, dim, LANES):
        x = mul(load_as(source + width * i, c.q_dtype, dim - i), scaling)
        if center:
            sum_ = fma(x, load_as(center + 4 * i, F32, dim - i), sum_)
        store(to + 4 * i, mul(x, factors))
    if rotation:
        rotate_line(to, dim, rotation)
    if scales:
        for i in range(0, dim, LANES):
            store(to + 4 * i, mul(load(to + 4 * i), load_as(scales + 4 * i, F32, dim - i)))
    product: float = sum_lanes(sum_)
    return product


@jit
def _find_parts(c: Call, sequence: int, low: int, high: int, parts: Floats) -> int:
    """Split positions `low` to `high - 1` into pages; return how many."""
    pages, begin = 0, low
    while begin < high:
        slot = begin % c.slots
        end = min(begin + c.slots - slot, high)
        part = parts[pages]
        part[0] = page_of(c, sequence, begin)
        part[1], part[2], part[3] = slot, begin - low, end - low
        pages, begin = pages + 1, end
    return pages


@jit
def _load_scales(c: Call, scales: int, shift: int, parts: Floats, head: int, to: int) -> None:
    """Load the dynamic scales of the parts, float32, and zeros up to a whole vector.

    They are the lower halves (`shift` 16, K) or the upper ones (0, V) of the words that a page has
    from `scales` on.
    """
    count = parts[-1, 3]
    store(to + 4 * ((count - 1) // LANES * LANES), splat(np.float32(0)))
    for part in parts:
        source = part[0] + scales + 4 * (head * c.slots + part[1])
        begin, size = part[2], part[3] - part[2]
        for i in range(0, size, LANES):
            store(to + 4 * (begin + i), load_halves(source + 4 * i, shift, size - i))


@jit
def _attend_tile(
    c: Call, parts: Floats, sequence: int, head: int, token: int, rows: int, padded: int,
    low: int, high: int, length: int, s: Scratch, m_i: Floats, l_i: Floats,
) -> None:  # fmt: skip
    """Add positions `low` to `high - 1` to the sums of `rows` rows."""
    count = high - low
    k_scales, v_scales, logits = 0, 0, address_of(s.logits)
    if c.k_token_scales:
        k_scales = address_of(s.k_scales)
        _load_scales(c, c.k_token_scales, 16, parts, head, k_scales)
    if c.latent:
        if c.p_token_scales:
            scales = address_of(s.v_scales)
            _load_scales(c, c.p_token_scales - 2, 0, parts, head, scales)
        multiply_latents(c, parts, head, padded, s)
        k_scales = 0  # they are multiplied into what is decoded
    else:
        multiply_keys(c, parts, head, padded, s)
    if k_scales or c.k_center or c.softcap != 0:
        adjust_logits(c, rows, count, k_scales, s.offset, logits)
    if c.bias_data:
        place = c.bias_data + sequence * c.bias_b + (low - c.start) * width_of(c.bias_dtype)
        add_bias(c, place, c.bias_dtype, c.bias_h, c.bias_t, head, token, rows, count, logits)
    if c.more_data:
        place = c.more_data + sequence * c.more_b + (low - c.start) * width_of(c.more_dtype)
        add_bias(c, place, c.more_dtype, c.more_h, c.more_t, head, token, rows, count, logits)
    seen_columns = count
    query = length - c.tokens + token  # the position of the first row
    masked = c.mask_data != 0
    if c.bounds and low >= load_i32(c.bounds + sequence * c.bounds_b + 4):
        masked = False  # nothing is hidden from here on
    if masked or c.window or (c.causal and high > query + 1):
        seen_columns = hide_invisible(c, sequence, token, rows, low, count, query, s.seen, s.logits)
    if seen_columns == 0:
        return
    if c.v_token_scales and not c.latent:
        v_scales = address_of(s.v_scales)
        _load_scales(c, c.v_token_scales - 2, 0, parts, head, v_scales)
        if seen_columns < count:
            for column in range(count):
                if s.seen[column] == 0:
                    s.v_scales[column] = 0
    if update_softmax(rows, count, v_scales, logits, m_i, l_i, s.alpha):
        rescale(s.alpha, padded, s.out)
    soon = 0
    if high // c.slots < c.table_columns:
        place = head * c.slots + high % c.slots
        soon = page_of(c, sequence, high) + c.k_codes
        soon += place * c.k_dim * width_of(c.k_kind)
    if c.latent:
        add_latents(c, count, seen_columns == count, padded, soon, s)
    else:
        multiply_values(c, parts, head, seen_columns == count, padded, soon, s)


@jit
def _zeros(size: int) -> Floats:
    """Return so many F32, at the start of a line of a CPU's cache."""
    x = np.zeros(size + LANES, np.float32)
    skip = -address_of(x) % 64 // 4
    return x[skip : skip + size]


@jit
def _make_scratch(c: Call) -> Scratch:
    rows, lanes = c.work_rows, 1 if c.work_rows == 1 or c.latent else 4
    vectors, v_dim, turned = count_vectors(c.k_dim), c.v_dim, 0
    strip, channels = max(vectors * LANES, TILE) + LANES, 0
    if c.latent:
        # Latents are multiplied two vectors at a time, also the last of an odd number.
        pairs = (vectors + 1) // 2 * 2
        v_dim, vectors = (vectors + 1) * LANES, vectors + count_vectors(c.p_dim)
        strip, turned = max(vectors, pairs) * JUMP // 4, rows * vectors * LANES
        channels = LANES
    scales = np.ones(4 * TILE, np.float32)
    return Scratch(
        _zeros(rows * vectors * LANES).reshape(rows, vectors * LANES),
        _zeros(rows * TILE).reshape(rows, TILE),
        np.zeros(rows, np.float32),
        np.ones(rows, np.float32),
        scales[: 2 * TILE],
        scales[2 * TILE :],
        np.zeros(TILE, np.int64),
        np.zeros((TILE, 4), np.int64),
        np.zeros(TILE // LANES, np.int64),
        _zeros(strip),
        _zeros(rows * v_dim).reshape(rows // lanes, v_dim, lanes),
        _zeros(turned),
        _zeros(2 * LANES * TILE if c.latent else 0),
        np.zeros((channels, TILE + LANES), np.float32),
    )


@jit
def _finish_row(c: Call, sequence: int, head: int, row: int, work: Floats, numbers: Floats) -> None:
    """Write the result of one query token and head: its splits together, and the sink."""
    groups = c.q_heads // c.heads
    q_head = head * groups + row % groups
    token = row // groups
    block, place = token // c.block_tokens, row % (c.block_tokens * groups)
    begin = ((sequence * c.heads + head) * c.blocks + block) * c.splits
    rows, v_dim = c.work_rows, c.v_dim
    sink = NOTHING
    if c.sinks:
        sink = sum_lanes(load_as(c.sinks + width_of(c.sinks_kind) * q_head, c.sinks_kind, 1))
    m_i = sink
    for unit in range(begin, begin + c.splits):
        m_i = max(m_i, work[unit, place])
    l_i = np.exp(sink - m_i) if sink > NOTHING else np.float32(0)
    weights = np.empty(c.splits, np.float32)
    for split in range(c.splits):
        part = work[begin + split]
        # A split that saw nothing has a sum of zero, or NaN if all that it saw was NaN.
        weight = np.exp(part[place] - m_i) if part[place] > NOTHING else np.float32(1)
        weights[split] = weight
        l_i += part[rows + place] * weight
    inverse = splat(np.float32(c.v_factor))
    safe = splat(l_i if l_i != 0 else np.float32(1))
    width = width_of(c.out_kind)
    to = c.out + ((sequence * c.tokens + token) * c.q_heads + q_head) * v_dim * width
    line = address_of(numbers)
    for i in range(0, v_dim, LANES):
        x = splat(np.float32(0))
        for split in range(c.splits):
            part = address_of(work[begin + split, 2 * rows + place * v_dim + i :])
            x = fma(load_as(part, F32, v_dim - i), splat(weights[split]), x)
        x = mul(div(x, safe), inverse)
        if c.v_static_scale:
            x = mul(x, load_as(c.v_static_scale + 4 * (head * v_dim + i), F32, v_dim - i))
        store(line + 4 * i, x)
    if c.v_rotation:
        rotate_line(line, v_dim, c.v_rotation)
    for i in range(0, v_dim, LANES):
        store_as(to + width * i, c.out_kind, v_dim - i, load(line + 4 * i))


def _make_kernels(stamp: int) -> tuple[Callable[[Any, Any], None], Callable[[Any, Any], None]]:
    """Return the kernels; `stamp` is a part of what numba's cache knows them by."""

    @kernel
    def attend(calls: Any, work: Any) -> None:
        """Work off units of `calls[0]` until none is left; any number of threads at a time.

        `work` is `[units, 2 * rows + rows * Dv]`, float32: maxima, sums, weighted sums of V.
        """
        c = calls[0]
        s = _make_scratch(c)
        size, lanes = c.work_rows, s.out.shape[2]
        while stamp:
            unit = next_unit(address_of(calls))
            if unit >= c.units:
                return
            part = work[unit]
            m_i, l_i = part[:size], part[size : 2 * size]
            split, unit = unit % c.splits, unit // c.splits
            block, unit = unit % c.blocks, unit // c.blocks
            head, sequence = unit % c.heads, unit // c.heads
            token = block * c.block_tokens
            tokens = min(c.block_tokens, c.tokens - token)
            rows = tokens * (c.q_heads // c.heads)
            padded = rows if size == 1 else (rows + 3) // 4 * 4
            m_i[:], l_i[:] = NOTHING, 0

            length = load_i32(c.lengths + 4 * sequence)
            low, high = c.start, min(c.stop, length, c.slots * c.table_columns)
            if c.causal:
                high = min(high, length - c.tokens + token + tokens)
            if c.bounds:
                low = max(low, load_i32(c.bounds + sequence * c.bounds_b))
            if c.window:
                low = max(low, first_visible(length - c.tokens + token, c.window))
            # A row that sees nothing may begin past its end.
            tile, last = low // TILE, (high + TILE - 1) // TILE if low < high else 0
            tiles = last - tile
            tile, last = tile + tiles * split // c.splits, tile + tiles * (split + 1) // c.splits
            s.q[:], s.out[:] = 0, 0
            if tile < last:
                _load_queries(c, sequence, head, token, rows, s)
                if c.latent:
                    turn_queries(rows, s)
            while tile < last:
                begin, end = max(tile * TILE, low), min((tile + 1) * TILE, high)
                parts = s.parts[: _find_parts(c, sequence, begin, end, s.parts)]
                _attend_tile(
                    c, parts, sequence, head, token, rows, padded, begin, end, length, s, m_i, l_i
                )
                tile += 1
            to = 2 * size
            for row in range(rows):
                for dim in range(c.v_dim):
                    part[to] = s.out[row // lanes, dim, row % lanes]
                    to += 1

    @kernel
    def finish(calls: Any, work: Any) -> None:
        """Write the result of `calls[0]`, after all units are done."""
        c = calls[0]
        numbers = np.empty(c.v_dim + LANES, np.float32)
        if stamp:
            for sequence in range(c.batch):
                for head in range(c.heads):
                    for row in range(c.tokens * (c.q_heads // c.heads)):
                        _finish_row(c, sequence, head, row, work, numbers)

    return attend, finish


attend, finish = _make_kernels(STAMP)
