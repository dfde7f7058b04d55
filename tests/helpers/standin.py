"""A stand-in for the "triton" backend that makes plans and rejects the plans of other steps."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from hf_fp8kv import ops
from hf_fp8kv.ops import AttentionSpec, Pages, api, reference

__all__ = ["PlanCall", "triton_standin"]


class PlanCall(NamedTuple):
    """One call of `make_plan`."""

    plan: torch.Tensor
    lengths: list[int]
    tokens: int
    window: int
    start: int
    heads: int
    rows: int  # query rows per head in the last call of `plan_rows`


def triton_standin(monkeypatch: pytest.MonkeyPatch, *, computes: bool = True) -> list[PlanCall]:
    """Replace the "triton" backend with the reference and plans. Return a list of its calls.

    Each row of a plan stores one of the lengths for which the plan was made.

    Args:
        computes: Whether attention is computed. False is for the device "meta".
    """
    plan_calls: list[PlanCall] = []
    planned_rows = [0]

    def plan_rows(_device: Any, batch: int, _heads: int, _length: Any = None, rows: int = 1) -> int:
        if not torch.compiler.is_compiling():
            planned_rows[0] = rows
        return batch

    def make_plan(plan: torch.Tensor, lengths: torch.Tensor, *sizes: int) -> None:
        if computes:
            plan[:, 0] = lengths
            plan_calls.append(PlanCall(plan, lengths.tolist(), *sizes, planned_rows[0]))

    def attend(
        query: torch.Tensor,
        pages: Pages,
        lengths: torch.Tensor,
        start: int,
        stop: int,
        spec: AttentionSpec,
        plan: torch.Tensor | None,
    ) -> torch.Tensor:
        if not computes:
            batch, heads, tokens, _ = query.shape
            return query.new_empty(batch, tokens, heads, pages.v.head_dim)
        assert plan is not None
        assert torch.equal(plan[:, 0], lengths), "a plan of a different step"
        return reference.attend(query, pages, lengths, start, stop, spec)

    def write(*arguments: Any) -> None:
        if computes:
            reference.write(*arguments[:4])

    module = SimpleNamespace(
        write=write, attend=attend, gather=reference.gather, make_plan=make_plan,
        plan_rows=plan_rows,
    )  # fmt: skip
    load_backend = api.load_backend
    monkeypatch.setattr(
        api, "load_backend", lambda name: module if name == "triton" else load_backend(name)
    )
    monkeypatch.setattr(ops, "choose_backend", lambda name, _device: name)
    return plan_calls
