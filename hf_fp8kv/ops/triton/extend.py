"""Attention of many query tokens over stored pages: prefill in chunks, prefixes, forks.

A program takes a block of query rows of one KV head (its query heads times some query tokens), and
reads all that these may see. Where that makes fewer programs than the GPU has processors (a short
chunk after a long prefix), sequences are split as for decoding.
"""

import torch
import triton
import triton.language as tl

from ..pages import AttentionSpec, Pages
from .arguments import prepare
from .attention import attend_rows, finish
from .decode import split
from .plan import UNIT
from .target import cdiv, launch
from .tuning import extend_cut

__all__ = ["attend"]


def attend(
    query: torch.Tensor,
    pages: Pages,
    lengths: torch.Tensor,
    start: int,
    stop: int,
    spec: AttentionSpec,
) -> torch.Tensor:
    """Returns what `reference.attend` returns, up to rounding; the same arguments."""
    call = prepare(query, pages, lengths, start, stop, spec)
    cut = extend_cut(call.target, call.width, exact=call.exact, wide=call.wide)
    batch, q_heads, tokens, _ = query.shape
    programs = call.constants["HEADS"] * batch * cdiv(call.rows, cut.rows)
    if programs < call.target.processors and stop > 2 * UNIT:
        return split(call, cut, None, programs=2 if cut.warps <= 4 else 1)
    out = query.new_empty((batch, tokens, q_heads, call.constants["DV"]))
    launch(
        _extend, (programs,), *call.tensors, out, batch, *call.numbers, **call.constants,
        ROWS=cut.rows, TILE=cut.tile, STAGES=cut.stages, **cut.options(),
    )  # fmt: skip
    return out


@triton.jit(
    do_not_specialize=[
        "batch", "tokens", "start", "stop", "window", "mask_b", "mask_h", "mask_t", "bias_b",
        "bias_h", "bias_t", "table_b",
    ]
)  # fmt: skip
def _extend(
    query, k_pool, v_pool, k_scales, v_scales, k_scale, center, table, lengths, mask, bias, sinks,
    v_scale, out, batch,
    tokens, start, stop, window, k_scaling, scaling, softcap, v_factor,
    q_b, q_h, q_t, table_b, mask_b, mask_h, mask_t, bias_b, bias_h, bias_t,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    PAGE: tl.constexpr, WIDE_K: tl.constexpr, WIDE_V: tl.constexpr,
    K_HOW: tl.constexpr, K_SHIFT: tl.constexpr, K_NAN: tl.constexpr, K_OPERAND: tl.constexpr,
    V_HOW: tl.constexpr, V_SHIFT: tl.constexpr, V_NAN: tl.constexpr, V_OPERAND: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr,
    CENTER: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One program per KV head, sequence and block of query rows.

    They are numbered along one axis: the others end at 65535.
    """
    count = GROUPS * tokens
    h = tl.program_id(0) % HEADS
    b = tl.program_id(0) // HEADS % batch
    # The last rows see the most: they start first.
    block = tl.cdiv(count, ROWS) - 1 - tl.program_id(0) // HEADS // batch
    length = tl.load(lengths + b)
    rows = block * ROWS + tl.arange(0, ROWS)
    exists = rows < count
    r = tl.minimum(rows, count - 1)
    t = r // GROUPS
    head = h * GROUPS + r % GROUPS
    first_t = block * ROWS // GROUPS
    last_t = (tl.minimum(block * ROWS + ROWS, count) - 1) // GROUPS
    acc, top, total = attend_rows(
        query, k_pool, v_pool, k_scales, v_scales, k_scale, center, table, mask, bias,
        b, h, head, t, exists, length, tokens, 0, tl.minimum(length, stop), first_t, last_t,
        k_scaling, scaling, softcap, start, window,
        q_b, q_h, q_t, table_b, mask_b, mask_h, mask_t, bias_b, bias_h, bias_t,
        ROWS, HEADS, DK, DV, PAGE, TILE, WIDE_K, WIDE_V,
        K_HOW, K_SHIFT, K_NAN, K_OPERAND, V_HOW, V_SHIFT, V_NAN, V_OPERAND,
        CAUSAL, WINDOWED, SOFTCAP, MASK, CENTER, PRECISION, STAGES,
    )  # fmt: skip
    result = finish(acc, top, total, sinks, v_scale, h, head, v_factor, DV, WIDE_V)
    dv = tl.arange(0, WIDE_V)
    place = ((b * tokens + t) * (HEADS * GROUPS) + head).to(tl.int64) * DV
    real = exists[:, None] & (dv < DV)[None, :]
    tl.store(out + place[:, None] + dv[None, :], result.to(out.dtype.element_ty), mask=real)
