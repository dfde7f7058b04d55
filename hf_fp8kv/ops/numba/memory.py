"""Numbers in memory, stored as FP8, BF16, F16 or F32, to and from lanes.

A code becomes a float by way of float16: its bits, moved, are a float16 that is too small by a
power of two. The CPU's conversion is exact, subnormal numbers included.
"""

import platform
from collections.abc import Callable
from typing import Any, TypeAlias

from llvmlite import ir
from numba import extending

from .lanes import (
    CODES,
    FLOAT_IR,
    FLOAT_VECTOR,
    HALF_IR,
    I8,
    I16,
    I32,
    I64,
    INT,
    LANES,
    SCALAR,
    VECTOR,
    Call,
    Floats,
    cgutils,
    constant,
    has_feature,
    jit,
    operation,
    pointer_to,
    spread,
    types,
    vector_of,
)  # fmt: skip

# How a number is stored: FP8 is a code of any format, the others are torch's dtypes.
FP8, BF16, F16, F32 = 0, 1, 2, 3
# Without these instructions (AMD and Intel have them since 2013) LLVM calls a function that is not
# there, and ends the process. Other kinds of CPU that torch runs on convert float16 anyway.
HAS_HALF = platform.machine() not in ("x86_64", "AMD64") or has_feature("f16c")
Code: TypeAlias = tuple[int, int, int, int]  # how codes are read: `load_codes`


def _read(builder: Any, address: Any, element: ir.Type) -> Any:
    value = builder.load(pointer_to(builder, address, vector_of(element)))
    value.align = 1
    return value


def _write(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, pointer_to(builder, address, value.type)).align = 1


def _read_some(builder: Any, address: Any, element: ir.Type, width: int, count: Any) -> Any:
    """Read `count` elements; the other lanes are zero, and memory after them is not touched."""
    slot = cgutils.alloca_once(builder, vector_of(element))
    builder.store(ir.Constant(vector_of(element), [0] * LANES), slot)
    source = pointer_to(builder, address, I8)
    cgutils.raw_memcpy(builder, slot, source, _at_most(builder, count), width)
    return builder.load(slot)


def _write_some(builder: Any, address: Any, value: Any, width: int, count: Any) -> None:
    slot = cgutils.alloca_once(builder, value.type)
    builder.store(value, slot)
    target = pointer_to(builder, address, I8)
    cgutils.raw_memcpy(builder, target, slot, _at_most(builder, count), width)


def _at_most(builder: Any, count: Any) -> Any:
    lanes = ir.Constant(I64, LANES)
    return builder.select(builder.icmp_signed(">", count, lanes), lanes, count)


def _widen(builder: Any, short: Any, kind: Any) -> Any:
    """Return sixteen BF16 or F16 as float32."""
    wide = builder.shl(builder.zext(short, vector_of(I32)), constant(I32, 16))
    half = builder.fpext(builder.bitcast(short, vector_of(HALF_IR)), FLOAT_VECTOR)
    is_brain = builder.icmp_signed("==", kind, ir.Constant(I64, BF16))
    return builder.select(is_brain, builder.bitcast(wide, FLOAT_VECTOR), half)


def _narrow(builder: Any, value: Any, kind: Any) -> Any:
    """Return sixteen float32 as BF16 or F16, rounded to nearest even."""
    raw = builder.bitcast(value, vector_of(I32))
    odd = builder.and_(builder.lshr(raw, constant(I32, 16)), constant(I32, 1))
    up = builder.add(raw, builder.add(odd, constant(I32, 0x7FFF)))
    is_nan = builder.fcmp_unordered("uno", value, value)
    wide = builder.select(is_nan, constant(I32, 0x7FC00000), up)
    brain = builder.trunc(builder.lshr(wide, constant(I32, 16)), vector_of(I16))
    half = builder.bitcast(builder.fptrunc(value, vector_of(HALF_IR)), vector_of(I16))
    return builder.select(builder.icmp_signed("==", kind, ir.Constant(I64, BF16)), brain, half)


@operation(VECTOR, INT)
def load(builder: Any, address: Any) -> Any:
    """Read sixteen F32."""
    return _read(builder, address, FLOAT_IR)


@operation(VECTOR, INT, INT)
def _load_short(builder: Any, address: Any, kind: Any) -> Any:
    return _widen(builder, _read(builder, address, I16), kind)


@operation(VECTOR, INT, INT)
def _load_some(builder: Any, address: Any, count: Any) -> Any:
    return _read_some(builder, address, FLOAT_IR, 4, count)


@operation(VECTOR, INT, INT, INT)
def _load_some_short(builder: Any, address: Any, kind: Any, count: Any) -> Any:
    return _widen(builder, _read_some(builder, address, I16, 2, count), kind)


@jit
def load_as(address: int, kind: int, count: int) -> Floats:
    """Read `count` numbers stored as BF16, F16 or F32; the other lanes are zero."""
    if kind == F32:
        return load(address) if count >= LANES else _load_some(address, count)
    if count >= LANES:
        return _load_short(address, kind)
    return _load_some_short(address, kind, count)


def _shift_up(builder: Any, words: Any, shift: Any) -> Any:
    moved = builder.shl(words, spread(builder, shift, I32))
    upper = builder.and_(moved, constant(I32, -0x10000))
    return builder.bitcast(upper, FLOAT_VECTOR)


@operation(VECTOR, INT, INT)
def _load_halves(builder: Any, address: Any, shift: Any) -> Any:
    return _shift_up(builder, _read(builder, address, I32), shift)


@operation(VECTOR, INT, INT, INT)
def _load_some_halves(builder: Any, address: Any, shift: Any, count: Any) -> Any:
    return _shift_up(builder, _read_some(builder, address, I32, 4, count), shift)


@jit
def load_halves(address: int, shift: int, count: int) -> Floats:
    """Read the lower (`shift` 16) or upper (0) BF16 of `count` words; other lanes are zero."""
    if count >= LANES:
        return _load_halves(address, shift)
    return _load_some_halves(address, shift, count)


@operation(types.none, INT, VECTOR)
def store(builder: Any, address: Any, value: Any) -> None:
    """Write sixteen F32."""
    _write(builder, address, value)


@operation(types.none, INT, INT, VECTOR)
def _store_short(builder: Any, address: Any, kind: Any, value: Any) -> None:
    _write(builder, address, _narrow(builder, value, kind))


@operation(types.none, INT, INT, VECTOR)
def _store_some(builder: Any, address: Any, count: Any, value: Any) -> None:
    _write_some(builder, address, value, 4, count)


@operation(types.none, INT, INT, INT, VECTOR)
def _store_some_short(builder: Any, address: Any, kind: Any, count: Any, value: Any) -> None:
    _write_some(builder, address, _narrow(builder, value, kind), 2, count)


@jit
def store_as(address: int, kind: int, count: int, value: Floats) -> None:
    """Write the first `count` lanes as BF16, F16 or F32, rounded to nearest even."""
    if kind == F32:
        if count >= LANES:
            store(address, value)
        else:
            _store_some(address, count, value)
    elif count >= LANES:
        _store_short(address, kind, value)
    else:
        _store_some_short(address, kind, count, value)


def _decode(builder: Any, codes: Any, code: Any) -> Any:
    shift, mask, nan_mask, nan_code = (
        spread(builder, builder.extract_value(code, i), I16) for i in range(4)
    )
    # The sign is in all upper bits: of the moved ones, the mask keeps bit 15.
    wide = builder.sext(codes, vector_of(I16))
    is_nan = builder.icmp_signed("==", builder.and_(wide, nan_mask), nan_code)
    moved = builder.and_(builder.shl(wide, shift), mask)
    moved = builder.select(is_nan, constant(I16, 0x7E00), moved)
    return builder.fpext(builder.bitcast(moved, vector_of(HALF_IR)), FLOAT_VECTOR)


@operation(VECTOR, INT, types.UniTuple(INT, 4))
def load_codes(builder: Any, address: Any, code: Any) -> Any:
    """Read sixteen codes, as numbers that still lack a factor (`records.decoding`).

    `code` is (shift, mask, nan_mask, nan_code).
    """
    return _decode(builder, _read(builder, address, I8), code)


@operation(VECTOR, INT, types.UniTuple(INT, 4), INT)
def load_some_codes(builder: Any, address: Any, code: Any, count: Any) -> Any:
    """Read `count` codes, at most sixteen; the other lanes are zero."""
    return _decode(builder, _read_some(builder, address, I8, 1, count), code)


@operation(CODES, VECTOR, types.UniTuple(INT, 8))
def encode(builder: Any, value: Any, code: Any) -> Any:
    """Return the codes of `value`: `codec.encode`, lane by lane.

    `code` is (drop, rebias, min_normal, step, max_code, nan_code, sign_zero, sign_nan): see
    `records.encoding`.
    """
    lanes = vector_of(I32)
    drop, rebias, min_normal, step, max_code, nan_code, sign_zero, sign_nan = (
        spread(builder, builder.extract_value(code, i), I32) for i in range(8)
    )
    one = constant(I32, 1)
    raw = builder.bitcast(value, lanes)
    magnitude = builder.and_(raw, constant(I32, 0x7FFFFFFF))
    sign = builder.and_(builder.lshr(raw, constant(I32, 24)), constant(I32, 0x80))
    odd = builder.and_(builder.lshr(magnitude, drop), one)
    half = builder.sub(builder.shl(one, builder.sub(drop, one)), one)
    normal = builder.sub(builder.lshr(builder.add(builder.add(magnitude, half), odd), drop), rebias)
    # Added to a number whose last bit is worth one step, a small number is rounded by the CPU.
    sum_ = builder.fadd(
        builder.bitcast(magnitude, FLOAT_VECTOR), builder.bitcast(step, FLOAT_VECTOR)
    )
    small = builder.sub(builder.bitcast(sum_, lanes), step)
    rounded = builder.select(builder.icmp_signed("<", magnitude, min_normal), small, normal)
    rounded = builder.select(builder.icmp_signed(">", rounded, max_code), max_code, rounded)
    keeps_sign = builder.icmp_signed(">", rounded, builder.neg(sign_zero))
    is_nan = builder.icmp_signed(">", magnitude, constant(I32, 0x7F800000))
    plus = builder.select(is_nan, nan_code, rounded)
    has_sign = builder.select(is_nan, sign_nan, builder.zext(keeps_sign, lanes))
    signed = builder.or_(plus, builder.and_(sign, builder.neg(has_sign)))
    return builder.trunc(signed, vector_of(I8))


@operation(types.none, INT, INT, CODES)
def store_codes(builder: Any, address: Any, count: Any, value: Any) -> None:
    """Write the first `count` codes."""
    whole = builder.icmp_signed(">=", count, ir.Constant(I64, LANES))
    with builder.if_else(whole, likely=True) as (then, otherwise):
        with then:
            _write(builder, address, value)
        with otherwise:
            _write_some(builder, address, value, 1, count)


def _scalar(name: str, result: Any, kind: ir.Type) -> Callable[..., Any]:
    def emit(builder: Any, address: Any) -> Any:
        value = builder.load(pointer_to(builder, address, kind))
        value.align = 1
        if kind is FLOAT_IR:
            return value
        if kind is I64:
            return value
        return builder.zext(value, I64) if kind is I8 else builder.sext(value, I64)

    emit.__name__ = name
    return operation(result, INT)(emit)


load_u8 = _scalar("load_u8", INT, I8)
load_i32 = _scalar("load_i32", INT, I32)
load_i64 = _scalar("load_i64", INT, I64)
load_f32 = _scalar("load_f32", SCALAR, FLOAT_IR)


@operation(types.none, INT, INT)
def store_u8(builder: Any, address: Any, value: Any) -> None:
    """Write the low byte of `value`."""
    builder.store(builder.trunc(value, I8), pointer_to(builder, address, I8))


@operation(types.none, INT, INT)
def store_u16(builder: Any, address: Any, value: Any) -> None:
    """Write the low two bytes of `value`."""
    builder.store(builder.trunc(value, I16), pointer_to(builder, address, I16)).align = 1


@operation(types.none, INT)
def prefetch(builder: Any, address: Any) -> None:
    """Ask for the 64 bytes around `address`, which need not be readable."""
    place = pointer_to(builder, address, I8)
    kind = ir.FunctionType(ir.VoidType(), [place.type, I32, I32, I32])
    ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    # For reading, to keep in all levels of the cache, data.
    builder.call(ask, [place, *(ir.Constant(I32, i) for i in (0, 3, 1))])


@operation(INT, INT)
def next_unit(builder: Any, address: Any) -> Any:
    """Take the next number from the counter at `address`; threads may do so at the same time."""
    place = pointer_to(builder, address, I64)
    return builder.atomic_rmw("add", place, ir.Constant(I64, 1), "monotonic")


def _address_of(_context: Any, array: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        made = context.make_array(signature.args[0])(context, builder, values[0])
        return builder.ptrtoint(made.data, I64)

    return INT(array), generate


# Where the first number of an array is. (`array.ctypes.data` is unsigned: added to an int64, numba
# makes a float64 of it.)
address_of: Any = extending.intrinsic(_address_of)


@jit
def width_of(kind: int) -> int:
    """Return the bytes of a stored number."""
    if kind == FP8:
        return 1
    return 4 if kind == F32 else 2


@jit
def decode(source: int, kind: int, code: Code, count: int, target: int) -> None:
    """Decode `count` stored numbers to float32 at `target`, padded with zeros to whole vectors."""
    width, whole = width_of(kind), count // LANES * LANES
    for i in range(0, whole, LANES):
        if kind == FP8:
            store(target + 4 * i, load_codes(source + i, code))
        else:
            store(target + 4 * i, load_as(source + width * i, kind, LANES))
    if whole < count:
        source, target, count = source + width * whole, target + 4 * whole, count - whole
        if kind == FP8:
            store(target, load_some_codes(source, code, count))
        else:
            store(target, load_as(source, kind, count))


@jit
def page_of(c: Call, sequence: int, position: int) -> int:
    """Return where the page of a position is; one behind the window is page 0 and hidden."""
    page: int = load_i32(c.table + sequence * c.table_b + 4 * (position // c.slots))
    address: int = c.block + load_i64(c.offsets + 8 * max(page, 0))
    return address
