"""The "triton" backend: each operation takes one or two launches, and never synchronizes.

Tokens without a page, or past the limit, are skipped. The CPU backends raise an error instead,
which would require a synchronization on a GPU.
"""

from torch import Tensor

from ..pages import AttentionSpec, Pages
from . import decode, extend
from .gather import gather
from .plan import count_plan_rows, fill_plan
from .tuning import MAX_DECODE_ROWS, MAX_DECODE_TOKENS
from .write import write

__all__ = ["attend", "count_plan_rows", "fill_plan", "gather", "write"]


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
    _, num_q_heads, num_tokens, _ = query.shape
    num_rows = num_q_heads // pages.num_heads * num_tokens
    # Models with latents have many query heads per KV head, so the number of tokens decides.
    if num_tokens > MAX_DECODE_TOKENS if spec.latent else num_rows > MAX_DECODE_ROWS:
        return extend.attend(query, pages, lengths, start, stop, spec)
    return decode.attend(query, pages, lengths, start, stop, spec, plan)
