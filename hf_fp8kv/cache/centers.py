"""Centers of K from the first call: the mean of each sequence's last tokens, without padding.

`RopeRotation.average` removes channels that RoPE rotates within some thousand positions.

A cache does not receive the padding. If a center depends on it, the request for the next mask
(`modeling/step.py`) contains `FirstTokens`, and "fp8_paged" passes the padding mask to it. Other
mask functions do not. With these, padding counts as tokens unless `text_mask` is known.
"""

from dataclasses import dataclass

import torch

from .rope_rotation import RopeRotation

# The mean of few tokens is as good as the mean of all (docs/accuracy.md), and cheaper.
_TOKENS = 32


@dataclass(frozen=True, eq=False)
class _LastTokens:
    """The last tokens of each sequence in a call, shared by all layers, on the device of the mask.

    Attributes:
        tokens: Number of tokens of the call, T.
        index: Columns of the last tokens, `[B, 1, n, 1]`, int64. A sequence with fewer tokens
            repeats one.
        weights: Weights in the mean, `[B, 1, n, 1]`, float32, 0 for repeated tokens.
        frozen: Which sequences had tokens before the call, `[B]`, bool. None if the cache was
            empty.
    """

    tokens: int
    index: torch.Tensor
    weights: torch.Tensor
    frozen: torch.Tensor | None

    @classmethod
    def of(cls, tokens: int, columns: torch.Tensor, frozen: torch.Tensor | None) -> "_LastTokens":
        """Select the largest columns from `[B, N]`, int64, in which padding is negative."""
        columns = columns.sort(1).values[:, -_TOKENS:]
        present = columns >= 0
        weights = present / present.sum(1, keepdim=True).clamp(min=1)
        index = columns.where(present, columns[:, -1:]).clamp(min=0)
        return cls(tokens, index[:, None, :, None], weights[:, None, :, None], frozen)

    def mean(self, key: torch.Tensor) -> torch.Tensor:
        """Return the mean of these tokens in keys `[B, Hkv, T, Dk]`, as `[B, Hkv, Dk]`, float32."""
        index, weights = (x.to(key.device) for x in (self.index, self.weights))
        picked = key.gather(2, index.expand(-1, key.shape[1], -1, key.shape[3]))
        return (picked * weights).sum(2)


class FirstTokens:
    """Padding at the start of a cache's sequences, shared by its layers.

    Attributes:
        is_open: Whether some sequence may so far have only padding, and thus no center.
        observed: The last tokens according to the mask of this call, or None without a mask or
            padding.
        text_mask: Mask that `generate()` received for a first call, `[B, at least T]`, or None.
    """

    def __init__(self) -> None:
        self.is_open = True
        self.observed: _LastTokens | None = None
        self.text_mask: torch.Tensor | None = None

    def observes(self, tokens: int, is_empty: bool) -> bool:
        """Return whether a center depends on padding among new tokens. One token has none."""
        self.observed = None
        self.is_open |= is_empty
        return is_empty or (self.is_open and tokens > 1)

    def take_padding(
        self, mask: torch.Tensor | None, start: int | torch.Tensor, tokens: int
    ) -> None:
        """Record the last tokens of each sequence in a call of `tokens` tokens.

        Args:
            mask: Padding mask, `[B, at least start + tokens]`, False or 0 for padding, or None
                without padding.
            start: Number of tokens before the call. A tensor `[]` in a preallocated cache.
            tokens: Number of tokens of the call.
        """
        if mask is None:
            self.is_open = False
            return
        column = torch.arange(mask.shape[1], device=mask.device)
        present = mask.bool() & (column >= start) & (column < start + tokens)
        is_first = isinstance(start, int) and start == 0
        frozen = None if is_first else (mask.bool() & (column < start)).any(1)
        # Reading values synchronizes with a GPU, but only until all sequences have begun.
        if frozen is not None and not torch.compiler.is_compiling() and frozen.all():
            self.is_open = False
            return
        self.observed = _LastTokens.of(tokens, (column - start).where(present, -1), frozen)

    def find_center(self, key: torch.Tensor, rope: RopeRotation | None) -> torch.Tensor:
        """Return the center of new keys `[B, Hkv, T, Dk]`, as `[B, Hkv, Dk]`, float32.

        The center is 0 in a channel with a value that is not finite. The first call of each
        generation runs this for each layer, with at most 8 operations.
        """
        last = self._find_last(key)
        if last is None:
            center = key[:, :, -_TOKENS:].mean(2, dtype=torch.float32)
        else:
            center = last.mean(key)
        center = center.nan_to_num(0.0, 0.0, 0.0)
        return center if rope is None else rope.average(center)

    def _find_last(self, key: torch.Tensor) -> _LastTokens | None:
        """Return the last tokens of each sequence, or None without padding."""
        size, mask = (key.shape[0], key.shape[2]), self.text_mask
        if (
            self.observed is None
            and mask is not None
            and mask.ndim == 2
            and mask.shape[1] >= size[1]
        ):
            self.take_padding(mask[:, : size[1]], 0, size[1])
        observed = self.observed
        return observed if observed and (len(observed.index), observed.tokens) == size else None

    def complete(
        self, center: torch.Tensor, key: torch.Tensor, rope: RopeRotation | None
    ) -> torch.Tensor:
        """Return `center`, completed for sequences that only had padding before this call.

        Stored padding is never read, so the new center need not fit it. A mask may hide more than
        padding, so a sequence also needs a center of 0 to count as padding only.
        """
        last = self._find_last(key)
        if last is None or last.frozen is None:
            return center
        frozen = last.frozen.to(center.device)[:, None, None] | (center != 0).any((1, 2), True)
        return center.where(frozen, self.find_center(key, rope))

    def end_call(self) -> None:
        """Drop data that is no longer needed when all layers have their centers."""
        self.text_mask = None
        if self.observed is not None and self.observed.frozen is not None:
            self.observed = None
