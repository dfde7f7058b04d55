"""The "cpu" backend: each operation is one call of a C++ kernel, on torch's threads.

Models in float64 use the "torch" backend.
"""

import ctypes
import functools
import os

import torch
from torch import Tensor

from ...errors import BackendError
from ...formats import AUTO, MIN_SCALE
from ..pages import AttentionSpec, Pages
from ..reference import raise_overrun
from ..torch import backend as torch_backend
from . import build, prompts
from .records import (
    ATTEND,
    GATHER,
    KINDS,
    WRITE,
    address,
    broadcast_fields,
    decoding_fields,
    encoding_fields,
    pack_rows,
    side_fields,
    strided_fields,
    table_fields,
)

# Minimum number of stored values per thread. With fewer values a thread does not pay.
GRAIN = 1 << 16
# Sums are computed separately for each span of this number of tokens, and then added in a fixed
# order. If heads and queries give fewer than MIN_UNITS units of work per thread, spans are divided
# among more units, so that a delayed thread delays the call only briefly.
SPAN = 512
MIN_UNITS = 8
# Maximum number of query rows per unit and head. More rows exceed the CPU's cache.
MAX_ROWS = 64


@functools.cache
def load_library() -> ctypes.CDLL:
    """Load the kernels for this CPU.

    Raises:
        BackendError: The library is missing, or was compiled from a different source.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX512" and torch.cpu._is_vnni_supported():
        capability = "AVX512_VNNI"
    path = build.find_library(capability)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BackendError(
            f"backend 'cpu': expected {path.name}, got {error}. To use it, {build.REPAIR}"
        ) from error
    description = (ctypes.c_int64 * 4)()
    library.describe(description)
    if list(description) != [build.compute_stamp(), WRITE.size, GATHER.size, ATTEND.size]:
        raise BackendError(
            f"backend 'cpu': {path.name} was built from a different source. To use it, "
            f"{build.REPAIR}"
        )
    for name in ("write_tokens", "gather", "attend"):
        getattr(library, name).argtypes = (ctypes.c_char_p, ctypes.c_int64)
    library.gather.restype = library.attend.restype = None
    # The function is a symbol of a library that torch._C requires.
    parallel_for = ctypes.CDLL(torch._C.__file__).torch_parallel_for
    library.set_parallel_for(ctypes.cast(parallel_for, ctypes.c_void_p))
    return library


@functools.cache
def _get_first_pid() -> int:
    return os.getpid()


def _pack_tensors(pages: Pages) -> Pages:
    """Return the same pages, with contiguous scales, center and block table."""
    k, v, table = pages.k, pages.v, pack_rows(pages.table)
    tensors = k.static_scale, k.center, v.static_scale
    if table is pages.table and all(x is None or x.is_contiguous() for x in tensors):
        return pages
    k_scale, center, v_scale = (None if x is None else x.contiguous() for x in tensors)
    k = k._replace(static_scale=k_scale, center=center)
    return pages._replace(k=k, v=v._replace(static_scale=v_scale), table=table)


def _choose_threads(num_values: int) -> int:
    if _get_first_pid() != os.getpid():  # torch's threads do not survive a fork
        return 1
    return max(1, min(torch.get_num_threads(), num_values // GRAIN))


def write(pages: Pages, key: Tensor, value: Tensor, lengths: Tensor) -> None:
    """Store new tokens, with the same bytes as `reference.write`."""
    if not KINDS.keys() >= {pages.k_dtype, pages.v_dtype}:
        torch_backend.write(pages, key, value, lengths)
        return
    pages, lengths = _pack_tensors(pages), pack_rows(lengths)
    k, v = pages.k, pages.v
    key, value = _convert_input(key, pages.k_dtype), _convert_input(value, pages.v_dtype)
    batch, heads, tokens, _ = key.shape
    call = WRITE.pack(
        batch, heads, tokens, MIN_SCALE, *table_fields(pages, lengths),
        *side_fields(pages, "k", k.center), *strided_fields(key), *encoding_fields(k.format),
        *side_fields(pages, "v", None), *strided_fields(value), *encoding_fields(v.format),
    )  # fmt: skip
    # The search for K's scales takes most of the time, so each value counts as 8.
    if not load_library().write_tokens(call, _choose_threads(8 * (key.numel() + value.numel()))):
        raise_overrun(pages, lengths, tokens)


def _convert_input(x: Tensor, stored_dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return `x` in a dtype that kernels read, with contiguous rows: for "auto" as it is stored."""
    if stored_dtype != torch.uint8:
        x = x.to(stored_dtype)
    elif x.dtype not in KINDS or x.dtype == torch.uint8:
        x = x.float()
    return pack_rows(x)


def gather(
    pages: Pages,
    lengths: Tensor,
    side: str,
    start: int,
    stop: int,
    dtype: torch.dtype,
    ragged: bool,
    head_range: slice = slice(None),
) -> Tensor:
    """Return dense keys or values, with the same bits as `reference.gather`.

    `head_range` selects KV heads. Unless it selects all of them, K must not have a center.
    """
    pages, lengths = _pack_tensors(pages), pack_rows(lengths)
    is_k = side == "k"
    stored_side, stored_dtype = (pages.k, pages.k_dtype) if is_k else (pages.v, pages.v_dtype)
    if not KINDS.keys() >= {stored_dtype, dtype}:
        return torch_backend.gather(pages, lengths, side, start, stop, dtype, ragged)
    first_head, last_head, _ = head_range.indices(pages.heads)
    heads, batch = last_head - first_head, len(pages.table)
    out = torch.empty((batch, heads, stop - start, stored_side.head_dim), dtype=dtype, device="cpu")
    call = GATHER.pack(
        batch, heads, first_head, start, stop, ragged, not is_k, *table_fields(pages, lengths),
        *side_fields(pages, side, None if stored_side.format == AUTO else stored_side.center),
        *decoding_fields(stored_side.format), out.data_ptr(), KINDS[dtype],
    )  # fmt: skip
    load_library().gather(call, _choose_threads(out.numel()))
    return out


def attend(
    query: Tensor, pages: Pages, lengths: Tensor, start: int, stop: int, spec: AttentionSpec
) -> Tensor:
    """Compute softmax attention. The result equals `reference.attend` up to rounding."""
    if not KINDS.keys() >= {query.dtype, pages.k_dtype, pages.v_dtype}:
        return torch_backend.attend(query, pages, lengths, start, stop, spec)
    if prompts.is_faster(query, pages, start, spec):
        return prompts.attend(query, pages, lengths, spec, gather)
    pages, query, lengths = _pack_tensors(pages), pack_rows(query), pack_rows(lengths)
    scaling, causal, window, softcap, sinks, mask, bias, bounds, latent, _ = spec
    k, v = pages.k, pages.k if latent else pages.v
    batch, q_heads, tokens, q_dim = query.shape
    heads, v_dim = pages.heads, v.head_dim
    groups = q_heads // heads
    out = torch.empty((batch, tokens, q_heads, v_dim), dtype=query.dtype, device="cpu")

    # The rows of a block share decoded values.
    block_tokens = min(tokens, max(MAX_ROWS // groups, 1))
    blocks = -(-tokens // block_tokens)
    rows = block_tokens * groups
    read_values = (stop - start) * batch * heads * (q_dim + v_dim)
    threads = _choose_threads(read_values * -(-rows // 4) * blocks)
    units = batch * heads * blocks
    splits = -(-stop // SPAN) - start // SPAN if threads > 1 and units < MIN_UNITS * threads else 1
    split_units = min(-(-MIN_UNITS * threads // units), splits)  # units that share the splits
    sums = torch.empty(units * splits * rows * (2 + v_dim), dtype=torch.float32, device="cpu")

    center = k.center if k.format != AUTO and (softcap or sinks is not None) else None
    mask = None if mask is None else pack_rows(mask).view(torch.uint8)
    bounds = None if mask is None or bounds is None else pack_rows(bounds)
    bias = None if bias is None else _convert_input(bias)
    sinks = None if sinks is None else sinks.float().contiguous()
    v_fields = *side_fields(pages, "v", None), *decoding_fields(pages.v.format)
    k_fields = *side_fields(pages, "k", None), *decoding_fields(k.format)
    value_fields = k_fields if latent else v_fields
    call = ATTEND.pack(
        batch, q_heads, heads, tokens, start, stop, causal, window, scaling, softcap,
        *table_fields(pages, lengths), *side_fields(pages, "k", center), *decoding_fields(k.format),
        *value_fields, latent, *v_fields, *strided_fields(query), address(sinks),
        *broadcast_fields(mask), *broadcast_fields(bias),
        address(bounds), 0 if bounds is None or len(bounds) == 1 else 4 * bounds.stride(0),
        SPAN, splits, split_units, blocks, block_tokens, rows, out.data_ptr(), KINDS[out.dtype],
        sums.data_ptr(),
    )  # fmt: skip
    load_library().attend(call, threads)
    return out
