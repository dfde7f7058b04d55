"""One layer of one step: new tokens are stored, then all queries attend to the stored bytes."""

import torch

from .. import ops
from ..ops import AttentionSpec, Pages
from .config import LayerStorage
from .layout import EnginePages
from .step import MAX_BATCH, AttendBatch, LayerWork, RingChunk

_Pair = tuple[torch.Tensor, torch.Tensor]


class StoredLayer:
    """One layer of an engine, with `pages` of the layout, stored as its LayerStorage says."""

    def __init__(
        self, pages: Pages, storage: LayerStorage, layout: EnginePages, backend: str
    ) -> None:
        k, v = (
            side._replace(static_scale=scale, format=plan.format, rotated=plan.rotated)
            for side, scale, plan in zip(
                (pages.k, pages.v), (storage.k, storage.v), storage.plan, strict=True
            )
        )
        self.pages, self.plan = pages._replace(k=k, v=v), storage.plan
        self._center, self._layout, self._backend = storage.center, layout, backend

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        work: LayerWork,
        spec: AttentionSpec,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store a step's keys and values. Return the attention `[1, N, Hq, D]`, 0 for padding.

        Args:
            query: Queries, `[1, Hq, N, D]`. Tokens after the tokens of the step are padding.
            key: Keys, `[1, Hkv, N, D]`. None if a different layer has stored keys and values.
            value: As `key`, for the values.
            work: The operations of the step.
            spec: Causal attention without a mask. Its window must be 0 if the pages are a ring.
            out: Tensor to write the result to, contiguous or not. None makes a new one.

        Raises:
            ConfigError: Keys or values do not have the sizes of the pages.
        """
        tokens = query.shape[2]
        if out is None:
            out = query.new_empty((1, tokens, query.shape[1], self._layout.dim))
        if tokens > work.count:
            # Attention skips padding, whose results must not be NaN for the model's next module.
            out[:, work.count :] = 0
        if key is not None and value is not None:
            self._layout.check_shapes(key, value)
            self._write(key, value, work)
        for batch in work.batches:
            self._attend_batch(query, batch, spec, out)
        for chunk in work.chunks:
            # Engines with rings have no layers that share the keys of a different layer.
            assert key is not None
            assert value is not None
            self._attend_chunk(query, key, value, chunk, spec, out)
        return out

    def _write(self, key: torch.Tensor, value: torch.Tensor, work: LayerWork) -> None:
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
            pages = self._centered(self.pages._replace(table=work.table[part]))
            ops.write(pages, key[part], value[part], work.ends[part], self._backend)

    def _attend_batch(
        self, query: torch.Tensor, batch: AttendBatch, spec: AttentionSpec, out: torch.Tensor
    ) -> None:
        size = len(batch.lengths)
        if batch.tokens is None:
            queries = query[:, :, :size].transpose(0, 2)  # [B, Hq, 1, D]
        else:
            chosen = query[0].index_select(1, batch.tokens)
            queries = chosen.view(-1, size, batch.count, query.shape[3]).transpose(0, 1)
        pages = self._centered(self.pages._replace(table=batch.table), spec)
        spec = spec._replace(causal=batch.causal)
        plan = batch.plan(self._backend, self._layout.heads, queries.shape[1], spec.window)
        result = ops.attend(
            queries, pages, batch.lengths, 0, batch.stop, spec, plan=plan, backend=self._backend
        ).flatten(0, 1)  # [B * T, Hq, D]
        if batch.targets is None:
            out[0, :size] = result
            return
        if batch.used is not None:
            result = result.index_select(0, batch.used)
        out[0].index_copy_(0, batch.targets, result)

    def _attend_chunk(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, chunk: RingChunk,
        spec: AttentionSpec, out: torch.Tensor,
    ) -> None:  # fmt: skip
        """Gather old and new tokens in order in scratch pages, and copy the last ones back."""
        before, size = len(chunk.old[0]), self._layout.slots
        stop = before + chunk.tokens
        count = -(-stop // size)
        memory = query.new_zeros(count * self._layout.bytes_per_page, dtype=torch.uint8)
        table = torch.arange(count, dtype=torch.int32, device=query.device)[None]
        scratch = self._layout.carve(memory)
        scratch = scratch._replace(k=self.pages.k, v=self.pages.v, table=table)
        position = torch.arange(stop, device=query.device)
        page, slot = position // size, position % size
        _copy_tokens(self.pages, chunk.old, scratch, (page[:before], slot[:before]))
        span = slice(chunk.first, chunk.first + chunk.tokens)
        lengths = chunk.before + chunk.tokens
        ops.write(
            self._centered(scratch), key[:, :, span], value[:, :, span], lengths, self._backend
        )
        out[:, span] = ops.attend(
            query[:, :, span], self._centered(scratch, spec), lengths, 0, stop,
            spec._replace(window=chunk.window), backend=self._backend,
        )  # fmt: skip
        kept = stop - len(chunk.kept[0])
        _copy_tokens(scratch, (page[kept:], slot[kept:]), self.pages, chunk.kept)

    def _centered(self, pages: Pages, spec: AttentionSpec | None = None) -> Pages:
        """Return pages with the layer's center of K for each sequence of their table.

        Attention with `spec` needs it only if some logits do not have the center, because the
        softmax ignores a constant in all logits of a row.
        """
        needed = spec is None or spec.softcap or spec.sinks is not None
        if self._center is None or not needed:
            return pages
        centers = self._center.expand(len(pages.table), -1, -1).contiguous()
        return pages._replace(k=pages.k._replace(center=centers))


def _copy_tokens(source: Pages, read: _Pair, target: Pages, written: _Pair) -> None:
    """Copy stored tokens, byte by byte. `read` and `written` are their pages and slots."""
    (page, slot), (to_page, to_slot) = read, written
    target.k_codes[to_page, :, to_slot] = source.k_codes[page, :, slot]
    target.v_codes[to_page, :, :, to_slot] = source.v_codes[page, :, :, slot]
    if source.token_scales is not None and target.token_scales is not None:
        target.token_scales[to_page, :, to_slot] = source.token_scales[page, :, slot]
