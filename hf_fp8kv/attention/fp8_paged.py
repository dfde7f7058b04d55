"""The attention and mask functions "fp8_paged": all that knows transformers' registries.

Masks are made once per step, before any layer runs. For plain causal and sliding-window patterns
no dense mask is made: None, or a compact mask `[B, 1, 1, N]` of dtype uint8 that only says which
tokens are padding; the attention applies causality and the window itself. Every other pattern
(blocks, chunks, bidirectional, packed) is a complete bool mask. A float mask is additive.
"""

import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

from .. import ops
from ..cache.paged_tensor import PagedKV, pages_of
from ..errors import ConfigError
from ..modeling.model_support import config_field, uses_interface
from ..ops.reference import visible
from ..utils.warn_once import warn_once

__all__ = ["NAME", "engine_step", "fp8_paged_attention", "fp8_paged_mask", "register"]

logger = logging.getLogger(__name__)

NAME = "fp8_paged"
Tensor = torch.Tensor

_OWN_WAY = (
    "{} asks for something that attention over pages does not do (attention weights, dropout or a "
    "sparse choice of keys): dense K and V are made for it, which is right but slower"
)
# Arguments that change what attention computes, and that only a model's own eager code knows.
_OWN = ("indices", "block_indices", "sinks")


def register() -> None:
    """Adds "fp8_paged" to transformers' attention and mask registries; overrides nothing else."""
    AttentionInterface.register(NAME, fp8_paged_attention)
    AttentionMaskInterface.register(NAME, fp8_paged_mask)


def fp8_paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention over stored pages when K and V are handles, ordinary attention otherwise.

    Args:
        module: the attention module; asked for `is_causal`.
        query: `[B, Hq, T, Dk]`.
        key: a handle, or `[B, Hkv, N, Dk]`.
        value: a handle, or `[B, Hkv, N, Dv]`.
        attention_mask: what `fp8_paged_mask` made, or a custom mask `[B, 1 | Hq, T, N]`, bool
            (True is visible) or additive.
        scaling: None: `Dk ** -0.5`.
        dropout: of the attention weights; only without pages.
        sliding_window: tokens that a query sees; None: what the cache's layer says.
        softcap: of the logits.
        s_aux: `[Hq]`, attention sinks.
        position_bias: `[1 | B, Hq, T, N]`, added to the logits.
        is_causal: None: the module's.

    Returns:
        `[B, T, Hq, Dv]`, and the weights where the ordinary path made them, else None.
    """
    if kwargs.get("cache") is not None:
        return _engine_attention(
            module, query, key, value, scaling, softcap, s_aux, position_bias, kwargs
        ), None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is not None and attention_mask.dtype == torch.uint8:
        # Compact masks are made for causal patterns only, whatever the module says of itself.
        causal = True
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    if isinstance(key, PagedKV) and isinstance(value, PagedKV):
        own = any(kwargs.get(name) is not None for name in _OWN)
        if (
            not own
            and not dropout
            and not kwargs.get("output_attentions")
            and _together(key, value)
        ):
            out = _stored_attention(
                module, query, key, attention_mask, scaling, sliding_window, softcap, s_aux,
                position_bias, bool(causal),
            )  # fmt: skip
            return out, None
        warn_once(logger, _OWN_WAY.format(type(module).__name__))
    return _dense_attention(
        module, query, key, value, attention_mask, scaling, dropout, sliding_window, softcap,
        s_aux, position_bias, bool(causal), kwargs,
    )  # fmt: skip


def _together(key: PagedKV, value: PagedKV) -> bool:
    """Whether the two handles are K and V of one layer, the right way round."""
    return key.side == "k" and value.side == "v" and key.k is value.k and key.stop == value.stop


def _stored_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: PagedKV,
    mask: Tensor | None,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None,
    causal: bool,
) -> Tensor:
    if query.requires_grad and module.training:
        raise ConfigError(
            "expected inference, got a training step through stored pages, which have no gradient; "
            "call model.eval(), or train without the cache (use_cache=False)"
        )
    complete = mask is not None and mask.dtype != torch.uint8
    window = int(sliding_window or key.window)
    if complete:
        # It says all by itself. But the static form keeps what is behind the window of a sliding
        # layer, which transformers' own layers do not: no mask shows it, and it need not be read.
        window = key.window + query.shape[2] - 1 if key.ragged and key.window else 0
    mask, bias = _fit(mask, key), _fit(bias, key)
    if mask is not None and mask.dtype == torch.bool:
        if mask.shape[1] > 1:
            mask = _additive(mask, query.dtype)  # the operation takes bool masks for all heads
        elif mask.shape[0] != query.shape[0]:
            mask = mask.expand(query.shape[0], -1, -1, -1)
    return ops.attend(
        query.detach(), pages_of(key), key.lengths, key.start, key.stop,
        scaling=float(scaling),
        causal=causal and not complete,
        window=window,
        softcap=float(softcap or 0.0),
        sinks=None if sinks is None else sinks.detach().reshape(-1),
        mask=mask,
        bias=None if bias is None else bias.detach(),
        plan=key.plan,
        backend=key.backend,
    )  # fmt: skip


def _fit(extra: Tensor | None, key: PagedKV) -> Tensor | None:
    """Cuts a mask or bias to the columns of `key`; raises ConfigError if it is too narrow."""
    if extra is None or extra.shape[-1] == key.shape[2]:
        return extra
    if extra.ndim == 4 and extra.shape[-1] == key.stop:
        return extra[..., key.start :]  # made over the whole text, for a layer with a window
    if extra.ndim != 4 or extra.shape[-1] < key.shape[2] or key.start:
        raise ConfigError(
            f"expected a mask [B, 1, T, {key.shape[2]}] that covers every stored token, got "
            f"{tuple(extra.shape)}; pass a mask over the cached and the new tokens"
        )
    return extra[..., : key.shape[2]]


# -- continuous batching --------------------------------------------------------------------------

_engine = threading.local()


@contextmanager
def engine_step() -> Iterator[None]:
    """Inside, in this thread, the model runs a step of an engine, which needs no masks.

    The engine packs requests into one row, and its cache knows where each begins. Without this a
    mask over all tokens of the step would be made of their positions, and not used.
    """
    before, _engine.runs = getattr(_engine, "runs", False), True
    try:
        yield
    finally:
        _engine.runs = before


def _engine_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None,
    kwargs: dict[str, Any],
) -> Tensor:
    """Attention over an engine's pages: it hands its cache to the attention function."""
    cache = kwargs["cache"]
    if not hasattr(cache, "attend_stored"):
        raise ConfigError(
            "expected an engine with FP8 pages, got transformers' own cache "
            f"({type(cache).__name__}); call hf_fp8kv.serving.enable(model) before the engine is "
            "made, or use another attn_implementation"
        )
    own = [name for name in _OWN if kwargs.get(name) is not None]
    if own or bias is not None:
        raise ConfigError(
            "expected plain attention, got a model that adds to its logits or chooses its keys "
            f"({', '.join(own) or 'position_bias'}), which an engine's pages cannot be used for; "
            "use generate() with FP8PagedCache"
        )
    found: Tensor = cache.attend_stored(
        module, query, key, value,
        scaling=float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        softcap=float(softcap or 0.0),
        sinks=None if sinks is None else sinks.detach().reshape(-1),
        engine=kwargs,
    )  # fmt: skip
    return found


# -- ordinary attention --------------------------------------------------------------------------


def _dense_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Softmax attention over dense K and V, by the ordinary code of transformers."""
    window = sliding_window or (key.window if isinstance(key, PagedKV) else 0)
    if isinstance(key, PagedKV):
        key = key.dense()
    if isinstance(value, PagedKV):
        value = value.dense()
    mask = _complete(mask, query, key, window, causal)
    indices = kwargs.pop("indices", None)
    if indices is not None:
        mask = _chosen_only(mask, indices, query, key)
    own = {"softcap": softcap, "s_aux": sinks, **{n: kwargs.get(n) for n in _OWN}}
    own = {name: extra for name, extra in own.items() if extra is not None}
    if own or kwargs.get("output_attentions"):
        run = _eager_of(type(module).__module__)
        if bias is not None:
            own["position_bias"] = bias
        if mask is None and causal and query.shape[2] > 1:
            mask = _causal(query, key, 0)
        kwargs = {**kwargs, **own}
        return run(  # type: ignore[no-any-return]
            module, query, key, value, _additive(mask, query.dtype), scaling=scaling,
            dropout=dropout, sliding_window=sliding_window, **kwargs,
        )  # fmt: skip
    return sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=causal,
        position_bias=bias, **kwargs,
    )  # fmt: skip


def _complete(
    mask: Tensor | None, query: Tensor, key: Tensor, window: int, causal: bool
) -> Tensor | None:
    """Returns a mask that says all by itself; None where `is_causal` says it."""
    if mask is not None and mask.dtype != torch.uint8:
        return mask[..., : key.shape[2]]
    tokens, length = query.shape[2], key.shape[2]
    windowed = bool(window) and length > window
    if mask is None and not (causal and (windowed or 1 < tokens != length)):
        return None
    if mask is None:
        return _causal(query, key, window)
    seen = mask[..., :length].bool()
    return seen & _causal(query, key, window) if causal else seen


def _causal(query: Tensor, key: Tensor, window: int) -> Tensor:
    """The queries are the last of the keys: `[1, 1, T, N]`, bool."""
    tokens, length = query.shape[2], key.shape[2]
    ends = torch.tensor([length], device=query.device)
    return visible(ends, tokens, 0, length, True, window)[:, None]


def _chosen_only(mask: Tensor | None, indices: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A sparse-attention model's choice `[B, T, n]` of keys (below 0: none), as part of a mask."""
    batch, tokens = indices.shape[:2]
    chosen = torch.zeros((batch, tokens, key.shape[2] + 1), dtype=torch.bool, device=query.device)
    # Keys that are not there go to one more column, which is then cut off.
    places = indices.long()
    chosen.scatter_(-1, places.where(places >= 0, key.shape[2]), True)
    chosen = chosen[:, None, :, :-1]
    if mask is None:
        return chosen & _causal(query, key, 0)
    if mask.dtype == torch.bool:
        return mask & chosen
    return mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask.bool(), torch.finfo(dtype).min)


@functools.cache
def _eager_of(module_name: str) -> Callable[..., Any]:
    """Returns a model's own eager attention: it knows what its extra arguments mean."""
    found = getattr(sys.modules[module_name], "eager_attention_forward", None)
    if found is None:
        raise ConfigError(
            f"expected a model with an eager attention of its own, got {module_name}; use "
            "attn_implementation='eager'"
        )
    return found  # type: ignore[no-any-return]


# -- masks ---------------------------------------------------------------------------------------


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
    """Returns the mask for one kind of layer: None, compact (uint8) or complete (bool).

    Args:
        batch_size: B.
        q_length: T.
        kv_length: N, this call's tokens among them.
        q_offset: position of the first query; a tensor in the static form.
        kv_offset: position of the first key.
        mask_function: the pattern.
        attention_mask: `[B, tokens seen]`, bool, False is padding; or None.
        kwargs: as transformers' own mask functions take them.
    """
    if getattr(_engine, "runs", False):
        return None
    kwargs["allow_is_bidirectional_skip"] = False
    config = kwargs.get("config")
    config_class: type = type(config)
    # transformers declares a number, and passes a tensor all the same.
    offset: Any = q_offset
    if not uses_interface(config_class) or _model_type(config) in _ADDS_MASK:
        # Such a model adds the mask to its scores, whatever attention it was told to use.
        return eager_mask(
            batch_size, q_length, kv_length, offset, kv_offset, mask_function, attention_mask,
            **kwargs,
        )  # fmt: skip
    # A compact mask says where the queries are by where the keys end, which the static form's do
    # not; and models that look into the mask, or whose K is not the cache's K, cannot use one.
    ends_together = (
        not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length
    )
    plain = ends_together and not _needs_complete(config)
    window = _causal_window(mask_function)
    # On an empty cache attention gets fresh keys, which do not know the window of their layer; and
    # a window that matters wants a complete mask there anyway, once instead of in every layer.
    fresh = q_length > 1 and q_length == kv_length
    if not plain or window is None or (fresh and 0 < window < kv_length):
        kwargs["allow_is_causal_skip"] = False
        return sdpa_mask(
            batch_size, q_length, kv_length, offset, kv_offset, mask_function, attention_mask,
            **kwargs,
        )  # fmt: skip
    # A module that does not call itself causal takes None for "sees everything".
    says_causal = q_length == 1 or _model_type(config) not in _CAUSAL_UNSAID
    if attention_mask is None and says_causal:
        return None
    if attention_mask is None:
        return torch.ones(
            (batch_size, 1, 1, kv_length), dtype=torch.uint8, device=kwargs.get("device", "cpu")
        )
    if attention_mask.shape[-1] < kv_offset + kv_length:
        raise ConfigError(
            f"expected an attention_mask over all {kv_offset + kv_length} tokens (cached and new), "
            f"got one over {attention_mask.shape[-1]}; pass the mask of the whole text, or a cache "
            "that does not hold other tokens"
        )
    padding = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    # On a GPU looking at the values waits for it: once, at the prefill, not at each step.
    look = (padding.is_cpu or q_length > 1) and not torch.compiler.is_compiling()
    if says_causal and look and padding.all():
        return None
    return padding[:, None, None].to(torch.uint8)


def _causal_window(function: Callable[..., Any]) -> int | None:
    """The window of a causal pattern, 0 for a plain one; None for every other pattern.

    transformers names neither; a window is a closure over its overlay and the causal function.
    What is not recognised gets a complete mask, which is always right.
    """
    if function is causal_mask_function:
        return 0
    if torch.compiler.is_compiling() or function.__qualname__ != "and_masks.<locals>.and_mask":
        return None
    parts = _closure(function)
    if (
        isinstance(parts, tuple)
        and len(parts) == 2
        and parts[1] is causal_mask_function
        and parts[0].__qualname__ == "sliding_window_overlay.<locals>.inner_mask"
    ):
        window = _closure(parts[0])
        return window if isinstance(window, int) else None
    return None


def _closure(function: Callable[..., Any]) -> Any:
    """What a function closes over, if it is one thing."""
    cells = function.__closure__ or ()
    return cells[0].cell_contents if len(cells) == 1 else None


# What models do that their config does not say, by model type. A new model that does any of this
# differs from its own attention in the sweep over architectures (docs/architectures.md).
# They do not tell the attention function about their window:
_WINDOW_UNSAID = frozenset({"doge", "phimoe", "qwen2_moe", "paligemma", "blt"})
# they index the mask by query, or join it with another:
_INDEXES_MASK = frozenset({"qwen4_exp", "qwen4_exp_text", "t5gemma2", "t5gemma2_decoder"})
# their decoder's modules say is_causal=False, and rely on the mask:
_CAUSAL_UNSAID = frozenset({"pegasus_x"})
# they compute with an additive mask themselves:
_ADDS_MASK = frozenset({"nllb-moe", "deepseek_v4", "git", "bigbird_pegasus"})


def _model_type(config: Any) -> str:
    return getattr(config, "model_type", "")


def _needs_complete(config: Any) -> bool:
    if _model_type(config) in _WINDOW_UNSAID | _INDEXES_MASK:
        return True
    names = ("kv_lora_rank", "index_topk", "index_n_heads")
    return any(config_field(config, name) is not None for name in names)
