"""The text that a cache holds, and what of it another text begins with.

A cache is given keys and values, never tokens: `enable` tells it those of a `generate`
(prefix/generate.py).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from ..errors import ConfigError, FP8KVError
from .layer import FP8PagedLayer
from .options import CacheOptions
from .paged_layers import PagedLayers


@dataclass(frozen=True, eq=False)
class Text:
    """Tokens as `generate` gives them to a model.

    Attributes:
        ids: `[B, N]`, int64.
        mask: `[B, M]`, M at most N, 0 where a token is padding; later ones are none. None: no
            token is.
        positions: `[..., B or 1, M]`; later ones count on from the last. None: the model's own.
    """

    ids: Tensor
    mask: Tensor | None = None
    positions: Tensor | None = None

    @property
    def length(self) -> int:
        """The tokens of each row."""
        return self.ids.shape[1]

    def crop(self, tokens: int) -> "Text":
        """Return the text without its last `tokens`."""
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
        """Return ids and mask, `[B, width]`, and positions, `[X, B, width]`; X may be 0."""
        ids = self.ids[:, :width].to(device)
        mask = torch.ones_like(ids, dtype=torch.bool)
        if self.mask is not None:
            known = self.mask[:, :width].to(device)
            mask[:, : known.shape[1]] = known != 0
        if self.positions is None:
            return ids, mask, ids.new_empty((0, *ids.shape))
        known = self.positions[..., :width].to(device)
        more = torch.arange(1, width - known.shape[-1] + 1, device=device)
        positions = torch.cat([known, known[..., -1:] + more], -1)
        return ids, mask, positions.reshape(-1, *positions.shape[-2:]).expand(-1, len(ids), -1)

    def match(self, other: "Text") -> tuple[list[int], int]:
        """Return which row each row of `other` goes on best, and how many tokens all share.

        Of equally good ones that is its own, or else the first. Tokens are shared if they have the
        same id and position; padding, if it is padding in both.
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
            at if at < len(row) and row[at] == best[at] else row.index(best[at])
            for at, row in enumerate(lengths)
        ]
        return rows, min(best)


# The text of a cache that is changing, or was when an exception ended the change.
UNKNOWN = Text(torch.empty((0, 0), dtype=torch.int64, device="cpu"))


class TextHolder(DynamicCache):
    """The part of `FP8PagedCache` that knows its text.

    Attributes:
        text: The first tokens that the cache holds, or all of them after the running step. It is
            `UNKNOWN` while the cache changes, and None in a cache that never got a text.
        beginning: The known first tokens, if embeddings or images came after them. `text` is then
            None, or `UNKNOWN` once the pages change.
        last_step: tokens that the last step added to `text`, whether or not it got to its end.
        reused: tokens that `generate` found here instead of computing them, over all sequences.
        takes_on_trust: whether a part of the text is what a prompt began with, not what was told.
        restored: tokens whose pages came from a store, over all sequences.
        identity: A digest of the model and the options that computed the text, or "".
    """

    text: Text | None = None
    beginning: Text | None = None
    last_step = 0
    reused = 0
    takes_on_trust = False
    restored = 0
    identity = ""
    layers: list[Any]
    options: CacheOptions
    _paged: PagedLayers

    @property
    def stock_layers(self) -> list[Any]:
        """The layers that are transformers' own."""
        return [layer for layer in self.layers if not isinstance(layer, FP8PagedLayer)]

    @contextmanager
    def changing_text(self, change: Callable[[Text], Text | None]) -> Iterator[None]:
        """Change the pages, and then the text; an exception in between leaves `UNKNOWN`.

        A ConfigError is raised before any page changes, so the text stays.
        """
        before, self.text = self.text, UNKNOWN
        try:
            yield
        except ConfigError:
            self.text = before
            raise
        self.text = UNKNOWN if self.beginning else before and change(before)
        self.beginning = None

    def keep_prefix(self, text: Text) -> int:
        """Keep the tokens that the cache shares with `text`, except its last, and count them.

        All sequences keep the same number of tokens. The cache is emptied if its layers cannot go
        back that far (a window that has moved on, a recurrent state), or if its text is not known
        any more. A cache that never got a text is taken to hold the beginning of `text`.

        Raises:
            ConfigError: The cache never got a text, and it is not shorter than `text`.
        """
        lengths = {stored for stored in self._paged.host_lengths() if stored}
        lengths |= {
            int(layer.get_seq_length())
            for layer in self.stock_layers
            if isinstance(layer, DynamicLayer) and layer.is_initialized
        }
        length = max(lengths, default=0) or int(self.get_seq_length())
        # A step may have been interrupted between two layers.
        held = UNKNOWN if len(lengths) > 1 else self.text
        if held is None and (known := self.beginning) is not None:
            same = known.match(text) == (list(range(len(text.ids))), known.length)
            held = None if same and text.length > length else known
        if held is None:
            self.takes_on_trust = length > 0
            if length and text.length <= length:
                raise ConfigError(
                    f"expected a prompt of more than {length} tokens, which begins with those that "
                    f"the cache holds, got {text.length}; the cache did not get them from "
                    "generate() of an enabled model, so it cannot tell whether they are the same: "
                    "call crop() or reset(), or make a new cache"
                )
            return length
        # Or before any layer stored the tokens of the last step.
        undone = self.last_step if held.length == length + self.last_step else 0
        if undone:
            held = held.crop(undone)
        rows, shared = held.match(text)
        shared = min(shared, text.length - 1)
        if (
            not shared
            or held.length > length  # the layers were changed one by one
            or (undone and self.stock_layers)  # a recurrent state may be further on
            or not self._can_crop(length - shared)
        ):
            self.reset()  # type: ignore[no-untyped-call]
            self.takes_on_trust = False
            return 0
        if rows != list(range(len(held.ids))):
            self.batch_select_indices(torch.tensor(rows, device="cpu"))
        if shared < length:
            self.crop(shared - length)
        return shared

    def hold_what_is_left(self, text: Text | None, error: BaseException) -> None:
        """Note which part of `text` the cache holds after a call that raised `error`.

        This package's errors are raised before a layer stores anything. transformers' layers have
        no such rollback, and other errors may come at any line: the cache is then emptied.
        """
        if self.text is not UNKNOWN or text is None:
            return  # nothing has changed yet, or the next known text empties the cache
        lengths = set(self._paged.host_lengths())
        if not isinstance(error, FP8KVError) or len(lengths) > 1 or self.stock_layers:
            self.reset()  # type: ignore[no-untyped-call]
        elif self.takes_on_trust:
            self.text = None
        else:
            self.text, self.last_step = text.crop(text.length - lengths.pop()), 0

    def _can_crop(self, tokens: int) -> bool:
        """Return whether every layer can remove its last `tokens` tokens."""
        if not tokens:
            return True
        try:
            self._paged.check_crop(tokens)
        except ConfigError:
            return False
        return all(can_crop(layer, tokens) for layer in self.stock_layers)


def can_crop(layer: Any, tokens: int) -> bool:
    """Return whether one of transformers' own layers can remove its last `tokens` tokens."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return False  # its state is that of the last token
    if isinstance(layer, DynamicSlidingWindowLayer) and layer.is_initialized:
        length, window = layer.get_seq_length(), layer.sliding_window
        keys: Any = layer.keys
        held = keys.shape[-2] - tokens
        return held >= min(length - tokens, window - 1) and (length < window or layer.record_past)
    return bool(getattr(layer, "is_croppable", False))
