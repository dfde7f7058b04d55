"""Access to pages: pointers into a page, and loads of tiles of codes and scales."""

import triton
import triton.language as tl

from .codec import join_quarters, shift_codes, unpack


@triton.jit
def load_page_offset(side, page):
    """Return the distance of a page from the first page, in bytes."""
    return tl.load(side.offsets + page)


@triton.jit
def point_to_head(pointer, page_offset, h, HEAD_BYTES: tl.constexpr, NUM_EQUAL: tl.constexpr = 1):
    """Return a pointer to a region of head `h` in a page, with the shape of `page_offset`.

    `pointer` points to the region of head 0 in the first page. HEAD_BYTES is the size of a head in
    a page, in bytes. NUM_EQUAL is the number of consecutive offsets that are equal.
    """
    # Regions begin at multiples of 16 bytes, which Triton cannot derive from an offset. The
    # cast to an integer is needed: for a pointer plus an offset, compilers still load single bytes.
    address = pointer.to(tl.int64) + page_offset + h * HEAD_BYTES
    head_ptr = tl.multiple_of(address.to(pointer.dtype), 16)
    if NUM_EQUAL > 1:
        head_ptr = tl.max_constancy(head_ptr, NUM_EQUAL)
    return head_ptr


@triton.jit
def load_padded(ptrs, mask, MASKED: tl.constexpr):
    """Load codes, or zeros where `mask` is false if MASKED."""
    if MASKED:
        return tl.load(ptrs, mask=mask, other=0)
    else:
        return tl.load(ptrs)


@triton.jit
def load_quarters(ptrs, part_size, mask, CODEC: tl.constexpr):
    """Return the quarters of vectors whose codes are packed, as `shift_codes` returns them.

    Args:
        ptrs: Pointers to the bytes of the first of the parts of `unpack`.
        part_size: Distance of two parts, in bytes.
        mask: Whether each byte is loaded. None means all.
    """
    low = None
    first = load_padded(ptrs, mask, mask is not None)
    second = load_padded(ptrs + part_size, mask, mask is not None)
    if CODEC.bits == 6:
        low = load_padded(ptrs + 2 * part_size, mask, mask is not None)
    a, b, c, d = unpack(first, second, low, CODEC)
    return (
        shift_codes(a, CODEC),
        shift_codes(b, CODEC),
        shift_codes(c, CODEC),
        shift_codes(d, CODEC),
    )


@triton.jit
def load_codes(tensors, j, position, page_offset, h, view, CALL: tl.constexpr, TILE: tl.constexpr):
    """Load the codes of a tile.

    Args:
        j: Index of the tile.
        position: Positions of its tokens, `[TILE]`.
        page_offset: Offset of the page, used if the tile lies within one page.
        h: The KV head.
        view: See `View`.

    Returns:
        K `[TILE, k_width]`, or its four quarters for latents, V `[v_width, TILE]`, and pointers to
        the tokens' dynamic scales, `[TILE]`, if there are any. Packed codes become float16.
    """
    PAGE_SIZE: tl.constexpr = CALL.page_size
    HEAD_BYTES: tl.constexpr = CALL.k.head_bytes
    DK: tl.constexpr = CALL.k.dim
    DV: tl.constexpr = CALL.v.dim
    n = tl.arange(0, TILE)
    K_BITS: tl.constexpr = CALL.k_codec.bits
    V_BITS: tl.constexpr = CALL.v_codec.bits
    K_PARTS: tl.constexpr = 4 if CALL.latent or K_BITS < 8 else 1
    d = tl.arange(0, CALL.k.width // K_PARTS)
    dv = tl.arange(0, CALL.v.width if V_BITS == 8 else DV // 4)
    K_SIZE: tl.constexpr = CALL.k.stored_size
    K_PADDED: tl.constexpr = CALL.k.width > DK
    if PAGE_SIZE % TILE == 0:
        # The tile lies in one page, so its addresses are one base plus constants.
        slot = (j % (PAGE_SIZE // TILE)) * TILE
        k_ptr = point_to_head(tensors.k.codes, page_offset, h, HEAD_BYTES) + slot * K_SIZE
        v_ptr = point_to_head(tensors.v.codes, page_offset, h, HEAD_BYTES) + slot
        k_ptrs = k_ptr + (n[:, None] * K_SIZE + d[None, :])
        v_ptrs = v_ptr + (dv[:, None] * PAGE_SIZE + n[None, :])
        slots = slot + n
    else:
        # Past the end the last page is read again, because masked loads would read single bytes.
        last_column = tl.maximum(view.end - 1, 0) // PAGE_SIZE
        pages = tl.load(view.table_ptr + tl.minimum(position // PAGE_SIZE, last_column))
        pages = tl.maximum(pages, 0)
        if PAGE_SIZE % 16 == 0:
            # 16 consecutive tokens are in one page. Triton 3.6 does not derive this on AMD.
            pages = tl.max_constancy(pages, 16)
        page_offset = load_page_offset(tensors.k, pages)
        slots = position % PAGE_SIZE
        k_ptr = point_to_head(tensors.k.codes, page_offset, h, HEAD_BYTES)
        v_ptr = point_to_head(
            tensors.v.codes, page_offset, h, HEAD_BYTES, 16 if PAGE_SIZE % 16 == 0 else 1
        )
        k_ptrs = (k_ptr + slots * K_SIZE)[:, None] + d[None, :]
        v_ptrs = (v_ptr + slots)[None, :] + dv[:, None] * PAGE_SIZE
    if K_BITS < 8:
        k_codes = load_quarters(k_ptrs, DK // 4, None, CALL.k_codec)
        if not CALL.latent:
            k_codes = join_quarters(k_codes[0], k_codes[1], k_codes[2], k_codes[3], False)
    elif CALL.latent:
        QUARTER: tl.constexpr = CALL.k.width // 4
        k_codes = (
            load_padded(k_ptrs, (d < DK)[None, :], K_PADDED),
            load_padded(k_ptrs + QUARTER, (d < DK - QUARTER)[None, :], K_PADDED),
            load_padded(k_ptrs + 2 * QUARTER, (d < DK - 2 * QUARTER)[None, :], K_PADDED),
            load_padded(k_ptrs + 3 * QUARTER, (d < DK - 3 * QUARTER)[None, :], K_PADDED),
        )
    else:
        k_codes = load_padded(k_ptrs, (d < DK)[None, :], K_PADDED)
    if V_BITS < 8:
        va, vb, vc, vd = load_quarters(v_ptrs, DV // 4 * PAGE_SIZE, None, CALL.v_codec)
        v_codes = join_quarters(va, vb, vc, vd, TRANSPOSED=True)
    else:
        v_codes = load_padded(v_ptrs, (dv < DV)[:, None], CALL.v.width > DV)
    word_ptrs = n
    if tensors.token_scales is not None:
        words_ptr = tensors.token_scales.to(tl.pointer_type(tl.int32), bitcast=True)
        word_ptrs = point_to_head(words_ptr, page_offset, h, HEAD_BYTES) + slots
    return k_codes, v_codes, word_ptrs


@triton.jit
def load_scales(word_ptrs):
    """Return the scales of K and V of tokens, float32, from the halves of 32-bit words."""
    words = tl.load(word_ptrs)
    k_scale = (words << 16).to(tl.float32, bitcast=True)
    return k_scale, (words & -0x10000).to(tl.float32, bitcast=True)
