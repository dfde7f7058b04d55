"""Reuse: `generate` with a text whose beginning a cache holds goes on where the two part.

transformers takes what a cache holds for the beginning of the prompt, without a look at either. Two
methods of an enabled model are given the tokens of each step, and tell the cache.
"""

import logging
from typing import Any

import torch
import transformers

from ..cache.held_text import UNKNOWN, Text, TextHolder
from ..errors import ConfigError
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
        if not isinstance(cache, TextHolder):
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
            cache.hold_what_is_left(text, error)
            raise
        return outputs

    def _begin(self, prompt: StoredPrompt, cache: TextHolder, text: Text, config: Any) -> None:
        """Let a cache hold what is known of a text: by itself, or by the store."""
        begins_empty = CHUNKS_BEGIN_EMPTY and config.prefill_chunk_size
        identity = self._identify(cache)
        # Also pages of no identity: made with dropout, or by weights that could not be hashed.
        is_other = identity != cache.identity and (cache.identity or cache.text is not None)
        if begins_empty or is_other:
            cache.reset()  # type: ignore[no-untyped-call]
        cache.reused += len(text.ids) * cache.keep_prefix(text)
        cache.identity, cache.text = identity, UNKNOWN
        if identity and not cache.takes_on_trust:
            prompt.find(identity, text)
            if not begins_empty:
                prompt.restore()

    def _identify(self, cache: TextHolder) -> str:
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
        if isinstance(cache, TextHolder) and (text := cache.text) is not None:
            # Assisted decoding has no prefill, and its first tokens may be new tokens alone.
            is_new = text is UNKNOWN or kwargs.get("is_first_iteration", False)
            cache.last_step = 0 if is_new else input_ids.shape[1] - text.length
            cache.text = UNKNOWN if is_new else Text(input_ids, text.mask, text.positions)
        return self.stock(input_ids, *args, **kwargs)
