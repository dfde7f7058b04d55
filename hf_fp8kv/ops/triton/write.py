"""Storing new tokens: center, rotate, scale, encode and scatter K and V in one launch."""

import torch
import triton
import triton.language as tl

from ..pages import Pages
from .arguments import pointers_to
from .encoder import (
    SEARCH_STEPS,
    encode,
    encoder_for,
    search_scale,
    search_scale_at_once,
    smallest_scale,
    to_bfloat16,
)
from .places import codes_of, find_place, scales_of
from .rotation import block_of, lay_out_like, rotate
from .target import launch, next_power_of_2, target_of
from .tuning import SINGLE_TOKENS

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
    """Store what `reference.write` stores for the same arguments, to the bit.

    A token without a page, or at a position from
    `limit` on, is not stored.
    """
    batch, heads, tokens, k_dim = key.shape
    v_dim = value.shape[3]
    k_width, v_width = next_power_of_2(k_dim), next_power_of_2(v_dim)
    tile = 1 if tokens <= SINGLE_TOKENS else tile_size(pages.page_size)
    # Tiles begin at multiples of their size, wherever a sequence ends.
    tiles = (tokens + tile - 2) // tile + 1 if tokens else 0
    options = limit_registers(pages.table.device, pages.k.rotated or pages.v.rotated)
    launch(
        _write, (tiles, 2 * heads, batch), key, value, lengths, pages.table,
        pointers_to(pages, "k"), pointers_to(pages, "v"), pages.token_scales, tokens,
        UNLIMITED if limit is None else limit, pages.table.shape[1], pages.table.stride(0),
        key.stride(), value.stride(),
        HEADS=heads, PAGE=pages.page_size, K_DIM=k_dim, V_DIM=v_dim, K_WIDTH=k_width,
        V_WIDTH=v_width, K_BLOCK=block_of(pages.k), V_BLOCK=block_of(pages.v),
        K_ENCODER=encoder_for(pages.k.format), V_ENCODER=encoder_for(pages.v.format), TILE=tile,
        num_warps=num_warps(max(k_width, v_width)), enable_fp_fusion=False, **options,
    )  # fmt: skip


def limit_registers(device: torch.device, rotated: bool) -> dict[str, int]:
    """Return the launch options that a rotation needs.

    Without a limit ptxas spills before it takes as many registers as any number of warps has room
    for, on sm_100 and sm_120.
    """
    return {"maxnreg": 128} if rotated and target_of(device).is_nvidia else {}


def tile_size(page_size: int) -> int:
    """Return how many positions a tile has: a divisor of the page size if there is a large one."""
    divisor = min(page_size & -page_size, TILE)
    return divisor if divisor >= MIN_TILE else TILE


def num_warps(width: int) -> int:
    """Return the warps of a program, for a head size padded to `width`."""
    return min(max(width // CHANNELS_PER_WARP, WARPS[0]), WARPS[1])


@triton.jit(do_not_specialize=["tokens", "limit", "columns", "table_b"])
def _write(
    key_ptr, value_ptr, lengths_ptr, table_ptr, k, v, scales_ptr, tokens, limit, columns, table_b,
    key_strides, value_strides,
    HEADS: tl.constexpr, PAGE: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr,
    K_ENCODER: tl.constexpr, V_ENCODER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store new tokens. The grid is tiles of positions, KV heads (K's, then V's), and sequences.

    Args:
        key_ptr, value_ptr: `[B, Hkv, T, D]`, floating, of any strides.
        lengths_ptr: `[B]`, int32.
        table_ptr: `[B, columns]`, int32; table_b: its batch stride.
        k, v: pointers, see `SidePointers`; scales_ptr: see `Pages.token_scales`.
        tokens, limit: T, and the most tokens that a sequence may hold.
    """
    h = tl.program_id(1) % HEADS
    b = tl.program_id(2)
    length = tl.load(lengths_ptr + b) - tokens
    tile = length // TILE + tl.program_id(0)
    table_ptr += b.to(tl.int64) * table_b
    if tl.program_id(1) < HEADS:
        x_ptr = key_ptr + b.to(tl.int64) * key_strides[0] + h.to(tl.int64) * key_strides[1]
        center_ptr = k.center
        if center_ptr is not None:
            center_ptr += (b.to(tl.int64) * HEADS + h) * K_DIM
        write_side(
            x_ptr, k, scales_ptr, center_ptr, table_ptr, h, tile, length, tokens, limit, columns,
            key_strides[2], key_strides[3],
            PAGE, K_DIM, K_WIDTH, K_BLOCK, K_ENCODER, TILE, TRANSPOSED=False,
        )  # fmt: skip
    else:
        x_ptr = value_ptr + b.to(tl.int64) * value_strides[0] + h.to(tl.int64) * value_strides[1]
        write_side(
            x_ptr, v, scales_ptr, None, table_ptr, h, tile, length, tokens, limit, columns,
            value_strides[2], value_strides[3],
            PAGE, V_DIM, V_WIDTH, V_BLOCK, V_ENCODER, TILE, TRANSPOSED=True,
        )  # fmt: skip


@triton.jit
def write_side(
    x_ptr, side, scales_ptr, center_ptr, table_ptr, h, tile, length, tokens, limit, columns,
    x_t, x_d,
    PAGE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, ENCODER: tl.constexpr, TILE: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Store one tile of one head's K, or V (TRANSPOSED)."""
    start = tile * TILE
    i = tl.arange(0, TILE)
    d = tl.arange(0, WIDTH)
    position = start + i
    t = position - length
    inside = (t >= 0) & (t < tokens)
    real = (d < DIM)[None, :]
    x_ptrs = x_ptr + (t.to(tl.int64) * x_t)[:, None] + (d.to(tl.int64) * x_d)[None, :]
    given = inside[:, None] & real
    inside &= position < limit

    if PAGE % TILE == 0:
        column = start // PAGE
        page = tl.load(table_ptr + column, mask=column < columns, other=-1)
        first_slot = (tile % (PAGE // TILE)) * TILE
        slot = first_slot + i
    else:
        column = position // PAGE
        page = tl.load(table_ptr + column, mask=inside & (column < columns), other=-1)
        slot = position % PAGE
    exists = inside & (page >= 0)
    place = find_place(side, tl.maximum(page, 0))
    codes_ptr = codes_of(side, place, h, PAGE * DIM)

    if ENCODER is None:
        codes = tl.load(x_ptrs, mask=given, other=0.0).to(side.codes.dtype.element_ty)
    elif side.static_scale is not None:
        x = rotate(_load_centered(x_ptrs, given, center_ptr, d, DIM), BLOCK)
        scale = tl.load(side.static_scale + h * DIM + d, mask=d < DIM, other=1.0)
        codes = encode(x * tl.div_rn(1.0, scale)[None, :], ENCODER)
    else:
        x = rotate(_load_centered(x_ptrs, given, center_ptr, d, DIM), BLOCK)
        if TRANSPOSED:
            scale = smallest_scale(x, ENCODER)
        elif TILE == 1:
            # Read once for each scale that is tried, so that every thread has numbers to try.
            again = tl.zeros([SEARCH_STEPS, 1], tl.int32)
            copies = _load_centered(x_ptrs + again, given & (again == 0), center_ptr, d, DIM)
            if BLOCK > 1:
                copies = lay_out_like(tl.broadcast_to(x, [SEARCH_STEPS, WIDTH]), copies)
            scale = search_scale_at_once(copies, ENCODER)
        else:
            scale = search_scale(x, ENCODER)
        scale_ptrs = scales_of(scales_ptr, place, h, PAGE * 2)
        scale_ptrs += slot * 2 + (1 if TRANSPOSED else 0)
        tl.store(scale_ptrs, to_bfloat16(scale), mask=exists)
        codes = encode(x * tl.div_rn(1.0, scale)[:, None], ENCODER)

    if not TRANSPOSED:
        code_ptrs = (codes_ptr + slot * DIM)[:, None] + d[None, :]
        tl.store(code_ptrs, codes, mask=exists[:, None] & real)
    elif TILE > 1 and PAGE % TILE == 0:
        run_ptr = codes_ptr + first_slot
        code_ptrs = run_ptr + (d * PAGE)[None, :] + i[:, None]
        end = start + TILE
        if (page >= 0) & (start >= length) & (end <= length + tokens) & (end <= limit):
            # No token is masked: the bytes of a run are stored together.
            tl.store(code_ptrs, codes, mask=real)
        else:
            tl.store(code_ptrs, codes, mask=exists[:, None] & real)
    else:
        code_ptrs = (codes_ptr + slot)[:, None] + (d * PAGE)[None, :]
        tl.store(code_ptrs, codes, mask=exists[:, None] & real)


@triton.jit
def _load_centered(ptrs, mask, center_ptr, d, DIM: tl.constexpr):
    """Return the numbers at `ptrs`, float32, less the center of their channel."""
    x = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    if center_ptr is not None:
        x -= tl.load(center_ptr + d, mask=d < DIM, other=0.0)[None, :]
    return x
