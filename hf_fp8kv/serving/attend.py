"""One layer of one step: new tokens are stored, then all queries attend to what is stored."""

from collections.abc import Callable

import torch

from .. import ops
from ..errors import ConfigError
from ..ops import AttentionSpec, Pages, StoredSide
from .config import LayerNumbers
from .layout import PageLayout, Stored
from .step import MAX_BATCH, AttendBatch, LayerWork, RingChunk

__all__ = ["attend_layer"]


def attend_layer(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    calls: LayerWork,
    stored: Stored,
    numbers: LayerNumbers,
    layout: PageLayout,
    backend: str,
    *,
    window: int | None,
    scaling: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the attention of every token of a step; its keys and values are then stored.

    Args:
        query: `[1, Hq, N, D]`; tokens past those of the step are padding.
        key: `[1, Hkv, N, D]`.
        value: `[1, Hkv, N, D]`.
        calls: what to do.
        stored: the layer's pages.
        numbers: its static scales and center.
        layout: of a page.
        backend: a key of `ops.BACKENDS`.
        window: the sliding window in tokens, or None.
        scaling: what `q k` is multiplied by.
        softcap: of the logits; 0: none.
        sinks: `[Hq]`, or None.

    Returns:
        `[1, N, Hq, D]`; zero for padding.
    """
    _check(key, value, layout)
    if numbers.k_center is not None:
        # In float32, as the operation itself would do it: the same bytes are stored.
        key = key.float() - numbers.k_center[None, :, None]
    table = calls.table
    pages = _pages(stored, numbers, layout, table)
    _write(pages, key, value, calls, backend)
    # A softmax does not see what is added to all logits of a row, unless something is not added to.
    center = numbers.k_center if softcap or sinks is not None else None

    def run(
        query: torch.Tensor, pages: Pages, lengths: torch.Tensor, stop: int, causal: bool,
        window: int, plan: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        if center is not None:
            spread = center.expand(len(query), -1, -1).contiguous()
            pages = pages._replace(k=pages.k._replace(center=spread))
        spec = AttentionSpec(scaling, causal, window, softcap, sinks)
        return ops.attend(query, pages, lengths, 0, stop, spec, plan=plan, backend=backend)

    tokens = query.shape[2]
    shape = (1, tokens, query.shape[1], layout.dim)
    # Padding is never computed, and must not carry NaN into what the model computes of it.
    out = query.new_empty(shape) if tokens == calls.count else query.new_zeros(shape)
    for call in calls.batches:
        _attend(query, pages, call, out, layout, backend, run)
    for chunk in calls.chunks:
        _attend_chunk(query, key, value, pages, chunk, out, layout, backend, window, run)
    return out


_Run = Callable[
    [torch.Tensor, Pages, torch.Tensor, int, bool, int, torch.Tensor | None], torch.Tensor
]


def _pages(stored: Stored, numbers: LayerNumbers, layout: PageLayout, table: torch.Tensor) -> Pages:
    k = StoredSide(
        stored.k, stored.k_token_scales, numbers.k_static_scale, None, layout.key_format,
        layout.dim,
    )  # fmt: skip
    v = StoredSide(
        stored.v, stored.v_token_scales, numbers.v_static_scale, None, layout.value_format,
        layout.dim,
    )  # fmt: skip
    return Pages(k, v, table)


def _check(key: torch.Tensor, value: torch.Tensor, layout: PageLayout) -> None:
    wanted = (1, layout.heads, layout.dim)
    for name, x in (("keys", key), ("values", value)):
        if (x.shape[0], x.shape[1], x.shape[3]) != wanted:
            raise ConfigError(
                f"expected {name} [1, {layout.heads}, N, {layout.dim}], for which the engine has "
                f"planned its pages, got {tuple(x.shape)}; this model cannot run with continuous "
                "batching, use generate() with FP8PagedCache"
            )


def _write(
    pages: Pages, key: torch.Tensor, value: torch.Tensor, calls: LayerWork, backend: str
) -> None:
    """Each token is a sequence of its own, of one page, which already holds the slots before it."""
    count = len(calls.slots)
    if not count:
        return
    if calls.written is None:
        key, value = key[:, :, : calls.count], value[:, :, : calls.count]
    else:
        key, value = key.index_select(2, calls.written), value.index_select(2, calls.written)
    key, value = key.permute(2, 1, 0, 3), value.permute(2, 1, 0, 3)
    for at in range(0, count, MAX_BATCH):
        part = slice(at, at + MAX_BATCH)
        table = calls.table[part]
        ops.write(pages._replace(table=table), key[part], value[part], calls.slots[part], backend)


def _attend(
    query: torch.Tensor,
    pages: Pages,
    call: AttendBatch,
    out: torch.Tensor,
    layout: PageLayout,
    backend: str,
    run: _Run,
) -> None:
    pages = pages._replace(table=call.table)
    batch = len(call.lengths)
    if call.tokens is None:
        queries = query[:, :, :batch].transpose(0, 2)  # [B, Hq, 1, D]
    else:
        chosen = query[0].index_select(1, call.tokens)
        queries = chosen.view(-1, batch, call.count, query.shape[3]).transpose(0, 1)
    found = run(
        queries, pages, call.lengths, call.stop, call.causal, 0, call.plan(backend, layout.heads)
    ).flatten(0, 1)  # [B * T, Hq, D]
    if call.targets is None:
        out[0, :batch] = found
        return
    if call.used is not None:
        found = found.index_select(0, call.used)
    out[0].index_copy_(0, call.targets, found)


def _attend_chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: Pages,
    chunk: RingChunk,
    out: torch.Tensor,
    layout: PageLayout,
    backend: str,
    window: int | None,
    run: _Run,
) -> None:
    """Old tokens in order, then the new ones, in pages of their own; the last ones go back."""
    before, stop = len(chunk.old[0]), len(chunk.old[0]) + chunk.tokens
    size, device = layout.slots, query.device
    count = -(-stop // size)
    own = layout.carve(query.new_zeros(count * layout.bytes_per_page, dtype=torch.uint8))
    table = torch.arange(count, dtype=torch.int32, device=device)[None]
    mine = Pages(
        pages.k._replace(codes=own.k, token_scales=own.k_token_scales),
        pages.v._replace(codes=own.v, token_scales=own.v_token_scales),
        table,
    )
    position = torch.arange(stop, device=device)
    place = (position // size, position % size)
    _copy(pages, chunk.old, mine, (place[0][:before], place[1][:before]))
    span = slice(chunk.first, chunk.first + chunk.tokens)
    ops.write(mine, key[:, :, span], value[:, :, span], chunk.before, backend)
    ends = chunk.before + chunk.tokens
    found = run(query[:, :, span], mine, ends, stop, True, window or 0, None)
    out[:, span] = found
    kept = len(chunk.kept[0])
    _copy(mine, (place[0][stop - kept :], place[1][stop - kept :]), pages, chunk.kept)


_Places = tuple[torch.Tensor, torch.Tensor]


def _copy(source: Pages, at: _Places, target: Pages, to: _Places) -> None:
    """Stored tokens, byte by byte."""
    target.k.codes[to[0], :, to[1]] = source.k.codes[at[0], :, at[1]]
    target.v.codes[to[0], :, :, to[1]] = source.v.codes[at[0], :, :, at[1]]
    for theirs, ours in ((source.k, target.k), (source.v, target.v)):
        if theirs.token_scales is not None and ours.token_scales is not None:
            ours.token_scales[to[0], :, to[1]] = theirs.token_scales[at[0], :, at[1]]
