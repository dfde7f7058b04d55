"""Backend "triton": each operation is one or two launches, and never waits for the GPU.

Tokens that have no place (no page, or past the limit) are not stored: what a CPU's backends refuse
a GPU cannot refuse without waiting.
"""

from typing import Any

import torch

from ..pages import AttentionSpec, Pages
from . import decode, extend
from . import plan as planning
from . import write as writing
from .gather import gather
from .plan import Partial, make_partial, plan_rows
from .replay import Described, describe, number_of, run_or_replay
from .tuning import DECODE_ROWS, FEW_ROWS, SINGLE_TOKENS

__all__ = ["attend", "gather", "make_plan", "plan_rows", "write"]


def write(
    pages: Pages,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    limit: int | None = None,
) -> None:
    """Store new tokens, see `writing.write`."""
    most = writing.UNLIMITED if limit is None else limit
    # Prompts have any length: each would be another recording, and there is room for some.
    if key.shape[2] > SINGLE_TOKENS:
        writing.write(pages, key, value, lengths, most)
        return
    table = pages.table
    run_or_replay(
        writing.write, (pages, key, value, lengths, most),
        layout=(_strided(key), _strided(value)),
        tensors=(key, value, lengths), others=(_describe(pages),),
        limit=most, columns=table.shape[1], table_b=table.stride(0),
    )  # fmt: skip


def make_plan(
    plan: torch.Tensor, lengths: torch.Tensor, tokens: int, window: int, start: int, heads: int
) -> None:
    """Overwrite a plan, see `planning.make_plan`."""
    if tokens > SINGLE_TOKENS:
        planning.make_plan(plan, lengths, tokens, window, start, heads)
        return
    run_or_replay(
        planning.make_plan, (plan, lengths, tokens, window, start, heads),
        layout=(_strided(plan), lengths.shape, tokens, window, heads),
        tensors=(plan, lengths), others=(), start=start,
    )  # fmt: skip


def attend(
    query: torch.Tensor,
    pages: Pages,
    lengths: torch.Tensor,
    start: int,
    stop: int,
    spec: AttentionSpec,
    plan: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what `reference.attend` returns for the same arguments, up to rounding.

    `plan`: the result of `make_plan` for these lengths. None means that it is made here.
    """
    heads, (_, q_heads, tokens, _) = pages.heads, query.shape
    # Latents have many heads: it is tokens that say which kernel it is.
    many = tokens > SINGLE_TOKENS if spec.latent else q_heads // heads * tokens > DECODE_ROWS
    if many:
        return extend.attend(query, pages, lengths, start, stop, spec)
    args = (query, pages, lengths, start, stop, spec, plan)
    scaling, causal, window, softcap, sinks, mask, bias, bounds, latent, whole = spec
    # Other masks and biases are rare here, and have more strides that change from step to step.
    if bias is not None or not (mask is None or _is_compact(mask)):
        return decode.attend(*args)
    table, partial, planned = pages.table, None, None
    if plan is not None:
        dim = (pages.k if latent else pages.v).head_dim
        partial, planned = _describe_plan(plan, query, heads, dim)
    attended: torch.Tensor = run_or_replay(
        decode.attend, (*args, partial),
        layout=(_strided(query), scaling, causal, window, softcap, latent, whole),
        tensors=(query, lengths, sinks, mask, bounds),
        others=(_describe(pages), planned or _NO_PLAN),
        start=start, stop=stop, table_b=table.stride(0),
        mask_b=0 if mask is None or len(mask) == 1 else mask.stride(0),
        mask_h=0 if bounds is None or len(bounds) == 1 else bounds.stride(0),
    )  # fmt: skip
    return attended


# No plan, and no room for partial sums.
_NO_PLAN = describe((None, None, None))


class _OfPlan(dict[Any, tuple[Partial | None, Described]]):
    """What `_describe_plan` keeps with a plan; copies of a plan begin without."""

    def __reduce__(self) -> tuple[object, ...]:
        return _OfPlan, ()


def _describe_plan(
    plan: torch.Tensor, query: torch.Tensor, heads: int, dim: int
) -> tuple[Partial | None, Described]:
    """Return room for a call's partial sums, and what recordings have to know of it and the plan.

    All calls by a plan get the same room, because they run one after the other. It stays where it
    is as long as the plan does: a CUDA graph holds the addresses of both. The room is None for many
    rows, which hardly ever use a plan.
    """
    known: _OfPlan = vars(plan).setdefault("described", _OfPlan())
    key = query.shape, heads, dim
    if key not in known:
        partial = None
        if query.shape[1] // heads * query.shape[2] <= FEW_ROWS:
            partial = make_partial(plan, query, dim)
        kind, places = describe((plan, *(partial or (None, None))))
        known[key] = partial, Described(number_of((kind, _strided(plan))), places)
    return known[key]


def _strided(x: torch.Tensor | None) -> Any:
    return None if x is None else (x.shape, x.stride())


def _is_compact(mask: torch.Tensor) -> bool:
    """Return whether a mask is `[B, 1, 1, N]`, not floating, and has no gaps in its last axis."""
    return (
        mask.shape[1:3] == (1, 1)
        and (mask.dtype == torch.uint8 or mask.dtype == torch.bool)
        and (mask.stride(3) == 1 or mask.shape[3] == 1)
    )


def _describe(pages: Pages) -> Described:
    """Return what recordings have to know of the pages; found out once for each record."""
    described: Described | None = pages.described
    if described is None:
        k, v = pages.k, pages.v
        kind, places = describe(
            (
                pages.k_codes, k.static_scale, k.center, pages.v_codes, v.static_scale, v.center,
                pages.token_scales, pages.table, pages.offsets,
            )
        )  # fmt: skip
        # Without the tensors of a side: its format, head size and rotation.
        sizes = k[2:], v[2:], pages.heads, pages.page_size
        described = pages.described = Described(number_of((kind, sizes)), places)
    return described
