"""The pages of a cache that a `PrefixStore` keeps: which, under which keys, and back again."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from ..cache import serialization
from ..cache.held_text import Text
from ..cache.indexed import FP8PagedIndexedLayer
from ..cache.options import CacheOptions
from ..cache.snapshot import CacheSnapshot
from ..errors import ConfigError, OutOfPagesError
from ..formats import LayerPlan
from ..paging.page_pool import PagePool
from ..scales import KVScales
from ..utils.digests import digest_of
from .file import Page, chain_keys
from .store import PrefixStore

# Frequencies that depend on how long the text has become: K of a prefix with them.
_MOVING = ("dynamic", "longrope")

Facts = dict[str, Any]


def check_kind(store: object, options: CacheOptions) -> None:
    """Raise ConfigError unless `store` is a PrefixStore, and the model is in one process."""
    if not isinstance(store, PrefixStore):
        raise ConfigError(
            f"prefix_store: expected a hf_fp8kv.PrefixStore, got {store!r}; make one with "
            "PrefixStore(path)"
        )
    if options.tensor_parallel.size > 1:
        raise ConfigError(
            "prefix_store: expected a model in one process, got one that is split; leave it out"
        )


def check_store(store: object, cache: Any, config: Any) -> None:
    """Raise ConfigError unless a cache for a model with this config can have prefixes stored."""
    options, why = cache.options, ""
    check_kind(store, options)
    if cache.open_ended:
        why = "a cache with a config, which names the layers, got one without; pass the model's"
    elif options.is_preallocated:
        why = "a growing cache, got max_cache_len; leave one of the two out"
    elif options.prefill != "stored":
        why = (
            "prefill='stored', got 'exact', whose first call reads its own K and V unrounded: its "
            "pages would not be those of another cut into calls; make the cache with "
            "prefill='stored'"
        )
    elif options.first_call_centers:
        why = (
            "no centers but those of a plan, got a center of each text's own first call; pass "
            "plan=hf_fp8kv.choose_plan(model), or store K without centers"
        )
    elif config.is_encoder_decoder:
        why = "a decoder alone, got an encoder-decoder, whose pages depend on what it encodes"
    elif cache.stock_layers or any(isinstance(x, FP8PagedIndexedLayer) for x in cache.layers):
        why = (
            "layers that are pages and nothing else, got some of another kind (recurrent ones, an "
            "indexer, or skip_layers)"
        )
    if why:
        raise ConfigError(f"prefix_store: expected {why}")
    check_frequencies(config)


def check_frequencies(config: Any) -> None:
    """Raise ConfigError if the frequencies of RoPE depend on how long a text has become."""
    if moving := _rope_types(config).intersection(_MOVING):
        raise ConfigError(
            f"prefix_store: expected frequencies of RoPE that stay, got {min(moving)!r}: they "
            "change with the length"
        )


def _rope_types(config: Any) -> set[str]:
    """Return every type of RoPE that a config or its text part names, however deep."""
    found = set()
    parts = (config, config.get_text_config(decoder=True))
    stack = [getattr(x, name, None) for x in parts for name in ("rope_parameters", "rope_scaling")]
    while stack:
        part = stack.pop()
        if isinstance(part, dict):
            found.add(str(part.get("rope_type", part.get("type"))))
            stack.extend(part.values())
    return found


def identify_options(options: CacheOptions, layers: Iterable[tuple[int, Any, LayerPlan]]) -> str:
    """Return a digest of how values are stored, in layers with an index, window and plan each."""
    scales = options.scales
    return digest_of(
        options.page_size, options.backend, options.dynamic_scales,
        scales.digest if isinstance(scales, KVScales) else scales,
        [(index, window, str(plan)) for index, window, plan in layers],
    )  # fmt: skip


def row_keys(identity: str, text: Text, page_size: int) -> list[list[str]]:
    """Return the keys of the full pages of each row; none if tokens are at other positions.

    Padding is a part of a text: it decides in which slot of which page a token is.
    """
    ids = text.ids.cpu()
    mask = torch.ones_like(ids)
    if text.mask is not None:
        mask[:, : text.mask.shape[1]] = text.mask.cpu() != 0
    if text.positions is not None:
        counted = (mask.cumsum(1) - 1).clamp(min=0)
        moved = (text.positions.cpu() != counted) & (mask != 0)
        if bool(moved.any()):
            return []
    return [chain_keys(identity, row, page_size) for row in ids.masked_fill(mask == 0, -1)]


def restore_prefix(cache: Any, keys: list[list[str]], most: int) -> int:
    """Give an empty cache the pages that a store has of each row, at most `most` of them.

    Return how many. Their sizes and dtypes are what the files say: those of the model are not known
    before its first layer has computed.
    """
    store, rows, size = cache.prefix_store, len(keys), cache.options.page_size
    if cache.host_length() or not most:
        return 0
    count, pages, layers = _read_prefix(store, keys, most, cache)
    if not count:
        store.count(misses=rows)
        return 0
    try:
        cache.adopt(_unpack_prefix(keys, count, pages, layers, cache))
    except OutOfPagesError:
        return 0  # whoever computes these tokens raises the same, with a better explanation
    cache.restored += rows * count * size
    store.count(hits=rows, tokens_found=rows * count * size)
    for row in keys:
        store.touch(row[:count])
    return count


def forget_prefix(cache: Any, keys: list[list[str]], count: int, error: Exception) -> None:
    """Take back what `restore_prefix` did: the model cannot use these pages."""
    cache.reset()
    cache.restored -= len(keys) * count * cache.options.page_size
    for key in dict.fromkeys(key for row in keys for key in row[:count]):
        cache.prefix_store.refuse(key, error)


@contextmanager
def kept_for_store(cache: Any, keys: list[list[str]], text: Any) -> Iterator[None]:
    """Keep the pages that windows leave behind while `text` is computed, and then store all pages.

    A text that diverges later needs the window before that place. Nothing is stored unless every
    layer holds exactly the tokens of `text`: wrappers of a model may add tokens to a prompt.
    """
    store, options = cache.prefix_store, cache.options
    if all(store.has(key) for row in keys for key in row):
        yield
        return
    # Within a limit a prompt has to fit as it does without a store.
    passing = [
        group
        for group in cache.groups.values()
        if group.window is not None and not group.record_past and options.max_pages is None
    ]
    try:
        for group in passing:
            group.record_past = True
        yield
    finally:
        for group in passing:
            group.record_past = False
    if {*cache._paged.host_lengths()} == {text.length}:
        first = max(group.table.first for group in cache.groups.values())
        for number, row in enumerate(keys):
            store.write(row, partial(_take_pages, cache.paged_layers, number), first)
            store.touch(row)
    for group in passing:
        group.crop(0)


def _read_prefix(
    store: PrefixStore, keys: list[list[str]], most: int, cache: Any
) -> tuple[int, dict[str, Page], list[Facts]]:
    """Return how many pages every row has there, at most `most`.

    Also all that were read, by key, and what they say of each layer.
    """
    pages: dict[str, Page] = {}
    layers: list[Facts] = []
    shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}

    def check(page: Page) -> None:
        if not pages:
            layers[:], held = _expect(page.facts["layers"], cache.paged_layers, cache.options)
            shapes.update({name: (x.shape[1:], x.dtype) for name, x in held.items()})
        found = {name: (x.shape, x.dtype) for name, x in page.tensors.items()}
        if page.facts != {"layers": layers} or found != shapes:
            raise ValueError("not what this model's cache would write")
        for layer in layers:
            cache.options.layer_scales(layer["index"], *layer["shape"])  # ScaleError: other heads

    wanted = dict.fromkeys(row[at] for at in range(most) for row in keys)
    for key, page in zip(wanted, store.read(wanted, check), strict=False):
        pages[key] = page
    missing = (at for at in range(most) if any(row[at] not in pages for row in keys))
    return next(missing, most), pages, layers


def _expect(
    told: Any, layers: list[Any], options: CacheOptions
) -> tuple[list[Facts], dict[str, torch.Tensor]]:
    """Return what a page says of these layers, and its tensors, `[1, ...]`, on no device.

    The sizes and dtypes of K and V are those that a page was `told`. Bad data raise any error,
    except OSError and MemoryError.
    """
    facts: list[Facts] = []
    tensors: dict[str, torch.Tensor] = {}
    for i, (layer, parts) in enumerate(zip(layers, told, strict=True)):
        pool, held = serialization.make_page(parts, options, layer.storage)
        facts.append(_describe(layer, pool, held))
        tensors |= {f"{i}.{name}": tensor for name, tensor in held.items()}
    return facts, tensors


def _unpack_prefix(
    keys: list[list[str]], count: int, pages: dict[str, Page], layers: list[Facts], cache: Any
) -> CacheSnapshot:
    """Return a snapshot of a cache that holds the first `count` pages of each row."""
    options, size = cache.options, cache.options.page_size
    length = count * size
    tensors: dict[str, torch.Tensor] = {}
    facts: list[Facts] = []
    used: list[list[str]] = []
    for g, (window, group) in enumerate(cache.groups.items()):
        seen = 0 if group.record_past else group.visible_from(length)
        first = min(seen, length - 1) // size
        names = list(dict.fromkeys(key for row in keys for key in row[first:count]))
        numbers = {key: number for number, key in enumerate(names)}
        rows = [[numbers[key] for key in row[first:count]] for row in keys]
        tensors[f"groups.{g}.table"] = torch.tensor(rows, dtype=torch.int32, device="cpu")
        facts.append({"window": window, "first": first, "record_past": group.record_past})
        used.append(names)
    windows = list(cache.groups)
    described = []
    for i, layer in enumerate(layers):
        g = windows.index(layer["window"])
        for name in layer["tensors"]:
            parts = [pages[key].tensors.pop(f"{i}.{name}") for key in used[g]]
            tensors[f"layers.{i}.{name}"] = torch.stack(parts)
        heads, k_dim, v_dim = layer["shape"]
        center = options.layer_scales(layer["index"], heads, k_dim, v_dim)[2]
        if center is not None:
            center = center.expand(len(keys), -1, -1).contiguous()
            tensors[f"layers.{i}.k_center"] = center
        described.append({**layer, "kind": "paged", "group": g, "length": length})
    all_facts = {"groups": facts, "layers": described, "open_ended": False}
    return serialization.unpack(all_facts, tensors, options, [])


def _take_pages(layers: list[Any], row: int, places: list[int]) -> list[Page]:
    """Return the pages of one row of a cache, by their places in it."""
    tensors: list[dict[str, torch.Tensor]] = [{} for _ in places]
    facts = []
    for i, layer in enumerate(layers):
        pool, group = layer.pool, layer.group
        group.store_pending()
        numbers = group.table.rows[row, np.array(places)]
        held = serialization.name_as_in_files(pool, pool.take(numbers))
        for name, tensor in held.items():
            for at, part in enumerate(tensor.cpu()):
                tensors[at][f"{i}.{name}"] = part.contiguous()
        facts.append(_describe(layer, pool, held))
    return [Page(part, {"layers": facts}) for part in tensors]


def _describe(layer: Any, pool: PagePool, tensors: dict[str, torch.Tensor]) -> Facts:
    """Return what a page says of one of its layers."""
    return {
        "index": layer.index,
        "window": layer.sliding_window,
        **serialization.describe(pool, layer.storage),
        "tensors": list(tensors),
    }
