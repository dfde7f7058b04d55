"""The "triton" backend: each operation takes one or two launches, and never synchronizes.

Tokens without a page, or past the limit, are skipped. The CPU backends raise an error instead,
which would require a synchronization on a GPU.
"""

from torch import Tensor

from ..pages import AttentionSpec, Pages
from . import decode, extend
from .gather import gather
from .replay import replayed
from .schedule import count_schedule_rows, fill_schedule
from .write import write

__all__ = ["attend", "count_schedule_rows", "fill_schedule", "gather", "write"]


@replayed(decode.describe_layout, decode.list_variables, pages=1)
def attend(
    query: Tensor,
    pages: Pages,
    lengths: Tensor,
    start: int,
    stop: int,
    spec: AttentionSpec,
    schedule: Tensor | None = None,
) -> Tensor:
    """Compute softmax attention. The result equals `reference.attend` up to rounding.

    `schedule` is a schedule that `fill_schedule` wrote for these lengths, or None to make a
    schedule here.
    """
    if decode.supports_call(query, pages, spec):
        return decode.attend(query, pages, lengths, start, stop, spec, schedule)
    return extend.attend(query, pages, lengths, start, stop, spec)
