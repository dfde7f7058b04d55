"""Numbers as codes, and the scales between them: the device side of formats/codec.py.

The same bits as there on every GPU, in integer arithmetic: the hardware's casts round twice on some
architectures, are missing on others, and differ on what they do with NaN and with numbers past the
largest. A kernel that uses this must be launched with `enable_fp_fusion=False`: a product fused
with the difference that follows it would change which scale is chosen.
"""

import triton
import triton.language as tl

from ...formats import MIN_SCALE
from ...formats.codec import SEARCH_STEPS as _SEARCH_STEPS

SEARCH_STEPS = tl.constexpr(_SEARCH_STEPS)
LEAST_SCALE = tl.constexpr(MIN_SCALE)
INFINITY = tl.constexpr(0x7F800000)
BFLOAT16_NAN = tl.constexpr(0x7FC00000)


@triton.jit
def encode(x, FORMAT: tl.constexpr):
    """Return the codes, uint8, of `x`, float32: `formats.codec.encode`, but for the sign of NaN."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Bits of a float32 mantissa that the format lacks.
    DROP: tl.constexpr = 23 - FORMAT.mantissa_bits
    odd = (magnitude >> DROP) & 1
    half = (1 << (DROP - 1)) - 1
    normal = (magnitude + half + odd) >> DROP
    normal -= (127 - FORMAT.bias) << FORMAT.mantissa_bits
    # Added to 2^23 steps, a number below the normal ones is rounded to whole steps.
    rounded = tl.abs(x) + 2.0**23 * FORMAT.min_subnormal
    subnormal = rounded.to(tl.int32, bitcast=True)
    subnormal -= (127 + 24 - FORMAT.bias - FORMAT.mantissa_bits) << 23
    code = tl.where(magnitude < (128 - FORMAT.bias) << 23, subnormal, normal)
    code = tl.minimum(code, FORMAT.max_code)
    sign = (bits >> 24) & 0x80
    if FORMAT.unsigned_zero:
        code = tl.where(code > 0, code | sign, code)
        code = tl.where(magnitude > INFINITY, FORMAT.nan_code, code)
    else:
        code = tl.where(magnitude > INFINITY, FORMAT.nan_code, code) | sign
    return code.to(tl.uint8)


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
def _smallest(x, FORMAT: tl.constexpr):
    """Return the smallest scale of each row of `x` `[N, D]`, and its largest magnitude's bits."""
    # As integers: a maximum of floats passes over NaN.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    scale = tl.div_rn(largest.to(tl.float32, bitcast=True), FORMAT.max)
    return _round_up_to_bfloat16(tl.maximum(scale, LEAST_SCALE)), largest


@triton.jit
def smallest_scale(x, FORMAT: tl.constexpr):
    """Return `formats.codec.dynamic_scale` of each row of `x` `[N, D]`: `[N]`, float32."""
    scale, largest = _smallest(x, FORMAT)
    return _mark_nan(scale, largest)


@triton.jit
def _without_nan(x, largest):
    """Return `x`, and zeros for a row with infinity or NaN, which no integer stands for."""
    return tl.where((largest < INFINITY)[:, None], x, 0.0)


@triton.jit
def search_scale(x, FORMAT: tl.constexpr):
    """Return `formats.codec.search_scale` of each row of `x` `[N, D]`: `[N]`, float32.

    One scale is tried after the other.
    """
    first, largest = _smallest(x, FORMAT)
    x = _without_nan(x, largest)
    chosen = first
    least_cost = _rounding_cost(x, first, first, FORMAT)
    for j in range(1, SEARCH_STEPS):
        scales = _candidate_scales(first, tl.full([1], j, tl.int32))
        cost = _rounding_cost(x, scales, first, FORMAT)
        chosen = tl.where(cost < least_cost, scales, chosen)
        least_cost = tl.minimum(cost, least_cost)
    return _mark_nan(chosen, largest)


@triton.jit
def search_scale_at_once(x, FORMAT: tl.constexpr):
    """Return the same for one vector: `[1]`, float32.

    `x` `[SEARCH_STEPS, D]` holds it once for each scale.
    """
    first, largest = _smallest(x, FORMAT)
    x = _without_nan(x, largest)
    scales = _candidate_scales(first, tl.arange(0, SEARCH_STEPS))
    cost = _rounding_cost(x, scales, first, FORMAT).to(tl.int32, bitcast=True)
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
def _rounding_cost(x, scales, first, FORMAT: tl.constexpr):
    """Return what rows of `x` lose when they are rounded with `scales`, relative to `first`."""
    scaled = x * tl.div_rn(1.0, scales)[:, None]
    # Added to 1.5 times a power of two whose last bit is worth a step, a number is rounded to it.
    DROP: tl.constexpr = 23 - FORMAT.mantissa_bits
    binade = scaled.to(tl.int32, bitcast=True) & 0x7F800000
    binade = tl.maximum(binade, (128 - FORMAT.bias) << 23)
    large = (binade + (DROP << 23 | 0x400000)).to(tl.float32, bitcast=True)
    error = ((scaled + large) - large) - scaled
    whole = tl.floor(error * FORMAT.error_unit + 0.5).to(tl.int32)
    relative = scales * tl.div_rn(1.0, first)
    return tl.sum(whole * whole, 1).to(tl.float32) * (relative * relative)
