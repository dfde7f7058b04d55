"""Centers of K from a first call: the mean of each sequence's last tokens, without padding.

What RoPE turns away within some thousand positions is left out of it, see `Turns.steady`.

A cache is not told of padding: transformers asks it for the sizes of a mask, and passes these and
the mask of the text on to the mask function. So a cache that is about to freeze centers announces
that (`FirstTokens.ask`), and "fp8_paged" says which tokens are padding (`answer`). Other mask
functions do not. Under these the last tokens are taken as they are, unless `text_mask` is known.
"""

import threading
from dataclasses import dataclass

import torch

from .turns import Turns

# The mean of few tokens serves as well as that of all (docs/accuracy.md), and costs nothing at a
# long prompt.
_TOKENS = 32


@dataclass(frozen=True, eq=False)
class _Last:
    """The last tokens of each sequence, on the device of a mask; made once for all layers.

    Attributes:
        index: `[B, 1, n, 1]`, int64: their columns. A sequence of fewer tokens repeats one.
        weights: `[B, 1, n, 1]`, float32: their shares of the mean, 0 for repeated ones.
    """

    index: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(cls, columns: torch.Tensor) -> "_Last":
        """Return the largest of columns `[B, T]`, int64, of which those below 0 are padding."""
        columns = columns.sort(1).values[:, -_TOKENS:]
        present = columns >= 0
        weights = present / present.sum(1, keepdim=True).clamp(min=1)
        index = columns.where(present, columns[:, -1:]).clamp(min=0)
        return cls(index[:, None, :, None], weights[:, None, :, None])

    def mean(self, key: torch.Tensor) -> torch.Tensor:
        """Return the mean of these tokens of keys `[B, Hkv, T, Dk]`: `[B, Hkv, Dk]`, float32."""
        index, weights = (x.to(key.device) for x in (self.index, self.weights))
        picked = key.gather(2, index.expand(-1, key.shape[1], -1, key.shape[3]))
        return (picked * weights).sum(2)


@dataclass(frozen=True, eq=False)
class _Told:
    """Which tokens of a call centers are made of.

    Attributes:
        tokens: T, of the call.
        last: each sequence's last tokens.
        frozen: `[B]`, bool, sequences that had tokens before; None: none had, the cache was empty.
    """

    tokens: int
    last: "_Last"
    frozen: torch.Tensor | None


class FirstTokens:
    """What the layers of a cache know of the first tokens of its sequences.

    Attributes:
        is_open: whether some sequence may have had nothing but padding. It then has no center yet.
        told: what the mask of this call says; None: nothing, or that there is no padding.
        text_mask: `[B, at least T]`, of a first call, as `generate()` was given it; or None.
    """

    def __init__(self) -> None:
        self.is_open = True
        self.told: _Told | None = None
        self.text_mask: torch.Tensor | None = None
        self._text_last: _Last | None = None

    def ask(self, tokens: int, *, is_empty: bool) -> None:
        """Have the next mask of this thread say which of `tokens` new tokens are padding.

        Only if a center depends on it, which is not so in steps of one token.
        """
        self.told = None
        self.is_open |= is_empty
        if is_empty or (self.is_open and tokens > 1):
            _asking.first_tokens = self

    def take(self, mask: torch.Tensor | None, start: int | torch.Tensor, tokens: int) -> None:
        """Note the last tokens of each sequence in a call.

        Args:
            mask: `[B, at least start + tokens]`, False or 0 is padding; None: there is none.
            start: tokens before the call; a tensor `[]` in a preallocated cache.
            tokens: of the call.
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
        self.told = _Told(tokens, _Last.of((column - start).where(present, -1)), frozen)

    def find_center(self, key: torch.Tensor, turns: Turns | None) -> torch.Tensor:
        """Return the center `[B, Hkv, Dk]`, float32, of new keys `[B, Hkv, T, Dk]`.

        A channel with a number that is not finite has the center 0. The first call of each
        generation runs this for each layer: at most 8 operations.
        """
        key = key.detach()
        last = self._find_last(key.shape[0], key.shape[2])
        if last is None:
            center = key[:, :, -_TOKENS:].mean(2, dtype=torch.float32)
        else:
            center = last.mean(key)
        center = center.nan_to_num(0.0, 0.0, 0.0)
        return center if turns is None else turns.steady(center)

    def _find_last(self, batch: int, tokens: int) -> _Last | None:
        """Return the last tokens of each sequence, or None where there is no padding."""
        told, mask = self.told, self.text_mask
        if told is not None:
            return told.last if (len(told.last.index), told.tokens) == (batch, tokens) else None
        if mask is None or mask.ndim != 2 or len(mask) != batch or mask.shape[1] < tokens:
            return None
        if self._text_last is None:
            column = torch.arange(tokens, device=mask.device)
            self._text_last = _Last.of(column.where(mask[:, :tokens].bool(), -1))
        return self._text_last

    def complete(
        self, center: torch.Tensor, key: torch.Tensor, turns: Turns | None
    ) -> torch.Tensor:
        """Return `center` with those of sequences that had only padding until this call.

        What is stored of them is never looked at, so it does not matter what it now stands for. A
        mask may hide more than padding: a center of 0 says that there was nothing else.
        """
        told, last = self.told, self._find_last(key.shape[0], key.shape[2])
        if told is None or told.frozen is None or last is None:
            return center
        frozen = told.frozen.to(center.device)[:, None, None] | (center != 0).any((1, 2), True)
        return center.where(frozen, self.find_center(key, turns))

    def end_call(self) -> None:
        """Forget what is of no more use, once all layers have their centers."""
        self.text_mask = self._text_last = None
        if self.told is not None and self.told.frozen is not None:
            self.told = None


# `first_tokens`: those of the cache that waits for the next mask of this thread.
_asking = threading.local()


def answer(mask: torch.Tensor | None, start: int | torch.Tensor, tokens: int) -> None:
    """Tell the cache that asked, if one did; arguments as of `FirstTokens.take`."""
    asker: FirstTokens | None = getattr(_asking, "first_tokens", None)
    if asker is not None:
        _asking.first_tokens = None
        asker.take(mask, start, tokens)
