"""Centers of K from a first call: the mean of each sequence's last tokens, without padding.

A cache is not told of padding: transformers asks it for the sizes of a mask, and passes these and
the mask of the text on to the mask function. So a cache that is about to freeze centers announces
that (`FirstTokens.ask`), and "fp8_paged" says which tokens are padding (`answer`). Other mask
functions do not: the last tokens are then taken as they are.
"""

import threading
from typing import NamedTuple

import torch

# The mean of few tokens serves as well as that of all (docs/accuracy.md), and costs nothing at a
# long prompt.
_TOKENS = 32


class _Told(NamedTuple):
    """Which tokens of a call centers are made of.

    Attributes:
        tokens: T, of the call.
        columns: `[B, n]`, int64, rising: each sequence's last tokens; below 0: there are no more.
        frozen: `[B]`, bool, sequences that had tokens before; None: none had, the cache was empty.
    """

    tokens: int
    columns: torch.Tensor
    frozen: torch.Tensor | None


class FirstTokens:
    """What the layers of a cache know of the first tokens of its sequences.

    Attributes:
        is_open: whether some sequence may have had nothing but padding. It then has no center yet.
        told: what the mask of this call says; None: nothing, or that there is no padding.
    """

    def __init__(self) -> None:
        self.is_open = True
        self.told: _Told | None = None

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
        columns = (column - start).where(present, -1).sort(1).values[:, -_TOKENS:]
        self.told = _Told(tokens, columns, frozen)

    def find_center(self, key: torch.Tensor) -> torch.Tensor:
        """Return the center `[B, Hkv, Dk]`, float32, of new keys `[B, Hkv, T, Dk]`.

        Numbers that are not finite are left out; 0 where nothing is left.
        """
        key, told = key.detach(), self.told
        if told is None or (told.tokens, len(told.columns)) != (key.shape[2], key.shape[0]):
            return _mean(key[:, :, -_TOKENS:].float())
        columns = told.columns.to(key.device)[:, None, :, None]
        picked = key.gather(2, columns.clamp(min=0).expand(-1, key.shape[1], -1, key.shape[3]))
        return _mean(picked.float().where(columns >= 0, torch.nan))

    def complete(self, center: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return `center` with those of sequences that had only padding until this call.

        What is stored of them is never looked at, so it does not matter what it now stands for.
        """
        if self.told is None or self.told.frozen is None:
            return center
        frozen = self.told.frozen.to(center.device)
        return center.where(frozen[:, None, None], self.find_center(key))

    def end_call(self) -> None:
        """Forget what the mask of a later call said, once all layers have their centers."""
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


def _mean(key: torch.Tensor) -> torch.Tensor:
    return key.where(key.isfinite(), torch.nan).nanmean(2).nan_to_num(0.0, 0.0, 0.0)
