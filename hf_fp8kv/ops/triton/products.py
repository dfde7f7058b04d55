"""Products of a tile with queries and weights, including latents, which are keys and values.

With latents, K holds the latents and V their positional parts. Both are keys, with different scales
and formats, so each needs a separate product. The logit of a token is

    (latent part of the query . codes of K) * K's scale + (the rest . codes of V) * V's scale

The weights are multiplied by the same codes of K, which are decoded once for both products. A head
is large (512) and has many rows (16 to 128 query heads). GPUs with 100 KB of shared memory have no
room for operands of that size. With CHUNKS, each warp handles some of the channels in both
products. It only holds these channels of the query and the sums, and logits are summed over the
warps.
"""

import triton
import triton.language as tl

from .softmax import per_row


@triton.jit
def split_chunks(x, CHUNKS: tl.constexpr):
    """Return `x`, `[N, W]`, as `[CHUNKS, N, W / CHUNKS]`."""
    N: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[1]
    return tl.permute(tl.reshape(x, [N, CHUNKS, W // CHUNKS]), [1, 0, 2])


@triton.jit
def join_chunks(x):
    """Undo `split_chunks`."""
    C: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    W: tl.constexpr = x.shape[2]
    return tl.reshape(tl.permute(x, [1, 0, 2]), [N, C * W])


@triton.jit
def multiply_keys(q, k, CALL: tl.constexpr):
    """Multiply rows and keys, `[TILE, W]` or in chunks, to `[ROWS, TILE]`, or swapped."""
    if len(k.shape) == 3:
        x = tl.sum(tl.dot(q, tl.permute(k, [0, 2, 1]), input_precision=CALL.precision), 0)
    elif CALL.config.swapped:
        x = tl.dot(k, tl.trans(q), input_precision=CALL.precision)
    else:
        x = tl.dot(q, tl.trans(k), input_precision=CALL.precision)
    return x


@triton.jit
def add_values(acc, alpha, weights, values, CALL: tl.constexpr):
    """Return acc times `alpha` plus a tile's weighted values, `[TILE, W]` or in chunks."""
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
