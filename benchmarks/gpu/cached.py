"""Measure attention to the pages of `FP8PagedCache`, with the masks that `generate()` passes."""

import functools
from typing import Any

import torch
from transformers.masking_utils import create_causal_mask

from hf_fp8kv.attention.fp8_paged import fp8_paged_attention
from hf_fp8kv.cache.cache import FP8PagedCache
from hf_fp8kv.cache.paged_tensor import get_pages

from ..layers import AttentionLayer, Heads, make_config
from .random_data import compute_output_error, poison_memory
from .record import Record
from .shapes import Case, PageFormat, RunSizes
from .stage import MAX_GRAPH_CALLS, Stage

# Static scale. Normal random values reach about 5.5, and E4M3 reaches 448.
SCALE = 0.0125
# Number of free slots of a preallocated cache after the tokens of the case.
FREE_TOKENS = 64
# Maximum number of tokens that the steps add to a growing cache.
MAX_ADDED_TOKENS = 2 * MAX_GRAPH_CALLS


class CacheSteps:
    """A cache with random tokens, and steps that add `case.num_new_tokens` tokens to each layer.

    `query` is the query of each step, `[B, Hq, T, D]`. `key` is the handle of the keys that
    attention read last.
    """

    def __init__(
        self, stage: Stage, fmt: PageFormat, case: Case, num_layers: int, backend: str,
        *, preallocated: bool = True,
    ) -> None:  # fmt: skip
        heads = case.heads
        batch = len(case.lengths)
        length = case.lengths[0]
        self.stage = stage
        self.preallocated = preallocated
        self.stored_tokens = length - case.num_new_tokens
        self.config = make_config(
            Heads(heads.num_query_heads, heads.num_kv_heads, heads.dim), num_layers
        )
        self.config._attn_implementation = "fp8_paged"
        self.cache = FP8PagedCache(
            self.config, dtype=fmt.dtype, scales=SCALE if fmt.is_static else None, backend=backend,
            max_cache_len=length + FREE_TOKENS if preallocated else None,
        )  # fmt: skip
        positions = torch.arange(length + MAX_ADDED_TOKENS).expand(batch, -1)
        padding = torch.tensor(case.padding or [0])[:, None]
        self.padding_mask = (positions >= padding).long().to(stage.device)
        self._make_mask(0, self.stored_tokens)
        shape = (batch, heads.num_kv_heads, self.stored_tokens, heads.dim)
        for index in range(num_layers):
            self.cache.update(stage.randn(*shape), stage.randn(*shape), index)
        # A model transposes heads and tokens in the same way.
        self.query, self._key, self._value = (
            stage.randn(batch, case.num_new_tokens, num_heads, heads.dim).transpose(1, 2)
            for num_heads in (heads.num_query_heads, heads.num_kv_heads, heads.num_kv_heads)
        )
        self.modules = [
            AttentionLayer(heads.num_query_heads // heads.num_kv_heads, index)
            for index in range(num_layers)
        ]
        self.mask: torch.Tensor | None = None
        self.key: Any = None

    def _make_mask(self, start: int, num_tokens: int) -> torch.Tensor | None:
        device = self.stage.device
        shape = (len(self.padding_mask), num_tokens, 1)
        embeddings = torch.empty(shape, dtype=torch.bfloat16, device=device)
        positions = torch.arange(start, start + num_tokens, device=device)[None]
        return create_causal_mask(
            self.config, embeddings, self.padding_mask[:, : start + num_tokens], self.cache,
            positions,
        )  # fmt: skip

    def begin_step(self) -> None:
        """Make the mask of a step, which all layers share."""
        start = self.stored_tokens if self.preallocated else self.cache.get_seq_length()
        self.mask = self._make_mask(start, self.query.shape[2])

    def update(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new tokens in a layer, and return the handles of its keys and values."""
        return self.cache.update(self._key, self._value, index)

    def attend(self, index: int, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return the attention output of a layer, `[B, T, Hq, D]`."""
        self.key = key
        return fp8_paged_attention(self.modules[index], self.query, key, value, self.mask)[0]

    def step(self, index: int) -> torch.Tensor:
        """Run one layer of a step, and return its output. The first layer also makes the mask."""
        if index == 0:
            self.begin_step()
        return self.attend(index, *self.update(index))


def measure_attention(
    record: Record, section: str, case: Case, fmt: PageFormat, backend: str, name: str = "",
    *, preallocated: bool = True, is_full_step: bool = False, is_eager: bool = False,
) -> None:  # fmt: skip
    """Add a row for attention alone, after one step has stored its tokens.

    With `is_full_step`, the row is for a complete step of a layer. With `is_eager`, no graph is
    captured.
    """
    stage = record.stage
    num_bytes = case.count_bytes_read(fmt)

    def measure_row() -> dict[str, Any]:
        num_layers = stage.count_buffers(int(num_bytes))
        cache_steps = CacheSteps(stage, fmt, case, num_layers, backend, preallocated=preallocated)
        if is_full_step:
            steps = [functools.partial(cache_steps.step, index) for index in range(num_layers)]
        else:
            cache_steps.begin_step()
            steps = [
                functools.partial(cache_steps.attend, index, *cache_steps.update(index))
                for index in range(num_layers)
            ]
        with poison_memory():
            for step in steps:
                output = step()
        error = compute_output_error(output, cache_steps.query, get_pages(cache_steps.key), case)
        return {
            "error": error, "moved": num_bytes, **case.describe(), "layers": num_layers,
            **stage.time_steps(steps, is_eager=is_eager),
            "launches": stage.count_launches(steps) if is_full_step else None,
        }  # fmt: skip

    record.measure(section, case, name or fmt.name, measure_row)


def measure_layers(record: Record, sizes: RunSizes, backend: str) -> None:
    """Add rows for one layer of a step of a growing cache: mask, write, schedule and attention.

    The steps are captured in a graph. Steps in the first format are also called from Python, as
    generate() does.
    """
    measure = functools.partial(
        measure_attention, record, "layer", preallocated=False, is_full_step=True
    )
    first_format = sizes.layer_formats[0]
    for case in sizes.layer_cases:
        for fmt in sizes.layer_formats:
            measure(case, fmt, backend)
        measure(case, first_format, backend, f"{first_format.name} eager", is_eager=True)
