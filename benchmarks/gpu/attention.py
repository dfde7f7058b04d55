"""Measure attention of one layer to stored tokens: decode steps, and many new tokens."""

import functools
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from hf_fp8kv import ops
from hf_fp8kv.ops import Pages

from . import baselines
from .cached import measure_attention
from .random_data import compute_output_error, make_layer_pages, poison_memory
from .record import Record
from .shapes import BF16, E3M4, E4M3, INT8, Case, PageFormat, RunSizes
from .stage import Stage, Step


def measure_decode(record: Record, sizes: RunSizes, backend: str) -> None:
    """Add a row for each decode case and each contender, the most important rows first."""
    for index, case in enumerate(sizes.decode_cases):
        is_full = index < sizes.num_full_cases
        formats = (E4M3, INT8, E3M4, BF16) if is_full else (E4M3, E3M4, BF16)
        for fmt in formats:
            measure_attention(record, "decode", case, fmt, backend)
            if str(case) in sizes.padded_cases and fmt is not INT8:
                measure_attention(
                    record, "decode", case.pad_left(), fmt, backend, f"{fmt.name} left padded"
                )
        baselines.measure_decode(record, case, with_gqa=is_full)


def measure_extend(record: Record, sizes: RunSizes, backend: str) -> None:
    """Add rows for each pair of stored and new tokens.

    A growing cache without padding attends without a mask. A preallocated cache, and a cache with
    padding, attend with the mask of `generate()`. If a cache is empty, attention reads the new keys
    and no pages, except with `prefill="stored"`.
    """
    cases = [
        Case((stored + new,), sizes.heads, new, label=f"{new} over {stored}")
        for stored, new in sizes.extend_shapes
    ]
    for case in cases:
        for fmt in (E4M3, BF16):
            measure_pages(record, sizes, backend, "extend", case, fmt)
        baselines.measure_extend(record, case)
    measure_cached = functools.partial(measure_attention, record, "extend")
    stored_cases = (case for case in cases if case.lengths[0] > case.num_new_tokens)
    for case, fmt in product(stored_cases, (E4M3, BF16)):
        measure_cached(case, fmt, backend, f"{fmt.name} preallocated")
        padded_case = replace(case, padding=((case.lengths[0] - case.num_new_tokens) // 2,))
        measure_cached(padded_case, fmt, backend, f"{fmt.name} left padded", preallocated=False)


def measure_pages(
    record: Record, sizes: RunSizes, backend: str, section: str, case: Case, fmt: PageFormat,
    name: str = "",
) -> None:  # fmt: skip
    """Add a row for attention to scattered pages, without a mask."""
    stage = record.stage
    num_bytes = case.count_bytes_read(fmt)

    def measure_row() -> dict[str, Any]:
        num_layers = stage.count_buffers(int(num_bytes))
        layer_pages = make_layer_pages(stage, fmt, case, num_layers, sizes.num_pages)
        query = make_query(stage, case)
        _, schedule, lengths = make_schedule(stage, case, backend)
        steps = [
            functools.partial(attend, query, pages, lengths, case, schedule, backend)
            for pages in layer_pages
        ]
        with poison_memory():
            output = steps[-1]()
        return {
            "error": compute_output_error(output, query, layer_pages[-1], case),
            "moved": num_bytes, **case.describe(), "layers": num_layers, **stage.time_steps(steps),
        }  # fmt: skip

    record.measure(section, case, name or fmt.name, measure_row)


def make_query(stage: Stage, case: Case) -> torch.Tensor:
    """Return random queries, `[B, Hq, T, D]`, with the strides of a model."""
    shape = (
        len(case.lengths),
        case.num_new_tokens,
        case.heads.num_query_heads,
        case.heads.query_dim,
    )
    return stage.randn(*shape).transpose(1, 2)


def make_schedule(stage: Stage, case: Case, backend: str) -> tuple[Step, Any, torch.Tensor]:
    """Make the schedule of a case.

    Returns:
        The step that fills the schedule, the filled schedule, `[rows, 4]`, int32, and the lengths
        of the sequences, `[B]`, int32. If the backend needs no schedule, the schedule is None and
        the step must not be called.
    """
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=stage.device)
    num_kv_heads = case.heads.num_kv_heads
    # A cache passes its length, because all of its sequences have the same length.
    length = case.tokens_read // len(case.lengths) if len(set(case.lengths)) == 1 else None
    num_query_rows = case.heads.num_query_heads // num_kv_heads * case.num_new_tokens
    arguments = (lengths, case.num_new_tokens, case.window, 0, num_kv_heads, backend)
    schedule = ops.create_schedule(*arguments, length, num_query_rows)
    return functools.partial(ops.fill_schedule, schedule, *arguments), schedule, lengths


def attend(
    query: torch.Tensor,
    pages: Pages,
    lengths: torch.Tensor,
    case: Case,
    schedule: Any,
    backend: str,
) -> torch.Tensor:
    """Attend with the operation of this package, and return the output, `[B, T, Hq, D]`."""
    return ops.attend(
        query, pages, lengths, 0, max(case.lengths), case.make_attention_spec(), schedule=schedule,
        backend=backend,
    )  # fmt: skip
