"""The tokens of a cache, and the length of the prefix that a new prompt shares with them.

A cache receives keys and values, but no token ids. `enable` passes the ids of a `generate()` call
to the cache (prefix/generate.py).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin


@dataclass(frozen=True, eq=False)
class Tokens:
    """A batch of tokens, as `generate()` passes it to a model.

    Attributes:
        ids: Token ids, `[B, N]`, int64.
        mask: Padding mask, `[B, M]` with M at most N, 0 for padding. Tokens from column M on are
            not padding. None means no padding.
        positions: Position ids, `[..., B or 1, M]`. Tokens from column M on have the positions
            after the last. None means the model's default positions.
    """

    ids: Tensor
    mask: Tensor | None = None
    positions: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of tokens per row."""
        return self.ids.shape[1]

    def crop(self, num_tokens: int) -> "Tokens":
        """Return the batch without its last `num_tokens` tokens."""
        length = max(self.length - num_tokens, 0)
        mask, positions = (
            None if part is None else part[..., :length] for part in (self.mask, self.positions)
        )
        return Tokens(self.ids[:, :length], mask, positions)

    def select(self, rows: Tensor) -> "Tokens":
        """Return rows `[B']` of the batch."""
        if not self.length:
            return self
        rows = rows.to(self.ids.device)
        positions = self.positions
        if positions is not None and positions.shape[-2] > 1:
            positions = positions.index_select(-2, rows)
        mask = None if self.mask is None else self.mask[rows]
        return Tokens(self.ids[rows], mask, positions)

    def expand(self, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return ids, mask, `[B, width]`, and positions, `[X, B, width]`. X is 0 without them."""
        ids = self.ids[:, :width].to(device)
        mask = torch.ones_like(ids, dtype=torch.bool)
        if self.mask is not None:
            given_mask = self.mask[:, :width].to(device)
            mask[:, : given_mask.shape[1]] = given_mask != 0
        if self.positions is None:
            return ids, mask, ids.new_empty((0, *ids.shape))
        given = self.positions[..., :width].to(device)
        offsets = torch.arange(1, width - given.shape[-1] + 1, device=device)
        positions = torch.cat([given, given[..., -1:] + offsets], -1)
        return ids, mask, positions.reshape(-1, *positions.shape[-2:]).expand(-1, len(ids), -1)

    def match(self, other: "Tokens") -> tuple[list[int], int]:
        """Return the best row for each row of `other`, and the prefix length that all pairs share.

        The best row has the longest shared prefix. Among several such rows, it is the row with
        the same index, or else the first of them. Tokens are shared if they have the same id and
        position, or are padding in both batches.
        """
        device, width = self.ids.device, min(self.length, other.length)
        expanded = [batch.expand(width, device) for batch in (self, other) if width]
        if not width or len(expanded[0][2]) != len(expanded[1][2]):
            return list(range(len(other.ids))), 0
        (ids, mask, positions), other_expanded = expanded
        shared_lengths = []
        for row in range(len(other.ids)):
            new_ids, new_mask, new_positions = (part[..., row, :] for part in other_expanded)
            is_same = (ids == new_ids) & (positions == new_positions[:, None]).all(0)
            is_same = torch.where(mask & new_mask, is_same, mask == new_mask)
            shared_lengths.append(is_same.long().cumprod(1).sum(1))
        lengths = torch.stack(shared_lengths).tolist()  # [row of `other`][row]
        best_lengths = [max(row) for row in lengths]
        rows = [
            index if index < len(row) and row[index] == best else row.index(best)
            for index, (row, best) in enumerate(zip(lengths, best_lengths, strict=True))
        ]
        return rows, min(best_lengths)


# The tokens of a cache while it changes, or after an exception interrupted a change.
UNKNOWN = Tokens(torch.empty((0, 0), dtype=torch.int64, device="cpu"))


def can_crop(layer: Any, num_tokens: int) -> bool:
    """Return whether a layer of transformers can remove its last `num_tokens` tokens."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return False  # such a layer only keeps the state after the last token
    if isinstance(layer, DynamicSlidingWindowLayer) and layer.is_initialized:
        length, window = layer.get_seq_length(), layer.sliding_window
        keys: Any = layer.keys
        has_window = keys.shape[-2] - num_tokens >= min(length - num_tokens, window - 1)
        return has_window and (length < window or layer.record_past)
    return bool(getattr(layer, "is_croppable", False))
