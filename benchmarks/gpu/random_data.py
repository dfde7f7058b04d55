"""Make pages and dense K and V for benchmarks and tests, and compute the errors of outputs."""

import functools
import math
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from hf_fp8kv.formats import AUTO, FORMATS, SidePlan
from hf_fp8kv.ops import Pages, StoredSide, reference
from hf_fp8kv.ops.blocks import locate_pages, read_rows
from hf_fp8kv.ops.page_layout import make_page_layout, pack_codes

from .shapes import Case, Heads, PageFormat
from .stage import Stage

PAGE_SIZE = 64
# Number of query tokens that are compared at the start and at the end of a longer query.
MAX_COMPARED_TOKENS = 128
# Maximum number of query heads of a KV head that are compared.
MAX_COMPARED_HEADS = 16
KVPair = tuple[torch.Tensor, torch.Tensor]


def pack_pages(
    k: StoredSide,
    k_codes: torch.Tensor,
    v: StoredSide,
    v_codes: torch.Tensor,
    token_scales: torch.Tensor | None,
    table: torch.Tensor,
) -> Pages:
    """Copy codes `[P, Hkv, S, Dk]` and `[P, Hkv, Dv, S]`, and dynamic scales, into new pages."""
    num_pages, num_heads, page_size, _ = k_codes.shape
    k_dtype = SidePlan(k.format).find_dtype(k_codes.dtype)
    v_dtype = SidePlan(v.format).find_dtype(v_codes.dtype)
    layout = make_page_layout(
        num_heads,
        page_size,
        k.head_dim,
        v.head_dim,
        k_dtype,
        v_dtype,
        has_scales=token_scales is not None,
    )
    block = k_codes.new_zeros((num_pages, layout.size), dtype=torch.uint8)
    regions = layout.split(block)
    regions["k"].copy_(pack_codes(k_codes, k_dtype))
    regions["v"].copy_(pack_codes(v_codes.mT, v_dtype).mT)
    if token_scales is not None:
        regions["token_scales"].copy_(token_scales)
    return Pages(
        k,
        v,
        block=block,
        table=table,
        offsets=locate_pages([block]),
        num_heads=num_heads,
        page_size=page_size,
        k_dtype=k_dtype,
        v_dtype=v_dtype,
        has_scales=token_scales is not None,
    )


@functools.lru_cache(maxsize=4)
def _make_sample(fmt: PageFormat, heads: Heads, num_pages: int, device: torch.device) -> Pages:
    """Return `num_pages` pages of normal random values, written by the reference."""
    # V of a layer with latents is the RoPE part in 16 bits.
    v_dim = heads.rope_dim or heads.dim
    v_format = AUTO if heads.rope_dim else fmt.dtype
    num_tokens = num_pages * PAGE_SIZE

    def make_side(
        dim: int, format_name: str, first_factor: float, last_factor: float
    ) -> StoredSide:
        """Return the metadata of K or V. The factors multiply the first and last head's scale."""
        if format_name == AUTO or not fmt.is_static:
            return StoredSide(None, None, format_name, dim)
        # Each head has a different scale. Normal random values reach about 5.
        scale = 5.5 / FORMATS[format_name].max
        scales = scale * torch.linspace(
            first_factor, last_factor, heads.num_kv_heads, device=device
        )
        return StoredSide(scales[:, None].expand(-1, dim).contiguous(), None, format_name, dim)

    sides = [make_side(heads.dim, fmt.dtype, 1, 1.5), make_side(v_dim, v_format, 1.5, 1)]
    has_scales = any(side.is_dynamic for side in sides)
    dtypes = [SidePlan(side.format).find_dtype(torch.bfloat16) for side in sides]
    layout = make_page_layout(heads.num_kv_heads, PAGE_SIZE, heads.dim, v_dim, *dtypes, has_scales)
    block = torch.zeros((num_pages, layout.size), dtype=torch.uint8, device=device)
    table = torch.arange(num_pages, dtype=torch.int32, device=device)[None]
    pages = Pages(
        *sides, block, table, locate_pages([block]), heads.num_kv_heads, PAGE_SIZE, *dtypes,
        has_scales,
    )  # fmt: skip
    key, value = (
        torch.randn(1, heads.num_kv_heads, num_tokens, dim, dtype=torch.bfloat16, device=device)
        for dim in (heads.dim, v_dim)
    )
    reference.write(pages, key, value, torch.tensor([num_tokens], dtype=torch.int32, device=device))
    return pages


def make_layer_pages(
    stage: Stage, fmt: PageFormat, case: Case, num_layers: int, num_pages: int
) -> list[Pages]:
    """Return pages of `num_layers` layers that share a block table, as in a model.

    The pages of a sequence are scattered over the pool, which repeats `num_pages` random pages.
    """
    sample = _make_sample(fmt, case.heads, num_pages, stage.device)
    page_counts = [-(-length // PAGE_SIZE) for length in case.lengths]
    tables = torch.randperm(sum(page_counts), device=stage.device).int().split(page_counts)
    table = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True, padding_value=-1)
    layer_pages = []
    for _ in range(num_layers):
        sample_pages = torch.randint(0, num_pages, (sum(page_counts),), device=stage.device)
        block = sample.block.index_select(0, sample_pages)
        layer_pages.append(sample._replace(block=block, offsets=locate_pages([block]), table=table))
    return layer_pages


def make_dense(stage: Stage, case: Case, num_layers: int) -> list[KVPair]:
    """Return random dense K and V of each layer, `[B, Hkv, N, D]`, bf16."""
    shape = (len(case.lengths), case.heads.num_kv_heads, case.lengths[0], case.heads.dim)
    return [(stage.randn(*shape), stage.randn(*shape)) for _ in range(num_layers)]


def compute_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest relative RMS error of a sequence, infinite if a value is not finite."""
    axes = tuple(range(1, output.ndim))
    difference = output.double() - expected.double()
    error = (difference.square().mean(axes) / expected.double().square().mean(axes)).sqrt().max()
    return float(error) if bool(error.isfinite()) else float("inf")


def compute_output_error(
    output: torch.Tensor, query: torch.Tensor, pages: Pages, case: Case,
    projection: torch.Tensor | None = None,
) -> float:  # fmt: skip
    """Return the error of an output relative to the reference on the same bytes.

    The first, the last, the longest and a random sequence are compared, each in one KV head. If the
    head has many query heads, only `MAX_COMPARED_HEADS` query heads are compared, because the
    reference for all heads does not fit in memory. The error is infinite if any value of the output
    is not finite.

    Args:
        output: Output of the contender, `[B, T, Hq, D]`.
        query: Queries, `[B, Hq, T, D]`.
        pages: Pages that the contender read.
        case: Heads, lengths and mask of the call.
        projection: Weights that project each head's output from `R` to `D` values, `[Hq, D, R]`.
    """
    if not bool(output.isfinite().all()):
        return float("inf")
    batch = len(case.lengths)
    num_new_tokens = case.num_new_tokens
    longest = case.lengths.index(max(case.lengths))
    heads_per_kv = case.heads.num_query_heads // case.heads.num_kv_heads
    has_many_heads = heads_per_kv > MAX_COMPARED_HEADS
    group_size = math.gcd(heads_per_kv, MAX_COMPARED_HEADS) if has_many_heads else heads_per_kv
    num_groups = case.heads.num_query_heads // group_size
    compared_pairs = {(0, 0), (batch - 1, num_groups - 1), (longest, num_groups // 2)}
    compared_pairs.add((random.randrange(batch), random.randrange(num_groups)))
    errors = []
    for sequence, group in compared_pairs:
        row = slice(sequence, sequence + 1)
        head_slice = slice(group * group_size, (group + 1) * group_size)
        head_pages = _select_head(pages, sequence, head_slice.start // heads_per_kv)
        num_compared = min(num_new_tokens, MAX_COMPARED_TOKENS)
        for start, stop in {(0, num_compared), (num_new_tokens - num_compared, num_new_tokens)}:
            # Queries are the last stored tokens. Earlier queries attend to a shorter sequence.
            length = case.lengths[sequence] - num_new_tokens + stop
            spec = case.make_attention_spec()
            if case.padding:
                positions = torch.arange(length, device=query.device)
                spec = spec._replace(mask=(positions >= case.padding[sequence])[None, None, None])
            lengths = torch.tensor([length], dtype=torch.int32, device=query.device)
            compared_query = query[row, head_slice, start:stop]
            expected = reference.attend(compared_query, head_pages, lengths, 0, length, spec)
            if projection is not None:
                expected = torch.einsum("bthr,hdr->bthd", expected, projection[head_slice])
            errors.append(compute_error(output[row, start:stop, head_slice], expected))
    return max(errors)


def _select_head(pages: Pages, sequence: int, head: int) -> Pages:
    """Return a copy of the pages of one sequence and one KV head."""
    head_slice = slice(head, head + 1)
    k, v = (
        side._replace(
            static_scale=None if side.static_scale is None else side.static_scale[head_slice],
            center=None if side.center is None else side.center[head_slice],
        )
        for side in (pages.k, pages.v)
    )
    num_pages = pages.table.shape[1]
    page_bytes = read_rows(pages._replace(table=pages.table[sequence : sequence + 1]), 0, num_pages)
    regions = {
        name: region[:, head_slice] for name, region in pages.layout.split(page_bytes).items()
    }
    table = torch.arange(num_pages, dtype=torch.int32, device=page_bytes.device)[None]
    return pack_pages(k, regions["k"], v, regions["v"], regions.get("token_scales"), table)


def compute_dense_error(
    output: torch.Tensor, query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case,
    projection: torch.Tensor | None = None,
) -> float:  # fmt: skip
    """Return the error of `output`, `[B, Hq, T, D]`, for dense K and V, `[B, Hkv, N, D]`."""
    pages = pack_pages(
        StoredSide(None, None, AUTO, k.shape[3]), k, StoredSide(None, None, AUTO, v.shape[3]),
        v.transpose(2, 3), None, torch.arange(len(k), dtype=torch.int32, device=k.device)[:, None],
    )  # fmt: skip
    dense_case = replace(case, lengths=(k.shape[2],) * len(k))
    return compute_output_error(output.transpose(1, 2), query, pages, dense_case, projection)


@contextmanager
def poison_memory() -> Iterator[None]:
    """Fill newly allocated memory with NaN inside the context."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    # torch fills new memory with NaN while it uses deterministic algorithms.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic)
