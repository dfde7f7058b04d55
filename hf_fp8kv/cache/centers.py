"""Centers of K from a first call: the mean of each sequence's last tokens, without padding.

What RoPE turns away within some thousand positions is left out of it, see `Turns.steady`.

A cache is not given the padding. If a center depends on it, `FirstTokens` goes with the request for
the next mask (`modeling/step.py`), and "fp8_paged" passes the mask of the text to it. Other mask
functions do not. Under these the last tokens are taken as they are, unless `text_mask` is known.
"""

from dataclasses import dataclass

import torch

from .turns import Turns

# The mean of few tokens serves as well as that of all (docs/accuracy.md), and costs nothing at a
# long prompt.
_TOKENS = 32


@dataclass(frozen=True, eq=False)
class _Last:
    """The last tokens of each sequence in a call, on the device of a mask; made for all layers.

    Attributes:
        tokens: T, of the call.
        index: `[B, 1, n, 1]`, int64: their columns. A sequence of fewer tokens repeats one.
        weights: `[B, 1, n, 1]`, float32: their shares of the mean, 0 for repeated ones.
        frozen: `[B]`, bool, sequences that had tokens before; None: none had, the cache was empty.
    """

    tokens: int
    index: torch.Tensor
    weights: torch.Tensor
    frozen: torch.Tensor | None

    @classmethod
    def of(cls, tokens: int, columns: torch.Tensor, frozen: torch.Tensor | None) -> "_Last":
        """Return the largest of columns `[B, N]`, int64, of which those below 0 are padding."""
        columns = columns.sort(1).values[:, -_TOKENS:]
        present = columns >= 0
        weights = present / present.sum(1, keepdim=True).clamp(min=1)
        index = columns.where(present, columns[:, -1:]).clamp(min=0)
        return cls(tokens, index[:, None, :, None], weights[:, None, :, None], frozen)

    def mean(self, key: torch.Tensor) -> torch.Tensor:
        """Return the mean of these tokens of keys `[B, Hkv, T, Dk]`: `[B, Hkv, Dk]`, float32."""
        index, weights = (x.to(key.device) for x in (self.index, self.weights))
        picked = key.gather(2, index.expand(-1, key.shape[1], -1, key.shape[3]))
        return (picked * weights).sum(2)


class FirstTokens:
    """What the layers of a cache know of the first tokens of its sequences.

    Attributes:
        is_open: whether some sequence may have had nothing but padding. It then has no center yet.
        told: the last tokens by the mask of this call; None: no mask, or it has no padding.
        text_mask: `[B, at least T]`, of a first call, as `generate()` was given it; or None.
    """

    def __init__(self) -> None:
        self.is_open = True
        self.told: _Last | None = None
        self.text_mask: torch.Tensor | None = None

    def observes(self, tokens: int, is_empty: bool) -> bool:
        """Return whether a center depends on which of `tokens` new tokens are padding.

        It does not in steps of one token.
        """
        self.told = None
        self.is_open |= is_empty
        return is_empty or (self.is_open and tokens > 1)

    def take_padding(
        self, mask: torch.Tensor | None, start: int | torch.Tensor, tokens: int
    ) -> None:
        """Note the last tokens of each sequence in a call of `tokens` tokens after `start` others.

        `mask` is `[B, at least start + tokens]`, where False or 0 is padding, or None without any.
        In a preallocated cache `start` is a tensor `[]`.
        """
        if mask is None:
            self.is_open = False
            return
        column = torch.arange(mask.shape[1], device=mask.device)
        present = mask.bool() & (column >= start) & (column < start + tokens)
        is_first = isinstance(start, int) and start == 0
        frozen = None if is_first else (mask.bool() & (column < start)).any(1)
        # Reading values waits for a GPU: after the first call, until all sequences have begun.
        if frozen is not None and not torch.compiler.is_compiling() and frozen.all():
            self.is_open = False
            return
        self.told = _Last.of(tokens, (column - start).where(present, -1), frozen)

    def find_center(self, key: torch.Tensor, turns: Turns | None) -> torch.Tensor:
        """Return the center `[B, Hkv, Dk]`, float32, of new keys `[B, Hkv, T, Dk]`.

        A channel with a number that is not finite has the center 0. The first call of each
        generation runs this for each layer: at most 8 operations.
        """
        last = self._find_last(key)
        if last is None:
            center = key[:, :, -_TOKENS:].mean(2, dtype=torch.float32)
        else:
            center = last.mean(key)
        center = center.nan_to_num(0.0, 0.0, 0.0)
        return center if turns is None else turns.steady(center)

    def _find_last(self, key: torch.Tensor) -> _Last | None:
        """Return the last tokens of each sequence, or None where there is no padding."""
        size, mask = (key.shape[0], key.shape[2]), self.text_mask
        if self.told is None and mask is not None and mask.ndim == 2 and mask.shape[1] >= size[1]:
            self.take_padding(mask[:, : size[1]], 0, size[1])
        told = self.told
        return told if told is not None and (len(told.index), told.tokens) == size else None

    def complete(
        self, center: torch.Tensor, key: torch.Tensor, turns: Turns | None
    ) -> torch.Tensor:
        """Return `center` with those of sequences that had only padding until this call.

        What is stored of them is never looked at, so it does not matter what it now stands for. A
        mask may hide more than padding: a center of 0 says that there was nothing else.
        """
        last = self._find_last(key)
        if last is None or last.frozen is None:
            return center
        frozen = last.frozen.to(center.device)[:, None, None] | (center != 0).any((1, 2), True)
        return center.where(frozen, self.find_center(key, turns))

    def end_call(self) -> None:
        """Forget what is of no more use, once all layers so far have their centers."""
        self.text_mask = None
        if self.told is not None and self.told.frozen is not None:
            self.told = None
