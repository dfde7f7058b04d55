"""Attention for many queries: a few heads at a time are made dense for torch's attention.

The C++ kernels multiply in float32, and decode a page again for each block of queries. From a few
dozen query rows on, products dominate. torch's library computes them several times faster, and
in bfloat16 uses the CPU's matrix units if there are any.

K and V then have the model's dtype, as in the model's own attention. This is only used for 16-bit
models. In float32 it would be twice as fast, but the result of a query would depend on which
queries share its call. With the C++ kernels a sequence has the same codes and logits however it is
split into calls, which training through the cache relies on.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..pages import AttentionSpec, Pages
from ..visibility import find_first_visible

_Gather = Callable[[Pages, Tensor, str, int, int, torch.dtype, bool, slice], Tensor]

# Minimum number of query rows per KV head. On a Xeon (Sapphire Rapids) with 512 to 6,144 stored
# tokens, the break-even was between 24 and 96 rows.
MIN_QUERY_ROWS = 64
# Maximum size of the dense keys and values of a product, in bytes, unless one head is larger.
_MAX_DENSE_BYTES = 64 * 2**20
_HAS_BF16_PRODUCTS = torch.cpu._is_avx512_bf16_supported()


def is_faster(query: Tensor, pages: Pages, lengths: Tensor, stop: int, spec: AttentionSpec) -> bool:
    """Return whether `attend` supports the call and is faster than the C++ kernel."""
    num_rows = query.shape[2] * query.shape[1] // pages.num_heads
    is_supported = (
        spec.sinks is None
        and spec.mask is None
        and spec.bias is None
        and not spec.softcap
        and not spec.latent
        and spec.causal
        and not spec.deterministic
        and query.dtype in (torch.bfloat16, torch.float16)
    )
    return is_supported and num_rows >= MIN_QUERY_ROWS and int(lengths.max()) <= stop


def attend(
    query: Tensor, pages: Pages, lengths: Tensor, start: int, spec: AttentionSpec, gather: _Gather
) -> Tensor:
    """Compute softmax attention over positions from `start` on, `[B, T, Hq, Dv]`.

    `gather` is the "cpu" backend's operation.
    """
    batch, num_query_heads, num_tokens, _ = query.shape
    num_heads = pages.num_heads
    v_dim = pages.v.head_dim
    dtype = query.dtype
    if dtype != torch.bfloat16 or not _HAS_BF16_PRODUCTS:
        dtype = torch.float32  # other CPUs multiply 16-bit values far more slowly
    out = query.new_zeros((batch, num_tokens, num_query_heads, v_dim))
    for b in range(batch):
        length = int(lengths[b])
        # Queries before `start`, or before the start of their sequence, attend to nothing.
        num_queries = min(num_tokens, length - start)
        if num_queries <= 0:
            continue
        first_key = start
        if spec.window:
            first_key = max(start, find_first_visible(length - num_queries, spec.window))
        head_bytes = (length - first_key) * (pages.k.head_dim + v_dim) * dtype.itemsize
        max_heads = max(1, min(num_heads, _MAX_DENSE_BYTES // head_bytes))
        mask = _make_mask(num_queries, length - first_key, spec.window)
        group_size = num_query_heads // num_heads
        # A center adds the same value to all logits of a query, which cancels in the softmax.
        # Without it K has smaller rounding errors.
        sequence_pages = pages._replace(
            k=pages.k._replace(center=None), table=pages.table[b : b + 1]
        )
        for first_head in range(0, num_heads, max_heads):
            heads = slice(first_head, min(first_head + max_heads, num_heads))
            key, value = (
                gather(
                    sequence_pages, lengths[b : b + 1], side, first_key, length, dtype, False, heads
                )
                for side in "kv"
            )
            query_heads = slice(group_size * heads.start, group_size * heads.stop)
            output = scaled_dot_product_attention(
                query[b : b + 1, query_heads, -num_queries:].to(dtype),
                key,
                value,
                mask,
                is_causal=mask is None,
                scale=spec.scaling,
                enable_gqa=group_size > 1,
            )
            out[b, -num_queries:, query_heads] = output[0].transpose(0, 1).to(out.dtype)
    return out


def _make_mask(num_queries: int, num_keys: int, window: int) -> Tensor | None:
    """Return the mask of the last queries, `[num_queries, num_keys]`, or None if it is causal."""
    offset = num_keys - num_queries
    if not offset and (not window or window >= num_keys):
        return None
    mask = torch.ones((num_queries, num_keys), dtype=torch.bool, device="cpu").tril(offset)
    return mask.triu(offset - window + 1) if window else mask
