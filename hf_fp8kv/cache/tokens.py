"""The tokens of a cache, and the length of the prefix that a new prompt shares with them.

A cache receives keys and values, but not their token ids. `enable` passes the ids of a `generate()`
call to the cache (prefix/generate.py).
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
        features: Digests of the features of images and other inputs, `[B, M]`, int64, 0 for tokens
            without features and from column M on. None means that no token has features.
    """

    ids: Tensor
    mask: Tensor | None = None
    positions: Tensor | None = None
    features: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of tokens per row."""
        return self.ids.shape[1]

    def crop(self, num_tokens: int) -> "Tokens":
        """Return the batch without its last `num_tokens` tokens."""
        if not self.length:
            return self  # may be `UNKNOWN`
        stop = max(self.length - num_tokens, 0)
        mask, positions, features = (
            tensor if tensor is None else tensor[..., :stop]
            for tensor in (self.mask, self.positions, self.features)
        )
        return Tokens(self.ids[..., :stop], mask, positions, features)

    def select(self, rows: Tensor) -> "Tokens":
        """Return rows `[B']` of the batch."""
        if not self.length:
            return self  # may be `UNKNOWN`
        rows = rows.to(self.ids.device)
        positions = self.positions
        if positions is not None and positions.shape[-2] > 1:
            positions = positions.index_select(-2, rows)
        mask, features = (
            tensor if tensor is None else tensor[rows] for tensor in (self.mask, self.features)
        )
        return Tokens(self.ids[rows], mask, positions, features)

    def expand(self, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the fields of the first `width` tokens with their full sizes, on `device`.

        These are the ids `[B, N]`, whether a token is not padding `[B, N]`, the positions
        `[X, B, N]`, X = 0 for the model's default positions, and the features `[B, N]`.
        """
        ids = self.ids[:, :width].to(device)
        mask = torch.ones_like(ids, dtype=torch.bool)
        features = torch.zeros_like(ids)
        for target, source in ((mask, self.mask), (features, self.features)):
            if source is not None:
                # A number other than 0 is True in a mask.
                target[:, : source.shape[1]] = source[:, :width].to(device)
        positions = ids.new_empty((0, *ids.shape))
        if self.positions is not None:
            known = self.positions[..., :width].to(device)
            known = extend_positions(known.reshape(-1, *known.shape[-2:]), width)
            positions = known.expand(-1, len(ids), -1)
        return ids, mask, positions, features

    def match(self, prompt: "Tokens") -> tuple[list[int], int]:
        """Return the best row for each row of `prompt`, and the length of the shortest prefix.

        The best row has the longest prefix in common with the row of `prompt`. Among several such
        rows, it is the row with the same index, otherwise the first of these rows. Tokens are equal
        if they have the same id, position and features, or are padding in both batches.
        """
        width = min(self.length, prompt.length)
        expanded = [batch.expand(width, self.ids.device) for batch in (self, prompt) if width]
        if not width or len(expanded[0][2]) != len(expanded[1][2]):  # numbers of position ids
            return [row if row < len(self.ids) else 0 for row in range(len(prompt.ids))], 0
        (ids, mask, positions, features), expanded_prompt = expanded
        prefix_lengths = []
        for row in range(len(prompt.ids)):
            prompt_ids, prompt_mask, prompt_positions, prompt_features = (
                tensor[..., row, :] for tensor in expanded_prompt
            )
            is_same_token = (ids == prompt_ids) & (features == prompt_features)
            is_same_token &= (positions == prompt_positions[:, None]).all(0)
            is_equal = torch.where(mask & prompt_mask, is_same_token, mask == prompt_mask)
            prefix_lengths.append(is_equal.long().cumprod(1).sum(1))
        row_lengths = torch.stack(prefix_lengths).tolist()  # [row of `prompt`][row]
        best_lengths = [max(lengths) for lengths in row_lengths]
        best_rows = [
            row if row < len(lengths) and lengths[row] == longest else lengths.index(longest)
            for row, (lengths, longest) in enumerate(zip(row_lengths, best_lengths, strict=True))
        ]
        return best_rows, min(best_lengths)

    def find_boundary(self, num_tokens: int) -> int:
        """Return the largest number of tokens up to `num_tokens` that does not divide an image.

        The features of neighboring tokens depend on each other, and some models let all tokens of
        an image attend to each other.
        """
        if self.features is None:
            return num_tokens
        has_features = (self.features[:, : num_tokens + 1] != 0).cpu()
        is_inside = (has_features[:, :-1] & has_features[:, 1:]).any(0).tolist()
        while num_tokens and num_tokens <= len(is_inside) and is_inside[num_tokens - 1]:
            num_tokens -= 1
        return num_tokens


def extend_positions(positions: Tensor, width: int) -> Tensor:
    """Return positions `[..., width]`, which continue after the last of `positions`."""
    offsets = torch.arange(1, width - positions.shape[-1] + 1, device=positions.device)
    return torch.cat([positions, positions[..., -1:] + offsets], -1)


# The tokens of a cache while it changes, or after an exception interrupted a change.
UNKNOWN = Tokens(torch.empty((0, 0), dtype=torch.int64, device="cpu"))


def can_crop(layer: Any, num_tokens: int) -> bool:
    """Return whether a layer of transformers can remove its last `num_tokens` tokens."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return False  # such a layer only keeps the state after the last token
    if isinstance(layer, DynamicSlidingWindowLayer) and layer.is_initialized:
        length = layer.get_seq_length()
        window = layer.sliding_window
        keys: Any = layer.keys
        keeps_window = keys.shape[-2] - num_tokens >= min(length - num_tokens, window - 1)
        return keeps_window and (length < window or layer.record_past)
    return bool(getattr(layer, "is_croppable", False))
