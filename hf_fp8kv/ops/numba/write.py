"""Storing tokens: the bytes that reference.py stores, so nothing here may be fused or reordered."""

from collections.abc import Callable
from typing import Any

import numpy as np

from .arithmetic import (
    add,
    div,
    floor,
    fma,
    max_bits,
    mul,
    octave,
    round_up,
    rounding_error,
    splat,
    sub,
    sum_integers,
)
from .lanes import LANES, STAMP, Call, jit, kernel
from .memory import (
    F32,
    FP8,
    address_of,
    encode,
    load,
    load_as,
    load_f32,
    load_i32,
    load_u8,
    next_unit,
    page_of,
    store,
    store_codes,
    store_u8,
    store_u16,
    width_of,
)
from .records import ENCODING, STORED, STRIDED, TABLE, Record
from .rotation import rotate_line

# Tokens of a unit of work.
BLOCK = 64

WRITE = Record(
    ("", "next units batch heads tokens min_scale:f8"),
    ("", TABLE),
    ("k_", STORED), ("k_in_", STRIDED), ("k_", ENCODING),
    ("v_", STORED), ("v_in_", STRIDED), ("v_", ENCODING),
)  # fmt: skip

_NAN = 0x7F800000  # the bits of numbers from here on are infinite or NaN
# A lane may add up the squares of so many numbers in float32 and stay exact: an error is at most
# 2^9, and 2^18 * _EXACT / LANES = 2^24.
_EXACT = 64 * LANES
_SEARCH = 3 * LANES  # float32 numbers that `_search` keeps before the line


@jit
def _dynamic_scale(magnitude: int, most: float, least: float) -> int:
    """Return the bits, bfloat16, of the dynamic scale for a largest |x| that has these bits."""
    if magnitude >= _NAN:
        return 0x7FC0
    scale = max(np.int32(magnitude).view(np.float32) / np.float32(most), np.float32(least))
    raw: Any = np.float32(scale).view(np.int32)
    upper: int = (raw + 0xFFFF) >> 16
    return upper


@jit
def _read_line(source: int, kind: int, dim: int, center: int, rotation: int, line: int) -> int:
    """Read a vector to `line`, as float32 padded with zeros; return the bits of its largest |x|."""
    for i in range(0, dim, LANES):
        x = load_as(source + width_of(kind) * i, kind, dim - i)
        if center:
            x = sub(x, load_as(center + 4 * i, F32, dim - i))
        store(line + 4 * i, x)
    if rotation:
        rotate_line(line, dim, rotation)
    magnitude = 0
    for i in range(0, dim, LANES):
        magnitude = max_bits(magnitude, load(line + 4 * i))
    return magnitude


@jit
def _search(
    line: int, dim: int, first: int, code: tuple[int, ...], error_unit: int, work: int
) -> int:
    """Return the bits, bfloat16, that `codec.search_scale` chooses from the dynamic scale `first`.

    A lane is a scale in what is computed once, and a number of the vector in the loops. Scales are
    at least 2^-100, and numbers times their reciprocal below 2^16: to take the unit of the errors
    into the reciprocal, a power of two, changes no bit.
    """
    drop, least_normal = code[0], code[2] + (error_unit << 23)
    unit = np.int32((127 + error_unit) << 23).view(np.float32)
    one, half = splat(np.float32(1)), splat(np.float32(0.5))
    start = splat(np.int32(first << 16).view(np.float32))
    scales = round_up(mul(start, octave()))
    relative = mul(scales, div(one, start))
    inverses, squares = work + 4 * LANES, work + 8 * LANES
    store(work, scales)
    store(inverses, div(splat(unit), scales))
    store(squares, mul(relative, relative))
    best, least = 0, np.float32(np.inf)
    for scale in range(LANES):
        inverse = splat(load_f32(inverses + 4 * scale))
        errors = 0
        for begin in range(0, dim, _EXACT):
            sum_ = splat(np.float32(0))
            for i in range(begin, min(begin + _EXACT, dim), LANES):
                error = rounding_error(mul(load(line + 4 * i), inverse), drop, least_normal)
                error = floor(add(error, half))
                sum_ = fma(error, error, sum_)
            errors += sum_integers(sum_)
        cost = np.float32(errors) * load_f32(squares + 4 * scale)
        if cost < least:
            best, least = scale, cost
    chosen: int = load_i32(work + 4 * best) >> 16
    return chosen


@jit
def _encode_token(
    source: int, source_kind: int, dim: int, center: int, rotation: int, scale: int, dynamic: int,
    search: bool, most: float, least: float, code: tuple[int, ...], error_unit: int, target: int,
    work: int,
) -> None:  # fmt: skip
    """Store the codes of one vector at `target`, and its dynamic scale, if any, at `dynamic`."""
    line = work + 4 * _SEARCH
    magnitude = _read_line(source, source_kind, dim, center, rotation, line)
    inverse = one = splat(np.float32(1))
    if not scale:
        chosen = _dynamic_scale(magnitude, most, least)
        if search and magnitude < _NAN:
            chosen = _search(line, dim, chosen, code, error_unit, work)
        store_u16(dynamic, chosen)
        inverse = div(one, splat(np.int32(chosen << 16).view(np.float32)))
    for i in range(0, dim, LANES):
        if scale:
            inverse = div(one, load_as(scale + 4 * i, F32, dim - i))
        store_codes(target + i, dim - i, encode(mul(load(line + 4 * i), inverse), code))


@jit
def _copy_bytes(
    source: int, step: int, target: int, target_step: int, count: int, width: int
) -> None:
    """Copy `count` numbers of `width` bytes."""
    for i in range(count):
        for byte in range(width):
            store_u8(target + i * target_step + byte, load_u8(source + i * step + byte))


@jit
def _write_k(
    c: Call, sequence: int, head: int, token: int, page: int, slot: int, work: int
) -> None:
    source = c.k_in_data + sequence * c.k_in_b + head * c.k_in_h + token * c.k_in_t
    place = head * c.slots + slot
    width = width_of(c.k_kind)
    target = page + c.k_codes + place * c.k_dim * width
    if c.k_kind != FP8:
        _copy_bytes(source, width, target, width, c.k_dim, width)
        return
    code = (
        c.k_drop, c.k_rebias, c.k_min_normal, c.k_step, c.k_max_code, c.k_nan_code, c.k_sign_zero,
        c.k_sign_nan,
    )  # fmt: skip
    center = c.k_center + 4 * (sequence * c.heads + head) * c.k_dim if c.k_center else 0
    scale = c.k_static_scale + 4 * head * c.k_dim if c.k_static_scale else 0
    _encode_token(
        source, c.k_in_dtype, c.k_dim, center, c.k_rotation, scale,
        page + c.k_token_scales + 4 * place, True, c.k_max, c.min_scale, code,
        c.k_unit, target, work,
    )  # fmt: skip


@jit
def _write_v(
    c: Call, sequence: int, head: int, token: int, page: int, slot: int, work: int, line: int
) -> None:
    source = c.v_in_data + sequence * c.v_in_b + head * c.v_in_h + token * c.v_in_t
    first = head * c.slots
    width = width_of(c.v_kind)
    target = page + c.v_codes + (first * c.v_dim + slot) * width
    if c.v_kind != FP8:
        _copy_bytes(source, width, target, c.slots * width, c.v_dim, width)
        return
    code = (
        c.v_drop, c.v_rebias, c.v_min_normal, c.v_step, c.v_max_code, c.v_nan_code, c.v_sign_zero,
        c.v_sign_nan,
    )  # fmt: skip
    scale = c.v_static_scale + 4 * head * c.v_dim if c.v_static_scale else 0
    _encode_token(
        source, c.v_in_dtype, c.v_dim, 0, c.v_rotation, scale,
        page + c.v_token_scales + 4 * (first + slot), False, c.v_max,
        c.min_scale, code, c.v_unit, line, work,
    )  # fmt: skip
    _copy_bytes(line, 1, target, c.slots, c.v_dim, 1)


def _make_kernels(stamp: int) -> tuple[Callable[[Any], bool], Callable[[Any], None]]:
    """Return the kernels; `stamp` is a part of what numba's cache knows them by."""

    @kernel
    def has_pages(calls: Any) -> bool:
        """Return whether every new token of `calls[0]` has a page."""
        c = calls[0]
        for sequence in range(c.batch):
            length = load_i32(c.lengths + 4 * sequence) - c.tokens
            first, last = length // c.slots, (length + c.tokens - 1) // c.slots
            if c.tokens and last >= c.table_columns:
                return False
            for column in range(first, last + 1 if c.tokens else first):
                if load_i32(c.table + sequence * c.table_b + 4 * column) < 0:
                    return False
        return stamp != 0

    @kernel
    def write(calls: Any) -> None:
        """Work off units of `calls[0]` until none is left; any number of threads at a time."""
        c = calls[0]
        line = np.empty(c.v_dim + LANES, np.uint8)
        work = np.empty(_SEARCH + max(c.k_dim, c.v_dim) + LANES, np.float32)
        blocks = (c.tokens + BLOCK - 1) // BLOCK
        while stamp:
            unit = next_unit(address_of(calls))
            if unit >= c.units:
                return
            block, unit = unit % blocks, unit // blocks
            head, sequence = unit % c.heads, unit // c.heads
            length = load_i32(c.lengths + 4 * sequence) - c.tokens
            for token in range(block * BLOCK, min((block + 1) * BLOCK, c.tokens)):
                page, slot = page_of(c, sequence, length + token), (length + token) % c.slots
                _write_k(c, sequence, head, token, page, slot, address_of(work))
                _write_v(c, sequence, head, token, page, slot, address_of(work), address_of(line))

    return has_pages, write


has_pages, write = _make_kernels(STAMP)
