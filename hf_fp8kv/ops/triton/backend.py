"""The "triton" backend: each operation takes one or two launches, and never synchronizes.

Tokens without a page, or past the limit, are skipped. The CPU backends raise an error instead,
which would require a synchronization on a GPU.
"""

from torch import Tensor

from ..pages import AttentionSpec, Pages
from . import decode, extend
from .gather import gather
from .plan import count_plan_rows, fill_plan
from .replay import replayed
from .write import write

__all__ = ["attend", "count_plan_rows", "fill_plan", "gather", "write"]


@replayed(decode.describe_layout, decode.list_variables, pages=1)
def attend(
    query: Tensor,
    pages: Pages,
    lengths: Tensor,
    start: int,
    stop: int,
    spec: AttentionSpec,
    plan: Tensor | None = None,
) -> Tensor:
    """Compute softmax attention. The result equals `reference.attend` up to rounding.

    `plan` is a plan that `fill_plan` wrote for these lengths, or None to make a plan here.
    """
    if decode.has_few_rows(query, pages, spec):
        return decode.attend(query, pages, lengths, start, stop, spec, plan)
    return extend.attend(query, pages, lengths, start, stop, spec)
