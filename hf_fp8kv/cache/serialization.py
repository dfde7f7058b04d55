"""Convert layers to JSON facts and tensors, for cache files and pickles."""

import json
import os
from dataclasses import astuple
from pathlib import Path
from typing import Any

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
from ..paging.page_allocator import NO_PAGE, Ints, PageAllocator, PageBudget
from ..paging.page_pool import PagePool
from ..scales import KVScales, LayerScales
from ..scales.kv_scales import wrap_scales
from ..scales.layer_scales import ScaleData, check_constant
from ..utils.digests import digest_of
from ..utils.files import CACHE_FORMAT, write_all
from .indexers import INDEXER_TENSORS, get_tensors
from .options import CacheOptions
from .paged_layers import PagedLayers
from .plans import parse_plan
from .rope_rotation import RopeRotation

VERSION = 3
_STOCK_CLASSES = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")
_DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
# Positions are int32. A block table may have `_MIN_ENTRY_LIMIT` entries, or one entry for each byte
# of a file if that is more.
_MAX_TOKENS, _MIN_ENTRY_LIMIT = 2**31 - 1, 1 << 21

_ROPE_KEYS = ("base", "share", "moving", "mla", "neighbors", "positions")  # keys in files

Tensors = dict[str, torch.Tensor]
Facts = dict[str, Any]


# -- layers as facts and tensors -----------------------------------------------------------------


def pack(paged: PagedLayers) -> tuple[Facts, Tensors]:
    """Return the contents of paged layers as facts and tensors, except the options.

    Only pages in use are included, and are renumbered from 0 in each group.
    """
    tensors: Tensors = {}
    groups, fork = [], paged.fork()
    for group_index, group in enumerate(fork.groups.values()):
        # A preallocated cache also lists empty pages.
        stop_page = -(-group.length // group.page_size)
        rows = group.table.rows[:, min(group.table.first_page, stop_page) : stop_page]
        pages, numbers = np.unique(rows, return_inverse=True)
        tensors[f"groups.{group_index}.table"] = torch.from_numpy(numbers.reshape(rows.shape)).int()
        layers: list[Facts] = []
        for store in (x for x in fork.stores if x.group is group):
            i, rope, pool = store.encoding.index, store.encoding.rope, store.pool
            facts: Facts = {"index": i}
            layers.append(facts)
            if rope is not None:
                facts["turns"] = dict(zip(_ROPE_KEYS, astuple(rope), strict=True))
            if store.indexer is not None:
                indexer_tensors = get_tensors(store.indexer)
                facts["indexer"] = list(indexer_tensors)
                tensors |= {f"layers.{i}.{name}": x for name, x in indexer_tensors.items()}
            if store.is_initialized:
                facts |= {"length": store.length.count_stored(), **describe_pool(pool)}
                # The pool of a layer with fewer tokens may not have grown to all pages yet.
                pool.memory.grow(group.table.allocator.capacity)
                tensors[f"layers.{i}.pages"] = pool.memory.take(pages)
                if store.encoding.k_center is not None:
                    tensors[f"layers.{i}.k_center"] = store.encoding.k_center.clone()
        record_past = group.record_past
        groups.append({"window": group.window, "record_past": record_past, "layers": layers})
    return {"groups": groups, "open_ended": paged.is_open_ended}, tensors


def describe_pool(pool: PagePool) -> Facts:
    """Return everything that a page's layout depends on, except the options, as JSON values."""
    return {
        "dtypes": [str(dtype).removeprefix("torch.") for dtype in (pool.k_dtype, pool.v_dtype)],
        "shape": [pool.num_heads, pool.k_dim, pool.v_dim],
    }


def make_pool(
    facts: Facts, options: CacheOptions, index: int, device: torch.device,
    budget: PageBudget | None = None,
) -> PagePool:  # fmt: skip
    """Return a pool without pages for layer `index` from the facts that `describe_pool` returned.

    Raises:
        ConfigError: The sizes are impossible. Facts of unexpected types may raise any error.
    """
    sizes = zip(facts["shape"], (1, 1, 0), strict=True)  # each with its minimum
    num_heads, *dims = (_check_count("shape", size, minimum) for size, minimum in sizes)
    key, value = (
        torch.empty((1, num_heads, 0, dim), dtype=_DTYPES[dtype], device=device)
        for dim, dtype in zip(dims, facts["dtypes"], strict=True)
    )
    pool = options.make_pool(options.layer_plan(index), budget, index)
    pool.allocate(key, value, 0)
    return pool


def unpack(
    facts: Facts, tensors: Tensors, options: CacheOptions, stock_layers: list[Any],
    config: PreTrainedConfig | None = None,
) -> PagedLayers:  # fmt: skip
    """Return growing layers with the contents that `pack` returned, and a separate budget.

    All facts and tensors are checked before pages are allocated. `tensors` is emptied, so that only
    one layer exists twice at a time.

    Raises:
        ConfigError: A cache with these options cannot hold these facts or tensors. Facts of
            unexpected types may raise any error.
        OutOfPagesError: The pages exceed `options.max_pages`.
    """
    budget, max_tokens = options.make_budget(), options.max_cache_len or 0
    max_entries = max(_MIN_ENTRY_LIMIT, sum(tensor.nbytes for tensor in tensors.values()))

    def pop_tensor(name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        tensor = tensors.pop(name)
        _check_same(name, (dtype, *shape), (tensor.dtype, *tensor.shape))
        return tensor

    _check_same("open_ended", bool, type(facts["open_ended"]))
    batch_sizes = {len(x.keys) for x in stock_layers if "stock" in facts and x.keys is not None}
    paged = PagedLayers(options, config, budget)
    paged.is_open_ended = facts["open_ended"]
    # Arguments of `PagedLayers.add_layer` and `LayerStore.restore`, by layer.
    layers: dict[int, tuple[Facts, Facts]] = {}
    pools: list[tuple[PagePool, torch.Tensor]] = []
    for group_index, group_facts in enumerate(facts["groups"]):
        name, window = f"groups.{group_index}.table", group_facts["window"]
        _check_same(f"another group has a window of {window}", False, window in paged.groups)
        _check_same("record_past", bool, type(group_facts["record_past"]))
        _check_count("window", 1 if window is None else window, 1)
        group_layers, limit = group_facts["layers"], max_tokens or _MAX_TOKENS
        lengths = [_check_count("length", x.get("length", 0), 0, limit) for x in group_layers]
        stored_lengths = [length for length in lengths if length]
        max_length = max(lengths, default=0)
        # A preallocated cache may be saved within a step, when only some layers have new tokens.
        length = max_length if max_tokens else min(stored_lengths, default=0)
        visible_page = LayerGroup(budget, window).find_window_start(length) // options.page_size
        (batch, num_used), num_columns = tensors[name].shape, -(-max_length // options.page_size)
        first_page = _check_count(f"{name}: first page", num_columns - num_used, 0, visible_page)
        num_entries = batch * max(num_columns, max_tokens // options.page_size)
        max_entries -= _check_count(f"{name}: entries", num_entries, 0, max_entries)
        rows = pop_tensor(name, torch.int32, batch, num_used).cpu().numpy()
        num_pages = int(rows.max(initial=-1)) + 1
        first_and_count = int(rows.min(initial=0)), len(np.unique(rows))
        _check_same(f"{name}: pages", (0, num_pages), first_and_count)
        table = _make_table(budget, rows, first_page) if num_pages else None
        group = LayerGroup(budget, window, table)
        group.record_past = group_facts["record_past"]
        paged.add_group(group)
        if stored_lengths:
            batch_sizes.add(_check_count("sequences", batch, 1))
        for layer_facts, length in zip(group_layers, lengths, strict=True):
            i = _check_count("index", layer_facts["index"])
            _check_same(f"layer {i} is in another group", False, i in layers)
            names = layer_facts.get("indexer", ())
            indexer_tensors = {name: tensors.pop(f"layers.{i}.{name}") for name in names}
            for name, tensor in indexer_tensors.items():
                axis = INDEXER_TENSORS.index(name)
                sizes = (tensor.ndim, *tensor.shape[axis : axis + 2])
                _check_same(f"layers.{i}.{name}", (3, batch, length), sizes)
            rope, has_indexer = _read_rope(layer_facts), "indexer" in layer_facts
            arguments: Facts = {"window": window, "rope": rope, "has_indexer": has_indexer}
            contents: Facts = {"length": length, "center": None, "indexer_tensors": indexer_tensors}
            layers[i] = arguments, contents
            if "length" not in layer_facts:
                continue
            name, center_name = f"layers.{i}.pages", f"layers.{i}.k_center"
            pool = make_pool(layer_facts, options, i, tensors[name].device, budget)
            page_rows = pop_tensor(name, torch.uint8, num_pages, pool.layout.size)
            if options.layer_plan(i).k.centered and (length or center_name in tensors):
                shape = batch, pool.num_heads, pool.k_dim
                contents["center"] = pop_tensor(center_name, torch.float32, *shape)
            if num_pages:  # without pages, the file does not bound the sizes
                arguments["pool"] = pool
                pools.append((pool, page_rows))
    _check_count("numbers of sequences", len(batch_sizes), 0, 1)
    extra_layers = [i for i in layers if i >= len(layers) + len(stock_layers)]
    _check_same("layers and tensors that are too many", [], [*extra_layers, *tensors])
    while pools:
        pool, page_rows = pools.pop()
        pool.memory.grow(len(page_rows))
        pool.memory.put(np.arange(len(page_rows)), page_rows)
    for i, (arguments, contents) in sorted(layers.items()):
        paged.add_layer(i, **arguments).store.restore(**contents)
    return paged


def _make_table(budget: PageBudget, rows: Ints, first_page: int) -> BlockTable:
    """Return a table with a new allocator that holds exactly the pages of `rows`, `[B, n]`.

    These are logical pages `first_page` to `first_page + n - 1`. Their numbers are 0, 1, 2, ...

    Raises:
        OutOfPagesError: The budget would be exceeded.
    """
    table = BlockTable(PageAllocator(budget))
    table.allocator.allocates_exactly = True
    num_pages = int(rows.max()) + 1
    budget.check(num_pages)
    table.reserve(0, num_pages * table.page_size, 1)
    table.allocator.allocates_exactly = False
    missing = np.full((len(rows), first_page), NO_PAGE, np.int32)
    table.replace_rows(np.concatenate([missing, rows], axis=1), first_page)
    return table


def _read_rope(layer: Facts) -> RopeRotation | None:
    """Return the rotation of a layer's keys, or None if the facts do not include it."""
    if "turns" not in layer:
        return None
    facts = dict(layer["turns"])
    if facts["mla"] is not None:
        facts["mla"] = tuple(_check_count("turns: mla", size) for size in facts["mla"])
    rope = RopeRotation(*map(facts.pop, _ROPE_KEYS))
    types = [float, float, float, type(rope.mla_dims), bool, int]
    _check_same("turns", types, [*map(type, astuple(rope)), *facts])
    are_fractions = 0 <= rope.rotary_fraction <= 1 and 0 <= rope.rotating_fraction <= 1
    has_two_dims = len(rope.mla_dims or (0, 0)) == 2
    is_valid = rope.theta > 0 and rope.max_positions >= 0 and are_fractions and has_two_dims
    _check_same("turns: within limits", True, is_valid)
    return rope


def _check_same(subject: str, expected: object, got: object) -> None:
    if expected != got:
        raise ConfigError(f"{subject}: expected {expected}, got {got}")


def _check_count(subject: str, value: Any, minimum: int = 0, maximum: int = _MAX_TOKENS) -> int:
    """Return `value`. Raise ConfigError unless it is an integer from `minimum` to `maximum`."""
    if type(value) is not int or not minimum <= value <= maximum:
        raise ConfigError(
            f"{subject}: expected a whole number from {minimum} to {maximum}, got {value!r}"
        )
    return value


# -- files ---------------------------------------------------------------------------------------


def save(paged: PagedLayers, stock_layers: list[Any], path: str | os.PathLike[str]) -> Path:
    """Atomically write paged layers and layers of transformers to a file, and return its path.

    Raises:
        ConfigError: A layer of transformers has a state other than keys and values.
    """
    target = Path(path)
    meta, tensors = pack(paged)
    meta["stock"] = [_pack_stock(x, f"stock.{i}", tensors) for i, x in enumerate(stock_layers)]
    meta["options"] = _pack_options(paged.options, tensors)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    header = {"format": CACHE_FORMAT, "version": str(VERSION), "meta": json.dumps(meta)}
    header["digest"] = digest_of(header, contiguous)
    write_all({target: lambda part: save_file(contiguous, part, metadata=header)})
    return target


def _pack_stock(layer: Any, name: str, tensors: Tensors) -> Facts:
    kind = type(layer).__name__
    facts: Facts = {"kind": kind}
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        if isinstance(layer, DynamicSlidingWindowLayer):
            facts |= {"window": layer.sliding_window, "seen": layer.cumulative_length}
        if layer.is_initialized:
            tensors[f"{name}.keys"], tensors[f"{name}.values"] = layer.keys, layer.values
    elif kind != "DummyLayer":
        raise ConfigError(
            f"save: expected only attention layers, got a {kind}, whose state has no file format. "
            "Use torch.save, which pickles it"
        )
    return facts


def _pack_options(options: CacheOptions, tensors: Tensors) -> Facts:
    plan, scales = options.plan, options.scales
    plans = {} if isinstance(plan, LayerPlan) else {i: [*map(str, x)] for i, x in plan.items()}
    facts = {**vars(options), "plan": plans or [*map(str, plan)]}
    if isinstance(scales, KVScales):
        for i, layer in scales.layers.items():
            named = {"k": layer.k, "v": layer.v, "k_center": layer.k_center}
            tensors |= {f"scales.{i}.{name}": x for name, x in named.items() if x is not None}
        facts["scales"] = {"format": scales.format, "layers": list(scales.layers)}
    return facts


def load(
    path: str | os.PathLike[str], device: str | torch.device | None
) -> tuple[PagedLayers, list[Any]]:
    """Read paged layers and layers of transformers from a file to `device`, or to the CPU.

    Invalid data may raise any type of error.
    """
    with safe_open(Path(path), framework="pt", device="cpu") as file:
        header = file.metadata() or {}
        version = header.get("format"), header.get("version")
        _check_same("format and version", (CACHE_FORMAT, str(VERSION)), version)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    _check_same("digest", header.pop("digest"), digest_of(header, tensors))
    meta = json.loads(header["meta"])
    for name in tensors:
        if device is not None and name.startswith(("layers.", "stock.")):
            tensors[name] = tensors[name].to(device)
    stock = [_unpack_stock(x, f"stock.{i}", tensors) for i, x in enumerate(meta["stock"])]
    options = _unpack_options(meta["options"], tensors)
    return unpack(meta, tensors, options, stock), stock


def _unpack_stock(facts: Facts, name: str, tensors: Tensors) -> Any:
    _check_same(f"{name}: kind is known", True, facts["kind"] in _STOCK_CLASSES)
    window = _check_count(f"{name}: window", facts["window"], 1) if "window" in facts else 0
    layer_class = getattr(cache_utils, facts["kind"])
    layer, num_tokens = layer_class(window) if window else layer_class(), 0
    if f"{name}.keys" in tensors:
        keys, values = (tensors.pop(f"{name}.{side}") for side in ("keys", "values"))
        actual = (keys.ndim, values.ndim, *values.shape[:3], keys.dtype.is_floating_point)
        _check_same(name, (4, 4, *keys.shape[:3], values.dtype.is_floating_point), actual)
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values, num_tokens = keys, values, keys.shape[2]
    if window:
        max_seen = num_tokens if num_tokens < window - 1 else _MAX_TOKENS
        layer.cumulative_length = _check_count(f"{name}: seen", facts["seen"], num_tokens, max_seen)
    return layer


def _unpack_options(facts: Facts, tensors: Tensors) -> CacheOptions:
    _check_same("options", CacheOptions.__dataclass_fields__.keys(), facts.keys())
    plan, scales = facts["plan"], facts["scales"]
    plan_by_layer = plan if isinstance(plan, dict) else {}
    plans = {int(i): LayerPlan.parse(*sides) for i, sides in plan_by_layer.items()}
    if isinstance(scales, dict):
        layers = {}
        for i in scales["layers"]:
            k, v, center = (tensors.pop(f"scales.{i}.{x}", None) for x in ("k", "v", "k_center"))
            # Scales are saved with their plan. Dynamic scales, or only centers, need a plan.
            layers[i] = LayerScales(k, v, center, plan=plans.get(i))
        scales = wrap_scales(ScaleData(layers, scales["format"]))
    elif scales is not None:
        scales = check_constant(scales, "constant")
    ranks = TensorParallel(*facts["tensor_parallel"])
    plan = parse_plan(plans or LayerPlan.parse(*plan))
    options = CacheOptions(**facts | {"plan": plan, "scales": scales, "tensor_parallel": ranks})
    options.check()
    return options
