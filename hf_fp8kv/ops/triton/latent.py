"""Tiles of latents, which are keys and values: decoded once, for both products.

K holds the latents, V their positions: keys, too, of another scale and format, with a product of
their own. So a token's logit is

    (latent part of the query . codes of K) * K's scale + (the rest . codes of V) * V's scale

and weights times the same codes of K are the values. A head is large (512), its rows are many (16
to 128 query heads), and a GPU of 100 KB has no room for a product's operands of that size. With
CHUNKS each warp has some of the channels to itself, in both products: of the query and the sums it
only holds those, and logits are added up over the warps.
"""

import triton
import triton.language as tl

from .codec import decode_for_dot, keep
from .softmax import of_others, of_rows


@triton.jit
def split_chunks(x, CHUNKS: tl.constexpr):
    """Return `x`, `[N, W]`, as `[CHUNKS, N, W / CHUNKS]`."""
    N: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[1]
    return tl.permute(tl.reshape(x, [N, CHUNKS, W // CHUNKS]), [1, 0, 2])


@triton.jit
def join_chunks(x):
    """Return what `split_chunks` made `x` of."""
    C: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    W: tl.constexpr = x.shape[2]
    return tl.reshape(tl.permute(x, [1, 0, 2]), [N, C * W])


@triton.jit
def multiply_latents(query, codes, position_codes, scale, position_scale, CALL: tl.constexpr):
    """Return the logits of a tile, and its latents (split into chunks).

    `query`: The latent part of the rows (split into chunks) and a factor of its products, and the
    same two of positions. `scale` and `position_scale`: `[TILE]`, or None if both are static. The
    logits are `[ROWS, TILE]`, or swapped.
    """
    FEATURES: tl.constexpr = CALL.features
    K_CODEC: tl.constexpr = CALL.k_codec
    V_CODEC: tl.constexpr = CALL.v_codec
    CHUNKS: tl.constexpr = CALL.config.chunks
    SWAPPED: tl.constexpr = CALL.config.swapped
    q, factor, q_positions, v_factor = query
    latents = keep(decode_for_dot(codes, K_CODEC), K_CODEC)
    positions = keep(decode_for_dot(position_codes, V_CODEC), V_CODEC)
    if CHUNKS > 1:
        latents = split_chunks(latents, CHUNKS)
        products = tl.dot(q, tl.permute(latents, [0, 2, 1]), input_precision=FEATURES.precision)
        x = tl.sum(products, 0)
    elif SWAPPED:
        x = tl.dot(latents, tl.trans(q), input_precision=FEATURES.precision)
    else:
        x = tl.dot(q, tl.trans(latents), input_precision=FEATURES.precision)
    if SWAPPED:
        y = tl.dot(tl.trans(positions), tl.trans(q_positions), input_precision=FEATURES.precision)
    else:
        y = tl.dot(q_positions, positions, input_precision=FEATURES.precision)
    if FEATURES.k_dynamic:
        x *= of_others(scale, SWAPPED)
    if FEATURES.v_dynamic:
        y *= of_others(position_scale, SWAPPED)
    return x * of_rows(factor, SWAPPED) + y * of_rows(v_factor, SWAPPED), latents


@triton.jit
def add_latents(acc, alpha, weights, latents, CALL: tl.constexpr):
    """Return acc, faded by `alpha`, with the weighted latents of a tile added."""
    CHUNKS: tl.constexpr = CALL.config.chunks
    SWAPPED: tl.constexpr = CALL.config.swapped
    K_CODEC: tl.constexpr = CALL.k_codec
    weights = weights.to(K_CODEC.operand)
    if CHUNKS > 1:
        acc = acc * alpha[None, :, None]
        weights = tl.broadcast_to(weights[None], [CHUNKS, weights.shape[0], weights.shape[1]])
    else:
        acc = acc * of_rows(alpha, SWAPPED)
    if SWAPPED:
        return tl.dot(tl.trans(latents), weights, acc, input_precision=CALL.features.precision)
    else:
        return tl.dot(weights, latents, acc, input_precision=CALL.features.precision)
