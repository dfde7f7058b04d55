"""Online softmax over tiles of tokens: visibility, softcap and bias, weights.

Logits are exponents of two, because `exp2` is the GPU's exponential. Weights are scaled to just
below 2^14, so that they do not underflow in float16 where the result could show it.
"""

import triton
import triton.language as tl

# Kinds of masks (`Constants.mask`).
NO_MASK = tl.constexpr(0)
COMPACT = tl.constexpr(1)  # [B, 1, 1, N] uint8, which marks padding, and `bounds`
COMPLETE = tl.constexpr(2)  # [B, 1, T, N] uint8

LOG2E = tl.constexpr(1.4426950408889634)
# The largest weight is 2 to this power. float16 then represents weights down to 2^-38 of it.
HEADROOM = tl.constexpr(14.0)
# A vector V of zeros has the smallest possible scale. A scale below this limit must not lower the
# reference of the weights further, or their sum could overflow.
MIN_LOG_SCALE = tl.constexpr(2.0**-40)
# Up to this number of rows, weights are summed over tokens once, after the last unmasked tile,
# because a sum over warps costs three barriers.
MAX_LATE_SUM_ROWS = tl.constexpr(16)


@triton.jit
def per_row(x, SWAPPED: tl.constexpr):
    """Return `x`, `[ROWS]`, with an axis added to broadcast over a block's tokens or channels."""
    return x[None, :] if SWAPPED else x[:, None]


@triton.jit
def per_column(x, SWAPPED: tl.constexpr):
    """Return `x`, `[TILE]` or `[out_width]`, with an axis added to broadcast over the rows."""
    return x[:, None] if SWAPPED else x[None, :]


@triton.jit
def find_last_before_window(q_position, window):
    """Return the last position before the sliding window of a query."""
    return q_position - window


@triton.jit
def apply_softcap_and_bias(x, softcap, view, position, CALL: tl.constexpr):
    """Apply softcap and bias to logits. Arguments and result are exponents of two."""
    SWAPPED: tl.constexpr = CALL.config.swapped
    if CALL.softcapped:
        # softcap * tanh(x / softcap), with tanh(y) = 1 - 2 / (exp(2 y) + 1)
        cap = softcap * LOG2E
        x = cap - 2 * cap / (tl.exp2(x * (2 / softcap)) + 1)
    if view.bias_ptr is not None:
        column = per_column(position - view.start, SWAPPED)
        in_range = per_column((position >= view.start) & (position < view.end), SWAPPED)
        ptrs = per_row(view.bias_ptr, SWAPPED) + column
        bias = tl.load(ptrs, mask=in_range, other=0.0).to(tl.float32)
        # A row in which every bias is bfloat16's lowest value must give a plain mean. The bias must
        # therefore come out of a maximum: otherwise a GPU fuses the product with the subtraction of
        # the row's maximum and does not round the product. The rounding error of such a value is
        # far larger than any logit.
        x += tl.where(bias == float("-inf"), bias, tl.maximum(bias * LOG2E, -2e38))
    return x


@triton.jit
def find_visible(position, rows, view, CALL: tl.constexpr):
    """Return whether each token of a tile is visible to each row, and to any row.

    The first result is `[ROWS, TILE]`, or `[TILE, ROWS]` if swapped. The second is `[TILE]`.
    """
    SWAPPED: tl.constexpr = CALL.config.swapped
    seen = (position >= view.begin) & (position < view.end)
    if CALL.mask == COMPACT:
        seen &= tl.load(view.mask_ptr + (position - view.start), mask=seen, other=0) != 0
    visible = per_column(seen, SWAPPED) & per_row(rows.exists, SWAPPED)
    if CALL.causal:
        visible &= per_column(position, SWAPPED) <= per_row(rows.position, SWAPPED)
    if CALL.windowed:
        last_hidden = find_last_before_window(rows.position, view.window)
        visible &= per_column(position, SWAPPED) > per_row(last_hidden, SWAPPED)
    if CALL.mask == COMPLETE:
        mask_ptrs = per_row(view.mask_ptr, SWAPPED) + per_column(position - view.start, SWAPPED)
        visible &= tl.load(mask_ptrs, mask=visible, other=0) != 0
    return visible, tl.max(visible.to(tl.int32), 1 if SWAPPED else 0) != 0


@triton.jit
def weigh(x, m_i, l_i, v_scale, seen, DYNAMIC: tl.constexpr, SWAPPED: tl.constexpr):
    """Return the weights of a tile, the factor of earlier sums, and the new m_i and l_i.

    If DYNAMIC, weights are multiplied by V's dynamic scales, `v_scale`, `[TILE]`. `seen` marks
    tokens that are visible to some row, `[TILE]`. None means all.
    """
    ROW_AXIS: tl.constexpr = 1 if SWAPPED else 0
    if DYNAMIC:
        if seen is not None:
            # Hidden tokens must not contribute, even if their scale is NaN.
            v_scale = tl.where(seen, v_scale, 0.0)
        # log2 within 0.09, from the bits: the exponent, and a linear approximation by the mantissa.
        # It only sets the reference of the weights.
        bits = tl.maximum(v_scale, MIN_LOG_SCALE).to(tl.int32, bitcast=True)
        log2_scale = bits.to(tl.float32) * 2.0**-23 - 127.0
        m_new = tl.maximum(m_i, tl.max(x + per_column(log2_scale, SWAPPED), 1 - ROW_AXIS))
    else:
        m_new = tl.maximum(m_i, tl.max(x, 1 - ROW_AXIS))
    # For a row without visible tokens so far, -inf - -inf would be NaN.
    m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)
    weights = tl.exp2(x - per_row(m_finite - HEADROOM, SWAPPED))
    alpha = tl.exp2(m_i - m_finite)
    if len(l_i.shape) > 1:
        l_i = l_i * per_row(alpha, SWAPPED) + weights
    else:
        l_i = l_i * alpha + tl.sum(weights, 1 - ROW_AXIS)
    if DYNAMIC:
        weights *= per_column(v_scale, SWAPPED)
    return weights, alpha, m_new, l_i
