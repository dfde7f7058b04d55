"""The two matrix products of a tile: queries with keys, and weights with values.

With latents, K holds the latents and V their RoPE parts. Both are keys, with different scales and
formats, so each needs a separate product. The logit of a token is

    (latent part of the query . codes of K) * K's scale + (its RoPE part . codes of V) * V's scale

The weights are multiplied by the same codes of K, which are decoded once for both products. The
head size is large (512), and one KV head has many rows (16 to 128 query heads). Operands of that
size do not fit in 100 KB of shared memory. With CHUNKS, each warp handles a chunk of the channels
in both products. It only holds this chunk of the query and of the accumulator, and logits are
summed over the warps.
"""

import triton
import triton.language as tl

from .softmax import per_row


@triton.jit
def split_chunks(tile, CHUNKS: tl.constexpr):
    """Return a tile, `[N, W]`, as `[CHUNKS, N, W / CHUNKS]`."""
    N: tl.constexpr = tile.shape[0]
    W: tl.constexpr = tile.shape[1]
    return tl.permute(tl.reshape(tile, [N, CHUNKS, W // CHUNKS]), [1, 0, 2])


@triton.jit
def join_chunks(tile):
    """Return chunks, `[CHUNKS, N, W / CHUNKS]`, as `[N, W]`."""
    C: tl.constexpr = tile.shape[0]
    N: tl.constexpr = tile.shape[1]
    W: tl.constexpr = tile.shape[2]
    return tl.reshape(tl.permute(tile, [1, 0, 2]), [N, C * W])


@triton.jit
def multiply_keys(q, k, CALL: tl.constexpr):
    """Return the products of query rows and keys, `[ROWS, TILE]`, or `[TILE, ROWS]` if swapped."""
    if len(k.shape) == 3:
        logits = tl.sum(tl.dot(q, tl.permute(k, [0, 2, 1]), input_precision=CALL.precision), 0)
    elif CALL.config.swapped:
        logits = tl.dot(k, tl.trans(q), input_precision=CALL.precision)
    else:
        logits = tl.dot(q, tl.trans(k), input_precision=CALL.precision)
    return logits


@triton.jit
def add_values(acc, alpha, weights, values, CALL: tl.constexpr):
    """Return `acc * alpha` plus the product of weights and values, `[TILE, W]` or in chunks."""
    CHUNKS: tl.constexpr = CALL.config.chunks
    SWAPPED: tl.constexpr = CALL.config.swapped
    if CHUNKS > 1:
        acc = acc * alpha[None, :, None]
        weights = tl.broadcast_to(weights[None], [CHUNKS, weights.shape[0], weights.shape[1]])
    else:
        acc = acc * per_row(alpha, SWAPPED)
        weights = weights.to(values.dtype)  # converting them earlier causes spills
    if SWAPPED:
        return tl.dot(tl.trans(values), weights, acc, input_precision=CALL.precision)
    else:
        return tl.dot(weights, values, acc, input_precision=CALL.precision)
