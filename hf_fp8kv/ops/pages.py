"""Arguments of the operations: the stored keys and values of a layer, and the kind of attention."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formats import AUTO
from .page_layout import PageLayout, make_page_layout


class StoredSide(NamedTuple):
    """The storage of the keys, or of the values, of one layer.

    Attributes:
        static_scale: Static scale, `[Hkv, D]`, float32, or None.
        center: Center that was subtracted before storing, `[Hkv, Dk]`, float32, or None. Only keys
            have a center.
        format: Name in `formats.FORMATS`, or "auto".
        head_dim: Head size, D.
        rotated: Whether vectors are rotated (`formats.rotation`) after centering and before
            scaling. Always False for "auto".
    """

    static_scale: Tensor | None
    center: Tensor | None
    format: str
    head_dim: int
    rotated: bool = False

    @property
    def is_dynamic(self) -> bool:
        """Whether each token and head has its own scale, in `Pages.regions`."""
        return self.format != AUTO and self.static_scale is None


class _PageFields(NamedTuple):
    k: StoredSide
    v: StoredSide
    block: Tensor
    table: Tensor
    offsets: Tensor
    num_heads: int
    page_size: int
    k_dtype: torch.dtype
    v_dtype: torch.dtype
    has_scales: bool


class Pages(_PageFields):
    """The stored tokens of one layer, and the block table of its sequences.

    Attributes:
        k: Storage of the keys.
        v: Storage of the values.
        block: First block of pages, `[n, bytes]`, uint8, in the layout of `layout`. There may be
            other bytes between pages.
        table: Page numbers of each sequence, in order, `[B, M]`, int32. A page that has left the
            window, or is not needed yet, has a negative number and is never read.
        offsets: Distance of each page from the start of `block`, in bytes, `[P]`, int64. See
            `blocks.locate_pages`.
        num_heads: Number of KV heads.
        page_size: Slots (tokens) per page.
        k_dtype: Dtype of a stored value of K: the format's `code_dtype`, or a floating dtype for
            "auto".
        v_dtype: Dtype of a stored value of V.
        has_scales: Whether pages have room for dynamic scales.
        sizes: Cached sizes for `check_sizes`, or None. This and the next three attributes are not
            fields of the tuple, and `_replace` drops them.
        attributes: Cached fields under the names of `PagedKV`, or None.
        launch_properties: Cached properties for recorded launches (`triton.replay`), or None.
        record: The last decode step (`cache.layer_storage.DecodeRecord`), or None.
    """

    sizes: tuple[int, int, int, int, int, torch.device] | None = None
    attributes: dict[str, Any] | None = None
    launch_properties: Any = None
    record: Any = None

    def __reduce__(self) -> tuple[object, ...]:
        # A copy does not keep the cached attributes. A pool locates the blocks of a copy again.
        return type(self), tuple(self)

    @cached_property
    def layout(self) -> PageLayout:
        """The layout of a page."""
        return make_page_layout(
            self.num_heads,
            self.page_size,
            self.k.head_dim,
            self.v.head_dim,
            self.k_dtype,
            self.v_dtype,
            self.has_scales,
        )

    @cached_property
    def regions(self) -> dict[str, Tensor]:
        """Views of the first block by the names in `PageLayout`.

        "k" are codes of K, `[n, Hkv, S, Ck]`, and "v" codes of V, `[n, Hkv, Cv, S]`.
        "token_scales", `[n, Hkv, S, 2]`, bfloat16, exist only with dynamic scales. The scales of K
        and V of a token and head form one 32-bit word, which a kernel loads at once. If only one
        side has dynamic scales, half of the word is unused.
        """
        return self.layout.split(self.block)


class AttentionSpec(NamedTuple):
    """The attention to compute. Columns of `mask` and `bias` are positions `start` to `stop - 1`.

    Attributes:
        scaling: Factor of the products of queries and keys.
        causal: Whether a query only attends to positions up to its own.
        window: Size of the sliding window: a query at position p attends to `p - window + 1` to
            `p`. 0 means no window.
        softcap: Logits become `softcap * tanh(logits / softcap)`. 0 means no softcap.
        sinks: One extra logit per head that adds to the softmax's sum but has no value, `[Hq]`, or
            None.
        mask: Mask, `[1 | B, 1, 1 | T, stop - start]`, uint8 or bool, nonzero if visible, or None. A
            floating mask may have any shape of a bias and is added to the logits. Backends receive
            it as the bias.
        bias: Bias added to the logits, `[1 | B, 1 | Hq, 1 | T, stop - start]`, floating, or None.
        bounds: Result of `find_mask_bounds` for a mask that is the same for all query tokens,
            `[1 | B, 2]`, int32: the first visible position, and the last hidden position plus one.
            None means that a backend computes the bounds if it needs them. Wrong bounds give wrong
            results.
        latent: Whether K holds latents and V the RoPE parts of the same tokens, with one KV head.
            Keys are `[latent, RoPE part]`, and so are queries, `[B, Hq, T, Dk + Dv]`. Values are
            the latents, so the result is `[B, T, Hq, Dk]`. K then has no center.
        deterministic: Whether the result of a query must depend only on the tokens it attends to,
            not on other queries or sequences, nor (backend "cpu") on the number of threads. The
            call must be causal, and the mask must hide later tokens.
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


# Names of the values that `flatten` returns.
PAGE_FIELDS = (
    *[f"{side}_{name}" for side in "kv" for name in StoredSide._fields],
    *Pages._fields[2:],
)
_SIDE_SIZE = len(StoredSide._fields)


def flatten(pages: Pages) -> tuple[Any, ...]:
    """Return the fields of `pages.k`, the fields of `pages.v`, and the remaining fields."""
    return (*pages.k, *pages.v, *pages[2:])


def unflatten(flat_fields: Sequence[Any]) -> Pages:
    """Rebuild pages from the values of `flatten`."""
    k = StoredSide(*flat_fields[:_SIDE_SIZE])
    v = StoredSide(*flat_fields[_SIDE_SIZE : 2 * _SIDE_SIZE])
    return Pages(k, v, *flat_fields[2 * _SIDE_SIZE :])
