"""Attention sections, one layer over stored tokens: decode steps, other shapes, extending."""

import functools
from dataclasses import replace
from typing import Any

import torch

from hf_fp8kv import ops
from hf_fp8kv.formats import AUTO
from hf_fp8kv.ops import Pages
from hf_fp8kv.ops.triton.target import next_power_of_2, target_of
from hf_fp8kv.ops.triton.tuning import DECODE_ROWS, Workload, extend_config

from . import baselines, cached
from .goals import PADDED
from .pools import check, pages_for, poison_memory
from .record import Record
from .shapes import KINDS, Case, Kind, Sizes
from .timing import Step


def measure(record: Record, sizes: Sizes, backend: str) -> None:
    """Add a row for each case of a decode step and each contender."""
    for index, case in enumerate(sizes.decode):
        is_compared = index < sizes.compared
        kinds = [kind for kind in KINDS if is_compared or not kind.is_rare]
        for kind in kinds:
            if case.is_ragged:
                # As engines have them; generate() pads shorter texts, and has no such case.
                measure_pages(record, sizes, backend, "decode", case, kind)
            else:
                cached.measure_attention(record, "decode", case, kind, backend)
            if str(case) in sizes.padded and not kind.is_rare:
                name = kind.name + PADDED
                padded = case.pad_left()
                cached.measure_attention(record, "decode", padded, kind, backend, name)
            if is_compared and not kind.is_rare:
                name = f"{kind.name} no mask"
                measure_pages(record, sizes, backend, "decode", case, kind, name)
        baselines.measure_decode(record, "decode", case, compiles=is_compared)
        _measure_plan(record, sizes, backend, "decode", case)


def measure_others(record: Record, sizes: Sizes, backend: str) -> None:
    """Add rows for other heads, windows, softcap and several new tokens."""
    for case in sizes.others:
        for kind in KINDS:
            if kind.is_rare:
                continue
            if case.window or case.softcap or case.is_ragged:
                measure_pages(record, sizes, backend, "others", case, kind)
            else:
                cached.measure_attention(record, "others", case, kind, backend)
        if not (case.window or case.softcap or case.tokens > 1):
            baselines.measure_decode(record, "others", case)


def measure_extend(record: Record, sizes: Sizes, backend: str) -> None:
    """Add a row for each number of new tokens, over each number of stored ones.

    A growing cache without padding is asked without a mask; a preallocated one, and one with
    padding, with what `generate()` passes. On an empty cache attention reads fresh keys, no pages,
    but for `prefill="stored"`.
    """
    for stored, new in sizes.extend:
        label = f"{new} over {stored}"
        case = Case((stored + new,), sizes.heads, tokens=new, label=label)
        for kind in KINDS:
            if kind.format not in ("fp8_e4m3", AUTO):
                continue
            row = measure_pages(record, sizes, backend, "extend", case, kind)
            if row and kind.format == AUTO and not _loads_ahead(record, case):
                row["note"] = "K and V are not loaded ahead: no ratio to it says anything"
            if stored and not kind.static:
                measure = functools.partial(cached.measure_attention, record, "extend")
                measure(case, kind, backend, f"{kind.name} preallocated")
                padded = replace(case, padding=(stored // 2,))
                name = kind.name + PADDED
                measure(padded, kind, backend, name, preallocated=False)
        baselines.measure_extend(record, case)


def measure_pages(
    record: Record, sizes: Sizes, backend: str, section: str, case: Case, kind: Kind, name: str = ""
) -> dict[str, Any] | None:
    """Add a row for attention over pages, checked first, and return it."""
    name = name or kind.name
    stage, size = record.stage, case.moved(kind)
    layers = stage.copies(int(size))

    def work() -> dict[str, Any]:
        pools = pages_for(stage, kind, case, layers, sizes.pages)
        query = make_query(record, case)
        before, plan, lengths = make_plan_step(record, case, backend)
        steps = [functools.partial(attend, query, p, lengths, case, plan, backend) for p in pools]
        with poison_memory():
            before()
            output = steps[-1]()
        error = check(output, query, pools[-1], case)
        timed = stage.time(steps, before)
        return {"timed": timed, "error": error, "moved": size, **case.describe(), "layers": layers}

    # The check takes some memory, and the making of pages too.
    return record.measure(section, case, name, work, size=layers * size * 1.1 + 2**31)


def _loads_ahead(record: Record, case: Case) -> bool:
    """Return whether the extend kernel loads pages of 16 bits before it needs them."""
    width = next_power_of_2(case.heads.dim)
    workload = Workload(width, DECODE_ROWS + 1, exact=False, wide=True, biased=False)
    return extend_config(target_of(record.stage.device), workload).stages > 1


def make_query(record: Record, case: Case) -> torch.Tensor:
    heads = case.heads
    # As a model hands it over: heads and tokens have changed places.
    query = record.stage.randn(len(case.lengths), case.tokens, heads.query, heads.query_dim)
    return query.transpose(1, 2)


def make_plan_step(record: Record, case: Case, backend: str) -> tuple[Step, Any, torch.Tensor]:
    """Return what makes the plan of a step, the plan (None: there is none) and the lengths."""
    device = record.stage.device
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    batch, heads = len(case.lengths), case.heads.kv
    # As a cache knows it, whose sequences are all of one length.
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
    spec = case.attention_spec()
    return ops.attend(query, pages, lengths, 0, max(case.lengths), spec, plan=plan, backend=backend)


def _measure_plan(record: Record, sizes: Sizes, backend: str, section: str, case: Case) -> None:
    """Add a row for the plan alone, which is made once per step."""
    step, plan, _ = make_plan_step(record, case, backend)

    def work() -> dict[str, Any]:
        timed = record.stage.time([step] * 8)
        return {"timed": timed, "batch": len(case.lengths), "read": case.read}

    if plan is not None:
        record.measure(section, case, "split plan", work)
