"""Training with rounded K and V: whole sequences are stored in pages, as in a cache.

The pages only exist during the call. The operations that write and read them are the same as for a
cache, so formats, scales and backends behave in the same way.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .. import ops
from ..attention.check_model import find_stock_layers
from ..attention.compact import CompactMask
from ..attention.deterministic import check_padding
from ..attention.fp8_paged import (
    Call,
    attend_stored,
    attend_with_transformers,
    drop_mask,
    requires_dense,
)
from ..attention.latent import reads_stored_latents
from ..attention.switching import eval_mode, watched_attention
from ..cache.cache import FP8PagedCache
from ..cache.encoding import Encoding
from ..cache.options import CacheOptions
from ..cache.paged_tensor import PagedKV, make_handles
from ..errors import ConfigError, FP8KVError
from ..formats import AUTO
from ..modeling.exact_states import ROUNDING_NOTE, describe_rounding
from ..modeling.model_support import with_cache
from ..utils.tensors import detach_if_needed


class StoredRounding:
    """Rounding of one layer's K and V, as in a cache with the same options.

    A dynamic scale belongs to one token, and a static scale to the layer, so the rounding of a
    token does not depend on other tokens.
    """

    def __init__(self, options: CacheOptions, index: int, key: Tensor, value: Tensor) -> None:
        """Prepare the encoding of layer `index` for keys and values of these shapes.

        Raises:
            ScaleError: The static scales have a different number of heads or a different head size.
        """
        self.index = index
        self._options = options
        self._encoding = Encoding(index, options)
        self._device: torch.device | None = None  # a model on "meta" is moved to a device later
        options.get_layer_scales(index, key.shape[1], key.shape[3], value.shape[3])

    def store(self, key: Tensor, value: Tensor) -> tuple[PagedKV, PagedKV]:
        """Write whole sequences to new pages, and return handles on stored K and V.

        Args:
            key: Keys, `[B, Hkv, T, Dk]`, any floating dtype.
            value: Values, `[B, Hkv, T, Dv]`, any floating dtype.
        """
        encoding = self._encoding
        if key.device != self._device:
            encoding.prepare(key, value)
            self._device = key.device
        batch, _, num_tokens, _ = key.shape
        num_pages = -(-num_tokens // self._options.page_size)
        with torch.no_grad():
            key, value = detach_if_needed(key), detach_if_needed(value)
            pool = self._options.make_pool(encoding.plan)
            pool.allocate(key, value, batch * num_pages)
            table = torch.arange(batch * num_pages, dtype=torch.int32, device=key.device)
            lengths = torch.full((batch,), num_tokens, dtype=torch.int32, device=key.device)
            pages = encoding.make_pages(pool, table.view(batch, num_pages))
            ops.write(pages, key, value, lengths, encoding.backend)
            return make_handles(
                pages,
                lengths,
                schedule=None,
                dtypes=(key.dtype, value.dtype),
                start=0,
                stop=num_tokens,
                window=0,
                is_ragged=False,
                backend=encoding.backend,
            )

    def read(
        self, handles: tuple[PagedKV, PagedKV], key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return rounded K and V. Gradients pass through the rounding unchanged.

        Args:
            handles: Handles that `store` returned.
            key: Keys, `[B, Hkv, T, Dk]`. The result has the same dtype.
            value: Values, `[B, Hkv, T, Dv]`. The result has the same dtype.
        """
        plan = self._encoding.plan
        k = key if plan.k.is_auto else straight_through(key, handles[0].dense())
        v = value if plan.v.is_auto else straight_through(value, handles[1].dense())
        return k, v

    def attend(self, call: Call) -> tuple[Tensor, Tensor | None]:
        """Compute attention over stored K and V of whole sequences, with a dense gradient.

        The result has the same bits as with a cache. With dense K and V the last bit would differ,
        and the next layer might then store different codes.
        """
        _, query, key, value, spec, dropout, kwargs = call
        if spec.deterministic and isinstance(spec.mask, CompactMask):
            return self._attend_padded(call, spec.mask), None
        handles = self.store(key, value)
        if dropout or requires_dense(kwargs):
            key, value = self.read(handles, key, value)
            return attend_with_transformers(call._replace(key=key, value=value))
        stored_spec = drop_mask(query, handles[0], spec) if spec.deterministic else spec
        output = attend_stored(query, handles[0], stored_spec)
        inputs = (query, key, value, spec.sinks, spec.bias, spec.mask)
        if not torch.is_grad_enabled() or not any(
            tensor is not None and tensor.requires_grad for tensor in inputs
        ):
            return output, None
        key, value = self.read(handles, key, value)
        dense_output, _ = attend_with_transformers(
            call._replace(key=key, value=value, spec=spec._replace(deterministic=False))
        )
        return straight_through(dense_output, output.to(dense_output.dtype)), None

    def _attend_padded(self, call: Call, mask: CompactMask) -> Tensor:
        """Move padded sequences to the first positions, as in a cache without padding, and attend.

        The padding follows the tokens of its sequence, so causality hides the padding.
        """
        num_tokens = call.key.shape[2]
        columns = torch.arange(num_tokens, device=call.key.device)
        order = (columns + mask.bounds[:, :1]) % num_tokens
        check_padding(mask.token_mask[:, 0, 0].expand(len(order), -1).gather(1, order))
        inputs = (call.query, call.key, call.value)
        query, key, value = (
            states.gather(2, order[:, None, :, None].expand_as(states)) for states in inputs
        )
        call = call._replace(query=query, key=key, value=value, spec=call.spec._replace(mask=None))
        output, _ = self.attend(call)
        inverse_order = order.argsort(1)[:, :, None, None]
        return output.gather(1, inverse_order.expand_as(output))


def prepare_rounding(
    model: PreTrainedModel, training: object, cache: FP8PagedCache, *, always_paged: bool
) -> dict[torch.nn.Module, StoredRounding]:
    """Return the rounding of K and V for each attention module.

    Args:
        model: The model. It is run on three tokens, to find the layer that each module reads.
        training: None or "stored". With None nothing is rounded.
        cache: An empty cache with the options of `enable`.
        always_paged: Whether to attend over pages even if all layers keep the model's dtype.

    Raises:
        ConfigError: The model or an option is not supported.
        ScaleError: The static scales do not fit a layer.
    """
    if training is None:
        return {}
    if training != "stored":
        raise ConfigError(f"training: expected None or 'stored', got {training!r}")
    cache.options.check_stored("training='stored'")
    reason = ""
    if model.config.is_encoder_decoder:
        reason = "is an encoder-decoder"
    elif not model._can_set_attn_implementation():
        reason = "has its own attention code and does not use transformers' attention registry"
    elif describe_rounding(model) == ROUNDING_NOTE:
        reason = "already rounds K and V in calls without a cache, by compressed-tensors"
    if reason:
        raise ConfigError(
            "training='stored': expected a decoder that uses transformers' attention registry, got "
            f"{type(model).__name__}, which {reason}. Leave training out"
        )
    roundings = _probe_roundings(model, cache.options, find_stock_layers(cache))
    is_exact = all(plan.k.is_auto and plan.v.is_auto for plan in cache.plan.values())
    if is_exact and not always_paged:
        return {}
    return roundings


def _probe_roundings(
    model: PreTrainedModel, options: CacheOptions, stock_layers: list[int]
) -> dict[torch.nn.Module, StoredRounding]:
    """Return the rounding of the stored layer that each attention module reads.

    A layer may share the keys of another layer, which only the cache can identify.
    """
    # These options need no scales, and avoid the warning about scales in the checkpoint.
    cache = FP8PagedCache(
        model.config,
        dtype=AUTO,
        scales=1.0,
        prefill="stored",
        backend="torch",
        skip_layers=stock_layers,
        tensor_parallel=options.tensor_parallel,
    )
    roundings: dict[torch.nn.Module, StoredRounding] = {}

    def record(module: torch.nn.Module, _query: Any, key: Any, value: Any, _kwargs: Any) -> None:
        is_stored = isinstance(key, PagedKV) and isinstance(value, PagedKV)
        if is_stored and not reads_stored_latents(module):
            owners = [
                layer
                for layer in cache.paged_layers
                if layer.pool.is_allocated and layer.pool.blocks.tensors[0] is key.block
            ]
            if len(owners) == 1 and value.block is key.block:
                roundings[module] = StoredRounding(options, owners[0].index, key, value)

    try:
        ids = torch.ones((1, 3), dtype=torch.long, device=model.device)
        with torch.no_grad(), eval_mode(model), watched_attention(model, record):
            model(input_ids=ids, **with_cache(model, cache))
    except FP8KVError:
        raise
    except Exception as error:
        raise ConfigError(
            "training='stored': expected a model that can be run on three tokens, got "
            f"{type(model).__name__}: {type(error).__name__}: {error}. Call enable() after its "
            "weights are loaded, and before it is wrapped or sharded"
        ) from error
    stored_indices = {layer.index for layer in cache.paged_layers if layer.get_seq_length()}
    unread_layers = sorted(stored_indices - {rounding.index for rounding in roundings.values()})
    if unread_layers:
        raise ConfigError(
            f"training='stored': expected attention to the keys and values that a cache stores, "
            f"got layers {unread_layers} of {type(model).__name__}, which change them in between "
            "or do not use transformers' attention registry (see check_model). Keep these layers "
            f"in the model's dtype (skip_layers={unread_layers})"
        )
    return roundings


def straight_through(states: Tensor, rounded: Tensor) -> Tensor:
    """Return `rounded`, with the gradient of `states`, which has the same shape and dtype."""
    return _StraightThrough.apply(states, rounded)  # type: ignore[no-any-return, no-untyped-call]


class _StraightThrough(torch.autograd.Function):
    """Returns `rounded`, and passes the gradient of the result to `states`."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, rounded: Tensor) -> Tensor:
        # `states` plus the difference would not be exactly `rounded`.
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
