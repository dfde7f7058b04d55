"""Convert layers to JSON metadata and tensors, for cache files and pickles."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedConfig, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..errors import ConfigError
from ..formats import LayerPlan
from ..modeling.tensor_parallel import TensorParallel
from ..paging.block_table import BlockTable
from ..paging.layer_group import LayerGroup
from ..paging.page_allocator import NO_PAGE, IntArray, PageAllocator, PageBudget
from ..paging.page_pool import PagePool
from ..scales import KVScales, LayerScales
from ..scales.kv_scales import wrap_scales
from ..scales.layer_scales import ScaleData, parse_constant
from ..utils.digests import compute_digest
from ..utils.files import CACHE_FORMAT, parse_index, write_atomically
from .indexers import INDEXER_TENSORS, get_indexer_tensors
from .options import CacheOptions
from .paged_layers import PagedLayers
from .plans import parse_plan
from .tokens import Tokens

VERSION = 6
_STOCK_CLASSES = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")
_DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
# Positions are int32, which limits the tokens of a sequence.
_MAX_TOKENS = 2**31 - 1
# A block table may have this number of entries, or one entry for each byte of a file if that is
# more.
_MIN_ENTRY_LIMIT = 1 << 21

# Fields of `Tokens`, and the number of their dimensions.
_TOKEN_FIELDS = {"ids": (2,), "mask": (2,), "positions": (2, 3), "features": (2,)}

Tensors = dict[str, torch.Tensor]
Metadata = dict[str, Any]


class History(NamedTuple):
    """The known facts about the calls that filled a cache.

    Attributes:
        tokens: The cached tokens, or None if they are not known.
        model_sample: The result of `sample_model` for the model, or None if it is not known.
        identity: Digest of the model and the options that computed the pages, or "".
    """

    tokens: Tokens | None
    model_sample: str | None
    identity: str


# -- layers as metadata and tensors --------------------------------------------------------------


def pack(paged: PagedLayers) -> tuple[Metadata, Tensors]:
    """Return the contents of paged layers as metadata and tensors, except the options.

    Only pages in use are included, and are renumbered from 0 in each group.
    """
    tensors: Tensors = {}
    groups = []
    fork = paged.fork()
    for group_index, group in enumerate(fork.groups.values()):
        # A preallocated cache also lists empty pages.
        stop_page = -(-group.length // group.page_size)
        rows = group.table.rows[:, min(group.table.first_page, stop_page) : stop_page]
        pages, page_numbers = np.unique(rows, return_inverse=True)
        tensors[f"groups.{group_index}.table"] = torch.from_numpy(
            page_numbers.reshape(rows.shape)
        ).int()
        layers: list[Metadata] = []
        for layer in (layer for layer in fork.layers if layer.group is group):
            index = layer.index
            metadata: Metadata = {"index": index}
            layers.append(metadata)
            if layer.indexer is not None:
                indexer_tensors = get_indexer_tensors(layer.indexer)
                metadata["indexer"] = list(indexer_tensors)
                for name, tensor in indexer_tensors.items():
                    tensors[f"layers.{index}.{name}"] = tensor
            if layer.pool.is_allocated:
                metadata |= {"length": layer.length.count_stored(), **describe_pool(layer.pool)}
                # The pool of a layer with fewer tokens may not have grown to all pages yet.
                layer.pool.memory.grow(group.table.allocator.capacity)
                tensors[f"layers.{index}.pages"] = layer.pool.memory.take(pages)
        groups.append({"window": group.window, "record_past": group.record_past, "layers": layers})
    return {"groups": groups, "open_ended": paged.is_open_ended}, tensors


def describe_pool(pool: PagePool) -> Metadata:
    """Return everything that a page's layout depends on, except the options, as JSON values."""
    return {
        "dtypes": [str(dtype).removeprefix("torch.") for dtype in (pool.k_dtype, pool.v_dtype)],
        "shape": [pool.num_heads, pool.k_dim, pool.v_dim],
    }


def make_pool(
    metadata: Metadata,
    options: CacheOptions,
    index: int,
    device: torch.device,
    budget: PageBudget | None = None,
) -> PagePool:
    """Return a pool without pages for layer `index` from the values of `describe_pool`.

    Raise ConfigError for impossible sizes. Metadata of unexpected types may raise any error.
    """
    sizes = zip(metadata["shape"], (1, 1, 0), strict=True)  # each with its minimum
    num_heads, *dims = (_check_count("shape", size, minimum) for size, minimum in sizes)
    key, value = (
        torch.empty((1, num_heads, 0, dim), dtype=_DTYPES[dtype], device=device)
        for dim, dtype in zip(dims, metadata["dtypes"], strict=True)
    )
    pool = options.make_pool(options.get_layer_plan(index), budget, index)
    pool.allocate(key, value, 0)
    return pool


def unpack(
    metadata: Metadata,
    tensors: Tensors,
    options: CacheOptions,
    stock_layers: list[Any],
    config: PreTrainedConfig | None = None,
) -> PagedLayers:
    """Return growing layers with the contents that `pack` returned, and a separate budget.

    All metadata and tensors are checked before pages are allocated. `tensors` is emptied, so that
    at most one layer is in memory twice.

    Raises:
        ConfigError: A cache with these options cannot hold these contents. Metadata of unexpected
            types may raise any error.
        OutOfPagesError: The pages exceed `options.max_pages`.
    """
    budget = options.make_budget()
    max_tokens = options.max_cache_len or 0
    max_entries = max(_MIN_ENTRY_LIMIT, sum(tensor.nbytes for tensor in tensors.values()))
    _check_bool(metadata, "open_ended")
    windows = [group_metadata["window"] for group_metadata in metadata["groups"]]
    _check_same("windows of the groups", list(dict.fromkeys(windows)), windows)
    stock_keys = [layer.keys for layer in stock_layers] if "stock" in metadata else []
    batch_sizes = {len(keys) for keys in stock_keys if keys is not None}
    paged = PagedLayers(options, config, budget)
    paged.is_open_ended = metadata["open_ended"]
    # Arguments of `PagedLayers.add_layer` and `LayerStorage.restore`, by layer.
    layers: dict[int, tuple[Metadata, Metadata]] = {}
    pools: list[tuple[PagePool, torch.Tensor]] = []
    for group_index, group_metadata in enumerate(metadata["groups"]):
        group_layers = group_metadata["layers"]
        lengths = [
            _check_count("length", layer.get("length", 0), 0, max_tokens or _MAX_TOKENS)
            for layer in group_layers
        ]
        table_name = f"groups.{group_index}.table"
        batch_size = len(tensors[table_name])
        num_columns = -(-max(lengths, default=0) // options.page_size)
        num_entries = batch_size * max(num_columns, max_tokens // options.page_size)
        max_entries -= _check_count(f"{table_name}: entries", num_entries, 0, max_entries)
        group = _unpack_group(group_metadata, table_name, tensors, options, budget, lengths)
        num_pages = group.table.allocator.capacity
        paged.add_group(group)
        if any(lengths):
            batch_sizes.add(_check_count("batch size", batch_size, 1))
        for layer_metadata, length in zip(group_layers, lengths, strict=True):
            index = _check_count("index", layer_metadata["index"])
            if index in layers:
                raise ConfigError(f"index: expected each layer once, got {index} twice")
            indexer = _pop_indexer(layer_metadata, tensors, batch_size, length)
            arguments: Metadata = {
                "window": group.window,
                "has_indexer": "indexer" in layer_metadata,
            }
            contents: Metadata = {"length": length, "indexer_tensors": indexer}
            layers[index] = arguments, contents
            if "length" not in layer_metadata:
                continue
            pages_name = f"layers.{index}.pages"
            pool = make_pool(layer_metadata, options, index, tensors[pages_name].device, budget)
            page_rows = _pop_tensor(tensors, pages_name, torch.uint8, num_pages, pool.layout.size)
            if num_pages:  # without pages, the file does not bound the sizes
                arguments["pool"] = pool
                pools.append((pool, page_rows))
    if len(batch_sizes) > 1:
        raise ConfigError(f"expected one batch size in all groups, got {sorted(batch_sizes)}")
    extra_layers = [index for index in layers if index >= len(layers) + len(stock_layers)]
    if extra_layers or tensors:
        raise ConfigError(f"unexpected layers or tensors: {[*extra_layers, *tensors]}")
    while pools:
        pool, page_rows = pools.pop()
        pool.memory.grow(len(page_rows))
        pool.memory.put(np.arange(len(page_rows)), page_rows)
    for index, (arguments, contents) in sorted(layers.items()):
        paged.add_layer(index, **arguments).restore(**contents)
    return paged


def _unpack_group(
    metadata: Metadata,
    table_name: str,
    tensors: Tensors,
    options: CacheOptions,
    budget: PageBudget,
    lengths: list[int],
) -> LayerGroup:
    """Return a group without layers, and remove the tensor of its block table.

    `lengths` are the numbers of tokens of its layers.
    """
    window = metadata["window"]
    _check_count("window", 1 if window is None else window, 1)
    _check_bool(metadata, "record_past")
    max_length = max(lengths, default=0)
    # A preallocated cache may be saved within a step, when only some layers have new tokens.
    group_length = max_length if options.is_preallocated else min(filter(None, lengths), default=0)
    window_start = LayerGroup(budget, window).find_window_start(group_length)
    batch_size, num_used = tensors[table_name].shape
    num_columns = -(-max_length // options.page_size)
    first_page = _check_count(
        f"{table_name}: first page", num_columns - num_used, 0, window_start // options.page_size
    )
    rows = _pop_tensor(tensors, table_name, torch.int32, batch_size, num_used).cpu().numpy()
    num_pages = int(rows.max(initial=-1)) + 1
    page_bounds = int(rows.min(initial=0)), len(np.unique(rows))
    _check_same(f"{table_name}: pages", (0, num_pages), page_bounds)
    table = _make_table(budget, rows, num_pages, first_page) if num_pages else None
    group = LayerGroup(budget, window, table)
    group.record_past = metadata["record_past"]
    return group


def _pop_tensor(tensors: Tensors, name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Remove a tensor and return it. Raise ConfigError for a different dtype or shape."""
    tensor = tensors.pop(name)
    _check_same(name, (dtype, *shape), (tensor.dtype, *tensor.shape))
    return tensor


def _pop_indexer(layer: Metadata, tensors: Tensors, batch_size: int, length: int) -> Tensors:
    """Remove the tensors of a layer's indexer, and return them by attribute name."""
    indexer_tensors = Tensors()
    for name in layer.get("indexer", ()):
        tensor_name = f"layers.{layer['index']}.{name}"
        batch_axis = INDEXER_TENSORS.index(name)
        tensor = indexer_tensors[name] = tensors.pop(tensor_name)
        sizes = tensor.shape[batch_axis : batch_axis + 2]
        _check_same(tensor_name, (3, batch_size, length), (tensor.ndim, *sizes))
    return indexer_tensors


def _make_table(budget: PageBudget, rows: IntArray, num_pages: int, first_page: int) -> BlockTable:
    """Return a table with a new allocator that holds exactly the pages of `rows`, `[B, n]`.

    These are logical pages `first_page` to `first_page + n - 1`, with the numbers 0 to
    `num_pages - 1`. Raise OutOfPagesError if the budget would be exceeded.
    """
    table = BlockTable(PageAllocator(budget))
    table.allocator.allocates_exactly = True
    budget.check(num_pages)
    table.reserve(0, num_pages * table.page_size, 1)
    table.allocator.allocates_exactly = False
    freed_columns = np.full((len(rows), first_page), NO_PAGE, np.int32)
    table.replace_rows(np.concatenate([freed_columns, rows], axis=1), first_page)
    return table


def _check_same(subject: str, expected: object, got: object) -> None:
    _check(expected == got, subject, expected, got)


def _check_bool(metadata: Metadata, name: str) -> None:
    _check(isinstance(metadata[name], bool), name, "true or false", metadata[name])


def _check(holds: bool, subject: str, rule: object, got: object) -> None:
    """Raise ConfigError unless the rule holds."""
    if not holds:
        raise ConfigError(f"{subject}: expected {rule}, got {got}")


def _check_count(subject: str, value: Any, minimum: int = 0, maximum: int = _MAX_TOKENS) -> int:
    """Return `value`. Raise ConfigError unless it is an integer from `minimum` to `maximum`."""
    if type(value) is not int or not minimum <= value <= maximum:
        raise ConfigError(
            f"{subject}: expected a whole number from {minimum} to {maximum}, got {value!r}"
        )
    return value


# -- files ---------------------------------------------------------------------------------------


def save(
    paged: PagedLayers, stock_layers: list[Any], history: History, path: str | os.PathLike[str]
) -> Path:
    """Atomically write paged layers and layers of transformers to a file, and return its path.

    Raise ConfigError if a layer of transformers has a state other than keys and values.
    """
    target = Path(path)
    metadata, tensors = pack(paged)
    metadata["stock"] = [
        _pack_stock_layer(layer, f"stock.{index}", tensors)
        for index, layer in enumerate(stock_layers)
    ]
    metadata["options"] = _pack_options(paged.options, tensors)
    metadata["model_sample"] = history.model_sample
    metadata["identity"] = history.identity
    token_tensors = vars(history.tokens) if history.tokens is not None else {}
    tensors |= {
        f"tokens.{name}": tensor.clone()
        for name, tensor in token_tensors.items()
        if tensor is not None
    }
    contiguous_tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    header = {"format": CACHE_FORMAT, "version": str(VERSION), "meta": json.dumps(metadata)}
    header["digest"] = compute_digest(header, contiguous_tensors)
    write_atomically(
        {target: lambda temporary: save_file(contiguous_tensors, temporary, metadata=header)}
    )
    return target


def _pack_stock_layer(layer: Any, name: str, tensors: Tensors) -> Metadata:
    """Return the metadata of a layer of transformers, and add its tensors to `tensors`."""
    class_name = type(layer).__name__
    metadata: Metadata = {"kind": class_name}
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        if isinstance(layer, DynamicSlidingWindowLayer):
            metadata |= {"window": layer.sliding_window, "seen": layer.cumulative_length}
        if layer.is_initialized:
            tensors[f"{name}.keys"], tensors[f"{name}.values"] = layer.keys, layer.values
    elif class_name != "DummyLayer":
        raise ConfigError(
            f"save: expected layers of this package, or dense layers that grow, got a "
            f"{class_name}, whose state has no file format. Use torch.save, which pickles it"
        )
    return metadata


def _pack_options(options: CacheOptions, tensors: Tensors) -> Metadata:
    """Return the options as JSON values, and add the tensors of scales to `tensors`."""
    plan = options.plan
    scales = options.scales
    metadata = dict(vars(options))
    metadata["plan"] = (
        list(map(str, plan))
        if isinstance(plan, LayerPlan)
        else {index: list(map(str, sides)) for index, sides in plan.items()}
    )
    if isinstance(scales, KVScales):
        for index, layer in scales.layers.items():
            layer_tensors = {"k": layer.k, "v": layer.v, "k_center": layer.k_center}
            tensors |= {
                f"scales.{index}.{name}": tensor
                for name, tensor in layer_tensors.items()
                if tensor is not None
            }
        metadata["scales"] = {"format": scales.format, "layers": list(scales.layers)}
    return metadata


def load(
    path: str | os.PathLike[str], device: str | torch.device | None
) -> tuple[PagedLayers, list[Any], History]:
    """Read paged layers, layers of transformers and their history to `device`, or to the CPU.

    Invalid data may raise any type of error.
    """
    with safe_open(Path(path), framework="pt", device="cpu") as file:
        header = file.metadata() or {}
        version = header.get("format"), header.get("version")
        if version != (CACHE_FORMAT, str(VERSION)):
            raise ConfigError(
                f"format and version: expected {(CACHE_FORMAT, str(VERSION))}, got {version}. "
                "Compute the cache again with this version of the package"
            )
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    _check_same("digest", header.pop("digest"), compute_digest(header, tensors))
    metadata = json.loads(header["meta"])
    for name in tensors:
        if device is not None and name.startswith(("layers.", "stock.")):
            tensors[name] = tensors[name].to(device)
    stock_layers = [
        _unpack_stock_layer(layer_metadata, f"stock.{index}", tensors)
        for index, layer_metadata in enumerate(metadata["stock"])
    ]
    options = _unpack_options(metadata["options"], tensors)
    history = History(_pop_tokens(tensors), metadata["model_sample"], metadata["identity"])
    _check(
        isinstance(history.model_sample, str | None),
        "model_sample",
        "a text or None",
        history.model_sample,
    )
    _check(isinstance(history.identity, str), "identity", "a text", history.identity)
    paged = unpack(metadata, tensors, options, stock_layers)
    if history.tokens is not None and paged.batch:
        _check_same("tokens: rows", paged.batch, len(history.tokens.ids))
    return paged, stock_layers, history


def _pop_tokens(tensors: Tensors) -> Tokens | None:
    """Remove the tensors of the cached tokens, and return the tokens."""
    ids = tensors.get("tokens.ids")
    if ids is None:
        return None
    token_tensors: Tensors = {}
    for name, ndims in _TOKEN_FIELDS.items():
        tensor = tensors.pop(f"tokens.{name}", None)
        if tensor is None:
            continue
        is_integer = not (tensor.is_floating_point() or tensor.is_complex())
        _check(is_integer, f"tokens.{name}", "integers", tensor.dtype)
        row_counts = (1, len(ids)) if name == "positions" else (len(ids),)
        has_shape = tensor.ndim in ndims and tensor.shape[-1] <= ids.shape[-1]
        _check(
            has_shape and tensor.shape[-2] in row_counts,
            f"tokens.{name}",
            f"a shape that fits the ids, {tuple(ids.shape)}",
            tuple(tensor.shape),
        )
        token_tensors[name] = tensor.long()
    return Tokens(**token_tensors)


def _unpack_stock_layer(metadata: Metadata, name: str, tensors: Tensors) -> Any:
    """Return the layer of transformers that `_pack_stock_layer` packed, and remove its tensors."""
    if metadata["kind"] not in _STOCK_CLASSES:
        raise ConfigError(f"{name}: expected one of {_STOCK_CLASSES}, got {metadata['kind']!r}")
    window = _check_count(f"{name}: window", metadata["window"], 1) if "window" in metadata else 0
    layer_class = getattr(cache_utils, metadata["kind"])
    layer = layer_class(window) if window else layer_class()
    num_tokens = 0
    if f"{name}.keys" in tensors:
        keys, values = (tensors.pop(f"{name}.{side}") for side in ("keys", "values"))
        got = (keys.ndim, values.ndim, *values.shape[:3], keys.dtype.is_floating_point)
        _check_same(name, (4, 4, *keys.shape[:3], values.dtype.is_floating_point), got)
        layer.lazy_initialization(keys, values)
        layer.keys = keys
        layer.values = values
        num_tokens = keys.shape[2]
    if window:
        limit = num_tokens if num_tokens < window - 1 else _MAX_TOKENS
        layer.cumulative_length = _check_count(f"{name}: seen", metadata["seen"], num_tokens, limit)
    return layer


def _unpack_options(metadata: Metadata, tensors: Tensors) -> CacheOptions:
    """Return the options that `_pack_options` packed, and remove their tensors."""
    _check_same("options", CacheOptions.__dataclass_fields__.keys(), metadata.keys())
    packed_plan = metadata["plan"]
    sides_by_layer = packed_plan if isinstance(packed_plan, dict) else {}
    plans = {parse_index(text): LayerPlan.parse(*sides) for text, sides in sides_by_layer.items()}
    packed_scales = metadata["scales"]
    scales: KVScales | float | None = None
    if isinstance(packed_scales, dict):
        layers = {}
        for index in packed_scales["layers"]:
            k, v, center = (
                tensors.pop(f"scales.{index}.{name}", None) for name in ("k", "v", "k_center")
            )
            # Scales are saved with their plan. Dynamic scales, or only centers, need a plan.
            layers[index] = LayerScales(k, v, center, plan=plans.get(index))
        scales = wrap_scales(ScaleData(layers, packed_scales["format"]))
    elif packed_scales is not None:
        scales = parse_constant(packed_scales, "constant")
    options = CacheOptions(
        **metadata
        | {
            "plan": parse_plan(plans or LayerPlan.parse(*packed_plan)),
            "scales": scales,
            "tensor_parallel": TensorParallel(*metadata["tensor_parallel"]),
        }
    )
    options.check()
    return options
