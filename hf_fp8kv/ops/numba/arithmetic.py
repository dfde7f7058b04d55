"""Arithmetic on sixteen float32 lanes, and across them."""

from collections.abc import Callable
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
)

FOUR_VECTORS = types.UniTuple(VECTOR, 4)


@operation(VECTOR, SCALAR)
def splat(builder: Any, value: Any) -> Any:
    """All lanes hold `value`."""
    return spread(builder, value, FLOAT_IR)


@operation(VECTOR, VECTOR, VECTOR, VECTOR)
def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return call_intrinsic(builder, "llvm.fma.v16f32", FLOAT_VECTOR, a, b, c)


def _lane_by_lane(instruction: str) -> Callable[..., Any]:
    """Return the operation that is this LLVM instruction, of two vectors."""

    def emit(builder: Any, a: Any, b: Any) -> Any:
        return getattr(builder, instruction)(a, b)

    return operation(VECTOR, VECTOR, VECTOR)(emit)


add, sub = _lane_by_lane("fadd"), _lane_by_lane("fsub")
mul, div = _lane_by_lane("fmul"), _lane_by_lane("fdiv")


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
    raised = builder.add(builder.bitcast(a, vector_of(I32)), constant(I32, 0xFFFF))
    return builder.bitcast(builder.and_(raised, constant(I32, -0x10000)), FLOAT_VECTOR)


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


@operation(FOUR_VECTORS, VECTOR, INT, INT, FOUR_VECTORS)
def fma_four(builder: Any, a: Any, address: Any, stride: Any, sums: Any) -> Any:
    """Four sums, each plus `a` times sixteen F32 of one of four rows, `stride` bytes apart."""
    for i in range(4):
        place = builder.add(address, builder.mul(stride, ir.Constant(I64, i)))
        factor = builder.load(pointer_to(builder, place, FLOAT_VECTOR))
        factor.align = 1
        old = builder.extract_value(sums, i)
        new = call_intrinsic(builder, "llvm.fma.v16f32", FLOAT_VECTOR, a, factor, old)
        sums = builder.insert_value(sums, new, i)
    return sums


@operation(types.UniTuple(SCALAR, 4), FOUR_VECTORS)
def sum_four(builder: Any, vectors: Any) -> Any:
    """The sums of all lanes of four vectors, in half the steps of four times `sum_lanes`."""

    def fold(left: Any, right: Any, lanes: list[int], step: int) -> Any:
        """Add lanes of both (`right` begins at 16) to the lanes `step` further on."""
        kind = ir.VectorType(I32, len(lanes))
        near = builder.shuffle_vector(left, right, ir.Constant(kind, lanes))
        lanes = [lane + step for lane in lanes]
        return builder.fadd(near, builder.shuffle_vector(left, right, ir.Constant(kind, lanes)))

    a, b, c, d = (builder.extract_value(vectors, i) for i in range(4))
    halves = [16 * i + j for i in range(2) for j in range(8)]
    ab, cd = fold(a, b, halves, 8), fold(c, d, halves, 8)
    # From here on lanes are [a, b, c, d], four, two and one of each.
    fours = fold(ab, cd, [8 * i + j for i in range(4) for j in range(4)], 4)
    twos = fold(fours, fours, [4 * i + j for i in range(4) for j in range(2)], 2)
    ones = fold(twos, twos, [0, 2, 4, 6], 1)
    sums = [builder.extract_element(ones, ir.Constant(I32, i)) for i in range(4)]
    return cgutils.pack_array(builder, sums)


@operation(types.none, INT, types.UniTuple(SCALAR, 4))
def add_four(builder: Any, address: Any, values: Any) -> None:
    """Add to four float32 numbers in memory."""
    kind = ir.VectorType(FLOAT_IR, 4)
    added = ir.Constant(kind, ir.Undefined)
    for i in range(4):
        value = builder.extract_value(values, i)
        added = builder.insert_element(added, value, ir.Constant(I32, i))
    place = pointer_to(builder, address, kind)
    old = builder.load(place)
    old.align = 4
    builder.store(builder.fadd(old, added), place).align = 4


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
