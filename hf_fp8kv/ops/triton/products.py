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

from .softmax import of_rows


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
def multiply_keys(q, k, CALL: tl.constexpr):
    """Return the products of rows and keys `[TILE, W]`, `[ROWS, TILE]`, or swapped.

    Both rows and keys may be split into chunks.
    """
    if len(k.shape) == 3:
        x = tl.sum(tl.dot(q, tl.permute(k, [0, 2, 1]), input_precision=CALL.precision), 0)
    elif CALL.config.swapped:
        x = tl.dot(k, tl.trans(q), input_precision=CALL.precision)
    else:
        x = tl.dot(q, tl.trans(k), input_precision=CALL.precision)
    return x


@triton.jit
def add_values(acc, alpha, weights, values, CALL: tl.constexpr):
    """Return acc, faded by `alpha`, with the weighted values of a tile, `[TILE, W]`, added.

    Values may be split into chunks.
    """
    CHUNKS: tl.constexpr = CALL.config.chunks
    SWAPPED: tl.constexpr = CALL.config.swapped
    if CHUNKS > 1:
        acc = acc * alpha[None, :, None]
        weights = tl.broadcast_to(weights[None], [CHUNKS, weights.shape[0], weights.shape[1]])
    else:
        acc = acc * of_rows(alpha, SWAPPED)
        weights = weights.to(values.dtype)  # weights that are converted before make some spill
    if SWAPPED:
        return tl.dot(tl.trans(values), weights, acc, input_precision=CALL.precision)
    else:
        return tl.dot(weights, values, acc, input_precision=CALL.precision)
