"""Stored codes as numbers that a dot product takes: the device side of formats.py.

Where the hardware converts a format, a cast does it. Elsewhere the bits of a code are moved to
where float16 has them: the result then lacks a power of two, `factor` of `Codec`, which callers
multiply into a scale. Such a move loses the NaN of a format; `keep_nan` puts it back, at twice the
cost, and is only needed with static scales: a dynamic scale of a vector that holds NaN is NaN.
"""

import functools
from dataclasses import dataclass

import triton
import triton.language as tl

from ...formats import AUTO, FORMATS
from .target import Target

__all__ = ["Codec", "codec_for", "numbers"]

# How a code becomes a number (a constexpr of the kernels).
AS_IS = tl.constexpr(0)  # stored in 16 or 32 bits
E4M3 = tl.constexpr(1)  # by the hardware
E5M2 = tl.constexpr(2)
E4M3FNUZ = tl.constexpr(3)
MOVED = tl.constexpr(4)  # by moving bits
MOVED_PACKED = tl.constexpr(5)  # the same, four codes to a register

_CASTS = {"fp8_e4m3": E4M3, "fp8_e5m2": E5M2, "fp8_e4m3fnuz": E4M3FNUZ}


@dataclass(frozen=True)
class Codec:
    """How a kernel reads one format.

    Attributes:
        how: one of the constants above.
        shift: bits that the lower seven of a code move to the left.
        nan: -1: there is nothing to do for NaN; 0x7F: all seven lower bits set are NaN; 0x80: that
            one code is.
        factor: what a result must still be multiplied by.
        operand: the dtype that the dot product takes.
    """

    how: int
    shift: int
    nan: int
    factor: float
    operand: tl.dtype


@functools.cache
def codec_for(name: str, target: Target, stored: tl.dtype, exact: bool, keep_nan: bool) -> Codec:
    """Returns how `target` reads the format `name`.

    Args:
        name: a key of FORMATS, or "auto".
        stored: what "auto" is stored in.
        exact: whether the dot product is one of float32.
        keep_nan: whether the NaN of the format must be seen.
    """
    if name == AUTO:
        return Codec(AS_IS.value, 0, -1, 1.0, tl.float32 if exact else stored)
    # What the hardware converts to: float16 on NVIDIA, bfloat16 on AMD.
    cast = target.converts(name)
    operand = tl.bfloat16 if cast and not target.is_nvidia else tl.float16
    operand = tl.float32 if exact else operand
    fmt = FORMATS[name]
    if cast:
        return Codec(_CASTS[name].value, 0, -1, 1.0, operand)
    how = MOVED if target.interpreted or not target.is_nvidia else MOVED_PACKED
    nan = -1
    if keep_nan and fmt.inf_code is None:
        nan = 0x80 if fmt.unsigned_zero else 0x7F
    # float16: bias 15, 10 bits of mantissa.
    return Codec(how.value, 10 - fmt.mantissa_bits, nan, 2.0 ** (15 - fmt.bias), operand)


@triton.jit
def numbers(
    codes,
    HOW: tl.constexpr,
    SHIFT: tl.constexpr,
    NAN: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Codes of any shape as OPERAND; a MOVED one still lacks its codec's factor."""
    if HOW == AS_IS:
        return codes.to(OPERAND)
    elif HOW == E4M3:
        return codes.to(tl.float8e4nv, bitcast=True).to(OPERAND)
    elif HOW == E5M2:
        return codes.to(tl.float8e5, bitcast=True).to(OPERAND)
    elif HOW == E4M3FNUZ:
        return codes.to(tl.float8e4b8, bitcast=True).to(OPERAND)
    elif HOW == MOVED_PACKED:
        return _moved_packed(codes, SHIFT, NAN).to(OPERAND)
    else:
        return _moved(codes, SHIFT, NAN).to(OPERAND)


@triton.jit
def _moved(codes, SHIFT: tl.constexpr, NAN: tl.constexpr):
    wide = codes.to(tl.int16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << SHIFT)
    if NAN == 0x7F:
        half = tl.where((wide & 0x7F) == 0x7F, 0x7E00, half)
    elif NAN == 0x80:
        half = tl.where(wide == 0x80, 0x7E00, half)
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


def _assembly(shift: int, nan: int) -> str:
    body = _HALVES + (_MARK[nan] + _KEEP_WITH_NAN if nan >= 0 else _KEEP)
    mask = (0x8000 | 0x7F << shift) * 0x10001
    return "{ .reg .b32 low, high, a, b, m;" + body.format(shift=shift, mask=hex(mask)) + "}"


_E4M3_MOVED = tl.constexpr(_assembly(7, -1))
_E4M3_MOVED_NAN = tl.constexpr(_assembly(7, 0x7F))
_FNUZ_MOVED_NAN = tl.constexpr(_assembly(7, 0x80))
_E3M4_MOVED = tl.constexpr(_assembly(6, -1))
_E3M4_MOVED_NAN = tl.constexpr(_assembly(6, 0x80))


@triton.jit
def _moved_packed(codes, SHIFT: tl.constexpr, NAN: tl.constexpr):
    if SHIFT == 6:
        if NAN == 0x80:
            TEXT: tl.constexpr = _E3M4_MOVED_NAN
        else:
            TEXT: tl.constexpr = _E3M4_MOVED
    elif NAN == 0x7F:
        TEXT: tl.constexpr = _E4M3_MOVED_NAN
    elif NAN == 0x80:
        TEXT: tl.constexpr = _FNUZ_MOVED_NAN
    else:
        TEXT: tl.constexpr = _E4M3_MOVED
    return tl.inline_asm_elementwise(
        TEXT, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4
    )
