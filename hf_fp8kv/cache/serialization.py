"""A cache on disk and in a pickle, and what it weighs."""

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..errors import ConfigError
from ..scales import KVScales, LayerScales
from .layer import FP8PagedLayer, PagedLayerBase
from .options import CacheOptions
from .preallocated_layer import FP8PagedStaticLayer

if TYPE_CHECKING:
    from .cache import FP8PagedCache

__all__ = ["footprint", "load", "pack", "rebuild", "save"]

FORMAT = "hf_fp8kv.cache"
VERSION = 1

Tensors = dict[str, torch.Tensor]
Meta = dict[str, Any]


# -- taking a cache apart ------------------------------------------------------------------------


def pack(cache: "FP8PagedCache") -> tuple[Meta, Tensors, CacheOptions, list[Any]]:
    """Takes a cache apart: numbers, tensors, options, and transformers' own layers.

    Only pages in use are taken, renumbered from 0 for each group.
    """
    tensors: Tensors = {}
    groups = list(cache.groups.values())
    kept = []
    for g, group in enumerate(groups):
        length = cache.host_length() if cache.is_static else group.length
        columns = slice(group.table.first, -(-length // group.page_size))
        used, compact = np.unique(group.table.rows[:, columns], return_inverse=True)
        rows = compact.reshape(group.table.rows[:, columns].shape).astype(np.int32)
        tensors[f"groups.{g}.table"] = torch.from_numpy(rows)
        kept.append(torch.from_numpy(used).long())
    layers: list[Meta] = []
    for i, layer in enumerate(cache.layers):
        if not isinstance(layer, PagedLayerBase):
            layers.append({"kind": "stock"})
            continue
        g = groups.index(layer.group)
        fact: Meta = {"kind": "paged", "group": g, "index": layer.index}
        if layer.is_initialized:
            pool = layer.pool
            fact |= {
                "length": _length(layer),
                "dtypes": [str(d).removeprefix("torch.") for d in (pool.dtype, pool.v_dtype)],
                "shape": [pool.heads, pool.k_dim, pool.v_dim],
            }
            for name, tensor in pool.tensors().items():
                tensors[f"layers.{i}.{name}"] = tensor[kept[g].to(tensor.device)]
            if layer.k_center is not None:
                tensors[f"layers.{i}.k_center"] = layer.k_center.clone()
        layers.append(fact)
    meta = {
        "groups": [
            {"window": x.window, "first": x.table.first, "record_past": x.record_past}
            for x in groups
        ],
        "layers": layers,
        "open_ended": cache.open_ended,
    }
    return meta, tensors, cache.options, cache.stock_layers


def _length(layer: PagedLayerBase) -> int:
    if isinstance(layer, FP8PagedStaticLayer):
        return layer.host_length()
    return int(layer.get_seq_length())


def rebuild(
    kind: "type[FP8PagedCache]",
    meta: Meta,
    tensors: Tensors,
    options: CacheOptions,
    stock: list[Any],
) -> "FP8PagedCache":
    """Puts together what `pack` took apart."""
    from transformers.cache_utils import Cache

    cache = object.__new__(kind)
    cache._setup(options)
    Cache.__init__(cache, layers=[])
    for fact in meta["groups"]:
        cache._group(fact["window"]).record_past = fact["record_past"]
    groups = list(cache.groups.values())
    spare = iter(stock)
    for fact in meta["layers"]:
        if fact["kind"] == "stock":
            cache.layers.append(next(spare))
        else:
            window = meta["groups"][fact["group"]]["window"]
            cache.layers.append(cache._new_layer(fact["index"], window))
    cache.open_ended = meta["open_ended"]
    numbers = []
    for g, (group, fact) in enumerate(zip(groups, meta["groups"], strict=True)):
        rows = tensors[f"groups.{g}.table"].numpy()
        numbers.append(
            None if cache.is_static else _restore_table(group.table, rows, fact["first"])
        )
    for i, fact in enumerate(meta["layers"]):
        if "length" in fact:
            part = {
                name.split(".")[2]: tensor
                for name, tensor in tensors.items()
                if name.startswith(f"layers.{i}.")
            }
            layer = cache.layers[i]
            assert isinstance(layer, PagedLayerBase)
            table = tensors[f"groups.{fact['group']}.table"]
            _restore_layer(layer, fact, part, table, numbers[fact["group"]])
    return cache


def _restore_table(table: Any, rows: Any, first: int) -> torch.Tensor:
    """Fills an empty block table; returns the number that each compact page number became."""
    count = int(rows.max()) + 1 if rows.size else 0
    numbers = table.allocator.take(count)
    if rows.size:
        body = numbers[rows]
        table.rows = np.concatenate([np.full((len(rows), first), -1, np.int32), body], axis=1)
        table.first, table.count = first, first + rows.shape[1]
        # `take` counted each page once, the rows list some of them more often.
        table.allocator.share(body.ravel())
        table.allocator.drop(numbers)
        table.version += 1
    return torch.from_numpy(numbers.astype(np.int64))


def _restore_layer(
    layer: PagedLayerBase,
    fact: Meta,
    part: Tensors,
    rows: torch.Tensor,
    numbers: torch.Tensor | None,
) -> None:
    heads, k_dim, v_dim = fact["shape"]
    k_dtype, v_dtype = (getattr(torch, name) for name in fact["dtypes"])
    device, batch = part["k"].device, len(rows)
    key = torch.zeros((batch, heads, 0, k_dim), dtype=k_dtype, device=device)
    value = torch.zeros((batch, heads, 0, v_dim), dtype=v_dtype, device=device)
    layer.lazy_initialization(key, value)
    if isinstance(layer, FP8PagedStaticLayer):
        layer.lengths.fill_(fact["length"])
        layer.is_empty = fact["length"] == 0
        layer._most = fact["length"]
        place = layer.table[:, : rows.shape[1]].long().reshape(-1)
        source = rows.to(device).long().reshape(-1)
    else:
        assert numbers is not None
        layer.group.lengths[layer.member] = fact["length"]
        place, source = numbers.to(device), torch.arange(len(numbers), device=device)
    for name, tensor in layer.pool.tensors().items():
        tensor[place] = part[name][source]
    if "k_center" in part:
        if layer.k_center is None:
            layer.k_center = part["k_center"]
        else:
            layer.k_center.copy_(part["k_center"])


# -- files ---------------------------------------------------------------------------------------


def save(cache: "FP8PagedCache", path: str | os.PathLike[str]) -> Path:
    """Writes a cache to a safetensors file; see `FP8PagedCache.save`."""
    target = Path(path)
    meta, tensors, options, stock = pack(cache)
    meta["stock"] = [_pack_stock(layer, f"stock.{n}", tensors) for n, layer in enumerate(stock)]
    meta["options"] = _pack_options(options, tensors)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    try:
        header = {"format": FORMAT, "version": str(VERSION), "meta": json.dumps(meta)}
        save_file(contiguous, partial, metadata=header)
        os.replace(partial, target)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    return target


def _pack_stock(layer: Any, name: str, tensors: Tensors) -> Meta:
    kind = type(layer).__name__
    fact: Meta = {"kind": kind}
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        if isinstance(layer, DynamicSlidingWindowLayer):
            fact |= {"window": layer.sliding_window, "seen": layer.cumulative_length}
        if layer.is_initialized:
            tensors[f"{name}.keys"], tensors[f"{name}.values"] = layer.keys, layer.values
    elif kind != "DummyLayer":
        raise ConfigError(
            f"save expected layers that are attention, got a {kind}, whose state has no file "
            "format; use torch.save, which pickles it"
        )
    return fact


def _pack_options(options: CacheOptions, tensors: Tensors) -> Meta:
    fact = {name: value for name, value in vars(options).items() if name != "scales"}
    scales = options.scales
    if not isinstance(scales, KVScales):
        return fact | {"constant": scales}
    for i, layer in scales.layers.items():
        for side in ("k", "v", "k_center"):
            tensor = getattr(layer, side)
            if tensor is not None:
                tensors[f"scales.{i}.{side}"] = tensor
    return fact | {"scales": {"format": scales.format, "layers": list(scales.layers)}}


def load(
    kind: "type[FP8PagedCache]", path: str | os.PathLike[str], device: str | torch.device | None
) -> "FP8PagedCache":
    """Returns the cache that a file holds; see `FP8PagedCache.load`."""
    source = Path(path)
    try:
        with safe_open(source, framework="pt", device=str(device or "cpu")) as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT or header.get("version") != str(VERSION):
                raise ConfigError(
                    f"{source}: expected a cache saved by this library ({FORMAT}, version "
                    f"{VERSION}), got format {header.get('format')!r}, version "
                    f"{header.get('version')!r}"
                )
            meta = json.loads(header["meta"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        stock = [_load_stock(f, f"stock.{n}", tensors) for n, f in enumerate(meta["stock"])]
        for name in tensors:
            if name.endswith(".table") or name.startswith("scales."):
                tensors[name] = tensors[name].cpu()
        return rebuild(kind, meta, tensors, _load_options(meta["options"], tensors), stock)
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


def _load_stock(fact: Meta, name: str, tensors: Tensors) -> Any:
    from transformers import cache_utils

    if fact["kind"] == "DynamicSlidingWindowLayer":
        layer = DynamicSlidingWindowLayer(sliding_window=fact["window"])
    elif fact["kind"] in ("DynamicLayer", "DummyLayer"):
        layer = getattr(cache_utils, fact["kind"])()
    else:
        raise ValueError(f"a layer of unknown kind {fact['kind']!r}")
    if f"{name}.keys" in tensors:
        keys, values = tensors[f"{name}.keys"], tensors[f"{name}.values"]
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if "seen" in fact:
            layer.cumulative_length = fact["seen"]
    return layer


def _load_options(fact: Meta, tensors: Tensors) -> CacheOptions:
    fact = dict(fact)
    found = fact.pop("scales", None)
    constant = fact.pop("constant", None)
    if found is None:
        return CacheOptions(scales=constant, **fact)
    layers = {
        i: LayerScales(
            tensors[f"scales.{i}.k"], tensors[f"scales.{i}.v"], tensors.get(f"scales.{i}.k_center")
        )
        for i in found["layers"]
    }
    return CacheOptions(scales=KVScales(layers, found["format"]), **fact)


# -- sizes ---------------------------------------------------------------------------------------


def footprint(cache: "FP8PagedCache") -> dict[str, int]:
    """Returns bytes by kind; see `FP8PagedCache.memory_footprint`."""
    pages = scales = tables = used = other = 0
    for layer in cache.paged_layers:
        if not layer.is_initialized:
            continue
        pool = layer.pool
        codes = _bytes(pool.k) + _bytes(pool.v)
        dynamic = sum(_bytes(t) for t in pool.tensors().values()) - codes
        pages, scales = pages + codes, scales + dynamic
        scales += sum(_bytes(t) for t in (layer.k_scale, layer.v_scale, layer.k_center))
        table = layer.group.table
        held = len(np.unique(table.used())) if isinstance(layer, FP8PagedLayer) else pool.pages
        used += held * pool.bytes_per_page()
        if isinstance(layer, FP8PagedStaticLayer):
            tables += _bytes(layer.lengths)
    for group in cache.groups.values():
        tables += group.table.rows.nbytes + sum(_bytes(t) for t in group._mirrors.values())
    for layer in cache.stock_layers:
        other += sum(_bytes(t) for t in _tensors_of(vars(layer)))
    batch = cache._batch()
    return {
        "pages": pages,
        "scales": scales,
        "tables": tables,
        "other": other,
        "total": pages + scales + tables + other,
        "used": used,
        "tokens": batch * cache.host_length(),
    }


def _bytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def _tensors_of(found: Any) -> list[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        return [found]
    if isinstance(found, dict):
        return [t for value in found.values() for t in _tensors_of(value)]
    if isinstance(found, list | tuple):
        return [t for value in found for t in _tensors_of(value)]
    return []
