"""Cache files and pickles: snapshots as numbers and tensors, and back."""

import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .. import ops
from ..errors import ConfigError
from ..formats import LayerPlan, SidePlan
from ..paging.block_table import BlockTable
from ..paging.layer_group import LayerGroup
from ..paging.page_pool import PagePool
from ..scales import KVScales, LayerScales
from ..utils.files import CACHE_FORMAT
from .options import CacheOptions
from .snapshot import CacheSnapshot, LayerSnapshot
from .turns import Turns

VERSION = 2

Tensors = dict[str, torch.Tensor]
Facts = dict[str, Any]


# -- snapshots as numbers and tensors ------------------------------------------------------------


def pack(snapshot: CacheSnapshot) -> tuple[Facts, Tensors]:
    """Return what a snapshot holds but for options and transformers' own layers.

    Only pages in use are taken, renumbered from 0 for each group.
    """
    tensors: Tensors = {}
    used_pages = []
    for g, group in enumerate(snapshot.groups):
        # The preallocated form lists pages that hold nothing yet.
        length = max((x.length for x in snapshot.layers if x and x.group is group), default=0)
        pages = group.table.rows[:, group.table.first : -(-length // group.table.page_size)]
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
            assert layer.storage is not None
            facts |= {
                "length": layer.length,
                "plan": [str(side) for side in layer.storage],
                "dtypes": [str(d).removeprefix("torch.") for d in (pool.dtype, pool.v_dtype)],
                "shape": [pool.heads, pool.k_dim, pool.v_dim],
            }
            # A layer of fewer tokens may not have grown yet, with pages that only others use.
            pool.grow(layer.group.table.allocator.capacity)
            for name, tensor in name_as_in_files(pool, pool.take(used_pages[g])).items():
                tensors[f"layers.{i}.{name}"] = tensor.contiguous()
            if layer.k_center is not None:
                tensors[f"layers.{i}.k_center"] = layer.k_center.clone()
        layers.append(facts)
    groups = [
        {"window": group.window, "first": group.table.first, "record_past": group.record_past}
        for group in snapshot.groups
    ]
    return {"groups": groups, "layers": layers, "open_ended": snapshot.open_ended}, tensors


def unpack(
    facts: Facts, tensors: Tensors, options: CacheOptions, stock_layers: list[Any]
) -> CacheSnapshot:
    """Return the snapshot that `pack` took apart, with pages and a budget of its own.

    The layers' tensors are removed from `tensors`, so that no two layers are there twice at a time.

    Raises:
        OutOfPagesError: the pages would pass `options.max_pages`.
    """
    budget = options.new_budget()
    groups = []
    for g, group in enumerate(facts["groups"]):
        rows = tensors[f"groups.{g}.table"].numpy()
        table = BlockTable.from_rows(budget, rows, group["first"])
        groups.append(LayerGroup(budget, group["window"], table))
        groups[-1].record_past = group["record_past"]
    layers: list[LayerSnapshot | None] = []
    for i, layer in enumerate(facts["layers"]):
        if layer["kind"] == "stock":
            layers.append(None)
            continue
        group, turns = groups[layer["group"]], _read_turns(layer)
        prefix = f"layers.{i}."
        names = [name for name in tensors if name.startswith(prefix)]
        held = {name.removeprefix(prefix): tensors.pop(name) for name in names}
        indexer = None
        if "indexer" in layer:
            indexer = {name: held.pop(name) for name in layer["indexer"]}
        if "length" not in layer:
            index = layer["index"]
            layers.append(LayerSnapshot(index, group, 0, turns=turns, indexer=indexer))
            continue
        center = held.pop("k_center", None)
        storage = LayerPlan.parse(*layer["plan"]) if "plan" in layer else None
        pool = _unpack_pool(layer, held, group, options, storage)
        index, length = layer["index"], layer["length"]
        state = LayerSnapshot(index, group, length, pool, center, storage=storage, turns=turns)
        state.indexer = indexer
        layers.append(state)
    return CacheSnapshot(options, groups, layers, stock_layers, facts["open_ended"], budget)


def _read_turns(layer: Facts) -> Turns | None:
    """Return how a layer's keys turn, or None if the cache did not know it."""
    if "turns" not in layer:
        return None
    facts = dict(layer["turns"])
    if facts["mla"] is not None:
        facts["mla"] = tuple(facts["mla"])
    return Turns(**facts)


def _unpack_pool(
    facts: Facts, held: Tensors, group: LayerGroup, options: CacheOptions, storage: LayerPlan | None
) -> PagePool:
    heads, k_dim, v_dim = facts["shape"]
    k_dtype, v_dtype = (getattr(torch, name) for name in facts["dtypes"])
    index, allocator = facts["index"], group.table.allocator
    pool = options.new_pool(storage or options.layer_plan(index), allocator.budget, index)
    key = torch.empty((1, heads, 0, k_dim), dtype=k_dtype, device=held["k"].device)
    value = key.new_empty((1, heads, 0, v_dim), dtype=v_dtype)
    backend = ops.choose_backend(options.backend, key.device)
    in_blocks = not options.is_preallocated and ops.reads_blocks(backend, key.device)
    pool.allocate(key, value, allocator.capacity, in_blocks=in_blocks)
    start = 0
    for part in pool.parts():
        for name, tensor in name_as_in_files(pool, part).items():
            stored = held[name][start : start + len(tensor)]
            tensor[: len(stored)] = stored
        start += len(part["k"])
    return pool


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


# -- files ---------------------------------------------------------------------------------------


def save(snapshot: CacheSnapshot, path: str | os.PathLike[str]) -> Path:
    """Write a snapshot to a safetensors file, whole or not at all; return the path.

    Raises:
        ConfigError: a layer that is not attention holds a state.
    """
    target = Path(path)
    meta, tensors = pack(snapshot)
    meta["stock"] = [
        _pack_stock(layer, f"stock.{n}", tensors) for n, layer in enumerate(snapshot.stock_layers)
    ]
    meta["options"] = _pack_options(snapshot.options, tensors)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    try:
        header = {"format": CACHE_FORMAT, "version": str(VERSION), "meta": json.dumps(meta)}
        save_file(contiguous, partial, metadata=header)
        os.replace(partial, target)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
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
            f"save expected layers that are attention, got a {kind}, whose state has no file "
            "format; use torch.save, which pickles it"
        )
    return facts


def _pack_options(options: CacheOptions, tensors: Tensors) -> Facts:
    places = {"offloading", "max_device_pages"}  # only where they say something, for old readers
    facts = {
        name: value
        for name, value in vars(options).items()
        if name != "scales" and (value or name not in places)
    }
    facts |= {name: [str(side) for side in facts[name]] for name in ("k_plans", "v_plans")}
    if options.plan is not None:
        facts["plan"] = {i: [str(side) for side in layer] for i, layer in options.plan.items()}
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
    """Return the snapshot that a file holds, on `device` (None: the CPU).

    Raises:
        ConfigError: the file is not one of `save`'s, or is damaged.
    """
    source = Path(path)
    try:
        with safe_open(source, framework="pt", device=str(device or "cpu")) as file:
            header = file.metadata() or {}
            if header.get("format") != CACHE_FORMAT or header.get("version") != str(VERSION):
                raise ConfigError(
                    f"{source}: expected a cache saved by this library ({CACHE_FORMAT}, version "
                    f"{VERSION}), got format {header.get('format')!r}, version "
                    f"{header.get('version')!r}; pass a file that FP8PagedCache.save wrote"
                )
            meta = json.loads(header["meta"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        stock = [_unpack_stock(f, f"stock.{n}", tensors) for n, f in enumerate(meta["stock"])]
        for name in tensors:
            if name.endswith(".table") or name.startswith("scales."):
                tensors[name] = tensors[name].cpu()
        return unpack(meta, tensors, _unpack_options(meta["options"], tensors), stock)
    except (
        OSError,
        SafetensorError,
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
        RuntimeError,
    ) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{source}: expected a whole file written by FP8PagedCache.save, got "
            f"{type(error).__name__}: {error}; save the cache again"
        ) from error


def _unpack_stock(facts: Facts, name: str, tensors: Tensors) -> Any:
    if facts["kind"] == "DynamicSlidingWindowLayer":
        layer = DynamicSlidingWindowLayer(sliding_window=facts["window"])
    elif facts["kind"] in ("DynamicLayer", "DummyLayer"):
        layer = getattr(cache_utils, facts["kind"])()
    else:
        raise ValueError(f"a layer of unknown kind {facts['kind']!r}")
    if f"{name}.keys" in tensors:
        keys, values = tensors[f"{name}.keys"], tensors[f"{name}.values"]
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if "seen" in facts:
            layer.cumulative_length = facts["seen"]
    return layer


def _read_plans(facts: Facts) -> None:
    """Replace plans as text by plans."""
    facts |= {name: tuple(map(SidePlan.parse, facts[name])) for name in ("k_plans", "v_plans")}
    if facts.get("plan") is not None:
        facts["plan"] = {int(i): LayerPlan.parse(*both) for i, both in facts["plan"].items()}


def _unpack_options(facts: Facts, tensors: Tensors) -> CacheOptions:
    facts = dict(facts)
    scales = facts.pop("scales", None)
    constant = facts.pop("constant", None)
    _read_plans(facts)
    if scales is None:
        return CacheOptions(scales=constant, **facts)
    # A plan beside scales is theirs. Only with one may they be dynamic, and have centers alone.
    plan = facts.get("plan") or {}
    layers = {
        i: LayerScales(
            tensors.get(f"scales.{i}.k"),
            tensors.get(f"scales.{i}.v"),
            tensors.get(f"scales.{i}.k_center"),
            plan=plan.get(i),
        )
        for i in scales["layers"]
    }
    return CacheOptions(scales=KVScales(layers, scales["format"]), **facts)
