"""Attention for many query tokens over stored pages: prefill in chunks, prefixes, forks.

If blocks of query rows give fewer programs than the GPU has SMs (a short chunk after a long
prefix), sequences are split as in decoding.

Many blocks of rows read the same codes. With at least `MIN_WIDENED_BLOCKS` blocks, a kernel first
decodes the codes of a layer to 16 bits. The operands of products stay the same. On an H100,
attention of 2,048 new tokens to 8,192 stored tokens then takes 0.85 of the time, and 0.74 with a
third pipeline stage.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...formats import AUTO
from ..page_layout import make_page_layout
from ..pages import AttentionSpec, Pages
from .arguments import AttentionArgs, make_pointers, prepare_arguments
from .codec import decode_for_dot
from .decode import launch_attention
from .page_access import load_page_offset, load_quarters, point_to_head
from .target import cdiv, launch, next_power_of_2
from .tuning import LaunchConfig, choose_extend_config, get_family

# Sequences of at most this number of tokens are not split.
MAX_UNSPLIT_TOKENS = 256
# Minimum number of blocks of query rows for widening. On an H100, widening takes as long as
# decoding the codes in 8 blocks.
MIN_WIDENED_BLOCKS = 8
# Minimum number of positions for widening.
MIN_WIDENED_TOKENS = 1024
# Maximum size of the widened pages of a layer, in bytes: 65,536 tokens of 8 heads of 128.
MAX_WIDENED_BYTES = 1 << 28
_TORCH_DTYPES = {tl.float16: torch.float16, tl.bfloat16: torch.bfloat16}


def attend(
    query: Tensor, pages: Pages, lengths: Tensor, start: int, stop: int, spec: AttentionSpec
) -> Tensor:
    """Compute attention as `backend.attend`, for any number of query rows."""
    args = prepare_arguments(query, pages, lengths, start, stop, spec)
    config = choose_extend_config(args.target, args.workload)
    wide_pages = None if spec.deterministic else _widen_pages(args, pages, config)
    if wide_pages is not None:
        args = prepare_arguments(query, wide_pages, lengths, start, stop, spec)
        config = choose_extend_config(args.target, args.workload._replace(is_widened=True))
    num_blocks = cdiv(args.workload.rows, config.rows)
    has_idle_sms = pages.num_heads * len(lengths) * num_blocks < args.target.sm_count
    may_split = has_idle_sms and stop > MAX_UNSPLIT_TOKENS and not spec.deterministic
    return launch_attention(args, config, split=may_split)


def _widen_pages(args: AttentionArgs, pages: Pages, config: LaunchConfig) -> Pages | None:
    """Copy the pages of tokens before `args.stop`, with codes decoded to the 16-bit operand dtype.

    Returns:
        The copies, or None if they would not save time, or would not fit:

        * few blocks of rows or positions, or a window, which limits the codes that blocks share
        * GPUs whose products do not read K and V from shared memory
        * latents, float32 products, or a mask for each query, because the sums would spill
        * K and V in 16 bits, which need no decoding
        * copies above `MAX_WIDENED_BYTES`
    """
    workload = args.workload
    is_small = (
        cdiv(workload.rows, config.rows) < MIN_WIDENED_BLOCKS or args.stop < MIN_WIDENED_TOKENS
    )
    if is_small or args.start or args.window or not get_family(args.target).has_warp_groups:
        return None
    may_spill = workload.has_float32_operands or workload.is_latent or workload.has_query_masks
    if may_spill or pages.k.format == pages.v.format == AUTO:
        return None
    codecs = args.constants.k_codec, args.constants.v_codec
    dtypes = [_TORCH_DTYPES[codec.operand_dtype] for codec in codecs]
    num_heads = pages.num_heads
    page_size = pages.page_size
    dims = pages.k.head_dim, pages.v.head_dim
    layout = make_page_layout(num_heads, page_size, *dims, dtypes[0], dtypes[1], pages.has_scales)
    batch = len(args.tensors.lengths)
    num_columns = cdiv(args.stop, page_size)
    if batch * num_columns * layout.size > MAX_WIDENED_BYTES:
        return None
    table = pages.table.new_empty((batch, num_columns))
    wide_pages = Pages(
        pages.k,
        pages.v,
        block=pages.block.new_empty((batch * num_columns, layout.size)),
        table=table,
        offsets=pages.offsets.new_empty(batch * num_columns),
        num_heads=num_heads,
        page_size=page_size,
        k_dtype=dtypes[0],
        v_dtype=dtypes[1],
        has_scales=pages.has_scales,
    )
    launch(
        _widen_codes, (num_heads, num_columns, batch), make_pointers(pages, "k"),
        make_pointers(pages, "v"), pages.regions.get("token_scales"), pages.table,
        args.tensors.lengths, make_pointers(wide_pages, "k"), make_pointers(wide_pages, "v"),
        wide_pages.regions.get("token_scales"), table, layout.size, pages.table.stride(0),
        PAGE_SIZE=page_size, K_SIZE=page_size * dims[0], V_SIZE=page_size * dims[1], K_DIM=dims[0],
        HEAD_BYTES=pages.layout.head_bytes,
        WIDE_HEAD_BYTES=layout.head_bytes, K_CODEC=codecs[0], V_CODEC=codecs[1],
        SLOTS_WIDTH=next_power_of_2(page_size), num_warps=4,
    )  # fmt: skip
    return wide_pages


@triton.jit(do_not_specialize=["wide_page_bytes", "table_stride"])
def _widen_codes(
    k, v, scales_ptr, table_ptr, lengths_ptr, wide_k, wide_v, wide_scales_ptr, wide_table_ptr,
    wide_page_bytes, table_stride, PAGE_SIZE: tl.constexpr, K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr, K_DIM: tl.constexpr, HEAD_BYTES: tl.constexpr,
    WIDE_HEAD_BYTES: tl.constexpr, K_CODEC: tl.constexpr, V_CODEC: tl.constexpr,
    SLOTS_WIDTH: tl.constexpr,
):  # fmt: skip
    """Decode the codes of one head of one page, and write the new table and offsets.

    Args:
        k, v, wide_k, wide_v: Pointers to pages and to widened pages, see `SidePointers`.
        scales_ptr, wide_scales_ptr: See `Pages.regions`.
        table_ptr, table_stride: Block table, `[B, M]`, int32, and its batch stride.
        wide_table_ptr: Block table of widened pages, `[B, num_columns]`, int32.
        lengths_ptr: Number of stored tokens, `[B]`, int32.
        wide_page_bytes: Size of a widened page, in bytes.
    """
    h = tl.program_id(0)
    i = tl.program_id(1)
    b = tl.program_id(2)
    wide_page = b * tl.num_programs(1) + i
    wide_offset = wide_page.to(tl.int64) * wide_page_bytes
    if h == 0:
        tl.store(wide_table_ptr + wide_page, wide_page)
        tl.store(wide_k.offsets + wide_page, wide_offset)
    if i * PAGE_SIZE >= tl.load(lengths_ptr + b):
        return
    page = tl.maximum(tl.load(table_ptr + b.to(tl.int64) * table_stride + i), 0)
    page_offset = load_page_offset(k, page)
    k_ptr = point_to_head(k.codes, page_offset, h, HEAD_BYTES)
    v_ptr = point_to_head(v.codes, page_offset, h, HEAD_BYTES)
    _widen_codes_of_head(
        k_ptr, point_to_head(wide_k.codes, wide_offset, h, WIDE_HEAD_BYTES), K_SIZE, K_DIM, K_CODEC
    )
    _widen_codes_of_head(
        v_ptr, point_to_head(wide_v.codes, wide_offset, h, WIDE_HEAD_BYTES), V_SIZE, V_SIZE, V_CODEC
    )
    if scales_ptr is not None:
        n = tl.arange(0, SLOTS_WIDTH)
        words_ptr = scales_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        wide_words_ptr = wide_scales_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        in_page = n < PAGE_SIZE
        words = tl.load(point_to_head(words_ptr, page_offset, h, HEAD_BYTES) + n, mask=in_page)
        wide_words_ptr = point_to_head(wide_words_ptr, wide_offset, h, WIDE_HEAD_BYTES)
        tl.store(wide_words_ptr + n, words, mask=in_page)


@triton.jit
def _widen_codes_of_head(
    codes_ptr, wide_ptr, SIZE: tl.constexpr, GROUP_SIZE: tl.constexpr, CODEC: tl.constexpr
):
    """Decode the SIZE codes of one side of a head.

    Codes of fewer than 8 bits are stored in groups of GROUP_SIZE codes: a key, or the values of a
    page. Each load returns codes of the four quarters of a group.
    """
    CHUNK: tl.constexpr = 2048
    QUARTER_SIZE: tl.constexpr = GROUP_SIZE // 4
    NUM_QUARTERS: tl.constexpr = 4 if CODEC.bits < 8 else 1
    for first in tl.range(0, SIZE // NUM_QUARTERS, CHUNK, num_stages=1):
        n = first + tl.arange(0, CHUNK)
        if CODEC.bits < 8:
            group = n // QUARTER_SIZE
            offset = n % QUARTER_SIZE
            ptrs = codes_ptr + group * (GROUP_SIZE * CODEC.bits // 8) + offset
            quarters = load_quarters(ptrs, QUARTER_SIZE, n < SIZE // 4, CODEC)
            wide_ptrs = wide_ptr + group * GROUP_SIZE + offset
            for j in tl.static_range(4):
                tl.store(
                    wide_ptrs + j * QUARTER_SIZE,
                    decode_for_dot(quarters[j], CODEC),
                    mask=n < SIZE // 4,
                )
        else:
            codes = tl.load(codes_ptr + n, mask=n < SIZE, other=0)
            tl.store(wide_ptr + n, decode_for_dot(codes, CODEC), mask=n < SIZE)
