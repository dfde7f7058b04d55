"""The attention function "fp8_paged": attention that reads stored pages."""

import functools
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch.nn.attention import sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .. import ops
from ..cache.paged_tensor import PagedKV, densify, get_pages
from ..errors import ConfigError
from ..modeling.forward_state import forward_pass
from ..modeling.methods import ModelAttribute
from ..modeling.model_support import ATTENTION, CACHE, DETERMINISTIC, ENGINE_ATTRIBUTE
from ..ops import AttentionSpec
from ..ops.api import is_observed
from ..ops.dense_prompts import attend_densely, is_dense_faster, list_sdpa_backends
from ..utils.tensors import detach_if_needed
from ..utils.warn_once import warn_once
from . import latent, masks
from .compact import CompactMask
from .deterministic import check_padding, check_page_size

# The `StoredRounding` of an attention module that rounds K and V (reproducible/training.py).
ROUNDING = ModelAttribute[Any]("_hf_fp8kv_rounding")
# An argument that only an engine passes. Before transformers 5.24 it is the engine's cache.
_ENGINE_ARGUMENT = "write_index" if CACHE == "cache" else "cache"
Tensor = torch.Tensor

_DENSE_WARNING = (
    "{} uses a feature that attention over pages does not support (attention weights, dropout or "
    "a sparse choice of keys), so it runs on dense copies of K and V, which is correct but slower"
)
_EXPANSION_WARNING = "{} expands all stored latents in each step, which is correct but slower: {}"
_TRAINING_ERROR = (
    "expected inference, got a training step through stored pages, which have no gradient. Call "
    "model.eval(), or train without the cache (use_cache=False)"
)
# Arguments that change the result of attention, and that only the model's eager code supports.
_MODEL_ARGUMENTS = ("indices", "block_indices", "sinks")
# Arguments that attention over pages does not support.
_DENSE_ARGUMENTS = frozenset(("output_attentions", *_MODEL_ARGUMENTS))
_UNREPEATABLE_ARGUMENTS = _DENSE_ARGUMENTS | {_ENGINE_ARGUMENT}


class Call(NamedTuple):
    """The arguments of one call of `fp8_paged_attention`.

    Attributes:
        kwargs: Arguments that are not in `spec`.
    """

    module: torch.nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    spec: AttentionSpec
    dropout: float
    kwargs: dict[str, Any]


def register() -> None:
    """Add "fp8_paged" to transformers' attention and mask registries.

    On import, kvpress wraps all registered functions, because presses on single heads hide tokens
    in the wrapper. If kvpress was imported first, its wrapper is applied here.
    """
    wrap = getattr(sys.modules.get("kvpress.attention_patch"), "attention_patch", None)
    AttentionInterface.register(
        ATTENTION, wrap(fp8_paged_attention) if wrap else fp8_paged_attention
    )
    AttentionMaskInterface.register(ATTENTION, masks.fp8_paged_mask)


def fp8_paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention over stored pages if K and V are `PagedKV`, otherwise ordinary attention.

    The first parameters are in the order of transformers' functions, because code that wraps all
    registered functions passes some of them by position.

    Args:
        module: The attention module.
        query: Queries, `[B, Hq, T, Dk]`.
        key: Keys, a `PagedKV` or `[B, Hkv, N, Dk]`.
        value: Values, a `PagedKV` or `[B, Hkv, N, Dv]`.
        attention_mask: Result of `fp8_paged_mask`, or a custom mask `[B, 1 | Hq, T, N]`, bool (True
            is visible) or additive.
        dropout: Dropout of the attention weights. If not 0, K and V are made dense.
        scaling: Factor of the logits. None means `Dk ** -0.5`.
        is_causal: Whether attention is causal. None means the module's attribute.
        position_bias: Bias added to the logits, `[1 | B, Hq, T, N]`.
        sliding_window: Number of tokens that a query attends to. None means the window of the
            cache's layer.
        softcap: Softcap of the logits. None means no softcap.
        s_aux: Attention sinks, `[Hq]`.
        kwargs: Arguments from the model or from a continuous-batching engine.

    Returns:
        The attention output, `[B, T, Hq, Dv]`, and the attention weights if ordinary attention
        computed them, otherwise None.

    Raises:
        ConfigError: The call trains through stored pages, the mask is too narrow, or an engine's
            cache has no FP8 pages or does not support the model.
    """
    is_compiling = torch.compiler.is_compiling()
    paged_layers = None  # set only if their first layer has just stored its tokens
    if not is_compiling and forward_pass.first_layer is not None:
        get_layers, get_keys = forward_pass.first_layer
        forward_pass.first_layer = None
        if get_keys() is key and (paged_layers := get_layers()) is not None:
            paged_layers.check_module(module)
    can_repeat = (
        position_bias is None and s_aux is None and _UNREPEATABLE_ARGUMENTS.isdisjoint(kwargs)
    )
    # A tensor could change in place.
    scaling = None if scaling is None else float(scaling)
    sliding_window = int(sliding_window or 0)
    softcap = float(softcap or 0.0)
    arguments = dropout, scaling, is_causal, sliding_window, softcap
    if can_repeat and type(key) is PagedKV and not is_compiling:
        output = _repeat(module, query, key, value, attention_mask, arguments)
        if output is not None:
            return output, None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # Positional arguments take half the time of keyword arguments.
    spec = AttentionSpec(
        float(query.shape[-1] ** -0.5) if scaling is None else scaling, bool(causal),
        sliding_window, softcap, s_aux, attention_mask, position_bias, None,
        False, DETERMINISTIC.name in vars(module),
    )  # fmt: skip
    call = Call(module, query, key, value, spec, dropout, kwargs)
    if paged_layers is None:
        return _attend(call, arguments, can_repeat)
    try:
        return _attend(call, arguments, can_repeat)
    except BaseException:
        paged_layers.undo_first_layer()
        raise


def _attend(
    call: Call, arguments: tuple[Any, ...], can_repeat: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute attention, and record a decode step with `arguments` if it `can_repeat`."""
    module, query, key, value, spec, dropout, kwargs = call
    engine_cache = getattr(key, ENGINE_ATTRIBUTE, kwargs.get(_ENGINE_ARGUMENT))
    if engine_cache is not None:
        return _attend_in_engine(call, engine_cache), None
    latent.install(module, key)
    if isinstance(key, PagedKV) and isinstance(value, PagedKV):
        if spec.deterministic:
            spec = drop_mask(query, key, spec)
            call = call._replace(spec=spec)
        if latent.reads_stored_latents(module):
            return _attend_latents(call)
        needs_dense = dropout or (
            not _DENSE_ARGUMENTS.isdisjoint(kwargs) and requires_dense(kwargs)
        )
        is_same_layer = key.block is value.block and key.stop == value.stop
        if not needs_dense and is_same_layer and (key.side, value.side) == ("k", "v"):
            if query.requires_grad and module.training:
                raise ConfigError(_TRAINING_ERROR)
            output = attend_stored(query, key, spec)
            if can_repeat and not torch.compiler.is_compiling():
                _record(module, query, key, call.spec.mask, arguments, spec)
            return output, None
        warn_once(_DENSE_WARNING.format(type(module).__name__))
    # Dynamo guards a missing attribute of a module, but not a missing key of its `__dict__`.
    elif (rounding := getattr(module, ROUNDING.name, None)) is not None:
        return rounding.attend(call)  # type: ignore[no-any-return]
    return attend_with_transformers(call)


class AttentionRecord(NamedTuple):
    """A decode step of one layer, for steps that only differ in values (see `DecodeRecord`).

    Attributes:
        layout: Result of `_describe_layout`.
        module: Weak reference to the attention module.
        spec: Parameters of the attention, without the mask.
        attend: `ops.attend` for calls of this layout.
    """

    layout: tuple[Any, ...]
    module: weakref.ref[torch.nn.Module]
    spec: AttentionSpec
    attend: Callable[..., Tensor]


def _describe_layout(
    module: torch.nn.Module,
    query: Tensor,
    key: PagedKV,
    mask: CompactMask | None,
    arguments: tuple[Any, ...],
) -> tuple[Any, ...]:
    """Return everything that a decode step depends on, except the pages and the values."""
    schedule = key.schedule
    return (
        arguments,
        query.shape,
        query.stride(),
        query.dtype,
        query.device,
        query.requires_grad,
        None if schedule is None else schedule.shape,
        getattr(module, "is_causal", True),
        getattr(module, "training", False),
        DETERMINISTIC.name in vars(module),
        None if mask is None else (mask.shape[:3], mask.device, mask.window),
    )


def _repeat(
    module: torch.nn.Module,
    query: Tensor,
    key: PagedKV,
    value: Tensor,
    mask: Tensor | None,
    arguments: tuple[Any, ...],
) -> Tensor | None:
    """Compute the attention of a decode step as in the recorded step, or return None."""
    if type(value) is not PagedKV or (pages := key.pages) is None or value.pages is not pages:
        return None
    if (record := pages.record) is None or (recorded := record.attention) is None:
        return None
    if mask is not None and type(mask) is not CompactMask:
        return None
    start, stop = key.start, key.stop
    if (
        recorded.module() is not module
        or recorded.layout != _describe_layout(module, query, key, mask, arguments)
        or value.stop != stop
        or (key.side, value.side) != ("k", "v")
        or is_observed(query)
    ):
        return None
    spec = recorded.spec
    if mask is not None:
        scaling, causal, window, softcap, sinks, *_ = spec
        columns = mask.get_columns(start, stop)
        spec = AttentionSpec(scaling, causal, window, softcap, sinks, columns, None, mask.bounds)
    output: Tensor = recorded.attend(query, pages, key.lengths, start, stop, spec, key.schedule)
    return output


def _record(
    module: torch.nn.Module,
    query: Tensor,
    key: PagedKV,
    mask: Tensor | None,
    arguments: tuple[Any, ...],
    spec: AttentionSpec,
) -> None:
    """Record a decode step whose update was recorded, unless a later step needs more checks."""
    pages = key.pages
    if pages is None or spec.deterministic or query.shape[2] != 1:
        return
    if pages.record is None or pages.record.write is None:
        return
    if is_observed(query) or (mask is not None and type(mask) is not CompactMask):
        return
    spec = _fit_to_pages(spec, query, key)
    attend = ops.bind(
        "attend", key.backend, query, pages, key.lengths, key.start, key.stop, spec, key.schedule
    )
    pages.record.attention = AttentionRecord(
        _describe_layout(module, query, key, mask, arguments),
        weakref.ref(module),
        spec._replace(mask=None, bounds=None),
        attend,
    )


def requires_dense(kwargs: dict[str, Any]) -> bool:
    """Return whether arguments of a model's attention need dense keys and values."""
    has_argument = any(kwargs.get(name) is not None for name in _MODEL_ARGUMENTS)
    return has_argument or bool(kwargs.get("output_attentions"))


def _attend_latents(call: Call) -> tuple[Tensor, Tensor | None]:
    """Compute attention over stored latents and RoPE parts, or over expanded latents."""
    module, query, key, _, spec, dropout, kwargs = call
    assert isinstance(key, PagedKV)
    indices = kwargs.get("indices")
    kwargs_without_indices = {
        name: argument for name, argument in kwargs.items() if name != "indices"
    }
    projections = None
    reason = ""
    # Stored latents have no gradient, but expanding them has a gradient for the weights.
    if latent.needs_gradient(module, query):
        if module.training:
            raise ConfigError(_TRAINING_ERROR)
        reason = "gradients are enabled. Call the model in torch.no_grad() if you need none"
    elif key.k_center is not None:
        reason = (
            "they have a center, but are also values, which have no center. Use a plan without "
            "centers"
        )
    elif not dropout and not requires_dense(kwargs_without_indices):
        projections = latent.find_projections(module, key)
        reason = (
            "kv_b_proj does more than multiply by weights in their dtype. hf_fp8kv.check_model "
            "shows why, except for training mode, autocast, and a separate adapter for each "
            "sequence"
        )
    if projections is None:
        warning = _EXPANSION_WARNING if reason else _DENSE_WARNING
        warn_once(warning.format(type(module).__name__, reason))
    is_cheaper = projections and projections.is_cheaper(query.shape[2], key.shape[2])
    if projections is None or not (spec.deterministic or is_cheaper):
        return attend_with_transformers(call)
    if indices is not None:
        mask = masks.make_complete(
            spec.mask,
            query,
            key,
            window=spec.window or key.window,
            causal=spec.causal,
            start=key.start,
            lengths=key.lengths if key.is_ragged else None,
        )
        spec = spec._replace(mask=masks.keep_selected_keys(mask, indices, query, key))
    spec = spec._replace(latent=True)
    output = attend_stored(projections.absorb(query, spec.deterministic), key, spec)
    return projections.expand(output, spec.deterministic), None


def drop_mask(query: Tensor, key: PagedKV, spec: AttentionSpec) -> AttentionSpec:
    """Return the spec of a deterministic model without the mask, which only hides later tokens.

    Raises:
        ConfigError: The mask also hides earlier tokens, or the pages are too small.
    """
    check_page_size(get_pages(key).page_size)
    mask = spec.mask
    if isinstance(mask, CompactMask):
        if not mask.is_checked:  # otherwise, an earlier layer of this step has checked it
            check_padding(mask.token_mask[:, 0, 0])
            mask.is_checked = True
    elif mask is not None:
        causal = masks.make_causal(query, key, spec.window or key.window)
        is_comparable = mask.dtype == torch.bool and mask.shape[-2:] == causal.shape[-2:]
        if not is_comparable or not torch.equal(mask, causal.expand_as(mask)):
            raise ConfigError(
                "deterministic: expected no mask or a causal bool mask, got a mask that may hide "
                "more, as for packed sequences, or for padding with a window. Pass each sequence "
                "separately"
            )
    elif not spec.causal:
        raise ConfigError("deterministic: expected causal attention, got a bidirectional layer")
    window = spec.window or (mask.window if isinstance(mask, CompactMask) else 0)
    return spec._replace(mask=None, causal=True, window=window)


def attend_stored(query: Tensor, key: PagedKV, spec: AttentionSpec) -> Tensor:
    """Compute attention over the stored pages of `key`, without a gradient."""
    is_plain = spec.mask is None and spec.bias is None and spec.sinks is None
    if not is_plain or spec.window != key.window:
        spec = _fit_to_pages(spec, query, key)
    pages = get_pages(key)
    query = detach_if_needed(query)
    if is_dense_faster(query, key.stop, pages, spec):
        return attend_densely(query, pages, key.lengths, spec, backend=key.backend)
    return ops.attend(
        query,
        pages,
        key.lengths,
        key.start,
        key.stop,
        spec,
        schedule=key.schedule,
        backend=key.backend,
    )


def _fit_to_pages(spec: AttentionSpec, query: Tensor, key: PagedKV) -> AttentionSpec:
    """Return a spec with the layer's window, and with mask and bias as the operations need them."""
    mask = spec.mask
    bounds = None
    window = spec.window or key.window
    if mask is not None:
        # A mask includes the window. Unlike transformers' layers, a preallocated sliding layer also
        # keeps older tokens. Every mask hides them, so the window only avoids reading them.
        window = key.window + query.shape[2] - 1 if key.is_ragged and key.window else 0
    causal = spec.causal and mask is None
    bias = spec.bias
    if isinstance(mask, CompactMask):
        causal = True
        window = spec.window or mask.window or window
        bounds = mask.bounds
        mask = mask.get_columns(key.start, key.stop)
    elif mask is not None:
        mask = _cut_to_keys(mask, key)
        if mask.dtype == torch.bool and mask.shape[1] > 1:
            mask = masks.make_additive(mask, query.dtype)  # bool masks apply to all heads
    if bias is not None:
        bias = detach_if_needed(_cut_to_keys(bias, key))
    return spec._replace(
        causal=causal,
        window=window,
        sinks=_detach_sinks(spec.sinks),
        mask=mask,
        bias=bias,
        bounds=bounds,
    )


def _detach_sinks(sinks: Tensor | None) -> Tensor | None:
    return None if sinks is None else detach_if_needed(sinks).reshape(-1)


def _cut_to_keys(mask: Tensor, key: PagedKV) -> Tensor:
    """Return the columns of `key` in a mask or bias. Raise ConfigError if it is too narrow."""
    num_columns = mask.shape[3] if mask.ndim == 4 else 0
    if num_columns == key.shape[2]:
        return mask
    if num_columns == key.stop:
        return mask[..., key.start :]  # covers the whole sequence, but the layer has a window
    if num_columns < key.shape[2] or key.start:
        raise ConfigError(
            f"expected a mask [B, 1, T, {key.shape[2]}] that covers every stored token, got "
            f"{tuple(mask.shape)}. Pass a mask over the cached and the new tokens"
        )
    return mask[..., : key.shape[2]]


def _attend_in_engine(call: Call, engine_cache: Any) -> Tensor:
    module, query, key, value, spec, _, kwargs = call
    if not hasattr(engine_cache, "attend_stored"):
        raise ConfigError(
            "expected an engine with FP8 pages, got transformers' cache. Call "
            "hf_fp8kv.serving.enable(model) before creating the engine, or use another "
            "attn_implementation"
        )
    unsupported = [name for name in _MODEL_ARGUMENTS if kwargs.get(name) is not None]
    if unsupported or spec.bias is not None:
        raise ConfigError(
            "expected plain attention, got a model that adds to its logits or selects its keys "
            f"({', '.join(unsupported) or 'position_bias'}), which continuous batching does not "
            "support. Use generate() with FP8PagedCache"
        )
    spec = spec._replace(causal=True, window=0, sinks=_detach_sinks(spec.sinks), mask=None)
    return engine_cache.attend_stored(  # type: ignore[no-any-return]
        module, query, key, value, spec, kwargs
    )


def attend_with_transformers(call: Call) -> tuple[Tensor, Tensor | None]:
    """Compute attention over dense K and V with transformers' code."""
    module, query, key, value, spec, dropout, kwargs = call
    if spec.deterministic:
        raise ConfigError(
            "deterministic: expected attention over stored pages, got keys that are not stored, or "
            "a feature that needs dense keys (dropout, attention weights, a gradient through "
            "latents). Use the cache that generate() creates, FP8PagedCache(..., prefill='stored'),"
            " or enable(..., training='stored') for calls without a cache"
        )
    window = spec.window
    start = None
    lengths = None
    if isinstance(key, PagedKV):
        start = key.start
        if spec.mask is None:  # a mask includes the window
            window = window or key.window
        lengths = key.lengths if key.is_ragged else None
    is_latent = isinstance(key, PagedKV) and latent.reads_stored_latents(module)
    key, value = densify(key), densify(value)
    if is_latent:
        key, value = latent.expand(module, key, value)
    mask = masks.make_complete(spec.mask, query, key, window, spec.causal, start, lengths)
    indices = kwargs.pop("indices", None)
    if indices is not None:
        mask = masks.keep_selected_keys(mask, indices, query, key)
    eager_arguments = {name: kwargs.get(name) for name in _MODEL_ARGUMENTS}
    eager_arguments |= {"softcap": spec.softcap or None, "s_aux": spec.sinks}
    extra_kwargs = {
        name: argument for name, argument in eager_arguments.items() if argument is not None
    }
    if extra_kwargs or kwargs.get("output_attentions"):
        attend_eagerly = _find_eager_attention(type(module).__module__)
        if spec.bias is not None:
            extra_kwargs["position_bias"] = spec.bias
        if mask is None and spec.causal and query.shape[2] > 1:
            mask = masks.make_causal(query, key)
        kwargs = {**kwargs, **extra_kwargs}
        return attend_eagerly(  # type: ignore[no-any-return]
            module,
            query,
            key,
            value,
            masks.make_additive(mask, query.dtype),
            scaling=spec.scaling,
            dropout=dropout,
            sliding_window=spec.window or None,
            **kwargs,
        )
    is_causal_prompt = mask is None and spec.bias is None and spec.causal and not dropout
    backends = list_sdpa_backends(query, key.shape[2]) if is_causal_prompt else []
    with sdpa_kernel(backends, set_priority=True) if backends else nullcontext():
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            mask,
            dropout=dropout,
            scaling=spec.scaling,
            is_causal=spec.causal,
            position_bias=spec.bias,
            **kwargs,
        )


@functools.cache
def _find_eager_attention(module_name: str) -> Callable[..., Any]:
    """Return the eager attention of a module, which supports the extra arguments of its models."""
    attend = getattr(sys.modules[module_name], "eager_attention_forward", None)
    if attend is None:
        raise ConfigError(
            f"expected a model whose module defines eager_attention_forward, got {module_name}. "
            "Use attn_implementation='eager'"
        )
    return attend  # type: ignore[no-any-return]
