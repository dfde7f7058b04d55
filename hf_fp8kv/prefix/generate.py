"""Reuse of prefixes: `generate()` only computes the tokens of a prompt that its cache lacks.

transformers assumes, without a check, that a cache holds the beginning of the prompt. Two methods
of an enabled model receive the tokens of each step, and pass them to the cache.
"""

import logging
from typing import Any

import torch
import transformers
from transformers.cache_utils import DynamicLayer

from ..cache.cache import FP8PagedCache
from ..cache.tokens import UNKNOWN, Tokens, can_crop
from ..errors import ConfigError, FP8KVError
from ..modeling.identity import identify_model
from ..modeling.methods import ModelMethod
from ..modeling.model_support import CACHE, changes_rope, find_cache_argument
from ..utils.warn_once import warn_once
from .pages import StoredPrompts, check_store, digest_options

logger = logging.getLogger(__name__)

# Arguments of a model that do not change the keys and values of its tokens.
_NEUTRAL_ARGUMENTS = (
    "attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep", "return_dict",
    "output_attentions", "output_hidden_states", "output_router_logits",
)  # fmt: skip

# Before 5.21, transformers assumes an empty cache for a prompt that is computed in chunks.
CHUNKS_NEED_EMPTY_CACHE = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 21)


class Prefill(ModelMethod):
    """A model's `_prefill`, which receives the whole prompt.

    `arguments` holds `reuse_prefix`, as in `enable`, and the model's `PrefixStore` or None.
    """

    name = "_prefill"

    def __call__(
        self, input_ids: Any, config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        cache, (reuse_prefix, store) = model_kwargs.get(CACHE), self.arguments
        if not isinstance(cache, FP8PagedCache):
            return self.original_method(input_ids, config, model_kwargs, *args, **kwargs)
        if store is not None:
            check_store(store, cache.options, self.model.config, cache)
        batch = _find_tokens(input_ids, config, model_kwargs) if reuse_prefix else None
        prompts = StoredPrompts(store, cache)
        old_batch, old_kwargs = cache.tokens, dict(model_kwargs)

        def compute_prompt() -> Any:
            cache.tokens = (batch or old_batch) and UNKNOWN  # until the whole prompt is stored
            with prompts.store_after_prefill():
                return self.original_method(input_ids, config, model_kwargs, *args, **kwargs)

        try:
            if batch is not None:
                self._prepare(prompts, cache, batch, config)
            try:
                outputs = compute_prompt()
            except ConfigError as error:
                if not prompts.num_restored:
                    raise
                # The files are intact, but have numbers of heads or dtypes of a different model.
                prompts.undo_restore(error)
                model_kwargs.clear()
                model_kwargs.update(old_kwargs)
                outputs = compute_prompt()
            if batch is None and old_batch is not UNKNOWN:
                # Embeddings or images follow the known tokens.
                cache.known_prefix, cache.tokens = old_batch or cache.known_prefix, None
                cache.step_tokens = 0
            # A wrapper of the model may add tokens to the prompt, so lengths are compared.
            elif batch is not None and {*cache._paged.read_lengths()} <= {0, batch.length}:
                cache.known_prefix, cache.tokens, cache.step_tokens = None, batch, 0
        except BaseException as error:
            _record_kept_tokens(cache, batch, error)
            raise
        return outputs

    def _prepare(
        self, prompts: StoredPrompts, cache: FP8PagedCache, batch: Tokens, config: Any
    ) -> None:
        """Keep the tokens that a cache shares with a prompt, and restore more if possible."""
        needs_empty_cache = CHUNKS_NEED_EMPTY_CACHE and config.prefill_chunk_size
        identity = self._identify(cache)
        # Tokens without an identity also count, after a call with dropout or unhashable weights.
        is_outdated = identity != cache.identity and (cache.identity or cache.tokens is not None)
        if needs_empty_cache or is_outdated:
            cache.reset()
        cache.reused_tokens += len(batch.ids) * _keep_shared_prefix(cache, batch)
        cache.identity, cache.tokens = identity, UNKNOWN
        if identity and not cache.has_assumed_prefix:
            prompts.compute_keys(identity, batch)
            if not needs_empty_cache:
                prompts.restore()

    def _identify(self, cache: FP8PagedCache) -> str:
        """Return a digest of all that pages depend on, except tokens, or "" if none are stored."""
        model, store = self.model, self.arguments[1]
        # All modules are checked, because an adapter added to a model in eval mode has dropout.
        if store is None or any(module.training for module in model.modules()):
            return ""
        try:
            stores = cache._paged.stores
            layers = ((x.encoding.index, x.group.window, x.encoding.plan) for x in stores)
            return identify_model(model) + digest_options(cache.options, layers)
        except ConfigError as error:
            warn_once(logger, f"{store} is not used: {error}")
            return ""


def _keep_shared_prefix(cache: FP8PagedCache, batch: Tokens) -> int:
    """Keep the tokens that the cache shares with `batch`, except the last token of `batch`.

    All sequences keep the same number of tokens. The cache is emptied if its tokens are unknown, or
    if a layer cannot remove the remaining tokens (a window that has moved on, a recurrent state).
    If the cache never received token ids, it is assumed to hold the beginning of `batch`.

    Returns:
        The number of tokens that each sequence keeps.

    Raises:
        ConfigError: The cache never received token ids, and is not shorter than `batch`.
    """
    lengths = {*cache._paged.read_lengths()} - {0}
    lengths |= {
        int(layer.get_seq_length())
        for layer in cache.stock_layers
        if isinstance(layer, DynamicLayer) and layer.is_initialized
    }
    length = max(lengths, default=0) or int(cache.get_seq_length())
    # A step may have been interrupted between two layers.
    cached_batch = UNKNOWN if len(lengths) > 1 else cache.tokens
    if cached_batch is None and (prefix := cache.known_prefix) is not None:
        is_prefix = prefix.match(batch) == (list(range(len(batch.ids))), prefix.length)
        cached_batch = None if is_prefix and batch.length > length else prefix
    if cached_batch is None:
        cache.has_assumed_prefix = length > 0
        if length and batch.length <= length:
            raise ConfigError(
                f"expected a prompt that begins with the {length} tokens of the cache and adds at "
                f"least one, got {batch.length} tokens. The cache did not receive its tokens from "
                "generate() of an enabled model, so they cannot be compared. Call crop() or "
                "reset(), or make a new cache"
            )
        return length
    # The last step may also have ended before any layer stored its tokens.
    num_undone = cache.step_tokens if cached_batch.length == length + cache.step_tokens else 0
    if num_undone:
        cached_batch = cached_batch.crop(num_undone)
    rows, num_shared = cached_batch.match(batch)
    num_shared = min(num_shared, batch.length - 1)
    if (
        not num_shared
        or changes_rope(cache.config, (cached_batch.length, batch.length, num_shared))
        or cached_batch.length > length  # layers were changed individually
        or (num_undone and cache.stock_layers)  # a recurrent state may include the last step
        or not _can_crop_layers(cache, length - num_shared)
    ):
        cache.reset()
        cache.has_assumed_prefix = False
        return 0
    if rows != list(range(len(cached_batch.ids))):
        cache.batch_select_indices(torch.tensor(rows, device="cpu"))
    if num_shared < length:
        cache.crop(num_shared - length)
    return num_shared


def _record_kept_tokens(cache: FP8PagedCache, batch: Tokens | None, error: BaseException) -> None:
    """Record which part of `batch` the cache holds after a call that raised `error`.

    Errors of this package are raised before a layer stores anything. transformers' layers cannot be
    rolled back, and all other errors may occur anywhere. In both cases the cache is emptied.
    """
    if cache.tokens is not UNKNOWN or batch is None:
        return  # nothing has changed, or the next prompt with token ids empties the cache
    lengths = set(cache._paged.read_lengths())
    if not isinstance(error, FP8KVError) or len(lengths) > 1 or cache.stock_layers:
        cache.reset()
    elif cache.has_assumed_prefix:
        cache.tokens = None
    else:
        cache.tokens, cache.step_tokens = batch.crop(batch.length - lengths.pop()), 0


def _can_crop_layers(cache: FP8PagedCache, num_tokens: int) -> bool:
    """Return whether every layer can remove its last `num_tokens` tokens."""
    if not num_tokens:
        return True
    try:
        cache._paged.check_crop(num_tokens)
    except ConfigError:
        return False
    return all(can_crop(layer, num_tokens) for layer in cache.stock_layers)


def _find_tokens(ids: torch.Tensor, config: Any, model_kwargs: dict[str, Any]) -> Tokens | None:
    """Return the tokens of a prompt, or None if it has other inputs or is not complete."""
    mask, positions = (model_kwargs.get(name) for name in ("attention_mask", "position_ids"))
    # As in transformers, the mask covers all tokens, so its width shows whether `ids` is complete.
    width = getattr(config, "_mask_length", -1) if mask is None else mask.shape[1]
    other_inputs = [
        name for name, x in model_kwargs.items() if x is not None and name not in _NEUTRAL_ARGUMENTS
    ]
    is_complete = width == ids.shape[1] and (positions is None or positions.shape[-1] == width)
    if ids.ndim != 2 or not is_complete or other_inputs or config.is_assistant:
        return None
    return Tokens(ids, mask, positions)


class InputPreparation(ModelMethod):
    """A model's `prepare_inputs_for_generation`, which receives all tokens in each step."""

    name = "prepare_inputs_for_generation"

    def __call__(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get(CACHE)
        # During a prefill, `tokens` is None or `UNKNOWN`, and does not change.
        if isinstance(cache, FP8PagedCache) and (batch := cache.tokens) is not None:
            # Assisted decoding has no prefill, and its first call may only pass new tokens.
            is_unknown = batch is UNKNOWN or kwargs.get("is_first_iteration", False)
            cache.step_tokens = 0 if is_unknown else input_ids.shape[1] - batch.length
            cache.tokens = UNKNOWN if is_unknown else Tokens(input_ids, batch.mask, batch.positions)
        inputs: dict[str, Any] = self.original_method(input_ids, *args, **kwargs)
        is_dropped = inputs.get(CACHE, inputs.get("past_key_values")) is None
        if isinstance(cache, FP8PagedCache) and is_dropped:
            # Phi-3 drops its cache when the frequencies of RoPE change, to compute all tokens again
            # in a new one. Here, they are computed again in the same cache.
            old_tokens = cache.tokens, cache.known_prefix
            cache.reset()
            cache.tokens, cache.known_prefix = old_tokens
            cache.step_tokens = input_ids.shape[1]
            kwargs |= {"next_sequence_length": None, "is_first_iteration": True}
            inputs = self.original_method(input_ids, *args, **kwargs)
            inputs[find_cache_argument(type(self.model))] = cache
        return inputs
