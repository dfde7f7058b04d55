"""The pages of a cache that a `PrefixStore` keeps: which, under which keys, and back again."""

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
from ..cache.snapshot import CacheSnapshot
from ..errors import ConfigError, OutOfPagesError
from ..formats import LayerPlan
from ..paging.page_pool import PagePool
from ..scales import KVScales
from ..utils.digests import digest_of
from .file import Page, chain_keys
from .store import PrefixStore

_ROPES = ("rope_parameters", "rope_scaling")
# Frequencies that depend on how long the text has become: K of a prefix with them.
_MOVING = ("dynamic", "longrope")

Facts = dict[str, Any]


def check_store(store: object, options: CacheOptions, config: Any, cache: Any = None) -> None:
    """Raise ConfigError unless pages of a model with this config can be stored.

    `cache`: the cache that has these pages. None means an engine.
    """
    # The types of RoPE, however deep in a config or in its text part.
    configs = (config, config.get_text_config(decoder=True))
    ropes = str([getattr(part, name, None) for part in configs for name in _ROPES])
    moving = [name for name in _MOVING if repr(name) in ropes]
    layers = [] if cache is None else cache.layers
    is_indexed = (isinstance(layer, FP8PagedIndexedLayer) for layer in layers)
    why = ""
    if not isinstance(store, PrefixStore):
        why = f"a hf_fp8kv.PrefixStore, got {store!r}; make one with PrefixStore(path)"
    elif options.tensor_parallel.size > 1:
        why = "a model in one process, got one that is split; leave it out"
    elif cache is not None and cache.open_ended:
        why = "a cache with a config, which names the layers, got one without; pass the model's"
    elif options.is_preallocated:
        why = "a growing cache, got max_cache_len; leave one of the two out"
    elif options.prefill != "stored":
        why = (
            "prefill='stored', got 'exact', whose first call reads its own K and V unrounded, so "
            "pages depend on the cut into calls; make the cache with prefill='stored'"
        )
    elif options.first_call_centers:
        why = (
            "no centers but those of a plan, got a center of each text's own first call; pass "
            "plan=hf_fp8kv.choose_plan(model), or store K without centers"
        )
    elif config.is_encoder_decoder:
        why = "a decoder alone, got an encoder-decoder, whose pages depend on what it encodes"
    elif any(is_indexed) or (layers and cache.stock_layers):
        why = "layers that are only pages, got some of another kind (recurrent, indexed, skipped)"
    elif moving:
        why = f"frequencies of RoPE that stay, got {moving[0]!r}: they change with the length"
    if why:
        raise ConfigError(f"prefix_store: expected {why}")


def identify_options(options: CacheOptions, layers: Iterable[tuple[int, Any, LayerPlan]]) -> str:
    """Return a digest of how values are stored, in layers with an index, window and plan each."""
    scales = options.scales
    return digest_of(
        options.page_size, options.backend, options.dynamic_scales,
        scales.digest if isinstance(scales, KVScales) else scales,
        [(index, window, str(plan)) for index, window, plan in layers],
    )  # fmt: skip


class StoredPrompt:
    """The full pages of a prompt: which a store has, and which a cache has for it.

    `restored` is how many pages of each row came from the store.
    """

    def __init__(self, store: PrefixStore | None, cache: Any) -> None:
        self._store: Any = store
        self._cache, self._keys, self._length, self.restored = cache, list[list[str]](), 0, 0

    def find(self, identity: str, text: Text) -> None:
        """Find the keys of the pages: there are none if tokens are at other positions.

        `identity` is everything that pages depend on, except the text. Padding is a part of it,
        since it decides in which slot of which page a token is.
        """
        ids, mask, positions = text.columns(text.length, torch.device("cpu"))
        counted, size = (mask.cumsum(1) - 1).clamp(min=0), self._cache.options.page_size
        if not bool(((positions != counted) & mask).any()):
            rows = ids.masked_fill(~mask, -1)
            self._keys = [chain_keys(identity, row, size) for row in rows]
        self._length = text.length

    def restore(self) -> None:
        """Give an empty cache the pages that the store has of every row, except its last token.

        Sizes and dtypes come from the files. The model's are not known before its first layer has
        computed.
        """
        store, cache, keys = self._store, self._cache, self._keys
        size = cache.options.page_size
        most = (self._length - 1) // size
        if not keys or not most or cache.host_length():
            return
        pages, layers = self._read(most)
        missing = (at for at in range(most) if any(row[at] not in pages for row in keys))
        if not (count := next(missing, most)):
            store.count(misses=len(keys))
            return
        try:
            cache.adopt(self._unpack(count, pages, layers))
        except OutOfPagesError:
            return  # the computation of these tokens raises this error with a better message
        self.restored, tokens = count, len(keys) * count * size
        cache.restored += tokens
        store.count(hits=len(keys), tokens_found=tokens)
        for row in keys:
            store.touch(row[:count])

    def forget(self, error: Exception) -> None:
        """Take back what `restore` did: the model cannot use these pages."""
        self._cache.reset()
        self._cache.restored -= len(self._keys) * self.restored * self._cache.options.page_size
        for key in dict.fromkeys(key for row in self._keys for key in row[: self.restored]):
            self._store.refuse(key, error)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the pages that windows leave behind during the prefill, and then store all pages.

        A text that diverges later needs the window before that place. Nothing is stored unless
        every layer holds exactly the prompt: wrappers of a model may add tokens to it.
        """
        store, cache = self._store, self._cache
        if all(store.has(key) for row in self._keys for key in row):
            yield
            return
        # Within a limit a prompt has to fit as it does without a store.
        groups = () if cache.options.max_pages is not None else cache.groups.values()
        passing = [x for x in groups if x.window is not None and not x.record_past]
        try:
            for group in passing:
                group.record_past = True
            yield
        finally:
            for group in passing:
                group.record_past = False
        if {*cache._paged.host_lengths()} == {self._length}:
            first = max(group.table.first for group in cache.groups.values())
            for number, row in enumerate(self._keys):
                store.write(row, partial(_take_pages, cache.paged_layers, number), first)
                store.touch(row)
        for group in passing:
            group.crop(0)

    def _read(self, most: int) -> tuple[dict[str, Page], list[Facts]]:
        """Return the first `most` pages of each row, up to one that is not there, by key.

        Also what each says of its layers: what this cache would, for the sizes in the first page.
        """
        pages: dict[str, Page] = {}
        layers: list[Facts] = []
        shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}
        paged, options = self._cache.paged_layers, self._cache.options

        def check(page: Page) -> None:
            for i, layer in enumerate(() if pages else paged):
                told = page.facts["layers"][i]
                pool, held = serialization.make_page(told, options, layer.store.encoding.plan)
                layers.append(_describe(layer, pool, held))
                shapes.update({f"{i}.{name}": (x.shape[1:], x.dtype) for name, x in held.items()})
                options.layer_scales(layer.index, *layers[i]["shape"])  # ScaleError: other heads
            found = {name: (x.shape, x.dtype) for name, x in page.tensors.items()}
            if page.facts != {"layers": layers} or found != shapes:
                raise ValueError("not what this model's cache would write")

        wanted = dict.fromkeys(row[at] for at in range(most) for row in self._keys)
        pages.update(zip(wanted, self._store.read(wanted, check), strict=False))
        return pages, layers

    def _unpack(self, count: int, pages: dict[str, Page], layers: list[Facts]) -> CacheSnapshot:
        """Return a snapshot of a cache that holds the first `count` pages of each row."""
        cache, keys, options = self._cache, self._keys, self._cache.options
        length = count * options.page_size
        tensors: dict[str, torch.Tensor] = {}
        groups: list[Facts] = []
        used: dict[int | None, tuple[int, list[str]]] = {}
        for g, (window, group) in enumerate(cache.groups.items()):
            seen = 0 if group.record_past else group.visible_from(length)
            first = min(seen, length - 1) // options.page_size
            numbers: dict[str, int] = {}
            rows = [[numbers.setdefault(x, len(numbers)) for x in row[first:count]] for row in keys]
            tensors[f"groups.{g}.table"] = torch.tensor(rows, dtype=torch.int32, device="cpu")
            groups.append({"window": window, "first": first, "record_past": group.record_past})
            used[window] = g, list(numbers)
        described = []
        for i, layer in enumerate(layers):
            g, names = used[layer["window"]]
            for name in layer["tensors"]:
                parts = [pages[key].tensors.pop(f"{i}.{name}") for key in names]
                tensors[f"layers.{i}.{name}"] = torch.stack(parts)
            center = options.layer_scales(layer["index"], *layer["shape"])[2]
            if center is not None:
                tensors[f"layers.{i}.k_center"] = center.expand(len(keys), -1, -1).contiguous()
            described.append({**layer, "kind": "paged", "group": g, "length": length})
        facts = {"groups": groups, "layers": described, "open_ended": False}
        return serialization.unpack(facts, tensors, options, [])


def _take_pages(layers: list[Any], row: int, places: list[int]) -> list[Page]:
    """Return the pages of one row of a cache, by their places in it."""
    tensors: list[dict[str, torch.Tensor]] = [{} for _ in places]
    facts = []
    for i, layer in enumerate(layers):
        pool, group = layer.store.pool, layer.store.group
        numbers = group.table.rows[row, np.array(places)]
        held = serialization.name_as_in_files(pool, pool.take(numbers))
        for name, tensor in held.items():
            for at, part in enumerate(tensor.cpu()):
                tensors[at][f"{i}.{name}"] = part.contiguous()
        facts.append(_describe(layer, pool, held))
    return [Page(part, {"layers": facts}) for part in tensors]


def _describe(layer: Any, pool: PagePool, tensors: dict[str, torch.Tensor]) -> Facts:
    """Return the facts that a page has of one layer."""
    return {
        "index": layer.index,
        "window": layer.sliding_window,
        **serialization.describe(pool, layer.store.encoding.plan),
        "tensors": list(tensors),
    }
