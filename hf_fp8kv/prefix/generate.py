"""Reuse: `generate` with a text whose beginning a cache holds goes on where the two part.

transformers takes what a cache holds for the beginning of the prompt, without a look at either. Two
methods of an enabled model are given the tokens of each step, and tell the cache.
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

# What a model may be given beside tokens, such that the same tokens have the same keys and values.
_NEUTRAL = (
    "attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep", "return_dict",
    "output_attentions", "output_hidden_states", "output_router_logits",
)  # fmt: skip

# Before 5.21 a prompt that is computed in chunks is taken to begin in an empty cache.
CHUNKS_BEGIN_EMPTY = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 21)


class Prefill(ModelMethod):
    """`_prefill` of a model, which is given a prompt before any of it is cut off.

    Its arguments are whether a prompt and the text of a cache may diverge, and the `PrefixStore` of
    the model or None.
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
        told, given, prompt = cache.text, dict(model_kwargs), StoredPrompt(store, cache)

        def compute() -> Any:
            cache.text = (text or told) and UNKNOWN  # until all of the prompt is stored
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
                # The files are whole, and say that the model has other heads or dtypes than it has.
                prompt.forget(error)
                model_kwargs.clear()
                model_kwargs.update(given)
                outputs = compute()
            if text is None and told is not UNKNOWN:
                # Embeddings or images follow a known text.
                cache.beginning, cache.text, cache.last_step = told or cache.beginning, None, 0
            # Wrappers of a model may add tokens to a prompt.
            elif text is not None and {*cache._paged.host_lengths()} <= {0, text.length}:
                cache.beginning, cache.text, cache.last_step = None, text, 0
        except BaseException as error:
            _hold_what_is_left(cache, text, error)
            raise
        return outputs

    def _begin(self, prompt: StoredPrompt, cache: FP8PagedCache, text: Text, config: Any) -> None:
        """Let a cache hold what is known of a text: by itself, or by the store."""
        begins_empty = CHUNKS_BEGIN_EMPTY and config.prefill_chunk_size
        identity = self._identify(cache)
        # Also pages of no identity: made with dropout, or by weights that could not be hashed.
        is_other = identity != cache.identity and (cache.identity or cache.text is not None)
        if begins_empty or is_other:
            cache.reset()
        cache.reused += len(text.ids) * _keep_prefix(cache, text)
        cache.identity, cache.text = identity, UNKNOWN
        if identity and not cache.takes_on_trust:
            prompt.find(identity, text)
            if not begins_empty:
                prompt.restore()

    def _identify(self, cache: FP8PagedCache) -> str:
        """Return the identity of stored pages without their tokens, or "" if they are unusable."""
        model, store = self.model, self.arguments[1]
        # One module is enough: an adapter that was added to a model in eval mode has dropout.
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
    """Keep the tokens that the cache shares with `text`, except its last, and count them.

    All sequences keep the same number of tokens. The cache is emptied if its layers cannot go
    back that far (a window that has moved on, a recurrent state), or if its text is not known
    any more. A cache that never got a text is taken to hold the beginning of `text`.

    Raises:
        ConfigError: The cache never got a text, and it is not shorter than `text`.
    """
    lengths = {stored for stored in cache._paged.host_lengths() if stored}
    lengths |= {
        int(layer.get_seq_length())
        for layer in cache.stock_layers
        if isinstance(layer, DynamicLayer) and layer.is_initialized
    }
    length = max(lengths, default=0) or int(cache.get_seq_length())
    # A step may have been interrupted between two layers.
    held = UNKNOWN if len(lengths) > 1 else cache.text
    if held is None and (known := cache.beginning) is not None:
        same = known.match(text) == (list(range(len(text.ids))), known.length)
        held = None if same and text.length > length else known
    if held is None:
        cache.takes_on_trust = length > 0
        if length and text.length <= length:
            raise ConfigError(
                f"expected a prompt of more than {length} tokens, which begins with those that "
                f"the cache holds, got {text.length}; the cache did not get them from "
                "generate() of an enabled model, so it cannot tell whether they are the same: "
                "call crop() or reset(), or make a new cache"
            )
        return length
    # Or before any layer stored the tokens of the last step.
    undone = cache.last_step if held.length == length + cache.last_step else 0
    if undone:
        held = held.crop(undone)
    rows, shared = held.match(text)
    shared = min(shared, text.length - 1)
    if (
        not shared
        or held.length > length  # the layers were changed one by one
        or (undone and cache.stock_layers)  # a recurrent state may be further on
        or not _can_crop(cache, length - shared)
    ):
        cache.reset()
        cache.takes_on_trust = False
        return 0
    if rows != list(range(len(held.ids))):
        cache.batch_select_indices(torch.tensor(rows, device="cpu"))
    if shared < length:
        cache.crop(shared - length)
    return shared


def _hold_what_is_left(cache: FP8PagedCache, text: Text | None, error: BaseException) -> None:
    """Note which part of `text` the cache holds after a call that raised `error`.

    This package's errors are raised before a layer stores anything. transformers' layers have
    no such rollback, and other errors may come at any line: the cache is then emptied.
    """
    if cache.text is not UNKNOWN or text is None:
        return  # nothing has changed yet, or the next known text empties the cache
    lengths = set(cache._paged.host_lengths())
    if not isinstance(error, FP8KVError) or len(lengths) > 1 or cache.stock_layers:
        cache.reset()
    elif cache.takes_on_trust:
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
    """Return the whole text of a `generate`, or None if it is not known by its tokens alone."""
    mask, positions = (model_kwargs.get(name) for name in ("attention_mask", "position_ids"))
    # So transformers tells new tokens alone from all tokens: the mask is that of all.
    width = getattr(config, "_mask_length", -1) if mask is None else mask.shape[1]
    others = [name for name, x in model_kwargs.items() if x is not None and name not in _NEUTRAL]
    is_whole = width == ids.shape[1] and (positions is None or positions.shape[-1] == width)
    if ids.ndim != 2 or not is_whole or others or config.is_assistant:
        return None
    return Text(ids, mask, positions)


class PrepareInputs(ModelMethod):
    """`prepare_inputs_for_generation` of a model, which is given all tokens at each step."""

    name = "prepare_inputs_for_generation"

    def __call__(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get(CACHE)
        # During a prefill the text is None or `UNKNOWN`, and stays so.
        if isinstance(cache, FP8PagedCache) and (text := cache.text) is not None:
            # Assisted decoding has no prefill, and its first tokens may be new tokens alone.
            is_new = text is UNKNOWN or kwargs.get("is_first_iteration", False)
            cache.last_step = 0 if is_new else input_ids.shape[1] - text.length
            cache.text = UNKNOWN if is_new else Text(input_ids, text.mask, text.positions)
        return self.stock(input_ids, *args, **kwargs)
