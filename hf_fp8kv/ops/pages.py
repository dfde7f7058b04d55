"""Arguments of the operations: one layer's stored keys and values, and how to attend to them."""

from typing import Annotated, NamedTuple

from torch import Tensor

# Marks a tensor that `write` changes. The schemas of flattening.py are made of these types.
WRITTEN = "written"


class StoredSide(NamedTuple):
    """The stored keys of one layer, or its stored values.

    Attributes:
        codes: uint8 codes, or numbers of the model's dtype when `format` is "auto". Keys are
            `[P, Hkv, S, Dk]`, values `[P, Hkv, Dv, S]`: transposed inside their page.
        token_scales: `[P, Hkv, S]`, bfloat16: dynamic scales, one per token and head, or None.
        static_scale: `[Hkv, D]`, float32, or None.
        center: `[B, Hkv, Dk]`, float32: what was subtracted before storing, or None. Only keys
            have one.
        format: a name of `formats.FORMATS`, or "auto".
        head_dim: D, the size of a head.
    """

    codes: Annotated[Tensor, WRITTEN]
    token_scales: Annotated[Tensor | None, WRITTEN]
    static_scale: Tensor | None
    center: Tensor | None
    format: str
    head_dim: int


class Pages(NamedTuple):
    """One layer's stored tokens, and the block table of its sequences.

    Attributes:
        k: the keys.
        v: the values.
        table: `[B, M]`, int32: the pages of each sequence, in order. A page that fell out of the
            window, or that is not needed yet, is a number below 0 and is never read.
    """

    k: StoredSide
    v: StoredSide
    table: Tensor

    @property
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
        mask: `[B, 1, 1 | T, stop - start]` uint8 or bool, nonzero means visible; or floating,
            `[1 | B, 1 | Hq, 1 | T, stop - start]`, added to the logits; or None.
        bias: the same shapes as a floating mask, added to the logits; or None.
    """

    scaling: float
    causal: bool
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    mask: Tensor | None = None
    bias: Tensor | None = None
