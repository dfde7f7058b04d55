"""Decoding of stored codes on the device, for a dot product or a dense copy.

If the hardware converts a format, a cast decodes it. Otherwise the bits of a code are shifted to
their positions in float16. The result then lacks a power of two, `Codec.factor`, which callers
multiply into a scale. Codes of fewer than 8 bits are unpacked to four quarters of a vector first.
The shift loses the NaN of a format. `keeps_nan` restores it at twice the
cost. This is only needed with static scales, because the dynamic scale of a vector with NaN is NaN.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ...formats import AUTO, FORMATS
from .target import Target

# Methods of decoding (`Codec.method`).
AS_IS = tl.constexpr(0)  # not at all, because values are stored in 16 or 32 bits
CAST = tl.constexpr(1)  # by an instruction of the hardware
SHIFTED = tl.constexpr(2)  # by shifting bits

# Triton's types for formats that hardware converts.
_CAST_TYPES = {
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
    torch.float8_e4m3fnuz: tl.float8e4b8,
}


# Compared by identity, because each launch looks up its kernel by its constants. `choose_codec`
# creates a single object for each set of arguments.
@dataclass(frozen=True, eq=False)
class Codec:
    """The decoding of one format in kernels, of which it is a constexpr.

    Attributes:
        method: Method of decoding: AS_IS, CAST or SHIFTED.
        operand_dtype: Dtype of the dot product's operand.
        factor: Factor that decoded values lack.
        code_dtype: Dtype of the codes if `method` is CAST.
        shift: Number of bits by which the lower seven bits are shifted left if `method` is SHIFTED.
        nan_code: Code of NaN that must be restored: 0x7F if all seven lower bits set mean NaN, or
            0x80. -1 means that NaN is not restored.
        assembly: PTX that shifts the four codes of a register if `method` is SHIFTED, or "".
        constraint: Constraints of inline assembly that keeps 32 bits in their register, or "".
        bits: Number of bits of a stored code.
        unpacking: PTX that unpacks four bytes of each part (`load_quarters`), or "".
    """

    method: int
    operand_dtype: tl.dtype
    factor: float = 1.0
    code_dtype: tl.dtype | None = None
    shift: int = 0
    nan_code: int = -1
    assembly: str = ""
    constraint: str = ""
    bits: int = 8
    unpacking: str = ""


@functools.cache
def choose_codec(
    name: str, target: Target, auto_dtype: tl.dtype, is_float32: bool, keeps_nan: bool
) -> Codec:
    """Return the codec with which kernels for `target` decode the format `name`.

    `auto_dtype` is the dtype of values in "auto". With `is_float32` the operands of the dot product
    are float32. With `keeps_nan` the NaN of the format survives decoding.
    """
    has_assembly = target.is_nvidia and not target.interpreted
    register = "r" if target.is_nvidia else "v"
    constraint = "" if target.interpreted or is_float32 else f"={register},0"
    if name == AUTO:
        return Codec(AS_IS.value, tl.float32 if is_float32 else auto_dtype, constraint=constraint)
    fmt = FORMATS[name]
    is_cast = target.converts(fmt)
    # The hardware converts to float16 on NVIDIA, and to bfloat16 on AMD.
    operand_dtype = tl.bfloat16 if is_cast and not target.is_nvidia else tl.float16
    operand_dtype = tl.float32 if is_float32 else operand_dtype
    if is_cast:
        assert fmt.torch_dtype is not None
        return Codec(
            CAST.value, operand_dtype, 1.0, _CAST_TYPES[fmt.torch_dtype], constraint=constraint
        )
    # float16 has a bias of 15 and 10 bits of mantissa.
    shift = 10 - fmt.mantissa_bits - (8 - fmt.bits)
    # Shifted codes of finite values must be finite in float16, and infinity (thus also NaN) must be
    # float16's.
    assert fmt.max_code << shift < 0x7C00, f"{name}: the largest shifted code overflows float16"
    assert fmt.inf_code is None or fmt.inf_code << shift == 0x7C00, f"{name}: unknown infinity"
    nan_code = -1
    if keeps_nan and fmt.inf_code is None:
        nan_code = 0x80 if fmt.has_unsigned_zero else 0x7F
    assembly = make_shift_ptx(shift, nan_code) if has_assembly else ""
    unpacking = _UNPACKING[fmt.bits] if has_assembly and fmt.bits < 8 else ""
    return Codec(
        SHIFTED.value,
        operand_dtype,
        factor=2.0 ** (15 - fmt.bias),
        shift=shift,
        nan_code=nan_code,
        assembly=assembly,
        constraint=constraint,
        bits=fmt.bits,
        unpacking=unpacking,
    )


# Each shift moves the bits of a quarter to their place. `lop3` with 0xEA is (a & b) | c.
_UNPACK_UPPER = "shl.b32 a, {first}, 4; shl.b32 b, {second}, 4;"
_UNPACKING = {
    4: "{ .reg .b32 a, b, c, d;"
    + _UNPACK_UPPER.format(first="$4", second="$5")
    + """
    and.b32 c, $4, 0xF0F0F0F0;
    and.b32 d, $5, 0xF0F0F0F0;
    and.b32 $0, a, 0xF0F0F0F0;
    and.b32 $1, b, 0xF0F0F0F0;
    mov.b32 $2, c;
    mov.b32 $3, d; }""",
    6: "{ .reg .b32 a, b, c, d, p, q, r, s;"
    + _UNPACK_UPPER.format(first="$4", second="$5")
    + """
    shl.b32 p, $6, 2;
    shr.b32 r, $6, 2;
    shr.b32 s, $6, 4;
    and.b32 p, p, 0x0C0C0C0C;
    and.b32 q, $6, 0x0C0C0C0C;
    and.b32 r, r, 0x0C0C0C0C;
    and.b32 s, s, 0x0C0C0C0C;
    lop3.b32 c, $4, 0xF0F0F0F0, r, 0xEA;
    lop3.b32 d, $5, 0xF0F0F0F0, s, 0xEA;
    lop3.b32 $0, a, 0xF0F0F0F0, p, 0xEA;
    lop3.b32 $1, b, 0xF0F0F0F0, q, 0xEA;
    mov.b32 $2, c;
    mov.b32 $3, d; }""",
}


@functools.cache
def make_decoded_codec(codec: Codec) -> Codec:
    """Return the codec of values that `decode_for_dot` has already converted."""
    return Codec(AS_IS.value, codec.operand_dtype, codec.factor, constraint=codec.constraint)


@triton.jit
def decode_for_dot(codes, CODEC: tl.constexpr):
    """Convert codes of any shape to CODEC.operand_dtype. Shifted codes still lack CODEC.factor.

    Values that `load_quarters` decoded are returned as they are.
    """
    if CODEC.method == AS_IS or codes.dtype == tl.float16:
        return codes.to(CODEC.operand_dtype)
    elif CODEC.method == CAST:
        return codes.to(CODEC.code_dtype, bitcast=True).to(CODEC.operand_dtype)
    else:
        tl.static_assert(CODEC.method == SHIFTED, "unknown way to read a format")
        return shift_codes(codes, CODEC).to(CODEC.operand_dtype)


@triton.jit
def unpack(first, second, low, CODEC: tl.constexpr):
    """Return the codes of the four quarters of vectors, from the parts that `pack_codes` stored.

    `first` and `second` are the halves of the plane of upper bits, and `low` is the plane of lower
    bits, or None for codes of four bits.
    """
    if CODEC.unpacking != "":
        dtypes: tl.constexpr = (tl.uint8, tl.uint8, tl.uint8, tl.uint8)
        if low is None:
            return tl.inline_asm_elementwise(
                CODEC.unpacking, "=r,=r,=r,=r,r,r", [first, second], dtypes, is_pure=True, pack=4
            )
        else:
            return tl.inline_asm_elementwise(
                CODEC.unpacking, "=r,=r,=r,=r,r,r,r", [first, second, low], dtypes, is_pure=True,
                pack=4,
            )  # fmt: skip
    a = first << 4
    b = second << 4
    c = first & 0xF0
    d = second & 0xF0
    if low is not None:
        a |= (low & 3) << 2
        b |= low & 0x0C
        c |= (low >> 2) & 0x0C
        d |= (low >> 4) & 0x0C
    return a, b, c, d


@triton.jit
def pack(codes):
    """Return the parts of `unpack` of codes `[N, W]`. Codes of four bits have no `low`."""
    a, b, c, d = split_quarters(codes)
    low = ((a >> 2) & 3) | (b & 0x0C) | ((c & 0x0C) << 2) | ((d & 0x0C) << 4)
    return (c & 0xF0) | (a >> 4), (d & 0xF0) | (b >> 4), low


@triton.jit
def split_quarters(x):
    """Return the quarters of vectors `[N, W]`."""
    N: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[1]
    even, odd = tl.split(tl.permute(tl.reshape(x, [N, 2, 2, W // 4]), [0, 1, 3, 2]))
    a, c = tl.split(tl.permute(even, [0, 2, 1]))
    b, d = tl.split(tl.permute(odd, [0, 2, 1]))
    return a, b, c, d


@triton.jit
def join_quarters(a, b, c, d, TRANSPOSED: tl.constexpr):
    """Join quarters `[N, W]` to vectors `[N, 4 W]`, or `[W, N]` to `[4 W, N]` if TRANSPOSED."""
    ROWS: tl.constexpr = a.shape[0]
    COLUMNS: tl.constexpr = a.shape[1]
    quarters = tl.join(tl.join(a, c), tl.join(b, d))  # the last axes select a half and a quarter
    if TRANSPOSED:
        return tl.reshape(tl.permute(quarters, [2, 3, 0, 1]), [4 * ROWS, COLUMNS])
    else:
        return tl.reshape(tl.permute(quarters, [0, 2, 3, 1]), [ROWS, 4 * COLUMNS])


@triton.jit
def keep_layout(x, CODEC: tl.constexpr):
    """Return `x`, of CODEC.operand_dtype, in the layout in which it was computed.

    Without this, Triton would convert the layout of the operation's inputs, and decode again for
    each product. It does not move code past inline assembly that may have side effects.
    """
    if CODEC.constraint != "":
        x = tl.inline_asm_elementwise(
            "", CODEC.constraint, [x], dtype=CODEC.operand_dtype, is_pure=False, pack=2
        )
    return x


@triton.jit
def shift_codes(codes, CODEC: tl.constexpr):
    """Convert codes of any shape to float16, which lacks CODEC.factor."""
    if CODEC.assembly != "":
        return tl.inline_asm_elementwise(
            CODEC.assembly, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4
        )
    code = codes.to(tl.int16)
    half_bits = ((code & 0x80) << 8) | ((code & 0x7F) << CODEC.shift)
    if CODEC.nan_code == 0x7F:
        half_bits = tl.where((code & 0x7F) == 0x7F, 0x7E00, half_bits)
    elif CODEC.nan_code == 0x80:
        half_bits = tl.where(code == 0x80, 0x7E00, half_bits)
    else:
        tl.static_assert(CODEC.nan_code == -1, "unknown NaN of a format")
    return half_bits.to(tl.float16, bitcast=True)


# `prmt` widens each byte to 16 bits and repeats its sign bit in the upper byte. After the shift,
# the sign is at float16's position, and a mask clears the bits between it and the rest. With NaN, a
# byte of `m` has its top bit set if the code is NaN. Repeating that bit gives 0xFF00, which is NaN
# with any lower bits. `lop3` with 0xEA is (a & b) | c.
_SHIFT_HALVES = """
    prmt.b32 low, $2, 0, 0x9180;
    prmt.b32 high, $2, 0, 0xB3A2;
    shl.b32 low, low, {shift};
    shl.b32 high, high, {shift};
"""
_CLEAR = """
    and.b32 $0, low, {mask};
    and.b32 $1, high, {mask};
"""
_MARK_NAN = {
    # The lower seven bits are all set.
    0x7F: "and.b32 m, $2, 0x7F7F7F7F; add.u32 m, m, 0x01010101;",
    # The lower seven bits are zero, and the top bit is set.
    0x80: """and.b32 m, $2, 0x7F7F7F7F; add.u32 m, m, 0x7F7F7F7F; not.b32 m, m;
    and.b32 m, m, $2;""",
}
_CLEAR_WITH_NAN = """
    prmt.b32 a, m, 0, 0x9484;
    prmt.b32 b, m, 0, 0xB4A4;
    lop3.b32 $0, low, {mask}, a, 0xEA;
    lop3.b32 $1, high, {mask}, b, 0xEA;
"""


def make_shift_ptx(shift: int, nan_code: int) -> str:
    """Return PTX (`Codec.assembly`) that converts the four codes in $2 to float16 in $0 and $1."""
    code = _SHIFT_HALVES + (_MARK_NAN[nan_code] + _CLEAR_WITH_NAN if nan_code >= 0 else _CLEAR)
    mask = (0x8000 | 0x7F << shift) * 0x10001
    return "{ .reg .b32 low, high, a, b, m;" + code.format(shift=shift, mask=hex(mask)) + "}"
