"""Arithmetic on sixteen float32 lanes, and across them."""

from typing import Any

from llvmlite import ir

from .lanes import (
    FLOAT_IR,
    FLOAT_VECTOR,
    I32,
    I64,
    INT,
    LANES,
    SCALAR,
    VECTOR,
    call_intrinsic,
    cgutils,
    constant,
    operation,
    pointer_to,
    spread,
    types,
    vector_of,
)  # fmt: skip


@operation(VECTOR, SCALAR)
def splat(builder: Any, value: Any) -> Any:
    """All lanes hold `value`."""
    return spread(builder, value, FLOAT_IR)


@operation(VECTOR, VECTOR, VECTOR, VECTOR)
def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return call_intrinsic(builder, "llvm.fma.v16f32", FLOAT_VECTOR, a, b, c)


@operation(VECTOR, VECTOR, VECTOR)
def add(builder: Any, a: Any, b: Any) -> Any:
    """a + b."""
    return builder.fadd(a, b)


@operation(VECTOR, VECTOR, VECTOR)
def sub(builder: Any, a: Any, b: Any) -> Any:
    """a - b."""
    return builder.fsub(a, b)


@operation(VECTOR, VECTOR, VECTOR)
def mul(builder: Any, a: Any, b: Any) -> Any:
    """a * b."""
    return builder.fmul(a, b)


@operation(VECTOR, VECTOR, VECTOR)
def div(builder: Any, a: Any, b: Any) -> Any:
    """a / b."""
    return builder.fdiv(a, b)


@operation(VECTOR, VECTOR, VECTOR)
def maximum(builder: Any, a: Any, b: Any) -> Any:
    """The larger of both; b where either is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@operation(VECTOR, VECTOR, VECTOR, VECTOR, VECTOR)
def where_less(builder: Any, a: Any, b: Any, then: Any, otherwise: Any) -> Any:
    """`then` where a < b, else (also where either is NaN) `otherwise`."""
    return builder.select(builder.fcmp_ordered("<", a, b), then, otherwise)


@operation(VECTOR, VECTOR, INT, SCALAR)
def keep_first(builder: Any, a: Any, count: Any, fill: Any) -> Any:
    """The first `count` lanes of `a`, and `fill` in the others."""
    lane = ir.Constant(vector_of(I32), list(range(LANES)))
    inside = builder.icmp_signed("<", lane, spread(builder, count, I32))
    return builder.select(inside, a, spread(builder, fill, FLOAT_IR))


@operation(VECTOR, VECTOR)
def rint(builder: Any, a: Any) -> Any:
    """The nearest integers, as floats."""
    return call_intrinsic(builder, "llvm.rint.v16f32", FLOAT_VECTOR, a)


@operation(VECTOR, VECTOR)
def floor(builder: Any, a: Any) -> Any:
    """The next integers below, as floats."""
    return call_intrinsic(builder, "llvm.floor.v16f32", FLOAT_VECTOR, a)


@operation(VECTOR)
def octave(_builder: Any) -> Any:
    """2 to the power of 0, 1/16, 2/16, ... 15/16."""
    return ir.Constant(FLOAT_VECTOR, [2.0 ** (i / LANES) for i in range(LANES)])


@operation(VECTOR, VECTOR)
def round_up(builder: Any, a: Any) -> Any:
    """The next bfloat16 numbers above `a`, of which nothing is negative."""
    more = builder.add(builder.bitcast(a, vector_of(I32)), constant(I32, 0xFFFF))
    return builder.bitcast(builder.and_(more, constant(I32, -0x10000)), FLOAT_VECTOR)


@operation(VECTOR, VECTOR, INT, INT)
def rounding_error(builder: Any, a: Any, drop: Any, least: Any) -> Any:
    """`a`, rounded to nearest even without the last `drop` bits of its mantissa, minus `a`; exact.

    Smaller numbers than the one with the bits `least` are rounded to the same steps as that one.
    """
    lanes = vector_of(I32)
    # Added to 1.5 times a power of two whose last bit is worth a step, a number is rounded to it.
    binade = builder.and_(builder.bitcast(a, lanes), constant(I32, 0x7F800000))
    least = spread(builder, least, I32)
    binade = builder.select(builder.icmp_signed(">", binade, least), binade, least)
    above = builder.or_(
        builder.shl(spread(builder, drop, I32), constant(I32, 23)), constant(I32, 0x400000)
    )
    large = builder.bitcast(builder.add(binade, above), FLOAT_VECTOR)
    return builder.fsub(builder.fsub(builder.fadd(a, large), large), a)


@operation(VECTOR, VECTOR)
def power_of_two(builder: Any, n: Any) -> Any:
    """2 to the power of n, integers from -126 to 127; 1 where n is NaN."""
    safe = builder.select(builder.fcmp_unordered("uno", n, n), constant(FLOAT_IR, 0.0), n)
    whole = builder.fptosi(safe, vector_of(I32))
    raised = builder.shl(builder.add(whole, constant(I32, 127)), constant(I32, 23))
    return builder.bitcast(raised, FLOAT_VECTOR)


@operation(SCALAR, VECTOR)
def sum_lanes(builder: Any, a: Any) -> Any:
    """The sum of all lanes."""
    kind = ir.FunctionType(FLOAT_IR, [FLOAT_IR, FLOAT_VECTOR])
    reduce = cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.fadd.v16f32")
    # "reassoc": halves first, not lane after lane.
    return builder.call(reduce, [ir.Constant(FLOAT_IR, -0.0), a], fastmath=("reassoc",))


@operation(INT, VECTOR)
def sum_integers(builder: Any, a: Any) -> Any:
    """The sum of all lanes, which are integers: exact up to 2^31."""
    whole = builder.fptosi(a, vector_of(I32))
    return builder.sext(call_intrinsic(builder, "llvm.vector.reduce.add.v16i32", I32, whole), I64)


def _pick(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


@operation(types.UniTuple(SCALAR, 4), VECTOR, VECTOR, VECTOR, VECTOR)
def sum_four(builder: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """The sums of all lanes of four vectors, in half the steps of four times `sum_lanes`."""
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
    sums = [builder.extract_element(all_, ir.Constant(I32, i)) for i in range(4)]
    return cgutils.pack_array(builder, sums)


@operation(types.none, INT, types.UniTuple(SCALAR, 4))
def add_four(builder: Any, address: Any, values: Any) -> None:
    """Adds to four float32 numbers in memory."""
    kind = ir.VectorType(FLOAT_IR, 4)
    more = ir.Constant(kind, ir.Undefined)
    for i in range(4):
        value = builder.extract_value(values, i)
        more = builder.insert_element(more, value, ir.Constant(I32, i))
    place = pointer_to(builder, address, kind)
    old = builder.load(place)
    old.align = 4
    builder.store(builder.fadd(old, more), place).align = 4


@operation(SCALAR, VECTOR)
def max_lane(builder: Any, a: Any) -> Any:
    """The largest lane; NaN lanes do not count."""
    return call_intrinsic(builder, "llvm.vector.reduce.fmax.v16f32", FLOAT_IR, a)


@operation(VECTOR, VECTOR, VECTOR)
def copy_sign(builder: Any, a: Any, sign: Any) -> Any:
    """`a`, of which nothing is negative, with the sign of `sign`."""
    bit = builder.and_(builder.bitcast(sign, vector_of(I32)), constant(I32, -0x80000000))
    return builder.bitcast(builder.or_(builder.bitcast(a, vector_of(I32)), bit), FLOAT_VECTOR)


@operation(INT, INT, VECTOR)
def max_bits(builder: Any, least: Any, a: Any) -> Any:
    """The largest of `least` and the bits of each |lane|: NaN is above infinity."""
    raw = builder.and_(builder.bitcast(a, vector_of(I32)), constant(I32, 0x7FFFFFFF))
    most = builder.sext(call_intrinsic(builder, "llvm.vector.reduce.smax.v16i32", I32, raw), I64)
    return builder.select(builder.icmp_signed(">", most, least), most, least)
