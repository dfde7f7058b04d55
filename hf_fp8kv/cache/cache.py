"""`FP8PagedCache`: all that knows transformers' cache classes."""

import copy
import dataclasses
import logging
import os
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache

from ..errors import ConfigError, Fp8KVError
from ..modeling.layer_specs import read_config
from ..modeling.model_support import refuse_config
from ..modeling.tensor_parallel import check_divides
from ..paging.block_table import PageBudget
from ..paging.layer_group import LayerGroup
from ..scales import KVScales, declared_kv_scales
from ..scales.resolve import resolve
from ..utils.tensors import collect_tensors
from ..utils.warn_once import warn_once
from . import serialization
from .layer import FP8PagedLayer, PagedLayerBase, parse_crop
from .layer_factory import LayerFactory
from .options import CacheOptions
from .paged_tensor import densify
from .preallocated_layer import FP8PagedPreallocatedLayer
from .snapshot import CacheSnapshot, LayerSnapshot

__all__ = ["FP8PagedCache"]

logger = logging.getLogger(__name__)


class FP8PagedCache(DynamicCache):
    """A cache for `generate()` that stores keys and values as pages of 8-bit numbers.

    ```python
    model = AutoModelForCausalLM.from_pretrained(id, attn_implementation="fp8_paged")
    out = model.generate(**inputs, past_key_values=FP8PagedCache(model.config))
    ```

    Full, sliding and chunked attention layers are paged; every other kind of layer (linear,
    convolution, hybrid, indexed, dummy, a model's own) is transformers' own, in its own dtype.

    Args:
        config: the model's config; None: layers are added as the model asks, all full attention.
        dtype: what K and V are stored in: "fp8_e4m3" ("fp8", "fp8_e4m3fn"), "fp8_e4m3fnuz",
            "fp8_e5m2", "fp8_e3m4", or "auto": the model's dtype, as it is.
        key_dtype: overrides `dtype` for K.
        value_dtype: overrides `dtype` for V.
        scales: None: dynamic, one scale per token and head. A `KVScales`, a path, a folder or a
            repository of the Hub: static ones. A number: that constant, in the unit of the stored
            format (`real = stored * scale`).
        center_keys: store K minus a frozen center per head and channel. None: if `scales` carry
            centers; True: if they do not, the mean of the first call, per sequence (padding among
            it); False: never.
        page_size: slots per page, in tokens; a power of two from 8 to 1024.
        max_cache_len: given: room for so many tokens is taken at the first call, at addresses that
            stay, for `torch.compile` and CUDA graphs. None: pages are taken as tokens come.
        max_pages: the most pages that may be held at once, over all block tables and forks.
        skip_layers: layers to keep in the model's dtype, in transformers' own layers: numbers
            and/or layer types such as "sliding_attention".
        prefill: "exact": a call on an empty cache attends to its own fresh K and V, and only
            writes 8 bits; "stored": every call attends to what is stored.
        backend: "auto", "torch", "numba" or "triton".
        tp_rank: this process's rank among those that share the heads of the model, for `scales`;
            `tensor_parallel(model)` gives both.
        tp_size: how many processes share the heads.
        offloading: only False; some models pass it when they make a cache of the same kind.

    Raises:
        ConfigError, ScaleError, BackendError: an argument cannot work; the message says which.
    """

    config: PreTrainedConfig | None

    def __init__(
        self,
        config: PreTrainedConfig | None = None,
        *,
        dtype: str | torch.dtype = "fp8_e4m3",
        key_dtype: str | torch.dtype | None = None,
        value_dtype: str | torch.dtype | None = None,
        scales: "KVScales | str | os.PathLike[str] | float | None" = None,
        center_keys: bool | None = None,
        page_size: int = 64,
        max_cache_len: int | None = None,
        max_pages: int | None = None,
        skip_layers: Collection[int | str] = (),
        prefill: str = "exact",
        backend: str = "auto",
        tp_rank: int = 0,
        tp_size: int = 1,
        offloading: bool = False,
    ) -> None:
        if offloading:
            raise ConfigError(
                "offloading: expected False, got True: 8-bit pages are read where they are; call "
                "offload() and prefetch() of the layers yourself"
            )
        if config is not None and not isinstance(config, PreTrainedConfig):
            raise ConfigError(
                f"config: expected a model's config or None, got {type(config).__name__}; "
                "write FP8PagedCache(model.config)"
            )
        if config is not None:
            refuse_config(config)
        options = CacheOptions.parse(
            dtype=dtype, key_dtype=key_dtype, value_dtype=value_dtype,
            scales=resolve(scales, tp_rank=tp_rank, tp_size=tp_size), center_keys=center_keys,
            page_size=page_size, max_cache_len=max_cache_len, max_pages=max_pages, prefill=prefill,
            backend=backend, tp_rank=tp_rank, tp_size=tp_size,
        )  # fmt: skip
        super().__init__()
        self.layer_class_to_replicate = None
        decoder = None if config is None else config.get_text_config(decoder=True)
        self._set_up(options, decoder, PageBudget(options.page_size, options.max_pages))
        if decoder is None:
            if skip_layers:
                raise ConfigError(
                    "skip_layers expected a config to look the layers up in, got None"
                )
            if options.is_preallocated:
                raise ConfigError(
                    "max_cache_len expected a config, got None: preallocated layers are made "
                    "before the model asks for layers"
                )
            return
        if options.tp_size > 1:
            check_divides(decoder, options.tp_size)
        self.layers = self._factory.layers_for(decoder, skip_layers)
        if options.scales is None and (declared := declared_kv_scales(config)):
            warn_once(
                logger,
                f"this checkpoint declares static KV scales ({declared}) that this cache does not "
                "use: it uses dynamic scales, which need none. FP8PagedCache.from_pretrained(...) "
                "or scales=... uses them",
            )

    def _set_up(
        self, options: CacheOptions, config: PreTrainedConfig | None, budget: PageBudget
    ) -> None:
        self.options, self.config, self.budget = options, config, budget
        self._factory = LayerFactory(options, config, budget)
        self.groups: dict[int | None, LayerGroup] = self._factory.groups
        # Without a config layers are added as the model asks.
        self.open_ended = config is None
        # The layer that was written last, and the tokens it was given.
        self._last_update = (0, 0)

    @classmethod
    def from_pretrained(
        cls,
        repo_or_dir: str | os.PathLike[str],
        *,
        config: PreTrainedConfig | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
        subfolder: str | None = None,
        trust_remote_code: bool = False,
        tp_rank: int = 0,
        tp_size: int = 1,
        strict: bool = True,
        **cache_keywords: Any,
    ) -> "FP8PagedCache":
        """Returns a cache with the static scales of a checkpoint.

        Args:
            repo_or_dir: a local folder, or a repository of the Hub.
            config: the model's config; None: read from the same place.
            revision, token, cache_dir, local_files_only, force_download, subfolder,
                trust_remote_code: as everywhere in transformers.
            tp_rank, tp_size: as in the constructor.
            strict: whether an incomplete set of scales is an error.
            cache_keywords: those of the constructor.

        Raises:
            ScaleError: there are no scales, or they cannot be used.
        """
        hub: dict[str, Any] = {
            "revision": revision, "token": token, "cache_dir": cache_dir,
            "local_files_only": local_files_only, "force_download": force_download,
            "subfolder": subfolder,
        }  # fmt: skip
        if "scales" in cache_keywords:
            raise ConfigError(
                "scales: expected none, since from_pretrained reads them from the checkpoint; use "
                "FP8PagedCache(config, scales=...) for others"
            )
        scales = KVScales.from_pretrained(
            repo_or_dir, tp_rank=tp_rank, tp_size=tp_size, strict=strict, **hub
        )
        if config is None:
            config = read_config(repo_or_dir, hub, trust_remote_code)
        return cls(config, scales=scales, tp_rank=tp_rank, tp_size=tp_size, **cache_keywords)

    @property
    def paged_layers(self) -> list[PagedLayerBase]:
        """The layers that are stored in pages."""
        return [layer for layer in self.layers if isinstance(layer, PagedLayerBase)]

    @property
    def stock_layers(self) -> list[Any]:
        """The layers that are transformers' own."""
        return [layer for layer in self.layers if not isinstance(layer, PagedLayerBase)]

    @property
    def is_preallocated(self) -> bool:
        """Whether all memory is taken at the first call (`max_cache_len`)."""
        return self.options.is_preallocated

    # -- what transformers calls -------------------------------------------------------------

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new tokens of a layer, and returns the keys and values to attend to."""
        if self.open_ended:
            while len(self.layers) <= layer_idx:
                self.layers.append(self._factory.new_layer(len(self.layers), None))
        try:
            if layer_idx >= len(self.layers):
                raise ConfigError(
                    f"expected a layer below {len(self.layers)}, which the config names, got layer "
                    f"{layer_idx}; a cache belongs to one model: make a new FP8PagedCache"
                )
            keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        except Fp8KVError:
            self._undo_step(layer_idx, key_states)
            raise
        if not torch.compiler.is_compiling():
            self._last_update = (layer_idx, key_states.shape[2])
        if getattr(self.config, "_attn_implementation", None) == "flex_attention":
            # Flex attention is an operator of the compiler, which takes no tensor subclasses.
            return densify(keys), densify(values)
        return keys, values

    def _undo_step(self, layer_idx: int, key_states: torch.Tensor) -> None:
        """Takes back what earlier layers stored in a step that failed at `layer_idx`."""
        last, tokens = self._last_update
        if self.is_preallocated or last >= layer_idx or tokens != key_states.shape[-2]:
            return
        layers = self.paged_layers
        start = next(
            (int(x.get_seq_length()) for x in layers if x.index == layer_idx),
            self.host_length() - tokens,
        )
        for layer in layers:
            if layer.index < layer_idx and layer.get_seq_length() == start + tokens:
                layer.group.crop(tokens, [layer.member])
        self._last_update = (len(self.layers), 0)
        self._forget_empty()

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Columns of the mask, and the position of the first, for a call of `query_length`."""
        if isinstance(query_length, int) and query_length == 0:
            raise ConfigError(
                "expected at least one token that the cache does not hold yet, got none; the cache "
                f"holds {self.host_length()} tokens: pass the whole text, the cached part "
                "included, and at least one token more, or make a new cache (or cache.reset())"
            )
        return super().get_mask_sizes(query_length, layer_idx)

    def host_length(self) -> int:
        """Return the tokens stored as a number; waits for the device in the preallocated form."""
        return max((layer.host_length() for layer in self.paged_layers), default=0)

    def crop(self, tokens_to_remove: int) -> None:
        """The last `-tokens_to_remove` tokens are gone; pages behind the window are given back.

        Raises:
            ConfigError: a positive number, or tokens that a window no longer holds. The cache is
                as it was.
        """
        tokens = parse_crop(tokens_to_remove)
        for group in self.groups.values():
            group.check_crop(tokens)
        for layer in self.stock_layers:
            layer.crop(tokens_to_remove)
        if not self.is_preallocated:
            for group in self.groups.values():
                group.crop(tokens)
            self._forget_empty()
            return
        for layer in self.paged_layers:
            layer.crop(tokens_to_remove)
        if tokens:
            self._unshare(self.host_length())

    def reset(self) -> None:
        """The cache is empty; the layers stay, and so do the addresses of the preallocated form."""
        for layer in self.stock_layers:
            layer.reset()
        if self.is_preallocated:
            for layer in self.paged_layers:
                layer.reset()
            if any(group.table.is_shared for group in self.groups.values()):
                # Sequences that came from one beam: each gets pages of its own again.
                for group in self.groups.values():
                    group.table.truncate(0)
                self._unshare(0)
            return
        for group in self.groups.values():
            group.clear()
        self._forget_empty()

    def _forget_empty(self) -> None:
        """After tokens went: an empty layer has no center, and a pool without pages no memory."""
        for layer in self.paged_layers:
            assert isinstance(layer, FP8PagedLayer)
            if not layer.get_seq_length():
                layer.k_center = None
            if layer.pool.is_allocated and not layer.group.table.allocator.held:
                layer.release_memory()
        for group in self.groups.values():
            if not group.table.allocator.held:
                group.table.allocator.forget()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequence `i` is then what sequence `beam_idx[i]` was; moves page numbers, not bytes."""
        for layer in self.stock_layers:
            layer.reorder_cache(beam_idx)
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence is then there `repeats` times, side by side; no bytes are copied."""
        if repeats < 1:
            raise ConfigError(f"repeats: expected a whole number above 0, got {repeats!r}")
        for layer in self.stock_layers:
            layer.batch_repeat_interleave(repeats)
        if batch := self._batch():
            self._select(torch.arange(batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only the sequences `indices` are left, in that order; no bytes are copied."""
        for layer in self.stock_layers:
            layer.batch_select_indices(indices)
        if batch := self._batch():
            self._select(torch.arange(batch)[torch.as_tensor(indices).cpu()])

    def _batch(self) -> int:
        return max((group.table.batch for group in self.groups.values()), default=0)

    def _select(self, sequences: torch.Tensor) -> None:
        batch = self._batch()
        if not batch:
            return
        rows = sequences.cpu().numpy().astype(np.int64)
        if rows.ndim != 1 or not len(rows) or rows.min() < 0 or rows.max() >= batch:
            raise ConfigError(
                f"expected numbers of sequences from 0 to {batch - 1}, got {rows.tolist()}"
            )
        length = self.host_length() if self.is_preallocated else 0
        for group in self.groups.values():
            if self.is_preallocated:
                # Pages that hold nothing yet are not shared: each sequence gets its own again.
                group.table.truncate(length)
            group.select(rows)
        for layer in self.paged_layers:
            layer.select_rows(sequences)
        if self.is_preallocated:
            self._unshare(length)

    def _unshare(self, length: int) -> None:
        """Give each sequence of the preallocated form pages of its own from `length` on."""
        assert self.options.max_cache_len is not None
        batch = self._batch()
        for group in self.groups.values():
            if batch:
                group.apply(group.table.reserve(length, self.options.max_cache_len, batch))
        for layer in self.paged_layers:
            assert isinstance(layer, FP8PagedPreallocatedLayer)
            layer.refresh(batch)

    # -- forks, files, sizes -----------------------------------------------------------------

    def fork(self) -> "FP8PagedCache":
        """Return an independent cache with the same content.

        Pages are shared and counted: nothing is copied until one of the two writes into a page
        that both hold; so a cache and its forks are for one thread at a time. (The preallocated
        form and transformers' own layers are copied.) Pages are given back when the last cache
        that holds them is gone.
        """
        snapshot = self._snapshot()
        stock = copy.deepcopy(snapshot.stock_layers)
        return self._restore(dataclasses.replace(snapshot, stock_layers=stock))

    def _snapshot(self) -> CacheSnapshot:
        groups = {window: group.snapshot() for window, group in self.groups.items()}
        layers: list[LayerSnapshot | None] = []
        stock = []
        for layer in self.layers:
            if isinstance(layer, PagedLayerBase):
                layers.append(layer.snapshot(groups[layer.sliding_window]))
            else:
                layers.append(None)
                stock.append(layer)
        return CacheSnapshot(
            self.options, list(groups.values()), layers, stock, self.open_ended, self.budget,
            self.config,
        )  # fmt: skip

    @classmethod
    def _restore(cls, snapshot: CacheSnapshot) -> "FP8PagedCache":
        cache, options, budget = cls(), snapshot.options, snapshot.budget
        if options.is_preallocated:
            budget = PageBudget(options.page_size, options.max_pages)
        cache._set_up(options, snapshot.config, budget)
        cache.layers = cache._factory.restore_layers(snapshot)
        cache.open_ended = snapshot.open_ended
        return cache

    def __deepcopy__(self, memo: dict[int, Any]) -> "FP8PagedCache":
        memo[id(self)] = twin = self.fork()
        return twin

    def __copy__(self) -> "FP8PagedCache":
        return self.fork()

    def __reduce__(self) -> tuple[Any, ...]:
        snapshot = self._snapshot()
        packed = serialization.pack(snapshot)
        return _unpickle, (type(self), *packed, snapshot.options, snapshot.stock_layers)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes what the cache holds to a safetensors file, whole or not at all.

        Only pages in use are written. Returns the path.

        Raises:
            ConfigError: a layer that is not attention (linear, convolution, hybrid) holds a state.
        """
        return serialization.save(self._snapshot(), path)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, device: str | torch.device | None = None
    ) -> "FP8PagedCache":
        """Returns the cache that `save` wrote, on `device` (None: the CPU).

        Each layer goes to the device of the model's layer with the first tokens that it is given.

        Raises:
            ConfigError: the file is not one of `save`'s, or is damaged.
        """
        return cls._restore(serialization.load(path, device))

    def memory_footprint(self) -> dict[str, int]:
        """Returns what the cache takes, in bytes (but for `tokens`).

        Keys: `pages` (codes of K and V, room for growth included), `scales` (dynamic and static
        scales, centers), `tables` (block tables and lengths), `other` (transformers' own layers),
        `total` (all of these), `used` (the part of pages and dynamic scales that holds tokens of
        this cache), and `tokens` (tokens held, over all sequences). Forks share pages: each
        reports all of them under `pages`.
        """
        sizes = Counter(dict.fromkeys(("pages", "scales", "tables", "other", "used"), 0))
        for layer in self.paged_layers:
            sizes.update(layer.memory_footprint())
        for group in self.groups.values():
            sizes.update(group.memory_footprint())
        sizes["other"] = sum(t.nbytes for x in self.stock_layers for t in collect_tensors(vars(x)))
        total = sum(sizes[kind] for kind in ("pages", "scales", "tables", "other"))
        tokens = self._batch() * self.host_length()
        return {**sizes, "total": total, "tokens": tokens}


def _unpickle(kind: type[FP8PagedCache], *packed: Any) -> FP8PagedCache:
    return kind._restore(serialization.unpack(*packed))
