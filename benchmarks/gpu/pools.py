"""Make random pages, and check the results that contenders compute from them."""

import functools
import math
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from hf_fp8kv.formats import AUTO, FORMATS
from hf_fp8kv.ops import Pages, StoredSide, reference
from hf_fp8kv.ops.blocks import locate_pages, pack_pages, read_rows

from .shapes import Case, Heads, Kind
from .stage import Stage

PAGE_SIZE = 64
# Number of query tokens that are checked at the beginning and at the end of many.
MAX_CHECKED = 128
# Number of query heads of a KV head that the reference computes at once.
CHECKED_HEADS = 16


@functools.lru_cache(maxsize=4)
def _make_sample(kind: Kind, heads: Heads, count: int, device: torch.device) -> Pages:
    """Return `count` pages of normal random values, which the reference wrote."""
    v_dim, v_format = (heads.positions, AUTO) if heads.positions else (heads.dim, kind.format)
    tokens = count * PAGE_SIZE

    def side(
        dim: int, fmt: str, steps: tuple[float, float], *shape: int
    ) -> tuple[StoredSide, torch.Tensor]:
        dtype = torch.bfloat16 if fmt == AUTO else torch.uint8
        codes = torch.empty((count, heads.kv, *shape), dtype=dtype, device=device)
        scale = None
        if kind.static and fmt != AUTO:
            # Each head has a different scale. Normal random values reach about 5.
            scale = 5.5 / FORMATS[fmt].max * torch.linspace(*steps, heads.kv, device=device)
            scale = scale[:, None].expand(-1, dim).contiguous()
        return StoredSide(scale, None, fmt, dim), codes

    k = side(heads.dim, kind.format, (1, 1.5), PAGE_SIZE, heads.dim)
    v = side(v_dim, v_format, (1.5, 1), v_dim, PAGE_SIZE)
    scales = None
    if kind.format != AUTO and not kind.static:
        shape = (count, heads.kv, PAGE_SIZE, 2)
        scales = torch.empty(shape, dtype=torch.bfloat16, device=device)
    table = torch.arange(count, dtype=torch.int32, device=device)[None]
    pages = pack_pages(*k, *v, scales, table)
    key, value = (
        torch.randn(1, heads.kv, tokens, dim, dtype=torch.bfloat16, device=device)
        for dim in (heads.dim, v_dim)
    )
    reference.write(pages, key, value, torch.tensor([tokens], dtype=torch.int32, device=device))
    return pages


def pages_for(stage: Stage, kind: Kind, case: Case, layers: int, count: int) -> list[Pages]:
    """Return pages of `layers` layers that share a block table, as in a model.

    The pages of a sequence are scattered over the pool. `count` pages differ.
    """
    sample = _make_sample(kind, case.heads, count, stage.device)
    counts = [-(-length // PAGE_SIZE) for length in case.lengths]
    order = torch.randperm(sum(counts), device=stage.device).int()
    table = torch.nn.utils.rnn.pad_sequence(order.split(counts), batch_first=True, padding_value=-1)
    layer_pages = []
    for _ in range(layers):
        sampled = torch.randint(0, count, (len(order),), device=stage.device)
        block = sample.block.index_select(0, sampled)
        pages = sample._replace(block=block, offsets=locate_pages([block]), table=table)
        layer_pages.append(pages)
    return layer_pages


def make_dense(stage: Stage, case: Case, layers: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return random dense K and V of each layer, `[B, Hkv, N, D]`, bf16.

    Each sequence of each layer has a separate pair, `[1, Hkv, N, D]`, if lengths differ.
    """
    batch, lengths = len(case.lengths), case.lengths[:1]
    if case.is_ragged:
        batch, lengths = 1, case.lengths
    shapes = [(batch, case.heads.kv, length, case.heads.dim) for length in lengths] * layers
    return [(stage.randn(*shape), stage.randn(*shape)) for shape in shapes]


def relative_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest relative RMS error of a sequence, infinite if a value is not finite."""
    axes = tuple(range(1, output.ndim))
    output, expected = output.double(), expected.double()
    error = ((output - expected).square().mean(axes) / expected.square().mean(axes)).sqrt().max()
    return float(error) if bool(error.isfinite()) else float("inf")


def check(
    output: torch.Tensor, query: torch.Tensor, pages: Pages, case: Case,
    projection: torch.Tensor | None = None,
) -> float:  # fmt: skip
    """Return the error of an output relative to the reference on the same bytes.

    The check covers the first, the last, the longest and a random sequence. Each is checked in one
    KV head, or in some query heads if the KV head has many, because the reference does not fit in
    memory for all. All other values must be finite.

    Args:
        output: Output of the contender, `[B, T, Hq, D]`.
        query: Queries, `[B, Hq, T, D]`.
        pages: Pages that the contender read.
        case: The case.
        projection: Weights that multiplied the heads of the output, `[Hq, V, D]`.
    """
    if not bool(output.isfinite().all()):
        return float("inf")
    batch, heads, tokens = len(case.lengths), case.heads, case.tokens
    longest = max(range(batch), key=lambda b: case.lengths[b])
    groups = heads.query // heads.kv
    count = groups if groups <= CHECKED_HEADS else math.gcd(groups, CHECKED_HEADS)
    parts = heads.query // count
    checked = {(0, 0), (batch - 1, parts - 1), (longest, parts // 2)}
    checked.add((random.randrange(batch), random.randrange(parts)))
    worst = 0.0
    for b, part in checked:
        rows = slice(part * count, (part + 1) * count)
        head_pages = _select_head(pages, b, rows.start // groups)
        for first, last in {(0, min(MAX_CHECKED, tokens)), (max(tokens - MAX_CHECKED, 0), tokens)}:
            # Queries are the last stored tokens. Earlier queries attend to a shorter sequence.
            length = case.lengths[b] - tokens + last
            spec = case.attention_spec()
            if case.padding:
                position = torch.arange(length, device=query.device)
                spec = spec._replace(mask=(position >= case.padding[b])[None, None, None])
            lengths = torch.tensor([length], dtype=torch.int32, device=query.device)
            expected = reference.attend(
                query[b : b + 1, rows, first:last], head_pages, lengths, 0, length, spec
            )
            if projection is not None:
                expected = torch.einsum("bthr,hvr->bthv", expected, projection[rows])
            worst = max(worst, relative_error(output[b : b + 1, first:last, rows], expected))
    return worst


def _select_head(pages: Pages, sequence: int, head: int) -> Pages:
    head_slice = slice(head, head + 1)
    k, v = (
        side._replace(
            static_scale=None if side.static_scale is None else side.static_scale[head_slice],
            center=None
            if side.center is None
            else side.center[sequence : sequence + 1, head_slice],
        )
        for side in (pages.k, pages.v)
    )
    used = pages.table.shape[1]
    rows = read_rows(pages._replace(table=pages.table[sequence : sequence + 1]), 0, used)
    parts = {name: part[:, head_slice] for name, part in pages.layout.split(rows).items()}
    table = torch.arange(used, dtype=torch.int32, device=rows.device)[None]
    return pack_pages(k, parts["k"], v, parts["v"], parts.get("token_scales"), table)


def check_dense(
    output: torch.Tensor, query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case,
    projection: torch.Tensor | None = None,
) -> float:  # fmt: skip
    """Return the error of `output`, `[B, Hq, T, D]`, for dense K and V, `[B, Hkv, N, D]`."""
    pages = pack_pages(
        StoredSide(None, None, AUTO, k.shape[3]), k, StoredSide(None, None, AUTO, v.shape[3]),
        v.transpose(2, 3), None, torch.arange(len(k), dtype=torch.int32, device=k.device)[:, None],
    )  # fmt: skip
    stored = replace(case, lengths=(k.shape[2],) * len(k))
    return check(output.transpose(1, 2), query, pages, stored, projection)


@contextmanager
def poison_memory() -> Iterator[None]:
    """Fill new memory with NaN inside the context."""
    before = torch.are_deterministic_algorithms_enabled()
    # torch fills new memory with NaN while it uses deterministic algorithms.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before)
