"""Tokens that a layer has taken, and that the attention of the same step will store."""

import torch

from .. import ops
from ..ops import Pages


class PendingWrite:
    """New tokens of one layer that have pages, but are not in them yet.

    The kernel that attends to them stores them first, which saves a launch; whoever else looks at
    the pages, or changes which page is whose, calls `store` before.

    Attributes:
        key: `[B, Hkv, T, Dk]`, of any floating dtype.
        value: `[B, Hkv, T, Dv]`.
        is_done: whether they are stored, or not wanted any more.
    """

    def __init__(
        self,
        pages: Pages,
        key: torch.Tensor,
        value: torch.Tensor,
        lengths: torch.Tensor,
        backend: str,
    ) -> None:
        self._pages, self._lengths, self._backend = pages, lengths, backend
        self.key, self.value = key, value
        self.is_done = False

    def waits_for(self, tokens: int) -> bool:
        """Return whether an attention of so many queries has to store them; it sets `is_done`.

        Where these are not the tokens, they are stored here.
        """
        if not self.is_done and tokens != self.key.shape[2]:
            self.store()
        return not self.is_done

    def store(self) -> None:
        """Store them, unless that is done."""
        if not self.is_done:
            ops.write(self._pages, self.key, self.value, self._lengths, self._backend)
            self.finish()

    def finish(self) -> None:
        """Free the pages and the tokens: the model may keep the handle of a layer for long."""
        self.is_done = True
        for name in ("_pages", "key", "value"):
            vars(self).pop(name, None)
