"""Measure attention to the pages of real caches, with the masks that `generate()` passes."""

import functools
from typing import Any

import torch
from transformers.masking_utils import create_causal_mask

from hf_fp8kv.attention.fp8_paged import fp8_paged_attention
from hf_fp8kv.bench.contenders import AttentionLayer, make_config
from hf_fp8kv.cache.cache import FP8PagedCache
from hf_fp8kv.cache.paged_tensor import pages_of

from .pools import check, poison_memory
from .record import Record
from .shapes import Case, Kind, Sizes
from .stage import MAX_GRAPH_CALLS, Stage

# Static scale. Normal random values reach about 5.5, and E4M3 reaches 448.
SCALE = 0.0125
# Free tokens of a preallocated cache after the tokens of the case.
FREE_TOKENS = 64
# Maximum number of tokens that the steps add to a growing cache.
MAX_STEPS = 2 * MAX_GRAPH_CALLS


class CacheSteps:
    """A cache with random tokens, and steps that add `case.tokens` to each of its layers.

    `query` is the query of each step, and `key` the handle of the last attention.
    """

    def __init__(
        self, stage: Stage, kind: Kind, case: Case, layers: int, backend: str,
        *, preallocated: bool = True,
    ) -> None:  # fmt: skip
        heads, length, batch = case.heads, case.lengths[0], len(case.lengths)
        self.stage, self.stored, self.preallocated = stage, length - case.tokens, preallocated
        self.config = make_config((heads.query, heads.kv, heads.dim), layers)
        self.config._attn_implementation = "fp8_paged"
        self.cache = FP8PagedCache(
            self.config, dtype=kind.format, scales=SCALE if kind.static else None, backend=backend,
            max_cache_len=length + FREE_TOKENS if preallocated else None,
        )  # fmt: skip
        self.visible = torch.ones((batch, length + MAX_STEPS), dtype=torch.long)
        for row, hidden in zip(self.visible, case.padding, strict=bool(case.padding)):
            row[:hidden] = 0
        self.visible = self.visible.to(stage.device)
        self._make_mask(0, self.stored)
        for layer in range(layers):
            shape = (batch, heads.kv, self.stored, heads.dim)
            self.cache.update(stage.randn(*shape), stage.randn(*shape), layer)
        # A model transposes heads and tokens in the same way.
        self.query, self._key, self._value = (
            stage.randn(batch, case.tokens, count, heads.dim).transpose(1, 2)
            for count in (heads.query, heads.kv, heads.kv)
        )
        self.modules = [AttentionLayer(heads.query // heads.kv, layer) for layer in range(layers)]
        self.mask: torch.Tensor | None = None
        self.key: Any = None

    def _make_mask(self, first: int, tokens: int) -> torch.Tensor | None:
        device = self.stage.device
        shape = (len(self.visible), tokens, 1)
        embeddings = torch.empty(shape, dtype=torch.bfloat16, device=device)
        positions = torch.arange(first, first + tokens, device=device)[None]
        attended = self.visible[:, : first + tokens]
        mask: Any = create_causal_mask(self.config, embeddings, attended, self.cache, positions)
        return mask  # type: ignore[no-any-return]

    def begin(self) -> None:
        """Make the mask of a step, which all layers share."""
        first = self.stored if self.preallocated else self.cache.get_seq_length()
        self.mask = self._make_mask(first, self.query.shape[2])

    def update(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new tokens in a layer, and return the handles of its keys and values."""
        return self.cache.update(self._key, self._value, layer)

    def attend(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return the attention of a layer, `[B, T, Hq, D]`."""
        self.key = key
        return fp8_paged_attention(self.modules[layer], self.query, key, value, self.mask)[0]

    def step(self, layer: int) -> torch.Tensor:
        """Run one layer of a step. The first layer also makes the mask."""
        if layer == 0:
            self.begin()
        return self.attend(layer, *self.update(layer))


def measure_attention(
    record: Record, section: str, case: Case, kind: Kind, backend: str, name: str = "",
    *, preallocated: bool = True, whole: bool = False, eager: bool = False,
) -> None:  # fmt: skip
    """Add a row for attention alone, after one step has stored its tokens.

    With `whole`, the row is for a whole step of a layer. With `eager`, no graph is captured.
    """
    stage, size = record.stage, case.bytes_read(kind)
    layers = stage.copies(int(size))

    def work() -> dict[str, Any]:
        filled = CacheSteps(stage, kind, case, layers, backend, preallocated=preallocated)
        if whole:
            steps = [functools.partial(filled.step, layer) for layer in range(layers)]
        else:
            filled.begin()
            pairs = [filled.update(layer) for layer in range(layers)]
            steps = [functools.partial(filled.attend, i, *pair) for i, pair in enumerate(pairs)]
        with poison_memory():
            for step in steps:
                output = step()
        error = check(output, filled.query, pages_of(filled.key), case)
        timed = stage.time(steps, eagerly=eager)
        launches = stage.count_launches(steps) if whole else None
        fields = {"moved": size, **case.describe(), "layers": layers}
        return {**timed, "error": error, "launches": launches, **fields}

    record.measure(section, case, name or kind.name, work)


def measure_layers(record: Record, sizes: Sizes, backend: str) -> None:
    """Add rows for one layer of a step of a growing cache: mask, write, plan and attention.

    The steps are captured in a graph. Steps of one kind are also called from Python, as generate()
    does.
    """
    first = sizes.layer_kinds[0]
    names = [*((kind, kind.name) for kind in sizes.layer_kinds), (first, f"{first.name} eager")]
    for case in sizes.layer:
        for kind, name in names:
            measure_attention(
                record, "layer", case, kind, backend, name, preallocated=False, whole=True,
                eager=name != kind.name,
            )  # fmt: skip
