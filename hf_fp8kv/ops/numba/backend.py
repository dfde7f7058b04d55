"""The "numba" backend: each operation is one pass over the bytes, on all threads of torch.

Threads are plain ones: a kernel lets go of the interpreter's lock, and takes units of work from a
counter. So a thread that starts late, or never (a busy machine, a forked process), costs nothing:
the caller does what is left. numba's own parallel loops need OpenMP, which does not survive a fork
and waits spinning beside torch's.

A model in float64, and a CPU that cannot convert float16, are handed to the "torch" backend.
"""

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...formats import AUTO, MIN_SCALE
from ..pages import AttentionSpec, Pages, StoredSide
from ..reference import raise_overrun
from ..torch import backend as torch_backend
from . import attend as attention
from . import gather as gathering
from . import prompts
from . import write as writing
from .lanes import LANES
from .memory import F32, HAS_HALF
from .records import (
    KINDS,
    address,
    broadcast,
    decoding,
    encoding,
    no_gaps,
    readable_floats,
    stored,
    strided,
    table,
)

# Stored numbers that are worth a thread of their own: about 50 microseconds of work.
GRAIN = 1 << 18
# A unit of attention is at least this many tokens, and each thread gets at least UNITS of them: one
# that is held up then leaves the others little to wait for.
SPLIT = 256
UNITS = 4

_READABLE = frozenset(KINDS) if HAS_HALF else frozenset[torch.dtype]()


def _plain(pages: Pages) -> Pages:
    """Return the same pages, with scales and center in memory as their shapes say."""
    k, v, rows = _plain_side(pages.k), _plain_side(pages.v), no_gaps(pages.table)
    if k is pages.k and v is pages.v and rows is pages.table:
        return pages
    return pages._replace(k=k, v=v, table=rows)


def _plain_side(side: StoredSide) -> StoredSide:
    scale, center = side.static_scale, side.center
    if (scale is None or scale.is_contiguous()) and (center is None or center.is_contiguous()):
        return side
    return side._replace(
        static_scale=None if scale is None else scale.contiguous(),
        center=None if center is None else center.contiguous(),
    )


@functools.cache
def _pool(_process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="hf_fp8kv")


def _run(kernel: Callable[..., None], threads: int, *arguments: Any) -> None:
    """Run `kernel` here and on `threads - 1` others, until its units are done."""
    if threads < 2:
        kernel(*arguments)
        return
    submit, others = _pool(os.getpid()).submit, []
    try:
        for _ in range(threads - 1):
            others.append(submit(kernel, *arguments))
        kernel(*arguments)
    finally:
        # Also after an interrupt: the memory must stay until the last thread has left it.
        running = [other for other in others if not other.cancel()]
        wait(running)
    for other in running:
        other.result()


def _threads(numbers: int) -> int:
    return max(1, min(torch.get_num_threads(), numbers // GRAIN))


def load_kernels() -> None:
    """Load all kernels from numba's cache, or compile them: else the first calls do."""
    if not _READABLE:
        return
    writing.has_pages(writing.WRITE.no_work())
    writing.write(writing.WRITE.no_work())
    gathering.gather(gathering.GATHER.no_work())
    work = np.empty((0, 0), np.float32)
    attention.attend(attention.ATTEND.no_work(), work)
    attention.finish(attention.ATTEND.no_work(), work)


def write(pages: Pages, key: Tensor, value: Tensor, lengths: Tensor) -> None:
    """Store new tokens: the bytes of `reference.write`."""
    if not _READABLE.issuperset((pages.k_dtype, pages.v_dtype)):
        torch_backend.write(pages, key, value, lengths)
        return
    pages, lengths = _plain(pages), no_gaps(lengths)
    k, v = pages.k, pages.v
    key, value = _input(pages.k_dtype, key), _input(pages.v_dtype, value)
    batch, heads, tokens, _ = key.shape
    blocks = -(-tokens // writing.BLOCK)
    call = writing.WRITE.fill(
        (0, batch * heads * blocks, batch, heads, tokens, MIN_SCALE),
        table(pages, lengths),
        stored(pages, "k", k.center), strided(key), encoding(k.format),
        stored(pages, "v", None), strided(value), encoding(v.format),
    )  # fmt: skip
    if not writing.has_pages(call):
        raise_overrun(pages, lengths, tokens)
    _run(writing.write, _threads(4 * (key.numel() + value.numel())), call)


def _input(stored: torch.dtype, x: Tensor) -> Tensor:
    """Return `x` in a dtype that the kernel reads; in "auto" that is the pages' dtype."""
    if stored != torch.uint8:
        x = x.to(stored)
    elif x.dtype not in KINDS or x.dtype == torch.uint8:
        x = x.float()
    return no_gaps(x)


def gather(
    pages: Pages,
    lengths: Tensor,
    side: str,
    start: int,
    stop: int,
    dtype: torch.dtype,
    ragged: bool,
    some: slice = slice(None),
) -> Tensor:
    """Return dense keys or values: the numbers of `reference.gather`.

    `some`: heads; with fewer than all of them K has no center.
    """
    pages, lengths = _plain(pages), no_gaps(lengths)
    is_k = side == "k"
    chosen, held = (pages.k, pages.k_dtype) if is_k else (pages.v, pages.v_dtype)
    if not _READABLE.issuperset((held, dtype)):
        return torch_backend.gather(pages, lengths, side, start, stop, dtype, ragged)
    first_head, last_head, _ = some.indices(pages.heads)
    heads, batch = last_head - first_head, len(pages.table)
    out = torch.empty((batch, heads, stop - start, chosen.head_dim), dtype=dtype, device="cpu")
    blocks = -(-(stop - start) // gathering.BLOCK)
    call = gathering.GATHER.fill(
        (0, batch * heads * blocks, batch, heads, first_head, start, stop, ragged, not is_k),
        table(pages, lengths),
        stored(pages, side, None if chosen.format == AUTO else chosen.center),
        decoding(chosen.format),
        (out.data_ptr(), KINDS[dtype]),
    )
    _run(gathering.gather, _threads(out.numel()), call)
    return out


def attend(
    query: Tensor, pages: Pages, lengths: Tensor, start: int, stop: int, spec: AttentionSpec
) -> Tensor:
    """Return softmax attention, as `reference.attend` up to rounding."""
    if not _READABLE.issuperset((query.dtype, pages.k_dtype, pages.v_dtype)):
        return torch_backend.attend(query, pages, lengths, start, stop, spec)
    if prompts.is_faster(query, pages, spec):
        return prompts.attend(query, pages, lengths, spec, gather)
    pages, query, lengths = _plain(pages), no_gaps(query), no_gaps(lengths)
    scaling, causal, window, softcap, sinks, mask, bias, bounds, latent = spec
    k, v = pages.k, pages.k if latent else pages.v
    batch, q_heads, tokens, q_dim = query.shape
    heads, v_dim = pages.heads, v.head_dim
    groups = q_heads // heads
    out = torch.empty((batch, tokens, q_heads, v_dim), dtype=query.dtype, device="cpu")

    # Rows of one block share the decoded bytes; more than BLOCK of them outgrow the cache.
    block = min(tokens, max(attention.BLOCK // groups, 1))
    blocks = -(-tokens // block)
    rows = block * groups
    if rows > 1 or latent:
        least = LANES if latent else 4
        rows = -(-rows // least) * least
    threads = _threads((stop - start) * batch * heads * (q_dim + v_dim) * -(-rows // 4) * blocks)
    units = batch * heads * blocks
    splits = 1
    if threads > 1:
        splits = max(1, min((stop - start) // SPLIT, -(-UNITS * threads // units)))
    work = np.empty((units * splits, rows * (2 + v_dim)), np.float32)

    center = k.center if k.format != AUTO and (softcap or sinks is not None) else None
    more: Tensor | None = None
    if mask is not None and mask.is_floating_point():
        more, mask, bounds = no_gaps(readable_floats(mask)), None, None
    elif mask is not None:
        mask = no_gaps(mask).view(torch.uint8)
    bounds = None if mask is None or bounds is None else no_gaps(bounds)
    bias = None if bias is None else no_gaps(readable_floats(bias))
    sinks = None if sinks is None else readable_floats(sinks.contiguous())
    second = stored(pages, "v", None), decoding(pages.v.format)
    values = (stored(pages, "k", None), decoding(k.format)) if latent else second
    call = attention.ATTEND.fill(
        (0, units * splits, batch, q_heads, heads, tokens, start, stop),
        (causal, window, scaling, softcap),
        table(pages, lengths),
        stored(pages, "k", center), decoding(k.format),
        *values, (latent,), *second,
        strided(query),
        (address(sinks), F32 if sinks is None else KINDS[sinks.dtype]),
        broadcast(mask), broadcast(bias), broadcast(more),
        (address(bounds), 0 if bounds is None or len(bounds) == 1 else 4 * bounds.stride(0)),
        (splits, blocks, block, rows, out.data_ptr(), KINDS[out.dtype]),
    )  # fmt: skip
    _run(attention.attend, threads, call, work)
    attention.finish(call, work)
    return out
