"""The attention kernel, and its launch for few query tokens over stored pages.

A program computes a block of query rows of one KV head (its query heads times the query tokens)
over one sequence, or over one part of it. With parts, a few rows also keep all SMs busy. The work
schedule (schedule.py) assigns the parts. A second kernel merges the partial sums of a sequence.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from ..pages import AttentionSpec, Pages
from .arguments import AttentionArgs, prepare_arguments
from .attention import Span, Strides, attend_rows, find_rows, finish_rows, write_rows
from .replay import Variables, describe_shape
from .schedule import count_schedule_rows, fill_schedule, get_max_parts
from .softmax import per_column, per_row
from .target import allocate, cdiv, launch
from .tuning import (
    FEW_ROWS,
    MAX_DECODE_ROWS,
    MAX_DECODE_TOKENS,
    LaunchConfig,
    choose_decode_config,
    estimate_programs,
)

# Maximum number of values that a `_combine` program loads at a time, and of its channels, unless a
# rotation mixes more. This pair was the fastest of five on an H100 in three of four decode cases. A
# program has one warp, because with several warps ptxas may issue the loads one by one.
LOAD_SIZE = tl.constexpr(4096)
MAX_CHANNELS = tl.constexpr(128)


def describe_layout(
    query: torch.Tensor,
    pages: Pages,
    lengths: torch.Tensor,
    start: int,
    stop: int,
    spec: AttentionSpec,
    schedule: torch.Tensor | None = None,
) -> tuple[Any, ...] | None:
    """Return the properties of a call that a recorded launch depends on, besides `list_variables`.

    None means that the call is not recorded.
    """
    scaling, causal, window, softcap, _, mask, bias, _, latent, deterministic = spec
    # Complete masks and biases are not recorded. They are rare in decoding, and more of their
    # strides change with each step. A compact mask is `[B, 1, 1, N]`.
    is_compact = mask is None or (
        mask.shape[1:3] == (1, 1) and (mask.stride(3) == 1 or mask.shape[3] == 1)
    )
    if bias is not None or not is_compact or not supports_call(query, pages, spec):
        return None
    return (
        describe_shape(query),
        None if schedule is None else schedule.shape,
        scaling,
        causal,
        window,
        softcap,
        latent,
        deterministic,
    )


def list_variables(
    query: torch.Tensor,
    pages: Pages,
    lengths: torch.Tensor,
    start: int,
    stop: int,
    spec: AttentionSpec,
    schedule: torch.Tensor | None = None,
) -> Variables:
    """Return the tensors and integers that differ in each call of a recorded launch."""
    mask = spec.mask
    bounds = spec.bounds
    integers = {
        "start": start,
        "stop": stop,
        "table_stride": pages.table.stride(0),
        "mask_batch_stride": 0 if mask is None or mask.shape[0] == 1 else mask.stride(0),
        # A compact mask has no head stride. Kernels read the batch stride of its bounds here.
        "mask_head_stride": 0 if bounds is None or bounds.shape[0] == 1 else bounds.stride(0),
    }
    return (query, lengths, schedule, spec.sinks, mask, bounds), integers


def supports_call(query: torch.Tensor, pages: Pages, spec: AttentionSpec) -> bool:
    """Return whether `attend` of this module supports a call."""
    _, num_query_heads, num_tokens, _ = query.shape
    # Models with latents have many query heads per KV head, so the number of tokens decides.
    if spec.latent:
        return num_tokens <= MAX_DECODE_TOKENS
    return num_query_heads // pages.num_heads * num_tokens <= MAX_DECODE_ROWS


def attend(
    query: torch.Tensor,
    pages: Pages,
    lengths: torch.Tensor,
    start: int,
    stop: int,
    spec: AttentionSpec,
    schedule: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention as `backend.attend`, for latents or up to MAX_DECODE_ROWS query rows."""
    args = prepare_arguments(query, pages, lengths, start, stop, spec)
    assert args.workload.rows <= MAX_DECODE_ROWS or spec.latent
    config = choose_decode_config(args.target, args.workload)
    if schedule is not None and not _fits_schedule(schedule, args, config):
        schedule = None
    return launch_attention(args, config, schedule, split=not spec.deterministic)


def _fits_schedule(schedule: torch.Tensor, args: AttentionArgs, config: LaunchConfig) -> bool:
    """Return whether all parts of a schedule can run at the same time in this call.

    The schedule was made before the query was known, for a single block of few rows.
    """
    if args.workload.rows > config.rows:
        return False
    num_rows = count_schedule_rows(
        schedule.device,
        len(args.tensors.lengths),
        args.constants.num_heads,
        programs_per_sm=_estimate_call_programs(args, config),
    )
    return len(schedule) <= num_rows


def launch_attention(
    args: AttentionArgs, config: LaunchConfig, schedule: torch.Tensor | None = None, *, split: bool
) -> torch.Tensor:
    """Launch the attention kernel.

    Args:
        args: Arguments of the call.
        config: Launch parameters.
        schedule: Schedule for the call's KV heads times its blocks of `config.rows` rows, or None
            to make it here.
        split: Whether sequences may be split into parts. Otherwise no schedule is used.

    Returns:
        The attention output, `[B, T, Hq, out_dim]`.
    """
    tensors = args.tensors
    constants = args.constants
    batch, num_query_heads, num_tokens, _ = tensors.query.shape
    out_sizes = constants.out
    device = tensors.query.device
    num_heads = constants.num_heads
    num_blocks = cdiv(args.workload.rows, config.rows)
    partial_sums = None
    max_parts = batch
    grid: tuple[int, ...] = (num_heads * batch * num_blocks,)
    if split and schedule is None:
        num_head_blocks = num_heads * num_blocks
        programs_per_sm = _estimate_call_programs(args, config)
        num_rows = count_schedule_rows(
            device, batch, num_head_blocks, programs_per_sm=programs_per_sm
        )
        schedule = allocate((num_rows, 4), torch.int32, device)
        fill_schedule(
            schedule,
            tensors.lengths,
            num_tokens,
            args.window,
            args.start,
            num_head_blocks,
            programs_per_sm,
            constants.latent,
        )
    out = allocate((batch, num_tokens, num_query_heads, out_sizes.dim), tensors.query.dtype, device)
    if split and schedule is not None:
        max_parts = get_max_parts(schedule, batch)
        grid = (num_heads, max_parts, num_blocks)
        # The sums are followed by the maximum and the normalizer (m_i, l_i) of each row of a part.
        num_sums = max_parts * num_query_heads * num_tokens if max_parts > batch else 0
        partial_sums = allocate((num_sums * (out_sizes.dim + 2),), torch.float32, device)
    launch(
        _attend, grid, tensors, schedule, out, partial_sums, batch, num_tokens, args.start,
        args.stop, args.window, args.factors, args.query_strides, *args.strides,
        **args.make_options(config),
    )  # fmt: skip
    if max_parts > batch:
        values = tensors.k if constants.latent else tensors.v
        # A program needs all channels that a rotation mixes.
        num_channels = max(min(MAX_CHANNELS.value, out_sizes.width), out_sizes.rotation_size)
        grid = (args.workload.rows, num_heads * (out_sizes.width // num_channels), batch)
        launch(
            _combine, grid, schedule, partial_sums, tensors.sinks, values.static_scale, out,
            num_tokens, max_parts, args.factors.out, CALL=constants, WIDTH=num_channels,
            num_warps=1,
        )  # fmt: skip
    return out


def _estimate_call_programs(args: AttentionArgs, config: LaunchConfig) -> int:
    """Return the number of `_attend` programs per SM that a schedule assumes."""
    workload = args.workload
    # The number is only known for the launch parameters that `Family.resources` describes.
    is_unlisted = workload.has_float32_operands or workload.is_latent or workload.width > 256
    guessed_config = config if is_unlisted or config.rows > FEW_ROWS else None
    return estimate_programs(args.target, config.rows, guessed_config, latent=workload.is_latent)


@triton.jit(
    do_not_specialize=[
        "batch",
        "start",
        "stop",
        "window",
        "table_stride",
        "mask_batch_stride",
        "mask_head_stride",
        "mask_token_stride",
        "bias_batch_stride",
        "bias_head_stride",
        "bias_token_stride",
    ],
    # Prompts vary in length. A single token is a constant.
    do_not_specialize_on_alignment=["num_tokens"],
)
def _attend(
    tensors, schedule_ptr, out_ptr, partial_ptr, batch, num_tokens, start, stop, window, factors,
    query_strides, table_stride, mask_batch_stride, mask_head_stride, mask_token_stride,
    bias_batch_stride, bias_head_stride, bias_token_stride, CALL: tl.constexpr,
):  # fmt: skip
    """Compute attention over a sequence, or over one part of it.

    A sequence with a single part gets its output. Each part of a split sequence writes partial
    sums. The grid is KV heads, parts, and blocks of query rows. Without a schedule it has one axis,
    because the second and third axes are limited to 65535: KV heads (fastest), sequences, and
    blocks of query rows in reverse order.

    Args:
        tensors: Pointers, see `AttentionTensors`.
        schedule_ptr: Schedule, `[max_parts + B, 4]`, int32, see schedule.py. None means that no
            sequence is split, and that `partial_ptr` is None.
        out_ptr: Output, `[B, T, Hq, out_dim]`, in the query's dtype.
        partial_ptr: Partial sums by index, `[max_parts, Hkv, rows, out_dim]`, followed by their
            maxima m_i and normalizers l_i, `[max_parts, Hkv, rows, 2]`, float32.
        batch, num_tokens: B and T.
        start, stop, window: As in `ops.attend`.
        factors: See `Factors`.
        query_strides, mask_batch_stride, ..., bias_token_stride: Strides of batch, head and token.
        table_stride: Batch stride of the block table.
        CALL: See `Constants`.
    """
    SWAPPED: tl.constexpr = CALL.config.swapped
    NUM_HEADS: tl.constexpr = CALL.num_heads
    h = tl.program_id(0)
    if schedule_ptr is None:
        b = h // NUM_HEADS % batch
        # The last rows attend to the most tokens, so they start first.
        num_blocks = tl.cdiv(CALL.group_size * num_tokens, CALL.config.rows)
        block = num_blocks - 1 - h // NUM_HEADS // batch
        h = h % NUM_HEADS
        low = 0
        high = stop
    else:
        block = tl.program_id(2)
        part_ptr = schedule_ptr + tl.program_id(1) * 4
        # All loads come before the branch, so that none of them waits for another.
        b = tl.load(part_ptr)
        low = tl.load(part_ptr + 1)
        high = tl.minimum(tl.load(part_ptr + 2), stop)
        sums_index = tl.load(part_ptr + 3)
        if b < 0:
            return
    length = tl.load(tensors.lengths + b)
    rows = find_rows(b, h, block, num_tokens, length, CALL)
    strides = Strides(
        query_strides,
        table_stride,
        (mask_batch_stride, mask_head_stride, mask_token_stride),
        (bias_batch_stride, bias_head_stride, bias_token_stride),
    )
    span = Span(low, tl.minimum(high, length), start, window)
    acc, m_i, l_i = attend_rows(tensors, factors, rows, span, strides, CALL)
    # `attend_rows` has quarters of latents, unless the output is rotated.
    NUM_SUMS: tl.constexpr = 4 if CALL.latent and CALL.out.rotation_size == 1 else 1
    WIDTH: tl.constexpr = CALL.out.width // NUM_SUMS
    d = tl.arange(0, WIDTH)
    if schedule_ptr is None or sums_index < 0:
        for i in tl.static_range(NUM_SUMS):
            write_rows(
                out_ptr, acc[i], i * WIDTH + d, m_i, l_i, tensors, factors, rows, num_tokens, CALL
            )
    else:
        num_rows = CALL.group_size * num_tokens
        row_index = ((sums_index * CALL.num_heads + h) * num_rows + rows.row).to(tl.int64)
        sum_ptrs = per_row(partial_ptr + row_index * CALL.out.dim, SWAPPED) + per_column(d, SWAPPED)
        for i in tl.static_range(NUM_SUMS):
            in_head = per_row(rows.exists, SWAPPED) & per_column(
                d < CALL.out.dim - i * WIDTH, SWAPPED
            )
            tl.store(sum_ptrs + i * WIDTH, acc[i], mask=in_head)
        stats_ptr = _point_to_stats(partial_ptr, tl.num_programs(1), num_tokens, CALL)
        tl.store(stats_ptr + row_index * 2, m_i, mask=rows.exists)
        tl.store(stats_ptr + row_index * 2 + 1, l_i, mask=rows.exists)


@triton.jit
def _point_to_stats(partial_ptr, max_parts, num_tokens, CALL: tl.constexpr):
    """Return the pointer to m_i and l_i of the first row of the first part."""
    sums_per_part = CALL.num_heads * CALL.group_size * CALL.out.dim * num_tokens
    return partial_ptr + max_parts.to(tl.int64) * sums_per_part


@triton.jit(do_not_specialize=["num_tokens", "max_parts"])
def _combine(
    schedule_ptr, partial_ptr, sinks_ptr, static_scale_ptr, out_ptr, num_tokens, max_parts,
    out_factor, CALL: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Merge the partial sums of sequences with several parts, and write the output.

    The grid is query rows, KV heads times groups of WIDTH channels, and sequences.

    Args:
        schedule_ptr, partial_ptr, out_ptr, num_tokens: As in `_attend`.
        sinks_ptr: Attention sinks, `[Hq]`, floating, or None.
        static_scale_ptr: Static scale of the values, `[Hkv, out_dim]`, float32, or None.
        out_factor: `Factors.out`.
        CALL: `Constants` without `config`.
        WIDTH: Number of channels of a program, a power of two.
    """
    b = tl.program_id(2)
    h = tl.program_id(1) % CALL.num_heads
    row = tl.program_id(0)
    first_sums_index = tl.load(schedule_ptr + (max_parts + b) * 4)
    num_parts = tl.load(schedule_ptr + (max_parts + b) * 4 + 1)
    if num_parts == 1:
        return
    num_rows = CALL.group_size * num_tokens
    stats_ptr = _point_to_stats(partial_ptr, max_parts, num_tokens, CALL)
    PARTS_AT_ONCE: tl.constexpr = LOAD_SIZE // (WIDTH if WIDTH > MAX_CHANNELS else MAX_CHANNELS)
    i = tl.arange(0, PARTS_AT_ONCE)
    d = tl.program_id(1) // CALL.num_heads * WIDTH + tl.arange(0, WIDTH)
    in_head = d < CALL.out.dim
    acc = tl.zeros([1, WIDTH], tl.float32)
    m_i = tl.full([1], float("-inf"), tl.float32)
    l_i = tl.zeros([1], tl.float32)
    for first in range(0, num_parts, PARTS_AT_ONCE):
        in_range = first + i < num_parts
        row_index = (((first_sums_index + first + i) * CALL.num_heads + h) * num_rows + row).to(
            tl.int64
        )
        part_m = tl.load(stats_ptr + row_index * 2, mask=in_range, other=float("-inf"))
        part_l = tl.load(stats_ptr + row_index * 2 + 1, mask=in_range, other=0.0)
        part_acc = tl.load(
            partial_ptr + (row_index * CALL.out.dim)[:, None] + d[None, :],
            mask=in_range[:, None] & in_head[None, :],
            other=0.0,
        )
        m_new = tl.maximum(m_i, tl.max(part_m, 0))
        m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m_i - m_finite)
        weight = tl.exp2(part_m - m_finite)
        l_i = l_i * alpha + tl.sum(part_l * weight, 0)
        acc = acc * alpha + tl.sum(part_acc * weight[:, None], 0)[None, :]
        m_i = m_new
    head = h * CALL.group_size + row % CALL.group_size
    heads = head + tl.zeros([1], tl.int32)
    out = finish_rows(
        acc, m_i, l_i, sinks_ptr, static_scale_ptr, h, heads, d, out_factor, CALL, SWAPPED=False
    )
    token = b * num_tokens + row // CALL.group_size
    offset = (token * (CALL.num_heads * CALL.group_size) + head).to(tl.int64) * CALL.out.dim
    out_ptrs = out_ptr + offset + d[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=in_head[None, :])
