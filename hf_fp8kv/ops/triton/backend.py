"""Backend "triton": each operation is one or two launches, and never waits for the GPU.

Tokens that have no place (no page, or past the limit) are not stored: what a CPU's backends refuse
a GPU cannot refuse without waiting.
"""

import torch

from ..pages import AttentionSpec, Pages
from . import decode, extend
from .gather import gather
from .plan import make_plan, plan_rows
from .tuning import DECODE_ROWS
from .write import write

__all__ = ["attend", "gather", "make_plan", "plan_rows", "write"]


def attend(
    query: torch.Tensor,
    pages: Pages,
    lengths: torch.Tensor,
    start: int,
    stop: int,
    spec: AttentionSpec,
    plan: torch.Tensor | None = None,
    new: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return what `reference.attend` returns for the same arguments, up to rounding.

    Pages are contiguous, except for the table. `plan` is what `make_plan` wrote for these lengths;
    None: made here. `new` are keys and values of these tokens, to be stored before.
    """
    if query.shape[1] // pages.heads * query.shape[2] <= DECODE_ROWS:
        return decode.attend(query, pages, lengths, start, stop, spec, plan, new)
    if new is not None:
        write(pages, *new, lengths - query.shape[2], stop)
    return extend.attend(query, pages, lengths, start, stop, spec)
