"""The two products of latents, which are keys and values: a tile is decoded once, for both.

K holds the latents, V their positions: keys, too (`AttentionSpec.latent`). A decoded column of a
tile is [latent, positions], of which each part is filled up with zeros to whole vectors. Many query
heads share it, so most of the time goes to the products. They multiply vectors with single numbers
and add to WIDE sums at once, which stay in registers: nothing is summed over lanes, and what is
loaded takes part in several sums. Lanes are query rows in the product with keys, channels in that
with values.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from .arithmetic import mul, splat
from .lanes import (
    FLOAT_IR,
    FLOAT_VECTOR,
    I32,
    I64,
    INT,
    LANES,
    VECTOR,
    Call,
    Floats,
    call_intrinsic,
    has_feature,
    jit,
    operation,
    pointer_to,
    spread,
    types,
    vector_of,
)
from .memory import FP8, address_of, decode, load, load_as, load_codes, prefetch, store, width_of
from .products import Scratch
from .softmax import TILE

# Sums at once, vectors each: what the registers of AVX-512 hold, or narrower ones.
WIDE = 16 if has_feature("avx512f") else 4
PAIRS = WIDE // 2  # the numbers that two vectors are multiplied with
_SUMS = types.UniTuple(VECTOR, WIDE)
_STEP = 4 * LANES  # bytes of a vector
_LINE = 4 * TILE  # bytes of a row of logits
# Bytes between two vectors of a column: not a power of two, at which caches hold few lines.
JUMP = _STEP * (TILE + 1)
# Vectors of queries and columns that are multiplied at a time: they stay in the first cache.
CHUNK = 8


def _place(builder: Any, base: Any, stride: Any, i: int, kind: ir.Type) -> Any:
    """Return a pointer to number `i` of those that are `stride` bytes apart."""
    return pointer_to(builder, builder.add(base, builder.mul(stride, ir.Constant(I64, i))), kind)


def _read(builder: Any, base: Any, stride: Any, i: int, kind: ir.Type) -> Any:
    value = builder.load(_place(builder, base, stride, i, kind))
    value.align = 4
    return value


def _write(builder: Any, base: Any, stride: Any, i: int, value: Any) -> None:
    builder.store(value, _place(builder, base, stride, i, value.type)).align = 4


def _fma_rows(vectors: int) -> Callable[..., Any]:
    """Return the operation on WIDE sums that adds, to each, one of some vectors times an F32.

    Of `WIDE / vectors` numbers, `step` bytes apart, each is multiplied with every vector; those are
    `stride` bytes apart, and their sums side by side.
    """

    def emit(builder: Any, a: Any, stride: Any, number: Any, step: Any, sums: Any) -> Any:
        vector = [_read(builder, a, stride, j, FLOAT_VECTOR) for j in range(vectors)]
        for i in range(WIDE):
            if i % vectors == 0:
                x = _read(builder, number, step, i // vectors, FLOAT_IR)
                factor = spread(builder, x, FLOAT_IR)
            values = vector[i % vectors], factor, builder.extract_value(sums, i)
            new = call_intrinsic(builder, "llvm.fma.v16f32", FLOAT_VECTOR, *values)
            sums = builder.insert_value(sums, new, i)
        return sums

    return operation(_SUMS, INT, INT, INT, INT, _SUMS)(emit)


_fma_wide, _fma_pairs = _fma_rows(1), _fma_rows(2)


def _in_rows(vectors: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return what reads and writes WIDE sums: rows of some vectors, `stride` bytes apart."""

    def read(builder: Any, address: Any, stride: Any) -> Any:
        sums = ir.Constant(ir.ArrayType(FLOAT_VECTOR, WIDE), ir.Undefined)
        for i in range(WIDE):
            place = builder.add(address, ir.Constant(I64, _STEP * (i % vectors)))
            x = _read(builder, place, stride, i // vectors, FLOAT_VECTOR)
            sums = builder.insert_value(sums, x, i)
        return sums

    def write(builder: Any, address: Any, stride: Any, sums: Any) -> None:
        for i in range(WIDE):
            place = builder.add(address, ir.Constant(I64, _STEP * (i % vectors)))
            _write(builder, place, stride, i // vectors, builder.extract_value(sums, i))

    return operation(_SUMS, INT, INT)(read), operation(types.none, INT, INT, _SUMS)(write)


(_load_wide, _store_wide), (_load_pairs, _store_pairs) = _in_rows(1), _in_rows(2)


@operation(types.none, INT, INT, INT, INT)
def _transpose(builder: Any, source: Any, step: Any, target: Any, other: Any) -> None:
    """Write 16 rows of 16 F32 as columns: rows are `step` bytes apart, columns then `other`."""
    rows = [_read(builder, source, step, i, FLOAT_VECTOR) for i in range(LANES)]
    half = LANES // 2
    while half:
        # Blocks of `half` by `half` change places across the diagonal.
        upper = [x if not x & half else x - half + LANES for x in range(LANES)]
        lower = [x + half if not x & half else x + LANES for x in range(LANES)]
        for i in range(LANES):
            if not i & half:
                a, b = rows[i], rows[i + half]
                rows[i] = builder.shuffle_vector(a, b, ir.Constant(vector_of(I32), upper))
                rows[i + half] = builder.shuffle_vector(a, b, ir.Constant(vector_of(I32), lower))
        half //= 2
    for i in range(LANES):
        _write(builder, target, other, i, rows[i])


@jit
def count_vectors(dim: int) -> int:
    """Return the vectors that hold `dim` numbers."""
    return (dim + LANES - 1) // LANES


@jit
def turn_queries(rows: int, s: Scratch) -> None:
    """Write `s.q` to `s.turned`, as vectors of 16 rows."""
    width = s.q.shape[1]
    source, target = address_of(s.q), address_of(s.turned)
    for row in range(0, rows, LANES):
        for i in range(0, width, LANES):
            to = target + 4 * (row * width + i * LANES)
            _transpose(source + 4 * (row * width + i), 4 * width, to, _STEP)


@jit
def _decode_latents(c: Call, parts: Floats, head: int, s: Scratch) -> None:
    """Decode and scale the latents of a tile: vector i of column j is at `i * JUMP + j * _STEP`."""
    code = (c.k_shift, c.k_mask, c.k_nan_mask, c.k_nan_code)
    width, size = width_of(c.k_kind), c.k_dim * width_of(c.k_kind)
    whole = c.k_dim // LANES * LANES
    strip = address_of(s.strip)
    for part in parts:
        source = part[0] + c.k_codes + (head * c.slots + part[1]) * size
        for column in range(part[2], part[3]):
            scale = splat(s.k_scales[column])
            line = strip + _STEP * column
            if c.k_kind == FP8:
                for i in range(0, whole, LANES):
                    store(line, mul(load_codes(source + i, code), scale))
                    line += JUMP
            else:
                for i in range(0, whole, LANES):
                    store(line, load_as(source + width * i, c.k_kind, LANES))
                    line += JUMP
            if whole < c.k_dim:
                decode(source + width * whole, c.k_kind, code, c.k_dim - whole, line)
                store(line, mul(load(line), scale))
            source += size


@jit
def _decode_positions(c: Call, parts: Floats, head: int, s: Scratch) -> None:
    """Decode and scale the positions of a tile, 16 channels at a time, as more vectors of it."""
    code = (c.p_shift, c.p_mask, c.p_nan_mask, c.p_nan_code)
    width, count = width_of(c.p_kind), parts[-1, 3]
    strip = address_of(s.strip) + JUMP * count_vectors(c.k_dim)
    lines, scales = address_of(s.channels), address_of(s.v_scales)
    stride = 4 * s.channels.shape[1]
    for first in range(0, c.p_dim, LANES):
        # What is left in lines beyond the last channel is multiplied with zeros of the query.
        for i in range(min(LANES, c.p_dim - first)):
            line = lines + i * stride
            for part in parts:
                place = (head * c.p_dim + first + i) * c.slots + part[1]
                source = part[0] + c.p_codes + place * width
                size = part[3] - part[2]
                decode(source, c.p_kind, code, size, line + 4 * part[2])
            if c.p_token_scales:
                for j in range(0, count, LANES):
                    store(line + 4 * j, mul(load(line + 4 * j), load(scales + 4 * j)))
        for j in range(0, count, LANES):
            _transpose(lines + 4 * j, stride, strip + _STEP * j, _STEP)
        strip += JUMP


@jit
def _sum_wide(vectors: int, query: int, line: int, to: int) -> None:
    """Add the products of WIDE columns with 16 rows, `[columns, 16]`."""
    sums = _load_wide(to, _STEP)
    for _ in range(vectors):
        for i in range(0, _STEP, 4):
            sums = _fma_wide(query, 0, line + i, _STEP, sums)
            query += _STEP
        line += JUMP
    _store_wide(to, _STEP, sums)


@jit
def _sum_pairs(vectors: int, query: int, other: int, line: int, to: int) -> None:
    """Add those of PAIRS columns with 32 rows, `[columns, 32]`; `other` is where 16 more begin."""
    stride = other - query
    sums = _load_pairs(to, 2 * _STEP)
    for _ in range(vectors):
        for i in range(0, _STEP, 4):
            sums = _fma_pairs(query, stride, line + i, _STEP, sums)
            query += _STEP
        line += JUMP
    _store_pairs(to, 2 * _STEP, sums)


@jit
def multiply_latents(c: Call, parts: Floats, head: int, rows: int, s: Scratch) -> None:
    """Decode a tile, and multiply `rows` queries with its latents and positions."""
    _decode_latents(c, parts, head, s)
    _decode_positions(c, parts, head, s)
    vectors, count = s.q.shape[1] // LANES, parts[-1, 3]
    sums, row = address_of(s.columns), 0
    while row < rows:
        logits, width = address_of(s.logits) + _LINE * row, 2 if row + LANES < rows else 1
        s.columns[:] = 0
        for first in range(0, vectors, CHUNK):
            some = min(CHUNK, vectors - first)
            query = address_of(s.turned) + _STEP * (vectors * row + LANES * first)
            line, to = address_of(s.strip) + JUMP * first, sums
            if width == 2:
                for _ in range(0, count, PAIRS):
                    _sum_pairs(some, query, query + _STEP * LANES * vectors, line, to)
                    line, to = line + _STEP * PAIRS, to + 2 * _STEP * PAIRS
            else:
                for _ in range(0, count, WIDE):
                    _sum_wide(some, query, line, to)
                    line, to = line + _STEP * WIDE, to + _STEP * WIDE
        for column in range(0, count, LANES):
            for i in range(width):
                to = logits + LANES * _LINE * i + 4 * column
                _transpose(sums + _STEP * (width * column + i), width * _STEP, to, _LINE)
        row += width * LANES


@jit
def _add_pairs(weights: int, count: int, line: int, to: int, stride: int) -> None:
    """Add the products of PAIRS rows of weights with two vectors of each column."""
    sums = _load_pairs(to, stride)
    for column in range(count):
        place = line + _STEP * column
        sums = _fma_pairs(place, JUMP, weights + 4 * column, _LINE, sums)
    _store_pairs(to, stride, sums)


@jit
def add_latents(c: Call, count: int, all_seen: bool, rows: int, soon: int, s: Scratch) -> None:
    """Add weights times latents; what no query sees counts as zero even if its bytes are NaN.

    `soon` is where the next tile's latents begin, or 0.
    """
    weights, stride, vectors = address_of(s.logits), 4 * s.out.shape[1], count_vectors(c.k_dim)
    if not all_seen:
        for column in range(count):
            if s.seen[column] == 0:
                for i in range(vectors):
                    store(address_of(s.strip) + JUMP * i + _STEP * column, splat(np.float32(0)))
    for i in range(0, vectors, 2):
        line, to = address_of(s.strip) + JUMP * i, address_of(s.out) + _STEP * i
        if soon:
            for _ in range(0, 2 * LANES * TILE * width_of(c.k_kind), 64):
                prefetch(soon)
                soon += 64
        # Beyond an odd number of vectors, what follows is added to a vector that nothing reads.
        for row in range(0, rows, PAIRS):
            _add_pairs(weights + _LINE * row, count, line, to + stride * row, stride)
