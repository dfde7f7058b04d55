"""Attention of many query tokens over stored pages: prefill in chunks, prefixes, forks.

A program takes a block of query rows of one KV head (its query heads times some query tokens), and
reads all that these may see. Where that makes fewer programs than the GPU has processors (a short
chunk after a long prefix), sequences are split as for decoding.
"""

import torch
import triton
import triton.language as tl

from ..pages import AttentionSpec, Pages
from .arguments import prepare
from .attention import attend_rows, finish
from .decode import split_kv_decode
from .softmax import of_others, of_rows
from .target import cdiv, launch
from .tuning import extend_config

# Tokens: fewer are not split.
SPLIT_FROM = 256


def attend(
    query: torch.Tensor,
    pages: Pages,
    lengths: torch.Tensor,
    start: int,
    stop: int,
    spec: AttentionSpec,
) -> torch.Tensor:
    """Return what `backend.attend` does, of any number of query rows."""
    args = prepare(query, pages, lengths, start, stop, spec)
    config = extend_config(args.target, args.workload)
    batch, q_heads, tokens, _ = query.shape
    programs = args.shape.heads * batch * cdiv(args.rows, config.rows)
    if programs < args.target.processors and stop > SPLIT_FROM:
        return split_kv_decode(args, config, None)
    out = query.new_empty((batch, tokens, q_heads, args.shape.out_dim))
    launch(
        _extend, (programs,), args.tensors, out, batch, tokens, start, stop, args.window,
        args.factors, args.query_strides, *args.strides, **args.constants, **config.constants(),
    )  # fmt: skip
    return out


@triton.jit(
    do_not_specialize=[
        "batch", "tokens", "start", "stop", "window", "table_b", "mask_b", "mask_h", "mask_t",
        "bias_b", "bias_h", "bias_t",
    ]
)  # fmt: skip
def _extend(
    tensors, out_ptr, batch, tokens, start, stop, window, factors, query_strides,
    table_b, mask_b, mask_h, mask_t, bias_b, bias_h, bias_t,
    SHAPE: tl.constexpr, FEATURES: tl.constexpr, K_CODEC: tl.constexpr, V_CODEC: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, MASKED_TILE: tl.constexpr, STAGES: tl.constexpr,
    SWAPPED: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Write the attention of all query rows.

    The grid is one axis, since others end at 65535: KV heads (fastest), sequences, and blocks of
    query rows, the last first.

    Args:
        out_ptr: `[B, T, Hq, out_dim]`, of the query's dtype.

    The others are those of `_decode`.
    """
    count = SHAPE.groups * tokens
    h = tl.program_id(0) % SHAPE.heads
    b = tl.program_id(0) // SHAPE.heads % batch
    # The last rows see the most: they start first.
    block = tl.cdiv(count, ROWS) - 1 - tl.program_id(0) // SHAPE.heads // batch
    length = tl.load(tensors.lengths + b)
    rows = block * ROWS + tl.arange(0, ROWS)
    exists = rows < count
    row = tl.minimum(rows, count - 1)
    t = row // SHAPE.groups
    head = h * SHAPE.groups + row % SHAPE.groups
    first_t = block * ROWS // SHAPE.groups
    last_t = (tl.minimum(block * ROWS + ROWS, count) - 1) // SHAPE.groups
    acc, m_i, l_i = attend_rows(
        tensors, factors, b, h, head, t, exists, length, tokens, 0, tl.minimum(length, stop),
        first_t, last_t, start, window, query_strides, table_b, (mask_b, mask_h, mask_t),
        (bias_b, bias_h, bias_t), SHAPE, FEATURES, K_CODEC, V_CODEC, ROWS, TILE, MASKED_TILE,
        STAGES, SWAPPED, CHUNKS,
    )  # fmt: skip
    scale = tensors.k.static_scale if FEATURES.latent else tensors.v.static_scale
    out = finish(acc, m_i, l_i, tensors.sinks, scale, h, head, factors.out, SHAPE, SWAPPED)
    d = tl.arange(0, SHAPE.out_width)
    offset = ((b * tokens + t) * (SHAPE.heads * SHAPE.groups) + head).to(tl.int64) * SHAPE.out_dim
    real = of_rows(exists, SWAPPED) & of_others(d < SHAPE.out_dim, SWAPPED)
    out_ptrs = out_ptr + of_rows(offset, SWAPPED) + of_others(d, SWAPPED)
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=real)
