"""One step of an engine: the tokens of each request, and the operations that they need.

An engine packs the tokens of all requests of a step into one row, `[1, H, N, D]`. The operations
take sequences of equal length, `[B, H, T, D]`. So a step is split into a few batches: one of all
requests that decode, and one for each set of prompts of about the same length. Shorter prompts are
padded in front. A query before the start of its sequence attends to nothing. Its result is unused.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .. import ops
from ..ops.blocks import upload
from ..ops.visibility import find_first_visible

_Ints = npt.NDArray[np.int32]
_EMPTY = np.empty(0, np.int32)
# Prompts share a batch if the shortest has at least this fraction of the tokens of the longest.
MIN_LENGTH_RATIO = 0.7
# Maximum number of programs along the last axis of a CUDA grid.
MAX_BATCH = 65_535


@dataclass(frozen=True)
class AttendBatch:
    """A set of requests that attend in one operation."""

    # [B * T], int64: the tokens of the step that are the queries. A request with fewer than T
    # tokens has arbitrary tokens in front. None means all tokens in order, one per request.
    tokens: torch.Tensor | None
    result_rows: torch.Tensor | None  # int64, the results that are not padding. None means all
    target_tokens: torch.Tensor | None  # int64, tokens of the results. None if `tokens` is None
    num_queries: int  # queries per request, T
    table: torch.Tensor  # block tables, [B, M], int32
    lengths: torch.Tensor  # stored tokens including this step's tokens, [B], int32
    max_length: int  # the largest length, or an upper bound of it
    _schedules: dict[tuple[str, int, int, int], torch.Tensor | None] = field(default_factory=dict)

    def get_schedule(
        self, backend: str, num_heads: int, num_query_heads: int, window: int = 0
    ) -> torch.Tensor | None:
        """Return the schedule for these heads. None means that the backend has no schedules."""
        key = (backend, num_heads, num_query_heads, window)
        if key not in self._schedules:
            self._schedules[key] = ops.create_schedule(
                self.lengths,
                self.num_queries,
                window,
                0,
                num_heads,
                backend,
                num_query_rows=num_query_heads // num_heads * self.num_queries,
            )
        return self._schedules[key]


@dataclass(frozen=True)
class RingChunk:
    """New tokens of a request that overwrite tokens of its ring to which they still attend."""

    window: int  # window of the layer, in tokens
    first_token: int  # index of the first new token in the step
    num_new: int  # number of new tokens, T
    # [n], int64, pages and slots of the stored tokens that query 0 attends to
    old_slots: tuple[torch.Tensor, torch.Tensor]
    kept_slots: tuple[torch.Tensor, torch.Tensor]  # [m], int64, of the last m new tokens


@dataclass(frozen=True)
class LayerWork:
    """The operations of one step, the same in each layer of a kind."""

    written_tokens: torch.Tensor | None  # [W], int64, tokens to store one by one. None means all
    table: torch.Tensor  # [W, 1], int32, the page of each token to store
    slot_ends: torch.Tensor  # [W], int32, the slot of each token to store, plus 1
    batches: Sequence[AttendBatch]  # requests that attend to the stored pages
    chunks: Sequence[RingChunk]  # requests that use separate scratch pages
    num_tokens: int  # number of tokens of the step, N


@dataclass(frozen=True)
class _Request:
    num_stored: int  # tokens stored before the step
    num_new: int  # new tokens
    first_token: int  # index of the first new token in the step
    pages: tuple[_Ints, ...]  # page numbers, for each kind of layers


class EngineStep:
    """The requests of one step, in the order of their tokens.

    Layers of one kind have the same window, and share block tables. With a window, the pages of a
    request are a ring: position p is stored at position `p % window` of the ring.

    Args:
        windows: Sliding window of each kind of layers, in tokens. None means full attention.
        page_size: Tokens per page, S.
    """

    def __init__(self, windows: Sequence[int | None], page_size: int) -> None:
        self._windows = windows
        self._page_size = page_size
        self._requests: list[_Request] = []
        self._work: dict[tuple[int, torch.device], LayerWork] = {}
        self.num_tokens = 0  # number of tokens of the step, N

    def add(self, num_stored: int, num_new: int, pages: Sequence[Sequence[int]]) -> None:
        """Add a request of `num_new` tokens, with its page numbers for each kind of layers."""
        if not num_new:  # the engine accepts empty prompts, which attend to nothing
            return
        copied_pages = tuple(np.array(page_numbers, np.int32) for page_numbers in pages)
        self._requests.append(_Request(num_stored, num_new, self.num_tokens, copied_pages))
        self.num_tokens += num_new

    def get_work(self, kind: int, device: torch.device) -> LayerWork:
        """Return the operations of a layer of this kind, made once per step."""
        key = (kind, device)
        if key not in self._work:
            planner = _Planner(self._windows[kind], self._page_size, kind, device)
            self._work[key] = planner.plan_layer(self._requests, self.num_tokens)
        return self._work[key]


def make_decode_work(table: torch.Tensor, lengths: torch.Tensor, page_size: int) -> LayerWork:
    """Return the operations of a step with one token per request. The host reads no tensor.

    `table` is `[B, M]`, int32, and negative for unused pages. `lengths` is `[B]`, int32, including
    the tokens of this step. A length of 0 marks padding, a row without a request.
    """
    positions = (lengths - 1).clamp(min=0)
    written_table = table.gather(1, (positions // page_size)[:, None].long())
    # A row of padding may have the page of an earlier request, which must not be written.
    written_table = written_table.masked_fill(lengths[:, None] == 0, -1)
    batch = AttendBatch(None, None, None, 1, table, lengths, table.shape[1] * page_size)
    return LayerWork(None, written_table, positions % page_size + 1, [batch], [], len(lengths))


@dataclass(frozen=True)
class _Planner:
    """Plans the operations of one kind of layers."""

    window: int | None
    page_size: int
    kind: int  # index of the kind
    device: torch.device

    def upload(self, values: npt.ArrayLike, dtype: npt.DTypeLike) -> torch.Tensor:
        return upload(np.asarray(values, dtype), self.device)

    def plan_layer(self, requests: Sequence[_Request], num_step_tokens: int) -> LayerWork:
        wrapping = [request for request in requests if self.wraps_ring(request)]
        appending = [request for request in requests if not self.wraps_ring(request)]
        slots = [
            self.locate_slots(request, request.num_stored, request.num_stored + request.num_new)
            for request in appending
        ]
        page = np.concatenate([_EMPTY, *(request_page for request_page, _ in slots)])
        slot = np.concatenate([_EMPTY, *(request_slot for _, request_slot in slots)])
        written_tokens = None
        if wrapping:
            spans = [
                np.arange(request.first_token, request.first_token + request.num_new)
                for request in appending
            ]
            written_tokens = self.upload(np.concatenate([_EMPTY, *spans]), np.int64)
        return LayerWork(
            written_tokens,
            self.upload(page, np.int32)[:, None],
            self.upload(slot + 1, np.int32),
            [self.plan_batch(group, num_step_tokens) for group in group_by_length(appending)],
            [self.plan_chunk(request) for request in wrapping],
            num_step_tokens,
        )

    def wraps_ring(self, request: _Request) -> bool:
        """Return whether the new tokens overwrite tokens that the first new token attends to."""
        stop = request.num_stored + request.num_new
        return self.window is not None and request.num_new > 1 and stop > self.window

    def locate_slots(self, request: _Request, start: int, stop: int) -> tuple[_Ints, _Ints]:
        """Return pages and slots of positions `start` to `stop - 1`."""
        positions = np.arange(start, stop)
        if self.window is not None:
            positions %= self.window
        return (
            request.pages[self.kind][positions // self.page_size],
            (positions % self.page_size).astype(np.int32),
        )

    def plan_batch(self, group: list[_Request], num_step_tokens: int) -> AttendBatch:
        stops = [request.num_stored + request.num_new for request in group]
        lengths = [stop if self.window is None else min(stop, self.window) for stop in stops]
        page_counts = [-(-length // self.page_size) for length in lengths]
        table = np.full((len(group), max(page_counts)), -1, np.int32)
        for row, request, num_pages in zip(table, group, page_counts, strict=True):
            row[:num_pages] = request.pages[self.kind][:num_pages]
        return make_batch(
            group,
            num_step_tokens,
            self.upload(table, np.int32),
            self.upload(lengths, np.int32),
            max(lengths),
        )

    def plan_chunk(self, request: _Request) -> RingChunk:
        assert self.window is not None
        num_stored = request.num_stored
        length = num_stored + request.num_new

        def upload_slots(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
            page, slot = self.locate_slots(request, start, stop)
            return self.upload(page, np.int64), self.upload(slot, np.int64)

        old_slots = upload_slots(max(find_first_visible(num_stored, self.window), 0), num_stored)
        kept_slots = upload_slots(
            max(find_first_visible(length - 1, self.window), num_stored), length
        )
        return RingChunk(self.window, request.first_token, request.num_new, old_slots, kept_slots)


def make_batch(
    group: Sequence[Any],
    num_step_tokens: int,
    table: torch.Tensor,
    lengths: torch.Tensor,
    max_length: int,
) -> AttendBatch:
    """Return the operation of requests with about the same number of new tokens.

    Each request has `num_new` tokens of the step, from token `first_token` on. `table` is `[B, M]`,
    int32. `lengths` is `[B]`, int32, including this step's tokens. `max_length` is at least the
    largest length.
    """
    num_queries = max(request.num_new for request in group)
    tokens = rows = targets = None
    if num_queries > 1 or len(group) < num_step_tokens:
        # Shorter requests are padded in front. A query of the padding is before the start of its
        # sequence, or repeats an existing query. Its result is not used.
        offsets = np.arange(num_queries) - num_queries
        stops = np.array([request.first_token + request.num_new for request in group])[:, None]
        is_padding = np.array([request.num_new for request in group])[:, None] + offsets < 0
        queries = np.where(is_padding, stops - 1, stops + offsets).reshape(-1).astype(np.int64)
        tokens = targets = upload(queries, lengths.device)
        if is_padding.any():
            used_rows = np.flatnonzero(~is_padding).astype(np.int64)
            rows = upload(used_rows, lengths.device)
            targets = upload(queries[used_rows], lengths.device)
    return AttendBatch(tokens, rows, targets, num_queries, table, lengths, max_length)


def group_by_length(requests: Sequence[Any]) -> list[list[Any]]:
    """Split requests into sets of about equal `num_new`. Requests with one new token are a set."""
    groups: list[list[Any]] = []
    # The sort is stable, so ties keep their order.
    for request in sorted(requests, key=lambda request: -request.num_new):
        longest = groups[-1][0].num_new if groups else 0
        is_similar = longest and request.num_new >= MIN_LENGTH_RATIO * longest
        if is_similar and (request.num_new > 1) == (longest > 1) and len(groups[-1]) < MAX_BATCH:
            groups[-1].append(request)
        else:
            groups.append([request])
    return groups
