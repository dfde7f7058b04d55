"""The two matrix products of a tile: queries with keys, and weights with values.

With latents, K holds the latents and V their RoPE parts. Both are keys, with different scales and
formats, so each needs a separate product. The logit of a token is

    (latent part of the query . codes of K) * K's scale + (its RoPE part . codes of V) * V's scale

The weights are multiplied by the same codes of K, which are decoded once for both products. The
head size is large (512), so latents, their queries and their sums are in quarters of the channels.
A quarter is decoded and stored to shared memory before the next quarter needs registers.
"""

import triton
import triton.language as tl

from .softmax import per_row


@triton.jit
def multiply_keys(q, k, CALL: tl.constexpr):
    """Return the products of query rows and keys, `[ROWS, TILE]`, or `[TILE, ROWS]` if swapped."""
    if CALL.config.swapped:
        return tl.dot(k, tl.trans(q), input_precision=CALL.precision)
    else:
        return tl.dot(q, tl.trans(k), input_precision=CALL.precision)


@triton.jit
def multiply_latents(q, latents, factors, CALL: tl.constexpr):
    """Return `factors` times the sum of the products of four quarters, `[ROWS, TILE]`.

    Each product is multiplied separately. Otherwise Triton would accumulate the products, and
    compute products that depend on each other once for each group of four warps.
    """
    logits = multiply_keys(q[0], latents[0], CALL) * factors
    for i in tl.static_range(1, 4):
        logits += multiply_keys(q[i], latents[i], CALL) * factors
    return logits


@triton.jit
def add_values(acc, alpha, weights, values, CALL: tl.constexpr):
    """Return `acc * alpha` plus the product of weights and values, `[TILE, W]`."""
    acc = acc * per_row(alpha, CALL.config.swapped)
    weights = weights.to(values.dtype)  # converting them earlier causes spills
    if CALL.config.swapped:
        return tl.dot(tl.trans(values), weights, acc, input_precision=CALL.precision)
    else:
        return tl.dot(weights, values, acc, input_precision=CALL.precision)
