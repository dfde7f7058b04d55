"""Gathering stored tokens into dense K or V, in one launch."""

import torch
import triton
import triton.language as tl

from ..pages import Pages
from .arguments import make_pointers, make_side_sizes
from .codec import AS_IS, choose_codec, decode_for_dot, join_quarters
from .page_access import load_page_offset, load_quarters, point_to_head
from .rotation import rotate
from .target import get_target, launch
from .write import choose_launch_options, choose_tile_size


def gather(
    pages: Pages,
    lengths: torch.Tensor,
    side: str,
    start: int,
    stop: int,
    dtype: torch.dtype,
    ragged: bool,
) -> torch.Tensor:
    """Return dense keys or values, with the same bits as `reference.gather`."""
    stored_side = pages.k if side == "k" else pages.v
    batch = len(pages.table)
    num_heads = pages.num_heads
    shape = (batch, num_heads, stop - start, stored_side.head_dim)
    out = pages.block.new_empty(shape, dtype=dtype)
    tile_tokens = choose_tile_size(pages.page_size)
    sizes = make_side_sizes(pages, side)
    codec = choose_codec(
        stored_side.format, get_target(out.device), tl.float32, is_float32=True, keeps_nan=True
    )
    # Tiles begin at multiples of their size, regardless of `start`.
    num_tiles = (stop - 1) // tile_tokens - start // tile_tokens + 1 if stop > start else 0
    launch(
        _gather, (num_tiles, num_heads, batch), make_pointers(pages, side),
        pages.regions.get("token_scales"), out, lengths, pages.table, start, stop,
        pages.table.stride(0), SIZES=sizes, CODEC=codec, NUM_HEADS=num_heads,
        PAGE_SIZE=pages.page_size, IS_V=side == "v", RAGGED=ragged, TILE=tile_tokens,
        **choose_launch_options(out.device, sizes.width, rotated=stored_side.rotated),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["start", "stop", "table_stride"])
def _gather(
    pointers, scales_ptr, out_ptr, lengths_ptr, table_ptr, start, stop, table_stride,
    SIZES: tl.constexpr, CODEC: tl.constexpr, NUM_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    IS_V: tl.constexpr, RAGGED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write dense K, or V if IS_V. The grid is tiles of positions, KV heads and sequences.

    Args:
        pointers: Pointers, see `SidePointers`.
        scales_ptr: See `Pages.regions`.
        out_ptr: Output, `[B, Hkv, stop - start, D]`, floating.
        lengths_ptr: Number of stored tokens, `[B]`, int32, only read if RAGGED.
        table_ptr, table_stride: Block table, `[B, M]`, int32, and its batch stride.
        SIZES, CODEC: See `SideSizes` and `Codec`.
    """
    DIM: tl.constexpr = SIZES.dim
    h = tl.program_id(1)
    b = tl.program_id(2)
    tile_index = start // TILE + tl.program_id(0)
    tile_start = tile_index * TILE
    i = tl.arange(0, TILE)
    d = tl.arange(0, SIZES.width)
    position = tile_start + i
    in_range = (position >= start) & (position < stop)
    exists = in_range
    if RAGGED:
        exists &= position < tl.load(lengths_ptr + b)
    in_head = (d < DIM)[None, :]

    # A freed page is outside the window. Page 0 is read instead, and the caller masks it.
    table_ptr += b.to(tl.int64) * table_stride
    if PAGE_SIZE % TILE == 0:
        # The tile lies in one page, so every slot of it exists.
        page = tl.load(table_ptr + tile_start // PAGE_SIZE)
        slot = (tile_index % (PAGE_SIZE // TILE)) * TILE + i
        is_loaded = in_head
    else:
        page = tl.load(table_ptr + position // PAGE_SIZE, mask=in_range, other=0)
        slot = position % PAGE_SIZE
        is_loaded = exists[:, None] & in_head
    page_offset = load_page_offset(pointers, tl.maximum(page, 0))
    codes_ptr = point_to_head(pointers.codes, page_offset, h, SIZES.head_bytes)
    CHANNEL_STRIDE: tl.constexpr = PAGE_SIZE if IS_V else 1
    TOKEN_STRIDE: tl.constexpr = 1 if IS_V else SIZES.stored_size
    token_ptrs = (codes_ptr + slot * TOKEN_STRIDE)[:, None]
    if CODEC.bits < 8:
        ptrs = token_ptrs + (tl.arange(0, DIM // 4) * CHANNEL_STRIDE)[None, :]
        quarters = load_quarters(ptrs, DIM // 4 * CHANNEL_STRIDE, exists[:, None], CODEC)
        codes = join_quarters(quarters[0], quarters[1], quarters[2], quarters[3], TRANSPOSED=False)
    else:
        code_ptrs = token_ptrs + (d * CHANNEL_STRIDE)[None, :]
        codes = tl.load(code_ptrs, mask=is_loaded, other=0)

    if CODEC.method == AS_IS:
        x = codes
    else:
        x = decode_for_dot(codes, CODEC) * CODEC.factor
        if pointers.static_scale is not None:
            x *= tl.load(pointers.static_scale + h * DIM + d, mask=d < DIM, other=0.0)[None, :]
        else:
            scale_ptrs = point_to_head(scales_ptr, page_offset, h, SIZES.head_bytes)
            scale_ptrs += slot * 2 + (1 if IS_V else 0)
            x *= tl.load(scale_ptrs, mask=exists, other=0.0).to(tl.float32)[:, None]
        x = rotate(x, SIZES.rotation_size)
        if pointers.center is not None:
            x += tl.load(pointers.center + h * DIM + d, mask=d < DIM, other=0.0)[None, :]
    if RAGGED:
        x = tl.where(exists[:, None], x, tl.zeros_like(x))
    row_start = ((b.to(tl.int64) * NUM_HEADS + h) * (stop - start) + (tile_start - start)) * DIM
    out_ptrs = out_ptr + row_start + (i * DIM)[:, None] + d[None, :]
    tl.store(out_ptrs, x.to(out_ptr.dtype.element_ty), mask=in_range[:, None] & in_head)
