"""The "triton" backend: each operation is one or two launches, and never waits for the GPU.

Tokens that have no place (no page, or past the limit) are not stored: what a CPU's backends refuse
a GPU cannot refuse without waiting.
"""

from typing import Any

import torch

from ..pages import Pages
from . import decode, extend, plan
from .gather import gather
from .target import target_of
from .write import write

__all__ = ["attend", "gather", "make_plan", "plan_rows", "write"]

make_plan = plan.make


def plan_rows(device: torch.device, batch: int, heads: int) -> int:
    """Returns the rows of a plan; see `ops.plan_rows`."""
    return plan.rows(batch, heads, target_of(device))


def attend(
    query: torch.Tensor,
    pages: Pages,
    lengths: torch.Tensor,
    start: int,
    stop: int,
    *,
    scaling: float,
    causal: bool,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    plan: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns what `reference.attend` returns, up to rounding; the same arguments, and a plan."""
    rest: dict[str, Any] = {
        "scaling": scaling, "causal": causal, "window": window, "softcap": softcap,
        "sinks": sinks, "mask": mask, "bias": bias,
    }  # fmt: skip
    if query.shape[1] // pages.k.shape[1] * query.shape[2] <= decode.DECODE_ROWS:
        return decode.attend(query, pages, lengths, start, stop, plan=plan, **rest)
    return extend.attend(query, pages, lengths, start, stop, **rest)
