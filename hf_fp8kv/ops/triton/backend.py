"""The "triton" backend: each operation takes one or two launches, and never synchronizes.

Tokens without a page, or past the limit, are skipped. The CPU backends raise an error instead,
which would require a synchronization on a GPU.
"""

from typing import Any

from torch import Tensor

from ..pages import AttentionSpec, Pages
from . import decode, extend
from . import plan as planning
from . import write as writing
from .gather import gather
from .plan import count_plan_rows
from .replay import SharedTensors, describe_tensors, recordings, run_or_replay
from .tuning import MAX_DECODE_ROWS, MAX_DECODE_TOKENS

__all__ = ["attend", "count_plan_rows", "fill_plan", "gather", "write"]

_NO_SHARED_TENSORS = SharedTensors({}, [])


def write(
    pages: Pages, key: Tensor, value: Tensor, lengths: Tensor, limit: int | None = None
) -> None:
    """Store new tokens like `triton.write.write`, replaying a recorded launch if there is one."""
    limit = writing.UNLIMITED if limit is None else limit
    # Each length of a prompt would need a recording, and the number of recordings is limited.
    if key.shape[2] > MAX_DECODE_TOKENS:
        writing.write(pages, key, value, lengths, limit)
        return
    run_or_replay(
        writing.write, (pages, key, value, lengths, limit),
        layout=(_shape_and_strides(key), _shape_and_strides(value)),
        tensors=(key, value, lengths), shared=_describe_pages(pages),
        limit=limit, num_columns=pages.table.shape[1], table_stride=pages.table.stride(0),
    )  # fmt: skip


def fill_plan(
    plan: Tensor, lengths: Tensor, num_tokens: int, window: int, start: int, num_heads: int
) -> None:
    """Overwrite a work plan like `triton.plan.fill_plan`, replaying a launch if one is recorded."""
    if num_tokens > MAX_DECODE_TOKENS:
        planning.fill_plan(plan, lengths, num_tokens, window, start, num_heads)
        return
    run_or_replay(
        planning.fill_plan, (plan, lengths, num_tokens, window, start, num_heads),
        layout=(_shape_and_strides(plan), lengths.shape, num_tokens, window, num_heads),
        tensors=(plan, lengths), shared=_NO_SHARED_TENSORS, start=start,
    )  # fmt: skip


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
    is_long = num_tokens > MAX_DECODE_TOKENS if spec.latent else num_rows > MAX_DECODE_ROWS
    if is_long:
        return extend.attend(query, pages, lengths, start, stop, spec)
    args = query, pages, lengths, start, stop, spec, plan
    scaling, causal, window, softcap, sinks, mask, bias, bounds, latent, deterministic = spec
    # Dense masks and biases are not recorded. They are rare in decoding, and more of their strides
    # change with each step.
    if bias is not None or (mask is not None and not _is_compact(mask)):
        return decode.attend(*args)
    output: Tensor = run_or_replay(
        decode.attend, args,
        layout=(
            _shape_and_strides(query), None if plan is None else plan.shape, scaling, causal,
            window, softcap, latent, deterministic,
        ),
        tensors=(query, lengths, plan, sinks, mask, bounds), shared=_describe_pages(pages),
        start=start, stop=stop, table_stride=pages.table.stride(0),
        mask_batch_stride=0 if mask is None or len(mask) == 1 else mask.stride(0),
        # A compact mask has no head stride. Kernels read the batch stride of its bounds instead.
        mask_head_stride=0 if bounds is None or len(bounds) == 1 else bounds.stride(0),
    )  # fmt: skip
    return output


def _shape_and_strides(x: Tensor | None) -> Any:
    return None if x is None else (x.shape, x.stride())


def _is_compact(mask: Tensor) -> bool:
    """Return whether a mask is `[B, 1, 1, N]` and contiguous in its last axis."""
    return mask.shape[1:3] == (1, 1) and (mask.stride(3) == 1 or mask.shape[3] == 1)


def _describe_pages(pages: Pages) -> SharedTensors:
    """Return the properties of pages that recordings depend on, cached in the pages."""
    shared: SharedTensors | None = pages.launch_properties
    if shared is None:
        k, v = pages.k, pages.v
        tensors = (
            pages.k_codes, k.static_scale, k.center, pages.v_codes, v.static_scale, v.center,
            pages.token_scales, pages.table, pages.offsets,
        )  # fmt: skip
        properties, addresses = describe_tensors(tensors)
        # Format, head size and rotation of each side, without its tensors.
        sizes = k[2:], v[2:], pages.num_heads, pages.page_size
        shared = pages.launch_properties = SharedTensors(recordings[properties, sizes], addresses)
    return shared
