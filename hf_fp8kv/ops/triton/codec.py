"""Stored codes as numbers that a dot product takes, or a dense copy: the device side of formats.py.

Where the hardware converts a format, a cast does it. Elsewhere the bits of a code are moved to
where float16 has them: the result then lacks a power of two, `factor` of `Codec`, which callers
multiply into a scale. Such a move loses the NaN of a format; `keep_nan` puts it back, at twice the
cost, and is only needed with static scales: a dynamic scale of a vector that holds NaN is NaN.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ...formats import AUTO, FORMATS
from .target import Target

# How a code becomes a number (`Codec.how`).
AS_IS = tl.constexpr(0)  # stored in 16 or 32 bits
CAST = tl.constexpr(1)  # by the hardware
MOVED = tl.constexpr(2)  # by moving bits

# Triton's types of the formats that hardware knows.
_CASTS = {
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
    torch.float8_e4m3fnuz: tl.float8e4b8,
}


# Compared by identity, since a launch looks its kernel up by its constants: `codec_for` makes one
# for each set of arguments.
@dataclass(frozen=True, eq=False)
class Codec:
    """How a kernel reads one format (a constexpr of the kernels).

    Attributes:
        how: one of the constants above.
        operand: the dtype that the dot product takes.
        factor: what a result must still be multiplied by.
        cast: the dtype that codes are, if `how` is CAST.
        shift: bits that the lower seven of a code move to the left, if they are moved.
        nan: -1: there is nothing to do for NaN; 0x7F: all seven lower bits set are NaN; 0x80: that
            one code is.
        assembly: what moves the four codes of a register, if `how` is MOVED; "": there is none.
        keep: constraints of assembly that keeps 32 bits where they are; "": there is none.
    """

    how: int
    operand: tl.dtype
    factor: float = 1.0
    cast: tl.dtype | None = None
    shift: int = 0
    nan: int = -1
    assembly: str = ""
    keep: str = ""


@functools.cache
def codec_for(name: str, target: Target, stored: tl.dtype, exact: bool, keep_nan: bool) -> Codec:
    """Return how `target` reads the format `name`; "auto" is held in `stored`.

    `exact`: the dot product is one of float32. `keep_nan`: the NaN of the format must be seen.
    """
    if name == AUTO:
        return Codec(AS_IS.value, tl.float32 if exact else stored)
    fmt = FORMATS[name]
    is_cast = target.converts(fmt)
    # What the hardware converts to: float16 on NVIDIA, bfloat16 on AMD.
    operand = tl.bfloat16 if is_cast and not target.is_nvidia else tl.float16
    operand = tl.float32 if exact else operand
    keep = "=r,0" if target.is_nvidia and not (exact or target.interpreted) else ""
    if is_cast:
        assert fmt.torch_dtype is not None
        return Codec(CAST.value, operand, cast=_CASTS[fmt.torch_dtype], keep=keep)
    # float16: bias 15, 10 bits of mantissa.
    shift, factor = 10 - fmt.mantissa_bits, 2.0 ** (15 - fmt.bias)
    # Moved, numbers must be finite, and infinity (and with it NaN) that of float16.
    assert fmt.max_code << shift < 0x7C00, f"{name}: float16 does not hold its largest code, moved"
    assert fmt.inf_code is None or fmt.inf_code << shift == 0x7C00, f"{name}: unknown infinity"
    nan = -1
    if keep_nan and fmt.inf_code is None:
        nan = 0x80 if fmt.unsigned_zero else 0x7F
    assembly = packed_move(shift, nan) if target.is_nvidia and not target.interpreted else ""
    return Codec(MOVED.value, operand, factor, shift=shift, nan=nan, assembly=assembly, keep=keep)


@functools.cache
def widened(codec: Codec) -> Codec:
    """Return how to read codes that `decode_for_dot` has already converted."""
    return Codec(AS_IS.value, codec.operand, codec.factor)


@triton.jit
def decode_for_dot(codes, CODEC: tl.constexpr):
    """Return codes of any shape as CODEC.operand; moved ones still lack CODEC.factor."""
    if CODEC.how == AS_IS:
        return codes.to(CODEC.operand)
    elif CODEC.how == CAST:
        return codes.to(CODEC.cast, bitcast=True).to(CODEC.operand)
    elif CODEC.assembly != "":
        return tl.inline_asm_elementwise(
            CODEC.assembly, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4
        ).to(CODEC.operand)
    else:
        tl.static_assert(CODEC.how == MOVED, "unknown way to read a format")
        return _move(codes, CODEC).to(CODEC.operand)


@triton.jit
def keep(x, CODEC: tl.constexpr):
    """Return `x`, of CODEC.operand, held by the threads that computed it until it is multiplied.

    Triton would move what it was computed of, once for each product, and compute it where that
    wants it. It moves nothing past assembly that may have effects.
    """
    if CODEC.keep != "":
        x = tl.inline_asm_elementwise(
            "", CODEC.keep, [x], dtype=CODEC.operand, is_pure=False, pack=2
        )
    return x


@triton.jit
def _move(codes, CODEC: tl.constexpr):
    wide = codes.to(tl.int16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << CODEC.shift)
    if CODEC.nan == 0x7F:
        half = tl.where((wide & 0x7F) == 0x7F, 0x7E00, half)
    elif CODEC.nan == 0x80:
        half = tl.where(wide == 0x80, 0x7E00, half)
    else:
        tl.static_assert(CODEC.nan == -1, "unknown NaN of a format")
    return half.to(tl.float16, bitcast=True)


# `prmt` gives 16 bits to each byte and repeats its sign above it: after the shift the sign is where
# float16 has it, and a mask clears what lies between it and the rest. With NAN: a byte of `m` has
# its top bit set where the code is NaN; repeated, it is 0xFF00, which is NaN with any lower bits.
# `lop3` with 0xEA is (a & b) | c.
_HALVES = """
    prmt.b32 low, $2, 0, 0x9180;
    prmt.b32 high, $2, 0, 0xB3A2;
    shl.b32 low, low, {shift};
    shl.b32 high, high, {shift};
"""
_KEEP = """
    and.b32 $0, low, {mask};
    and.b32 $1, high, {mask};
"""
_MARK = {
    # The lower seven bits are all set.
    0x7F: "and.b32 m, $2, 0x7F7F7F7F; add.u32 m, m, 0x01010101;",
    # The lower seven bits are zero and the top one is set.
    0x80: """and.b32 m, $2, 0x7F7F7F7F; add.u32 m, m, 0x7F7F7F7F; not.b32 m, m;
    and.b32 m, m, $2;""",
}
_KEEP_WITH_NAN = """
    prmt.b32 a, m, 0, 0x9484;
    prmt.b32 b, m, 0, 0xB4A4;
    lop3.b32 $0, low, {mask}, a, 0xEA;
    lop3.b32 $1, high, {mask}, b, 0xEA;
"""


def packed_move(shift: int, nan: int) -> str:
    """Return PTX that moves the four codes in $2 to float16 in $0 and $1; see `Codec`."""
    body = _HALVES + (_MARK[nan] + _KEEP_WITH_NAN if nan >= 0 else _KEEP)
    mask = (0x8000 | 0x7F << shift) * 0x10001
    return "{ .reg .b32 low, high, a, b, m;" + body.format(shift=shift, mask=hex(mask)) + "}"
