"""Cache files and pickles: snapshots as numbers and tensors, and back."""

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .. import ops
from ..errors import ConfigError
from ..formats import LayerPlan
from ..modeling.tensor_parallel import TensorParallel
from ..paging.block_table import BlockTable
from ..paging.layer_group import LayerGroup
from ..paging.page_pool import PagePool
from ..scales import KVScales, LayerScales
from ..scales.kv_scales import wrap_scales
from ..scales.layer_scales import ScaleData
from ..scales.validation import check_constant
from ..utils.files import CACHE_FORMAT, write_all
from .options import CacheOptions
from .snapshot import CacheSnapshot, LayerSnapshot
from .turns import Turns

VERSION = 2
_STOCK = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")
_DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
# Positions are int32. A block table may have this number of places, or one for each byte of a file.
_MOST_TOKENS, _PLACES = 2**31 - 1, 1 << 21
# Tensors of an indexer: the batch is axis 0 of the keys, and axis 1 of the positions.
_INDEXER = ("indexer_keys", "indexer_position_ids")

Tensors = dict[str, torch.Tensor]
Facts = dict[str, Any]


# -- snapshots as numbers and tensors ------------------------------------------------------------


def pack(snapshot: CacheSnapshot) -> tuple[Facts, Tensors]:
    """Return the contents of a snapshot, except options and transformers' own layers.

    Only pages in use are taken, renumbered from 0 for each group.
    """
    tensors: Tensors = {}
    used_pages, groups = [], []
    for g, group in enumerate(snapshot.groups):
        # The preallocated form lists pages that hold nothing yet.
        length = max((x.length for x in snapshot.layers if x and x.group is group), default=0)
        stop = -(-length // group.table.page_size)
        first = min(group.table.first, stop)
        groups.append({"window": group.window, "first": first, "record_past": group.record_past})
        pages = group.table.rows[:, first:stop]
        used, rows = np.unique(pages, return_inverse=True)
        tensors[f"groups.{g}.table"] = torch.from_numpy(rows.reshape(pages.shape).astype(np.int32))
        used_pages.append(used)
    layers: list[Facts] = []
    for i, layer in enumerate(snapshot.layers):
        if layer is None:
            layers.append({"kind": "stock"})
            continue
        g, pool = snapshot.groups.index(layer.group), layer.pool
        facts: Facts = {"kind": "paged", "group": g, "index": layer.index}
        if layer.turns is not None:
            facts["turns"] = asdict(layer.turns)
        if layer.indexer is not None:
            facts["indexer"] = list(layer.indexer)
            tensors |= {f"layers.{i}.{name}": held for name, held in layer.indexer.items()}
        if pool is not None:
            assert layer.encoding is not None
            facts |= {"length": layer.length, **describe(pool, layer.encoding.plan)}
            # A layer of fewer tokens may not have grown yet, with pages that only others use.
            pool.grow(layer.group.table.allocator.capacity)
            for name, tensor in name_as_in_files(pool, pool.take(used_pages[g])).items():
                tensors[f"layers.{i}.{name}"] = tensor.contiguous()
            if layer.k_center is not None:
                tensors[f"layers.{i}.k_center"] = layer.k_center.clone()
        layers.append(facts)
    return {"groups": groups, "layers": layers, "open_ended": snapshot.open_ended}, tensors


def describe(pool: PagePool, storage: LayerPlan) -> Facts:
    """Return the plan, the dtypes and the sizes of a layer, for JSON."""
    return {
        "plan": [str(side) for side in storage],
        "dtypes": [str(d).removeprefix("torch.") for d in (pool.dtype, pool.v_dtype)],
        "shape": [pool.heads, pool.k_dim, pool.v_dim],
    }


def unpack(
    facts: Facts, tensors: Tensors, options: CacheOptions, stock_layers: list[Any]
) -> CacheSnapshot:
    """Return the snapshot that `pack` took apart, with separate pages and a separate budget.

    All facts and tensors are compared before anything is allocated. `tensors` is then empty, so
    that only one layer exists twice at a time.

    Raises:
        ConfigError: A cache with these options cannot hold these facts or tensors. Facts of other
            types raise other errors.
        OutOfPagesError: The pages exceed `options.max_pages`.
    """
    budget, size, room = options.new_budget(), options.page_size, options.max_cache_len or 0
    layers, windows = facts["layers"], [group["window"] for group in facts["groups"]]
    paged = [layer for layer in layers if layer["kind"] != "stock"]
    most = max(_PLACES, sum(tensor.nbytes for tensor in tensors.values()))

    def take(name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        tensor = tensors.pop(name)
        _check_same(name, (dtype, *shape), (tensor.dtype, *tensor.shape))
        return tensor

    _check_same("open_ended", bool, type(facts["open_ended"]))
    _check_same("layers of transformers", len(stock_layers), len(layers) - len(paged))
    _check_same("windows", len(windows), len(set(windows)))
    batches = {len(x.keys) for x in stock_layers if "stock" in facts and x.keys is not None}
    groups, tables = [], []
    lengths: list[list[int]] = [[] for _ in windows]
    for layer in paged:
        g = _check_count("group", layer["group"], 0, len(windows) - 1)
        lengths[g].append(_check_count("length", layer.get("length", 0), 0, room or _MOST_TOKENS))
    for g, group in enumerate(facts["groups"]):
        name, window = f"groups.{g}.table", windows[g]
        _check_same("record_past", bool, type(group["record_past"]))
        _check_count("window", 1 if window is None else window, 1)
        groups.append(LayerGroup(budget, window))
        stored = [length for length in lengths[g] if length]
        # Layers of the preallocated form may be saved within a step.
        seen = groups[g].visible_from((max if room else min)(stored, default=0))
        first = _check_count("first", group["first"], 0, seen // size)
        batch, columns = len(tensors[name]), -(-max(stored, default=0) // size)
        most -= _check_count(f"{name}: places", batch * max(columns, room // size), 0, most)
        table = take(name, torch.int32, batch, columns - first).cpu().numpy()
        count = int(table.max(initial=-1)) + 1
        found = int(table.min(initial=0)), len(np.unique(table))
        _check_same(f"{name}: pages", (0, count), found)
        tables.append((table, batch, count))
        if stored:
            batches.add(_check_count("sequences", batch, 1))
    _check_count("numbers of sequences", len(batches), 0, 1)
    states: list[LayerSnapshot | None] = []
    pools = []
    for i, layer in enumerate(layers):
        states.append(None)
        if layer["kind"] == "stock":
            continue
        _check_same(f"layers.{i}", ("paged", i), (layer["kind"], layer["index"]))
        length, prefix = layer.get("length", 0), f"layers.{i}."
        group, (_, batch, count) = groups[layer["group"]], tables[layer["group"]]
        state = states[i] = LayerSnapshot(i, group, length, turns=_read_turns(layer))
        if "indexer" in layer:
            state.indexer = {name: tensors.pop(prefix + name) for name in layer["indexer"]}
            for name, tensor in state.indexer.items():
                axis = _INDEXER.index(name)
                found = (tensor.ndim, *tensor.shape[axis : axis + 2])
                _check_same(prefix + name, (3, batch, length), found)
        if "length" not in layer:
            continue
        plan = options.layer_plan(i)
        _check_same(f"plan of layer {i}", plan, LayerPlan.parse(*layer["plan"]))
        page, parts = make_page(layer, options, plan)
        held = {n: take(prefix + n, x.dtype, count, *x.shape[1:]) for n, x in parts.items()}
        if plan.k.centered and (length or f"{prefix}k_center" in tensors):
            shape = batch, page.heads, page.k_dim
            state.k_center = take(f"{prefix}k_center", torch.float32, *shape)
        if count:  # only pages bound the sizes
            state.pool = options.new_pool(plan, budget, i)
            pools.append((state.pool, page, held))
    _check_same("tensors without a layer", [], [*tensors])
    for group, (table, *_), told in zip(groups, tables, facts["groups"], strict=True):
        group.table = BlockTable.from_rows(budget, table, told["first"])
        group.table.allocator.exact = group.window is not None
        group.record_past = told["record_past"]
    for pool, page, held in pools:
        _fill_pool(pool, page, held, options)
    return CacheSnapshot(options, groups, states, stock_layers, facts["open_ended"], budget)


def _fill_pool(pool: PagePool, page: PagePool, held: Tensors, options: CacheOptions) -> None:
    """Copy pages to a new pool like `page`, and free them."""
    device = held["k"].device
    key, value = (torch.empty_like(x, device=device) for x in page.empty_tokens(1))
    ops.choose_backend(options.backend, device)  # raises where there is none
    pool.allocate(key, value, len(held["k"]))
    start = 0
    for part in pool.parts():
        for name, tensor in name_as_in_files(pool, part).items():
            tensor[:] = held[name][start : start + len(tensor)]
        start += len(part["k"])
    held.clear()


def make_page(facts: Facts, options: CacheOptions, storage: LayerPlan) -> tuple[PagePool, Tensors]:
    """Return a pool of one page, on no device, for a layer's facts, and its tensors as in files."""
    (heads, k_dim, v_dim), dtypes = facts["shape"], facts["dtypes"]
    for size, least in ((heads, 1), (k_dim, 1), (v_dim, 0)):
        _check_count("shape", size, least)
    key, value = (
        torch.empty((1, heads, 0, dim), dtype=_DTYPES[dtype], device="meta")
        for dim, dtype in zip((k_dim, v_dim), dtypes, strict=True)
    )
    pool = options.new_pool(storage)
    pool.allocate(key, value, 1)
    return pool, name_as_in_files(pool, pool.parts()[0])


def name_as_in_files(pool: PagePool, tensors: Tensors) -> Tensors:
    """Return tensors of a pool as files have them: the scales of K and of V apart; views."""
    tensors = dict(tensors)
    scales = tensors.pop("token_scales", None)
    if scales is not None:
        k, v = scales.unbind(-1)
        if not pool.k_is_auto:
            tensors["k_scales"] = k
        if not pool.v_is_auto:
            tensors["v_scales"] = v
    return tensors


def _read_turns(layer: Facts) -> Turns | None:
    """Return how a layer's keys turn, or None if its facts do not include that."""
    if "turns" not in layer:
        return None
    facts = dict(layer["turns"])
    if facts["mla"] is not None:
        facts["mla"] = tuple(_check_count("turns: mla", size) for size in facts["mla"])
    turns = Turns(**facts)
    kinds = [float, float, float, type(turns.mla), bool, int]
    _check_same("turns", kinds, [type(x) for x in vars(turns).values()])
    limits = [turns.base > 0, 0 <= turns.share <= 1, 0 <= turns.moving <= 1, turns.positions >= 0]
    _check_same("turns: within limits", [True] * 4 + [2], [*limits, len(turns.mla or (0, 0))])
    return turns


def _check_same(what: str, expected: object, got: object) -> None:
    if expected != got:
        raise ConfigError(f"{what}: expected {expected}, got {got}")


def _check_count(what: str, value: Any, least: int = 0, most: int = _MOST_TOKENS) -> int:
    """Return a whole number from `least` to `most`; raise ConfigError, which names `what`."""
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(f"{what}: expected a whole number from {least} to {most}, got {value!r}")
    return value


# -- files ---------------------------------------------------------------------------------------


def save(snapshot: CacheSnapshot, path: str | os.PathLike[str]) -> Path:
    """Write a snapshot to a safetensors file, whole or not at all; return the path.

    Raises:
        ConfigError: A layer that is not attention holds a state.
    """
    target = Path(path)
    meta, tensors = pack(snapshot)
    meta["stock"] = [
        _pack_stock(layer, f"stock.{n}", tensors) for n, layer in enumerate(snapshot.stock_layers)
    ]
    meta["options"] = _pack_options(snapshot.options, tensors)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    text = json.dumps(meta)
    header = {"format": CACHE_FORMAT, "version": str(VERSION), "meta": text}
    header["digest"] = _digest(text, contiguous)
    write_all({target: lambda part: save_file(contiguous, part, metadata=header)})
    return target


def _digest(meta: str, tensors: Tensors) -> str:
    """Return a digest of the facts of a file and of all tensors."""
    digest = hashlib.sha256(meta.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


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
            f"save expected layers that are attention, got a {kind}, whose state has no file "
            "format; use torch.save, which pickles it"
        )
    return facts


def _pack_options(options: CacheOptions, tensors: Tensors) -> Facts:
    facts = {name: value for name, value in vars(options).items() if name != "scales"}
    layers = {"all": options.plan} if isinstance(options.plan, LayerPlan) else options.plan
    facts["plan"] = {i: [str(side) for side in layer] for i, layer in layers.items()}
    scales = options.scales
    if not isinstance(scales, KVScales):
        return facts | {"constant": scales}
    for i, layer in scales.layers.items():
        for side in ("k", "v", "k_center"):
            tensor = getattr(layer, side)
            if tensor is not None:
                tensors[f"scales.{i}.{side}"] = tensor
    return facts | {"scales": {"format": scales.format, "layers": list(scales.layers)}}


def load(path: str | os.PathLike[str], device: str | torch.device | None) -> CacheSnapshot:
    """Return the snapshot in a file, on `device`. None means the CPU. Bad data raise any error."""
    with safe_open(Path(path), framework="pt", device="cpu") as file:
        header = file.metadata() or {}
        form = header.get("format"), header.get("version")
        _check_same("format and version", (CACHE_FORMAT, str(VERSION)), form)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    _check_same("digest", header["digest"], _digest(header["meta"], tensors))
    meta = json.loads(header["meta"])
    for name in tensors:
        if device is not None and name.startswith(("layers.", "stock.")):
            tensors[name] = tensors[name].to(device)
    stock = [_unpack_stock(f, f"stock.{n}", tensors) for n, f in enumerate(meta["stock"])]
    return unpack(meta, tensors, _unpack_options(meta["options"], tensors), stock)


def _unpack_stock(facts: Facts, name: str, tensors: Tensors) -> Any:
    _check_same(f"{name}: kind is known", True, facts["kind"] in _STOCK)
    window = [_check_count(f"{name}: window", facts["window"], 1)] if "window" in facts else []
    layer, tokens = getattr(cache_utils, facts["kind"])(*window), 0
    if f"{name}.keys" in tensors:
        keys, values = (tensors.pop(f"{name}.{side}") for side in ("keys", "values"))
        found = (keys.ndim, values.ndim, *values.shape[:3], keys.dtype.is_floating_point)
        _check_same(name, (4, 4, *keys.shape[:3], values.dtype.is_floating_point), found)
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values, tokens = keys, values, keys.shape[2]
    if window:
        most = tokens if tokens < window[0] - 1 else _MOST_TOKENS
        layer.cumulative_length = _check_count(f"{name}: seen", facts["seen"], tokens, most)
    return layer


def _unpack_options(facts: Facts, tensors: Tensors) -> CacheOptions:
    facts = dict(facts)
    told, scales = facts.pop("scales", None), facts.pop("constant", None)
    plans = {i: LayerPlan.parse(*both) for i, both in facts["plan"].items()}
    by_layer = {int(i): plan for i, plan in plans.items() if i != "all"}
    facts["plan"] = by_layer or plans["all"]
    facts["tensor_parallel"] = TensorParallel(*facts["tensor_parallel"])
    if told is not None:
        layers = {}
        for i in told["layers"]:
            k, v, center = (tensors.pop(f"scales.{i}.{x}", None) for x in ("k", "v", "k_center"))
            # A plan next to scales is theirs. Only a plan allows dynamic scales, and centers alone.
            layers[i] = LayerScales(k, v, center, plan=by_layer.get(i))
        scales = wrap_scales(ScaleData(layers, told["format"]))
    elif scales is not None:
        scales = check_constant(scales, "constant")
    options = CacheOptions(scales=scales, **facts)
    options.check()
    _check_same("V with a center", False, any(plan.v.centered for plan in plans.values()))
    return options
