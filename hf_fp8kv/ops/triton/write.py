"""Storing new tokens: center, rotate, scale, encode and scatter K and V, in one launch."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...formats import FORMATS
from ..pages import Pages
from .arguments import make_pointers, make_side_sizes
from .codec import pack
from .encoder import (
    SEARCH_STEPS,
    compute_dynamic_scale,
    encode,
    search_scale,
    search_scale_at_once,
    to_bfloat16,
)
from .page_access import load_page_offset, point_to_head
from .replay import Variables, describe_shape, replayed
from .rotation import lay_out_like, rotate
from .target import get_target, launch
from .tuning import MAX_DECODE_TOKENS

# Number of positions that a program stores at once. A page holds a whole number of tiles, so that
# V's transposed rows are stored in runs of bytes.
TILE_TOKENS = 32
MIN_TILE_TOKENS = 16
# Number of warps: one for each 32 channels, within these bounds.
CHANNELS_PER_WARP = 32
MIN_WARPS, MAX_WARPS = 4, 16
# The limit of a growing cache.
UNLIMITED = 2**31 - 1


def describe_layout(
    pages: Pages, key: Tensor, value: Tensor, lengths: Tensor, limit: int | None = None
) -> tuple[Any, ...] | None:
    """Return the properties that a recorded launch depends on, or None if it is not recorded."""
    # Each length of a prompt would need a recording, and the number of recordings is limited.
    if key.shape[2] > MAX_DECODE_TOKENS:
        return None
    return describe_shape(key), describe_shape(value)


def list_variables(
    pages: Pages, key: Tensor, value: Tensor, lengths: Tensor, limit: int | None = None
) -> Variables:
    """Return the tensors and integers that differ in each call of a recorded launch."""
    integers = {
        "limit": UNLIMITED if limit is None else limit,
        "num_columns": pages.table.shape[1],
        "table_stride": pages.table.stride(0),
    }
    return (key, value, lengths), integers


@replayed(describe_layout, list_variables, pages=0)
def write(
    pages: Pages, key: Tensor, value: Tensor, lengths: Tensor, limit: int | None = None
) -> None:
    """Store the same bytes as `reference.write`.

    A token without a page, or at a position at or after `limit`, is skipped. None means no limit.
    """
    batch, num_heads, num_tokens, _ = key.shape
    k_sizes = make_side_sizes(pages, "k")
    v_sizes = make_side_sizes(pages, "v")
    tile_tokens = 1 if num_tokens <= MAX_DECODE_TOKENS else choose_tile_size(pages.page_size)
    # Tiles begin at multiples of their size, regardless of a sequence's length.
    num_tiles = (num_tokens + tile_tokens - 2) // tile_tokens + 1 if num_tokens else 0
    options = choose_launch_options(
        pages.table.device,
        max(k_sizes.width, v_sizes.width),
        rotated=pages.k.rotated or pages.v.rotated,
    )
    launch(
        _write, (num_tiles, 2 * num_heads, batch), key, value, lengths, pages.table,
        make_pointers(pages, "k"), make_pointers(pages, "v"), pages.regions.get("token_scales"),
        num_tokens, UNLIMITED if limit is None else limit, pages.table.shape[1],
        pages.table.stride(0), key.stride(), value.stride(),
        K=k_sizes, V=v_sizes, K_FORMAT=FORMATS.get(pages.k.format),
        V_FORMAT=FORMATS.get(pages.v.format), NUM_HEADS=num_heads, PAGE_SIZE=pages.page_size,
        TILE=tile_tokens, **options,
    )  # fmt: skip


def choose_launch_options(device: torch.device, width: int, *, rotated: bool) -> dict[str, Any]:
    """Return the options of a launch that stores or gathers heads padded to `width`.

    Products are not fused with sums, see encoder.py. Rotations have a limit of registers, because
    without it ptxas spills on sm_100 and sm_120 before it uses all available registers.
    """
    num_warps = min(max(width // CHANNELS_PER_WARP, MIN_WARPS), MAX_WARPS)
    options: dict[str, Any] = {"num_warps": num_warps, "enable_fp_fusion": False}
    if rotated and get_target(device).is_nvidia:
        options["maxnreg"] = 128
    return options


def choose_tile_size(page_size: int) -> int:
    """Return the tile size. It divides the page size if a divisor is at least MIN_TILE_TOKENS."""
    divisor = min(page_size & -page_size, TILE_TOKENS)
    return divisor if divisor >= MIN_TILE_TOKENS else TILE_TOKENS


@triton.jit(do_not_specialize=["num_tokens", "limit", "num_columns", "table_stride"])
def _write(
    key_ptr, value_ptr, lengths_ptr, table_ptr, k, v, scales_ptr, num_tokens, limit, num_columns,
    table_stride, key_strides, value_strides, K: tl.constexpr, V: tl.constexpr,
    K_FORMAT: tl.constexpr, V_FORMAT: tl.constexpr, NUM_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store new tokens. The grid is tiles of positions, KV heads (K's, then V's), and sequences.

    Args:
        key_ptr, value_ptr: Keys and values, `[B, Hkv, T, D]`, floating, with any strides.
        lengths_ptr: Number of stored tokens, including the new tokens, `[B]`, int32.
        table_ptr, table_stride: Block table, `[B, num_columns]`, int32, and its batch stride.
        k, v: Pointers, see `SidePointers`.
        scales_ptr: See `Pages.regions`.
        num_tokens: Number of new tokens, T.
        limit: Maximum number of tokens in a sequence.
        K, V: See `SideSizes`.
        K_FORMAT, V_FORMAT: The formats, or None for "auto".
    """
    h = tl.program_id(1) % NUM_HEADS
    b = tl.program_id(2)
    num_past = tl.load(lengths_ptr + b) - num_tokens
    tile_index = num_past // TILE + tl.program_id(0)
    table_ptr += b.to(tl.int64) * table_stride
    # The pointers need different names in the branches, because K and V may have different dtypes.
    if tl.program_id(1) < NUM_HEADS:
        k_ptr = key_ptr + b.to(tl.int64) * key_strides[0] + h.to(tl.int64) * key_strides[1]
        center_ptr = k.center
        if center_ptr is not None:
            center_ptr += h * K.dim
        write_side(
            k_ptr, key_strides, k, scales_ptr, center_ptr, table_ptr, h, tile_index, num_past,
            num_tokens, limit, num_columns, K, K_FORMAT, PAGE_SIZE, TILE, IS_V=False,
        )  # fmt: skip
    else:
        v_ptr = value_ptr + b.to(tl.int64) * value_strides[0] + h.to(tl.int64) * value_strides[1]
        write_side(
            v_ptr, value_strides, v, scales_ptr, None, table_ptr, h, tile_index, num_past,
            num_tokens, limit, num_columns, V, V_FORMAT, PAGE_SIZE, TILE, IS_V=True,
        )  # fmt: skip


@triton.jit
def write_side(
    x_ptr, strides, pointers, scales_ptr, center_ptr, table_ptr, h, tile_index, num_past,
    num_tokens, limit, num_columns, SIZES: tl.constexpr, FORMAT: tl.constexpr,
    PAGE_SIZE: tl.constexpr, TILE: tl.constexpr, IS_V: tl.constexpr,
):  # fmt: skip
    """Store one tile of K, or of V if IS_V, for one head, after `num_past` stored tokens."""
    DIM: tl.constexpr = SIZES.dim
    WIDTH: tl.constexpr = SIZES.width
    ROTATION_SIZE: tl.constexpr = SIZES.rotation_size
    start = tile_index * TILE
    i = tl.arange(0, TILE)
    d = tl.arange(0, WIDTH)
    position = start + i
    t = position - num_past
    is_new = (t >= 0) & (t < num_tokens)
    in_head = (d < DIM)[None, :]
    x_ptrs = x_ptr + (t.to(tl.int64) * strides[2])[:, None]
    x_ptrs += (d.to(tl.int64) * strides[3])[None, :]
    is_input = is_new[:, None] & in_head
    is_new &= position < limit

    if PAGE_SIZE % TILE == 0:
        column = start // PAGE_SIZE
        page = tl.load(table_ptr + column, mask=column < num_columns, other=-1)
        slot = (tile_index % (PAGE_SIZE // TILE)) * TILE + i
    else:
        column = position // PAGE_SIZE
        page = tl.load(table_ptr + column, mask=is_new & (column < num_columns), other=-1)
        slot = position % PAGE_SIZE
    is_stored = is_new & (page >= 0)
    page_offset = load_page_offset(pointers, tl.maximum(page, 0))
    codes_ptr = point_to_head(pointers.codes, page_offset, h, SIZES.head_bytes)

    if FORMAT is None:
        codes = tl.load(x_ptrs, mask=is_input, other=0.0).to(pointers.codes.dtype.element_ty)
    elif pointers.static_scale is not None:
        x = rotate(_load_centered(x_ptrs, is_input, center_ptr, d, DIM), ROTATION_SIZE)
        scale = tl.load(pointers.static_scale + h * DIM + d, mask=d < DIM, other=1.0)
        codes = encode(x * tl.div_rn(1.0, scale)[None, :], FORMAT)
    else:
        x = rotate(_load_centered(x_ptrs, is_input, center_ptr, d, DIM), ROTATION_SIZE)
        if IS_V:
            scale = compute_dynamic_scale(x, FORMAT)
        elif TILE == 1:
            # Load a copy for each scale to try, so that every thread has values to work on.
            zeros = tl.zeros([SEARCH_STEPS, 1], tl.int32)
            copies = _load_centered(x_ptrs + zeros, is_input & (zeros == 0), center_ptr, d, DIM)
            if ROTATION_SIZE > 1:
                copies = lay_out_like(tl.broadcast_to(x, [SEARCH_STEPS, WIDTH]), copies)
            scale = search_scale_at_once(copies, FORMAT)
        else:
            scale = search_scale(x, FORMAT)
        scale_ptrs = point_to_head(scales_ptr, page_offset, h, SIZES.head_bytes)
        scale_ptrs += slot * 2 + (1 if IS_V else 0)
        tl.store(scale_ptrs, to_bfloat16(scale), mask=is_stored)
        codes = encode(x * tl.div_rn(1.0, scale)[:, None], FORMAT)

    CHANNEL_STRIDE: tl.constexpr = PAGE_SIZE if IS_V else 1
    TOKEN_STRIDE: tl.constexpr = 1 if IS_V else SIZES.stored_size
    token_ptrs = (codes_ptr + slot * TOKEN_STRIDE)[:, None]
    code_ptrs = token_ptrs + (d * CHANNEL_STRIDE)[None, :]
    if SIZES.stored_size < DIM:
        ptrs = token_ptrs + (tl.arange(0, DIM // 4) * CHANNEL_STRIDE)[None, :]
        first, second, low = pack(codes)
        tl.store(ptrs, first, mask=is_stored[:, None])
        tl.store(ptrs + DIM // 4 * CHANNEL_STRIDE, second, mask=is_stored[:, None])
        if FORMAT.bits == 6:
            tl.store(ptrs + DIM // 2 * CHANNEL_STRIDE, low, mask=is_stored[:, None])
    elif IS_V and TILE > 1 and PAGE_SIZE % TILE == 0:
        end = start + TILE
        if (page >= 0) & (start >= num_past) & (end <= num_past + num_tokens) & (end <= limit):
            # No token is masked, so the bytes of a run are stored together.
            tl.store(code_ptrs, codes, mask=in_head)
        else:
            tl.store(code_ptrs, codes, mask=is_stored[:, None] & in_head)
    else:
        tl.store(code_ptrs, codes, mask=is_stored[:, None] & in_head)


@triton.jit
def _load_centered(ptrs, mask, center_ptr, d, DIM: tl.constexpr):
    """Load values at `ptrs` as float32, and subtract the center of their channel."""
    x = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    if center_ptr is not None:
        x -= tl.load(center_ptr + d, mask=d < DIM, other=0.0)[None, :]
    return x
