"""Arguments of the operations: one layer's stored keys and values, and how to attend to them."""

from functools import cached_property
from typing import Annotated, NamedTuple

from torch import Tensor

from ..formats import AUTO

# Marks a tensor that `write` changes. The schemas of flattening.py are made of these types.
WRITTEN = "written"


class StoredSide(NamedTuple):
    """The stored keys of one layer, or its stored values.

    Attributes:
        codes: uint8 codes, or numbers of the model's dtype when `format` is "auto". Keys are
            `[P, Hkv, S, Dk]`, values `[P, Hkv, Dv, S]`: transposed inside their page, which has no
            gaps. Between pages there may be other bytes, but not for "triton" without addresses.
        static_scale: `[Hkv, D]`, float32, or None.
        center: `[B, Hkv, Dk]`, float32: what was subtracted before storing, or None. Only keys
            have one.
        format: a name of `formats.FORMATS`, or "auto".
        head_dim: D, the size of a head.
        rotated: whether what is stored was rotated, after centering and before scaling, as
            `formats.rotation` says. Not in "auto".
    """

    codes: Annotated[Tensor, WRITTEN]
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
    token_scales: Annotated[Tensor | None, WRITTEN]
    table: Tensor
    addresses: Tensor | None = None


class Pages(_PageFields):
    """One layer's stored tokens, and the block table of its sequences.

    What is found out about its tensors may be kept in `vars` of a record: it is for these tensors,
    which stay where they are, and `_replace` makes another record.

    Attributes:
        k: the keys.
        v: the values.
        token_scales: `[P, Hkv, S, 2]`, bfloat16: the dynamic scales of K and V of each token and
            head, side by side: one 32-bit word, which a kernel loads at once. What a side without
            dynamic scales has there means nothing; where neither has any, this may be None.
        table: `[B, M]`, int32: the pages of each sequence, in order. A page that fell out of the
            window, or that is not needed yet, is a number below 0 and is never read.
        addresses: None: pages lie one after the other in `codes` and `token_scales`. Else `[P]`,
            int64: where in memory each page is, as blocks.py says; the tensors then are parts of
            the first block, and tell shapes and dtypes.
    """

    def __reduce__(self) -> tuple[object, ...]:
        # Copies have tensors of their own, of which nothing was found out.
        return type(self), tuple(self)

    def scales_of(self, side: str) -> Tensor | None:
        """Return the dynamic scales of "k" or "v", `[P, Hkv, S]`, a view; None: it has none."""
        stored = self.k if side == "k" else self.v
        if not stored.is_dynamic:
            return None
        assert self.token_scales is not None
        return self.token_scales[..., "kv".index(side)]

    @cached_property
    def heads(self) -> int:
        """KV heads."""
        return self.k.codes.shape[1]

    @property
    def page_size(self) -> int:
        """Slots per page, in tokens."""
        return self.k.codes.shape[2]


class AttentionSpec(NamedTuple):
    """Which attention is asked for; the columns of `mask` and `bias` are `start` to `stop - 1`.

    Attributes:
        scaling: what `q k` is multiplied by.
        causal: whether a query sees only positions up to its own.
        window: a query at position p sees `p - window + 1` to `p`; 0: no window.
        softcap: logits become `softcap * tanh(logits / softcap)`; 0: no softcap.
        sinks: `[Hq]`, one more logit per head that takes part in the sum and carries no value.
        mask: `[1 | B, 1, 1 | T, stop - start]` uint8 or bool, nonzero means visible; or floating,
            `[1 | B, 1 | Hq, 1 | T, stop - start]`, added to the logits; or None.
        bias: the same shapes as a floating mask, added to the logits; or None.
        bounds: `[1 | B, 2]`, int32: of a mask that is the same for all query tokens, the position
            of the first visible token and one past that of the last hidden one, as `mask_bounds`
            gives them; None: a backend that needs them finds them. Wrong ones give wrong results.
        latent: K holds latents and V the positions (RoPE) of the same tokens, of one KV head. Both
            are keys: a query is `[latent, positions]`, `[B, Hq, T, Dk + Dv]`. The values are the
            latents, and so is the result: `[B, T, Hq, Dk]`. K has no center then.
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
