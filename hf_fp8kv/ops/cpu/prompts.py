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

_Gather = Callable[[Pages, Tensor, str, int, int, torch.dtype, bool, slice], Tensor]

# Minimum number of query rows per KV head. On a Xeon (Sapphire Rapids) with 512 to 6,144 stored
# tokens, the break-even was between 24 and 96 rows.
ROWS = 64
# Maximum size of dense keys and values at a time, in bytes, unless a single head is larger.
_BYTES = 64 * 2**20
_MULTIPLIES_BF16 = torch.cpu._is_avx512_bf16_supported()


def is_faster(query: Tensor, pages: Pages, start: int, spec: AttentionSpec) -> bool:
    """Return whether `attend` supports the call and is faster than the C++ kernel."""
    rows = query.shape[2] * query.shape[1] // pages.heads
    is_supported = (
        spec.sinks is None and spec.mask is None and spec.bias is None
        and not spec.softcap and not spec.latent and spec.causal and (spec.window or not start)
        and not spec.deterministic
    )  # fmt: skip
    return bool(is_supported) and rows >= ROWS and query.dtype in (torch.bfloat16, torch.float16)


def attend(
    query: Tensor, pages: Pages, lengths: Tensor, spec: AttentionSpec, gather: _Gather
) -> Tensor:
    """Compute softmax attention, `[B, T, Hq, Dv]`. `gather` is this backend's operation."""
    batch, q_heads, tokens, _ = query.shape
    heads, v_dim = pages.heads, pages.v.head_dim
    dtype = query.dtype
    if dtype != torch.bfloat16 or not _MULTIPLIES_BF16:
        dtype = torch.float32  # other CPUs multiply 16-bit values far more slowly
    out = query.new_zeros((batch, tokens, q_heads, v_dim))
    for row in range(batch):
        length = int(lengths[row])
        # Queries before the start of their sequence attend to nothing.
        count = min(tokens, length)
        first = max(length - count - spec.window + 1, 0) if spec.window else 0
        if not count:
            continue
        size = (length - first) * (pages.k.head_dim + v_dim) * dtype.itemsize
        step = max(1, min(heads, _BYTES // size))
        visible = _mask(count, length - first, spec.window)
        group = q_heads // heads
        # A center adds the same value to all logits of a query, which cancels in the softmax.
        # Without it K has smaller rounding errors.
        k = pages.k._replace(center=None)
        row_pages = pages._replace(k=k, table=pages.table[row : row + 1])
        for head in range(0, heads, step):
            part = slice(head, min(head + step, heads))
            key, value = (
                gather(row_pages, lengths[row : row + 1], side, first, length, dtype, False, part)
                for side in "kv"
            )
            rows = slice(group * part.start, group * part.stop)
            output = scaled_dot_product_attention(
                query[row : row + 1, rows, tokens - count :].to(dtype), key, value, visible,
                is_causal=visible is None, scale=spec.scaling, enable_gqa=group > 1,
            )  # fmt: skip
            out[row, tokens - count :, rows] = output[0].transpose(0, 1).to(out.dtype)
    return out


def _mask(queries: int, keys: int, window: int) -> Tensor | None:
    """Return the mask of the last `queries` of `keys` tokens, or None if it is simply causal."""
    if queries == keys and (not window or window >= keys):
        return None
    visible = torch.ones((queries, keys), dtype=torch.bool, device="cpu").tril(keys - queries)
    return visible.triu(keys - queries - window + 1) if window else visible
