"""Check that the sizes of a call's arguments match, before a backend reads the arguments."""

from typing import Any, NoReturn

import torch
from torch import Tensor

from ..errors import ConfigError
from .pages import AttentionSpec, Pages

_INT = torch.int32


def check_sizes(
    pages: Pages,
    lengths: Tensor,
    start: int = 0,
    stop: int = 0,
    query: Tensor | None = None,
    spec: AttentionSpec | None = None,
    new_tokens: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Raise ConfigError unless the sizes, dtypes and devices of an operation's arguments match.

    Kernels take each size from one tensor and rely on it for all other tensors. `new_tokens` holds
    keys and values to store. All other arguments are as in `ops.attend`.
    """
    batch, num_heads, k_dim, v_dim, capacity, device = pages.sizes or _read_sizes(pages)
    if lengths.shape != (batch,) or lengths.dtype is not _INT:
        _raise_mismatch("lengths", f"[{batch}], int32", device, lengths)
    # In a trace, `capacity` may be a SymInt, whose guard would fail. The traced call checks it.
    if not 0 <= start <= stop or (type(capacity) is int and stop > capacity):
        expected = f"0 <= start <= stop <= {capacity} (the capacity of the block table)"
        _raise_mismatch("positions", expected, device, (start, stop))
    if new_tokens is not None:
        key, value = new_tokens
        num_tokens = key.shape[2] if key.ndim == 4 else 0
        v_shape = (*key.shape[:3], v_dim)
        has_shape = num_tokens > 0 and key.shape == (batch, num_heads, num_tokens, k_dim)
        if not has_shape or key.device != device:
            _raise_mismatch("keys", f"[{batch}, {num_heads}, T, {k_dim}]", device, key)
        if value.shape != v_shape or value.device != device:
            _raise_mismatch("values", f"{list(v_shape)}", device, value)
    if query is None or spec is None:
        return
    dim = k_dim + v_dim if spec.latent else k_dim
    q_batch, num_query_heads, num_q_tokens, q_dim = query.shape if query.ndim == 4 else (0, 0, 0, 0)
    has_shape = q_batch == batch and q_dim == dim and num_q_tokens > 0 and num_query_heads > 0
    if not has_shape or num_query_heads % num_heads or query.device != device:
        expected = f"[{batch}, a multiple of {num_heads}, T, {dim}]"
        _raise_mismatch("query", expected, device, query)
    if spec.mask is None and spec.bias is None and spec.sinks is None:
        return
    for name in ("mask", "bias", "sinks", "bounds"):
        tensor: Tensor | None = getattr(spec, name)
        if tensor is None:
            continue
        is_bool_mask = name == "mask" and tensor.dtype in (torch.bool, torch.uint8)
        sizes: tuple[tuple[int, ...], ...] = (
            (1, batch),
            (1, 1 if is_bool_mask else num_query_heads),
            (1, num_q_tokens),
            (stop - start,),
        )
        if name in ("sinks", "bounds"):
            sizes = ((num_query_heads,),) if name == "sinks" else ((1, batch), (2,))
        has_shape = tensor.ndim == len(sizes) and all(
            size in allowed_sizes for size, allowed_sizes in zip(tensor.shape, sizes, strict=True)
        )
        has_dtype = (
            is_bool_mask
            or tensor.is_floating_point()
            or (name == "bounds" and tensor.dtype is _INT)
        )
        if not has_shape or not has_dtype or tensor.device != device:
            expected = ", ".join(" | ".join(map(str, allowed_sizes)) for allowed_sizes in sizes)
            _raise_mismatch(name, f"[{expected}]", device, tensor)


def _read_sizes(pages: Pages) -> tuple[int, int, int, int, int, torch.device]:
    """Return the sizes that all calls with `pages` share, and cache them in the pages."""
    table = pages.table
    center = pages.k.center
    num_heads = pages.num_heads
    k_dim = pages.k.head_dim
    if table.ndim != 2 or not table.numel() or table.dtype is not _INT:
        _raise_mismatch("block table", "[B, M], int32", table.device, table)
    batch, num_columns = table.shape
    has_shape = center is None or center.shape == (num_heads, k_dim)
    if center is not None and not (has_shape and center.dtype is torch.float32):
        _raise_mismatch("center", f"[{num_heads}, {k_dim}], float32", table.device, center)
    sizes = batch, num_heads, k_dim, pages.v.head_dim, num_columns * pages.page_size, table.device
    if all(type(size) is int for size in sizes[:5]):  # a SymInt belongs to a single trace
        pages.sizes = sizes
    return sizes


def _raise_mismatch(name: str, expected: str, device: torch.device, got: Any) -> NoReturn:
    if isinstance(got, Tensor):
        got = f"{list(got.shape)}, {str(got.dtype)[6:]} on {got.device}"
    raise ConfigError(
        f"{name}: expected {expected} on {device}, got {got}. Pass arguments that match the "
        "sequences, tokens and heads of this call."
    )
