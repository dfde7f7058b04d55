"""Encoding of values and choice of scales: the device side of formats/codec.py.

Integer arithmetic gives the same bits as formats/codec.py on every GPU. The hardware's casts round
twice on some architectures, are missing on others, and differ for NaN and for values beyond
the largest. A kernel that uses this must be launched with `enable_fp_fusion=False`, because fusing
a product with the subtraction that follows it would change the choice of a scale.
"""

import triton
import triton.language as tl

from ...formats import MIN_SCALE
from ...formats.codec import SEARCH_STEPS as _SEARCH_STEPS

SEARCH_STEPS = tl.constexpr(_SEARCH_STEPS)
SMALLEST_SCALE = tl.constexpr(MIN_SCALE)
INFINITY = tl.constexpr(0x7F800000)
BFLOAT16_NAN = tl.constexpr(0x7FC00000)


@triton.jit
def encode(x, FORMAT: tl.constexpr):
    """Encode float32 to uint8 codes as `formats.codec.encode`, except for the sign of NaN."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    DROPPED_MANTISSA_BITS: tl.constexpr = 23 - FORMAT.mantissa_bits
    is_odd = (magnitude >> DROPPED_MANTISSA_BITS) & 1
    below_half = (1 << (DROPPED_MANTISSA_BITS - 1)) - 1
    normal = (magnitude + below_half + is_odd) >> DROPPED_MANTISSA_BITS
    normal -= (127 - FORMAT.bias) << FORMAT.mantissa_bits
    # Adding 2^23 steps rounds a subnormal value to whole steps.
    rounded = tl.abs(x) + 2.0**23 * FORMAT.min_subnormal
    subnormal = rounded.to(tl.int32, bitcast=True)
    subnormal -= (127 + 24 - FORMAT.bias - FORMAT.mantissa_bits) << 23
    code = tl.where(magnitude < (128 - FORMAT.bias) << 23, subnormal, normal)
    UNUSED_BITS: tl.constexpr = 8 - FORMAT.bits
    code = tl.minimum(code, FORMAT.max_code >> UNUSED_BITS) << UNUSED_BITS
    sign = (bits >> 24) & 0x80
    if FORMAT.has_unsigned_zero:
        code = tl.where(code > 0, code | sign, code)
        code = tl.where(magnitude > INFINITY, FORMAT.nan_code, code)
    else:
        code = tl.where(magnitude > INFINITY, FORMAT.nan_code, code) | sign
    return code.to(tl.uint8)


@triton.jit
def _round_up_to_bfloat16(scale):
    """Round a positive float32 up to a bfloat16 value, as float32."""
    bits = scale.to(tl.int32, bitcast=True)
    return ((bits + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def to_bfloat16(scale):
    """Convert float32 that holds a bfloat16 value to bfloat16."""
    bits = scale.to(tl.int32, bitcast=True) >> 16
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _mark_nan(scale, max_bits):
    """Return `scale`, or NaN if the largest magnitude of a vector is infinity or NaN."""
    bits = scale.to(tl.int32, bitcast=True)
    return tl.where(max_bits < INFINITY, bits, BFLOAT16_NAN).to(tl.float32, bitcast=True)


@triton.jit
def _find_smallest_scale(x, FORMAT: tl.constexpr):
    """Return the smallest scale and the bits of the largest magnitude of each row, `[N]`."""
    # Bits are compared as integers, because a maximum of floats ignores NaN.
    max_bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    scale = tl.div_rn(max_bits.to(tl.float32, bitcast=True), FORMAT.max)
    return _round_up_to_bfloat16(tl.maximum(scale, SMALLEST_SCALE)), max_bits


@triton.jit
def compute_dynamic_scale(x, FORMAT: tl.constexpr):
    """Return `codec.compute_dynamic_scale` of each row of `x`, `[N, D]`, as `[N]`, float32."""
    scale, max_bits = _find_smallest_scale(x, FORMAT)
    return _mark_nan(scale, max_bits)


@triton.jit
def search_scale(x, FORMAT: tl.constexpr):
    """Return `formats.codec.search_scale` of each row of `x`, `[N, D]`, as `[N]`, float32."""
    min_scale, max_bits = _find_smallest_scale(x, FORMAT)
    # Rows with infinity or NaN become zeros, because their errors have no integer form.
    x = tl.where((max_bits < INFINITY)[:, None], x, 0.0)
    best_scale = min_scale
    min_cost = _compute_rounding_cost(x, min_scale, min_scale, FORMAT)
    for j in range(1, SEARCH_STEPS):
        scales = _make_candidate_scales(min_scale, tl.full([1], j, tl.int32))
        cost = _compute_rounding_cost(x, scales, min_scale, FORMAT)
        best_scale = tl.where(cost < min_cost, scales, best_scale)
        min_cost = tl.minimum(cost, min_cost)
    return _mark_nan(best_scale, max_bits)


@triton.jit
def search_scale_at_once(x, FORMAT: tl.constexpr):
    """Return `formats.codec.search_scale` of one vector, `[1]`, float32.

    `x` `[SEARCH_STEPS, D]` has a copy of the vector for each scale.
    """
    min_scale, max_bits = _find_smallest_scale(x, FORMAT)
    x = tl.where((max_bits < INFINITY)[:, None], x, 0.0)  # as in `search_scale`
    scales = _make_candidate_scales(min_scale, tl.arange(0, SEARCH_STEPS))
    cost = _compute_rounding_cost(x, scales, min_scale, FORMAT).to(tl.int32, bitcast=True)
    # One reduction finds the least cost and, among equal costs, the smallest scale.
    scale_bits = scales.to(tl.int32, bitcast=True) >> 16
    key = (cost.to(tl.int64) << 16) | scale_bits.to(tl.int64)
    key = tl.where(max_bits < INFINITY, key, BFLOAT16_NAN >> 16)
    best_bits = tl.min(key, 0, keep_dims=True).to(tl.int32)
    return (best_bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _make_candidate_scales(min_scale, j):
    """Return `min_scale * 2^(j / SEARCH_STEPS)` rounded up to bfloat16.

    The hardware's power of two is accurate enough. Unless it is exact, no product is closer to a
    bfloat16 value than 2^-19 of itself.
    """
    return _round_up_to_bfloat16(min_scale * tl.exp2(j * (1.0 / SEARCH_STEPS)))


@triton.jit
def _compute_rounding_cost(x, scales, min_scale, FORMAT: tl.constexpr):
    """Return the squared rounding errors of rows of `x` with `scales`, relative to `min_scale`."""
    scaled_x = x * tl.div_rn(1.0, scales)[:, None]
    # Adding 1.5 times a power of two, whose last bit is worth one step, rounds to that step.
    DROPPED_MANTISSA_BITS: tl.constexpr = 23 - FORMAT.mantissa_bits
    binade = scaled_x.to(tl.int32, bitcast=True) & 0x7F800000
    binade = tl.maximum(binade, (128 - FORMAT.bias) << 23)
    rounding_term = (binade + (DROPPED_MANTISSA_BITS << 23 | 0x400000)).to(tl.float32, bitcast=True)
    error = ((scaled_x + rounding_term) - rounding_term) - scaled_x
    integer_error = tl.floor(error * FORMAT.error_unit + 0.5).to(tl.int32)
    relative_scales = scales * tl.div_rn(1.0, min_scale)
    return tl.sum(integer_error * integer_error, 1).to(tl.float32) * (
        relative_scales * relative_scales
    )
