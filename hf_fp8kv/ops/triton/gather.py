"""Reading stored tokens back as dense K or V, in one launch."""

import torch
import triton
import triton.language as tl

from ..pages import Pages
from .encoder import decode, encoder_for
from .target import launch, next_power_of_2
from .write import tile_size, warps

__all__ = ["gather"]


def gather(
    pages: Pages,
    lengths: torch.Tensor,
    side: str,
    start: int,
    stop: int,
    dtype: torch.dtype,
    ragged: bool,
) -> torch.Tensor:
    """Returns the dense keys or values of positions `start` to `stop - 1`.

    Bit-exact with `reference.gather`.

    Args:
        pages: where from; contiguous, except for the table.
        lengths: `[B]`, int32, tokens stored.
        side: "k" or "v".
        start: first position.
        stop: one past the last position.
        dtype: of the result.
        ragged: whether positions from `lengths[b]` on occur; they are zero in the result.

    Returns:
        `[B, Hkv, stop - start, D]`, contiguous.
    """
    is_key = side == "k"
    stored = pages.k if is_key else pages.v
    heads, dim = pages.heads, stored.head_dim
    batch = pages.table.shape[0]
    out = stored.codes.new_empty((batch, heads, stop - start, dim), dtype=dtype)
    tile, width = tile_size(pages.page_size), next_power_of_2(dim)
    # Tiles begin at multiples of their size, wherever `start` is.
    parts = (stop - 1) // tile - start // tile + 1 if stop > start else 0
    launch(
        _gather, (parts, heads, batch), stored.codes, out, lengths, pages.table,
        stored.token_scales, stored.static_scale, stored.center, start, stop,
        pages.table.stride(0),
        HEADS=heads, PAGE=pages.page_size, DIM=dim, WIDTH=width,
        ENCODER=encoder_for(stored.format), TRANSPOSED=not is_key, RAGGED=ragged, TILE=tile,
        num_warps=warps(width), enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["start", "stop", "table_b"])
def _gather(
    pool, out, lengths, table, scales, static, center, start, stop, table_b,
    HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    ENCODER: tl.constexpr, TRANSPOSED: tl.constexpr, RAGGED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program per tile of positions, KV head and sequence."""
    h = tl.program_id(1)
    b = tl.program_id(2)
    tile = start // TILE + tl.program_id(0)
    first = tile * TILE
    i = tl.arange(0, TILE)
    d = tl.arange(0, WIDTH)
    position = first + i
    asked = (position >= start) & (position < stop)
    exists = asked
    if RAGGED:
        exists &= position < tl.load(lengths + b)
    real = (d < DIM)[None, :]

    # A released page is behind the window: what is read instead is hidden by who asked.
    table += b.to(tl.int64) * table_b
    if PAGE % TILE == 0:
        # One page: the addresses of a tile are one base and constants, and all of it is there.
        place = tl.maximum(tl.load(table + first // PAGE), 0).to(tl.int64) * HEADS + h
        slot = (tile % (PAGE // TILE)) * TILE
        if TRANSPOSED:
            at = pool + (place * (DIM * PAGE) + slot) + (d * PAGE)[None, :] + i[:, None]
        else:
            at = pool + (place * PAGE + slot) * DIM + (i * DIM)[:, None] + d[None, :]
        codes = tl.load(at, mask=real, other=0)
        scale_at = place * PAGE + slot + i
    else:
        page = tl.load(table + position // PAGE, mask=asked, other=0)
        place = tl.maximum(page, 0).to(tl.int64) * HEADS + h
        slot = position % PAGE
        if TRANSPOSED:
            at = pool + (place * (DIM * PAGE) + slot)[:, None] + (d * PAGE)[None, :]
        else:
            at = pool + ((place * PAGE + slot) * DIM)[:, None] + d[None, :]
        codes = tl.load(at, mask=exists[:, None] & real, other=0)
        scale_at = place * PAGE + slot

    if ENCODER is None:
        x = codes
    else:
        x = decode(codes, ENCODER)
        if static is not None:
            x *= tl.load(static + h * DIM + d, mask=d < DIM, other=0.0)[None, :]
        else:
            x *= tl.load(scales + scale_at, mask=exists, other=0.0).to(tl.float32)[:, None]
        if center is not None:
            place = (b.to(tl.int64) * HEADS + h) * DIM
            x += tl.load(center + place + d, mask=d < DIM, other=0.0)[None, :]
    if RAGGED:
        x = tl.where(exists[:, None], x, tl.zeros_like(x))
    row = ((b.to(tl.int64) * HEADS + h) * (stop - start) + (first - start)) * DIM
    to = out + row + (i * DIM)[:, None] + d[None, :]
    tl.store(to, x.to(out.dtype.element_ty), mask=asked[:, None] & real)
