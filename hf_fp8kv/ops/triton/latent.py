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
from .places import load_codes, load_scales
from .softmax import change_logits, find_visible, of_others, of_rows, weigh


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
def attend_latents(
    acc, m_i, l_i, query, j, page, table_ptr, h, q_position, exists, begin, end, start, window,
    tensors, mask_ptr, bias_ptr, softcap, SHAPE: tl.constexpr, FEATURES: tl.constexpr,
    K_CODEC: tl.constexpr, V_CODEC: tl.constexpr, TILE: tl.constexpr, SWAPPED: tl.constexpr,
    CHUNKS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return acc, m_i and l_i with tile `j` taken in. MASKED: some row does not see all of it.

    `query` is its latent part (split into CHUNKS), what products of that lack, and the same two of
    its positions. acc is `[ROWS, W]`, swapped `[W, ROWS]`, or split into CHUNKS.
    """
    ROWS: tl.constexpr = exists.shape[0]
    q, factor, q_positions, v_factor = query
    position = j * TILE + tl.arange(0, TILE)
    codes, position_codes, word_ptrs = load_codes(
        tensors, j, position, page, table_ptr, h, end, SHAPE, TILE
    )
    seen = None
    if MASKED:
        visible = find_visible(
            position, q_position, exists, begin, end, start, window, mask_ptr, FEATURES, SWAPPED
        )
        # Tokens that some row sees.
        seen = tl.max(visible.to(tl.int32), 1 if SWAPPED else 0) != 0
        codes = tl.where(tl.expand_dims(seen, 1), codes, tl.zeros_like(codes))
    latents = keep(decode_for_dot(codes, K_CODEC), K_CODEC)
    positions = keep(decode_for_dot(position_codes, V_CODEC), V_CODEC)
    if CHUNKS > 1:
        latents = split_chunks(latents, CHUNKS)
        products = tl.dot(q, tl.permute(latents, [0, 2, 1]), input_precision=FEATURES.precision)
        x = tl.sum(products, 0)
        y = tl.dot(q_positions, positions, input_precision=FEATURES.precision)
    elif SWAPPED:
        x = tl.dot(latents, tl.trans(q), input_precision=FEATURES.precision)
        y = tl.dot(
            tl.trans(positions), tl.trans(q_positions), input_precision=FEATURES.precision
        )  # fmt: skip
    else:
        x = tl.dot(q, tl.trans(latents), input_precision=FEATURES.precision)
        y = tl.dot(q_positions, positions, input_precision=FEATURES.precision)
    scale, position_scale = None, None
    if FEATURES.k_dynamic or FEATURES.v_dynamic:
        scale, position_scale = load_scales(word_ptrs)
    if FEATURES.k_dynamic:
        x *= of_others(scale, SWAPPED)
    if FEATURES.v_dynamic:
        y *= of_others(position_scale, SWAPPED)
    x = x * of_rows(factor, SWAPPED) + y * of_rows(v_factor, SWAPPED)
    x = change_logits(x, softcap, mask_ptr, bias_ptr, position, end, start, FEATURES, SWAPPED)
    if MASKED:
        x = tl.where(visible, x, float("-inf"))
    weights, alpha, m_i, l_i = weigh(x, m_i, l_i, scale, seen, FEATURES.k_dynamic, SWAPPED)
    weights = weights.to(K_CODEC.operand)
    if CHUNKS > 1:
        acc = acc * alpha[None, :, None]
        weights = tl.broadcast_to(weights[None], [CHUNKS, ROWS, TILE])
        acc = tl.dot(weights, latents, acc, input_precision=FEATURES.precision)
    elif SWAPPED:
        acc = acc * of_rows(alpha, SWAPPED)
        acc = tl.dot(tl.trans(latents), weights, acc, input_precision=FEATURES.precision)
    else:
        acc = acc * of_rows(alpha, SWAPPED)
        acc = tl.dot(weights, latents, acc, input_precision=FEATURES.precision)
    return acc, m_i, l_i
