"""Operations on stored pages, their schedules, and the choice of their backend.

Letters of axes in this package: `B` sequences, `T` new tokens, `N` tokens that attention
may read, `Hq` query heads, `Hkv` key/value heads, `Dk` and `Dv` head sizes, `P` pages, `S` slots of
a page, `M` pages of one sequence.

    write(pages, key, value, lengths)               encode new tokens, and store them in their pages
    attend(query, pages, lengths, ..., spec)        compute attention from the stored bytes
    gather(pages, lengths, side, start, stop, ...)  decode the stored bytes to a dense K or V
    create_schedule, fill_schedule                  split sequences among the programs of a GPU
    advance(lengths, num_tokens, limit, backend)    compute the lengths for the next `write`

The value of a stored code (reference.py is the specification):

    dynamic scales   K[b, h, n, d] = code * token_scales[page, h, slot, 0] + k.center[h, d]
    static scales    K[b, h, n, d] = code * k.static_scale[h, d]           + k.center[h, d]
    "auto"           K[b, h, n, d] = the stored value

with page = table[b, n // S] and slot = n % S. V is stored in the same way, with
token_scales[..., 1] and no center.
"""

# Define nothing here that needs the library `torch`: the folder `torch` has the same name.
from .api import advance, attend, bind, create_schedule, fill_schedule, gather, write
from .backends import (
    BACKEND_CHOICES,
    BACKENDS,
    DEVICE_CHECK_BACKENDS,
    choose_backend,
    explain_backends,
    load_backend,
)
from .pages import AttentionSpec, Pages, StoredSide

__all__ = [
    "BACKENDS", "BACKEND_CHOICES", "DEVICE_CHECK_BACKENDS", "AttentionSpec", "Pages", "StoredSide",
    "advance", "attend", "bind", "choose_backend", "create_schedule", "explain_backends",
    "fill_schedule", "gather", "load_backend", "write",
]  # fmt: skip
