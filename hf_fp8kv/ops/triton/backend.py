"""Backend "triton": each operation is one or two launches, and never waits for the GPU.

Tokens that have no place (no page, or past the limit) are not stored: what a CPU's backends refuse
a GPU cannot refuse without waiting.
"""

import torch

from ..pages import AttentionSpec, Pages
from . import decode, extend
from .gather import gather
from .plan import make_plan
from .plan import plan_rows as _plan_rows
from .target import target_of
from .tuning import DECODE_ROWS
from .write import write

__all__ = ["attend", "gather", "make_plan", "plan_rows", "write"]


def plan_rows(device: torch.device, batch: int, heads: int) -> int:
    """Return the rows of a plan; see `ops.plan_rows`."""
    return _plan_rows(batch, heads, target_of(device))


def attend(
    query: torch.Tensor,
    pages: Pages,
    lengths: torch.Tensor,
    start: int,
    stop: int,
    spec: AttentionSpec,
    plan: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what `reference.attend` returns, up to rounding.

    Args:
        query: `[B, Hq, T, Dk]`, float32, float16 or bfloat16, any strides.
        pages: what to attend to; contiguous, except for the table.
        lengths: `[B]`, int32: stored tokens; the queries are the last T of them.
        start, stop: the positions that may be read, and the columns of mask and bias.
        spec: which attention.
        plan: `[plan_rows, 4]`, int32: what `make_plan` wrote for these lengths; None: made here.

    Returns:
        `[B, T, Hq, Dv]`, of the query's dtype, contiguous.
    """
    if query.shape[1] // pages.heads * query.shape[2] <= DECODE_ROWS:
        return decode.attend(query, pages, lengths, start, stop, spec, plan)
    return extend.attend(query, pages, lengths, start, stop, spec)
