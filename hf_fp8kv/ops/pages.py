"""What an operation needs to know of one layer's stored keys and values."""

from typing import NamedTuple

import torch

__all__ = ["Pages"]


class Pages(NamedTuple):
    """One layer's pools, the block table of its sequences, and the scales.

    Attributes:
        k: `[P, Hkv, S, Dk]`, uint8 codes, or the model's dtype when `k_format` is "auto".
        v: `[P, Hkv, Dv, S]`, the same for V: transposed inside its page.
        k_scales: `[P, Hkv, S]`, bfloat16: dynamic scales of K, one per token and head, or None.
        v_scales: `[P, Hkv, S]`, bfloat16: those of V, or None.
        k_scale: `[Hkv, Dk]`, float32: static scales of K, or None.
        v_scale: `[Hkv, Dv]`, float32: static scales of V, or None.
        k_center: `[B, Hkv, Dk]`, float32: what was subtracted from K before storing, or None.
        table: `[B, M]`, int32: the pages of each sequence, in order. A page that fell out of the
            window, or that is not needed yet, is a number below 0 and is never read.
        k_format: a name of `formats.FORMATS`, or "auto".
        v_format: the same for V.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor | None
    v_scales: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    k_center: torch.Tensor | None
    table: torch.Tensor
    k_format: str
    v_format: str

    @property
    def page_size(self) -> int:
        """Slots per page, in tokens."""
        return self.k.shape[2]
