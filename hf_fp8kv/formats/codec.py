"""Encode and decode in integer arithmetic. This is the specification of a stored byte.

`encode` rounds to nearest, ties to even, saturates, and keeps NaN. Unlike torch's casts, it gives
the same bits on every device and in every version of torch. (Past 448, torch 2.11 gives NaN but
2.13 saturates, and an E5M2 cast gives infinity.)

A dynamic scale is `max |x| / format.max`, rounded up to bfloat16 so that the largest value never
saturates. Values are multiplied by its fp32 reciprocal before `encode`. The scale of a token with
NaN or infinity is NaN, so the token reads back as NaN in every format.
"""

import functools
import math

import torch

from . import MIN_SCALE, Format

# Number of scales that `search_scale` tries within an octave, from the smallest scale without
# saturation. With 32 scales, the errors would hardly be smaller.
SEARCH_STEPS = 16
BFLOAT16_NAN = 0x7FC0
# Number of vectors that `search_scale` searches together. It needs 16 times their memory.
_VECTORS_PER_SEARCH = 64


def encode(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return the uint8 codes of `x`, in its shape.

    Finite values past `fmt.max`, and infinities, become plus or minus `fmt.max`. NaN becomes the
    format's NaN, and keeps the sign if the format's NaN has a sign.

    Args:
        x: Values of any shape, float32. 16-bit floats are widened first, which is exact.
        fmt: The format.
    """
    bits = x.float().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    dropped_bits = 23 - fmt.mantissa_bits

    # Normal values keep their bits, with fp32's bias replaced by the format's. A carry correctly
    # moves into the exponent. For subnormal values, the full mantissa (with the hidden bit) is
    # shifted to the fixed step. From a shift of 25 bits on, every fp32 value rounds to zero.
    exponent = magnitude >> 23
    full_mantissa = (magnitude & 0x7FFFFF) | (exponent > 0).int() << 23
    rebiased = magnitude - ((127 - fmt.bias) << 23)
    unrounded = torch.where(exponent < 128 - fmt.bias, full_mantissa, rebiased)
    shift = (dropped_bits + 128 - fmt.bias - exponent.clamp(min=1)).clamp(dropped_bits, 25)
    offset = (torch.ones_like(shift) << (shift - 1)) - 1
    unused_bits = 8 - fmt.bits
    code = (unrounded + offset + ((unrounded >> shift) & 1)) >> shift
    code = code.clamp(max=fmt.max_code >> unused_bits) << unused_bits
    code = torch.where(magnitude > 0x7F800000, fmt.nan_code, code)
    is_negative = (bits < 0) & (code > 0) if fmt.has_unsigned_zero else bits < 0
    return torch.where(is_negative, code | 0x80, code).to(torch.uint8)


def decode(codes: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return the exact float32 values of `codes`, uint8 of any shape."""
    table = make_code_table(fmt, codes.device)
    return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)


@functools.cache
def make_code_table(fmt: Format, device: torch.device) -> torch.Tensor:
    """Return the values of the 256 codes, `[256]`, float32, on `device`."""
    values = []
    for code in range(256):
        exponent, fraction = divmod((code & 0x7F) >> 8 - fmt.bits, 1 << fmt.mantissa_bits)
        hidden_bit = 1 << fmt.mantissa_bits if exponent else 0
        value = (fraction + hidden_bit) * fmt.min_subnormal * 2.0 ** max(exponent - 1, 0)
        value = math.inf if code & 0x7F == fmt.inf_code else value
        is_past_max = code & 0x7F > fmt.max_code and value != math.inf
        is_nan = is_past_max or (fmt.has_unsigned_zero and code == fmt.nan_code)
        sign = -1.0 if code >= 0x80 else 1.0
        values.append(math.nan if is_nan else sign * value)
    # A table that is created in inference mode cannot be used outside inference mode.
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float32, device=device)


def compute_dynamic_scale(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return the dynamic scale of each vector on the last axis, `x.shape[:-1]`, in bfloat16."""
    amax = x.float().abs().amax(-1)
    # Divide by a tensor, because CUDA multiplies by the reciprocal of a number and so rounds twice.
    scale = (amax / amax.new_full((), fmt.max)).clamp(min=MIN_SCALE)
    return _round_up_to_bfloat16(scale, amax.isfinite())


def _round_up_to_bfloat16(scale: torch.Tensor, is_valid: torch.Tensor) -> torch.Tensor:
    """Return float32 scales rounded up to bfloat16, or NaN where `is_valid` is False."""
    # bfloat16 is the upper half of fp32, so adding 0xFFFF before truncation rounds up. torch may
    # cast NaN to any of several NaNs, so NaN is not cast.
    rounded = torch.where(is_valid, (scale.view(torch.int32) + 0xFFFF) >> 16, BFLOAT16_NAN)
    return rounded.to(torch.int16).view(torch.bfloat16)


def search_scale(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return the scale of each vector with the least rounding error.

    The candidates are the dynamic scale times `2 ** (step / SEARCH_STEPS)`, for `SEARCH_STEPS`
    steps, rounded up to bfloat16. The first candidate with the smallest sum of squared errors is
    chosen. The search is only used for K, because the errors of V hardly matter.
    docs/architecture.md states the gain.

    Errors are summed as integers, in units of `1 / fmt.error_unit` and rounded half up, so that
    every backend chooses the same scale. A backend must not fuse the product with the following sum
    and differences.

    Args:
        x: Vectors, `[..., D]`, float32, D at most 4096.
        fmt: The format.

    Returns:
        The scales, `x.shape[:-1]`, bfloat16. NaN for a vector with NaN or infinity.
    """
    vectors = x.float().reshape(-1, x.shape[-1])
    scales = [_search_chunk(chunk, fmt) for chunk in vectors.split(_VECTORS_PER_SEARCH)]
    return torch.cat(scales).view(x.shape[:-1])


def round_to_format(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return `decode(encode(x, fmt), fmt)` for finite float32 `x`, but without computing codes."""
    # Clamp first, because a value far beyond the maximum would not round to a finite value.
    return _round_to_step(x.clamp(-fmt.max, fmt.max), fmt)


def compute_rounding_error(x: torch.Tensor, scale: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return the rounding error of finite float32 `x` stored with `scale`, in the shape of `x`."""
    return round_to_format(x / scale, fmt) * scale - x


def _round_to_step(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Round each value of `x`, float32, to the format's step in its binade."""
    # Adding 1.5 times a power of two whose last bit is worth one step rounds to that step.
    binade = (x.view(torch.int32) & 0x7F800000).clamp(min=(128 - fmt.bias) << 23)
    addend = (binade + ((23 - fmt.mantissa_bits) << 23 | 0x400000)).view(torch.float32)
    return (x + addend) - addend


def _search_chunk(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    min_scale = compute_dynamic_scale(x, fmt).float()
    steps = torch.arange(SEARCH_STEPS, dtype=torch.float32, device=x.device) / SEARCH_STEPS
    rounded = _round_up_to_bfloat16(min_scale[:, None] * steps.exp2(), ~min_scale.isnan()[:, None])
    scales = rounded.float()
    scaled = x[:, None] * scales.reciprocal()[..., None]
    error = ((_round_to_step(scaled, fmt) - scaled) * fmt.error_unit + 0.5).floor_().int()
    # Scales are relative to the smallest, because the square of a tiny scale would be zero.
    scale_ratio = scales * min_scale.reciprocal()[:, None]
    cost = (error * error).sum(-1, dtype=torch.int32).float() * (scale_ratio * scale_ratio)
    # If a scale is NaN, all costs are NaN, and any choice is correct.
    index = cost.argmin(-1, keepdim=True)
    # Gather integers, because torch's gather may change the bits of NaN.
    return rounded.view(torch.int16).gather(-1, index)[:, 0].view(torch.bfloat16)
