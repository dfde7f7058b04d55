"""Where the bytes of a page are, by its offset, and tiles of them."""

import triton
import triton.language as tl


@triton.jit
def find_place(side, page):
    """Return how many bytes a page is after the first one."""
    return tl.load(side.offsets + page)


@triton.jit
def in_page(pointer, place, h, SIZE: tl.constexpr, ALIKE: tl.constexpr = 1):
    """Return a pointer to the SIZE numbers that a page has of head `h`; of the shape of `place`.

    `pointer`: To these numbers in the first page. ALIKE: how many places that follow each other are
    one.
    """
    # Parts of a page begin at multiples of 16 bytes, which Triton cannot see in an offset. From a
    # pointer and an offset, compilers load bytes one by one all the same.
    part = tl.multiple_of((pointer.to(tl.int64) + place).to(pointer.dtype), 16)
    if ALIKE > 1:
        part = tl.max_constancy(part, ALIKE)
    return part + h * SIZE


@triton.jit
def load_codes(
    tensors, j, position, place, h, view, CALL: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Return the codes of a tile: K `[TILE, k_width]`, V `[v_width, TILE]`.

    And `[TILE]`, where the dynamic scales of its tokens are, if there are any.

    Args:
        j: The number of the tile.
        position: `[TILE]`, of its tokens.
        place: What `find_place` returns for the page of a tile within one page.
        h: The KV head.
        view: See `View`.
    """
    PAGE: tl.constexpr = CALL.page_size
    DK: tl.constexpr = CALL.k.dim
    DV: tl.constexpr = CALL.v.dim
    n = tl.arange(0, TILE)
    d = tl.arange(0, CALL.k.width)
    dv = tl.arange(0, CALL.v.width)
    if PAGE % TILE == 0:
        # One page, known by one number: the addresses of a tile are one base and constants.
        slot = (j % (PAGE // TILE)) * TILE
        k_ptr = in_page(tensors.k.codes, place, h, PAGE * DK) + slot * DK
        v_ptr = in_page(tensors.v.codes, place, h, DV * PAGE) + slot
        k_ptrs = k_ptr + (n[:, None] * DK + d[None, :])
        v_ptrs = v_ptr + (dv[:, None] * PAGE + n[None, :])
        slots = slot + n
    else:
        # Past the end the last page is read again: with a mask loads would be of single bytes.
        last = tl.maximum(view.end - 1, 0) // PAGE
        pages = tl.load(view.table_ptr + tl.minimum(position // PAGE, last))
        pages = tl.maximum(pages, 0)
        if PAGE % 16 == 0:
            # Triton 3.6 loses sight of it on AMD: 16 tokens are in one page.
            pages = tl.max_constancy(pages, 16)
        place = find_place(tensors.k, pages)
        slots = position % PAGE
        k_ptr = in_page(tensors.k.codes, place, h, PAGE * DK)
        v_ptr = in_page(tensors.v.codes, place, h, DV * PAGE, 16 if PAGE % 16 == 0 else 1)
        k_ptrs = (k_ptr + slots * DK)[:, None] + d[None, :]
        v_ptrs = (v_ptr + slots)[None, :] + dv[:, None] * PAGE
    if CALL.k.width == DK:
        k_codes = tl.load(k_ptrs)
    else:
        k_codes = tl.load(k_ptrs, mask=(d < DK)[None, :], other=0)
    if CALL.v.width == DV:
        v_codes = tl.load(v_ptrs)
    else:
        v_codes = tl.load(v_ptrs, mask=(dv < DV)[:, None], other=0)
    word_ptrs = n
    if tensors.token_scales is not None:
        words_ptr = tensors.token_scales.to(tl.pointer_type(tl.int32), bitcast=True)
        word_ptrs = in_page(words_ptr, place, h, PAGE) + slots
    return k_codes, v_codes, word_ptrs


@triton.jit
def load_scales(word_ptrs):
    """Return the scales of K and of V of tokens, float32: the two halves of one word."""
    words = tl.load(word_ptrs)
    k_scale = (words << 16).to(tl.float32, bitcast=True)
    return k_scale, (words & -0x10000).to(tl.float32, bitcast=True)
