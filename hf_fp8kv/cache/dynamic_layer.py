"""`FP8PagedLayer`: a layer whose pages are taken as tokens come."""

from typing import Any

import numpy as np
import torch

from .. import ops
from ..errors import ConfigError
from ..ops import Pages
from ..paging.passage import Passage
from ..utils.tensors import without_grad
from .layer import PagedLayerBase, parse_crop, refuse_export
from .paged_tensor import PagedKV
from .snapshot import LayerSnapshot


class FP8PagedLayer(PagedLayerBase):
    """A layer whose pages are taken as tokens come.

    With a window, pages that fall out of it are given back.
    """

    is_compileable = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Look up the static scales, and allocate the pool for tokens of these shapes.

        Raises:
            ScaleError: static scales that do not fit. ConfigError: a model that is not split.
        """
        self._prepare_scales(key_states, value_states)
        if not self.pool.is_allocated:
            capacity = self.group.table.allocator.capacity
            self.pool.allocate(key_states, value_states, capacity)
        self._ready = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new tokens, and return the keys and values to attend to.

        Args:
            key_states: `[B, Hkv, T, Dk]`, of the model's dtype.
            value_states: `[B, Hkv, T, Dv]`.

        Returns:
            Handles on stored keys and values; on an empty layer with prefill="exact", the
            arguments themselves.

        Raises:
            ConfigError: tokens of another model or batch.
            ScaleError: static scales that do not fit.
            OutOfPagesError: the budget would be passed. The cache is as it was in each case.
        """
        if torch.compiler.is_compiling():
            both: tuple[torch.Tensor, torch.Tensor]
            both = _update_uncompiled(self, key_states, value_states)
            return both
        self._check_tokens(key_states, value_states)
        key, value = without_grad(key_states), without_grad(value_states)
        group = self.group
        batch, _, tokens, _ = key.shape
        start = group.lengths[self.member]
        stop = start + tokens
        if not self.is_initialized:
            self._prepare_scales(key, value)
        elif key.device != self.device:
            self.move_to(key.device)
        group.prepare(start, stop, batch)
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        passage = None if group.window is None else group.passage(start, stop)
        if passage is None:
            self.pool.grow(group.table.allocator.capacity)
        self._bring_pages()
        attends_fresh = start == 0 and self.options.prefill == "exact"
        if start == 0:
            self.k_center = self._first_center(key)
        elif self.k_center is not None and self.first_tokens.told is not None:
            self.k_center = self.first_tokens.complete(self.k_center, key, self.turns)
        if passage is not None:
            return self._pass_through(passage, key_states, value_states)
        self.pool.written(group.table, start, stop)
        lengths = group.lengths_on(self.device, stop)
        pages = self._pages(group.table_on(self.device))
        ops.write(pages, key, value, lengths, self.backend)
        group.lengths[self.member] = stop
        if attends_fresh:
            return key_states, value_states
        return self._view(pages, lengths, group.visible_from(start), stop, tokens)

    def _pass_through(
        self, passage: Passage, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the last window of the tokens, and return what all of them attend to."""
        group, start, stop = self.group, passage.start, passage.stop
        key, value = without_grad(key_states), without_grad(value_states)
        lengths = group.lengths_on(self.device, stop)
        if start == 0 and self.options.prefill == "exact":
            self.pool.grow(group.table.allocator.capacity)
            self.pool.written(group.table, start, stop)
            first = group.table.first * group.page_size
            pages = self._pages(group.table_on(self.device))
            ops.write(pages, key[:, :, first:], value[:, :, first:], lengths, self.backend)
            group.lengths[self.member] = stop
            return key_states, value_states
        scratch = passage.open(self.pool)
        pages = self._pages(passage.rows_on(self.device), scratch)
        ops.write(pages, key, value, lengths, self.backend)
        self.pool = group.keep_passed(self.member, passage, scratch)
        group.lengths[self.member] = stop
        return self._view(pages, lengths, group.visible_from(start), stop)

    def _view(
        self, pages: Pages, lengths: torch.Tensor, start: int, stop: int, tokens: int = 1
    ) -> tuple[PagedKV, PagedKV]:
        """Return handles on what `tokens` queries see."""
        heads, rows = self.pool.heads, self.query_rows * tokens
        plan = self.group.plan_on(self.device, start, stop, heads, rows, self.backend)
        return self._handles(pages, lengths, plan, start, stop)

    def stored(self) -> tuple[PagedKV, PagedKV] | None:
        """Return handles on all that is stored and not yet behind the window, or None."""
        length = self.get_seq_length()
        if not length:
            return None
        self._bring_pages()
        pages = self._pages(self.group.table_on(self.device))
        lengths = self.group.lengths_on(self.device, length)
        return self._view(pages, lengths, self.group.visible_from(length), length)

    def get_seq_length(self) -> int:
        """Return the tokens seen, those behind the window among them."""
        return self.group.lengths[self.member]

    @property
    def is_empty(self) -> bool:  # type: ignore[override]
        """Whether no token was seen."""
        return not self.get_seq_length()

    def host_length(self) -> int:
        """Return the tokens stored, those behind the window among them."""
        return self.get_seq_length()

    def pages_in_use(self) -> int:
        """Return how many pages the block table lists."""
        return len(np.unique(self.group.table.used()))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the columns of the mask, and the position of the first."""
        length = self.get_seq_length()
        start = self.group.visible_from(length)
        return length + query_length - start, start

    def get_max_length(self) -> int:
        """Return -1, no maximum, or the window of a sliding layer, as transformers' layers do."""
        return -1 if self.group.window is None else self.group.window

    def reset(self) -> None:
        """Remove all tokens; memory is given back once no layer and no fork holds pages."""
        self.crop_member(self.get_seq_length())

    def crop_member(self, tokens: int) -> None:
        """Remove the last `tokens` tokens of this layer."""
        self.group.crop(tokens, [self.member])
        self.drop_removed()

    def drop_removed(self) -> None:
        """Drop what belongs to tokens that were removed."""
        if not self.get_seq_length():
            self.k_center = None

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens of this layer.

        Raises:
            ConfigError: a positive number, or tokens that the window no longer holds.
        """
        tokens = parse_crop(tokens_to_remove)
        self.group.check_crop(tokens)
        self.crop_member(tokens)

    def replace(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store these tokens instead of all that are stored: at most as many, encoded again.

        The first of the stored ones are kept as they are, without encoding them again. Plan and
        center stay, too: they are those of the first call.

        Raises:
            ConfigError: more tokens, or of another kind, or a layer with a window.
            OutOfPagesError: pages that forks hold, too, do not fit the budget a second time.
        """
        self._check_tokens(key, value)
        length, tokens = self.get_seq_length(), key.shape[2]
        if self.group.window is not None or tokens > length:
            raise ConfigError(
                f"expected at most {length} keys and values for a layer without a window, got "
                f"{tokens} for {self}; leave layers with a window as they are"
            )
        stored = self.stored()
        assert stored is not None
        if all(
            torch.equal(old.dense()[:, :, :tokens], new)
            for old, new in zip(stored, (key, value), strict=True)
        ):
            self.crop_member(length - tokens)
            return
        self.group.prepare(0, tokens, key.shape[0])
        center = self.k_center
        self.crop_member(length)
        self.group.prepare(0, tokens, key.shape[0])
        self.k_center = center
        self.pool.grow(self.group.table.allocator.capacity)
        self._bring_pages()
        self.pool.written(self.group.table, 0, tokens)
        lengths = self.group.lengths_on(self.device, tokens)
        pages = self._pages(self.group.table_on(self.device))
        ops.write(pages, without_grad(key), without_grad(value), lengths, self.backend)
        self.group.lengths[self.member] = tokens

    def select_rows(self, sequences: torch.Tensor) -> None:
        """Select sequences `[B']` of what this layer alone holds: the center."""
        if self.k_center is not None:
            self.k_center = self.k_center[sequences.to(self.k_center.device)]

    def release_memory(self) -> None:
        """Give the pool's bytes back; only for a layer without tokens and forks."""
        self.pool.free()
        self._ready = False
        self._clear_scales()

    def restore(self, snapshot: LayerSnapshot) -> None:
        """Take what a layer held; for a layer over the same pool."""
        self.group.lengths[self.member] = snapshot.length
        if snapshot.pool is None:
            return
        if snapshot.setup is None:
            self._prepare_scales(*snapshot.pool.empty_tokens(1))
        else:
            vars(self).update(snapshot.setup)
        self.k_center = snapshot.k_center
        self.storage = snapshot.storage or self.storage
        self._ready = True


@torch.compiler.disable(
    reason="a growing FP8PagedCache counts its pages in Python; for fullgraph=True preallocate it: "
    "FP8PagedCache(config, max_cache_len=...)"
)  # type: ignore[untyped-decorator]
def _update_uncompiled(
    layer: FP8PagedLayer, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    refuse_export()
    return layer.update(key, value)
