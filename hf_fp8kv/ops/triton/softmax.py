"""Online softmax over tiles of tokens: visibility, what is added to logits, weights.

Logits are in powers of two, since `exp2` is the GPU's exponential. Weights are scaled to just under
2^14: they do not underflow in float16 where the result could show it.
"""

import triton
import triton.language as tl

# What a mask is (`Features.mask`).
NO_MASK = tl.constexpr(0)
COMPACT = tl.constexpr(1)  # [B, 1, 1, N] uint8: which tokens are padding; and `bounds`
COMPLETE = tl.constexpr(2)  # [B, 1, T, N] uint8

LOG2E = tl.constexpr(1.4426950408889634)
# Weights are up to 2 to this power: float16 then holds those down to 2^-38 of the largest.
HEADROOM = tl.constexpr(14.0)
# A vector V of zeros has the smallest scale there is. Below this one a scale does not lower the
# reference that weights are relative to, or their sum could overflow.
LEAST_SCALE = tl.constexpr(2.0**-40)
# Up to so many rows weights are summed over a tile's tokens once, after the last tile: a sum over
# warps costs three barriers.
SUMMED_LATE = tl.constexpr(16)


@triton.jit
def of_rows(x, SWAPPED: tl.constexpr):
    """Return `x`, `[ROWS]`, so that it broadcasts over a block of rows and something else."""
    return x[None, :] if SWAPPED else x[:, None]


@triton.jit
def of_others(x, SWAPPED: tl.constexpr):
    """Return `x`, `[TILE]` or `[out_width]`, so that it broadcasts over a block with rows."""
    return x[:, None] if SWAPPED else x[None, :]


@triton.jit
def last_before_window(q_position, window):
    """Return the last position that is too old for a query's sliding window."""
    return q_position - window


@triton.jit
def change_logits(x, softcap, view, position, CALL: tl.constexpr):
    """Return logits with softcap and bias; both are in powers of two."""
    SWAPPED: tl.constexpr = CALL.config.swapped
    if CALL.softcapped:
        # softcap * tanh(x / softcap), with tanh(y) = 1 - 2 / (exp(2 y) + 1)
        cap = softcap * LOG2E
        x = cap - 2 * cap / (tl.exp2(x * (2 / softcap)) + 1)
    if view.bias_ptr is not None:
        column = of_others(position - view.start, SWAPPED)
        within = of_others((position >= view.start) & (position < view.end), SWAPPED)
        ptrs = of_rows(view.bias_ptr, SWAPPED) + column
        bias = tl.load(ptrs, mask=within, other=0.0).to(tl.float32)
        # The lowest number of bfloat16 stays one, so that a row of it is a plain mean. It must come
        # from a maximum: a GPU fuses a product with the subtraction of the row's maximum, and then
        # does not round the product. The rounding error of such a number is far larger than any
        # logit.
        x += tl.where(bias == float("-inf"), bias, tl.maximum(bias * LOG2E, -2e38))
    return x


@triton.jit
def find_visible(position, rows, view, CALL: tl.constexpr):
    """Return whether each row sees each token of a tile, and whether any row does.

    The first is `[ROWS, TILE]`, or swapped, the second `[TILE]`.
    """
    SWAPPED: tl.constexpr = CALL.config.swapped
    seen = (position >= view.begin) & (position < view.end)
    if CALL.mask == COMPACT:
        seen &= tl.load(view.mask_ptr + (position - view.start), mask=seen, other=0) != 0
    visible = of_others(seen, SWAPPED) & of_rows(rows.exists, SWAPPED)
    if CALL.causal:
        visible &= of_others(position, SWAPPED) <= of_rows(rows.position, SWAPPED)
    if CALL.windowed:
        too_old = last_before_window(rows.position, view.window)
        visible &= of_others(position, SWAPPED) > of_rows(too_old, SWAPPED)
    if CALL.mask == COMPLETE:
        mask_ptrs = of_rows(view.mask_ptr, SWAPPED) + of_others(position - view.start, SWAPPED)
        visible &= tl.load(mask_ptrs, mask=visible, other=0) != 0
    return visible, tl.max(visible.to(tl.int32), 1 if SWAPPED else 0) != 0


@triton.jit
def weigh(x, m_i, l_i, v_scale, seen, DYNAMIC: tl.constexpr, SWAPPED: tl.constexpr):
    """Return a tile's weights, what older sums fade by, and the new m_i and l_i.

    With DYNAMIC scales of V, `v_scale`, `[TILE]`, weights are multiplied by them. `seen`: which
    tokens some row sees; None: all.
    """
    ROW_AXIS: tl.constexpr = 1 if SWAPPED else 0
    if DYNAMIC:
        if seen is not None:
            # What no row sees must not count even if it is NaN.
            v_scale = tl.where(seen, v_scale, 0.0)
        # log2 to within 0.09, by its bits: exponent, and the mantissa as a straight line. It only
        # sets the reference that weights are relative to.
        bits = tl.maximum(v_scale, LEAST_SCALE).to(tl.int32, bitcast=True)
        log2_scale = bits.to(tl.float32) * 2.0**-23 - 127.0
        m_new = tl.maximum(m_i, tl.max(x + of_others(log2_scale, SWAPPED), 1 - ROW_AXIS))
    else:
        m_new = tl.maximum(m_i, tl.max(x, 1 - ROW_AXIS))
    # A row that has seen nothing yet: -inf - -inf would be NaN.
    m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)
    weights = tl.exp2(x - of_rows(m_finite - HEADROOM, SWAPPED))
    alpha = tl.exp2(m_i - m_finite)
    if len(l_i.shape) > 1:
        l_i = l_i * of_rows(alpha, SWAPPED) + weights
    else:
        l_i = l_i * alpha + tl.sum(weights, 1 - ROW_AXIS)
    if DYNAMIC:
        weights *= of_others(v_scale, SWAPPED)
    return weights, alpha, m_new, l_i
