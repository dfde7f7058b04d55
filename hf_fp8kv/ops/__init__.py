"""The three operations on stored pages, and the choice of their backend.

Letters of axes in this package: `B` sequences, `T` new tokens, `N` tokens that attention
may read, `Hq` query heads, `Hkv` key/value heads, `Dk` and `Dv` head sizes, `P` pages, `S` slots of
a page, `M` pages of one sequence.

    write(pages, key, value, lengths)               center, scale, encode, scatter
    attend(query, pages, lengths, ..., spec)        softmax attention that reads the stored bytes
    gather(pages, lengths, side, start, stop, ...)  the dense K or V, decoded from the bytes

The value of a stored code (reference.py is the specification):

    dynamic scales   K[b, h, n, d] = code * token_scales[page, h, slot, 0] + k.center[b, h, d]
    static scales    K[b, h, n, d] = code * k.static_scale[h, d]           + k.center[b, h, d]
    "auto"           K[b, h, n, d] = the stored value

with page = table[b, n // S] and slot = n % S. V is stored in the same way, with
token_scales[..., 1] and no center.
"""

# This file only imports names: the folders `torch`, `cpu` and `triton` become attributes.
from .api import advance, attend, gather, make_plan, new_plan, write
from .backends import BACKENDS, CHOICES, choose_backend, explain_backends, load_backend
from .pages import AttentionSpec, Pages, StoredSide

__all__ = [
    "BACKENDS", "CHOICES", "AttentionSpec", "Pages", "StoredSide", "advance", "attend",
    "choose_backend", "explain_backends", "gather", "load_backend", "make_plan", "new_plan",
    "write",
]  # fmt: skip
