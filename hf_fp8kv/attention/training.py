"""Training through the cache: whole texts whose K and V are rounded as a cache stores them.

The pages go with the call. The numbers come from the same operations as a cache's, so every format,
scale and backend is what it is there.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .. import ops
from ..cache.cache import FP8PagedCache
from ..cache.centers import FirstTokens
from ..cache.encoding import Encoding
from ..cache.options import CacheOptions
from ..cache.paged_tensor import PagedKV, make_handles
from ..errors import ConfigError, FP8KVError
from ..formats import AUTO
from ..modeling.exact_states import NOTE, rounding_note
from ..modeling.model_support import with_cache
from ..utils.tensors import without_grad
from .check_model import stock_indices
from .compact import CompactMask
from .deterministic import check_padding
from .fp8_paged import ROUNDING, Call, asks_dense, attend_stored, check_spec, dense_attention
from .switching import eval_mode, watched_attention


class StoredRounding:
    """How one layer's K and V are rounded: as a cache with these options stores and reads them.

    Dynamic scales are of one token, and static ones of the layer, so that it does not matter with
    which other tokens one is rounded.
    """

    def __init__(self, options: CacheOptions, index: int, key: Tensor, value: Tensor) -> None:
        """Look up what layer `index` stores with, for keys and values of these shapes.

        Raises:
            ScaleError: static scales of other heads.
        """
        self._options, self._encoding = options, Encoding(index, options, FirstTokens())
        self._device: torch.device | None = None  # a model without memory gets some later
        options.layer_scales(index, key.shape[1], key.shape[3], value.shape[3])

    def store(self, key: Tensor, value: Tensor) -> tuple[PagedKV, PagedKV]:
        """Write whole texts to pages of their own, and return the handles that a cache would.

        Args:
            key: `[B, Hkv, T, Dk]`, of any floating dtype.
            value: `[B, Hkv, T, Dv]`.
        """
        encoding = self._encoding
        if key.device != self._device:
            encoding.prepare(key, value)
            self._device = key.device
        batch, _, tokens, _ = key.shape
        columns = -(-tokens // self._options.page_size)
        with torch.no_grad():
            key, value = without_grad(key), without_grad(value)
            pool = self._options.new_pool(encoding.plan)
            pool.allocate(key, value, batch * columns)
            encoding.find_center(key, is_first=True)
            table = torch.arange(batch * columns, dtype=torch.int32, device=key.device)
            lengths = torch.full((batch,), tokens, dtype=torch.int32, device=key.device)
            pages = encoding.record(pool, table.view(batch, columns))
            ops.write(pages, key, value, lengths, encoding.backend)
            span = (0, tokens, 0, False, encoding.backend)
            return make_handles(pages, lengths, None, (key.dtype, value.dtype), *span)

    def read(
        self, stored: tuple[PagedKV, PagedKV], key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return K and V as they are read back; gradients pass as if nothing had been rounded.

        Args:
            stored: what `store` returned for them.
            key: `[B, Hkv, T, Dk]`; its dtype stays.
            value: `[B, Hkv, T, Dv]`.
        """
        k, v = (
            x if side.is_auto else straight_through(x, handle.dense())
            for x, handle, side in zip((key, value), stored, self._encoding.plan, strict=True)
        )
        return k, v

    def attend(self, call: Call) -> tuple[Tensor, Tensor | None]:
        """Attend over pages to K and V of a whole text, with the gradient of dense attention.

        The result is what a cache's pages give, to the bit: from dense K and V it would differ in
        the last one, and so would what the next layer stores, where that decides between two codes.
        """
        _, query, key, value, spec, dropout, kwargs = call
        if spec.deterministic and isinstance(spec.mask, CompactMask):
            return self._attend_padded(call, spec.mask), None
        stored = self.store(key, value)
        if dropout or asks_dense(kwargs):
            key, value = self.read(stored, key, value)
            return dense_attention(call._replace(key=key, value=value))
        seen = check_spec(query, stored[0], spec) if spec.deterministic else spec
        attended = attend_stored(query, stored[0], seen)
        inputs = (query, key, value, spec.sinks, spec.bias, spec.mask)
        if not torch.is_grad_enabled() or not any(
            x is not None and x.requires_grad for x in inputs
        ):
            return attended, None
        key, value = self.read(stored, key, value)
        for_gradient = spec._replace(deterministic=False)
        dense, _ = dense_attention(call._replace(key=key, value=value, spec=for_gradient))
        return straight_through(dense, attended.to(dense.dtype)), None

    def _attend_padded(self, call: Call, mask: CompactMask) -> Tensor:
        """Attend to texts moved to the first positions, where a cache without padding stores them.

        What comes after a text is padding, which it does not see.
        """
        tokens = call.key.shape[2]
        column = torch.arange(tokens, device=call.key.device)
        index = (column + mask.bounds[:, :1]) % tokens
        check_padding(mask.seen[:, 0, 0].expand(len(index), -1).gather(1, index))
        inputs = (call.query, call.key, call.value)
        query, key, value = (x.gather(2, index[:, None, :, None].expand_as(x)) for x in inputs)
        call = call._replace(query=query, key=key, value=value, spec=call.spec._replace(mask=None))
        attended, _ = self.attend(call)
        back = index.argsort(1)[:, :, None, None]
        return attended.gather(1, back.expand_as(attended))


def prepare_rounding(
    model: PreTrainedModel, training: object, cache_keywords: Mapping[str, Any], *, always: bool
) -> dict[torch.nn.Module, StoredRounding]:
    """Return for each attention module how it rounds K and V.

    Args:
        model: is run on three tokens, to see which keys and values reach which attention.
        training: None or "stored"; with None nothing is rounded.
        cache_keywords: of `FP8PagedCache`.
        always: attend over pages also where all layers are stored in the model's dtype.

    Raises:
        ConfigError: the model or a keyword does not fit. ScaleError, BackendError: a keyword.
    """
    if training is None:
        return {}
    if training != "stored":
        raise ConfigError(f"training: expected None or 'stored', got {training!r}")
    cache = FP8PagedCache(model.config, **cache_keywords)
    options = cache.options
    options.check_stored("training='stored'")
    why = ""
    if model.config.is_encoder_decoder:
        why = "is an encoder-decoder"
    elif not model._can_set_attn_implementation():
        why = "has attention code of its own, and looks up no attention function"
    elif rounding_note(model) == NOTE:
        why = "already rounds K and V in calls without a cache, by compressed-tensors"
    if why:
        raise ConfigError(
            "training='stored': expected a decoder that looks its attention up, got "
            f"{type(model).__name__}, which {why}; train it without"
        )
    found = _probe(model, stock_indices(cache), cache_keywords)
    if not always and all(side.is_auto for plan in cache.plan.values() for side in plan):
        return {}
    return {
        module: StoredRounding(options, index, key, value)
        for module, (index, key, value) in found.items()
    }


def _probe(
    model: PreTrainedModel, stock: list[int], cache_keywords: Mapping[str, Any]
) -> dict[torch.nn.Module, tuple[int, Any, Any]]:
    """Return which stored layer each attention module reads, with its keys and values.

    Layers may share the keys of another one, and only the cache knows of which.
    """
    # Nothing to say of scales that the checkpoint declares, and none to fit.
    cache = FP8PagedCache(
        model.config, dtype=AUTO, scales=1.0, prefill="stored", backend="torch",
        skip_layers=stock, tensor_parallel=cache_keywords["tensor_parallel"],
    )  # fmt: skip
    found: dict[torch.nn.Module, tuple[int, Any, Any]] = {}

    def record(module: torch.nn.Module, _query: Any, key: Any, value: Any, _call: Any) -> None:
        if isinstance(key, PagedKV) and isinstance(value, PagedKV):
            ready = [x for x in cache.paged_layers if x.is_initialized]
            owners = [x for x in ready if x.store.pool.blocks.tensors[0] is key.block]
            if len(owners) == 1 and value.block is key.block:
                found[module] = owners[0].index, key, value

    try:
        ids = torch.ones((1, 3), dtype=torch.long, device=model.device)
        with torch.no_grad(), eval_mode(model), watched_attention(model, record):
            model(input_ids=ids, **with_cache(model, cache))
    except FP8KVError:
        raise
    except Exception as error:
        raise ConfigError(
            "training='stored': expected a model that can be run on three tokens, got "
            f"{type(model).__name__}: {type(error).__name__}: {error}; call enable() where its "
            "weights are loaded, before it is wrapped or sharded"
        ) from error
    stored = {layer.index for layer in cache.paged_layers if layer.get_seq_length()}
    unread = sorted(stored - {index for index, *_ in found.values()})
    if unread:
        raise ConfigError(
            f"training='stored': expected attention to the keys and values that a cache stores, "
            f"got layers {unread} of {type(model).__name__}, which change them in between, or do "
            "not look their attention up (see check_model); keep these in the model's dtype "
            f"(skip_layers={unread})"
        )
    return found


def install_rounding(roundings: Mapping[torch.nn.Module, StoredRounding]) -> None:
    """Let attention modules round their K and V; see `enable`."""
    for module, rounding in roundings.items():
        vars(module)[ROUNDING] = rounding


def remove_rounding(model: torch.nn.Module) -> None:
    """Let no module of a model round any more."""
    for module in model.modules():
        vars(module).pop(ROUNDING, None)


def straight_through(states: Tensor, numbers: Tensor) -> Tensor:
    """Return `numbers`, with the gradient of `states`, whose shape and dtype they have."""
    return _StraightThrough.apply(states, numbers)  # type: ignore[no-any-return, no-untyped-call]


class _StraightThrough(torch.autograd.Function):
    """Returns `numbers`, and passes their gradient on to `states`."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, numbers: Tensor) -> Tensor:
        # Adding the difference to `states` would not give exactly these numbers.
        return numbers.view_as(numbers)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
