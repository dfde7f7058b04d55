"""Checks that the sizes of a call's arguments fit each other, before a backend reads them."""

from typing import Any, NoReturn

import torch
from torch import Tensor

from ..errors import ConfigError
from .pages import AttentionSpec, Pages

_INT = torch.int32


def check_sizes(
    pages: Pages, lengths: Tensor, start: int = 0, stop: int = 0, query: Tensor | None = None,
    spec: AttentionSpec | None = None, new: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Raise ConfigError unless the arguments of an operation fit each other.

    Kernels take each size from one tensor and rely on it for all others. `new` holds keys and
    values to store. All other arguments are as in `ops.attend`.
    """
    batch, heads, k_dim, v_dim, room, device = pages.sizes or _measure(pages)
    if lengths.shape != (batch,) or lengths.dtype is not _INT:
        _refuse("lengths", f"[{batch}], int32", device, lengths)
    # In a trace `room` may be a symbol, on which a guard would fail. The traced call checks it.
    if not 0 <= start <= stop or (type(room) is int and stop > room):
        _refuse("positions", f"a span of the {room} of the block table", device, (start, stop))
    tokens = None
    if new is not None:
        key, value = new
        shape = key.shape
        tokens = shape[2] if len(shape) == 4 else 0
        if not tokens or shape != (batch, heads, tokens, k_dim) or key.device != device:
            _refuse("keys", f"[{batch}, {heads}, T, {k_dim}]", device, key)
        if value.shape != (batch, heads, tokens, v_dim) or value.device != device:
            _refuse("values", f"[{batch}, {heads}, {tokens}, {v_dim}]", device, value)
    if query is None or spec is None:
        return
    dim = k_dim + v_dim if spec.latent else k_dim
    shape = query.shape
    rows, q_heads, count, got = shape if len(shape) == 4 else (0, 0, 0, 0)
    fits = rows == batch and got == dim and count == (tokens or count) and count and q_heads
    if not fits or q_heads % heads or query.device != device:
        expected = f"[{batch}, a multiple of {heads}, {tokens or 'T'}, {dim}]"
        _refuse("query", expected, device, query)
    if spec.mask is None and spec.bias is None and spec.sinks is None:
        return
    for name in ("mask", "bias", "sinks", "bounds"):
        x: Tensor | None = getattr(spec, name)
        if x is None:
            continue
        flags = name == "mask" and x.dtype in (torch.bool, torch.uint8)
        sizes: tuple[tuple[int, ...], ...]
        sizes = (1, batch), (1, 1 if flags else q_heads), (1, count), (stop - start,)
        if name in ("sinks", "bounds"):
            sizes = ((q_heads,),) if name == "sinks" else ((1, batch), (2,))
        fits = x.ndim == len(sizes) and all(
            n in allowed for n, allowed in zip(x.shape, sizes, strict=True)
        )
        known = flags or x.is_floating_point() or (name == "bounds" and x.dtype is _INT)
        if not fits or not known or x.device != device:
            expected = ", ".join(" | ".join(map(str, allowed)) for allowed in sizes)
            _refuse(name, f"[{expected}]", device, x)


def _measure(pages: Pages) -> tuple[int, int, int, int, int, torch.device]:
    """Return the sizes that all calls with these pages share, and cache them in the pages."""
    table, center, heads, k_dim = pages.table, pages.k.center, pages.heads, pages.k.head_dim
    if table.ndim != 2 or not table.numel() or table.dtype is not _INT:
        _refuse("block table", "[B, M], int32", table.device, table)
    batch, columns = table.shape
    fits = center is None or center.shape == (batch, heads, k_dim)
    if center is not None and not (fits and center.dtype is torch.float32):
        _refuse("center", f"[{batch}, {heads}, {k_dim}], float32", table.device, center)
    sizes = batch, heads, k_dim, pages.v.head_dim, columns * pages.page_size, table.device
    if all(type(size) is int for size in sizes[:5]):  # symbols belong to a single trace
        pages.sizes = sizes
    return sizes


def _refuse(name: str, expected: str, device: torch.device, got: Any) -> NoReturn:
    if isinstance(got, Tensor):
        got = f"{list(got.shape)}, {str(got.dtype)[6:]} on {got.device}"
    raise ConfigError(
        f"{name}: expected {expected} on {device}, got {got}. Pass arguments that match the "
        "sequences, tokens and heads of this call."
    )
