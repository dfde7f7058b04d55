"""The "cpu" backend: each operation is one call of a C++ kernel, on torch's threads.

Models in float64 use the "torch" backend.
"""

import ctypes
import functools
import os

import torch
from torch import Tensor

from ...errors import BackendError
from ...formats import MIN_SCALE
from ..pages import AttentionSpec, Pages
from ..reference import raise_overrun
from ..torch import backend as torch_backend
from . import build, prompts, records
from .records import CODES, KINDS, make_rows_contiguous

# Minimum number of stored values per thread. A thread with fewer values costs more than it saves.
MIN_THREAD_VALUES = 1 << 16
# Sums are computed separately for each span of this number of tokens, and then added in a fixed
# order. If heads and queries give fewer units of work per thread than MIN_THREAD_UNITS, spans are
# divided among more units, so that a delayed thread delays the call only briefly.
SPAN_TOKENS = 512
MIN_THREAD_UNITS = 8
# Maximum number of query rows per unit and head. More rows exceed the CPU's cache.
MAX_UNIT_ROWS = 64


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
    sizes = records.WRITE.size, records.GATHER.size, records.ATTEND.size
    if list(description) != [build.compute_stamp(), *sizes]:
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


def _make_contiguous(pages: Pages) -> Pages:
    """Return the same pages, with contiguous scales, center and block table."""
    k, v = pages.k, pages.v
    table = make_rows_contiguous(pages.table)
    tensors = k.static_scale, k.center, v.static_scale
    if table is pages.table and all(tensor is None or tensor.is_contiguous() for tensor in tensors):
        return pages
    k_scale, center, v_scale = (
        None if tensor is None else tensor.contiguous() for tensor in tensors
    )
    k = k._replace(static_scale=k_scale, center=center)
    return pages._replace(k=k, v=v._replace(static_scale=v_scale), table=table)


def _choose_num_threads(num_values: int) -> int:
    if _get_first_pid() != os.getpid():  # torch's threads do not survive a fork
        return 1
    return max(1, min(torch.get_num_threads(), num_values // MIN_THREAD_VALUES))


def write(
    pages: Pages, key: Tensor, value: Tensor, lengths: Tensor, _limit: int | None = None
) -> None:
    """Store new tokens, with the same bytes as `reference.write`."""
    if not KINDS.keys() >= {pages.k_dtype, pages.v_dtype}:
        torch_backend.write(pages, key, value, lengths)
        return
    pages = _make_contiguous(pages)
    lengths = make_rows_contiguous(lengths)
    k, v = pages.k, pages.v
    key = _convert_input(key, pages.k_dtype)
    value = _convert_input(value, pages.v_dtype)
    batch, num_heads, num_tokens, _ = key.shape
    call = records.WRITE.pack(
        batch,
        num_heads,
        num_tokens,
        MIN_SCALE,
        *records.list_table_fields(pages, lengths),
        *records.list_side_fields(pages, "k", k.center),
        *records.list_strided_fields(key),
        *records.list_encoding_fields(k.format),
        *records.list_side_fields(pages, "v", None),
        *records.list_strided_fields(value),
        *records.list_encoding_fields(v.format),
    )
    # The search for K's scales takes most of the time, so each value counts as 8.
    num_threads = _choose_num_threads(8 * (key.numel() + value.numel()))
    if not load_library().write_tokens(call, num_threads):
        raise_overrun(pages, lengths, num_tokens)


def _convert_input(tensor: Tensor, stored_dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return a tensor with contiguous rows, in a dtype that kernels read.

    For "auto", this is the stored dtype.
    """
    if stored_dtype.is_floating_point:
        tensor = tensor.to(stored_dtype)
    elif KINDS.get(tensor.dtype, CODES) == CODES:
        tensor = tensor.float()
    return make_rows_contiguous(tensor)


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

    `head_range` selects KV heads. It is ignored for dtypes without a C++ kernel.
    """
    pages = _make_contiguous(pages)
    lengths = make_rows_contiguous(lengths)
    stored_side, stored_dtype = (
        (pages.k, pages.k_dtype) if side == "k" else (pages.v, pages.v_dtype)
    )
    if not KINDS.keys() >= {stored_dtype, dtype}:
        return torch_backend.gather(pages, lengths, side, start, stop, dtype, ragged)
    first_head, stop_head, _ = head_range.indices(pages.num_heads)
    num_heads = stop_head - first_head
    batch = len(pages.table)
    shape = batch, num_heads, stop - start, stored_side.head_dim
    out = torch.empty(shape, dtype=dtype, device="cpu")
    call = records.GATHER.pack(
        batch,
        num_heads,
        first_head,
        start,
        stop,
        ragged,
        side == "v",
        *records.list_table_fields(pages, lengths),
        *records.list_side_fields(pages, side, stored_side.center),
        *records.list_decoding_fields(stored_side.format),
        out.data_ptr(),
        KINDS[dtype],
    )
    load_library().gather(call, _choose_num_threads(out.numel()))
    return out


def attend(
    query: Tensor,
    pages: Pages,
    lengths: Tensor,
    start: int,
    stop: int,
    spec: AttentionSpec,
    _schedule: None = None,
) -> Tensor:
    """Compute softmax attention. The result equals `reference.attend` up to rounding."""
    if not KINDS.keys() >= {query.dtype, pages.k_dtype, pages.v_dtype}:
        return torch_backend.attend(query, pages, lengths, start, stop, spec)
    if prompts.is_faster(query, pages, lengths, stop, spec):
        return prompts.attend(query, pages, lengths, start, spec, gather)
    pages = _make_contiguous(pages)
    query = make_rows_contiguous(query)
    lengths = make_rows_contiguous(lengths)
    scaling, causal, window, softcap, sinks, mask, bias, bounds, latent, _ = spec
    k = pages.k
    v_dim = k.head_dim if latent else pages.v.head_dim
    num_heads = pages.num_heads
    batch, num_query_heads, num_tokens, q_dim = query.shape
    group_size = num_query_heads // num_heads
    out = torch.empty((batch, num_tokens, num_query_heads, v_dim), dtype=query.dtype, device="cpu")

    # The rows of a block share decoded values.
    block_tokens = min(num_tokens, max(MAX_UNIT_ROWS // group_size, 1))
    num_blocks = -(-num_tokens // block_tokens)
    num_rows = block_tokens * group_size
    num_read_values = (stop - start) * batch * num_heads * (q_dim + v_dim)
    num_threads = _choose_num_threads(num_read_values * -(-num_rows // 4) * num_blocks)
    num_units = batch * num_heads * num_blocks
    is_split = num_threads > 1 and num_units < MIN_THREAD_UNITS * num_threads
    num_splits = -(-stop // SPAN_TOKENS) - start // SPAN_TOKENS if is_split else 1
    num_split_units = min(-(-MIN_THREAD_UNITS * num_threads // num_units), num_splits)
    sums = query.new_empty(num_units * num_splits * num_rows * (2 + v_dim), dtype=torch.float32)

    center = k.center if softcap or sinks is not None else None
    mask = None if mask is None else make_rows_contiguous(mask).view(torch.uint8)
    bounds = None if mask is None or bounds is None else make_rows_contiguous(bounds)
    bias = None if bias is None else _convert_input(bias)
    sinks = None if sinks is None else sinks.float().contiguous()
    v_fields = (
        *records.list_side_fields(pages, "v", None),
        *records.list_decoding_fields(pages.v.format),
    )
    value_fields = (
        v_fields
        if not latent
        else (*records.list_side_fields(pages, "k", None), *records.list_decoding_fields(k.format))
    )
    call = records.ATTEND.pack(
        batch,
        num_query_heads,
        num_heads,
        num_tokens,
        start,
        stop,
        causal,
        window,
        scaling,
        softcap,
        *records.list_table_fields(pages, lengths),
        *records.list_side_fields(pages, "k", center),
        *records.list_decoding_fields(k.format),
        *value_fields,
        latent,
        *v_fields,
        *records.list_strided_fields(query),
        records.get_address(sinks),
        *records.list_broadcast_fields(mask),
        *records.list_broadcast_fields(bias),
        records.get_address(bounds),
        0 if bounds is None or len(bounds) == 1 else 4 * bounds.stride(0),
        SPAN_TOKENS,
        num_splits,
        num_split_units,
        num_blocks,
        block_tokens,
        num_rows,
        out.data_ptr(),
        KINDS[out.dtype],
        sums.data_ptr(),
    )
    load_library().attend(call, num_threads)
    return out
