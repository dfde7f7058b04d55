"""The keys of indexers, which choose the keys that a query of sparse attention attends to.

K and V are in pages, but an indexer's keys, one small vector per token, are not. Each paged layer
with an indexer has a layer of transformers that only holds these keys, in the model's dtype.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicIndexedLayer, StaticIndexedLayer

# Classes whose layers are replaced by paged layers, unless a layer only stores an indexer's keys.
INDEXED_CLASSES = (DynamicIndexedLayer, StaticIndexedLayer)
# Names of an indexer's tensors. The batch is axis 0 of the keys, and axis 1 of the positions.
INDEXER_TENSORS = ("indexer_keys", "indexer_position_ids")


class IndexerLayer(StaticIndexedLayer):
    """A layer of transformers that stores the keys of an indexer, without K and V.

    Unlike the base class, it can grow, move to a device, crop without K and V, and select sequences
    in place.

    Attributes:
        max_cache_len: Number of tokens for which keys are preallocated, at constant addresses, or
            None if the keys grow.
        is_unused: Whether no token has been stored since the start or `trim(0)`, which
            `FP8PagedIndexedLayer` records.
        indexer_position_ids: Positions, `[dims, B, N]`, or None if transformers stores none.
    """

    max_cache_len: Any
    is_unused = True
    indexer_cumulative_length: Any
    indexer_position_ids: Tensor | None = None

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Store keys of new tokens, `[B, T, D]`. Return all keys, including preallocated ones."""
        if self.max_cache_len is None:
            stored_keys = [] if self.indexer_keys is None else [self.indexer_keys]
            self.indexer_keys = torch.cat([*stored_keys, indexer_key_states], 1)
            self.is_indexer_initialized = True
            return self.indexer_keys
        if not torch.compiler.is_compiling() and not self.is_indexer_initialized:
            # These tensors are later written in inference mode and outside it.
            with torch.inference_mode(False), torch.no_grad():
                self.lazy_initialization_indexer(indexer_key_states)
        return super().update_indexer(indexer_key_states)

    def set_tensors(self, tensors: dict[str, Tensor], length: int) -> None:
        """Store the first `length` tokens, above 0, of copies of `get_indexer_tensors`' result."""
        if (positions := tensors.get("indexer_position_ids")) is not None:
            self.indexer_position_ids = positions[..., :length].clone()
        if (keys := tensors.get("indexer_keys")) is not None:
            self.is_unused = False
            self.update_indexer(keys[:, :length])

    def set_capacity(self, max_tokens: int | None, length: int) -> None:
        """Preallocate keys of `max_tokens` tokens, of which `length` are stored.

        None means that the keys grow again.
        """
        self.max_cache_len = max_tokens
        if max_tokens is None:
            self.trim(length)
        elif self.indexer_keys is not None:
            self.indexer_keys = torch.nn.functional.pad(
                self.indexer_keys, (0, 0, 0, max_tokens - length)
            )
            self.indexer_cumulative_length = torch.tensor(length)
            self._mark_addresses()

    def move(self, device: torch.device) -> None:
        """Move all tensors to `device`, to new addresses."""
        with torch.inference_mode(False), torch.no_grad():
            vars(self).update(
                {name: tensor.to(device) for name, tensor in get_indexer_tensors(self).items()}
            )
        self._mark_addresses()

    def _mark_addresses(self) -> None:
        """Move the length to the device of the keys, and mark both addresses as constant."""
        if self.max_cache_len is not None and self.indexer_keys is not None:
            self.indexer_device = self.indexer_keys.device
            length = self.indexer_cumulative_length
            self.indexer_cumulative_length = length.to(self.indexer_keys.device)
            torch._dynamo.mark_static_address(self.indexer_keys)
            torch._dynamo.mark_static_address(self.indexer_cumulative_length)

    def trim(self, length: int) -> None:
        """Remove all but the first `length` tokens."""
        self.is_unused = not length
        if (keys := self.indexer_keys) is not None and self.max_cache_len is not None:
            keys[:, length:] = 0
            self.indexer_cumulative_length.fill_(length)
        elif keys is not None:
            self.indexer_keys = keys[:, :length] if length else None
            self.is_indexer_initialized = length > 0
        if self.indexer_position_ids is not None:
            self.indexer_position_ids = self.indexer_position_ids[..., :length] if length else None

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens."""
        if self.indexer_keys is not None:
            self.trim(max(int(self.indexer_cumulative_length) + tokens_to_remove, 0))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select sequences `[B']`, in place if preallocated and their number is unchanged."""
        if (keys := self.indexer_keys) is not None:
            with torch.inference_mode(False), torch.no_grad():
                selected = keys[beam_idx.to(keys.device)]
                if self.max_cache_len is not None and len(selected) == len(keys):
                    keys.copy_(selected)
                else:
                    self.indexer_keys = selected
                    self._mark_addresses()
        if (positions := self.indexer_position_ids) is not None:
            self.indexer_position_ids = positions[:, beam_idx.to(positions.device)]


def get_indexer_tensors(indexer: IndexerLayer | None) -> dict[str, Tensor]:
    """Return the keys `[B, N, D]` and positions `[dims, B, N]` that exist, by attribute name."""
    tensors = {name: getattr(indexer, name, None) for name in INDEXER_TENSORS}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}
