"""The mask function "fp8_paged", and the complete masks that dense attention needs.

Masks are made once per step, before any layer runs. For plain causal and sliding-window patterns
no dense mask is made: None, or a compact mask that only marks padding (compact.py); the attention
applies causality and the window itself. Every other pattern (blocks, chunks, bidirectional, packed)
is a complete bool mask. A float mask is additive.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

from ..cache.centers import answer
from ..cache.layer import MaskLength
from ..errors import ConfigError
from ..modeling.exact_states import exact_states
from ..ops.visibility import visible
from .compact import is_compact, pack, unpack
from .model_quirks import adds_mask, needs_complete_mask, relies_on_mask
from .patterns import causal_window, is_safe_to_follow

Tensor = torch.Tensor


def fp8_paged_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Return the mask for one kind of layer: None, compact (uint8) or complete (bool).

    Args:
        batch_size: B.
        q_length: T.
        kv_length: N, including the tokens of this call.
        q_offset: position of the first query; a tensor for a preallocated cache.
        kv_offset: position of the first key.
        mask_function: the pattern.
        attention_mask: `[B, tokens so far]`, bool, False is padding; or None.
        kwargs: further arguments of transformers' mask functions.

    Returns:
        None if no token has to be masked besides causality and the window; a compact mask; or
        `[B, 1, T, N]` of bool, True is visible. An additive float mask for models that add it to
        their scores themselves.

    Raises:
        ConfigError: `attention_mask` has neither one row nor one for each sequence, or misses the
            tokens in our cache and the new ones.
    """
    if getattr(_engine, "runs", False):
        return None
    if attention_mask is not None and attention_mask.shape[0] not in (1, batch_size):
        raise ConfigError(
            f"attention_mask: expected a row for each of {batch_size} sequences, got "
            f"{tuple(attention_mask.shape)}. Pass the mask of this batch."
        )
    answer(attention_mask, q_offset, q_length)
    kwargs["allow_is_bidirectional_skip"] = False
    config = kwargs.get("config")
    # transformers declares a number, and passes a tensor all the same.
    offset: Any = q_offset
    is_ours = _is_ours(q_offset)
    if adds_mask(config):
        return eager_mask(
            batch_size, q_length, kv_length, offset, kv_offset, mask_function, attention_mask,
            **kwargs,
        )  # fmt: skip
    window = None
    if not needs_complete_mask(config):  # models that look into the mask, or change K
        window = _find_window(mask_function, is_ours, kwargs)
    # With a compact mask the queries are the last tokens that are stored.
    ends_together = is_ours or (
        not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length
    )
    # On an empty cache attention gets fresh keys, which do not know the window of their layer. A
    # window that hides something needs a complete mask there: made once here, not in every layer.
    fresh = q_length > 1 and q_length == kv_length and not is_ours
    if not ends_together or window is None or (fresh and 0 < window < kv_length):
        kwargs["allow_is_causal_skip"] = False
        return sdpa_mask(
            batch_size, q_length, kv_length, offset, kv_offset, mask_function, attention_mask,
            **kwargs,
        )  # fmt: skip
    may_be_none = q_length == 1 or not relies_on_mask(config)
    if attention_mask is None and may_be_none:
        return None
    filled = offset + q_length if is_ours else kv_length
    if attention_mask is None:
        shape = (batch_size, kv_length)
        every = torch.ones(shape, dtype=torch.bool, device=kwargs.get("device", "cpu"))
        return pack(every, kv_offset, filled)
    missing = kv_offset + kv_length - attention_mask.shape[-1]
    if missing > 0 and isinstance(kv_length, MaskLength):
        raise ConfigError(
            f"expected an attention_mask over all {kv_offset + kv_length} tokens (cached and new), "
            f"got one over {attention_mask.shape[-1]}; pass the mask of the whole text, or a cache "
            "that does not hold other tokens"
        )
    if missing > 0:  # under sdpa, transformers hides what the mask does not cover
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    present = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    # Reading the values synchronizes with a GPU: do it once, at the prefill, not at each step. A
    # preallocated cache has the same kind of mask at each step, since it may be compiled for it.
    look = (present.is_cpu or q_length > 1) and not is_ours and not torch.compiler.is_compiling()
    if may_be_none and look and present.all():
        return None
    return pack(present, kv_offset, filled)


def _is_ours(q_offset: Any) -> bool:
    """Whether the position of the first query is that of a preallocated cache of this package.

    transformers' own is of another dtype. Its K and V are dense, and want complete masks.
    """
    if not isinstance(q_offset, Tensor):
        return False
    return q_offset.dtype == torch.int32 and q_offset.ndim == 0


def _find_window(function: Callable[..., Any], is_ours: bool, kwargs: dict[str, Any]) -> int | None:
    """Return what `causal_window` does, or None where it cannot be asked."""
    if function is not causal_mask_function and torch.compiler.is_compiling():
        # Without a cache positions may be packed, which is one more function over them.
        uses_vmap = kwargs.get("use_vmap", False)
        if not is_ours or not is_safe_to_follow(function, kwargs.get("config"), uses_vmap):
            return None
    return causal_window(function)


def complete_mask(
    mask: Tensor | None,
    query: Tensor,
    key: Tensor,
    window: int,
    causal: bool,
    start: int = 0,
    filled: Tensor | None = None,
) -> Tensor | None:
    """Return a mask that includes causality and the window; None where `is_causal` is enough.

    Args:
        mask: None, compact, or complete (then only cut to the keys).
        query: `[B, Hq, T, Dk]`, the last T tokens of the filled keys.
        key: `[B, Hkv, N, Dk]`.
        window: tokens that a query sees; 0: all.
        causal: whether a query sees only the tokens up to its own.
        start: position of the first key.
        filled: `[B]`, keys that hold tokens; None: all, or as many as a compact mask says.
    """
    if mask is not None and not is_compact(mask):
        return mask[..., : key.shape[2]]
    tokens, length = query.shape[2], key.shape[2]
    narrow = bool(window) and length > window
    if mask is None and filled is None and not (causal and (narrow or 1 < tokens != length)):
        return None
    compact = None if mask is None else unpack(mask, start, start + length)
    if filled is None:
        filled = torch.tensor([length], device=query.device) if compact is None else compact.filled
    seen = visible(filled, tokens, 0, length, causal, window)[:, None]
    return seen if compact is None else seen & compact.seen.bool()


def causal_mask(query: Tensor, key: Tensor, window: int) -> Tensor:
    """Return `[1, 1, T, N]`, bool, for queries that are the last T of N keys."""
    tokens, length = query.shape[2], key.shape[2]
    ends = torch.tensor([length], device=query.device)
    return visible(ends, tokens, 0, length, True, window)[:, None]


def keep_chosen_keys(mask: Tensor | None, indices: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the mask without the keys that a sparse-attention model did not choose.

    Args:
        mask: a complete mask, bool or additive; None: causal.
        indices: `[B, T, n]`, the keys that each query sees; below 0: none.
        query: `[B, Hq, T, Dk]`.
        key: `[B, Hkv, N, Dk]`.
    """
    batch, tokens = indices.shape[:2]
    chosen = torch.zeros((batch, tokens, key.shape[2] + 1), dtype=torch.bool, device=query.device)
    # Negative indices go to an extra column, which is then cut off.
    columns = indices.long()
    chosen.scatter_(-1, columns.where(columns >= 0, key.shape[2]), True)
    chosen = chosen[:, None, :, :-1]
    if mask is None:
        return chosen & causal_mask(query, key, 0)
    if mask.dtype == torch.bool:
        return mask & chosen
    return mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)


def additive_mask(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a mask of any shape as numbers to add to the logits: 0 or the least of `dtype`."""
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask.bool(), torch.finfo(dtype).min)


_engine = threading.local()


@contextmanager
def engine_step() -> Iterator[None]:
    """Make no masks in this thread: the model runs a step of a continuous-batching engine.

    The engine packs requests into one row, and its cache knows where each begins. A mask over all
    tokens of the step would be built from their positions and never used. K and V stay unrounded.
    """
    before, _engine.runs = getattr(_engine, "runs", False), True
    try:
        with exact_states():
            yield
    finally:
        _engine.runs = before
