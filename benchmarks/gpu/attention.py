"""Measure attention of one layer over stored tokens: decode steps, other shapes, new tokens."""

import functools
from dataclasses import replace
from typing import Any

import torch

from hf_fp8kv import ops
from hf_fp8kv.ops import Pages
from hf_fp8kv.ops.triton.target import next_power_of_2, target_of
from hf_fp8kv.ops.triton.tuning import DECODE_ROWS, Workload, extend_config

from . import baselines
from .cached import measure_attention
from .goals import PADDED
from .pools import check, pages_for, poison_memory
from .record import Record
from .shapes import BF16, E4M3, KINDS, Case, Kind, Sizes
from .stage import Stage, Step

COMMON = [kind for kind in KINDS if not kind.is_rare]
FIRST = [kind for kind in KINDS if not kind.is_rare or kind.format == "int8"]


def measure_decode(record: Record, sizes: Sizes, backend: str) -> None:
    """Add a row for each decode case and each contender. Important rows come first."""
    compared = sizes.decode[: sizes.compared]
    for case in sizes.decode:
        for kind in FIRST if case in compared else COMMON:
            if case.is_ragged:
                # Only engines have such cases. `generate()` pads shorter prompts instead.
                measure_pages(record, sizes, backend, "decode", case, kind)
            else:
                measure_attention(record, "decode", case, kind, backend)
            if str(case) in sizes.padded and not kind.is_rare:
                padded, name = case.pad_left(), kind.name + PADDED
                measure_attention(record, "decode", padded, kind, backend, name)
        baselines.measure_decode(record, "decode", case, grouped=case in compared)
        # A step makes one plan for all layers.
        make, plan, _ = make_plan_step(record.stage, case, backend)
        if plan is not None:
            work = functools.partial(record.stage.time, [make] * 8)
            record.measure("decode", case, "split plan", work)
    for case in compared:
        for kind in KINDS:
            if kind not in FIRST:
                measure_attention(record, "decode", case, kind, backend)
            if not kind.is_rare:
                name = f"{kind.name} no mask"
                measure_pages(record, sizes, backend, "decode", case, kind, name)
    baselines.measure_flex(record, "decode", compared[0])


def measure_others(record: Record, sizes: Sizes, backend: str) -> None:
    """Add rows for other heads, windows, softcap and several new tokens."""
    for case in sizes.others:
        for kind in COMMON:
            if case.window or case.softcap or case.is_ragged:
                measure_pages(record, sizes, backend, "others", case, kind)
            else:
                measure_attention(record, "others", case, kind, backend)
        if not (case.window or case.softcap or case.tokens > 1):
            baselines.measure_decode(record, "others", case)


def measure_extend(record: Record, sizes: Sizes, backend: str) -> None:
    """Add a row for each number of new tokens and each number of stored tokens.

    A growing cache without padding attends without a mask. A preallocated cache, and a cache with
    padding, attend with the mask of `generate()`. With an empty cache, attention reads fresh keys
    and no pages, except with `prefill="stored"`.
    """
    cases = [
        Case((stored + new,), sizes.heads, tokens=new, label=f"{new} over {stored}")
        for stored, new in sizes.extend
    ]
    for case in cases:
        for kind in (E4M3, BF16):
            row = measure_pages(record, sizes, backend, "extend", case, kind)
            if row and kind is BF16 and not _loads_ahead(record.stage, case):
                row["note"] = "K and V are not loaded ahead, so a ratio to this row means nothing"
        baselines.measure_extend(record, case)
    for case in cases:
        for kind in KINDS:
            if kind.static and kind.format == E4M3.format:
                measure_pages(record, sizes, backend, "extend", case, kind)
            stored = case.lengths[0] - case.tokens
            if stored and kind in (E4M3, BF16):
                name = f"{kind.name} preallocated"
                measure_attention(record, "extend", case, kind, backend, name)
                padded, name = replace(case, padding=(stored // 2,)), kind.name + PADDED
                measure_attention(record, "extend", padded, kind, backend, name, preallocated=False)


def _loads_ahead(stage: Stage, case: Case) -> bool:
    """Return whether the extend kernel loads 16-bit pages before it needs them."""
    width = next_power_of_2(case.heads.dim)
    workload = Workload(width, DECODE_ROWS + 1, exact=False, wide=True, biased=False)
    return extend_config(target_of(stage.device), workload).stages > 1


def measure_pages(
    record: Record, sizes: Sizes, backend: str, section: str, case: Case, kind: Kind, name: str = ""
) -> dict[str, Any] | None:
    """Add a row for attention to scattered pages, without a mask, and return it."""
    stage, size = record.stage, case.bytes_read(kind)
    layers = stage.copies(int(size))

    def work() -> dict[str, Any]:
        pools = pages_for(stage, kind, case, layers, sizes.pages)
        query = make_query(stage, case)
        make, plan, lengths = make_plan_step(stage, case, backend)
        make()
        steps = [functools.partial(attend, query, p, lengths, case, plan, backend) for p in pools]
        with poison_memory():
            output = steps[-1]()
        error = check(output, query, pools[-1], case)
        fields = {"moved": size, **case.describe(), "layers": layers}
        return {**stage.time(steps), "error": error, **fields}

    return record.measure(section, case, name or kind.name, work)


def make_query(stage: Stage, case: Case) -> torch.Tensor:
    """Return random queries, `[B, Hq, T, D]`, with the strides of a model."""
    heads = case.heads
    return stage.randn(len(case.lengths), case.tokens, heads.query, heads.query_dim).transpose(1, 2)


def make_plan_step(stage: Stage, case: Case, backend: str) -> tuple[Step, Any, torch.Tensor]:
    """Return a call that makes the plan of a step, the plan, and the lengths.

    The plan is None if the backend needs none.
    """
    device = stage.device
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    batch, heads = len(case.lengths), case.heads.kv
    # A cache passes its length, because all of its sequences have the same length.
    length = None if case.is_ragged else case.read // batch
    query_rows = case.heads.query // heads * case.tokens
    rows = ops.plan_rows(backend, device, batch, heads, length, query_rows)
    if rows is None:
        return (lambda: None), None, lengths
    plan = torch.empty((rows, 4), dtype=torch.int32, device=device)
    step = functools.partial(
        ops.make_plan, plan, lengths, case.tokens, case.window, 0, heads, backend
    )
    return step, plan, lengths


def attend(
    query: torch.Tensor, pages: Pages, lengths: torch.Tensor, case: Case, plan: Any, backend: str
) -> torch.Tensor:
    """Attend with the operation of this package, `[B, T, Hq, D]`."""
    spec = case.attention_spec()
    return ops.attend(query, pages, lengths, 0, max(case.lengths), spec, plan=plan, backend=backend)
