"""The text that a cache holds, and what of it another text begins with.

A cache is given keys and values, never tokens: `enable` tells it those of a `generate`
(prefix/generate.py).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin


@dataclass(frozen=True, eq=False)
class Text:
    """Tokens as `generate` gives them to a model.

    Attributes:
        ids: `[B, N]`, int64.
        mask: `[B, M]`, M at most N, 0 where a token is padding; later ones are none. None: no
            token is.
        positions: `[..., B or 1, M]`; later ones count on from the last. None: the model's own.
    """

    ids: Tensor
    mask: Tensor | None = None
    positions: Tensor | None = None

    @property
    def length(self) -> int:
        """The tokens of each row."""
        return self.ids.shape[1]

    def crop(self, tokens: int) -> "Text":
        """Return the text without its last `tokens`."""
        kept = max(self.length - tokens, 0)
        mask, positions = (
            None if part is None else part[..., :kept] for part in (self.mask, self.positions)
        )
        return Text(self.ids[:, :kept], mask, positions)

    def select(self, rows: Tensor) -> "Text":
        """Return rows `[B']` of the text."""
        if not self.length:
            return self
        rows = rows.to(self.ids.device)
        positions = self.positions
        if positions is not None and positions.shape[-2] > 1:
            positions = positions.index_select(-2, rows)
        mask = None if self.mask is None else self.mask[rows]
        return Text(self.ids[rows], mask, positions)

    def columns(self, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return ids and mask, `[B, width]`, and positions, `[X, B, width]`; X may be 0."""
        ids = self.ids[:, :width].to(device)
        mask = torch.ones_like(ids, dtype=torch.bool)
        if self.mask is not None:
            known = self.mask[:, :width].to(device)
            mask[:, : known.shape[1]] = known != 0
        if self.positions is None:
            return ids, mask, ids.new_empty((0, *ids.shape))
        known = self.positions[..., :width].to(device)
        more = torch.arange(1, width - known.shape[-1] + 1, device=device)
        positions = torch.cat([known, known[..., -1:] + more], -1)
        return ids, mask, positions.reshape(-1, *positions.shape[-2:]).expand(-1, len(ids), -1)

    def match(self, other: "Text") -> tuple[list[int], int]:
        """Return which row each row of `other` goes on best, and how many tokens all share.

        Of equally good ones that is its own, or else the first. Tokens are shared if they have the
        same id and position; padding, if it is padding in both.
        """
        device, width = self.ids.device, min(self.length, other.length)
        columns = [text.columns(width, device) for text in (self, other) if width]
        if not width or len(columns[0][2]) != len(columns[1][2]):
            return list(range(len(other.ids))), 0
        (ids, mask, positions), of_other = columns
        shared = []
        for row in range(len(other.ids)):
            new_ids, new_mask, new_positions = (part[..., row, :] for part in of_other)
            same = (ids == new_ids) & (positions == new_positions[:, None]).all(0)
            same = torch.where(mask & new_mask, same, mask == new_mask)
            shared.append(same.long().cumprod(1).sum(1))
        lengths = torch.stack(shared).tolist()  # [row of `other`][row]
        best = [max(row) for row in lengths]
        rows = [
            at if at < len(row) and row[at] == best[at] else row.index(best[at])
            for at, row in enumerate(lengths)
        ]
        return rows, min(best)


# The text of a cache that is changing, or was when an exception ended the change.
UNKNOWN = Text(torch.empty((0, 0), dtype=torch.int64, device="cpu"))


def can_crop(layer: Any, tokens: int) -> bool:
    """Return whether one of transformers' own layers can remove its last `tokens` tokens."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return False  # its state is that of the last token
    if isinstance(layer, DynamicSlidingWindowLayer) and layer.is_initialized:
        length, window = layer.get_seq_length(), layer.sliding_window
        keys: Any = layer.keys
        held = keys.shape[-2] - tokens
        return held >= min(length - tokens, window - 1) and (length < window or layer.record_past)
    return bool(getattr(layer, "is_croppable", False))
