"""One step of an engine: the tokens of each request, and the operations that they need.

An engine packs the tokens of all requests of a step into one row, `[1, H, N, D]`. The operations
take sequences of one length, `[B, H, T, D]`. So a step becomes a few batches: one of all requests
that decode, and one for each set of prompts of about the same length. Shorter prompts are padded in
front. A query before the start of its sequence attends to nothing, and its result is not used.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .. import ops
from ..ops.blocks import upload
from ..ops.visibility import first_visible

_Ints = npt.NDArray[np.int32]
# Prompts share a batch if the shortest has at least this share of the longest's tokens.
MIN_LENGTH_RATIO = 0.7
# Maximum number of programs along the last axis of a grid in CUDA.
MAX_BATCH = 65_535


@dataclass(frozen=True)
class AttendBatch:
    """A set of requests that attend in one operation."""

    # [B * T], int64: the step's tokens that are the queries. A request with fewer than T tokens has
    # any tokens in front. None means all tokens in order, one per request.
    tokens: torch.Tensor | None
    used: torch.Tensor | None  # int64, the results that count. None means all
    targets: torch.Tensor | None  # int64, the tokens of these results. None if `tokens` is None
    count: int  # T
    table: torch.Tensor  # [B, M], int32
    lengths: torch.Tensor  # [B], int32, stored tokens, including this step's
    stop: int  # the largest length
    causal: bool  # False for a full ring, which is in no order and completely visible
    _plans: dict[tuple[str, int, int, int], torch.Tensor | None] = field(default_factory=dict)

    def plan(
        self, backend: str, heads: int, query_heads: int, window: int = 0
    ) -> torch.Tensor | None:
        """Return the work plan for `heads` KV heads, made once for all layers.

        It is None for a backend without work plans.
        """
        key = (backend, heads, query_heads, window)
        if key not in self._plans:
            device = self.lengths.device
            query_rows = query_heads // heads * self.count
            rows = ops.plan_rows(backend, device, len(self.lengths), heads, None, query_rows)
            plan = None
            if rows is not None:
                plan = torch.empty((rows, 4), dtype=torch.int32, device=device)
                ops.make_plan(plan, self.lengths, self.count, window, 0, heads, backend)
            self._plans[key] = plan
        return self._plans[key]


@dataclass(frozen=True)
class RingChunk:
    """Several tokens of a request that overwrite tokens of its ring which they still attend to."""

    window: int  # of the layer, in tokens
    first: int  # of the step's tokens
    tokens: int  # T
    before: torch.Tensor  # [1], int32, n: the number of old tokens that the first one attends to
    old: tuple[torch.Tensor, torch.Tensor]  # [n], int64, pages and slots of the old tokens
    kept: tuple[torch.Tensor, torch.Tensor]  # [m], int64, pages and slots for the last m tokens


@dataclass(frozen=True)
class LayerWork:
    """The operations of one layer of a kind in a step."""

    written: torch.Tensor | None  # [W], int64: tokens that are stored one by one. None means all
    table: torch.Tensor  # [W, 1], int32, the page of each stored token
    ends: torch.Tensor  # [W], int32, one past its slot
    batches: Sequence[AttendBatch]  # requests that attend to the stored pages
    chunks: Sequence[RingChunk]  # requests that use separate scratch pages
    count: int  # tokens of the step, N


@dataclass(frozen=True)
class _Entry:
    past: int
    tokens: int
    first: int  # of the step's tokens
    pages: tuple[_Ints, ...]  # of each kind


class EngineStep:
    """The requests of one step, in the order of their tokens.

    Layers of one kind of attention share block tables. With a window, the pages of a request are a
    ring: position p is at place `p % window`.

    Args:
        windows: Sliding window of each kind of layers, in tokens. None means full attention.
        page_size: Slots per page, S.
    """

    def __init__(self, windows: Sequence[int | None], page_size: int) -> None:
        self._windows, self._page_size = windows, page_size
        self._entries: list[_Entry] = []
        self._work: dict[tuple[int, torch.device], LayerWork] = {}
        self.count = 0  # tokens of the step, N

    def add(self, past: int, tokens: int, pages: Sequence[Sequence[int]]) -> None:
        """Add a request with `past` stored tokens, and a copy of its `pages` of each kind."""
        if not tokens:  # an empty prompt, which the engine accepts, attends to nothing
            return
        copies = tuple(np.array(numbers, np.int32) for numbers in pages)
        self._entries.append(_Entry(past, tokens, self.count, copies))
        self.count += tokens

    def work(self, kind: int, device: torch.device) -> LayerWork:
        """Return the operations of a layer of this kind, made once per step."""
        key = (kind, device)
        if key not in self._work:
            planner = _Planner(self._windows[kind], self._page_size, kind, device)
            self._work[key] = planner.plan(self._entries, self.count)
        return self._work[key]


def decode_work(table: torch.Tensor, lengths: torch.Tensor, page_size: int) -> LayerWork:
    """Return the operations of a step in which every request has one token, from tensors alone.

    `table` is `[B, M]`, int32. Unused pages are below 0. `lengths` is `[B]`, int32, including this
    step's tokens. A length of 0 is padding, without a request.
    """
    before = (lengths - 1).clamp(min=0)
    page = table.gather(1, (before // page_size)[:, None].long())
    stop = table.shape[1] * page_size
    batch = AttendBatch(None, None, None, 1, table, lengths, stop, causal=False)
    return LayerWork(None, page, before % page_size + 1, [batch], [], len(lengths))


@dataclass(frozen=True)
class _Planner:
    """Makes the operations of one kind of layers."""

    window: int | None
    page_size: int
    index: int  # of the kind
    device: torch.device

    def send(self, x: npt.ArrayLike, dtype: npt.DTypeLike) -> torch.Tensor:
        return upload(np.asarray(x, dtype), self.device)

    def plan(self, entries: Sequence[_Entry], count: int) -> LayerWork:
        chunks = [entry for entry in entries if self.wraps(entry)]
        plain = [entry for entry in entries if not self.wraps(entry)]
        slots = [self.locate(entry, entry.past, entry.past + entry.tokens) for entry in plain]
        page, slot = (np.concatenate(parts) for parts in zip((_NONE, _NONE), *slots, strict=True))
        written = None
        if chunks:
            spans = [np.arange(entry.first, entry.first + entry.tokens) for entry in plain]
            written = self.send(np.concatenate([_NONE, *spans]), np.int64)
        return LayerWork(
            written,
            self.send(page, np.int32)[:, None],
            self.send(slot + 1, np.int32),
            [self.batch(group, count) for group in group_by_length(plain)],
            [self.chunk(entry) for entry in chunks],
            count,
        )

    def wraps(self, entry: _Entry) -> bool:
        """Return whether the tokens overwrite tokens that the first of them attends to."""
        end = entry.past + entry.tokens
        return self.window is not None and entry.tokens > 1 and end > self.window

    def locate(self, entry: _Entry, start: int, stop: int) -> tuple[_Ints, _Ints]:
        """Return pages and slots of positions `start` to `stop - 1`."""
        position = np.arange(start, stop)
        if self.window is not None:
            position %= self.window
        page = entry.pages[self.index][position // self.page_size]
        return page, (position % self.page_size).astype(np.int32)

    def batch(self, group: list[_Entry], step_tokens: int) -> AttendBatch:
        ends = [entry.past + entry.tokens for entry in group]
        lengths = [end if self.window is None else min(end, self.window) for end in ends]
        pages = [-(-length // self.page_size) for length in lengths]
        table = np.full((len(group), max(pages)), -1, np.int32)
        for row, entry, number in zip(table, group, pages, strict=True):
            row[:number] = entry.pages[self.index][:number]
        return make_batch(
            group, step_tokens, self.send(table, np.int32), self.send(lengths, np.int32),
            max(lengths),
        )  # fmt: skip

    def chunk(self, entry: _Entry) -> RingChunk:
        assert self.window is not None
        end = entry.past + entry.tokens

        def send(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
            page, slot = self.locate(entry, start, stop)
            return self.send(page, np.int64), self.send(slot, np.int64)

        old = send(max(first_visible(entry.past, self.window), 0), entry.past)
        kept = send(max(first_visible(end - 1, self.window), entry.past), end)
        before = self.send([len(old[0])], np.int32)
        return RingChunk(self.window, entry.first, entry.tokens, before, old, kept)


_NONE = np.empty(0, np.int32)


def make_batch(
    group: Sequence[Any], step_tokens: int, table: torch.Tensor, lengths: torch.Tensor, stop: int
) -> AttendBatch:
    """Return the operation of requests with about the same number of new tokens.

    Each request has `tokens` tokens of the step, from token `first` on. `table` `[B, M]` and
    `lengths` `[B]`, which include this step's tokens, are int32. `stop` is at least the largest
    length.
    """
    count = max(entry.tokens for entry in group)
    tokens = used = targets = None
    if count > 1 or len(group) < step_tokens:
        # Shorter requests are padded in front. Such a query is before the start of its sequence, or
        # repeats an existing query. Its result is not used.
        offset = np.arange(count) - count
        after = np.array([entry.first + entry.tokens for entry in group])[:, None]
        padding = np.array([entry.tokens for entry in group])[:, None] + offset < 0
        slots = np.where(padding, after - 1, after + offset).reshape(-1).astype(np.int64)
        tokens = targets = upload(slots, lengths.device)
        if padding.any():
            real = np.flatnonzero(~padding).astype(np.int64)
            used, targets = upload(real, lengths.device), upload(slots[real], lengths.device)
    return AttendBatch(tokens, used, targets, count, table, lengths, stop, causal=count > 1)


def group_by_length(entries: Sequence[Any]) -> list[list[Any]]:
    """Split requests into sets of about the same number of `tokens`. Those with one are a set."""
    groups: list[list[Any]] = []
    for entry in sorted(entries, key=lambda e: -e.tokens):  # stable: equal ones stay in order
        longest = groups[-1][0].tokens if groups else 0
        alike = longest and entry.tokens >= MIN_LENGTH_RATIO * longest
        if alike and (entry.tokens > 1) == (longest > 1) and len(groups[-1]) < MAX_BATCH:
            groups[-1].append(entry)
        else:
            groups.append([entry])
    return groups
