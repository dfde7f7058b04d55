"""PTX arithmetic on NumPy arrays that hold one element per thread.

Names, types and results follow the PTX ISA. `find_operation` returns an `Operation`, which holds a
function and the types of its arguments and its result.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]

_PRED = np.dtype(bool)
_F32, _F16, _U32, _U16 = (np.dtype(name) for name in ("<f4", "<f2", "<u4", "<u2"))
# Unsigned integers hold the bits of types that numpy lacks.
TYPES = {"pred": _PRED, "f16": _F16, "f32": _F32, "f64": np.dtype("<f8"), "bf16": _U16}
for _size in (1, 2, 4, 8):
    TYPES[f"s{8 * _size}"] = np.dtype(f"i{_size}")
    TYPES[f"u{8 * _size}"] = TYPES[f"b{8 * _size}"] = np.dtype(f"u{_size}")
TYPES |= {"f16x2": _U32, "bf16x2": _U32, "tf32": _F32, "e4m3x2": _U16, "e5m2x2": _U16}


class Operation(NamedTuple):
    """An instruction that computes one register.

    Attributes:
        compute: Function that computes the result from the source values.
        sources: Types of the source values.
        result: Type of the result.
    """

    compute: Callable[..., Array]
    sources: Sequence[np.dtype[Any]]
    result: np.dtype[Any]


@functools.cache
def find_operation(opcode: tuple[str, ...]) -> Operation | None:
    if "ftz" in opcode:
        operation = find_operation(tuple(part for part in opcode if part != "ftz"))
        assert operation is None or {operation.result, *operation.sources} == {_F32}, opcode
        return operation and operation._replace(
            compute=lambda *values: _flush_subnormals(
                operation.compute(*map(_flush_subnormals, values))
            )
        )
    name, *qualifiers = opcode
    type_names = [qualifier for qualifier in qualifiers if qualifier in TYPES]
    if name == "cvt":
        return _find_conversion(qualifiers, *type_names)
    if not type_names:
        return None
    dtype = TYPES[type_names[0]]
    key = ".".join([name, *(part for part in qualifiers if part in _KEY_QUALIFIERS)])
    if name == "setp":
        compare = _COMPARISONS.get(qualifiers[0]) if len(qualifiers) == 2 else None
        if compare is not None and type_names[0] == "bf16":
            compare_floats = compare
            compare = lambda a, b: compare_floats(from_bfloat16(a), from_bfloat16(b))  # noqa: E731
        return compare and Operation(compare, [dtype, dtype], _PRED)
    if name == "selp":
        return Operation(_select, [dtype, dtype, _PRED], dtype)
    if name in ("shl", "shr"):
        return Operation(_shift_left if name == "shl" else _shift_right, [dtype, _U32], dtype)
    if name == "shf":
        assert qualifiers[:2] == ["l", "wrap"], opcode
        return Operation(_shift_funnel, [dtype, dtype, _U32], dtype)
    if name == "bfe":
        return Operation(_extract_bits, [dtype, _U32, _U32], dtype)
    if name == "mov":
        return Operation(lambda x: x, [dtype], dtype)
    if name in ("mul", "mad") and "wide" in qualifiers:
        wide_type = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}")
        sources = [dtype, dtype, *([wide_type] if name == "mad" else [])]
        return Operation(_multiply_wide, sources, wide_type)
    kind = dtype.kind if dtype.kind in "fb" else "i"
    compute = _OPERATIONS.get((key, kind))
    if (
        compute is None
        or type_names[0] in ("bf16", "bf16x2", "f16x2")
        # numpy computes these in float32, which has enough bits for correct rounding.
        or (type_names[0] == "f16" and name not in ("add", "sub", "mul"))
        or (name == "fma" and dtype != _F32)
    ):
        return None
    arity = {"mad": 3, "fma": 3, "lop3": 4, "prmt": 3}.get(name) or (1 if name in _UNARY else 2)
    return Operation(compute, [dtype] * arity, dtype)


_KEY_QUALIFIERS = {"lo", "hi", "relu", "approx", "full"}
_UNARY = {"abs", "neg", "not", "ex2", "sqrt", "popc"}
_COMPARISONS: dict[str, Callable[..., Array]] = {
    "eq": operator.eq, "ne": lambda a, b: (a < b) | (a > b) if a.dtype.kind == "f" else a != b,
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
}  # fmt: skip


def _select(a: Array, b: Array, condition: Array) -> Array:
    return np.where(condition, a, b)


def _shift_left(x: Array, amount: Array) -> Array:
    num_bits = 8 * x.itemsize
    return np.where(
        amount < num_bits, x << np.minimum(amount, num_bits - 1).astype(x.dtype), x.dtype.type(0)
    )


def _shift_right(x: Array, amount: Array) -> Array:
    num_bits = 8 * x.itemsize
    shifted = x >> np.minimum(amount, num_bits - 1).astype(x.dtype)
    return shifted if x.dtype.kind == "i" else np.where(amount < num_bits, shifted, x.dtype.type(0))


def _shift_funnel(low: Array, high: Array, amount: Array) -> Array:
    amount = amount & _U32.type(31)
    return high << amount | _shift_right(low, _U32.type(32) - amount)


def _extract_bits(x: Array, start: Array, length: Array) -> Array:
    # Fields in Triton's code do not exceed the 32 bits of a register.
    unused = _U32.type(8 * x.itemsize) - start - length
    assert (unused < 32).all(), "bfe: expected a field within the register"
    return (x << unused.astype(x.dtype)) >> (unused + start).astype(x.dtype)


def _multiply_wide(a: Array, b: Array, *addend: Array) -> Array:
    wide_type = np.dtype(f"{a.dtype.kind}{2 * a.itemsize}")
    product = a.astype(wide_type) * b
    return product + addend[0] if addend else product


def _divide(a: Array, b: Array) -> Array:
    # The quotient is rounded toward zero. PTX does not define the result of a division by zero.
    b = np.where(b == 0, b.dtype.type(1), b)
    return (a - np.fmod(a, b)) // b


def _fma(a: Array, b: Array, c: Array) -> Array:
    # The float64 product is exact. The sum is rounded to odd, so rounding to float32 is correct.
    product = a.astype(np.float64) * b
    total = product + c
    c_rounded = total - product
    error = (product - (total - c_rounded)) + (c - c_rounded)
    is_even = total.view(np.int64) & 1 == 0
    needs_odd = is_even & (error != 0) & np.isfinite(total)
    if needs_odd.any():
        direction = np.where(error > 0, np.inf, -np.inf)
        total = np.where(needs_odd, np.nextafter(total, direction), total)
    return total.astype(np.float32)


def _flush_subnormals(x: Array) -> Array:
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(_F32.type(0), x), x)


def _permute_bytes(a: Array, b: Array, selector: Array) -> Array:
    a, b, selector = np.broadcast_arrays(a, b, selector)
    pairs = np.stack(
        [np.ascontiguousarray(words)[..., None].view(np.uint8) for words in (a, b)], -2
    )
    pairs = pairs.reshape(*a.shape, 8)
    nibbles = selector[..., None] >> (4 * np.arange(4, dtype=np.uint32)) & _U32.type(15)
    result = np.take_along_axis(pairs, (nibbles & 7).astype(np.int64), -1)
    result = np.where(nibbles > 7, np.where(result > 127, np.uint8(255), np.uint8(0)), result)
    return np.ascontiguousarray(result).view(np.uint32)[..., 0]


def _combine_bits(a: Array, b: Array, c: Array, table: Array) -> Array:
    truth_table = int(table.flat[0])
    result = np.zeros_like(a)
    for row in range(8):
        if truth_table >> row & 1:
            terms = (x if row & bit else ~x for x, bit in ((a, 4), (b, 2), (c, 1)))
            result = result | functools.reduce(operator.and_, terms)
    return result


def _multiply_high(a: Array, b: Array) -> Array:
    num_bits = 8 * a.itemsize
    assert num_bits < 64, "mul.hi: expected at most 32 bits"
    return (_multiply_wide(a, b) >> num_bits).astype(a.dtype)


_OPERATIONS: dict[tuple[str, str], Callable[..., Array]] = {
    ("add", "i"): np.add, ("sub", "i"): np.subtract, ("neg", "i"): np.negative,
    ("abs", "i"): np.abs, ("add", "f"): np.add, ("sub", "f"): np.subtract,
    ("neg", "f"): np.negative, ("abs", "f"): np.abs,
    ("and", "i"): np.bitwise_and, ("or", "i"): np.bitwise_or, ("xor", "i"): np.bitwise_xor,
    ("not", "i"): np.invert, ("and", "b"): np.bitwise_and, ("or", "b"): np.bitwise_or,
    ("xor", "b"): np.bitwise_xor, ("not", "b"): np.invert,
    ("min", "i"): np.minimum, ("max", "i"): np.maximum, ("min", "f"): np.fmin,
    ("max", "f"): np.fmax, ("max.relu", "i"): lambda a, b: np.maximum(np.maximum(a, b), 0),
    ("mul.lo", "i"): np.multiply, ("mul", "f"): np.multiply, ("mul.hi", "i"): _multiply_high,
    ("mad.lo", "i"): lambda a, b, c: a * b + c, ("fma", "f"): _fma,
    ("div", "i"): _divide, ("rem", "i"): lambda a, b: np.fmod(a, np.where(b == 0, 1, b)),
    # These results are correctly rounded. The instructions may have an error of 2 ulp.
    ("div", "f"): np.divide, ("div.full", "f"): np.divide, ("sqrt", "f"): np.sqrt,
    ("ex2.approx", "f"): np.exp2,
    ("popc", "i"): lambda x: np.bitwise_count(x).astype(np.uint32),
    ("prmt", "i"): _permute_bytes, ("lop3", "i"): _combine_bits,
}  # fmt: skip


# -- conversions -----------------------------------------------------------------------------------


def to_bfloat16(x: Array) -> Array:
    """Return the bits of float32 values rounded to bfloat16, to nearest even."""
    bits = x.view(np.uint32)
    rounded = (bits + _U32.type(0x7FFF) + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def from_bfloat16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_tf32(x: Array) -> Array:
    """Return float32 values rounded to 10 bits of mantissa, to nearest, ties away from zero."""
    rounded = (x.view(np.uint32) + _U32.type(0x1000)) & _U32.type(0xFFFFE000)
    return np.where(np.isfinite(x), rounded.view(np.float32), x)


def _pack_two(convert: Callable[[Array], Array]) -> Callable[[Array, Array], Array]:
    """Return a function that converts two values and packs them, the second in the lower half."""
    return lambda high, low: convert(high).astype(np.uint32) << 16 | convert(low)


def _to_float16(x: Array) -> Array:
    return x.astype(np.float16).view(np.uint16)


_E4M3_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float16)
_E4M3_BITS = _E4M3_VALUES.view(torch.int16).numpy().view(np.uint16)


def _from_e4m3x2(codes: Array) -> Array:
    return _pack_two(lambda x: _E4M3_BITS[x])(codes >> 8, codes & 0xFF)


def _from_e5m2x2(codes: Array) -> Array:
    high, low = codes & _U16.type(0xFF00), codes & 0xFF
    return high.astype(np.uint32) << 16 | low.astype(np.uint32) << 8


def _to_integer(dtype: np.dtype[Any], rounding: Callable[[Array], Array]) -> Callable[..., Array]:
    lowest, highest = np.iinfo(dtype).min, np.iinfo(dtype).max

    def convert(x: Array) -> Array:
        return np.clip(np.nan_to_num(rounding(x).astype(np.float64)), lowest, highest).astype(dtype)

    assert dtype.itemsize < 8, "cvt: expected an integer type that float64 represents exactly"
    return convert


_ROUNDINGS = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}
_CONVERSIONS: dict[tuple[str, ...], Callable[..., Array]] = {
    ("rn", "bf16x2", "f32"): _pack_two(to_bfloat16), ("rn", "f16x2", "f32"): _pack_two(_to_float16),
    ("rn", "bf16", "f32"): to_bfloat16, ("f32", "bf16"): from_bfloat16,
    ("rn", "f16", "f32"): lambda x: x.astype(np.float16), ("rna", "tf32", "f32"): to_tf32,
    ("f32", "f16"): lambda x: x.astype(np.float32), ("f64", "f32"): lambda x: x.astype(np.float64),
    ("rn", "f32", "f64"): lambda x: x.astype(np.float32),
    ("rn", "f16x2", "e4m3x2"): _from_e4m3x2, ("rn", "f16x2", "e5m2x2"): _from_e5m2x2,
}  # fmt: skip


def _find_conversion(
    qualifiers: list[str], result_name: str, *source_names: str
) -> Operation | None:
    source_name = source_names[0] if source_names else result_name
    result, source = TYPES[result_name], TYPES[source_name]
    conversion = _CONVERSIONS.get(tuple(qualifiers))
    if conversion is not None:
        num_sources = 2 if result_name in ("bf16x2", "f16x2") and source == _F32 else 1
        return Operation(conversion, [source] * num_sources, result)
    rounding = _ROUNDINGS.get(qualifiers[0])
    if rounding is not None and source == _F32:
        compute = rounding if result == _F32 else _to_integer(result, rounding)
        return Operation(compute, [source], result)
    is_integer = source.kind in "iu" and source_name != "bf16"
    if is_integer and qualifiers in ([result_name, source_name], ["rn", "f32", source_name]):
        return Operation(lambda x: x.astype(result), [source], result)
    return None
