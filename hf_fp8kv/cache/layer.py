"""`FP8PagedLayer`: a paged layer with the interface of transformers' cache layers."""

import operator
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from .. import ops
from ..errors import ConfigError
from ..modeling.model_support import ATTENTION
from ..paging.lengths import DeviceLength, HostLength
from ..paging.page_pool import PagePool
from ..utils.tensors import detach_if_needed
from .encoding import Encoding
from .indexers import IndexerLayer
from .layer_storage import LayerStorage
from .paged_tensor import PagedKV, densify


def _make_states_property(name: str) -> Any:
    """Return the property `keys` or `values` of a layer."""

    def read(layer: "FP8PagedLayer") -> PagedKV | None:
        if not layer.is_initialized:
            return None
        keys, values = layer.make_stored_handles()
        return keys if name == "keys" else values

    def assign(layer: "FP8PagedLayer", states: torch.Tensor | None) -> None:
        """Replace the stored tokens once `keys` and `values` are assigned, as in dense layers."""
        if states is None:
            raise ConfigError(f"expected tensors as {name}, got None. Call cache.reset()")
        layer.assigned[name] = states
        if len(layer.assigned) == 2:
            key, value = (densify(layer.assigned.pop(side)) for side in ("keys", "values"))
            layer.replace(key, value)

    return property(read, assign)


class FP8PagedLayer(LayerStorage, CacheLayerMixin):
    """A layer whose keys and values are stored in pages.

    A growing layer (`HostLength`) allocates pages as tokens arrive, and frees pages that have left
    the window. A preallocated layer (`DeviceLength`) allocates all memory at the first call, at
    constant addresses, for torch.compile and CUDA graphs.

    Attributes:
        index: Index of the layer in the model.
        keys: Handle on the stored keys as returned by `update`, or None before the first token.
        values: Handle on the stored values, or None before the first token.
        config: The model's config, from which the attention implementation is read, or None.
        assigned: Tensor that was assigned to `keys` or `values`, until both are assigned.
    """

    is_croppable = True
    supports_early_init = True
    keys = _make_states_property("keys")
    values = _make_states_property("values")

    def __init__(
        self,
        encoding: Encoding,
        length: HostLength | DeviceLength,
        pool: PagePool,
        num_query_heads: int = 0,
        indexer: IndexerLayer | None = None,
        config: PreTrainedConfig | None = None,
    ) -> None:
        # This does not initialize `CacheLayerMixin`, because it would assign `keys` and `values`,
        # which are properties here.
        super().__init__(encoding, length, pool, num_query_heads, indexer)
        self.index = encoding.index
        self.config = config
        self.sliding_window = self.group.window
        self.is_sliding = self.sliding_window is not None
        self.is_compileable = length.max_tokens is not None
        self.assigned: dict[str, torch.Tensor] = {}

    def __repr__(self) -> str:
        window = "" if self.sliding_window is None else f", window={self.sliding_window}"
        return f"{type(self).__name__}({self.encoding.plan}{window})"

    # -- the interface of transformers' cache layers -----------------------------------------

    # This is an attribute in transformers. Here it depends on the pool, which a fork may free.
    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Whether the layer has tokens, or its preallocated pool."""
        is_empty = self.length.max_tokens is None and bool(self.length.is_empty)
        return self.pool.is_allocated and not is_empty

    @property
    def record_past(self) -> bool:
        """Whether pages that have left the window are kept until `crop`."""
        return self.group.record_past

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self.group.record_past = value

    def activate_past_recording(self) -> None:
        """Keep tokens that leave the window. A ring becomes all pages, at new addresses."""
        if isinstance(self.length, DeviceLength) and self.is_initialized:
            self.length.group.unroll_ring()
            self.update_table()
        self.group.record_past = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new tokens, and return the keys and values to attend to.

        Args:
            key_states: Keys, `[B, Hkv, T, Dk]`, in the model's dtype.
            value_states: Values, `[B, Hkv, T, Dv]`, in the model's dtype.

        Returns:
            Handles on the stored keys and values. An empty layer with prefill="exact" returns the
            arguments instead, padded to `max_cache_len` if the attention is not "fp8_paged".

        Raises:
            ConfigError: The tokens belong to another model or batch.
            ScaleError: The static scales do not fit.
            OutOfPagesError: The budget would be exceeded. After any error the cache is unchanged.
                On a CPU, tokens past `max_cache_len` always raise this error, even under
                torch.compile. On other devices they are not stored, and the next step raises the
                error, unless its mask is made in a compiled region, which generate() avoids.
        """
        length = self.length
        encoding = self.encoding
        if not torch.compiler.is_compiling():
            if not self.assigned and (repeated := self.repeat(key_states, value_states)):
                return repeated
            check_tokens(self, key_states, value_states)
        else:
            refuse_export()
            if length.max_tokens is None:
                return _update_uncompiled(self, key_states, value_states)  # type: ignore[no-any-return]
        key = detach_if_needed(key_states)
        value = detach_if_needed(value_states)
        reads_pages = encoding.options.prefill == "stored" or not length.is_empty
        positions = self.reserve(key, value)
        table, lengths = positions.locate(encoding.device)
        if positions.long_write is None:
            pages = encoding.make_pages(self.pool, table)
            ops.write(pages, key, value, lengths, encoding.backend, length.max_tokens)
        else:
            pages = self.write_long(key, value, positions, reads=reads_pages)
        states: tuple[torch.Tensor, torch.Tensor]
        if reads_pages:
            states = self.make_handles(pages, lengths, positions)
            if positions.num_tokens == 1:
                self.record(pages, key_states, value_states, lengths)
        else:
            states = self._pad_new_states(key_states), self._pad_new_states(value_states)
        length.record(positions)
        return states

    def _uses_fp8_paged(self) -> bool:
        """Return whether the model uses "fp8_paged", which needs no padding in a first call."""
        return getattr(self.config, "_attn_implementation", None) == ATTENTION

    def _pad_new_states(self, states: torch.Tensor) -> torch.Tensor:
        """Return new keys or values, padded to the width of the masks."""
        max_tokens = self.length.max_tokens
        if max_tokens is None or self._uses_fp8_paged():
            return states
        return torch.nn.functional.pad(states, (0, 0, 0, max_tokens - states.shape[2]))

    def get_seq_length(self) -> Any:
        """Return the number of stored tokens, as a tensor `[]` if preallocated and not empty."""
        return self.length.num_stored

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of columns of the mask, and the position of the first column."""
        length = self.length
        if isinstance(length, HostLength):
            start = length.group.find_window_start(length.num_stored)
            return length.num_stored + query_length - start, start
        length.check_capacity(query_length)
        if length.is_empty and self.encoding.options.prefill == "exact" and self._uses_fp8_paged():
            return query_length, 0
        return length.max_tokens, 0

    def get_max_length(self) -> int:
        """Return `max_cache_len`, the window of a growing layer, or -1 without a maximum."""
        return self.length.max_tokens or self.sliding_window or -1

    def reset(self) -> None:
        """Remove all tokens. A preallocated layer keeps its addresses.

        The memory of a growing layer is freed when no layer and no fork uses its pages.
        """
        self.crop_to(0)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens of this layer.

        After `reorder_cache`, crop a preallocated cache as a whole, because shared pages must be
        copied for all layers at once.

        Raises:
            ConfigError: The number is positive, or the window has lost tokens that would become
                visible.
        """
        num_tokens = parse_crop(tokens_to_remove)
        num_stored = self.length.count_stored()
        self.group.check_crop(self.length.member, num_tokens, num_stored)
        self.crop_to(max(num_stored - num_tokens, 0))

    def _refuse_single_layer(self, *_: Any) -> None:
        """Raise ConfigError, because sequences can only be selected in the whole cache."""
        raise ConfigError(
            "reorder_cache, batch_repeat_interleave and batch_select_indices expected the whole "
            "cache, got one layer, which shares a block table. Call the method of the cache"
        )

    reorder_cache = batch_repeat_interleave = batch_select_indices = _refuse_single_layer  # type: ignore[assignment]

    def offload(self) -> None:
        """Move the layer's memory to the CPU."""
        self.move_memory(torch.device("cpu"))

    def prefetch(self) -> None:
        """Move the layer's memory back to its device."""
        if self.pool.is_allocated:
            self.move_memory(self.encoding.device)

    def replace(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Encode keys and values, and store them instead of all stored tokens.

        If they equal the first stored tokens, only the later tokens are removed.

        Raises:
            ConfigError: There are more tokens than before, their shapes or dtypes differ, or the
                layer has a window or is preallocated, whose length only the whole cache can change.
            OutOfPagesError: The budget has no room for copies of pages that forks share.
        """
        length = self.length
        group = self.group
        if isinstance(length, DeviceLength):
            raise ConfigError(
                "layer.keys, layer.values: expected a growing cache for an assignment, got a "
                "preallocated one. Leave max_cache_len out"
            )
        check_tokens(self, key, value)
        num_stored = length.num_stored
        num_new = key.shape[2]
        if group.window is not None or num_new > num_stored:
            raise ConfigError(
                f"expected at most {num_stored} keys and values for a layer without a window, got "
                f"{num_new} for {self}. Leave layers with a window as they are"
            )
        stored_key, stored_value = (
            handle.dense()[:, :, :num_new] for handle in self.make_stored_handles()
        )
        if torch.equal(stored_key, key) and torch.equal(stored_value, value):
            self.crop_to(num_new)
            return
        if self.indexer is not None and num_new < num_stored and not torch.equal(stored_key, key):
            raise ConfigError(
                f"expected all keys and values of {self}, or its first tokens unchanged, got "
                f"{num_new} tokens with other keys. Its indexer has keys of all tokens. Name the "
                "layer in skip_layers, or use crop"
            )
        group.reserve(0, num_new, key.shape[0])
        length.set(0)
        self.update(key, value)


def _make_indexer_property(name: str) -> Any:
    """Return a property that reads and sets the attribute `name` of the layer's indexer."""
    return property(
        lambda layer: getattr(layer.indexer, name),
        lambda layer, value: setattr(layer.indexer, name, value),
    )


class FP8PagedIndexedLayer(FP8PagedLayer):
    """A paged layer with an indexer, whose keys are in a layer of transformers (indexers.py).

    Attributes:
        indexer_keys: Keys of the indexer, `[B, N, D]`, or None before the first token.
        indexer_position_ids: Positions that the indexer stored, `[dims, B, N]`, or None.
    """

    indexer_keys = _make_indexer_property("indexer_keys")
    indexer_position_ids = _make_indexer_property("indexer_position_ids")

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Store indexer keys of new tokens, `[B, T, D]`, and return the key of each mask column."""
        indexer: Any = self.indexer
        stored_keys = None if torch.compiler.is_compiling() else indexer.indexer_keys
        if stored_keys is not None and stored_keys.device != indexer_key_states.device:
            indexer.move(indexer_key_states.device)
        is_first = indexer.is_unused
        indexer.is_unused = False
        keys: torch.Tensor = indexer.update_indexer(indexer_key_states)
        # The width is as in `get_mask_sizes`, which is called before or after `update`.
        if is_first and self.encoding.options.prefill == "exact" and self._uses_fp8_paged():
            return keys[:, : indexer_key_states.shape[1]]
        return keys


def check_tokens(layer: FP8PagedLayer, key: torch.Tensor, value: torch.Tensor) -> None:
    """Raise ConfigError if a layer cannot store these tokens."""
    if layer.assigned:
        raise ConfigError(
            "expected both layer.keys and layer.values to be assigned, got "
            f"only {next(iter(layer.assigned))}. Assign both"
        )
    shape, v_shape = key.shape, value.shape
    batch, num_heads, num_tokens, k_dim = shape if len(shape) == 4 else (0, 0, 0, 0)
    if not num_tokens or len(v_shape) != 4 or v_shape != (*shape[:3], v_shape[3]):
        raise ConfigError(
            "expected keys [B, Hkv, T, Dk] and values [B, Hkv, T, Dv] with T > 0, got "
            f"{tuple(shape)} and {tuple(v_shape)}"
        )
    # K and V may have different dtypes, because RoPE returns K in float32 under autocast.
    is_initialized = layer.pool.is_allocated
    is_floating = is_initialized or (key.is_floating_point() and value.is_floating_point())
    if not is_floating or key.device != value.device:
        raise ConfigError(
            "expected keys and values of a floating dtype on one device, got "
            f"{key.dtype} on {key.device} and {value.dtype} on {value.device}"
        )
    pool = layer.pool
    sizes = (num_heads, k_dim, v_shape[3])
    if is_initialized and sizes != (pool.num_heads, pool.k_dim, pool.v_dim):
        raise ConfigError(
            "expected keys and values like the first call's (heads, key size, value size) = "
            f"{(pool.num_heads, pool.k_dim, pool.v_dim)}, got {sizes}. A cache belongs to one "
            "model. Create a new FP8PagedCache for another model"
        )
    if is_initialized and (key.dtype, value.dtype) != (pool.k_dtype, pool.v_dtype):
        raise ConfigError(
            f"expected keys in {pool.k_dtype} and values in {pool.v_dtype}, as in the first call, "
            f"got {key.dtype} and {value.dtype}. Use the same torch.autocast and the same dtype of "
            "the model in all calls, or a new FP8PagedCache"
        )
    num_sequences = layer.group.table.batch
    if num_sequences and batch != num_sequences:
        raise ConfigError(
            f"expected {num_sequences} sequences, which the cache holds, got {batch}. Use "
            "batch_repeat_interleave or batch_select_indices, or a new cache"
        )


def parse_crop(tokens_to_remove: int) -> int:
    """Return the number of tokens to remove. transformers passes minus this number to `crop`."""
    try:
        tokens_to_remove = operator.index(tokens_to_remove)
    except TypeError:
        raise ConfigError(f"crop: expected a whole number, got {tokens_to_remove!r}") from None
    if tokens_to_remove > 0:
        raise ConfigError(
            f"crop: expected 0 or minus the number of tokens to remove, got {tokens_to_remove}. "
            "Call crop(-n) to remove the last n tokens"
        )
    return -tokens_to_remove


def refuse_export() -> None:
    """Raise ConfigError under torch.export with strict=False, whose tensors have no content.

    Compiled code calls this function.
    """
    if not torch.compiler.is_dynamo_compiling():
        raise ConfigError(
            "torch.export: expected strict=True and a module with a preallocated cache as its "
            "attribute, got another export of FP8PagedCache. Export the model without a cache "
            "(use_cache=False), or compile it with torch.compile"
        )


_update_uncompiled = torch.compiler.disable(
    FP8PagedLayer.update,
    reason="a growing FP8PagedCache counts its pages in Python. For fullgraph=True preallocate it: "
    "FP8PagedCache(config, max_cache_len=...)",
)
