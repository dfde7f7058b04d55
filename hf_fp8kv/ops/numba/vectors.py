"""Sixteen float32 lanes inside numba: what the CPU kernels are written with.

numba alone leaves the inner loops to LLVM's vectoriser, which then spends more than half of a
decode step on checks and on sums across lanes. These functions name the vector instructions; LLVM
splits them on a CPU with narrower ones. Memory is read and written at plain addresses (int64).

A code becomes a float by way of float16: its bits, moved, are a float16 that is too small by a
power of two. The CPU's conversion is exact, subnormal numbers included.
"""

import functools
import platform
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import numba
import numpy as np
from llvmlite import binding, ir
from numba import core, extending

# Without annotations of their own.
cgutils: Any = core.cgutils
types: Any = core.types
models: Any = extending.models

LANES = 16
# How a number is stored: FP8 is a code of any format, the others are torch's dtypes.
FP8, BF16, F16, F32 = 0, 1, 2, 3

# Without these instructions (AMD and Intel have them since 2013) LLVM calls a function that is not
# there, and ends the process. Other kinds of CPU that torch runs on convert float16 anyway.
HAS_HALF = platform.machine() not in ("x86_64", "AMD64") or bool(
    binding.get_host_cpu_features().get("f16c")
)

Floats: TypeAlias = Any  # sixteen float32 numbers
Call: TypeAlias = Any  # the record of one call of a kernel
Code: TypeAlias = tuple[int, int, int, int]  # how codes are read: `load_codes`
_Function = TypeVar("_Function", bound=Callable[..., Any])

_I8, _I16, _I32, _I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
_HALF, _FLOAT = ir.HalfType(), ir.FloatType()


def _vector(element: ir.Type) -> ir.VectorType:
    return ir.VectorType(element, LANES)


_FLOATS = _vector(_FLOAT)


# A part of a kernel is called from kernels only: without wrappers it compiles faster.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
_PART: dict[str, Any] = {**_OPTIONS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def jit(function: _Function) -> _Function:
    """Compiles a part of a kernel."""
    return cast(_Function, numba.njit(**_PART)(function))


def kernel(function: _Function) -> _Function:
    """Compiles a kernel that lets other threads run; kept on disk where there is a folder for it.

    numba compiles again when the file of `function` changes, and when one of its closure variables
    does; what it calls in other files does not count.
    """
    try:
        return cast(_Function, numba.njit(cache=True, **_OPTIONS)(function))
    except RuntimeError:  # numba finds no folder that it may write to
        return cast(_Function, numba.njit(**_OPTIONS)(function))


class _FloatsType(types.Type):  # type: ignore[misc]  # numba's classes are Any
    def __init__(self) -> None:
        super().__init__(name="float32x16")


class _CodesType(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="uint8x16")


def _model(element: ir.Type) -> type:
    class Model(models.PrimitiveModel):  # type: ignore[misc]
        def __init__(self, manager: Any, numba_type: Any) -> None:
            super().__init__(manager, numba_type, _vector(element))

    return Model


extending.register_model(_FloatsType)(_model(_FLOAT))
extending.register_model(_CodesType)(_model(_I8))
_f, _c, _i, _s = _FloatsType(), _CodesType(), types.int64, types.float32


def _operation(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes `emit(builder, *values) -> value` a function of kernels, with these numba types."""

    def decorate(emit: Callable[..., Any]) -> Callable[..., Any]:
        def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            found = emit(builder, *values)
            return context.get_dummy_value() if result is types.none else found

        @functools.wraps(emit)
        def typed(_context: Any, *_types: Any) -> Any:
            return result(*arguments), generate

        return cast(Callable[..., Any], extending.intrinsic(typed))

    return decorate


def _splat(builder: Any, value: Any, element: ir.Type) -> Any:
    """All lanes hold `value`, an int64 (of which the low bits count) or a float32."""
    if isinstance(element, ir.IntType) and element.width < value.type.width:
        value = builder.trunc(value, element)
    empty = ir.Constant(_vector(element), ir.Undefined)
    one = builder.insert_element(empty, value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, empty, ir.Constant(_vector(_I32), [0] * LANES))


def _all(element: ir.Type, value: float) -> ir.Constant:
    return ir.Constant(_vector(element), [value] * LANES)


def _call(builder: Any, name: str, result: ir.Type, *values: Any) -> Any:
    kind = ir.FunctionType(result, [v.type for v in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def _pointer(builder: Any, address: Any, kind: ir.Type) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _read(builder: Any, address: Any, element: ir.Type) -> Any:
    value = builder.load(_pointer(builder, address, _vector(element)))
    value.align = 1
    return value


def _write(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, _pointer(builder, address, value.type)).align = 1


def _read_some(builder: Any, address: Any, element: ir.Type, width: int, count: Any) -> Any:
    """`count` elements; the lanes after them are zero, and memory after them is not touched."""
    slot = cgutils.alloca_once(builder, _vector(element))
    builder.store(ir.Constant(_vector(element), [0] * LANES), slot)
    source = _pointer(builder, address, _I8)
    cgutils.raw_memcpy(builder, slot, source, _at_most(builder, count), width)
    return builder.load(slot)


def _write_some(builder: Any, address: Any, value: Any, width: int, count: Any) -> None:
    slot = cgutils.alloca_once(builder, value.type)
    builder.store(value, slot)
    target = _pointer(builder, address, _I8)
    cgutils.raw_memcpy(builder, target, slot, _at_most(builder, count), width)


def _at_most(builder: Any, count: Any) -> Any:
    lanes = ir.Constant(_I64, LANES)
    return builder.select(builder.icmp_signed(">", count, lanes), lanes, count)


def _widen(builder: Any, short: Any, kind: Any) -> Any:
    """Sixteen BF16 or F16, as float32."""
    wide = builder.shl(builder.zext(short, _vector(_I32)), _all(_I32, 16))
    half = builder.fpext(builder.bitcast(short, _vector(_HALF)), _FLOATS)
    is_brain = builder.icmp_signed("==", kind, ir.Constant(_I64, BF16))
    return builder.select(is_brain, builder.bitcast(wide, _FLOATS), half)


def _narrow(builder: Any, value: Any, kind: Any) -> Any:
    """Sixteen float32 as BF16 or F16, rounded to nearest even."""
    raw = builder.bitcast(value, _vector(_I32))
    odd = builder.and_(builder.lshr(raw, _all(_I32, 16)), _all(_I32, 1))
    up = builder.add(raw, builder.add(odd, _all(_I32, 0x7FFF)))
    is_nan = builder.fcmp_unordered("uno", value, value)
    wide = builder.select(is_nan, _all(_I32, 0x7FC00000), up)
    brain = builder.trunc(builder.lshr(wide, _all(_I32, 16)), _vector(_I16))
    half = builder.bitcast(builder.fptrunc(value, _vector(_HALF)), _vector(_I16))
    return builder.select(builder.icmp_signed("==", kind, ir.Constant(_I64, BF16)), brain, half)


@_operation(_f, _i)
def load(builder: Any, address: Any) -> Any:
    """Reads sixteen F32."""
    return _read(builder, address, _FLOAT)


@_operation(_f, _i, _i)
def _load_short(builder: Any, address: Any, kind: Any) -> Any:
    return _widen(builder, _read(builder, address, _I16), kind)


@_operation(_f, _i, _i)
def _load_some(builder: Any, address: Any, count: Any) -> Any:
    return _read_some(builder, address, _FLOAT, 4, count)


@_operation(_f, _i, _i, _i)
def _load_some_short(builder: Any, address: Any, kind: Any, count: Any) -> Any:
    return _widen(builder, _read_some(builder, address, _I16, 2, count), kind)


@jit
def load_as(address: int, kind: int, count: int) -> Floats:
    """Reads `count` numbers stored as BF16, F16 or F32; the other lanes are zero."""
    if kind == F32:
        return load(address) if count >= LANES else _load_some(address, count)
    if count >= LANES:
        return _load_short(address, kind)
    return _load_some_short(address, kind, count)


@_operation(types.none, _i, _f)
def store(builder: Any, address: Any, value: Any) -> None:
    """Writes sixteen F32."""
    _write(builder, address, value)


@_operation(types.none, _i, _i, _f)
def _store_short(builder: Any, address: Any, kind: Any, value: Any) -> None:
    _write(builder, address, _narrow(builder, value, kind))


@_operation(types.none, _i, _i, _f)
def _store_some(builder: Any, address: Any, count: Any, value: Any) -> None:
    _write_some(builder, address, value, 4, count)


@_operation(types.none, _i, _i, _i, _f)
def _store_some_short(builder: Any, address: Any, kind: Any, count: Any, value: Any) -> None:
    _write_some(builder, address, _narrow(builder, value, kind), 2, count)


@jit
def store_as(address: int, kind: int, count: int, value: Floats) -> None:
    """Writes the first `count` lanes as BF16, F16 or F32, rounded to nearest even."""
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
        _splat(builder, builder.extract_value(code, i), _I16) for i in range(4)
    )
    # The sign is in all upper bits: of the moved ones, the mask keeps bit 15.
    wide = builder.sext(codes, _vector(_I16))
    is_nan = builder.icmp_signed("==", builder.and_(wide, nan_mask), nan_code)
    moved = builder.and_(builder.shl(wide, shift), mask)
    moved = builder.select(is_nan, _all(_I16, 0x7E00), moved)
    return builder.fpext(builder.bitcast(moved, _vector(_HALF)), _FLOATS)


@_operation(_f, _i, types.UniTuple(_i, 4))
def load_codes(builder: Any, address: Any, code: Any) -> Any:
    """Reads sixteen codes, as numbers that still lack a factor (`cpu._decoding`).

    `code` is (shift, mask, nan_mask, nan_code).
    """
    return _decode(builder, _read(builder, address, _I8), code)


@_operation(_f, _i, types.UniTuple(_i, 4), _i)
def load_some_codes(builder: Any, address: Any, code: Any, count: Any) -> Any:
    """Reads `count` codes, at most sixteen; the other lanes are zero."""
    return _decode(builder, _read_some(builder, address, _I8, 1, count), code)


@_operation(_c, _f, types.UniTuple(_i, 8))
def encode(builder: Any, value: Any, code: Any) -> Any:
    """Returns the codes of `value`: `quantize.encode`, lane by lane.

    `code` is (drop, rebias, min_normal, step, max_code, nan_code, sign_zero, sign_nan): see
    `cpu._encoding`.
    """
    lanes = _vector(_I32)
    drop, rebias, min_normal, step, max_code, nan_code, sign_zero, sign_nan = (
        _splat(builder, builder.extract_value(code, i), _I32) for i in range(8)
    )
    one = _all(_I32, 1)
    raw = builder.bitcast(value, lanes)
    magnitude = builder.and_(raw, _all(_I32, 0x7FFFFFFF))
    sign = builder.and_(builder.lshr(raw, _all(_I32, 24)), _all(_I32, 0x80))
    odd = builder.and_(builder.lshr(magnitude, drop), one)
    half = builder.sub(builder.shl(one, builder.sub(drop, one)), one)
    normal = builder.sub(builder.lshr(builder.add(builder.add(magnitude, half), odd), drop), rebias)
    # Added to a number whose last bit is worth one step, a small number is rounded by the CPU.
    sum_ = builder.fadd(builder.bitcast(magnitude, _FLOATS), builder.bitcast(step, _FLOATS))
    small = builder.sub(builder.bitcast(sum_, lanes), step)
    found = builder.select(builder.icmp_signed("<", magnitude, min_normal), small, normal)
    found = builder.select(builder.icmp_signed(">", found, max_code), max_code, found)
    some = builder.icmp_signed(">", found, builder.neg(sign_zero))
    is_nan = builder.icmp_signed(">", magnitude, _all(_I32, 0x7F800000))
    plus = builder.select(is_nan, nan_code, found)
    has_sign = builder.select(is_nan, sign_nan, builder.zext(some, lanes))
    found = builder.or_(plus, builder.and_(sign, builder.neg(has_sign)))
    return builder.trunc(found, _vector(_I8))


@_operation(types.none, _i, _i, _c)
def store_codes(builder: Any, address: Any, count: Any, value: Any) -> None:
    """Writes the first `count` codes."""
    whole = builder.icmp_signed(">=", count, ir.Constant(_I64, LANES))
    with builder.if_else(whole, likely=True) as (then, otherwise):
        with then:
            _write(builder, address, value)
        with otherwise:
            _write_some(builder, address, value, 1, count)


def _scalar(name: str, result: Any, kind: ir.Type) -> Callable[..., Any]:
    def emit(builder: Any, address: Any) -> Any:
        value = builder.load(_pointer(builder, address, kind))
        value.align = 1
        if kind is _FLOAT:
            return value
        return builder.zext(value, _I64) if kind is _I8 else builder.sext(value, _I64)

    emit.__name__ = name
    return _operation(result, _i)(emit)


load_u8 = _scalar("load_u8", _i, _I8)
load_i32 = _scalar("load_i32", _i, _I32)
load_f32 = _scalar("load_f32", _s, _FLOAT)


@_operation(types.none, _i, _i)
def store_u8(builder: Any, address: Any, value: Any) -> None:
    """Writes the low byte of `value`."""
    builder.store(builder.trunc(value, _I8), _pointer(builder, address, _I8))


@_operation(types.none, _i, _i)
def store_u16(builder: Any, address: Any, value: Any) -> None:
    """Writes the low two bytes of `value`."""
    builder.store(builder.trunc(value, _I16), _pointer(builder, address, _I16)).align = 1


@_operation(_f, _s)
def splat(builder: Any, value: Any) -> Any:
    """All lanes hold `value`."""
    return _splat(builder, value, _FLOAT)


@_operation(_f, _f, _f, _f)
def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return _call(builder, "llvm.fma.v16f32", _FLOATS, a, b, c)


@_operation(_f, _f, _f)
def add(builder: Any, a: Any, b: Any) -> Any:
    """a + b."""
    return builder.fadd(a, b)


@_operation(_f, _f, _f)
def sub(builder: Any, a: Any, b: Any) -> Any:
    """a - b."""
    return builder.fsub(a, b)


@_operation(_f, _f, _f)
def mul(builder: Any, a: Any, b: Any) -> Any:
    """a * b."""
    return builder.fmul(a, b)


@_operation(_f, _f, _f)
def div(builder: Any, a: Any, b: Any) -> Any:
    """a / b."""
    return builder.fdiv(a, b)


@_operation(_f, _f, _f)
def larger(builder: Any, a: Any, b: Any) -> Any:
    """The larger of both; b where either is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@_operation(_f, _f, _f, _f, _f)
def where_less(builder: Any, a: Any, b: Any, then: Any, otherwise: Any) -> Any:
    """`then` where a < b, else (also where either is NaN) `otherwise`."""
    return builder.select(builder.fcmp_ordered("<", a, b), then, otherwise)


@_operation(_f, _f, _i, _s)
def first(builder: Any, a: Any, count: Any, fill: Any) -> Any:
    """The first `count` lanes of `a`, and `fill` in the others."""
    lane = ir.Constant(_vector(_I32), list(range(LANES)))
    inside = builder.icmp_signed("<", lane, _splat(builder, count, _I32))
    return builder.select(inside, a, _splat(builder, fill, _FLOAT))


@_operation(_f, _f)
def rint(builder: Any, a: Any) -> Any:
    """The nearest integers, as floats."""
    return _call(builder, "llvm.rint.v16f32", _FLOATS, a)


@_operation(_f, _f)
def floor(builder: Any, a: Any) -> Any:
    """The next integers below, as floats."""
    return _call(builder, "llvm.floor.v16f32", _FLOATS, a)


@_operation(_f)
def octave(_builder: Any) -> Any:
    """2 to the power of 0, 1/16, 2/16, ... 15/16."""
    return ir.Constant(_FLOATS, [2.0 ** (i / LANES) for i in range(LANES)])


@_operation(_f, _f)
def round_up(builder: Any, a: Any) -> Any:
    """The next bfloat16 numbers above `a`, of which nothing is negative."""
    more = builder.add(builder.bitcast(a, _vector(_I32)), _all(_I32, 0xFFFF))
    return builder.bitcast(builder.and_(more, _all(_I32, -0x10000)), _FLOATS)


@_operation(_f, _f, _i, _i)
def rounding_error(builder: Any, a: Any, drop: Any, least: Any) -> Any:
    """`a`, rounded to nearest even without the last `drop` bits of its mantissa, minus `a`; exact.

    Smaller numbers than the one with the bits `least` are rounded to the same steps as that one.
    """
    lanes = _vector(_I32)
    # Added to 1.5 times a power of two whose last bit is worth a step, a number is rounded to it.
    binade = builder.and_(builder.bitcast(a, lanes), _all(_I32, 0x7F800000))
    least = _splat(builder, least, _I32)
    binade = builder.select(builder.icmp_signed(">", binade, least), binade, least)
    above = builder.or_(
        builder.shl(_splat(builder, drop, _I32), _all(_I32, 23)), _all(_I32, 0x400000)
    )
    large = builder.bitcast(builder.add(binade, above), _FLOATS)
    return builder.fsub(builder.fsub(builder.fadd(a, large), large), a)


@_operation(_f, _f)
def power(builder: Any, n: Any) -> Any:
    """2 to the power of n, integers from -126 to 127; 1 where n is NaN."""
    safe = builder.select(builder.fcmp_unordered("uno", n, n), _all(_FLOAT, 0.0), n)
    whole = builder.fptosi(safe, _vector(_I32))
    raised = builder.shl(builder.add(whole, _all(_I32, 127)), _all(_I32, 23))
    return builder.bitcast(raised, _FLOATS)


@_operation(_s, _f)
def total(builder: Any, a: Any) -> Any:
    """The sum of all lanes."""
    kind = ir.FunctionType(_FLOAT, [_FLOAT, _FLOATS])
    reduce = cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.fadd.v16f32")
    # "reassoc": halves first, not lane after lane.
    return builder.call(reduce, [ir.Constant(_FLOAT, -0.0), a], fastmath=("reassoc",))


@_operation(_i, _f)
def whole_total(builder: Any, a: Any) -> Any:
    """The sum of all lanes, which are integers: exact up to 2^31."""
    whole = builder.fptosi(a, _vector(_I32))
    return builder.sext(_call(builder, "llvm.vector.reduce.add.v16i32", _I32, whole), _I64)


def _pick(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))


@_operation(types.UniTuple(_s, 4), _f, _f, _f, _f)
def totals(builder: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """The sums of all lanes of four vectors, in half the steps of four times `total`."""
    low, high = list(range(8)), list(range(8, 16))
    second = [16 + i for i in low], [16 + i for i in high]
    ab = builder.fadd(_pick(builder, a, b, low + second[0]), _pick(builder, a, b, high + second[1]))
    cd = builder.fadd(_pick(builder, c, d, low + second[0]), _pick(builder, c, d, high + second[1]))
    # From here on lanes are [a, b, c, d], four, two and one of each.
    fours = [8 * i + j for i in range(4) for j in range(4)]
    all_ = builder.fadd(
        _pick(builder, ab, cd, fours), _pick(builder, ab, cd, [i + 4 for i in fours])
    )
    twos = [4 * i + j for i in range(4) for j in range(2)]
    all_ = builder.fadd(
        _pick(builder, all_, all_, twos), _pick(builder, all_, all_, [i + 2 for i in twos])
    )
    ones = [0, 2, 4, 6]
    all_ = builder.fadd(
        _pick(builder, all_, all_, ones), _pick(builder, all_, all_, [i + 1 for i in ones])
    )
    sums = [builder.extract_element(all_, ir.Constant(_I32, i)) for i in range(4)]
    return cgutils.pack_array(builder, sums)


@_operation(types.none, _i, types.UniTuple(_s, 4))
def add_four(builder: Any, address: Any, values: Any) -> None:
    """Adds to four float32 numbers in memory."""
    kind = ir.VectorType(_FLOAT, 4)
    more = ir.Constant(kind, ir.Undefined)
    for i in range(4):
        value = builder.extract_value(values, i)
        more = builder.insert_element(more, value, ir.Constant(_I32, i))
    place = _pointer(builder, address, kind)
    old = builder.load(place)
    old.align = 4
    builder.store(builder.fadd(old, more), place).align = 4


@_operation(_s, _f)
def largest(builder: Any, a: Any) -> Any:
    """The largest lane; NaN lanes do not count."""
    return _call(builder, "llvm.vector.reduce.fmax.v16f32", _FLOAT, a)


@_operation(_f, _f, _f)
def negative(builder: Any, a: Any, sign: Any) -> Any:
    """`a`, of which nothing is negative, with the sign of `sign`."""
    bit = builder.and_(builder.bitcast(sign, _vector(_I32)), _all(_I32, -0x80000000))
    return builder.bitcast(builder.or_(builder.bitcast(a, _vector(_I32)), bit), _FLOATS)


@_operation(_i, _i, _f)
def bits(builder: Any, least: Any, a: Any) -> Any:
    """The largest of `least` and the bits of each |lane|: NaN is above infinity."""
    raw = builder.and_(builder.bitcast(a, _vector(_I32)), _all(_I32, 0x7FFFFFFF))
    most = builder.sext(_call(builder, "llvm.vector.reduce.smax.v16i32", _I32, raw), _I64)
    return builder.select(builder.icmp_signed(">", most, least), most, least)


@_operation(types.none, _i)
def prefetch(builder: Any, address: Any) -> None:
    """Asks for the 64 bytes around `address`, which need not be readable."""
    place = _pointer(builder, address, _I8)
    kind = ir.FunctionType(ir.VoidType(), [place.type, _I32, _I32, _I32])
    ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    # For reading, to keep in all levels of the cache, data.
    builder.call(ask, [place, *(ir.Constant(_I32, i) for i in (0, 3, 1))])


@_operation(_i, _i)
def next_unit(builder: Any, address: Any) -> Any:
    """Takes the next number from the counter at `address`; threads may do so at the same time."""
    place = _pointer(builder, address, _I64)
    return builder.atomic_rmw("add", place, ir.Constant(_I64, 1), "monotonic")


def _address_of(_context: Any, array: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        made = context.make_array(signature.args[0])(context, builder, values[0])
        return builder.ptrtoint(made.data, _I64)

    return _i(array), generate


# Where the first number of an array is. (`array.ctypes.data` is unsigned: added to an int64, numba
# makes a float64 of it.)
address_of: Any = extending.intrinsic(_address_of)


@jit
def width_of(kind: int) -> int:
    """Bytes of a stored number."""
    if kind == FP8:
        return 1
    return 4 if kind == F32 else 2


@jit
def decode(source: int, kind: int, code: Code, count: int, target: int) -> None:
    """`count` stored numbers are then float32 at `target`, and zero up to a whole vector."""
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
    """The page of a position; one that fell out of the window is read as page 0 and hidden."""
    page: int = load_i32(c.table + sequence * c.table_b + 4 * (position // c.slots))
    return max(page, 0)


def record(integers: str, floats: str = "") -> np.dtype[np.void]:
    """Returns the type of a kernel's call: int64 fields, then float64 fields."""
    fields = [(name, "i8") for name in integers.split()] + [(name, "f8") for name in floats.split()]
    return np.dtype(fields)


def _stamp() -> int:
    """Changes when a file of the kernels does: numba itself looks at one file only."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return zlib.crc32(b"".join(f.read_bytes() for f in files)) | 1


STAMP = _stamp()
