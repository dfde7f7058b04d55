"""Copies of a group's integers on devices: block tables, lengths, and plans made of them."""

import torch

from .. import ops
from ..ops.blocks import upload
from .page_allocator import Ints
from .page_pool import zeros

# A step needs a tensor of lengths on each device, and one plan for each number of KV heads.
_MAX_CACHED = 16


class DeviceCopies:
    """Tables, lengths and plans of a group on devices, each made once per change."""

    def __init__(self) -> None:
        self._tables: dict[torch.device, torch.Tensor] = {}
        self._version = -1
        self._lengths: dict[tuple[torch.device, int, int], torch.Tensor] = {}
        # The plans of one step, and the length after it.
        self._plans: dict[tuple[object, ...], torch.Tensor | None] = {}
        self._planned = 0
        # The buffer, the batch it is for, and the member that fills it.
        self._fixed_plans: dict[tuple[object, ...], tuple[torch.Tensor, int, int]] = {}

    def find_table(self, version: int, device: torch.device) -> torch.Tensor | None:
        """Return the copy of the block table's `version` on `device`, or None."""
        return self._tables.get(device) if self._version == version else None

    def put_table(self, version: int, rows: Ints, device: torch.device) -> torch.Tensor:
        """Return `rows`, `[B, columns]`, int32, on `device`, the table of this `version`.

        The rows must not change afterwards: a handle may still read them.
        """
        if self._version != version:
            self._tables.clear()
            self._version = version
        table = self._tables[device] = upload(rows, device)
        return table

    def lengths(self, device: torch.device, length: int, batch: int) -> torch.Tensor:
        """Return `length` for each of `batch` sequences, `[B]`, int32; made once per step."""
        key = (device, length, batch)
        if (lengths := self._lengths.get(key)) is None:
            if len(self._lengths) >= _MAX_CACHED:
                self._lengths.clear()
            lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
            self._lengths[key] = lengths
        return lengths

    def plan(
        self, lengths: torch.Tensor, start: int, stop: int, heads: int, rows: int, backend: str
    ) -> torch.Tensor | None:
        """Return the plan for `heads` KV heads and positions `start` to `stop - 1`.

        `lengths`: `stop` for each sequence. `rows`: query rows of each head. None: the backend has
        no plans. Made once per step, and never changed: it holds for any number of query tokens,
        and for any window that leaves nothing before `start` visible.
        """
        device, batch = lengths.device, len(lengths)
        key = (device, start, stop, batch, heads, rows, backend)
        if key not in self._plans:
            if self._planned != stop:
                self._plans.clear()  # plans of another step, and the room they stand for
                self._planned = stop
            size = ops.plan_rows(backend, device, batch, heads, stop - start, rows)
            plan = None
            if size is not None:
                plan = torch.empty((size, 4), dtype=torch.int32, device=device)
                ops.make_plan(plan, lengths, 1, 0, start, heads, backend)
            self._plans[key] = plan
        return self._plans[key]

    def fixed_plan(
        self, member: int, lengths: torch.Tensor, window: int, heads: int, rows: int, backend: str
    ) -> tuple[torch.Tensor | None, bool]:
        """Return a plan for `rows` query rows per KV head, and whether `member` fills it.

        It stays at its address. None: the backend has no plans. The first member that asks for it
        fills it at each step. A plan is a partition of all positions, whichever lengths it was made
        for: one that was not filled again is balanced less well, and as right.
        """
        device, batch = lengths.device, len(lengths)
        size = ops.plan_rows(backend, device, batch, heads, None, rows)
        if size is None:
            return None, False
        plan, planned, leader = self._fixed_plans.get((device, heads, rows), (None, 0, member))
        if plan is None or planned != batch:
            plan, leader = zeros((size, 4), torch.int32, device), member
            ops.make_plan(plan, lengths, 1, window, 0, heads, backend)
            self._fixed_plans[device, heads, rows] = plan, batch, leader
        return plan, leader == member

    @property
    def nbytes(self) -> int:
        """Bytes of the tables."""
        return sum(table.nbytes for table in self._tables.values())
