"""Exchange pages between a cache and a `PrefixStore`, and compute the keys of pages."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from ..cache import serialization
from ..cache.layer import FP8PagedLayer
from ..cache.options import CacheOptions
from ..cache.paged_layers import PagedLayers
from ..cache.tokens import UNKNOWN, Tokens
from ..errors import ConfigError, OutOfPagesError
from ..formats import LayerPlan
from ..modeling.model_support import find_varying_rope
from ..scales import KVScales
from ..utils.digests import compute_digest
from .file import StoredPage, chain_keys
from .store import PrefixStore


def check_store_type(store: object) -> None:
    """Raise ConfigError for an object that is neither a `PrefixStore` nor None."""
    if store is not None and not isinstance(store, PrefixStore):
        raise ConfigError(
            f"prefix_store: expected an hf_fp8kv.PrefixStore, got {store!r}. Make one with "
            "PrefixStore(path)"
        )


def check_store(store: object, options: CacheOptions, config: Any, cache: Any = None) -> None:
    """Raise ConfigError unless the store can hold pages of a model with this config.

    `cache` is the cache that computes the pages, or None for an engine.
    """
    layers = [] if cache is None else cache.layers
    problem = ""
    if options.tensor_parallel.size > 1:
        problem = "a model in one process, got a tensor-parallel model"
    elif cache is not None and cache.is_open_ended:
        problem = "a cache with a config, got none. Pass the model's config to the cache"
    elif options.is_preallocated:
        problem = "a growing cache, got max_cache_len. Leave it out"
    elif config.is_encoder_decoder:
        problem = "a decoder, got an encoder-decoder, whose pages depend on the encoder's input"
    elif any(type(layer) is not FP8PagedLayer for layer in layers):
        problem = "only paged layers, got layers of other kinds (recurrent, indexed, skipped)"
    elif rope_type := find_varying_rope(config):
        problem = f"constant frequencies of RoPE, got {rope_type!r}, which depends on the length"
    if problem:
        raise ConfigError(f"prefix_store: expected {problem}. Otherwise, leave prefix_store out")
    options.check_stored("prefix_store")


def digest_options(options: CacheOptions, layers: Iterable[tuple[int, Any, LayerPlan]]) -> str:
    """Return a digest of the storage format. `layers` yields index, window and plan of a layer."""
    scales = options.scales
    return compute_digest(
        options.page_size,
        options.backend,
        options.has_dynamic_scales,
        scales.digest if isinstance(scales, KVScales) else scales,
        [(index, window, str(plan)) for index, window, plan in layers],
    )


class StoredPrompts:
    """The full pages of a batch of prompts, which are restored from a store and written to it.

    `num_restored` is the number of pages of each prompt that were read from the store.
    """

    def __init__(self, store: PrefixStore | None, cache: Any) -> None:
        self._store: Any = store
        self._cache = cache
        self._keys: list[list[str]] = []  # key of each page, by prompt
        self._batch = UNKNOWN
        self.num_restored = 0

    def compute_keys(self, identity: str, batch: Tokens) -> None:
        """Compute the keys of all pages. A batch without consecutive positions has no keys.

        `identity` is a digest of everything that pages depend on, except the tokens. Padding is
        included in `batch`, because it determines the page and slot of each token.
        """
        ids, mask, positions, features = batch.expand(batch.length, torch.device("cpu"))
        consecutive_positions = (mask.cumsum(1) - 1).clamp(min=0)
        if not bool(((positions != consecutive_positions) & mask).any()):
            prompts = torch.where(features != 0, features, ids).masked_fill(~mask, -1)
            page_size = self._cache.options.page_size
            self._keys = [chain_keys(identity, prompt, page_size) for prompt in prompts]
        self._batch = batch

    def restore(self) -> None:
        """Restore, in an empty cache, the first pages that the store has for every prompt.

        At least the last token is left to compute. Sizes and dtypes are read from the files,
        because they are not known before the first layer has run.
        """
        cache = self._cache
        page_size = cache.options.page_size
        num_prompts = len(self._keys)
        max_pages = (self._batch.length - 1) // page_size
        if not num_prompts or not max_pages or cache.host_length():
            return
        page_keys = list(zip(*self._keys, strict=True))[:max_pages]
        pages = self._read_pages(dict.fromkeys(chain.from_iterable(page_keys)))
        num_pages = sum(all(key in pages for key in keys) for keys in page_keys)
        while self._batch.find_boundary(num_pages * page_size) != num_pages * page_size:
            num_pages -= 1
        if not num_pages:
            self._store.add_counts(misses=num_prompts)
            return
        try:
            cache.adopt(self._unpack_pages(num_pages, pages))
        except OutOfPagesError:
            return  # computing the tokens raises this error with a better message
        self.num_restored = num_pages
        num_tokens = num_prompts * num_pages * page_size
        cache.restored_tokens += num_tokens
        self._store.add_counts(hits=num_prompts, tokens_found=num_tokens)
        for prompt_keys in self._keys:
            self._store.touch(prompt_keys[:num_pages])

    def undo_restore(self, error: Exception) -> None:
        """Empty the cache and refuse its restored pages, because the model cannot use them."""
        cache = self._cache
        cache.reset()
        num_pages = len(self._keys) * self.num_restored
        cache.restored_tokens -= num_pages * cache.options.page_size
        restored_keys = chain.from_iterable(keys[: self.num_restored] for keys in self._keys)
        for key in dict.fromkeys(restored_keys):
            self._store.refuse(key, error)

    @contextmanager
    def store_after_prefill(self) -> Iterator[None]:
        """Keep pages that leave a window within the `with` block, and store pages after it.

        A prompt that diverges later needs the window before that position. Pages that a layer has
        freed are not stored. Nothing is stored unless every layer holds exactly the prompt, because
        wrappers of a model may add tokens to it.
        """
        cache = self._cache
        if all(self._store.has(key) for key in chain.from_iterable(self._keys)):
            yield
            return
        # With `max_pages`, no additional pages are kept, so that a prompt fits as without a store.
        groups = () if cache.options.max_pages is not None else cache.groups.values()
        windowed_groups = [
            group for group in groups if group.window is not None and not group.record_past
        ]
        try:
            for group in windowed_groups:
                group.record_past = True
            yield
        finally:
            for group in windowed_groups:
                group.record_past = False
        if {*cache._paged.read_lengths()} == {self._batch.length}:
            first_page = max(group.table.first_page for group in cache.groups.values())
            for index, keys in enumerate(self._keys):
                self._store.write(keys, partial(_copy_pages, cache.paged_layers, index), first_page)
                self._store.touch(keys)
        for group in windowed_groups:
            group.crop(0)

    def _read_pages(self, keys: Collection[str]) -> dict[str, StoredPage]:
        """Return the pages with these keys, by key, up to the first page that is missing.

        The store ignores pages, with a warning, unless they have the metadata and sizes that this
        cache would write, with the head sizes of the first page.
        """
        metadata: list[serialization.Metadata] = []
        sizes: list[int] = []
        options = self._cache.options

        def check(page: StoredPage) -> None:
            if not metadata:
                layers = self._cache.paged_layers
                for layer, pool_metadata in zip(layers, page.metadata, strict=True):
                    pool = serialization.make_pool(
                        pool_metadata, options, layer.index, torch.device("cpu")
                    )
                    metadata.append(serialization.describe_pool(pool))
                    sizes.append(pool.layout.size)
                    # Raises ScaleError for other sizes.
                    options.get_layer_scales(layer.index, *pool_metadata["shape"])
            if page.metadata != metadata or list(map(len, page.rows)) != sizes:
                raise ValueError("its metadata or sizes differ from the pages of this cache")

        return dict(zip(keys, self._store.read(keys, check), strict=False))

    def _unpack_pages(self, num_pages: int, pages: dict[str, StoredPage]) -> PagedLayers:
        """Return layers with the first `num_pages` pages of each prompt."""
        cache = self._cache
        options = cache.options
        length = num_pages * options.page_size
        metadata = next(iter(pages.values())).metadata
        indices = {key: index for index, key in enumerate(pages)}
        rows_by_layer = list(zip(*(page.rows for page in pages.values()), strict=True))
        pages.clear()
        tensors: dict[str, torch.Tensor] = {}
        groups: list[serialization.Metadata] = []
        for group_index, (window, group) in enumerate(cache.groups.items()):
            first_token = 0 if group.record_past else group.find_first_kept(length)
            used_pages = slice(first_token // options.page_size, num_pages)
            keys = [prompt_keys[used_pages] for prompt_keys in self._keys]
            used_keys, page_numbers = np.unique(keys, return_inverse=True)
            table = page_numbers.reshape(len(keys), -1).astype(np.int32)
            tensors[f"groups.{group_index}.table"] = torch.from_numpy(table)
            layers = []
            group_layers = [layer for layer in cache.paged_layers if layer.group is group]
            for index in (layer.index for layer in group_layers):
                layers.append({"index": index, "length": length, **metadata[index]})
                rows = [rows_by_layer[index][indices[key]] for key in used_keys]
                tensors[f"layers.{index}.pages"] = torch.stack(rows)
                rows_by_layer[index] = ()  # frees the rows of the layer
            groups.append({"window": window, "record_past": group.record_past, "layers": layers})
        return serialization.unpack(
            {"groups": groups, "open_ended": False}, tensors, options, [], cache.config
        )


def _copy_pages(layers: list[Any], row: int, indices: list[int]) -> list[StoredPage]:
    """Return copies of the pages of the sequence in a row of the block table, at these indices."""
    layer_rows = []
    for layer in layers:
        page_numbers = layer.group.table.rows[row, np.array(indices)]
        layer_rows.append(layer.pool.memory.take(page_numbers).cpu())
    metadata = [serialization.describe_pool(layer.pool) for layer in layers]
    return [StoredPage(list(rows), metadata) for rows in zip(*layer_rows, strict=True)]
