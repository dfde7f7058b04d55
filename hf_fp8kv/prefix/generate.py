"""Reuse of prefixes: `generate` only computes the tokens of a prompt that its cache does not share.

transformers assumes that a cache holds the beginning of the prompt, without a check. Two methods of
an enabled model receive the tokens of each step, and pass them to the cache.
"""

import logging
from typing import Any

import torch
import transformers
from transformers.cache_utils import DynamicLayer

from ..cache.cache import FP8PagedCache
from ..cache.held_text import UNKNOWN, Text, can_crop
from ..errors import ConfigError, FP8KVError
from ..modeling.identity import identify_model
from ..modeling.methods import ModelMethod
from ..modeling.model_support import CACHE
from ..utils.warn_once import warn_once
from .pages import StoredPrompt, check_store, identify_options

logger = logging.getLogger(__name__)

# Arguments of a model that do not change the keys and values of its tokens.
_NEUTRAL = (
    "attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep", "return_dict",
    "output_attentions", "output_hidden_states", "output_router_logits",
)  # fmt: skip

# Before 5.21, transformers assumes an empty cache for a prompt that is computed in chunks.
CHUNKS_BEGIN_EMPTY = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 21)


class Prefill(ModelMethod):
    """A model's `_prefill`, which receives the whole prompt.

    Its arguments are whether a prompt may diverge from the text of a cache, and the model's
    `PrefixStore` or None.
    """

    name = "_prefill"

    def __call__(
        self, input_ids: Any, config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        cache, (reuse_prefix, store) = model_kwargs.get(CACHE), self.arguments
        if not isinstance(cache, FP8PagedCache):
            return self.stock(input_ids, config, model_kwargs, *args, **kwargs)
        if store is not None:
            check_store(store, cache.options, self.model.config, cache)
        text = _find_text(input_ids, config, model_kwargs) if reuse_prefix else None
        old_text, kwargs_copy, prompt = cache.text, dict(model_kwargs), StoredPrompt(store, cache)

        def compute() -> Any:
            cache.text = (text or old_text) and UNKNOWN  # until the whole prompt is stored
            with prompt.kept():
                return self.stock(input_ids, config, model_kwargs, *args, **kwargs)

        try:
            if text is not None:
                self._begin(prompt, cache, text, config)
            try:
                outputs = compute()
            except ConfigError as error:
                if not prompt.restored:
                    raise
                # The files are intact, but their heads or dtypes are not the model's.
                prompt.forget(error)
                model_kwargs.clear()
                model_kwargs.update(kwargs_copy)
                outputs = compute()
            if text is None and old_text is not UNKNOWN:
                # Embeddings or images follow the known tokens.
                cache.beginning, cache.text, cache.last_step = old_text or cache.beginning, None, 0
            # Wrappers of a model may add tokens to a prompt.
            elif text is not None and {*cache._paged.host_lengths()} <= {0, text.length}:
                cache.beginning, cache.text, cache.last_step = None, text, 0
        except BaseException as error:
            _record_remaining_text(cache, text, error)
            raise
        return outputs

    def _begin(self, prompt: StoredPrompt, cache: FP8PagedCache, text: Text, config: Any) -> None:
        """Keep the tokens that a cache shares with a text, and restore more from the store."""
        begins_empty = CHUNKS_BEGIN_EMPTY and config.prefill_chunk_size
        identity = self._identify(cache)
        # This includes pages without an identity: the model has dropout or unhashable weights.
        differs = identity != cache.identity and (cache.identity or cache.text is not None)
        if begins_empty or differs:
            cache.reset()
        cache.reused += len(text.ids) * _keep_prefix(cache, text)
        cache.identity, cache.text = identity, UNKNOWN
        if identity and not cache.is_assumed:
            prompt.find(identity, text)
            if not begins_empty:
                prompt.restore()

    def _identify(self, cache: FP8PagedCache) -> str:
        """Return everything that pages depend on, except tokens, or "" if they cannot be stored."""
        model, store = self.model, self.arguments[1]
        # Check all modules: an adapter that was added to a model in eval mode has dropout.
        if store is None or any(module.training for module in model.modules()):
            return ""
        try:
            stores = cache._paged.stores
            layers = ((x.encoding.index, x.group.window, x.encoding.plan) for x in stores)
            return identify_model(model) + identify_options(cache.options, layers)
        except ConfigError as error:
            warn_once(logger, f"{store} is not used: {error}")
            return ""


def _keep_prefix(cache: FP8PagedCache, text: Text) -> int:
    """Keep the tokens that the cache shares with `text`, except the last token of `text`.

    All sequences keep the same number of tokens. The cache is emptied if its tokens are unknown, or
    if a layer cannot remove the other tokens (a window that has moved on, a recurrent state). If
    the cache never received token ids, it is assumed to hold the beginning of `text`.

    Returns:
        The number of kept tokens.

    Raises:
        ConfigError: The cache never received token ids, and is not shorter than `text`.
    """
    lengths = {stored for stored in cache._paged.host_lengths() if stored}
    lengths |= {
        int(layer.get_seq_length())
        for layer in cache.stock_layers
        if isinstance(layer, DynamicLayer) and layer.is_initialized
    }
    length = max(lengths, default=0) or int(cache.get_seq_length())
    # A step may have been interrupted between two layers.
    cached = UNKNOWN if len(lengths) > 1 else cache.text
    if cached is None and (known := cache.beginning) is not None:
        same = known.match(text) == (list(range(len(text.ids))), known.length)
        cached = None if same and text.length > length else known
    if cached is None:
        cache.is_assumed = length > 0
        if length and text.length <= length:
            raise ConfigError(
                f"expected a prompt that begins with the {length} tokens of the cache and adds at "
                f"least one, got {text.length} tokens; the cache did not receive its tokens from "
                "generate() of an enabled model, so they cannot be compared: call crop() or "
                "reset(), or make a new cache"
            )
        return length
    # The last step may also have ended before any layer stored its tokens.
    undone = cache.last_step if cached.length == length + cache.last_step else 0
    if undone:
        cached = cached.crop(undone)
    rows, shared = cached.match(text)
    shared = min(shared, text.length - 1)
    if (
        not shared
        or cached.length > length  # layers were changed individually
        or (undone and cache.stock_layers)  # a recurrent state may already include the last step
        or not _can_crop(cache, length - shared)
    ):
        cache.reset()
        cache.is_assumed = False
        return 0
    if rows != list(range(len(cached.ids))):
        cache.batch_select_indices(torch.tensor(rows, device="cpu"))
    if shared < length:
        cache.crop(shared - length)
    return shared


def _record_remaining_text(cache: FP8PagedCache, text: Text | None, error: BaseException) -> None:
    """Record which part of `text` the cache holds after a call that raised `error`.

    Errors of this package are raised before a layer stores anything. transformers' layers cannot be
    rolled back, and other errors may occur anywhere. In these cases the cache is emptied.
    """
    if cache.text is not UNKNOWN or text is None:
        return  # nothing has changed, or the next known text will empty the cache
    lengths = set(cache._paged.host_lengths())
    if not isinstance(error, FP8KVError) or len(lengths) > 1 or cache.stock_layers:
        cache.reset()
    elif cache.is_assumed:
        cache.text = None
    else:
        cache.text, cache.last_step = text.crop(text.length - lengths.pop()), 0


def _can_crop(cache: FP8PagedCache, tokens: int) -> bool:
    """Return whether every layer can remove its last `tokens` tokens."""
    if not tokens:
        return True
    try:
        cache._paged.check_crop(tokens)
    except ConfigError:
        return False
    return all(can_crop(layer, tokens) for layer in cache.stock_layers)


def _find_text(ids: torch.Tensor, config: Any, model_kwargs: dict[str, Any]) -> Text | None:
    """Return the whole text of a `generate`, or None if it does not only consist of tokens."""
    mask, positions = (model_kwargs.get(name) for name in ("attention_mask", "position_ids"))
    # As in transformers, the mask covers all tokens, so its width shows whether `ids` has them all.
    width = getattr(config, "_mask_length", -1) if mask is None else mask.shape[1]
    other_inputs = [
        name for name, x in model_kwargs.items() if x is not None and name not in _NEUTRAL
    ]
    is_whole = width == ids.shape[1] and (positions is None or positions.shape[-1] == width)
    if ids.ndim != 2 or not is_whole or other_inputs or config.is_assistant:
        return None
    return Text(ids, mask, positions)


class PrepareInputs(ModelMethod):
    """A model's `prepare_inputs_for_generation`, which receives all tokens in each step."""

    name = "prepare_inputs_for_generation"

    def __call__(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get(CACHE)
        # During a prefill the text is None or `UNKNOWN`, and does not change.
        if isinstance(cache, FP8PagedCache) and (text := cache.text) is not None:
            # Assisted decoding has no prefill, and its first call may only pass new tokens.
            is_new = text is UNKNOWN or kwargs.get("is_first_iteration", False)
            cache.last_step = 0 if is_new else input_ids.shape[1] - text.length
            cache.text = UNKNOWN if is_new else Text(input_ids, text.mask, text.positions)
        return self.stock(input_ids, *args, **kwargs)
