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
from .plan import plan_rows
from .replay import Described, describe, recordings, run_or_replay
from .tuning import DECODE_ROWS, SINGLE_TOKENS

__all__ = ["attend", "gather", "make_plan", "plan_rows", "write"]

_NO_PAGES = Described({}, [])


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
        tensors=(key, value, lengths), shared=_describe(pages),
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
        tensors=(plan, lengths), shared=_NO_PAGES, start=start,
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
    args = query, pages, lengths, start, stop, spec, plan
    scaling, causal, window, softcap, sinks, mask, bias, bounds, latent, whole = spec
    # Other masks and biases are rare here, and have more strides that change from step to step.
    if bias is not None or (mask is not None and not _is_compact(mask)):
        return decode.attend(*args)
    table = pages.table
    attended: torch.Tensor = run_or_replay(
        decode.attend, args,
        layout=(
            _strided(query), None if plan is None else plan.shape, scaling, causal, window, softcap,
            latent, whole,
        ),
        tensors=(query, lengths, plan, sinks, mask, bounds), shared=_describe(pages),
        start=start, stop=stop, table_b=table.stride(0),
        mask_b=0 if mask is None or len(mask) == 1 else mask.stride(0),
        mask_h=0 if bounds is None or len(bounds) == 1 else bounds.stride(0),
    )  # fmt: skip
    return attended


def _strided(x: torch.Tensor | None) -> Any:
    return None if x is None else (x.shape, x.stride())


def _is_compact(mask: torch.Tensor) -> bool:
    """Return whether a mask is `[B, 1, 1, N]`, and has no gaps in its last axis."""
    return mask.shape[1:3] == (1, 1) and (mask.stride(3) == 1 or mask.shape[3] == 1)


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
        described = pages.described = Described(recordings[kind, sizes], places)
    return described
