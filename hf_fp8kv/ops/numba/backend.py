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
import numpy.typing as npt
import torch

from ...formats import AUTO, FORMATS, MIN_SCALE
from ..pages import AttentionSpec, Pages, StoredSide
from ..reference import raise_overrun
from ..torch import backend as chunked
from . import attend as cpu_attend
from . import store as cpu_store
from .vectors import BF16, F16, F32, FP8, HAS_HALF

# Stored numbers that are worth a thread of their own: about 50 microseconds of work.
GRAIN = 1 << 18
# A unit of attention is at least this many tokens, and each thread gets at least UNITS of them: one
# that is held up then leaves the others little to wait for.
SPLIT = 256
UNITS = 4

_KINDS = {torch.uint8: FP8, torch.bfloat16: BF16, torch.float16: F16, torch.float32: F32}
_READABLE = frozenset(_KINDS) if HAS_HALF else frozenset[torch.dtype]()
_Call = npt.NDArray[np.void]


@functools.cache
def _decoding(name: str) -> tuple[tuple[int, int, int, int], float]:
    """Returns (shift, mask, nan_mask, nan_code) of `load_codes`, and the factor that then lacks."""
    if name == AUTO:
        return (0, 0, 0, 0), 1.0
    fmt = FORMATS[name]
    # float16 has 10 bits of mantissa and the bias 15.
    shift = 10 - fmt.mantissa_bits
    if fmt.unsigned_zero:
        nan = (0xFF, fmt.nan_code)
    elif fmt.inf_code is None:
        nan = (0x7F, fmt.nan_code)
    else:
        nan = (0, 1)  # never: these bits are a NaN in float16 too
    return (shift, 0x7F << shift | 0x8000, *nan), 2.0 ** (15 - fmt.bias)


@functools.cache
def _encoding(name: str) -> tuple[tuple[int, ...], float]:
    """Returns the constants of `encode`, and the largest number."""
    if name == AUTO:
        return (0,) * 8, 1.0
    fmt = FORMATS[name]
    step = int(np.float32(fmt.min_subnormal * 2.0**23).view(np.int32))
    sign = int(not fmt.unsigned_zero)
    rebias = (127 - fmt.bias) << fmt.mantissa_bits
    least = (128 - fmt.bias) << 23
    code = (23 - fmt.mantissa_bits, rebias, least, step, fmt.max_code, fmt.nan_code, sign, sign)
    return code, fmt.max


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy whose last axis has no gaps."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] < 2 else tensor.contiguous()


def _plain(pages: Pages) -> Pages:
    """Return the same pages, with scales and center in memory as their shapes say."""
    assert pages.table.dtype == torch.int32
    if pages.table.stride(1) != 1:
        pages = pages._replace(table=pages.table.contiguous())
    k, v = _plain_side(pages.k), _plain_side(pages.v)
    return pages if k is pages.k and v is pages.v else pages._replace(k=k, v=v)


def _plain_side(side: StoredSide) -> StoredSide:
    assert side.codes.is_contiguous()
    scale, center = side.static_scale, side.center
    if all(x is None or x.is_contiguous() for x in (scale, center)):
        return side
    return side._replace(
        static_scale=None if scale is None else scale.contiguous(),
        center=None if center is None else center.contiguous(),
    )


@functools.cache
def _pool(_process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="hf_fp8kv")


def _run(kernel: Callable[..., None], threads: int, *arguments: Any) -> None:
    """Runs `kernel` here and on `threads - 1` others, until its units are done."""
    if threads < 2:
        kernel(*arguments)
        return
    submit = _pool(os.getpid()).submit
    others = [submit(kernel, *arguments) for _ in range(threads - 1)]
    kernel(*arguments)
    running = [other for other in others if not other.cancel()]
    try:
        for other in running:
            other.result()
    finally:
        # Also after an interrupt: the memory must not go while a thread still works on it.
        wait(running)


def _threads(numbers: int) -> int:
    return max(1, min(torch.get_num_threads(), numbers // GRAIN))


def write(pages: Pages, key: torch.Tensor, value: torch.Tensor, lengths: torch.Tensor) -> None:
    """Stores new tokens; the bytes of `reference.write`, and its arguments."""
    if not _READABLE.issuperset((pages.k.codes.dtype, pages.v.codes.dtype)):
        chunked.write(pages, key, value, lengths)
        return
    pages, k, v, lengths = (
        _plain(pages),
        _input(pages.k.codes, key),
        _input(pages.v.codes, value),
        _rows(lengths),
    )
    batch, heads, tokens, k_dim = k.shape
    (k_code, k_max), (v_code, v_max) = _encoding(pages.k.format), _encoding(pages.v.format)
    blocks = -(-tokens // cpu_store.BLOCK)
    table = pages.table
    call: _Call = np.array(
        [(
            0, batch * heads * blocks, batch, heads, tokens, pages.page_size,
            table.data_ptr(), 4 * table.stride(0), table.shape[1], lengths.data_ptr(),
            pages.k.codes.data_ptr(), k.data_ptr(), *_layout(k), _KINDS[pages.k.codes.dtype], k_dim,
            _address(pages.k.token_scales), _address(pages.k.static_scale),
            _address(pages.k.center), *k_code,
            pages.v.codes.data_ptr(), v.data_ptr(), *_layout(v), _KINDS[pages.v.codes.dtype],
            v.shape[3],
            _address(pages.v.token_scales), _address(pages.v.static_scale), 0, *v_code,
            k_max, v_max, MIN_SCALE,
        )],
        cpu_store.WRITE,
    )  # fmt: skip
    if not cpu_store.has_pages(call):
        raise_overrun(pages, lengths, tokens)
    _run(cpu_store.write, _threads(4 * (k.numel() + v.numel())), call)


def _input(pool: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What is stored into `pool`: of a dtype that the kernel reads, and of the pool's in "auto"."""
    if pool.dtype != torch.uint8:
        x = x.to(pool.dtype)
    elif x.dtype not in _KINDS or x.dtype == torch.uint8:
        x = x.float()
    return _rows(x)


def _layout(x: torch.Tensor) -> tuple[int, int, int, int]:
    """Kind, and the strides of the first three axes in bytes."""
    size = x.element_size()
    b, h, t, _ = x.stride()
    return _KINDS[x.dtype], b * size, h * size, t * size


def gather(
    pages: Pages,
    lengths: torch.Tensor,
    side: str,
    start: int,
    stop: int,
    dtype: torch.dtype,
    ragged: bool,
) -> torch.Tensor:
    """Returns dense keys or values; the numbers of `reference.gather`, and its arguments."""
    is_k, pages, lengths = side == "k", _plain(pages), _rows(lengths)
    stored = pages.k if is_k else pages.v
    if not _READABLE.issuperset((stored.codes.dtype, dtype)):
        return chunked.gather(pages, lengths, side, start, stop, dtype, ragged)
    center = None if stored.format == AUTO else stored.center
    heads, dim = pages.heads, stored.head_dim
    batch = len(pages.table)
    out = torch.empty((batch, heads, stop - start, dim), dtype=dtype)
    code, factor = _decoding(stored.format)
    blocks = -(-(stop - start) // cpu_store.BLOCK)
    table = pages.table
    call: _Call = np.array(
        [(
            0, batch * heads * blocks, batch, heads, pages.page_size, start, stop,
            table.data_ptr(), 4 * table.stride(0), lengths.data_ptr(), ragged, not is_k,
            stored.codes.data_ptr(), _KINDS[stored.codes.dtype], dim, *code,
            _address(stored.token_scales), _address(stored.static_scale), _address(center),
            out.data_ptr(), _KINDS[dtype], factor,
        )],
        cpu_store.GATHER,
    )  # fmt: skip
    _run(cpu_store.gather, _threads(out.numel()), call)
    return out


def attend(
    query: torch.Tensor,
    pages: Pages,
    lengths: torch.Tensor,
    start: int,
    stop: int,
    spec: AttentionSpec,
) -> torch.Tensor:
    """Returns what `reference.attend` returns, up to rounding; the same arguments."""
    if not _READABLE.issuperset((query.dtype, pages.k.codes.dtype, pages.v.codes.dtype)):
        return chunked.attend(query, pages, lengths, start, stop, spec)
    pages, query, lengths = _plain(pages), _rows(query), _rows(lengths)
    table = pages.table
    batch, q_heads, tokens, k_dim = query.shape
    heads, v_dim = pages.heads, pages.v.head_dim
    groups = q_heads // heads
    out = torch.empty((batch, tokens, q_heads, v_dim), dtype=query.dtype)

    # Rows of one block share the decoded bytes; more than BLOCK of them outgrow the cache.
    block = min(tokens, max(cpu_attend.BLOCK // groups, 1))
    blocks = -(-tokens // block)
    rows = block * groups
    rows = rows if rows == 1 else -(-rows // 4) * 4
    threads = _threads((stop - start) * batch * heads * (k_dim + v_dim) * -(-rows // 4) * blocks)
    units = batch * heads * blocks
    splits = (
        max(1, min((stop - start) // SPLIT, -(-UNITS * threads // units))) if threads > 1 else 1
    )
    work = np.empty((units * splits, rows * (2 + v_dim)), np.float32)

    sinks, mask = spec.sinks, spec.mask
    offset = pages.k.center if spec.softcap or sinks is not None else None
    float_mask = mask if mask is not None and mask.is_floating_point() else None
    if float_mask is not None:
        mask = None
    seen, shown = _extra(mask)
    bias, first = _extra(spec.bias)
    more, second = _extra(float_mask)
    sinks = None if sinks is None else _floats(sinks.contiguous())
    (k_code, k_factor), (v_code, v_factor) = _decoding(pages.k.format), _decoding(pages.v.format)
    call: _Call = np.array(
        [(
            0, units * splits, batch, q_heads, heads, tokens, k_dim, v_dim, pages.page_size,
            start, stop, spec.causal, spec.window,
            table.data_ptr(), 4 * table.stride(0), table.shape[1], lengths.data_ptr(),
            _address(offset if pages.k.format != AUTO else None),
            pages.k.codes.data_ptr(), _KINDS[pages.k.codes.dtype], *k_code,
            _address(pages.k.token_scales), _address(pages.k.static_scale),
            pages.v.codes.data_ptr(), _KINDS[pages.v.codes.dtype], *v_code,
            _address(pages.v.token_scales), _address(pages.v.static_scale),
            query.data_ptr(), *_layout(query),
            _address(sinks), F32 if sinks is None else _KINDS[sinks.dtype],
            _address(seen), shown[1], shown[3],
            _address(bias), *first, _address(more), *second,
            splits, blocks, block, work.ctypes.data, rows, out.data_ptr(), _KINDS[out.dtype],
            spec.scaling, spec.softcap, k_factor, v_factor,
        )],
        cpu_attend.ATTEND,
    )  # fmt: skip
    _run(cpu_attend.attend, threads, call, work)
    cpu_attend.finish(call, work)
    return out


def _floats(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype in _KINDS else x.float()


def _extra(x: torch.Tensor | None) -> tuple[torch.Tensor | None, tuple[int, int, int, int]]:
    """A mask or bias `[1 | B, 1 | Hq, 1 | T, N]`, and its layout: size 1 becomes stride 0."""
    if x is None:
        return None, (F32, 0, 0, 0)
    x = _rows(x if x.dtype == torch.bool else _floats(x))
    if x.dtype == torch.bool:
        x = x.view(torch.uint8)
    kind, *strides = _layout(x)
    b, h, t = (stride if size > 1 else 0 for stride, size in zip(strides, x.shape, strict=False))
    return x, (kind, b, h, t)
