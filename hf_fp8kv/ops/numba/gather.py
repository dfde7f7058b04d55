"""Reading tokens back: the numbers that reference.py gives, so nothing here may be fused."""

from collections.abc import Callable
from typing import Any

import numpy as np

from .arithmetic import add, mul, splat
from .lanes import LANES, STAMP, Call, Floats, jit, kernel
from .memory import (
    F32,
    FP8,
    address_of,
    decode,
    load,
    load_as,
    load_i32,
    load_u8,
    next_unit,
    page_of,
    store,
    store_as,
    width_of,
)
from .records import DECODING, STORED, TABLE, Record
from .rotation import rotate_line

# Tokens of a unit of work.
BLOCK = 64

GATHER = Record(
    ("", "next units batch heads first_head start stop ragged transposed"),
    ("", TABLE), ("", STORED), ("", DECODING),
    ("", "out out_kind"),
)  # fmt: skip


@jit
def _scale_line(c: Call, line: int, scale: int, dynamic: Floats, center: int) -> None:
    """Multiply a line by its scale, rotate it, and add the center, as reference.py does."""
    factor = splat(np.float32(c.factor))
    for i in range(0, c.dim, LANES):
        x = load(line + 4 * i)
        if c.kind == FP8:
            x = mul(x, factor)
        if scale:
            x = mul(x, load_as(scale + 4 * i, F32, c.dim - i))
        if c.token_scales:
            x = mul(x, dynamic)
        store(line + 4 * i, x)
    if c.rotation:
        rotate_line(line, c.dim, c.rotation)
    if center:
        for i in range(0, c.dim, LANES):
            x = load(line + 4 * i)
            store(line + 4 * i, add(x, load_as(center + 4 * i, F32, c.dim - i)))


@jit
def _gather_block(
    c: Call, sequence: int, head: int, begin: int, end: int, line: Floats, square: Floats
) -> None:
    """Gather positions `begin` to `end - 1`, all in one page, of one head."""
    code = (c.shift, c.mask, c.nan_mask, c.nan_code)
    width, out_width = width_of(c.kind), width_of(c.out_kind)
    slot, count = begin % c.slots, end - begin
    length = load_i32(c.lengths + 4 * sequence)
    page, stored_head = page_of(c, sequence, begin), head + c.first_head
    first = stored_head * c.slots
    codes, scales = page + c.codes, page + c.token_scales
    scale = c.static_scale + 4 * stored_head * c.dim if c.static_scale else 0
    center = c.center + 4 * (sequence * c.heads + head) * c.dim if c.center else 0
    line_at, columns = address_of(line), square.shape[1]
    if c.transposed:
        for dim in range(c.dim):
            source = codes + (first * c.dim + dim * c.slots + slot) * width
            decode(source, c.kind, code, count, address_of(square[dim]))
    for token in range(count):
        row = (sequence * c.heads + head) * (c.stop - c.start) + begin - c.start + token
        target = c.out + row * c.dim * out_width
        if c.transposed:
            flat = square.reshape(-1)
            for dim in range(c.dim):
                line[dim] = flat[dim * columns + token]
        else:
            decode(codes + (first + slot + token) * c.dim * width, c.kind, code, c.dim, line_at)
        dynamic = splat(np.float32(1))
        if c.token_scales:
            raw = load_u8(scales + 4 * (first + slot + token))
            raw |= load_u8(scales + 4 * (first + slot + token) + 1) << 8
            dynamic = splat(np.int32(raw << 16).view(np.float32))
        if c.ragged and begin + token >= length:
            line[:] = 0
        else:
            _scale_line(c, line_at, scale, dynamic, center)
        for i in range(0, c.dim, LANES):
            store_as(target + out_width * i, c.out_kind, c.dim - i, load(line_at + 4 * i))


def _make_kernel(stamp: int) -> Callable[[Any], None]:
    """Return the kernel; `stamp` is a part of what numba's cache knows it by."""

    @kernel
    def gather(calls: Any) -> None:
        """Work off units of `calls[0]` until none is left; any number of threads at a time."""
        c = calls[0]
        line = np.zeros(c.dim + LANES, np.float32)
        square = np.zeros((c.dim if c.transposed else 1, BLOCK + LANES), np.float32)
        blocks = (c.stop - c.start + BLOCK - 1) // BLOCK
        while stamp:
            unit = next_unit(address_of(calls))
            if unit >= c.units:
                return
            block, unit = unit % blocks, unit // blocks
            begin = c.start + block * BLOCK
            stop = min(begin + BLOCK, c.stop)
            while begin < stop:
                end = min((begin // c.slots + 1) * c.slots, stop)
                _gather_block(c, unit // c.heads, unit % c.heads, begin, end, line, square)
                begin = end

    return gather


gather = _make_kernel(STAMP)
