"""The two products of attention, of a tile of positions: queries with K, and weights with V."""

from typing import NamedTuple

import numpy as np

from .arithmetic import add_four, fma, fma_four, mul, splat, sum_four, sum_lanes
from .lanes import LANES, Call, Floats, jit
from .memory import (
    F32,
    FP8,
    Code,
    address_of,
    decode,
    load,
    load_as,
    load_codes,
    load_some_codes,
    prefetch,
    store,
    store_as,
    width_of,
)
from .softmax import TILE


class Scratch(NamedTuple):
    """What a thread works with: rows, their logits, and what it knows of one tile of positions."""

    q: Floats  # [rows, Dk to a whole vector], float32; of latents, positions follow
    logits: Floats  # [rows, TILE], float32; then weights
    offset: Floats  # [rows], float32, the logit of K's center
    alpha: Floats  # [rows], float32: what the older sums are still worth
    k_scales: Floats  # [2 * TILE], float32: a page may end inside a vector, which is stored whole
    v_scales: Floats  # the same
    seen: Floats  # [TILE], int64: whether some query sees the position
    parts: Floats  # [TILE, 4], int64: address of a page, slot, first column, one past the last
    lines: Floats  # [TILE / LANES], int64: where each vector of V's first row is
    strip: Floats  # [TILE or Dk, and a vector], float32: one decoded row of K or V; of latents all
    out: Floats  # [rows / 4, Dv, 4], float32 (or [1, Dv, 1]; of latents [rows, Dv and more, 1])
    turned: Floats  # [rows / 16, Dk, 16], float32, of latents, as what follows: `q`, transposed
    columns: Floats  # [TILE, 32], float32: logits of up to 32 rows
    channels: Floats  # [16, TILE and a vector], float32: decoded channels of positions


@jit
def _dot4(
    source: int, kind: int, code: Code, count: int, x: int, stride: int
) -> tuple[float, float, float, float]:
    """Products of `count` stored numbers, FP8 or F32, with four float32 rows, `stride` apart."""
    zero = splat(np.float32(0))
    sums = (zero, zero, zero, zero)
    whole = count // LANES * LANES
    if kind == FP8:
        for i in range(0, whole, LANES):
            sums = fma_four(load_codes(source + i, code), x + 4 * i, stride, sums)
        if whole < count:
            y = load_some_codes(source + whole, code, count - whole)
            sums = fma_four(y, x + 4 * whole, stride, sums)
    else:
        for i in range(0, count, LANES):
            sums = fma_four(load(source + 4 * i), x + 4 * i, stride, sums)
    products: tuple[float, float, float, float] = sum_four(sums)
    return products


@jit
def _dot1(source: int, kind: int, code: Code, count: int, x: int) -> float:
    """The product with one float32 row."""
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
    product: float = sum_lanes(a)
    return product


@jit
def multiply_keys(c: Call, parts: Floats, head: int, rows: int, s: Scratch) -> None:
    """Products of `rows` queries (1, or a multiple of 4) with the positions of the parts."""
    code = (c.k_shift, c.k_mask, c.k_nan_mask, c.k_nan_code)
    size = c.k_dim * width_of(c.k_kind)
    direct = c.k_kind == FP8 and rows <= 4
    kind = FP8 if direct else F32
    q, strip, out = address_of(s.q), address_of(s.strip), s.logits
    stride = 4 * s.q.shape[1]
    for part in parts:
        source = part[0] + c.k_codes + (head * c.slots + part[1]) * size
        v_size = c.v_dim * width_of(c.v_kind)
        soon = part[0] + c.v_codes + (head * c.slots + part[1]) * v_size
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
                    products = _dot4(place, kind, code, c.k_dim, q + row * stride, stride)
                    for i in range(4):
                        out[row + i, column] = products[i]
            source += size


@jit
def rescale(alpha: Floats, rows: int, out: Floats) -> None:
    """Multiply the rows of `out` by their alpha."""
    lanes = out.shape[2]
    pattern = np.empty(LANES, np.float32)
    for block in range(rows // lanes):
        changed = False
        for i in range(LANES):
            pattern[i] = alpha[block * lanes + i % lanes]
            changed |= pattern[i] != 1
        if changed:
            factor = load(address_of(pattern))
            place, size = address_of(out[block]), out[block].size
            for i in range(0, size, LANES):
                x = mul(load_as(place + 4 * i, F32, size - i), factor)
                store_as(place + 4 * i, F32, size - i, x)


@jit
def multiply_values(
    c: Call, parts: Floats, head: int, all_seen: bool, rows: int, soon: int, s: Scratch
) -> None:
    """Add weights times V; what no query sees counts as zero even if its bytes are NaN.

    `soon` is where the next tile's K begins, or 0: a page is too short for the CPU to guess that.
    """
    count = parts[-1, 3]
    if c.v_kind == FP8 and rows <= 4 and all_seen and _find_lines(c, parts, head, s.lines):
        _values_direct(c, count, rows, soon, s)
        return
    code = (c.v_shift, c.v_mask, c.v_nan_mask, c.v_nan_code)
    width = width_of(c.v_kind)
    weights, strip = address_of(s.logits), address_of(s.strip)
    stride = 4 * TILE
    for dim in range(c.v_dim):
        store(strip + 4 * ((count - 1) // LANES * LANES), splat(np.float32(0)))
        for part in parts:
            place = (head * c.v_dim + dim) * c.slots + part[1]
            source = part[0] + c.v_codes + place * width
            decode(source, c.v_kind, code, part[3] - part[2], strip + 4 * part[2])
        if not all_seen:
            for column in range(count):
                if s.seen[column] == 0:
                    s.strip[column] = 0
        if rows == 1:
            s.out[0, dim, 0] += _dot1(strip, F32, code, count, weights)
        else:
            for row in range(0, rows, 4):
                products = _dot4(strip, F32, code, count, weights + row * stride, stride)
                add_four(address_of(s.out[row // 4, dim]), products)


@jit
def _find_lines(c: Call, parts: Floats, head: int, lines: Floats) -> bool:
    """Return whether no vector of a tile crosses pages; `lines` then holds where each starts."""
    first = c.v_codes + head * c.v_dim * c.slots
    for part in parts:
        if part[2] % LANES or (part[3] % LANES and part[3] != parts[-1, 3]):
            return False
        for column in range(part[2], part[3], LANES):
            slot = part[1] + column - part[2]
            lines[column // LANES] = part[0] + first + slot
    return True


@jit
def _values_direct(c: Call, count: int, rows: int, soon: int, s: Scratch) -> None:
    """Add weights times V, of 8 bits and for at most four rows: without a decoded copy."""
    code = (c.v_shift, c.v_mask, c.v_nan_mask, c.v_nan_code)
    weights, stride, zero = address_of(s.logits), 4 * TILE, splat(np.float32(0))
    whole, tail = count // LANES, count % LANES
    last = weights + 4 * LANES * whole
    place, lines, out = 0, s.lines, address_of(s.out)
    for dim in range(c.v_dim):
        if soon:
            prefetch(soon + 64 * dim)
        if rows == 1:
            sum_ = zero
            for i in range(whole):
                y = load_codes(lines[i] + place, code)
                sum_ = fma(y, load(weights + 4 * LANES * i), sum_)
            if tail:
                sum_ = fma(load_some_codes(lines[whole] + place, code, tail), load(last), sum_)
            s.out[0, dim, 0] += sum_lanes(sum_)
        else:
            sums = (zero, zero, zero, zero)
            for i in range(whole):
                y = load_codes(lines[i] + place, code)
                sums = fma_four(y, weights + 4 * LANES * i, stride, sums)
            if tail:
                y = load_some_codes(lines[whole] + place, code, tail)
                sums = fma_four(y, last, stride, sums)
            add_four(out + 16 * dim, sum_four(sums))
        place += c.slots
