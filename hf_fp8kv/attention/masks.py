"""The mask function "fp8_paged", and the complete masks that dense attention needs.

Masks are made once per step, before any layer runs. For causal and sliding-window patterns the mask
is None or compact (compact.py). For any other pattern (blocks, chunks, bidirectional, packed) it is
a complete bool mask. A float mask is additive.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    eager_mask,
    sdpa_mask,
    sliding_window_overlay,
)

from ..errors import ConfigError
from ..modeling.forward_state import MaskRequest, forward_pass
from ..ops.visibility import find_visible
from ..utils.warn_once import warn_once
from .compact import CompactMask, make_compact
from .model_quirks import adds_mask, needs_mask

Tensor = torch.Tensor
_AND_CODE = and_masks().__code__
_WINDOW_CODE = sliding_window_overlay(1).__code__


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
    """Return the mask for one type of layers: None, compact or complete.

    Args:
        batch_size: Number of sequences, B.
        q_length: Number of queries, T.
        kv_length: Number of keys, N, including the tokens of this call.
        q_offset: Position of the first query. A tensor `[]` in a preallocated cache.
        kv_offset: Position of the first key.
        mask_function: Function of transformers that defines the pattern.
        attention_mask: Padding mask of all tokens so far, `[B, tokens]`, bool, False for padding.
            None means no padding.
        kwargs: Additional arguments of transformers' mask functions.

    Returns:
        None if only causality and the window hide tokens, otherwise a compact or complete mask
        `[B, 1, T, N]`, bool, True if visible. Models that add the mask to their logits themselves
        get an additive float mask.

    Raises:
        ConfigError: The number of rows of `attention_mask` is neither 1 nor B, or it does not cover
            all cached and new tokens.
    """
    if forward_pass.is_engine_step:
        return None
    if attention_mask is not None and attention_mask.shape[0] not in (1, batch_size):
        raise ConfigError(
            f"attention_mask: expected a row for each of {batch_size} sequences, got "
            f"{tuple(attention_mask.shape)}. Pass the mask of this batch"
        )
    if forward_pass.request.sizes is None and not isinstance(q_offset, Tensor) and q_offset > 0:
        warn_once(
            "attn_implementation='fp8_paged' got a cache of transformers, which stores nothing in "
            "8 bits. After hf_fp8kv.enable(model), generate() makes 8-bit caches. Pass "
            "hf_fp8kv.FP8PagedCache(model) to other calls"
        )
    request = forward_pass.take_request(q_length, kv_length, kv_offset)
    config = kwargs.get("config")
    # Only in a preallocated cache are positions known not to be packed.
    is_chunked = getattr(config, "attention_chunk_size", None) is not None
    is_unpacked = request.is_preallocated and not is_chunked and not kwargs.get("use_vmap", False)
    window = find_window(
        mask_function, is_unpacked=is_unpacked, local_size=kwargs.get("local_size")
    )
    make_mask: Callable[..., Tensor | None] | None = None
    if adds_mask(config):
        make_mask = eager_mask
    elif window is None or _needs_complete_mask(
        window, request, q_length, kv_length, q_offset, kv_offset
    ):
        make_mask = sdpa_mask
    if make_mask is not None:
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return make_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset,
            kv_offset,
            mask_function,
            attention_mask,
            **kwargs,
        )
    assert window is not None
    # If a window hides tokens, a mask is needed, because some models do not pass their window to
    # the attention function, and new keys do not carry it.
    may_be_none = not needs_mask(config) and not 0 < window < kv_length
    if attention_mask is None:
        if may_be_none:
            return None
        attention_mask = torch.ones(
            (batch_size, kv_offset + kv_length),
            dtype=torch.bool,
            device=kwargs.get("device", "cpu"),
        )
    is_token = _select_columns(attention_mask, kv_offset, kv_length, is_growing=request.is_growing)
    if may_be_none and _reads_values(is_token, q_length, request) and is_token.all():
        return None
    length = q_offset + q_length if request.is_preallocated else kv_length
    return make_compact(is_token, kv_offset, length, window, q_length)


def _needs_complete_mask(
    window: int,
    request: MaskRequest,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
) -> bool:
    """Return whether a compact mask cannot express which keys the queries attend to."""
    # A compact mask requires that the queries are the last stored tokens.
    if not request.is_preallocated and (
        isinstance(q_offset, Tensor) or q_offset + q_length != kv_offset + kv_length
    ):
        return True
    # New keys, unlike stored keys, do not carry the window of their layer. If the window hides
    # tokens, new keys need a complete mask, which is made here once for all layers.
    has_new_keys = q_length > 1 and q_length == kv_length and not request.is_stored
    return has_new_keys and 0 < window < kv_length


def _select_columns(
    attention_mask: Tensor, kv_offset: int, kv_length: int, *, is_growing: bool
) -> Tensor:
    """Return whether each key is a token, `[B, N]`, bool.

    Raises:
        ConfigError: The mask has fewer columns than a growing cache has tokens.
    """
    num_missing = kv_offset + kv_length - attention_mask.shape[-1]
    if num_missing > 0 and is_growing:
        raise ConfigError(
            f"expected an attention_mask over all {kv_offset + kv_length} tokens (cached and new), "
            f"got {attention_mask.shape[-1]} columns. Pass the mask of the whole sequence, or a "
            "cache without other tokens"
        )
    if num_missing > 0:  # hide tokens that the mask does not cover, as transformers' sdpa does
        attention_mask = torch.nn.functional.pad(attention_mask, (0, num_missing))
    return attention_mask[:, kv_offset : kv_offset + kv_length].bool()


def _reads_values(is_token: Tensor, q_length: int, request: MaskRequest) -> bool:
    """Return whether the mask's values determine its type.

    Reading them synchronizes with a GPU, so it is only done in the prefill. A preallocated cache
    has the same type of mask in each step, because code may be compiled for that type.
    """
    if request.is_preallocated or torch.compiler.is_compiling():
        return False
    return is_token.is_cpu or q_length > 1


def make_complete(
    mask: Tensor | None,
    query: Tensor,
    key: Tensor,
    window: int,
    causal: bool,
    start: int | None = None,
    lengths: Tensor | None = None,
) -> Tensor | None:
    """Return a mask that includes causality and the window, or None if sdpa's `is_causal` suffices.

    Args:
        mask: None, a compact mask, or a complete mask, which is only cut to the keys.
        query: Queries, `[B, Hq, T, Dk]`, of the last T stored tokens.
        key: Keys, `[B, Hkv, N, Dk]`.
        window: Number of tokens that a query attends to. 0 means all, or the window of a compact
            mask.
        causal: Whether a query attends only to its own token and earlier tokens.
        start: Position of the first key. None means the start of the mask.
        lengths: Number of stored tokens, `[B]`. None means N, or the number in a compact mask.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    if isinstance(mask, CompactMask):
        mask_start = mask.start if start is None else start
        return mask.make_complete(mask_start, mask_start + num_keys, window or mask.window)
    if mask is not None:
        return mask[..., :num_keys]
    hides_tokens = bool(window) and num_keys > window
    if lengths is None and not (causal and (hides_tokens or 1 < num_queries != num_keys)):
        return None
    return make_causal(query, key, window, causal, lengths)


def make_causal(
    query: Tensor, key: Tensor, window: int = 0, causal: bool = True, lengths: Tensor | None = None
) -> Tensor:
    """Return a causal mask, `[1 or B, 1, T, N]`, bool, with arguments of `make_complete`."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    if lengths is None:
        lengths = torch.tensor([num_keys], device=query.device)
    return find_visible(lengths, num_queries, 0, num_keys, causal, window)[:, None]


def keep_selected_keys(mask: Tensor | None, indices: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return a mask that also hides the keys that a sparse-attention model did not select.

    Args:
        mask: A complete mask, bool or additive. None means causal.
        indices: Keys that each query attends to, `[B, T, n]`. Negative entries are ignored.
        query: Queries, `[B, Hq, T, Dk]`.
        key: Keys, `[B, Hkv, N, Dk]`.
    """
    batch, num_queries = indices.shape[:2]
    is_selected = query.new_zeros((batch, num_queries, key.shape[2] + 1), dtype=torch.bool)
    # Negative indices select an extra column, which is cut off.
    columns = indices.long()
    is_selected.scatter_(-1, columns.where(columns >= 0, key.shape[2]), True)
    is_selected = is_selected[:, None, :, :-1]
    if mask is None:
        return is_selected & make_causal(query, key)
    if mask.dtype == torch.bool:
        return mask & is_selected
    return mask.masked_fill(~is_selected, torch.finfo(mask.dtype).min)


def make_additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the values to add to the logits for a mask: 0, or the lowest value of `dtype`."""
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask.bool(), torch.finfo(dtype).min)


def find_window(
    function: Callable[..., Any], *, is_unpacked: bool = False, local_size: int | None = None
) -> int | None:
    """Return the window of a causal pattern, 0 without a window, or None for any other pattern.

    transformers does not label patterns. It combines functions that compare two positions. The code
    object of such a function identifies it, and the closure contains the inner functions or the
    window.

    torch.compile cannot read closures. In compiled code, the window is transformers' `local_size`
    if the pattern `is_unpacked`: positions are not packed, the config has no chunks, and the caller
    passed no function (which needs vmap). Patterns with blocks use another function.
    """
    if function is causal_mask_function:
        return 0
    if torch.compiler.is_compiling():
        is_window = is_unpacked and getattr(function, "__name__", "") == "and_mask"
        return local_size if is_window else None
    functions: list[Any] = [function]
    windows = list[int]()
    is_causal = False
    while functions:
        inner_function = functions.pop()
        code = getattr(inner_function, "__code__", None)
        if inner_function is causal_mask_function:
            is_causal = True
        elif code is _AND_CODE:
            functions += inner_function.__closure__[0].cell_contents
        elif code is _WINDOW_CODE:
            windows.append(inner_function.__closure__[0].cell_contents)
        else:
            return None
    return min(windows, default=0) if is_causal else None
