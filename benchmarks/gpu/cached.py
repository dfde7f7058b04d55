"""Attention over the pages of real caches, with the masks that `generate()` passes."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import DeviceType
from transformers.masking_utils import create_causal_mask

from hf_fp8kv.attention.fp8_paged import fp8_paged_attention
from hf_fp8kv.bench.contenders import AttentionLayer, make_config
from hf_fp8kv.cache.cache import FP8PagedCache
from hf_fp8kv.cache.paged_tensor import pages_of

from .pools import check, poison_memory
from .record import Record
from .shapes import Case, Kind, Sizes
from .timing import LARGEST_GRAPH, Stage, Step

# Static scales: normal random numbers reach about 5.5, and E4M3 448.
SCALE = 0.0125
# Tokens that a preallocated cache has room for after those of the case, as it mostly has.
ROOM = 64
# Tokens by which a growing cache may grow: a graph holds several steps, calls from Python are more.
MOST_STEPS = 2 * LARGEST_GRAPH


@dataclass
class Filled:
    """A cache with random tokens, and steps of `case.tokens` more in each of its layers.

    Attributes:
        states: query, keys and values of every step.
        modules: of each layer, as far as attention asks them.
        make_mask: returns what transformers' models hand to the attention function, for the next
            tokens so many.
        mask: that of the step under way.
        key: the keys that a layer attended to last.
    """

    cache: FP8PagedCache
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    modules: list[AttentionLayer]
    make_mask: Callable[[int], torch.Tensor | None]
    mask: torch.Tensor | None = None
    key: Any = None

    def begin(self) -> None:
        """Make the mask of a step, which all its layers share."""
        self.mask = self.make_mask(self.states[0].shape[2])

    def update(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the step's tokens in a layer, and return its keys and values."""
        return self.cache.update(*self.states[1:], layer)

    def attend(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return the attention of a layer, `[B, T, Hq, D]`."""
        self.key = key
        return fp8_paged_attention(self.modules[layer], self.states[0], key, value, self.mask)[0]

    def step(self, layer: int) -> torch.Tensor:
        """Do what a layer of a model does, and with the first one what is done once per step."""
        if layer == 0:
            self.begin()
        return self.attend(layer, *self.update(layer))


def fill(
    stage: Stage, kind: Kind, case: Case, layers: int, backend: str, *, preallocated: bool = True
) -> Filled:
    """Return a cache with the case's tokens before the new ones, as `generate()` fills it."""
    heads, length, batch = case.heads, case.lengths[0], len(case.lengths)
    config = make_config((heads.query, heads.kv, heads.dim), layers)
    config._attn_implementation = "fp8_paged"
    cache = FP8PagedCache(
        config, dtype=kind.format, scales=SCALE if kind.static else None, backend=backend,
        max_cache_len=length + ROOM if preallocated else None,
    )  # fmt: skip
    visible = torch.ones((batch, length + MOST_STEPS), dtype=torch.long, device=stage.device)
    for row, hidden in zip(visible, case.padding, strict=bool(case.padding)):
        row[:hidden] = 0

    def make_mask(tokens: int) -> torch.Tensor | None:
        first = 0 if cache.paged_layers[0].is_empty else stored
        if not preallocated:
            first = cache.get_seq_length()
        seen = visible[:, : first + tokens]
        embeddings = torch.empty((batch, tokens, 1), dtype=torch.bfloat16, device=stage.device)
        positions = torch.arange(first, first + tokens, device=stage.device)[None]
        made: Any = create_causal_mask(config, embeddings, seen, cache, positions)
        return made  # type: ignore[no-any-return]

    stored = length - case.tokens
    make_mask(stored)
    for layer in range(layers):
        shape = (batch, heads.kv, stored, heads.dim)
        cache.update(stage.randn(*shape), stage.randn(*shape), layer)
    # As a model hands them over: heads and tokens have changed places.
    query, key, value = (
        stage.randn(batch, case.tokens, count, heads.dim).transpose(1, 2)
        for count in (heads.query, heads.kv, heads.kv)
    )
    modules = [AttentionLayer(heads.query // heads.kv, layer) for layer in range(layers)]
    return Filled(cache, (query, key, value), modules, make_mask)


def measure_attention(
    record: Record, section: str, case: Case, kind: Kind, backend: str, name: str = "",
    *, preallocated: bool = True,
) -> None:  # fmt: skip
    """Add a row for attention alone, over what one step has stored."""
    stage = record.stage
    layers = stage.copies(int(case.moved(kind)))

    def work() -> dict[str, Any]:
        filled = fill(stage, kind, case, layers, backend, preallocated=preallocated)
        filled.begin()
        pairs = [filled.update(layer) for layer in range(layers)]
        steps = [functools.partial(filled.attend, i, *pair) for i, pair in enumerate(pairs)]
        with poison_memory():
            output = steps[-1]()
        error = check(output, filled.states[0], pages_of(pairs[-1][0]), case)  # type: ignore[arg-type]
        return {"timed": stage.time(steps), "error": error, **_describe(case, kind, layers)}

    record.measure(section, case, name or kind.name, work, size=_size(case, kind, layers))


def measure_layers(record: Record, sizes: Sizes, backend: str) -> None:
    """Add rows for one layer of a decode step of a growing cache: mask, write, plan, attention.

    Compiled steps of a preallocated cache start the same kernels. In a graph, and once called from
    Python as generate() does it.
    """
    for case in sizes.layer:
        for kind in sizes.layer_kinds:
            _measure_layer(record, case, kind, backend, eager=False)
        _measure_layer(record, case, sizes.layer_kinds[0], backend, eager=True)


def _measure_layer(record: Record, case: Case, kind: Kind, backend: str, *, eager: bool) -> None:
    stage = record.stage
    layers = stage.copies(int(case.moved(kind)))

    def work() -> dict[str, Any]:
        filled = fill(stage, kind, case, layers, backend, preallocated=False)
        steps = [functools.partial(filled.step, layer) for layer in range(layers)]
        with poison_memory():
            for step in steps:
                output = step()
        error = check(output, filled.states[0], pages_of(filled.key), case)
        timed = stage.time(steps, eagerly=eager)
        launches = count_launches(stage, steps[-1])
        more = _describe(case, kind, layers)
        return {"timed": timed, "error": error, "launches": launches, **more}

    name = f"{kind.name} eager" if eager else kind.name
    record.measure("layer", case, name, work, size=_size(case, kind, layers))


def count_launches(stage: Stage, step: Step) -> int | None:
    """Return how many kernels, copies and fills a call starts; None: there is no GPU."""
    if not stage.is_gpu:
        return None
    from torch.profiler import ProfilerActivity, profile

    stage.wait()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
        stage.wait()
    return sum(event.device_type == DeviceType.CUDA for event in seen.events() or ()) or None


def _size(case: Case, kind: Kind, layers: int) -> float:
    fresh = 4.0 * len(case.lengths) * case.lengths[0] * case.heads.kv * case.heads.dim
    return layers * case.moved(kind) * 1.2 + 2 * fresh + 2**31


def _describe(case: Case, kind: Kind, layers: int) -> dict[str, Any]:
    return {"moved": case.moved(kind), **case.describe(), "layers": layers}
