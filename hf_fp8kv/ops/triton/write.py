"""Storing new tokens: center, scale, encode and scatter K and V in one launch."""

import torch
import triton
import triton.language as tl

from ..pages import Pages
from .encoder import (
    STEPS,
    best_scale,
    best_scale_at_once,
    encode,
    encoder_for,
    smallest_scale,
    upper_half,
)
from .target import launch, next_power_of_2

__all__ = ["write"]

# Up to so many new tokens per sequence each has programs of its own, as decoding has.
SINGLE_TOKENS = 8
# Positions that a program stores at once where there are more. A page holds a whole number of such
# tiles, so that V's transposed rows are stored in runs.
TILE = 32
MIN_TILE = 16
# A warp for so many channels, within these bounds.
CHANNELS_PER_WARP = 32
WARPS = (4, 16)
# The limit of a cache without one.
UNLIMITED = 2**31 - 1


def write(
    pages: Pages,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    limit: int | None = None,
) -> None:
    """Token `t` of sequence `b` is then stored at position `lengths[b] + t`.

    Bit-exact with `reference.write`. A token without a page, or at a position from `limit` on, is
    not stored.

    Args:
        pages: where to; contiguous, except for the table.
        key: `[B, Hkv, T, Dk]`, any floating dtype, any strides.
        value: `[B, Hkv, T, Dv]`.
        lengths: `[B]`, int32, tokens before this call.
        limit: the most tokens that a sequence may hold; None: as many as it has pages for.
    """
    batch, heads, tokens, k_dim = key.shape
    v_dim = value.shape[3]
    k_width, v_width = next_power_of_2(k_dim), next_power_of_2(v_dim)
    tile = 1 if tokens <= SINGLE_TOKENS else tile_size(pages.page_size)
    # Tiles begin at multiples of their size, wherever a sequence ends.
    parts = (tokens + tile - 2) // tile + 1 if tokens else 0
    launch(
        _write, (parts, 2 * heads, batch), key, value, lengths, pages.table,
        pages.k.codes, pages.v.codes, pages.k.token_scales, pages.v.token_scales,
        pages.k.static_scale, pages.v.static_scale, pages.k.center,
        tokens, UNLIMITED if limit is None else limit, pages.table.shape[1],
        pages.table.stride(0), *key.stride(), *value.stride(),
        HEADS=heads, PAGE=pages.page_size, K_DIM=k_dim, V_DIM=v_dim,
        K_WIDTH=k_width, V_WIDTH=v_width,
        K_ENCODER=encoder_for(pages.k.format), V_ENCODER=encoder_for(pages.v.format),
        TILE=tile, num_warps=warps(max(k_width, v_width)), enable_fp_fusion=False,
    )  # fmt: skip


def tile_size(page_size: int) -> int:
    """Returns how many positions a tile has: a divisor of the page if a large one is there."""
    divisor = min(page_size & -page_size, TILE)
    return divisor if divisor >= MIN_TILE else TILE


def warps(width: int) -> int:
    """Returns the warps of a program, for a head size padded to `width`."""
    return min(max(width // CHANNELS_PER_WARP, WARPS[0]), WARPS[1])


@triton.jit(do_not_specialize=["tokens", "limit", "columns", "table_b"])
def _write(
    key, value, lengths, table, k, v, k_scales, v_scales, k_scale, v_scale, k_center,
    tokens, limit, columns, table_b,
    key_b, key_h, key_t, key_d, value_b, value_h, value_t, value_d,
    HEADS: tl.constexpr, PAGE: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    K_ENCODER: tl.constexpr, V_ENCODER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program per tile of positions, KV head, sequence, and side: K's come first."""
    part = tl.program_id(0)
    h = tl.program_id(1) % HEADS
    b = tl.program_id(2)
    length = tl.load(lengths + b)
    tile = length // TILE + part
    table += b.to(tl.int64) * table_b
    if tl.program_id(1) < HEADS:
        x = key + b.to(tl.int64) * key_b + h.to(tl.int64) * key_h
        if k_center is not None:
            k_center += (b.to(tl.int64) * HEADS + h) * K_DIM
        _write_side(
            x, k, k_scales, k_scale, k_center, table, h, tile, length, tokens, limit, columns,
            key_t, key_d, HEADS, PAGE, K_DIM, K_WIDTH, K_ENCODER, TILE, TRANSPOSED=False,
        )  # fmt: skip
    else:
        x = value + b.to(tl.int64) * value_b + h.to(tl.int64) * value_h
        _write_side(
            x, v, v_scales, v_scale, None, table, h, tile, length, tokens, limit, columns,
            value_t, value_d, HEADS, PAGE, V_DIM, V_WIDTH, V_ENCODER, TILE, TRANSPOSED=True,
        )  # fmt: skip


@triton.jit
def _write_side(
    x, pool, scales, static, center, table, h, tile, length, tokens, limit, columns,
    x_t, x_d,
    HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    ENCODER: tl.constexpr, TILE: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Stores one tile of one head's K, or V (TRANSPOSED)."""
    start = tile * TILE
    i = tl.arange(0, TILE)
    d = tl.arange(0, WIDTH)
    position = start + i
    t = position - length
    inside = (t >= 0) & (t < tokens)
    real = (d < DIM)[None, :]
    at = x + (t.to(tl.int64) * x_t)[:, None] + (d.to(tl.int64) * x_d)[None, :]
    given = inside[:, None] & real
    inside &= position < limit

    if PAGE % TILE == 0:
        column = start // PAGE
        page = tl.load(table + column, mask=column < columns, other=-1)
        first_slot = (tile % (PAGE // TILE)) * TILE
        slot = first_slot + i
    else:
        column = position // PAGE
        page = tl.load(table + column, mask=inside & (column < columns), other=-1)
        slot = position % PAGE
    exists = inside & (page >= 0)
    place = page.to(tl.int64) * HEADS + h

    if ENCODER is None:
        codes = tl.load(at, mask=given, other=0.0).to(pool.dtype.element_ty)
    elif static is not None:
        x = _centered(at, given, center, d, DIM)
        scale = tl.load(static + h * DIM + d, mask=d < DIM, other=1.0)
        codes = encode(x * tl.div_rn(1.0, scale)[None, :], ENCODER)
    else:
        x = _centered(at, given, center, d, DIM)
        if TRANSPOSED:
            scale = smallest_scale(x, ENCODER)
        elif TILE == 1:
            # Read once for each scale that is tried, so that every thread has numbers to try.
            again = tl.zeros([STEPS, 1], tl.int32)
            copies = _centered(at + again, given & (again == 0), center, d, DIM)
            scale = best_scale_at_once(copies, ENCODER)
        else:
            scale = best_scale(x, ENCODER)
        tl.store(scales + place * PAGE + slot, upper_half(scale), mask=exists)
        codes = encode(x * tl.div_rn(1.0, scale)[:, None], ENCODER)

    if not TRANSPOSED:
        at = pool + ((place * PAGE + slot) * DIM)[:, None] + d[None, :]
        tl.store(at, codes, mask=exists[:, None] & real)
    elif TILE > 1 and PAGE % TILE == 0:
        run = pool + (place * (DIM * PAGE) + first_slot)
        at = run + (d * PAGE)[None, :] + i[:, None]
        end = start + TILE
        if (page >= 0) & (start >= length) & (end <= length + tokens) & (end <= limit):
            # No token is masked: the bytes of a run are stored together.
            tl.store(at, codes, mask=real)
        else:
            tl.store(at, codes, mask=exists[:, None] & real)
    else:
        at = pool + (place * (DIM * PAGE) + slot)[:, None] + (d * PAGE)[None, :]
        tl.store(at, codes, mask=exists[:, None] & real)


@triton.jit
def _centered(at, mask, center, d, DIM: tl.constexpr):
    """The numbers at `at`, float32, less the center of their channel."""
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if center is not None:
        x -= tl.load(center + d, mask=d < DIM, other=0.0)[None, :]
    return x
