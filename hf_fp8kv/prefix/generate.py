"""Reuse: `generate` with a text whose beginning a cache holds goes on where the two part.

transformers takes what a cache holds for the beginning of the prompt, without a look at either. Two
methods of an enabled model are given the tokens of each step, and tell the cache.
"""

import inspect
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
import transformers

from ..cache.held_text import UNKNOWN, Text, TextHolder
from ..errors import ConfigError
from ..modeling.identity import identify_model
from ..modeling.model_support import CACHE
from ..utils.warn_once import warn_once
from .pages import forget_prefix, identify_options, kept_for_store, restore_prefix, row_keys

logger = logging.getLogger(__name__)

_PREFILL, _PREPARE = "_prefill", "prepare_inputs_for_generation"
# What a model may be given beside tokens, such that the same tokens have the same keys and values.
_NEUTRAL = frozenset(
    {
        "attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep", "return_dict",
        "output_attentions", "output_hidden_states", "output_router_logits",
    }
)  # fmt: skip

# Before 5.21 a prompt that is computed in chunks is taken to begin in an empty cache.
CHUNKS_BEGIN_EMPTY = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 21)


def install_reuse(model: Any) -> None:
    """Let each `generate` of a model tell its cache the text, and go back where texts part."""
    for name, method in ((_PREFILL, _Prefill), (_PREPARE, _PrepareInputs)):
        if hasattr(model, name) and not isinstance(vars(model).get(name), _Method):
            vars(model)[name] = method(model, name, vars(model).get(name))


def remove_reuse(model: Any) -> None:
    """Undo `install_reuse`."""
    for name in (_PREFILL, _PREPARE):
        method = vars(model).get(name)
        if isinstance(method, _Method):
            del vars(model)[name]
            if method.before is not None:
                vars(model)[name] = method.before


class _Method:
    """A method of one model; a copied model gets its own."""

    def __init__(self, model: Any, name: str, before: Callable[..., Any] | None) -> None:
        self._model = weakref.ref(model)  # weak, since the model holds this
        self._name, self.before = name, before

    @property
    def _stock(self) -> Callable[..., Any]:
        model = self._model()
        stock: Callable[..., Any] = self.before or getattr(type(model), self._name).__get__(model)
        return stock

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of what is called; transformers looks at it."""
        return inspect.signature(self._stock)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Method":
        model = self._model()
        return type(self)(memo.get(id(model), model), self._name, self.before)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._model(), self._name, self.before)


class _Prefill(_Method):
    """`_prefill` of a model, which is given a prompt before any of it is cut off."""

    def __call__(
        self, input_ids: Any, config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        cache = model_kwargs.get(CACHE)
        if not isinstance(cache, TextHolder):
            return self._stock(input_ids, config, model_kwargs, *args, **kwargs)
        text = _find_text(input_ids, config, model_kwargs) if cache.reuse_prefix else None
        told, given = cache.text, dict(model_kwargs)
        cache.in_prefill = True
        try:
            keys, restored = ([], 0) if text is None else self._begin(cache, text, config)
            cache.text = (text or told) and UNKNOWN  # until all of the prompt is stored
            try:
                with kept_for_store(cache, keys, text):
                    outputs = self._stock(input_ids, config, model_kwargs, *args, **kwargs)
            except ConfigError as error:
                if not restored:
                    raise
                # The files are whole, and say that the model has other heads or dtypes than it has.
                forget_prefix(cache, keys, restored, error)
                cache.text = UNKNOWN
                model_kwargs.clear()
                model_kwargs.update(given)
                with kept_for_store(cache, keys, text):
                    outputs = self._stock(input_ids, config, model_kwargs, *args, **kwargs)
            if text is None and told is not UNKNOWN:
                # Embeddings or images follow a known text.
                cache.beginning, cache.text, cache.last_step = told or cache.beginning, None, 0
            # Wrappers of a model may add tokens to a prompt.
            elif text is not None and cache._paged.host_length() in (0, text.length):
                cache.beginning, cache.text, cache.last_step = None, text, 0
        except BaseException as error:
            cache.hold_what_is_left(text, error)
            raise
        finally:
            cache.in_prefill = False
        return outputs

    def _begin(self, cache: TextHolder, text: Text, config: Any) -> tuple[list[list[str]], int]:
        """Let a cache hold what is known of a text.

        Return the keys of its pages in a store, for each row, and how many pages came from there.
        """
        begins_empty = CHUNKS_BEGIN_EMPTY and config.prefill_chunk_size
        identity = self._identify(cache)
        # Also pages of no identity: made with dropout, or by weights that could not be hashed.
        is_other = identity != cache.identity and (cache.identity or cache.text is not None)
        if begins_empty or is_other:
            cache.reset()  # type: ignore[no-untyped-call]
        cache.reused += len(text.ids) * cache.keep_prefix(text)
        cache.identity, cache.text = identity, UNKNOWN
        if not identity or cache.takes_on_trust:
            return [], 0
        size = cache.options.page_size
        keys = row_keys(identity, text, size)
        if not keys or begins_empty:
            return keys, 0
        return keys, restore_prefix(cache, keys, (text.length - 1) // size)

    def _identify(self, cache: TextHolder) -> str:
        """Return the identity of stored pages without their tokens, or "" if they are unusable."""
        model = self._model()
        if cache.prefix_store is None or model is None:
            return ""
        # One module is enough: an adapter that was added to a model in eval mode has dropout.
        if any(module.training for module in model.modules()):
            return ""
        try:
            layers = ((x.index, x.sliding_window, x.storage) for x in cache._paged.layers)
            return identify_model(model) + identify_options(cache.options, layers)
        except ConfigError as error:
            warn_once(logger, f"{cache.prefix_store} is not used: {error}")
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


class _PrepareInputs(_Method):
    """`prepare_inputs_for_generation` of a model, which is given all tokens at each step."""

    def __call__(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get(CACHE)
        if isinstance(cache, TextHolder) and cache.text is not None and not cache.in_prefill:
            # Assisted decoding has no prefill, and its first tokens may be new tokens alone.
            is_new = cache.text is UNKNOWN or kwargs.get("is_first_iteration", False)
            cache.last_step = 0 if is_new else input_ids.shape[1] - cache.text.length
            cache.text = UNKNOWN if is_new else cache.text.extend(input_ids)
        return self._stock(input_ids, *args, **kwargs)
