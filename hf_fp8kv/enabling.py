"""Enabling: an FP8 cache for every `generate()` of a model, without a keyword."""

import copy
import functools
import logging
from typing import Any, TypeVar

import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from .attention import latent
from .attention.check_model import probe_deterministic, stock_indices
from .attention.deterministic import install_deterministic, remove_deterministic
from .attention.switching import get_implementations, set_implementations
from .attention.training import install_rounding, prepare_rounding, remove_rounding
from .cache.cache import FP8PagedCache
from .calibration.plan_choice import resolve_plan
from .errors import ConfigError
from .modeling.exact_states import warn_of_rounding
from .modeling.methods import ModelMethod, remove_methods
from .modeling.model_support import ATTENTION, CACHE, refusal
from .modeling.tensor_parallel import tensor_parallel
from .ops import choose_backend, load_backend
from .prefix.generate import Prefill, PrepareInputs
from .prefix.pages import check_store
from .prefix.store import PrefixStore
from .scales.kv_scales import StoragePlan, warn_if_stale
from .utils.digests import digest_weights

logger = logging.getLogger(__name__)

_SAVED = "_hf_fp8kv_enabled"
_HOOK = "_prepare_cache_for_generation"
# The name that generate() has for a growing cache in host memory.
OFFLOADED = "offloaded"
# Types of PEFT's adapters that put keys and values into the cache.
_PREFIXES = ("PREFIX_TUNING", "CARTRIDGE")
_Model = TypeVar("_Model")


def enable(
    model: _Model,
    *,
    deterministic: bool = False,
    training: str | None = None,
    reuse_prefix: bool = True,
    prefix_store: PrefixStore | None = None,
    **cache_keywords: Any,
) -> _Model:
    """Make `model.generate()`, and pipelines of this model, use an FP8 cache from now on.

    Each call gets a new cache, unless it passes one, or asks for another kind of cache or for
    none. The attention is set to "fp8_paged" if the model's attention can be set. Call again to
    change the keywords; `disable` undoes everything.

    With `training="stored"` calls without a cache, in train and in eval mode, read K and V rounded
    exactly as these caches store them (and as `serving` does with the same keywords), for trainers
    that compute the probabilities of generated text again. Gradients pass the rounding as if it
    were not there. `prefill` is then "stored", and nothing else is possible.

    With `deterministic=True` the pages and logits of a token have the same bits whatever else is in
    the batch and however the text is cut into calls: docs/limits.md says what that needs. Such
    calls take longer. `prefill` is then "stored".

    Args:
        model: a model with `generate`, or PEFT's wrapper of one.
        deterministic: see above. The model is run on 64 tokens. Adapters come before this.
        training: None: calls without a cache are as under any attention; "stored": see above. The
            model is run on three tokens, so call this before it is compiled, wrapped or sharded.
        reuse_prefix: Whether a prompt continues a cache after the tokens that both have in common.
            False means that the cache holds the beginning of every prompt.
        prefix_store: Store in which each `generate()` finds pages of the beginning of its prompt,
            and leaves its own pages. New caches then have `prefill="stored"`, and caches that are
            passed need it.
        cache_keywords: of `FP8PagedCache`; `tensor_parallel` comes from the model.
            dtype="adaptive" is the plan of `choose_plan(model)`, which the model keeps.

    Returns:
        The model.

    Raises:
        ConfigError: the model cannot use the cache.
        ScaleError, BackendError: a keyword is invalid.
    """
    base = _unwrap(model)
    if not isinstance(base, PreTrainedModel) or not hasattr(base, _HOOK):
        raise ConfigError(f"model: expected a model with generate(), got {type(model).__name__}")
    if why := refusal(type(base)):
        raise ConfigError(
            f"expected a model that can use this cache, got {type(base).__name__}: {why}; use it "
            "without enable()"
        )
    cache_keywords = {"tensor_parallel": tensor_parallel(base), **cache_keywords}
    dtype, plan = resolve_plan(base, cache_keywords.get("dtype"), cache_keywords.get("plan"))
    cache_keywords |= {"dtype": dtype, "plan": plan}
    if training is not None or prefix_store is not None or deterministic:
        cache_keywords = {"prefill": "stored", **cache_keywords}
    warn_of_rounding(base)
    roundings = prepare_rounding(base, training, cache_keywords, always=deterministic)
    cache = FP8PagedCache(base.config, **cache_keywords)  # raises now if a keyword is invalid
    warn_if_stale(base, cache.options.scales)
    if deterministic:
        probe_deterministic(base, cache.options, stock_indices(cache))
    if prefix_store is not None:
        check_store(prefix_store, cache.options, base.config, cache)
        if not reuse_prefix:
            raise ConfigError("prefix_store: expected reuse_prefix=True, got False; leave one out")
        # Once, here and not in the first answer.
        digest_weights(base)
        load_backend(choose_backend(cache.options.backend, base.device))
    if _SAVED in vars(base):
        disable(base)
    before = get_implementations(base)
    if base._can_set_attn_implementation():
        base.set_attn_implementation(ATTENTION)
        latent.install_all(base)
    vars(base)[_SAVED] = before
    prefill = Prefill(base, reuse_prefix, prefix_store)
    for method in (_PrepareCache(base, cache_keywords), prefill, PrepareInputs(base)):
        method.install()
    if roundings:
        install_rounding(roundings)
    if deterministic:
        install_deterministic(base, __name__)
    return model


def disable(model: _Model) -> _Model:
    """Undo `enable`, if it was called. Return the model."""
    base = _unwrap(model)
    before = vars(base).pop(_SAVED, None)
    if before is not None:
        remove_methods(base)
        remove_rounding(base)
        remove_deterministic(base, __name__)
        latent.remove_all(base)
        if base._can_set_attn_implementation():
            set_implementations(base, before)
    return model


def _unwrap(model: Any) -> Any:
    """Return the model whose `generate` runs: PEFT's wrappers pass the call on."""
    while hasattr(model, "get_base_model"):
        model = model.get_base_model()
    return model


class _PrepareCache(ModelMethod):
    """Cache preparation of one model that makes an FP8 cache, with keywords as its argument.

    It replaces this method and not `generate`, since some models (Whisper, for long audio)
    generate several times in one call.
    """

    name = _HOOK

    def __call__(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        model, (keywords,) = self.model, self.arguments
        if _wants_default_cache(generation_config, model_kwargs):
            if generation_config.cache_implementation == OFFLOADED:
                keywords = {**keywords, "offloading": keywords.get("offloading") or True}
                # With a cache that there is already transformers refuses to be asked for one.
                generation_config = copy.copy(generation_config)
                generation_config.cache_implementation = None
            cache = model_kwargs[CACHE] = _new_cache(model, keywords)
            _note_padding(cache, model_kwargs.get("attention_mask"))
            if getattr(generation_config, "is_assistant", False):
                cache.activate_past_recording()
            self._take_prefix(model, keywords)
        return self.stock(generation_config, model_kwargs, *args, **kwargs)

    def _take_prefix(self, model: PreTrainedModel, keywords: dict[str, Any]) -> None:
        """Store the prefix of PEFT's prefix tuning: it replaces an empty cache with its own.

        PEFT sets this method of the model for the time of a `generate`, and puts it back.
        """
        prepare: Any = model.prepare_inputs_for_generation
        config = getattr(getattr(prepare, "__self__", None), "active_peft_config", None)
        if config is None or config.peft_type not in _PREFIXES:
            return

        @functools.wraps(prepare)  # a prefix store looks for other code inside
        def prepare_with_prefix(*args: Any, **kwargs: Any) -> Any:
            inputs = prepare(*args, **kwargs)
            prefix = _self_attention_cache(inputs.get(CACHE))
            if type(prefix) is DynamicCache:
                cache = inputs[CACHE] = _new_cache(model, keywords)
                layers: list[Any] = prefix.layers
                for index, layer in enumerate(layers):
                    if getattr(layer, "keys", None) is not None:
                        _self_attention_cache(cache).update(*_fill_up(layer), index)
            return inputs

        vars(model)["prepare_inputs_for_generation"] = prepare_with_prefix


def _self_attention_cache(cache: Any) -> Any:
    """Return the part that prefixes go to; an encoder-decoder's cross-attention gets none."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def _fill_up(layer: Any) -> list[torch.Tensor]:
    """Return keys and values of all positions of a layer, which may hold only its window.

    No query sees the others; they are the mean, and so change no center.
    """
    filled, tokens = [], layer.get_seq_length()
    for dense in (layer.keys, layer.values):
        unseen = dense.mean(2, keepdim=True).expand(-1, -1, tokens - dense.shape[2], -1)
        filled.append(torch.cat([unseen, dense], 2))
    return filled


def _wants_default_cache(generation_config: Any, model_kwargs: dict[str, Any]) -> bool:
    if model_kwargs.get(CACHE) is not None:
        return False
    kind = generation_config.cache_implementation
    # Old checkpoints say "hybrid" in their generation config, where transformers ignores it.
    if kind not in (None, "hybrid", OFFLOADED):
        logger.info("generate() asks for a %r cache: no FP8 cache is made", kind)
        return False
    return generation_config.use_cache is not False


def _new_cache(model: PreTrainedModel, keywords: dict[str, Any]) -> Any:
    cache = FP8PagedCache(model.config, **keywords)
    if not model.config.is_encoder_decoder:
        return cache
    # The cross-attention cache grows, since the length of the encoder's output is known only at the
    # first call. Scales, centers and skipped layers belong to the decoder's self-attention.
    plan = None if isinstance(keywords["plan"], StoragePlan) else keywords["plan"]
    cross = {**keywords, "max_cache_len": None, "scales": None, "skip_layers": (), "plan": plan}
    return EncoderDecoderCache(cache, FP8PagedCache(model.config, **cross))


def _note_padding(cache: Any, mask: torch.Tensor | None) -> None:
    """Tell a new cache what is padding in the text of a `generate`, for centers of K.

    No mask function could tell the cache of a cross-attention, or one under another attention.
    """
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.cross_attention_cache
    for layer in cache.paged_layers[:1]:
        layer.store.encoding.first_tokens.text_mask = mask
