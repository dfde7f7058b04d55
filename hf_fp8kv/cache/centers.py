"""Centers of K from the first call: the mean of each sequence's last tokens, without padding.

`RopeRotation.average` attenuates channels that RoPE rotates within a few thousand positions.

A cache does not receive the padding mask. If a center depends on padding, the cache attaches a
`PaddingObserver` to its next mask request (`modeling/step.py`), and "fp8_paged" passes the padding
mask to it. With other mask functions, padding counts as tokens, unless `prompt_mask` is set.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .rope_rotation import RopeRotation

# Averaging all tokens costs more and is not better (docs/accuracy.md).
_NUM_AVERAGED_TOKENS = 32


@dataclass(frozen=True, eq=False)
class _LastTokens:
    """The last tokens of each sequence in a call, shared by all layers, on the device of the mask.

    Attributes:
        num_tokens: Number of tokens of the call, T.
        columns: Columns of the last tokens, `[B, 1, n, 1]`, int64. A sequence with fewer than n
            tokens repeats one of them.
        weights: Weights in the mean, `[B, 1, n, 1]`, float32, 0 for repeated tokens.
        had_tokens: Whether each sequence had tokens before the call, `[B]`, bool. None if the cache
            was empty.
    """

    num_tokens: int
    columns: Tensor
    weights: Tensor
    had_tokens: Tensor | None

    @classmethod
    def select(cls, num_tokens: int, columns: Tensor, had_tokens: Tensor | None) -> "_LastTokens":
        """Select the largest of `columns`, `[B, N]`, int64, in which padding is negative."""
        columns = columns.sort(1).values[:, -_NUM_AVERAGED_TOKENS:]
        is_token = columns >= 0
        weights = is_token / is_token.sum(1, keepdim=True).clamp(min=1)
        columns = columns.where(is_token, columns[:, -1:]).clamp(min=0)
        return cls(num_tokens, columns[:, None, :, None], weights[:, None, :, None], had_tokens)

    def average(self, key: Tensor) -> Tensor:
        """Return the mean of these tokens in keys `[B, Hkv, T, Dk]`, as `[B, Hkv, Dk]`, float32."""
        columns, weights = (x.to(key.device) for x in (self.columns, self.weights))
        last_keys = key.gather(2, columns.expand(-1, key.shape[1], -1, key.shape[3]))
        return (last_keys * weights).sum(2)


class PaddingObserver:
    """Observer of the padding at the start of a cache's sequences, shared by the layers.

    Attributes:
        may_lack_centers: Whether a sequence may still consist of padding, and thus have no center.
        last_tokens: The last tokens according to the mask of this call, or None if there was no
            mask or no padding.
        prompt_mask: Mask that `generate()` received for a first call, `[B, N]`, N >= T, or None.
    """

    def __init__(self) -> None:
        self.may_lack_centers = True
        self.last_tokens: _LastTokens | None = None
        self.prompt_mask: Tensor | None = None

    def begin_call(self, num_tokens: int, is_empty: bool) -> bool:
        """Begin a call. Return whether a center depends on padding. One token is never padding."""
        self.last_tokens = None
        self.may_lack_centers |= is_empty
        return is_empty or (self.may_lack_centers and num_tokens > 1)

    def record_padding(self, mask: Tensor | None, start: int | Tensor, num_tokens: int) -> None:
        """Record the last tokens of each sequence in a call of `num_tokens` tokens.

        Args:
            mask: Padding mask, `[B, N]` with N >= start + num_tokens, False or 0 for padding. None
                means no padding.
            start: Number of tokens before the call. A tensor `[]` in a preallocated cache.
            num_tokens: Number of tokens of the call.
        """
        if mask is None:
            self.may_lack_centers = False
            return
        columns = torch.arange(mask.shape[1], device=mask.device)
        is_token = mask.bool() & (columns >= start) & (columns < start + num_tokens)
        is_first = isinstance(start, int) and start == 0
        had_tokens = None if is_first else (mask.bool() & (columns < start)).any(1)
        # Reading values synchronizes with a GPU, but only until all sequences have tokens.
        if had_tokens is not None and not torch.compiler.is_compiling() and had_tokens.all():
            self.may_lack_centers = False
            return
        columns = (columns - start).where(is_token, -1)
        self.last_tokens = _LastTokens.select(num_tokens, columns, had_tokens)

    def compute_center(self, key: Tensor, rope: RopeRotation | None) -> Tensor:
        """Return the center of new keys `[B, Hkv, T, Dk]`, as `[B, Hkv, Dk]`, float32.

        Channels with non-finite values have a center of 0. This runs once per layer in the first
        call of each generation, so it uses few operations.
        """
        last_tokens = self._find_last_tokens(key)
        if last_tokens is None:
            center = key[:, :, -_NUM_AVERAGED_TOKENS:].mean(2, dtype=torch.float32)
        else:
            center = last_tokens.average(key)
        center = center.nan_to_num(0.0, 0.0, 0.0)
        return center if rope is None else rope.average(center)

    def _find_last_tokens(self, key: Tensor) -> _LastTokens | None:
        """Return the last tokens of each sequence, or None without padding."""
        batch, num_tokens, mask = key.shape[0], key.shape[2], self.prompt_mask
        if mask is not None and (mask.ndim != 2 or mask.shape[1] < num_tokens):
            mask = None  # not a padding mask of this call
        if self.last_tokens is None and mask is not None:
            self.record_padding(mask[:, :num_tokens], 0, num_tokens)
        last_tokens = self.last_tokens
        sizes = last_tokens and (len(last_tokens.columns), last_tokens.num_tokens)
        return last_tokens if sizes == (batch, num_tokens) else None

    def complete_center(self, center: Tensor, key: Tensor, rope: RopeRotation | None) -> Tensor:
        """Return `center` with new centers of sequences that had only padding before this call.

        Stored padding is never read, so the new center need not match it. A mask may also hide
        tokens, so only sequences whose center is 0 are treated as padding.
        """
        last_tokens = self._find_last_tokens(key)
        if last_tokens is None or last_tokens.had_tokens is None:
            return center
        had_tokens = last_tokens.had_tokens.to(center.device)[:, None, None]
        has_center = had_tokens | (center != 0).any((1, 2), True)
        return center.where(has_center, self.compute_center(key, rope))

    def end_call(self) -> None:
        """Drop the data that is needed only until all layers have computed their centers."""
        self.prompt_mask = None
        if self.last_tokens is not None and self.last_tokens.had_tokens is not None:
            self.last_tokens = None
