"""Attention over the pages of real caches, with the masks that `generate()` passes."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import DeviceType
from transformers.masking_utils import create_causal_mask

from ...attention.fp8_paged import fp8_paged_attention
from ...cache.cache import FP8PagedCache
from ...cache.paged_tensor import pages_of
from ..hot_loops import AttentionLayer, make_config
from .pools import check, poison_memory
from .record import Record
from .shapes import Case, Kind, Sizes
from .timing import LARGEST_GRAPH, Stage, Step

# Static scales: normal random numbers reach about 5.5, and E4M3 448.
SCALE = 0.0125
# Tokens that a preallocated cache has room for after those of the case: a graph may hold several
# steps, and every replay begins at the length of the case.
ROOM = 64


@dataclass(frozen=True)
class Filled:
    """A cache with random tokens, and a step of `case.tokens` more in each of its layers.

    Attributes:
        lengths: the tensors that hold its lengths, each with what they were before the step.
        states: query, keys and values of the step.
        mask: what transformers' models hand to the attention function for the step.
        modules: of each layer, as far as attention asks them.
    """

    cache: FP8PagedCache
    lengths: list[tuple[torch.Tensor, torch.Tensor]]
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    mask: torch.Tensor | None
    modules: list[AttentionLayer]

    def update(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the step's tokens in a layer, and return its keys and values."""
        return self.cache.update(*self.states[1:], layer)

    def attend(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return the attention of a layer, `[B, T, Hq, D]`."""
        return fp8_paged_attention(self.modules[layer], self.states[0], key, value, self.mask)[0]

    def step(self, layer: int) -> torch.Tensor:
        """Do what a layer of a model does."""
        return self.attend(layer, *self.update(layer))

    def rewind(self) -> None:
        """Make a preallocated cache as long as it was before the step."""
        for tensor, before in self.lengths:
            tensor.copy_(before)


def fill(
    stage: Stage, kind: Kind, case: Case, layers: int, backend: str, *, preallocated: bool = True
) -> Filled:
    """Return a cache with the case's tokens before the new ones, as `generate()` fills it."""
    heads, length, batch = case.heads, case.lengths[0], len(case.lengths)
    config = make_config((heads.query, heads.kv, heads.dim), layers)
    config._attn_implementation = "fp8_paged"
    room = length + ROOM + LARGEST_GRAPH // layers
    cache = FP8PagedCache(
        config, dtype=kind.format, scales=SCALE if kind.static else None, backend=backend,
        max_cache_len=room if preallocated else None,
    )  # fmt: skip
    visible = torch.ones((batch, length), dtype=torch.long, device=stage.device)
    for row, hidden in zip(visible, case.padding, strict=bool(case.padding)):
        row[:hidden] = 0
    stored = length - case.tokens

    def mask(first: int, last: int) -> torch.Tensor | None:
        embeddings = torch.empty((batch, last - first, 1), dtype=torch.bfloat16).to(stage.device)
        positions = torch.arange(first, last, device=stage.device)[None]
        made: Any = create_causal_mask(config, embeddings, visible[:, :last], cache, positions)
        return made  # type: ignore[no-any-return]

    mask(0, stored)
    for layer in range(layers):
        shape = (batch, heads.kv, stored, heads.dim)
        cache.update(stage.randn(*shape), stage.randn(*shape), layer)
    # On the device in a preallocated cache; a growing one has numbers.
    found = [getattr(layer, "lengths", None) for layer in cache.layers]
    unique = {id(x): x for x in found if isinstance(x, torch.Tensor)}
    # As a model hands them over: heads and tokens have changed places.
    query, key, value = (
        stage.randn(batch, case.tokens, count, heads.dim).transpose(1, 2)
        for count in (heads.query, heads.kv, heads.kv)
    )
    return Filled(
        cache,
        [(x, x.clone()) for x in unique.values()],
        (query, key, value),
        mask(stored, length),
        [AttentionLayer(heads.query // heads.kv, layer) for layer in range(layers)],
    )


def measure_attention(
    record: Record, section: str, case: Case, kind: Kind, backend: str, name: str = "",
    *, preallocated: bool = True,
) -> None:  # fmt: skip
    """Add a row for attention alone, over what one step has stored."""
    stage = record.stage
    layers = stage.copies(int(case.moved(kind)))

    def work() -> dict[str, Any]:
        filled = fill(stage, kind, case, layers, backend, preallocated=preallocated)
        pairs = [filled.update(layer) for layer in range(layers)]
        steps = [functools.partial(filled.attend, i, *pair) for i, pair in enumerate(pairs)]
        with poison_memory():
            output = steps[-1]()
        error = check(output, filled.states[0], pages_of(pairs[-1][0]), case)  # type: ignore[arg-type]
        return {"timed": stage.time(steps), "error": error, **_describe(case, kind, layers)}

    record.measure(section, case, name or kind.name, work, size=_size(case, kind, layers))


def measure_layers(record: Record, sizes: Sizes, backend: str) -> None:
    """Add rows for one layer of a decode step: what it stores and what it attends to."""
    for case in sizes.layer:
        for kind in sizes.layer_kinds:
            _measure_layer(record, case, kind, backend, kind.name)
        _measure_layer(record, case, sizes.layer_kinds[0], backend, "", eager=True)


def _measure_layer(
    record: Record, case: Case, kind: Kind, backend: str, name: str, *, eager: bool = False
) -> None:
    """Add a row: a preallocated cache in a graph, or a growing one whose calls come from Python."""
    stage = record.stage
    layers = stage.copies(int(case.moved(kind)))

    def work() -> dict[str, Any]:
        filled = fill(stage, kind, case, layers, backend, preallocated=not eager)
        with poison_memory():
            for layer in range(layers):
                key, value = filled.update(layer)
                output = filled.attend(layer, key, value)
        error = check(output, filled.states[0], pages_of(key), case)  # type: ignore[arg-type]
        steps: list[Step] = [functools.partial(filled.step, layer) for layer in range(layers)]
        timed = stage.time(steps, between=filled.rewind, eagerly=eager)
        filled.rewind()
        launches = count_launches(stage, steps[-1])
        more = _describe(case, kind, layers)
        return {"timed": timed, "error": error, "launches": launches, **more}

    # What is stored and read; keys and values of a layer before they are stored.
    name = name or f"{kind.name} eager"
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
