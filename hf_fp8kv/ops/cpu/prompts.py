"""Many queries at once: stored numbers made dense, a few heads at a time, for torch's attention.

The loops of this backend multiply in float32, and decode a page again for each block of queries.
From some dozens of query rows on, most of the time goes to products, which torch's library does
several times faster: in bfloat16 by the CPU's units for matrices, where it has them.

K and V are then in the model's dtype, as its own attention would have them. That is for models in
16 bits. In float32 this would be twice as fast, but the loops do the same for a query whichever
others it comes with: a text then has the same codes and logits however it is cut into calls, which
training through the cache relies on.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..pages import AttentionSpec, Pages

_Gather = Callable[[Pages, Tensor, str, int, int, torch.dtype, bool, slice], Tensor]

# Query rows of a KV head from which on this is faster: measured between 24 and 96 on a Xeon
# (Sapphire Rapids) from 512 to 6,144 stored tokens.
ROWS = 64
# Bytes of dense keys and values at a time, if a single head has no more.
_BYTES = 64 * 2**20
_MULTIPLIES_BF16 = torch.cpu._is_avx512_bf16_supported()


def is_faster(query: Tensor, pages: Pages, start: int, spec: AttentionSpec) -> bool:
    """Return whether `attend` does what is asked for, and sooner than the loops."""
    rows = query.shape[2] * query.shape[1] // pages.heads
    plain = (
        spec.sinks is None and spec.mask is None and spec.bias is None
        and not spec.softcap and not spec.latent and spec.causal and (spec.window or not start)
        and not spec.deterministic
    )  # fmt: skip
    return bool(plain) and rows >= ROWS and query.dtype in (torch.bfloat16, torch.float16)


def attend(
    query: Tensor, pages: Pages, lengths: Tensor, spec: AttentionSpec, gather: _Gather
) -> Tensor:
    """Return softmax attention of queries `[B, Hq, T, Dk]`, `[B, T, Hq, Dv]`.

    `gather` is the backend's own operation.
    """
    batch, q_heads, tokens, _ = query.shape
    heads, v_dim = pages.heads, pages.v.head_dim
    dtype = query.dtype
    if dtype != torch.bfloat16 or not _MULTIPLIES_BF16:
        dtype = torch.float32  # what such a CPU multiplies 16-bit numbers in takes far longer
    out = query.new_zeros((batch, tokens, q_heads, v_dim))
    for row in range(batch):
        length = int(lengths[row])
        # Queries before the start of their sequence see nothing.
        count = min(tokens, length)
        first = max(length - count - spec.window + 1, 0) if spec.window else 0
        if not count:
            continue
        size = (length - first) * (pages.k.head_dim + v_dim) * dtype.itemsize
        step = max(1, min(heads, _BYTES // size))
        visible = _mask(count, length - first, spec.window)
        group = q_heads // heads
        # A center adds the same to all logits of a query, which the softmax ignores; K is rounded
        # less without.
        k = pages.k._replace(center=None)
        part = pages._replace(k=k, table=pages.table[row : row + 1])
        for head in range(0, heads, step):
            some = slice(head, min(head + step, heads))
            key, value = (
                gather(part, lengths[row : row + 1], side, first, length, dtype, False, some)
                for side in "kv"
            )
            rows = slice(group * some.start, group * some.stop)
            found = scaled_dot_product_attention(
                query[row : row + 1, rows, tokens - count :].to(dtype), key, value, visible,
                is_causal=visible is None, scale=spec.scaling, enable_gqa=group > 1,
            )  # fmt: skip
            out[row, tokens - count :, rows] = found[0].transpose(0, 1).to(out.dtype)
    return out


def _mask(queries: int, keys: int, window: int) -> Tensor | None:
    """Return what the last `queries` of `keys` tokens see, or None: all up to their own."""
    if queries == keys and (not window or window >= keys):
        return None
    visible = torch.ones((queries, keys), dtype=torch.bool, device="cpu").tril(keys - queries)
    return visible.triu(keys - queries - window + 1) if window else visible
