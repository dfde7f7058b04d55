"""Paged layers of sparse attention, whose indexer chooses the keys that each query attends to.

K and V are in pages. The indexer's own keys, one small vector per token, are not: transformers' own
layer keeps them in the model's dtype, and each of these layers has one that holds nothing else.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicIndexedLayer, StaticIndexedLayer

from ..errors import ConfigError
from ..paging.layer_group import LayerGroup
from .layer import FP8PagedLayer
from .snapshot import LayerSnapshot

# What is replaced by paged layers, unless it holds keys of an indexer only.
INDEXED = (DynamicIndexedLayer, StaticIndexedLayer)


class GrowingIndexer(DynamicIndexedLayer):
    """The keys of an indexer, without K and V."""

    def hold(self, keys: Tensor) -> None:
        """Hold keys `[B, N, D]`."""
        self.lazy_initialization_indexer(keys)
        self.indexer_keys = keys

    def keep_addresses(self) -> None:
        """Do nothing: each call makes new tensors."""

    def trim(self, length: int) -> None:
        """Remove all but the first `length` tokens."""
        if not length:
            self.indexer_keys, self.is_indexer_initialized = None, False
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys[:, :length]
        if self.indexer_position_ids is not None:
            self.indexer_position_ids = self.indexer_position_ids[..., :length] if length else None


class FixedIndexer(StaticIndexedLayer):
    """The keys of an indexer at fixed addresses, without K and V.

    It can do what transformers' own layer cannot: remove tokens, and select sequences in place.
    """

    indexer_cumulative_length: Any
    indexer_position_ids: Tensor | None = None

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Store keys of new tokens, `[B, T, D]`; return all, with room for more."""
        if not torch.compiler.is_compiling() and not self.is_indexer_initialized:
            self._allocate(indexer_key_states)
        keys: Tensor = super().update_indexer(indexer_key_states)
        return keys

    def _allocate(self, like: Tensor) -> None:
        # Written in place later, in inference mode and outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self.lazy_initialization_indexer(like)

    def hold(self, keys: Tensor) -> None:
        """Hold copies of keys `[B, N, D]`, with room for more."""
        self._allocate(keys)
        assert self.indexer_keys is not None
        self.indexer_keys[:, : keys.shape[1]] = keys
        self.indexer_cumulative_length.fill_(keys.shape[1])

    def keep_addresses(self) -> None:
        """Put what is written in place on the device of the keys; tell torch.compile it stays."""
        if self.indexer_keys is not None:
            count = self.indexer_cumulative_length
            self.indexer_cumulative_length = count.to(self.indexer_keys.device)
            torch._dynamo.mark_static_address(self.indexer_keys)
            torch._dynamo.mark_static_address(self.indexer_cumulative_length)

    def trim(self, length: int) -> None:
        """Remove all but the first `length` tokens."""
        if self.indexer_keys is not None:
            self.indexer_keys[:, length:] = 0
            self.indexer_cumulative_length.fill_(length)
        if self.indexer_position_ids is not None:
            self.indexer_position_ids = self.indexer_position_ids[..., :length] if length else None

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens."""
        if self.indexer_keys is not None:
            self.trim(max(int(self.indexer_cumulative_length) + tokens_to_remove, 0))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select sequences `[B']`, in place if they are as many."""
        if (keys := self.indexer_keys) is not None:
            with torch.inference_mode(False), torch.no_grad():
                selected = keys[beam_idx.to(keys.device)]
                if len(selected) == len(keys):
                    keys.copy_(selected)
                else:
                    self.indexer_keys = selected
                    self.keep_addresses()
        if (positions := self.indexer_position_ids) is not None:
            self.indexer_position_ids = positions[:, beam_idx.to(positions.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times, side by side."""
        if self.indexer_keys is not None:
            rows = torch.arange(len(self.indexer_keys), device="cpu")
            self.reorder_cache(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the sequences `indices`, in that order."""
        if self.indexer_keys is not None:
            rows = torch.arange(len(self.indexer_keys), device="cpu")
            self.reorder_cache(rows[torch.as_tensor(indices, device="cpu")])


class FP8PagedIndexedLayer(FP8PagedLayer):
    """A paged layer with an indexer.

    Attributes:
        indexer: transformers' own layer, without K and V.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        kind: Any = GrowingIndexer if self.length.room is None else FixedIndexer
        self.indexer = kind(max_cache_len=self.length.room)
        self._has_indexer_keys = False

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Store keys of new tokens for the indexer, `[B, T, D]`; return as many as masks have."""
        held = None if torch.compiler.is_compiling() else self.indexer_keys
        if held is not None and held.device != indexer_key_states.device:
            self._move_indexer(indexer_key_states.device)
        is_first, self._has_indexer_keys = not self._has_indexer_keys, True
        keys: Tensor = self.indexer.update_indexer(indexer_key_states)
        # As `get_mask_sizes` says, which may be called before or after `update`.
        if is_first and self.options.prefill == "exact" and self._attends_pages():
            return keys[:, : indexer_key_states.shape[1]]
        return keys

    @property
    def indexer_keys(self) -> Tensor | None:
        """The indexer's keys, `[B, N, D]`; None before the first token."""
        keys: Tensor | None = self.indexer.indexer_keys
        return keys

    @property
    def is_indexer_initialized(self) -> bool:
        """Whether the indexer has stored keys."""
        return bool(self.indexer.is_indexer_initialized)

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """The positions that an indexer stored, `[dims, B, N]`, or None."""
        positions: Tensor | None = self.indexer.indexer_position_ids
        return positions

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor | None) -> None:
        self.indexer.indexer_position_ids = positions

    def _held(self) -> dict[str, Tensor]:
        """Return the indexer's tensors by name."""
        held = {
            "indexer_keys": self.indexer_keys,
            "indexer_position_ids": self.indexer_position_ids,
        }
        return {name: tensor for name, tensor in held.items() if tensor is not None}

    def _move_indexer(self, device: torch.device) -> None:
        """Move what the indexer holds to `device`, to new addresses."""
        with torch.inference_mode(False), torch.no_grad():
            for name, tensor in self._held().items():
                setattr(self.indexer, name, tensor.to(device))
        self.indexer.indexer_device = device
        self.indexer.keep_addresses()

    def offload(self) -> None:
        """Move the bytes to the CPU's memory."""
        super().offload()
        self._move_indexer(torch.device("cpu"))

    def prefetch(self) -> None:
        """Move the bytes back to the layer's device."""
        super().prefetch()
        if self.is_initialized:
            self._move_indexer(self.encoding.device)

    def replace(self, key: Tensor, value: Tensor) -> None:
        """Store these tokens instead of all that are stored; as many, or the first of them.

        Raises:
            ConfigError: a choice of the tokens, which the indexer would not follow, or what
                `FP8PagedLayer.replace` refuses.
        """
        stored, tokens = self.stored(), key.shape[2]
        if stored is not None and tokens < self.length.on_host():
            first = stored[0].dense()[:, :, :tokens]
            if not torch.equal(first, key):
                raise ConfigError(
                    f"expected all keys and values of {self}, or the first of them, got {tokens} "
                    "others; its indexer has keys of all tokens: name the layer in skip_layers, or "
                    "use crop"
                )
        super().replace(key, value)

    def drop_removed(self, length: int) -> None:
        """Drop what belongs to tokens that were removed; `length` tokens are left."""
        super().drop_removed(length)
        self._has_indexer_keys = length > 0
        self.indexer.trim(length)

    def select_rows(self, sequences: Tensor) -> None:
        """Select sequences `[B']` of what this layer alone holds."""
        super().select_rows(sequences)
        self.indexer.reorder_cache(sequences)

    def snapshot(self, group: LayerGroup, length: int) -> LayerSnapshot:
        """Return what the layer holds, `length` tokens; `group` is a fork of its group."""
        snapshot = super().snapshot(group, length)
        # Not views: a file or a pickle would have all that they are part of.
        snapshot.indexer = {
            name: tensor[:, :length].clone() if name == "indexer_keys" else tensor.clone()
            for name, tensor in self._held().items()
        }
        return snapshot

    def restore(self, snapshot: LayerSnapshot) -> None:
        """Take what a layer held."""
        super().restore(snapshot)
        held = dict(snapshot.indexer or {})
        if (keys := held.pop("indexer_keys", None)) is not None:
            self.indexer.hold(keys)
            self._has_indexer_keys = keys.shape[1] > 0
        for name, tensor in held.items():
            setattr(self.indexer, name, tensor)

    def memory_footprint(self) -> dict[str, int]:
        """Return bytes by kind: `pages`, `scales`, `tables`, `used`, `other`: the indexer's."""
        other = sum(tensor.nbytes for tensor in self._held().values())
        return {**super().memory_footprint(), "other": other}
