"""Centers of K from a first call: the mean of each sequence's last tokens, without padding.

What RoPE turns away within some thousand positions is left out of it, see `Turns.steady`.

A cache is not told of padding: transformers asks it for the sizes of a mask, and passes these and
the mask of the text on to the mask function. So a cache that is about to freeze centers announces
that (`FirstTokens.ask`), and "fp8_paged" says which tokens are padding (`answer`). Other mask
functions do not. Under these the last tokens are taken as they are, unless `text_mask` is known.
"""

import threading
from dataclasses import dataclass
from functools import cached_property

import torch

from .turns import Turns

# The mean of few tokens serves as well as that of all (docs/accuracy.md), and costs nothing at a
# long prompt.
_TOKENS = 32


@dataclass(frozen=True, eq=False)
class _Told:
    """Which tokens of a call centers are made of.

    Attributes:
        tokens: T, of the call.
        present: `[B, T]`, bool: which are no padding.
        columns: `[B, n]`, int64, rising: each sequence's last tokens; below 0: there are no more.
        frozen: `[B]`, bool, sequences that had tokens before; None: none had, the cache was empty.
    """

    tokens: int
    present: torch.Tensor
    columns: torch.Tensor
    frozen: torch.Tensor | None

    @cached_property
    def longest(self) -> tuple[int, torch.Tensor]:
        """The sequence with the most tokens, and these, `[n]`, int64: once for all layers."""
        return _longest(self.present)


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
        columns = _last((column - start).where(present, -1))
        self.told = _Told(tokens, present[:, start : start + tokens], columns, frozen)

    def find_center(self, key: torch.Tensor, turns: Turns | None) -> torch.Tensor:
        """Return the center `[B, Hkv, Dk]`, float32, of new keys `[B, Hkv, T, Dk]`.

        Numbers that are not finite are left out; 0 where nothing is left.
        """
        key, columns = key.detach(), self._find_columns(key.shape[0], key.shape[2])
        if columns is None:
            picked = key[:, :, -_TOKENS:].float()
        else:
            columns = columns.to(key.device)[:, None, :, None]
            picked = key.gather(2, columns.clamp(min=0).expand(-1, key.shape[1], -1, key.shape[3]))
            picked = picked.float().where(columns >= 0, torch.nan)
        center = picked.where(picked.isfinite(), torch.nan).nanmean(2).nan_to_num(0.0, 0.0, 0.0)
        return center if turns is None else turns.steady(center)

    def _find_columns(self, batch: int, tokens: int) -> torch.Tensor | None:
        """Return the last tokens of each sequence as `_Told.columns`, or None if not known."""
        if self.told is not None:
            fits = (len(self.told.columns), self.told.tokens) == (batch, tokens)
            return self.told.columns if fits else None
        mask = self.text_mask
        if mask is None or mask.ndim != 2 or len(mask) != batch or mask.shape[1] < tokens:
            return None
        column = torch.arange(tokens, device=mask.device)
        return _last(column.where(mask[:, :tokens].bool(), -1))

    def find_longest(self, batch: int, tokens: int) -> tuple[int, torch.Tensor | None]:
        """Return the sequence with the most tokens in a first call, and these, `[n]`, int64.

        None instead of them: all, as far as is known.
        """
        told, mask = self.told, self.text_mask
        if told is not None and tuple(told.present.shape) == (batch, tokens):
            return told.longest
        if mask is not None and mask.ndim == 2 and len(mask) == batch and mask.shape[1] >= tokens:
            return _longest(mask[:, :tokens].bool())
        return 0, None

    def complete(
        self, center: torch.Tensor, key: torch.Tensor, turns: Turns | None
    ) -> torch.Tensor:
        """Return `center` with those of sequences that had only padding until this call.

        What is stored of them is never looked at, so it does not matter what it now stands for. A
        mask may hide more than padding: a center of 0 says that there was nothing else.
        """
        told, found = self.told, self._find_columns(key.shape[0], key.shape[2])
        if told is None or told.frozen is None or found is None:
            return center
        frozen = told.frozen.to(center.device)[:, None, None] | (center != 0).any((1, 2), True)
        return center.where(frozen, self.find_center(key, turns))

    def end_call(self) -> None:
        """Forget what is of no more use, once all layers have their centers."""
        self.text_mask = None
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


def _longest(present: torch.Tensor) -> tuple[int, torch.Tensor]:
    row = int(present.sum(1).argmax())  # it waits for a GPU, and so does the next line
    return row, present[row].nonzero()[:, 0]


def _last(columns: torch.Tensor) -> torch.Tensor:
    return columns.sort(1).values[:, -_TOKENS:]
