"""Arguments of the operations: one layer's stored keys and values, and how to attend to them."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formats import AUTO
from .page_layout import PageLayout, page_layout


class StoredSide(NamedTuple):
    """How the keys of one layer are stored, or its values.

    Attributes:
        static_scale: `[Hkv, D]`, float32, or None.
        center: `[B, Hkv, Dk]`, float32: what was subtracted before storing, or None. Only keys
            have one.
        format: a name of `formats.FORMATS`, or "auto".
        head_dim: D, the size of a head.
        rotated: whether what is stored was rotated, after centering and before scaling, as
            `formats.rotation` says. Not in "auto".
    """

    static_scale: Tensor | None
    center: Tensor | None
    format: str
    head_dim: int
    rotated: bool = False

    @property
    def is_dynamic(self) -> bool:
        """Whether each token and head has a scale of its own, in `Pages.token_scales`."""
        return self.format != AUTO and self.static_scale is None


class _PageFields(NamedTuple):
    k: StoredSide
    v: StoredSide
    block: Tensor
    table: Tensor
    offsets: Tensor
    heads: int
    page_size: int
    k_dtype: torch.dtype
    v_dtype: torch.dtype
    has_scales: bool


class Pages(_PageFields):
    """One layer's stored tokens, and the block table of its sequences.

    Attributes:
        k: the keys.
        v: the values.
        block: `[n, bytes]`, uint8: the first block of pages, laid out as `layout` says. Between
            pages there may be other bytes.
        table: `[B, M]`, int32: the pages of each sequence, in order. A page that fell out of the
            window, or that is not needed yet, is a number below 0 and is never read.
        offsets: `[P]`, int64, how many bytes after the beginning of `block` each page is, see
            `blocks.locate_pages`.
        heads: KV heads.
        page_size: slots per page, in tokens.
        k_dtype: dtype of a stored number of K: uint8, or floating for "auto".
        v_dtype: dtype of a stored number of V.
        has_scales: whether pages have room for dynamic scales.
        sizes: what `check_sizes` compares with; None: not known yet. Like the next ones, it is not
            a part of the record, and `_replace` makes a record without.
        attributes: the fields by the names that a handle has for them.
        described: what recordings of launches have to know of the record.
    """

    sizes: tuple[int, int, int, int, int, torch.device] | None = None
    attributes: dict[str, Any] | None = None
    described: Any = None

    def __reduce__(self) -> tuple[object, ...]:
        # Nothing was found out about a copy's tensors. A pool finds the blocks of a copy anew.
        return type(self), tuple(self)

    @cached_property
    def layout(self) -> PageLayout:
        """Where the bytes of a page are."""
        return page_layout(
            self.heads, self.page_size, self.k.head_dim, self.v.head_dim, self.k_dtype,
            self.v_dtype, self.has_scales,
        )  # fmt: skip

    @cached_property
    def _parts(self) -> dict[str, Tensor]:
        return self.layout.split(self.block)

    @property
    def k_codes(self) -> Tensor:
        """Codes of K in the first block, `[n, Hkv, S, Dk]`, a view."""
        return self._parts["k"]

    @property
    def v_codes(self) -> Tensor:
        """Codes of V in the first block, `[n, Hkv, Dv, S]`, a view."""
        return self._parts["v"]

    @property
    def token_scales(self) -> Tensor | None:
        """Dynamic scales in the first block, `[n, Hkv, S, 2]`, bfloat16, a view, or None.

        Those of K and V of a token and head are side by side: one 32-bit word, which a kernel loads
        at once. The half of a side without dynamic scales is unused.
        """
        return self._parts.get("token_scales")


class AttentionSpec(NamedTuple):
    """Which attention is asked for; the columns of `mask` and `bias` are `start` to `stop - 1`.

    Attributes:
        scaling: what `q k` is multiplied by.
        causal: whether a query sees only positions up to its own.
        window: a query at position p sees `p - window + 1` to `p`; 0: no window.
        softcap: logits become `softcap * tanh(logits / softcap)`; 0: no softcap.
        sinks: `[Hq]`, one more logit per head that takes part in the sum and carries no value.
        mask: `[1 | B, 1, 1 | T, stop - start]` uint8 or bool, nonzero means visible; or None. A
            floating one of a bias's shapes is added to the logits. Backends get it as the bias.
        bias: `[1 | B, 1 | Hq, 1 | T, stop - start]`, floating, added to the logits; or None.
        bounds: `[1 | B, 2]`, int32: of a mask that is the same for all query tokens, the position
            of the first visible token and one past that of the last hidden one, as `mask_bounds`
            gives them; None: a backend that needs them finds them. Wrong ones give wrong results.
        latent: K holds latents and V the positions (RoPE) of the same tokens, of one KV head. Both
            are keys: a query is `[latent, positions]`, `[B, Hq, T, Dk + Dv]`. The values are the
            latents, and so is the result: `[B, T, Hq, Dk]`. K has no center then.
        deterministic: a query's result depends on what it sees, and on nothing else: not on other
            queries and sequences, and with the backend "cpu" not on the number of threads. The call
            is causal, and a mask shows no later token.
    """

    scaling: float
    causal: bool
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    mask: Tensor | None = None
    bias: Tensor | None = None
    bounds: Tensor | None = None
    latent: bool = False
    deterministic: bool = False


# Names of the fields that `flatten` returns.
PAGE_FIELDS = (
    *[f"{side}_{name}" for side in "kv" for name in StoredSide._fields], *Pages._fields[2:],
)  # fmt: skip
_SIDE = len(StoredSide._fields)


def flatten(pages: Pages) -> tuple[Any, ...]:
    """Return the fields of `pages.k`, of `pages.v`, and then the others."""
    others: tuple[Any, ...] = pages[2:]
    return (*pages.k, *pages.v, *others)


def unflatten(leaves: Sequence[Any]) -> Pages:
    """Return the pages that `flatten` took apart."""
    k, v = leaves[:_SIDE], leaves[_SIDE : 2 * _SIDE]
    return Pages(StoredSide(*k), StoredSide(*v), *leaves[2 * _SIDE :])
