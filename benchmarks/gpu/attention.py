"""Measure attention of one layer to stored tokens: decode steps, other shapes, many new tokens."""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from hf_fp8kv import ops
from hf_fp8kv.ops import Pages
from hf_fp8kv.ops.triton.target import get_target, next_power_of_2
from hf_fp8kv.ops.triton.tuning import MAX_DECODE_ROWS, Workload, choose_extend_config

from . import baselines
from .cached import measure_attention
from .goals import PADDED_SUFFIX
from .random_data import compute_output_error, make_layer_pages, poison_memory
from .record import Record
from .shapes import BF16, E4M3, PAGE_FORMATS, Case, PageFormat, RunSizes
from .stage import Stage, Step

# Formats that are measured in all cases, and formats that come first in the full cases.
COMMON_FORMATS = [fmt for fmt in PAGE_FORMATS if not fmt.full_cases_only]
FIRST_FORMATS = [fmt for fmt in PAGE_FORMATS if not fmt.full_cases_only or fmt.dtype == "int8"]


def measure_decode(record: Record, sizes: RunSizes, backend: str) -> None:
    """Add a row for each decode case and each contender, the most important rows first."""
    full_cases = sizes.decode_cases[: sizes.num_full_cases]
    for case in sizes.decode_cases:
        for fmt in FIRST_FORMATS if case in full_cases else COMMON_FORMATS:
            if case.is_ragged:
                # Only engines have ragged batches. `generate()` pads shorter prompts instead.
                measure_pages(record, sizes, backend, "decode", case, fmt)
            else:
                measure_attention(record, "decode", case, fmt, backend)
            if str(case) in sizes.padded_cases and not fmt.full_cases_only:
                name = fmt.name + PADDED_SUFFIX
                measure_attention(record, "decode", case.pad_left(), fmt, backend, name)
        baselines.measure_decode(record, "decode", case, with_gqa=case in full_cases)
        if backend == "triton":  # the only backend with schedules
            measure_schedule = functools.partial(_measure_schedule, record.stage, case, backend)
            record.measure("decode", case, "split schedule", measure_schedule)
    for case in full_cases:
        for fmt in PAGE_FORMATS:
            if fmt not in FIRST_FORMATS:
                measure_attention(record, "decode", case, fmt, backend)
            if not fmt.full_cases_only:
                name = f"{fmt.name} no mask"
                measure_pages(record, sizes, backend, "decode", case, fmt, name)
    baselines.measure_flex(record, "decode", full_cases[0])


def _measure_schedule(stage: Stage, case: Case, backend: str) -> dict[str, Any]:
    """Time the schedule of a case. A step makes one schedule for all layers."""
    return stage.time_steps([make_schedule_step(stage, case, backend).make_schedule] * 8)


def measure_others(record: Record, sizes: RunSizes, backend: str) -> None:
    """Add rows for other numbers and sizes of heads, windows, softcap and several new tokens."""
    for case in sizes.other_cases:
        for fmt in COMMON_FORMATS:
            if case.window or case.softcap or case.is_ragged:
                measure_pages(record, sizes, backend, "others", case, fmt)
            else:
                measure_attention(record, "others", case, fmt, backend)
        if not (case.window or case.softcap or case.new_tokens > 1):
            baselines.measure_decode(record, "others", case)


def measure_extend(record: Record, sizes: RunSizes, backend: str) -> None:
    """Add a row for each number of new tokens and each number of stored tokens.

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
            row = measure_pages(record, sizes, backend, "extend", case, fmt)
            if row and fmt is BF16 and not _loads_ahead(record.stage, case):
                row["note"] = "K and V are not loaded ahead, so do not compare times with this row"
        baselines.measure_extend(record, case)
    for case in cases:
        num_stored = case.lengths[0] - case.new_tokens
        padded_case = replace(case, padding=(num_stored // 2,))
        for fmt in PAGE_FORMATS:
            if fmt.is_static and fmt.dtype == E4M3.dtype:
                measure_pages(record, sizes, backend, "extend", case, fmt)
            if num_stored and fmt in (E4M3, BF16):
                name = f"{fmt.name} preallocated"
                measure_attention(record, "extend", case, fmt, backend, name)
                name = fmt.name + PADDED_SUFFIX
                measure_attention(
                    record, "extend", padded_case, fmt, backend, name, preallocated=False
                )


def _loads_ahead(stage: Stage, case: Case) -> bool:
    """Return whether the extend kernel loads 16-bit pages ahead of the tile that it computes."""
    width = next_power_of_2(case.heads.dim)
    workload = Workload(width, MAX_DECODE_ROWS + 1, has_16_bit_side=True)
    return choose_extend_config(get_target(stage.device), workload).stages > 1


def measure_pages(
    record: Record, sizes: RunSizes, backend: str, section: str, case: Case, fmt: PageFormat,
    name: str = "",
) -> dict[str, Any] | None:  # fmt: skip
    """Add a row for attention to scattered pages, without a mask. Return it, or None if skipped."""
    stage, num_bytes = record.stage, case.bytes_read(fmt)
    num_layers = stage.count_buffers(int(num_bytes))

    def measure_row() -> dict[str, Any]:
        layer_pages = make_layer_pages(stage, fmt, case, num_layers, sizes.num_pages)
        query = make_query(stage, case)
        _, schedule, lengths = make_schedule_step(stage, case, backend)
        steps = [
            functools.partial(attend, query, pages, lengths, case, schedule, backend)
            for pages in layer_pages
        ]
        with poison_memory():
            output = steps[-1]()
        error = compute_output_error(output, query, layer_pages[-1], case)
        fields = {"moved": num_bytes, **case.describe(), "layers": num_layers}
        return {**stage.time_steps(steps), "error": error, **fields}

    return record.measure(section, case, name or fmt.name, measure_row)


def make_query(stage: Stage, case: Case) -> torch.Tensor:
    """Return random queries, `[B, Hq, T, D]`, with the strides of a model."""
    shape = (len(case.lengths), case.new_tokens, case.heads.query, case.heads.query_dim)
    return stage.randn(*shape).transpose(1, 2)


class ScheduleStep(NamedTuple):
    """The schedule of a case, and the function that fills it again."""

    make_schedule: Step  # must not be called without a schedule
    schedule: Any  # `[rows, 4]`, int32, or None if the backend needs no schedule
    lengths: torch.Tensor  # tokens of each sequence, `[B]`, int32


def make_schedule_step(stage: Stage, case: Case, backend: str) -> ScheduleStep:
    """Return the schedule of a case, filled for its lengths."""
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=stage.device)
    num_heads = case.heads.kv
    # A cache passes its length, because all of its sequences have the same length.
    length = None if case.is_ragged else case.tokens_read // len(case.lengths)
    num_query_rows = case.heads.query // num_heads * case.new_tokens
    arguments = lengths, case.new_tokens, case.window, 0, num_heads, backend
    schedule = ops.create_schedule(*arguments, length, num_query_rows)
    return ScheduleStep(
        functools.partial(ops.fill_schedule, schedule, *arguments), schedule, lengths
    )


def attend(
    query: torch.Tensor,
    pages: Pages,
    lengths: torch.Tensor,
    case: Case,
    schedule: Any,
    backend: str,
) -> torch.Tensor:
    """Attend with the operation of this package, and return the output, `[B, T, Hq, D]`."""
    spec = case.attention_spec()
    return ops.attend(
        query, pages, lengths, 0, max(case.lengths), spec, schedule=schedule, backend=backend
    )
