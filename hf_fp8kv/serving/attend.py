"""One layer of one step: new tokens are stored, then all queries attend to the stored bytes."""

from dataclasses import dataclass

import torch

from .. import ops
from ..errors import ConfigError
from ..ops import AttentionSpec, Pages
from .config import LayerStorage
from .layout import EnginePages, stored_as
from .step import MAX_BATCH, AttendBatch, LayerWork, RingChunk

_Pair = tuple[torch.Tensor, torch.Tensor]


def attend_layer(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    work: LayerWork,
    pages: Pages,
    storage: LayerStorage,
    layout: EnginePages,
    backend: str,
    *,
    scaling: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    reach: int = 0,
    deterministic: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Store the keys and values of a step. Return the attention `[1, N, Hq, D]`, 0 for padding.

    Args:
        query: Queries, `[1, Hq, N, D]`. Tokens after the tokens of the step are padding.
        key: Keys, `[1, Hkv, N, D]`. None if a different layer has stored keys and values.
        value: As `key`, for the values.
        sinks: Sinks, `[Hq]`, or None.
        reach: If no pages are a ring, the number of tokens that a query attends to, with its own as
            the last. 0 means all.
        deterministic: See `AttentionSpec`.
        out: Tensor to write the result to, contiguous or not. None makes a new one.

    Raises:
        ConfigError: Keys or values do not have the sizes of the pages.
    """
    tokens = query.shape[2]
    if out is None:
        out = query.new_empty((1, tokens, query.shape[1], layout.dim))
    if tokens > work.count:
        # Attention skips padding, whose results must not be NaN for the model's next module.
        out[:, work.count :] = 0
    # The softmax ignores a constant in all logits of a row, unless some logits do not have it.
    center = storage.center if softcap or sinks is not None else None
    spec = AttentionSpec(scaling, True, reach, softcap, sinks, deterministic=deterministic)
    layer = _Layer(stored_as(pages, storage), storage, center, spec, layout, backend)
    if key is not None and value is not None:
        check_shapes(key, value, layout)
        layer.write(key, value, work)
    for batch in work.batches:
        layer.attend_batch(query, batch, out)
    for chunk in work.chunks:
        # Engines with rings have no layers that share the keys of a different layer.
        assert key is not None
        assert value is not None
        layer.attend_chunk(query, key, value, chunk, out)
    return out


def check_shapes(key: torch.Tensor, value: torch.Tensor, layout: EnginePages) -> None:
    expected = (1, layout.heads, layout.dim)
    for name, x in (("keys", key), ("values", value)):
        if (x.shape[0], x.shape[1], x.shape[3]) != expected:
            raise ConfigError(
                f"expected {name} [1, {layout.heads}, N, {layout.dim}], for which the engine has "
                f"planned its pages, got {tuple(x.shape)}; this model cannot run with continuous "
                "batching, use generate() with FP8PagedCache"
            )


@dataclass(frozen=True)
class _Layer:
    pages: Pages
    storage: LayerStorage
    center: torch.Tensor | None  # to add to the logits
    spec: AttentionSpec
    layout: EnginePages
    backend: str

    def write(self, key: torch.Tensor, value: torch.Tensor, work: LayerWork) -> None:
        """Write each token as a sequence of one page, which already holds the slots before it."""
        count = len(work.ends)
        if not count:
            return
        if work.written is None:
            key, value = key[:, :, : work.count], value[:, :, : work.count]
        else:
            key, value = key.index_select(2, work.written), value.index_select(2, work.written)
        key, value = key.permute(2, 1, 0, 3), value.permute(2, 1, 0, 3)
        for start in range(0, count, MAX_BATCH):
            part = slice(start, start + MAX_BATCH)
            pages = self.pages._replace(table=work.table[part])
            pages = _with_center(pages, self.storage.center)
            ops.write(pages, key[part], value[part], work.ends[part], self.backend)

    def attend_batch(self, query: torch.Tensor, batch: AttendBatch, out: torch.Tensor) -> None:
        size = len(batch.lengths)
        if batch.tokens is None:
            queries = query[:, :, :size].transpose(0, 2)  # [B, Hq, 1, D]
        else:
            chosen = query[0].index_select(1, batch.tokens)
            queries = chosen.view(-1, size, batch.count, query.shape[3]).transpose(0, 1)
        pages = _with_center(self.pages._replace(table=batch.table), self.center)
        spec = self.spec._replace(causal=batch.causal)
        plan = batch.plan(self.backend, self.layout.heads, queries.shape[1], spec.window)
        result = ops.attend(
            queries, pages, batch.lengths, 0, batch.stop, spec, plan=plan, backend=self.backend
        ).flatten(0, 1)  # [B * T, Hq, D]
        if batch.targets is None:
            out[0, :size] = result
            return
        if batch.used is not None:
            result = result.index_select(0, batch.used)
        out[0].index_copy_(0, batch.targets, result)

    def attend_chunk(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, chunk: RingChunk,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        """Gather old and new tokens in order in scratch pages, and copy the last ones back."""
        before, size = len(chunk.old[0]), self.layout.slots
        stop = before + chunk.tokens
        count = -(-stop // size)
        memory = query.new_zeros(count * self.layout.bytes_per_page, dtype=torch.uint8)
        table = torch.arange(count, dtype=torch.int32, device=query.device)[None]
        scratch = stored_as(self.layout.carve(memory), self.storage)._replace(table=table)
        position = torch.arange(stop, device=query.device)
        page, slot = position // size, position % size
        _copy_tokens(self.pages, chunk.old, scratch, (page[:before], slot[:before]))
        span = slice(chunk.first, chunk.first + chunk.tokens)
        lengths = chunk.before + chunk.tokens
        centered = _with_center(scratch, self.storage.center)
        ops.write(centered, key[:, :, span], value[:, :, span], lengths, self.backend)
        spec = self.spec._replace(window=chunk.window)
        pages = _with_center(scratch, self.center)
        out[:, span] = ops.attend(
            query[:, :, span], pages, lengths, 0, stop, spec, backend=self.backend
        )
        kept = stop - len(chunk.kept[0])
        _copy_tokens(scratch, (page[kept:], slot[kept:]), self.pages, chunk.kept)


def _with_center(pages: Pages, center: torch.Tensor | None) -> Pages:
    """Return pages with the same center of K, `[Hkv, D]`, for each sequence of their table."""
    if center is None:
        return pages
    centers = center.expand(len(pages.table), -1, -1).contiguous()
    return pages._replace(k=pages.k._replace(center=centers))


def _copy_tokens(source: Pages, read: _Pair, target: Pages, written: _Pair) -> None:
    """Copy stored tokens, byte by byte. `read` and `written` are their pages and slots."""
    (page, slot), (to_page, to_slot) = read, written
    target.k_codes[to_page, :, to_slot] = source.k_codes[page, :, slot]
    target.v_codes[to_page, :, :, to_slot] = source.v_codes[page, :, :, slot]
    if source.token_scales is not None and target.token_scales is not None:
        target.token_scales[to_page, :, to_slot] = source.token_scales[page, :, slot]
