"""One layer of one step: store the new tokens, then attend to the stored bytes."""

import torch

from .. import ops
from ..ops import AttentionSpec, Pages
from ..ops.dense_prompts import attend_densely, is_dense_faster
from .config import LayerStorage
from .layout import EngineLayout
from .step import MAX_BATCH, AttendBatch, LayerWork, RingChunk

_Locations = tuple[torch.Tensor, torch.Tensor]  # page and slot of each of n tokens, both [n]


class StoredLayer:
    """One layer of an engine: `pages` in the layer's `layout`, with the scales of its `storage`."""

    def __init__(
        self, pages: Pages, storage: LayerStorage, layout: EngineLayout, backend: str
    ) -> None:
        k = pages.k._replace(static_scale=storage.k_scale, center=storage.center)
        v = pages.v._replace(static_scale=storage.v_scale)
        self.pages = pages._replace(k=k, v=v)
        self.plan = storage.plan
        self._layout = layout
        self._backend = backend

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        work: LayerWork,
        spec: AttentionSpec,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store a step's keys and values. Return the output, `[1, N, Hq, D]`, 0 for padding.

        Args:
            query: Queries, `[1, Hq, N, D]`. Tokens after the tokens of the step are padding.
            key: Keys, `[1, Hkv, N, D]`. None if another layer has stored keys and values.
            value: As `key`, for the values.
            work: The operations of the step.
            spec: Causal attention without a mask. `spec.window` must be 0 if the pages are a ring.
            out: Tensor for the output, contiguous or not. None allocates it.

        Raises:
            ConfigError: Keys or values do not have the sizes of the pages.
        """
        num_tokens = query.shape[2]
        if out is None:
            out = query.new_empty((1, num_tokens, query.shape[1], self._layout.head_dim))
        if num_tokens > work.num_tokens:
            # Attention does not write to padding, and the next module must not read NaN there.
            out[:, work.num_tokens :] = 0
        if key is not None and value is not None:
            self._layout.check_shapes(key, value)
            self._store_tokens(key, value, work)
            # Engines with rings have no layers that share the keys of another layer.
            for chunk in work.chunks:
                self._attend_chunk(query, key, value, chunk, spec, out)
        for batch in work.batches:
            self._attend_batch(query, batch, spec, out)
        return out

    def _store_tokens(self, key: torch.Tensor, value: torch.Tensor, work: LayerWork) -> None:
        """Store each token as the last token of a separate sequence of one page."""
        if work.written_tokens is None:
            key = key[:, :, : work.num_tokens]
            value = value[:, :, : work.num_tokens]
        else:
            key = key.index_select(2, work.written_tokens)
            value = value.index_select(2, work.written_tokens)
        key = key.permute(2, 1, 0, 3)
        value = value.permute(2, 1, 0, 3)
        for start in range(0, len(work.slot_ends), MAX_BATCH):
            rows = slice(start, start + MAX_BATCH)
            pages = self.pages._replace(table=work.table[rows])
            ops.write(pages, key[rows], value[rows], work.slot_ends[rows], self._backend)

    def _attend_batch(
        self, query: torch.Tensor, batch: AttendBatch, spec: AttentionSpec, out: torch.Tensor
    ) -> None:
        batch_size = len(batch.lengths)
        if batch.tokens is None:
            queries = query[:, :, :batch_size].transpose(0, 2)  # [B, Hq, 1, D]
        else:
            queries = query[0].index_select(1, batch.tokens)
            queries = queries.unflatten(1, (batch_size, batch.num_queries)).transpose(0, 1)
        pages = self.pages._replace(table=batch.table)
        # A single query attends to all stored tokens, in any order.
        spec = spec._replace(causal=batch.num_queries > 1)
        has_padding = batch.result_rows is not None
        if not has_padding and is_dense_faster(queries, batch.max_length, pages, spec):
            result = attend_densely(queries, pages, batch.lengths, spec, backend=self._backend)
        else:
            schedule = batch.get_schedule(
                self._backend, self._layout.num_heads, queries.shape[1], spec.window
            )
            result = ops.attend(
                queries,
                pages,
                batch.lengths,
                0,
                batch.max_length,
                spec,
                schedule=schedule,
                backend=self._backend,
            )
        result = result.flatten(0, 1)  # [B * T, Hq, D]
        if batch.target_tokens is None:
            out[0, :batch_size] = result
            return
        if batch.result_rows is not None:
            result = result.index_select(0, batch.result_rows)
        out[0].index_copy_(0, batch.target_tokens, result)

    def _attend_chunk(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        chunk: RingChunk,
        spec: AttentionSpec,
        out: torch.Tensor,
    ) -> None:
        """Attend to scratch pages that hold the old and new tokens in order.

        Afterwards, the kept tokens are copied back to the ring.
        """
        num_old = len(chunk.old_slots[0])
        page_size = self._layout.page_size
        num_tokens = num_old + chunk.num_new
        num_pages = -(-num_tokens // page_size)
        page_rows = query.new_zeros((num_pages, self._layout.bytes_per_page), dtype=torch.uint8)
        table = torch.arange(num_pages, dtype=torch.int32, device=query.device)[None]
        scratch = self._layout.view_pages(page_rows)._replace(
            k=self.pages.k, v=self.pages.v, table=table
        )
        positions = torch.arange(num_tokens, device=query.device)
        page_indices = positions // page_size
        slots = positions % page_size
        _copy_tokens(
            self.pages.regions,
            chunk.old_slots,
            scratch.regions,
            (page_indices[:num_old], slots[:num_old]),
        )
        span = slice(chunk.first_token, chunk.first_token + chunk.num_new)
        lengths = torch.full((1,), num_tokens, dtype=torch.int32, device=query.device)
        ops.write(scratch, key[:, :, span], value[:, :, span], lengths, self._backend)
        out[:, span] = ops.attend(
            query[:, :, span],
            scratch,
            lengths,
            0,
            num_tokens,
            spec._replace(window=chunk.window),
            backend=self._backend,
        )
        first_kept = num_tokens - len(chunk.kept_slots[0])
        _copy_tokens(
            scratch.regions,
            (page_indices[first_kept:], slots[first_kept:]),
            self.pages.regions,
            chunk.kept_slots,
        )


def _copy_tokens(
    source: dict[str, torch.Tensor],
    source_locations: _Locations,
    target: dict[str, torch.Tensor],
    target_locations: _Locations,
) -> None:
    """Copy the bytes of stored tokens between `Pages.regions` of the same layout."""
    page_indices, slots = source_locations
    target_pages, target_slots = target_locations
    target["k"][target_pages, :, target_slots] = source["k"][page_indices, :, slots]
    target["v"][target_pages, :, :, target_slots] = source["v"][page_indices, :, :, slots]
    if "token_scales" in source:
        target["token_scales"][target_pages, :, target_slots] = source["token_scales"][
            page_indices, :, slots
        ]
