"""The text that a cache holds, and what of it another text begins with.

A cache is given keys and values, never tokens: `enable` tells it those of a `generate`
(attention/reuse.py).
"""

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

from ..errors import ConfigError, Fp8KVError
from .layer import PagedLayerBase
from .options import CacheOptions
from .paged_layers import PagedLayers
from .prefix_store import PrefixStore


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
        rows = rows.to(self.ids.device)
        positions = self.positions
        if positions is not None and positions.shape[-2] > 1:
            positions = positions.index_select(-2, rows)
        mask = None if self.mask is None else self.mask[rows]
        return Text(self.ids[rows], mask, positions)

    def extend(self, ids: Tensor) -> "Text":
        """Return the text of which `ids`, `[B, N']`, are all tokens, the old ones among them."""
        return Text(ids, self.mask, self.positions)

    def _columns(self, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
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
        ids, mask, positions = self._columns(width, device)
        of_other = other._columns(width, device)
        if not width or len(positions) != len(of_other[2]):
            return list(range(len(other.ids))), 0
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


class TextHolder(DynamicCache):
    """The part of `FP8PagedCache` that knows its text.

    Attributes:
        text: what the cache holds, or will after the call that is running; None: not known.
        last_step: tokens that the last step added to `text`, whether or not it got to its end.
        in_prefill: whether `generate` is giving it a prompt.
        reuse_prefix: whether `generate` may go back to where a prompt and the text part.
        reused: tokens that `generate` found here instead of computing them, over all sequences.
        takes_on_trust: whether a part of the text is what a prompt began with, not what was told.
        prefix_store: where pages of other processes are found, and left for them.
        restored: tokens whose pages came from there, over all sequences.
        identity: of model and options when the text was computed, if there is a store.
    """

    text: Text | None = None
    last_step = 0
    in_prefill = False
    reuse_prefix = True
    reused = 0
    takes_on_trust = False
    prefix_store: PrefixStore | None = None
    restored = 0
    identity = ""
    layers: list[Any]
    options: CacheOptions
    _paged: PagedLayers

    @property
    def stock_layers(self) -> list[Any]:
        """The layers that are transformers' own."""
        return [layer for layer in self.layers if not isinstance(layer, PagedLayerBase)]

    def _crop_text(self, tokens: int) -> None:
        self.text = self.text and self.text.crop(tokens)

    def _select(self, sequences: Tensor) -> None:
        """Make sequence `i` of pages and text what sequence `sequences[i]` was."""
        self._paged.select(sequences)
        self.text = self.text and self.text.select(sequences)

    def keep_prefix(self, text: Text) -> int:
        """Keep what the cache holds of `text`, less its last token, and return how many tokens.

        All sequences keep the same number. Where layers cannot go back that far (a window that has
        moved on, a recurrent state), the cache is empty afterwards. If the cache does not know what
        it holds, that is taken for the beginning of `text`.

        Raises:
            ConfigError: the cache does not know what it holds, and it is not shorter than `text`.
        """
        lengths = {stored for stored in self._paged.host_lengths() if stored}
        lengths |= {
            int(layer.get_seq_length())
            for layer in self.stock_layers
            if isinstance(layer, DynamicLayer) and layer.is_initialized
        }
        if not (length := max(lengths, default=0) or int(self.get_seq_length())):
            self.takes_on_trust = False
            return 0
        if self.text is not None and len(lengths) > 1:
            return self._keep_nothing()  # a step was interrupted between two layers
        if self.text is not None and self.text.length == length + self.last_step:
            if self.last_step and self.stock_layers:
                return self._keep_nothing()  # a recurrent state may be further on
            self._crop_text(self.last_step)  # of which no layer has stored anything
        # Whoever removes or adds tokens without a word leaves other lengths.
        if self.text is None or self.text.length != length:
            if text.length > length:
                self.takes_on_trust = True
                return length
            raise ConfigError(
                f"expected a prompt of more than {length} tokens, which begins with those that the "
                f"cache holds, got {text.length}; the cache did not get them from generate() of an "
                "enabled model alone, so it cannot tell whether they are the same: call crop() or "
                "reset(), or make a new cache"
            )
        rows, shared = self.text.match(text)
        shared = min(shared, text.length - 1)
        if not shared or not self._can_crop(length - shared):
            return self._keep_nothing()
        if rows != list(range(len(self.text.ids))):
            self.batch_select_indices(torch.tensor(rows, device="cpu"))
        if shared < length:
            self.crop(shared - length)
        return shared

    def _keep_nothing(self) -> int:
        self.reset()  # type: ignore[no-untyped-call]
        self.takes_on_trust = False
        return 0

    def hold_what_is_left(self, text: Text, error: BaseException) -> None:
        """Note what of `text` the cache holds after a call that raised `error`; nothing, if unsure.

        Our own errors are raised before a layer stores anything; transformers' layers have no
        such rollback.
        """
        lengths = set(self._paged.host_lengths())
        if isinstance(error, Fp8KVError) and len(lengths) == 1 and not self.stock_layers:
            self.text, self.last_step = text.crop(text.length - lengths.pop()), 0
        else:
            self.reset()  # type: ignore[no-untyped-call]

    def _can_crop(self, tokens: int) -> bool:
        """Return whether every layer can remove its last `tokens` tokens."""
        if not tokens:
            return True
        try:
            self._paged.check_crop(tokens)
        except ConfigError:
            return False
        return all(_can_crop(layer, tokens) for layer in self.stock_layers)


def _can_crop(layer: Any, tokens: int) -> bool:
    """Return whether one of transformers' own layers can remove its last `tokens` tokens."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return False  # its state is that of the last token
    if isinstance(layer, DynamicSlidingWindowLayer) and layer.is_initialized:
        length, window = layer.get_seq_length(), layer.sliding_window
        keys: Any = layer.keys
        held = keys.shape[-2] - tokens
        return held >= min(length - tokens, window - 1) and (length < window or layer.record_past)
    return bool(getattr(layer, "is_croppable", False))
