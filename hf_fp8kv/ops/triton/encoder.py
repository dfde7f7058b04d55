"""Numbers as codes and back, and the scales between them: the device side of formats/codec.py.

The same bits as there on every GPU, in integer arithmetic: the hardware's casts round twice on some
architectures, are missing on others, and differ on what they do with NaN and with numbers past the
largest. A kernel that uses this must be launched with `enable_fp_fusion=False`: a product fused
with the difference that follows it would change which scale is chosen.
"""

import functools
from dataclasses import dataclass

import triton
import triton.language as tl

from ...formats import AUTO, FORMATS, MIN_SCALE
from ...formats.codec import SEARCH_STEPS as _SEARCH_STEPS
from ...formats.codec import error_unit

SEARCH_STEPS = tl.constexpr(_SEARCH_STEPS)
LEAST_SCALE = tl.constexpr(MIN_SCALE)
INFINITY = tl.constexpr(0x7F800000)
BFLOAT16_NAN = tl.constexpr(0x7FC00000)


# Compared by identity, since a launch looks its kernel up by its constants.
@dataclass(frozen=True, eq=False)
class Encoder:
    """A format as a kernel needs it; `encoder_for` makes one per format.

    Attributes:
        drop: bits of a float32 mantissa that the format lacks.
        offset: what the exponent of float32 has more than the format's, in units of its codes.
        min_normal: the bits, as float32, of the smallest number with a full mantissa.
        steps: 2^23 subnormal steps.
        steps_bits: the same, as the bits of a float32.
        max_code: of the largest finite number.
        nan_code: of NaN.
        inf_code: of infinity; 0x80: there is none.
        max: the largest finite number.
        unit: `formats.codec.error_unit`.
        shift: bits that the lower seven of a code move to the left, to be those of a float16.
        factor: what that float16 must be multiplied by.
        unsigned_zero: as in `Format`.
    """

    drop: int
    offset: int
    min_normal: int
    steps: float
    steps_bits: int
    max_code: int
    nan_code: int
    inf_code: int
    max: float
    unit: float
    shift: int
    factor: float
    unsigned_zero: bool


@functools.cache
def encoder_for(name: str) -> Encoder | None:
    """Return the encoder of the format `name`; None for "auto"."""
    if name == AUTO:
        return None
    fmt = FORMATS[name]
    return Encoder(
        drop=23 - fmt.mantissa_bits,
        offset=(127 - fmt.bias) << fmt.mantissa_bits,
        min_normal=(128 - fmt.bias) << 23,
        steps=2.0**23 * fmt.min_subnormal,
        steps_bits=(127 + 24 - fmt.bias - fmt.mantissa_bits) << 23,
        max_code=fmt.max_code,
        nan_code=fmt.nan_code,
        inf_code=0x80 if fmt.inf_code is None else fmt.inf_code,
        max=fmt.max,
        unit=error_unit(fmt),
        # float16: bias 15, 10 bits of mantissa.
        shift=10 - fmt.mantissa_bits,
        factor=2.0 ** (15 - fmt.bias),
        unsigned_zero=fmt.unsigned_zero,
    )


@triton.jit
def encode(x, ENCODER: tl.constexpr):
    """Return the codes, uint8, of `x`, float32: `formats.codec.encode`, but for the sign of NaN."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    odd = (magnitude >> ENCODER.drop) & 1
    half = (1 << (ENCODER.drop - 1)) - 1
    normal = ((magnitude + half + odd) >> ENCODER.drop) - ENCODER.offset
    # Added to 2^23 steps, a number below the normal ones is rounded to whole steps.
    rounded = tl.abs(x) + ENCODER.steps
    subnormal = rounded.to(tl.int32, bitcast=True) - ENCODER.steps_bits
    code = tl.where(magnitude < ENCODER.min_normal, subnormal, normal)
    code = tl.minimum(code, ENCODER.max_code)
    sign = (bits >> 24) & 0x80
    if ENCODER.unsigned_zero:
        code = tl.where(code > 0, code | sign, code)
        code = tl.where(magnitude > INFINITY, ENCODER.nan_code, code)
    else:
        code = tl.where(magnitude > INFINITY, ENCODER.nan_code, code) | sign
    return code.to(tl.uint8)


@triton.jit
def decode(codes, ENCODER: tl.constexpr):
    """Return the numbers, float32, that `codes` stand for, uint8, as `formats.codec.decode`."""
    code = codes.to(tl.int32)
    low = code & 0x7F
    half = (low << ENCODER.shift) | ((code & 0x80) << 8)
    x = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * ENCODER.factor
    if ENCODER.unsigned_zero:
        return tl.where(code == ENCODER.nan_code, float("nan"), x)
    else:
        x = tl.where(low > ENCODER.max_code, float("nan"), x)
        infinity = tl.where(code < 0x80, float("inf"), float("-inf"))
        return tl.where(low == ENCODER.inf_code, infinity, x)


@triton.jit
def _round_up_to_bfloat16(scale):
    """Return a positive number rounded up to bfloat16, held in float32."""
    bits = scale.to(tl.int32, bitcast=True)
    return ((bits + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def to_bfloat16(scale):
    """Return a bfloat16 held in float32, as bfloat16."""
    bits = scale.to(tl.int32, bitcast=True) >> 16
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _mark_nan(scale, largest):
    """Return `scale`, or NaN where the largest magnitude of a vector is infinity or NaN."""
    bits = scale.to(tl.int32, bitcast=True)
    return tl.where(largest < INFINITY, bits, BFLOAT16_NAN).to(tl.float32, bitcast=True)


@triton.jit
def _smallest(x, ENCODER: tl.constexpr):
    """Return the smallest scale of each row of `x` `[N, D]`, and its largest magnitude's bits."""
    # As integers: a maximum of floats passes over NaN.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    scale = tl.div_rn(largest.to(tl.float32, bitcast=True), ENCODER.max)
    return _round_up_to_bfloat16(tl.maximum(scale, LEAST_SCALE)), largest


@triton.jit
def smallest_scale(x, ENCODER: tl.constexpr):
    """Return `formats.codec.dynamic_scale` of each row of `x` `[N, D]`: `[N]`, float32."""
    scale, largest = _smallest(x, ENCODER)
    return _mark_nan(scale, largest)


@triton.jit
def _without_nan(x, largest):
    """Return `x`, and zeros for a row with infinity or NaN, which no integer stands for."""
    return tl.where((largest < INFINITY)[:, None], x, 0.0)


@triton.jit
def search_scale(x, ENCODER: tl.constexpr):
    """Return `formats.codec.search_scale` of each row of `x` `[N, D]`: `[N]`, float32.

    One scale is tried after the other.
    """
    first, largest = _smallest(x, ENCODER)
    x = _without_nan(x, largest)
    chosen = first
    least_cost = _rounding_cost(x, first, first, ENCODER)
    for j in range(1, SEARCH_STEPS):
        scales = _candidate_scales(first, tl.full([1], j, tl.int32))
        cost = _rounding_cost(x, scales, first, ENCODER)
        chosen = tl.where(cost < least_cost, scales, chosen)
        least_cost = tl.minimum(cost, least_cost)
    return _mark_nan(chosen, largest)


@triton.jit
def search_scale_at_once(x, ENCODER: tl.constexpr):
    """Return the same for one vector: `[1]`, float32.

    `x` `[SEARCH_STEPS, D]` holds it once for each scale.
    """
    first, largest = _smallest(x, ENCODER)
    x = _without_nan(x, largest)
    scales = _candidate_scales(first, tl.arange(0, SEARCH_STEPS))
    cost = _rounding_cost(x, scales, first, ENCODER).to(tl.int32, bitcast=True)
    # The least cost, and of equals the smallest scale, in one reduction.
    code = scales.to(tl.int32, bitcast=True) >> 16
    code = (cost.to(tl.int64) << 16) | code.to(tl.int64)
    code = tl.where(largest < INFINITY, code, BFLOAT16_NAN >> 16)
    best = tl.min(code, 0, keep_dims=True).to(tl.int32)
    return (best << 16).to(tl.float32, bitcast=True)


@triton.jit
def _candidate_scales(first, j):
    """Return `first * 2^(j / SEARCH_STEPS)` rounded up to bfloat16.

    The hardware's power is good enough: where it is not exact, no product is nearer to a bfloat16
    than 2^-19 of itself.
    """
    return _round_up_to_bfloat16(first * tl.exp2(j * (1.0 / SEARCH_STEPS)))


@triton.jit
def _rounding_cost(x, scales, first, ENCODER: tl.constexpr):
    """Return what rows of `x` lose when they are rounded with `scales`, relative to `first`."""
    scaled = x * tl.div_rn(1.0, scales)[:, None]
    # Added to 1.5 times a power of two whose last bit is worth a step, a number is rounded to it.
    binade = tl.maximum(scaled.to(tl.int32, bitcast=True) & 0x7F800000, ENCODER.min_normal)
    large = (binade + (ENCODER.drop << 23 | 0x400000)).to(tl.float32, bitcast=True)
    error = ((scaled + large) - large) - scaled
    whole = tl.floor(error * ENCODER.unit + 0.5).to(tl.int32)
    relative = scales * tl.div_rn(1.0, first)
    return tl.sum(whole * whole, 1).to(tl.float32) * (relative * relative)
