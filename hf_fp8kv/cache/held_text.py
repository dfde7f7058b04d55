"""The tokens of a cache, and how many of them a new prompt shares.

A cache receives keys and values, never token ids. `enable` passes the ids of a `generate` to the
cache (prefix/generate.py).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin


@dataclass(frozen=True, eq=False)
class Text:
    """Tokens as `generate` passes them to a model.

    Attributes:
        ids: Token ids, `[B, N]`, int64.
        mask: Padding mask, `[B, M]` with M at most N, 0 for padding. Tokens from M on are not
            padding. None means no padding.
        positions: Position ids, `[..., B or 1, M]`. Positions from M on continue after the last.
            None means the model's default.
    """

    ids: Tensor
    mask: Tensor | None = None
    positions: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of tokens per row."""
        return self.ids.shape[1]

    def crop(self, tokens: int) -> "Text":
        """Return the text without its last `tokens` tokens."""
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
        """Return ids and mask, `[B, width]`, and positions, `[X, B, width]`, where X may be 0."""
        ids = self.ids[:, :width].to(device)
        mask = torch.ones_like(ids, dtype=torch.bool)
        if self.mask is not None:
            part = self.mask[:, :width].to(device)
            mask[:, : part.shape[1]] = part != 0
        if self.positions is None:
            return ids, mask, ids.new_empty((0, *ids.shape))
        part = self.positions[..., :width].to(device)
        following = torch.arange(1, width - part.shape[-1] + 1, device=device)
        positions = torch.cat([part, part[..., -1:] + following], -1)
        return ids, mask, positions.reshape(-1, *positions.shape[-2:]).expand(-1, len(ids), -1)

    def match(self, other: "Text") -> tuple[list[int], int]:
        """Return the best row for each row of `other`, and the number of tokens all pairs share.

        The best row shares the most tokens. Among equal rows it is the row with the same index, or
        else the first. Tokens are shared if they have the same id and position, or are padding in
        both texts.
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
            index if index < len(row) and row[index] == best[index] else row.index(best[index])
            for index, row in enumerate(lengths)
        ]
        return rows, min(best)


# The text of a cache while it changes, or after an exception interrupted a change.
UNKNOWN = Text(torch.empty((0, 0), dtype=torch.int64, device="cpu"))


def can_crop(layer: Any, tokens: int) -> bool:
    """Return whether a layer of transformers can remove its last `tokens` tokens."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return False  # its only state belongs to the last token
    if isinstance(layer, DynamicSlidingWindowLayer) and layer.is_initialized:
        length, window = layer.get_seq_length(), layer.sliding_window
        keys: Any = layer.keys
        kept = keys.shape[-2] - tokens
        return kept >= min(length - tokens, window - 1) and (length < window or layer.record_past)
    return bool(getattr(layer, "is_croppable", False))
