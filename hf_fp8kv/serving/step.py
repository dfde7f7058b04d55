"""One step of an engine: which tokens of which requests, and the operations that they need.

An engine packs the tokens of all requests of a step into one row, `[1, H, N, D]`. The operations
take sequences of one length, `[B, H, T, D]`. So a step becomes a few calls: one for all requests
that decode, and one for each set of prompts of about the same length, padded in front (a query
before the start of its sequence sees nothing, and its result is not used).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from .. import ops

__all__ = [
    "MAX_BATCH",
    "AttendBatch",
    "EngineStep",
    "LayerKind",
    "LayerWork",
    "RingChunk",
    "decode_work",
    "peak_elements",
]  # fmt: skip

_Ints = npt.NDArray[np.int32]
# Prompts share a call if the shortest has this much of the longest's tokens.
MIN_LENGTH_RATIO = 0.7
# CUDA has no more programs than this along the last axis of a grid.
MAX_BATCH = 65_535


@dataclass(frozen=True)
class LayerKind:
    """Layers of one kind of attention: they share block tables.

    Attributes:
        window: the sliding window in tokens, or None. The pages of a windowed request are a ring:
            the token at position p is at place `p % window`.
        page_size: slots per page, S.
    """

    window: int | None
    page_size: int


@dataclass(frozen=True)
class AttendBatch:
    """A set of requests that attend in one call.

    Attributes:
        tokens: `[B * T]`, int64: which of the step's tokens are the queries; a request with fewer
            than T has any token in front. None: all of them, in order, one per request.
        used: int64, which of the results count; None: all.
        targets: int64, the tokens that these are the results of; None with `tokens`.
        count: T.
        table: `[B, M]`, int32.
        lengths: `[B]`, int32, tokens stored, this step's among them.
        stop: the largest length.
        causal: whether places are positions: a full ring is in no order, and all of it is visible.
    """

    tokens: torch.Tensor | None
    used: torch.Tensor | None
    targets: torch.Tensor | None
    count: int
    table: torch.Tensor
    lengths: torch.Tensor
    stop: int
    causal: bool
    _plans: dict[tuple[str, int], torch.Tensor | None] = field(default_factory=dict)

    def plan(self, backend: str, heads: int) -> torch.Tensor | None:
        """Returns the plan for `heads` KV heads, made once for all layers; None: no plans."""
        key = (backend, heads)
        if key not in self._plans:
            device = self.lengths.device
            rows = ops.plan_rows(backend, device, len(self.lengths), heads)
            plan = None
            if rows is not None:
                plan = torch.empty((rows, 4), dtype=torch.int32, device=device)
                ops.make_plan(plan, self.lengths, self.count, 0, 0, heads, backend)
            self._plans[key] = plan
        return self._plans[key]


@dataclass(frozen=True)
class RingChunk:
    """Several tokens of a request whose ring they overwrite while they still need it.

    Attributes:
        first: the first of the step's tokens.
        tokens: how many, T.
        before: `[1]`, int32, how many of the old tokens the first of them still sees, n.
        old: `[n]`, int64, pages and slots of the tokens that the first of them still sees.
        kept: `[m]`, int64, pages and slots where the last `m` tokens go.
    """

    first: int
    tokens: int
    before: torch.Tensor
    old: tuple[torch.Tensor, torch.Tensor]
    kept: tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class LayerWork:
    """What one layer of a kind has to do in a step.

    Attributes:
        written: `[W]`, int64: which of the step's tokens are stored one by one; None: all.
        table: `[W, 1]`, int32, the page of each.
        slots: `[W]`, int32, its slot.
        attends: the calls.
        chunks: what goes through pages of its own.
        count: tokens of the step, N.
    """

    written: torch.Tensor | None
    table: torch.Tensor
    slots: torch.Tensor
    attends: Sequence[AttendBatch]
    chunks: Sequence[RingChunk]
    count: int


@dataclass(frozen=True)
class _Row:
    past: int
    tokens: int
    first: int  # of the step's tokens
    pages: tuple[_Ints, ...]  # of each kind


class EngineStep:
    """The requests of one step, in the order of their tokens."""

    def __init__(self, kinds: Sequence[LayerKind]) -> None:
        self._kinds = kinds
        self._rows: list[_Row] = []
        self._made: dict[tuple[int, torch.device], LayerWork] = {}

    @property
    def count(self) -> int:
        """Tokens of the step, N."""
        last = self._rows[-1] if self._rows else None
        return last.first + last.tokens if last else 0

    def add(self, past: int, tokens: int, pages: Sequence[Sequence[int]]) -> None:
        """One more request.

        Args:
            past: tokens stored before the step.
            tokens: its tokens in this step.
            pages: for each kind, the pages of the request, in order. They are copied.
        """
        if not tokens:  # an empty prompt: the engine takes it, and there is nothing to attend to
            return
        found = tuple(np.array(of_kind, np.int32) for of_kind in pages)
        self._rows.append(_Row(past, tokens, self.count, found))

    def calls(self, kind: int, device: torch.device) -> LayerWork:
        """Returns what a layer of this kind has to do; made once per step."""
        made = self._made.get((kind, device))
        if made is None:
            made = self._made[kind, device] = _Maker(self, kind, device).calls()
        return made


def decode_work(table: torch.Tensor, lengths: torch.Tensor, page_size: int) -> LayerWork:
    """Returns the calls of a step in which every request has one token, from tensors alone.

    Args:
        table: `[B, M]`, int32, the pages of each request; those not in use are below 0.
        lengths: `[B]`, int32, tokens stored, this step's among them; 0: padding, of no request.
        page_size: slots per page.
    """
    before = (lengths - 1).clamp(min=0)
    page = table.gather(1, (before // page_size)[:, None].long())
    stop = table.shape[1] * page_size
    attend = AttendBatch(None, None, None, 1, table, lengths, stop, causal=False)
    return LayerWork(None, page, before % page_size, [attend], [], len(lengths))


class _Maker:
    """Makes the calls of one kind of layer."""

    def __init__(self, step: EngineStep, kind: int, device: torch.device) -> None:
        self.rows, self.count, self.index, self.device = step._rows, step.count, kind, device
        self.window, self.size = step._kinds[kind].window, step._kinds[kind].page_size

    def on_device(self, x: npt.ArrayLike, dtype: npt.DTypeLike) -> torch.Tensor:
        host = torch.from_numpy(np.asarray(x, dtype))
        if self.device.type == "cuda" and host.numel():
            # A copy from other memory would wait for all that the stream still has to do: with
            # use_async_batching that is the step before this one.
            host = host.pin_memory()
        return host.to(self.device, non_blocking=True)

    def calls(self) -> LayerWork:
        split = [row for row in self.rows if self.wraps(row)]
        plain = [row for row in self.rows if not self.wraps(row)]
        places = [self.places(row, row.past, row.past + row.tokens) for row in plain]
        page = np.concatenate([p for p, _ in places] or [np.empty(0, np.int32)])
        slot = np.concatenate([s for _, s in places] or [np.empty(0, np.int32)])
        written = None
        if split:
            spans = [np.arange(row.first, row.first + row.tokens) for row in plain]
            nothing = np.empty(0, np.int64)
            written = self.on_device(np.concatenate([nothing, *spans]), np.int64)
        return LayerWork(
            written,
            self.on_device(page, np.int32)[:, None],
            self.on_device(slot, np.int32),
            [self.attend(group) for group in groups(plain)],
            [self.chunk(row) for row in split],
            self.count,
        )

    def wraps(self, row: _Row) -> bool:
        """Whether the row's tokens overwrite what the first of them sees."""
        return self.window is not None and row.tokens > 1 and row.past + row.tokens > self.window

    def places(self, row: _Row, start: int, stop: int) -> tuple[_Ints, _Ints]:
        """Page and slot of positions `start` to `stop - 1`."""
        position = np.arange(start, stop)
        if self.window is not None:
            position %= self.window
        page = row.pages[self.index][position // self.size]
        return page, (position % self.size).astype(np.int32)

    def attend(self, group: list[_Row]) -> AttendBatch:
        count = max(row.tokens for row in group)
        ends = [row.past + row.tokens for row in group]
        lengths = [end if self.window is None else min(end, self.window) for end in ends]
        pages = [-(-length // self.size) for length in lengths]
        table = np.full((len(group), max(pages)), -1, np.int32)
        for line, row, number in zip(table, group, pages, strict=True):
            line[:number] = row.pages[self.index][:number]
        tokens = used_ones = targets = None
        if count > 1 or len(group) < self.count:
            at = np.arange(count) - count
            after = np.array([row.first + row.tokens for row in group])[:, None]
            missing = np.array([row.tokens for row in group])[:, None] + at < 0
            chosen = np.where(missing, after - 1, after + at).reshape(-1)
            tokens = targets = self.on_device(chosen, np.int64)
            if missing.any():
                real = np.flatnonzero(~missing)
                used_ones = self.on_device(real, np.int64)
                targets = self.on_device(chosen[real], np.int64)
        return AttendBatch(
            tokens, used_ones, targets, count, self.on_device(table, np.int32),
            self.on_device(lengths, np.int32), max(lengths), causal=count > 1,
        )  # fmt: skip

    def chunk(self, row: _Row) -> RingChunk:
        assert self.window is not None
        end = row.past + row.tokens
        old = self.places(row, max(row.past - self.window + 1, 0), row.past)
        kept = self.places(row, max(end - self.window, row.past), end)

        def both(places: tuple[_Ints, _Ints]) -> tuple[torch.Tensor, torch.Tensor]:
            page, slot = places
            return self.on_device(page, np.int64), self.on_device(slot, np.int64)

        before = self.on_device([len(old[0])], np.int32)
        return RingChunk(row.first, row.tokens, before, both(old), both(kept))


def peak_elements(hidden: int, queries: int, heads: int, dim: int) -> int:
    """Returns how many numbers of the model's dtype a token of a step takes inside attention.

    Beside the hidden states, the queries and the new keys and values: the states before the norm,
    queries in the order of calls and their results in that order (both with padding), results in
    the engine's order, and keys in float32 when they are centered.
    """
    return hidden + math.ceil((2 / MIN_LENGTH_RATIO + 1) * queries * dim) + 2 * heads * dim


def groups(rows: Sequence[_Row]) -> list[list[_Row]]:
    """Splits requests into sets of about the same number of tokens; those with one are a set."""
    found: list[list[_Row]] = []
    for row in sorted(rows, key=lambda row: -row.tokens):  # stable: equal ones stay in order
        fits = found and row.tokens >= MIN_LENGTH_RATIO * found[-1][0].tokens
        if fits and (row.tokens > 1) == (found[-1][0].tokens > 1) and len(found[-1]) < MAX_BATCH:
            found[-1].append(row)
        else:
            found.append([row])
    return found
