"""Attention of few query tokens over stored pages: split along the tokens, to fill the GPU.

A program takes all query rows of one KV head (its query heads times the query tokens) and one part
of one sequence, as the plan says (plan.py). A sequence in several parts leaves partial sums, which
a second kernel, or the program that is done last, merges.
"""

import torch
import triton
import triton.language as tl

from ..pages import AttentionSpec, Pages
from . import plan as plans
from .arguments import Call, prepare
from .attention import attend_rows, finish
from .target import cdiv, launch
from .tuning import DECODE_ROWS, Cut, decode_cut

__all__ = ["DECODE_ROWS", "attend", "split"]

# Parts whose sums are merged at a time.
MERGED = 16


def attend(
    query: torch.Tensor,
    pages: Pages,
    lengths: torch.Tensor,
    start: int,
    stop: int,
    spec: AttentionSpec,
    plan: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns what `reference.attend` returns, up to rounding; at most DECODE_ROWS query rows.

    Args:
        query, pages, lengths, start, stop, spec: as there.
        plan: what `plan.make` wrote for these lengths, query tokens and start; None: made here.
    """
    call = prepare(query, pages, lengths, start, stop, spec)
    assert call.rows <= DECODE_ROWS
    cut = decode_cut(
        call.target,
        call.width,
        call.rows,
        exact=call.exact,
        wide=call.wide,
        bias=call.bias,
        padded=call.padded,
    )
    # A plan is made for one block of rows.
    return split(call, cut, plan if call.rows <= cut.rows else None)


def split(call: Call, cut: Cut, plan: torch.Tensor | None, programs: int = 0) -> torch.Tensor:
    """Returns the attention of a call whose sequences are split.

    Args:
        call: what is asked for.
        cut: how the launch is cut; query rows make one block or more.
        plan: made for the call's KV heads times its blocks; None: made here.
        programs: as in `plan.capacity`.
    """
    query, *_ = call.tensors
    lengths = call.tensors[8]
    assert query is not None
    assert lengths is not None
    batch, q_heads, tokens, _ = query.shape
    heads, dim = call.constants["HEADS"], call.constants["DV"]
    blocks = cdiv(call.rows, cut.rows)
    slots = plans.capacity(batch, heads * blocks, call.target, programs)
    rows = plans.rows(batch, heads * blocks, call.target, programs)
    if plan is None:
        plan = torch.empty((rows, 4), dtype=torch.int32, device=query.device)
        _tokens, start, _stop, window, *_ = call.numbers
        plans.make(plan, lengths, tokens, window, start, heads * blocks, programs)
    assert plan.shape == (rows, 4), f"a plan for another launch: {tuple(plan.shape)}, {rows} rows"

    out = query.new_empty((batch, tokens, q_heads, dim))
    # The partial sums, and after them each one's reference and sum of weights.
    partial = query.new_empty(slots * heads * call.rows * (dim + 2), dtype=torch.float32)
    stats = partial[slots * heads * call.rows * dim :]
    last = cut.combine == "last"
    launch(
        _decode, (heads, slots, blocks), *call.tensors, plan, out, partial, stats, batch,
        *call.numbers, **call.constants, ROWS=cut.rows, TILE=cut.tile, STAGES=cut.stages,
        LAST=last, MERGED=MERGED, **cut.options(),
    )  # fmt: skip
    if not last:
        *_, sinks, v_scale = call.tensors
        launch(
            _combine, (call.rows, heads, batch), plan, partial, stats, sinks, v_scale, out, tokens,
            slots, call.numbers[7], HEADS=heads, GROUPS=call.constants["GROUPS"], DV=dim,
            WIDE_V=call.constants["WIDE_V"], MERGED=MERGED, num_warps=1,
        )  # fmt: skip
    return out


@triton.jit(
    do_not_specialize=[
        "batch", "start", "stop", "window", "mask_b", "mask_h", "mask_t", "bias_b", "bias_h",
        "bias_t", "table_b",
    ]
)  # fmt: skip
def _decode(
    query, k_pool, v_pool, k_scales, v_scales, k_scale, center, table, lengths, mask, bias, sinks,
    v_scale, plan, out, partial, stats, batch,
    tokens, start, stop, window, k_scaling, scaling, softcap, v_factor,
    q_b, q_h, q_t, table_b, mask_b, mask_h, mask_t, bias_b, bias_h, bias_t,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    PAGE: tl.constexpr, WIDE_K: tl.constexpr, WIDE_V: tl.constexpr,
    K_HOW: tl.constexpr, K_SHIFT: tl.constexpr, K_NAN: tl.constexpr, K_OPERAND: tl.constexpr,
    V_HOW: tl.constexpr, V_SHIFT: tl.constexpr, V_NAN: tl.constexpr, V_OPERAND: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr,
    CENTER: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr, LAST: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """One program per KV head, part, and block of query rows."""
    h = tl.program_id(0)
    part = tl.program_id(1)
    b = tl.load(plan + part * 4)
    if b < 0:
        return
    low = tl.load(plan + part * 4 + 1)
    parts = tl.load(plan + part * 4 + 3)
    length = tl.load(lengths + b)
    high = tl.minimum(tl.load(plan + part * 4 + 2), tl.minimum(length, stop))
    count = GROUPS * tokens
    first_row = tl.program_id(2) * ROWS
    end_row = tl.minimum(first_row + ROWS, count)
    rows = first_row + tl.arange(0, ROWS)
    exists = rows < count
    r = tl.minimum(rows, count - 1)
    t = r // GROUPS
    head = h * GROUPS + r % GROUPS
    acc, top, total = attend_rows(
        query, k_pool, v_pool, k_scales, v_scales, k_scale, center, table, mask, bias,
        b, h, head, t, exists, length, tokens, low, high,
        first_row // GROUPS, (end_row - 1) // GROUPS,
        k_scaling, scaling, softcap, start, window,
        q_b, q_h, q_t, table_b, mask_b, mask_h, mask_t, bias_b, bias_h, bias_t,
        ROWS, HEADS, DK, DV, PAGE, TILE, WIDE_K, WIDE_V,
        K_HOW, K_SHIFT, K_NAN, K_OPERAND, V_HOW, V_SHIFT, V_NAN, V_OPERAND,
        CAUSAL, WINDOWED, SOFTCAP, MASK, CENTER, PRECISION, STAGES,
    )  # fmt: skip
    dv = tl.arange(0, WIDE_V)
    real = exists[:, None] & (dv < DV)[None, :]
    if parts == 1:
        result = finish(acc, top, total, sinks, v_scale, h, head, v_factor, DV, WIDE_V)
        place = ((b * tokens + t) * (HEADS * GROUPS) + head).to(tl.int64) * DV
        tl.store(out + place[:, None] + dv[None, :], result.to(out.dtype.element_ty), mask=real)
    else:
        saved = ((part * HEADS + h) * count + r).to(tl.int64)
        tl.store(partial + (saved * DV)[:, None] + dv[None, :], acc, mask=real)
        tl.store(stats + saved * 2, top, mask=exists)
        tl.store(stats + saved * 2 + 1, total, mask=exists)
        if LAST:
            # All of this program's stores come before the count, and what others stored before
            # theirs is seen after it.
            tl.debug_barrier()
            slots = tl.num_programs(1)
            counter = plan + (slots + batch) * 4
            counter += (b * HEADS + h) * tl.num_programs(2) + tl.program_id(2)
            done = tl.atomic_add(counter, 1, sem="acq_rel")
            if done == parts - 1:
                tl.debug_barrier()
                for row in range(first_row, end_row):
                    _merge(
                        plan, partial, stats, sinks, v_scale, out, b, h, row, tokens, slots,
                        v_factor, HEADS, GROUPS, DV, WIDE_V, MERGED,
                    )  # fmt: skip
                tl.store(counter, 0)


@triton.jit(do_not_specialize=["tokens", "slots"])
def _combine(
    plan, partial, stats, sinks, v_scale, out, tokens, slots, v_factor,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DV: tl.constexpr, WIDE_V: tl.constexpr,
    MERGED: tl.constexpr,
):  # fmt: skip
    """One program per sequence, KV head and query row."""
    b = tl.program_id(2)
    if tl.load(plan + (slots + b) * 4 + 1) > 1:
        _merge(
            plan, partial, stats, sinks, v_scale, out, b, tl.program_id(1), tl.program_id(0),
            tokens, slots, v_factor, HEADS, GROUPS, DV, WIDE_V, MERGED,
        )  # fmt: skip


@triton.jit
def _merge(
    plan, partial, stats, sinks, v_scale, out, b, h, row, tokens, slots, v_factor,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DV: tl.constexpr, WIDE_V: tl.constexpr,
    MERGED: tl.constexpr,
):  # fmt: skip
    """Merges the parts of one query row, MERGED at a time, and stores the result."""
    first = tl.load(plan + (slots + b) * 4)
    parts = tl.load(plan + (slots + b) * 4 + 1)
    count = GROUPS * tokens
    i = tl.arange(0, MERGED)
    dv = tl.arange(0, WIDE_V)
    acc = tl.zeros([1, WIDE_V], tl.float32)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    for at in range(0, parts, MERGED):
        inside = at + i < parts
        place = (((first + at + i) * HEADS + h) * count + row).to(tl.int64)
        # Past the first-level cache, which may hold what was there before.
        tops = tl.load(stats + place * 2, mask=inside, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(stats + place * 2 + 1, mask=inside, other=0.0, cache_modifier=".cg")
        numbers = tl.load(
            partial + (place * DV)[:, None] + dv[None, :],
            mask=inside[:, None] & (dv < DV)[None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        best = tl.maximum(top, tl.max(tops, 0))
        known = tl.where(best == float("-inf"), 0.0, best)
        fade = tl.exp2(top - known)
        share = tl.exp2(tops - known)
        total = total * fade + tl.sum(sums * share, 0)
        acc = acc * fade[:, None] + tl.sum(numbers * share[:, None], 0)[None, :]
        top = best
    head = h * GROUPS + row % GROUPS + tl.zeros([1], tl.int32)
    result = finish(acc, top, total, sinks, v_scale, h, head, v_factor, DV, WIDE_V)
    place = ((b * tokens + row // GROUPS) * (HEADS * GROUPS) + head).to(tl.int64) * DV
    tl.store(
        out + place[:, None] + dv[None, :], result.to(out.dtype.element_ty),
        mask=(dv < DV)[None, :],
    )  # fmt: skip
