"""Exchange of pages between a cache and a `PrefixStore`, and the keys of pages."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from ..cache import serialization
from ..cache.held_text import Text
from ..cache.layer import FP8PagedIndexedLayer
from ..cache.options import CacheOptions
from ..cache.paged_layers import PagedLayers
from ..errors import ConfigError, OutOfPagesError
from ..formats import LayerPlan
from ..modeling.model_support import moving_rope
from ..scales import KVScales
from ..utils.digests import digest_of
from .file import Page, chain_keys
from .store import PrefixStore

Facts = dict[str, Any]


def check_store(store: object, options: CacheOptions, config: Any, cache: Any = None) -> None:
    """Raise ConfigError unless pages of a model with this config can be stored.

    `cache` is the cache with these pages, or None for an engine.
    """
    layers = [] if cache is None else cache.layers
    is_indexed = (isinstance(layer, FP8PagedIndexedLayer) for layer in layers)
    why = ""
    if not isinstance(store, PrefixStore):
        why = f"a hf_fp8kv.PrefixStore, got {store!r}; make one with PrefixStore(path)"
    elif options.tensor_parallel.size > 1:
        why = "a model in one process, got one that is split; leave it out"
    elif cache is not None and cache.open_ended:
        why = "a cache with a config, got one without; pass the model's config"
    elif options.is_preallocated:
        why = "a growing cache, got max_cache_len; leave one of the two out"
    elif config.is_encoder_decoder:
        why = "a decoder, got an encoder-decoder, whose pages depend on the encoder's input"
    elif any(is_indexed) or (layers and cache.stock_layers):
        why = "only paged layers, got some of a different kind (recurrent, indexed, skipped)"
    elif moving := moving_rope(config):
        why = f"constant frequencies of RoPE, got {moving!r}, which depends on the length"
    if why:
        raise ConfigError(f"prefix_store: expected {why}")
    options.check_stored("prefix_store")


def identify_options(options: CacheOptions, layers: Iterable[tuple[int, Any, LayerPlan]]) -> str:
    """Return a digest of how values are stored. Layers are (index, window, storage plan)."""
    scales = options.scales
    return digest_of(
        options.page_size, options.backend, options.dynamic_scales,
        scales.digest if isinstance(scales, KVScales) else scales,
        [(index, window, str(plan)) for index, window, plan in layers],
    )  # fmt: skip


class StoredPrompt:
    """The full pages of a prompt, to restore from a store and to write to it.

    `restored` is the number of pages of each row that came from the store.
    """

    def __init__(self, store: PrefixStore | None, cache: Any) -> None:
        self._store: Any = store
        self._cache, self._keys, self._length, self.restored = cache, list[list[str]](), 0, 0

    def find(self, identity: str, text: Text) -> None:
        """Compute the keys of the pages. There are none if tokens have unusual positions.

        `identity` is everything that pages depend on, except the text. Padding belongs to the text,
        because it determines the page and slot of each token.
        """
        ids, mask, positions = text.columns(text.length, torch.device("cpu"))
        expected, size = (mask.cumsum(1) - 1).clamp(min=0), self._cache.options.page_size
        if not bool(((positions != expected) & mask).any()):
            rows = ids.masked_fill(~mask, -1)
            self._keys = [chain_keys(identity, row, size) for row in rows]
        self._length = text.length

    def restore(self) -> None:
        """Restore the pages that the store has for every row in an empty cache.

        At least the last token is left to compute. Sizes and dtypes are read from the files,
        because the model does not have them before its first layer has run.
        """
        store, cache, keys = self._store, self._cache, self._keys
        size = cache.options.page_size
        max_pages = (self._length - 1) // size
        if not keys or not max_pages or cache.host_length():
            return
        pages = self._read(max_pages)
        count = sum(all(row[index] in pages for row in keys) for index in range(max_pages))
        if not count:
            store.count(misses=len(keys))
            return
        try:
            cache.adopt(self._unpack(count, pages))
        except OutOfPagesError:
            return  # computing these tokens raises this error with a better message
        self.restored, tokens = count, len(keys) * count * size
        cache.restored += tokens
        store.count(hits=len(keys), tokens_found=tokens)
        for row in keys:
            store.touch(row[:count])

    def forget(self, error: Exception) -> None:
        """Undo `restore`, because the model cannot use these pages."""
        self._cache.reset()
        self._cache.restored -= len(self._keys) * self.restored * self._cache.options.page_size
        for key in dict.fromkeys(key for row in self._keys for key in row[: self.restored]):
            self._store.refuse(key, error)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep pages that leave a window during the prefill, and then store all pages.

        A text that diverges later needs the window before that position. Nothing is stored unless
        every layer holds exactly the prompt, because wrappers of a model may add tokens to it.
        """
        store, cache = self._store, self._cache
        if all(store.has(key) for row in self._keys for key in row):
            yield
            return
        # With a page limit, a prompt must fit as it does without a store.
        groups = () if cache.options.max_pages is not None else cache.groups.values()
        windowed = [x for x in groups if x.window is not None and not x.record_past]
        try:
            for group in windowed:
                group.record_past = True
            yield
        finally:
            for group in windowed:
                group.record_past = False
        if {*cache._paged.host_lengths()} == {self._length}:
            first = max(group.table.first for group in cache.groups.values())
            for number, row in enumerate(self._keys):
                store.write(row, partial(_read_pages, cache.paged_layers, number), first)
                store.touch(row)
        for group in windowed:
            group.crop(0)

    def _read(self, max_pages: int) -> dict[str, Page]:
        """Return the first `max_pages` pages of each row by key, up to the first missing page.

        Each page is checked to have the facts and sizes that this cache would write, with the head
        sizes of the first page.
        """
        pages: dict[str, Page] = {}
        facts: list[Facts] = []
        sizes: list[int] = []
        paged, options, cpu = self._cache.paged_layers, self._cache.options, torch.device("cpu")

        def check(page: Page) -> None:
            if not facts:
                for layer, layer_facts in zip(paged, page.facts, strict=True):
                    pool = serialization.make_pool(layer_facts, options, layer.index, cpu)
                    facts.append(serialization.describe(pool))
                    sizes.append(pool.layout.size)
                    options.layer_scales(layer.index, *layer_facts["shape"])  # or raise ScaleError
            if page.facts != facts or [*map(len, page.rows)] != sizes:
                raise ValueError("a page that this model's cache would not write")

        keys_to_read = dict.fromkeys(row[index] for index in range(max_pages) for row in self._keys)
        pages.update(zip(keys_to_read, self._store.read(keys_to_read, check), strict=False))
        return pages

    def _unpack(self, count: int, pages: dict[str, Page]) -> PagedLayers:
        """Return layers with the first `count` pages of each row."""
        cache, keys, options = self._cache, self._keys, self._cache.options
        length, facts = count * options.page_size, next(iter(pages.values())).facts
        order = {key: index for index, key in enumerate(pages)}
        rows = [*zip(*(page.rows for page in pages.values()), strict=True)]  # by layer
        pages.clear()
        tensors: dict[str, torch.Tensor] = {}
        groups: list[Facts] = []
        for g, (window, group) in enumerate(cache.groups.items()):
            first = 0 if group.record_past else group.first_kept(length) // options.page_size
            used, table = np.unique([row[first:count] for row in keys], return_inverse=True)
            table = table.reshape(len(keys), -1).astype(np.int32)
            tensors[f"groups.{g}.table"] = torch.from_numpy(table)
            layers = []
            for i in (layer.index for layer in cache.paged_layers if layer.store.group is group):
                layers.append({"index": i, "length": length, **facts[i]})
                layer_rows, rows[i] = rows[i], ()
                tensors[f"layers.{i}.pages"] = torch.stack([layer_rows[order[key]] for key in used])
                if (center := options.layer_scales(i, *facts[i]["shape"])[2]) is not None:
                    tensors[f"layers.{i}.k_center"] = center.repeat(len(keys), 1, 1)
            groups.append({"window": window, "record_past": group.record_past, "layers": layers})
        all_facts = {"groups": groups, "open_ended": False}
        return serialization.unpack(all_facts, tensors, options, [], cache.config)


def _read_pages(layers: list[Any], row: int, indices: list[int]) -> list[Page]:
    """Return the pages of one row of a cache at these indices."""
    rows = []
    for layer in layers:
        numbers = layer.store.group.table.rows[row, np.array(indices)]
        rows.append(layer.store.pool.memory.take(numbers).cpu())
    facts = [serialization.describe(layer.store.pool) for layer in layers]
    return [Page([*layer_rows], facts) for layer_rows in zip(*rows, strict=True)]
