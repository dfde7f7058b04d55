"""A stand-in for the "triton" backend, whose attention refuses a schedule of another step."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from hf_fp8kv import ops
from hf_fp8kv.ops import AttentionSpec, Pages, api, reference

__all__ = ["ScheduleCall", "replace_triton"]


class ScheduleCall(NamedTuple):
    """The arguments of a call of `fill_schedule`, and the query rows per head of its schedule."""

    schedule: torch.Tensor
    lengths: list[int]
    num_tokens: int
    window: int
    start: int
    num_kv_heads: int
    num_query_rows: int


def replace_triton(monkeypatch: pytest.MonkeyPatch, *, compute: bool = True) -> list[ScheduleCall]:
    """Replace the "triton" backend with the reference backend, which also gets a schedule.

    A schedule stores the lengths for which it was made. Attention asserts that the step has these
    lengths.

    Args:
        compute: Whether attention is computed. Pass False on the device "meta".

    Returns:
        The list to which each call of `fill_schedule` is appended, if `compute` is True.
    """
    schedule_calls: list[ScheduleCall] = []
    last_num_query_rows = 0

    def count_schedule_rows(
        _device: Any, batch: int, _heads: int, _length: Any = None, num_query_rows: int = 1
    ) -> int:
        nonlocal last_num_query_rows
        if not torch.compiler.is_compiling():
            last_num_query_rows = num_query_rows
        return batch

    def fill_schedule(schedule: torch.Tensor, lengths: torch.Tensor, *sizes: int) -> None:
        if compute:
            schedule[:, 0] = lengths
            schedule_calls.append(
                ScheduleCall(schedule, lengths.tolist(), *sizes, last_num_query_rows)
            )

    def attend(
        query: torch.Tensor, pages: Pages, lengths: torch.Tensor, start: int, stop: int,
        spec: AttentionSpec, schedule: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        if not compute:
            batch, num_heads, num_tokens, _ = query.shape
            return query.new_empty(batch, num_tokens, num_heads, pages.v.head_dim)
        assert schedule is not None
        assert torch.equal(schedule[:, 0], lengths), "the schedule was made for another step"
        return reference.attend(query, pages, lengths, start, stop, spec)

    def write(*arguments: Any) -> None:
        if compute:
            reference.write(*arguments[:4])

    stand_in = SimpleNamespace(
        write=write, attend=attend, gather=reference.gather, fill_schedule=fill_schedule,
        count_schedule_rows=count_schedule_rows,
    )  # fmt: skip
    load_backend = api.load_backend
    monkeypatch.setattr(
        api, "load_backend", lambda name: stand_in if name == "triton" else load_backend(name)
    )
    monkeypatch.setattr(ops, "choose_backend", lambda name, _device: name)
    return schedule_calls
