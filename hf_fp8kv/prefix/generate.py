"""Reuse of prefixes: `generate()` only computes the tokens of a prompt that its cache lacks.

transformers assumes, without a check, that a cache holds the beginning of the prompt. Two methods
of an enabled model receive the tokens of each step, and pass them to the cache.
"""

from dataclasses import replace
from typing import Any

import torch
import transformers
from transformers.cache_utils import DynamicLayer
from transformers.generation.candidate_generator import EarlyExitCandidateGenerator

from ..cache.cache import NOT_KEPT, FP8PagedCache
from ..cache.tokens import UNKNOWN, Tokens, can_crop, extend_positions
from ..errors import ConfigError, FP8KVError
from ..modeling.identity import identify_model, sample_model
from ..modeling.methods import ModelMethod
from ..modeling.model_support import CACHE, changes_rope, find_cache_argument
from ..utils.warn_once import warn_once
from .media import PromptMedia
from .store import PrefixStore
from .stored_pages import StoredPrompts, check_store, digest_options

# Before 5.21, transformers assumes an empty cache for a prompt that is computed in chunks.
CHUNKS_NEED_EMPTY_CACHE = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 21)


def prepare_positions(
    method: ModelMethod, inputs: torch.Tensor, model_kwargs: dict[str, Any]
) -> Any:
    """Prepare the position ids of a prompt.

    With a used cache, a model with positions of images (Qwen2-VL) continues the positions of its
    last call, which may have had a different prompt. A whole prompt gets new positions here.
    """
    mask = model_kwargs.get("attention_mask")
    is_whole = inputs.ndim == 2 and (mask is None or mask.shape[1] == inputs.shape[1])
    if is_whole and isinstance(model_kwargs.get(CACHE), FP8PagedCache):
        model_kwargs = {**model_kwargs, CACHE: None}
    return method.original_method(inputs, model_kwargs)


def prefill(
    method: ModelMethod,
    input_ids: Any,
    config: Any,
    model_kwargs: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Compute a prompt. The model's `_prefill` receives the whole prompt.

    `method.arguments` holds `reuse_prefix`, as in `enable`, and the `PrefixStore` or None.
    """
    cache = model_kwargs.get(CACHE)
    reuse_prefix, store = method.arguments
    if not isinstance(cache, FP8PagedCache):
        return method.original_method(input_ids, config, model_kwargs, *args, **kwargs)
    if store is not None:
        check_store(store, cache.options, method.model.config, cache)
    batch = _find_tokens(input_ids, config, model_kwargs) if reuse_prefix else None
    is_other_model = _record_model(method.model, cache, config, can_empty=batch is not None)
    prompts = StoredPrompts(store, cache)
    old_batch = cache.tokens
    old_kwargs = dict(model_kwargs)

    def compute_prompt() -> Any:
        cache.tokens = (batch or old_batch) and UNKNOWN  # until the whole prompt is stored
        with prompts.store_after_prefill():
            return method.original_method(input_ids, config, model_kwargs, *args, **kwargs)

    try:
        if batch is not None:
            media = PromptMedia(method.model.config, input_ids, model_kwargs, config)
            batch = _reuse_tokens(method, prompts, cache, batch, media, config, is_other_model)
            if batch.positions is not None:
                model_kwargs["position_ids"] = batch.positions
        try:
            outputs = compute_prompt()
        except ConfigError as error:
            if not prompts.num_restored:
                raise
            # The files are intact, but have numbers of heads or dtypes of another model.
            prompts.undo_restore(error)
            model_kwargs.clear()
            model_kwargs.update(old_kwargs)
            outputs = compute_prompt()
        if batch is None and old_batch is not UNKNOWN:
            # Embeddings follow the known tokens.
            cache.known_prefix = old_batch or cache.known_prefix
            cache.tokens = None
            cache.step_tokens = 0
        # A wrapper of the model may add tokens to the prompt, so lengths are compared.
        elif batch is not None and {*cache._paged.read_lengths()} <= {0, batch.length}:
            cache.known_prefix = None
            cache.tokens = batch
            cache.step_tokens = 0
    except BaseException as error:
        _record_kept_tokens(cache, batch, error)
        raise
    return outputs


def _record_model(model: Any, cache: FP8PagedCache, config: Any, *, can_empty: bool) -> bool:
    """Record the model that fills a cache. Return whether another model has filled it.

    The sample is not taken if no caller can use the cache again.

    Raises:
        ConfigError: A different model has filled the cache, which cannot be emptied.
    """
    if config.is_assistant or cache.model_sample == NOT_KEPT:
        return False
    sample = sample_model(model)
    is_other_model = cache.model_sample not in (None, sample) and bool(cache.get_seq_length())
    if is_other_model and not can_empty:
        raise ConfigError(
            "expected a cache that this model has filled, got a cache of another model, or of "
            "different weights or adapters. Pass the whole prompt, so that it can be computed "
            "again, or a new cache"
        )
    cache.model_sample = sample
    return is_other_model


def _reuse_tokens(
    method: ModelMethod,
    prompts: StoredPrompts,
    cache: FP8PagedCache,
    batch: Tokens,
    media: PromptMedia,
    config: Any,
    is_other_model: bool,
) -> Tokens:
    """Keep the tokens that a cache shares with a prompt, and restore later tokens if possible.

    Return the prompt as the cache will hold it, `UNKNOWN` if it can never be compared.
    """
    needs_empty_cache = CHUNKS_NEED_EMPTY_CACHE and config.prefill_chunk_size
    identity = _identify_pages(method.model, method.arguments[1], cache)
    # Tokens without an identity also count, after a call with dropout or unhashable weights.
    is_outdated = identity != cache.identity and (cache.identity or cache.tokens is not None)
    batch = replace(batch, features=media.image_digests)
    if needs_empty_cache or is_outdated or is_other_model or not media.is_comparable:
        _require_media(cache, media, 0)
        cache.reset()
    elif media.image_digests is None and cache.tokens is not None:
        batch = _continue_media(cache.tokens, batch)
    if not media.is_comparable:
        return UNKNOWN
    num_kept = _keep_shared_prefix(cache, batch, media)
    cache.reused_tokens += len(batch.ids) * num_kept
    cache.identity = identity
    cache.tokens = UNKNOWN
    if identity and not cache.has_assumed_prefix:
        prompts.compute_keys(identity, batch)
        if not needs_empty_cache:
            prompts.restore()
    media.drop(max(num_kept, prompts.num_restored * cache.options.page_size))
    return batch


def _require_media(cache: FP8PagedCache, media: PromptMedia, num_kept: int) -> None:
    """Raise ConfigError if a prompt needs images that are neither passed nor kept in the cache."""
    batch = cache.tokens
    has_images = batch is UNKNOWN or (batch is not None and batch.features is not None)
    is_used = has_images and media.image_digests is None and bool(cache.get_seq_length())
    if is_used and bool(media.placeholders[:, num_kept:].any()):
        raise ConfigError(
            f"expected the images of the prompt, because the cache can keep only {num_kept} of its "
            "tokens, got only ids. Pass the images of the whole prompt, for example as pixel_values"
        )


def _identify_pages(model: Any, store: PrefixStore | None, cache: FP8PagedCache) -> str:
    """Return a digest of all that pages depend on, except tokens, or "" if none are stored."""
    # All modules are checked, because an adapter added to a model in eval mode has dropout.
    if store is None or any(module.training for module in model.modules()):
        return ""
    try:
        layers = (
            (layer.index, layer.group.window, layer.encoding.plan) for layer in cache.paged_layers
        )
        return identify_model(model) + digest_options(cache.options, layers)
    except ConfigError as error:
        warn_once(f"{store} is not used: {error}")
        return ""


def _keep_shared_prefix(cache: FP8PagedCache, batch: Tokens, media: PromptMedia) -> int:
    """Keep the tokens that the cache shares with `batch`, except the last token of `batch`.

    All sequences keep the same number of tokens. The cache is emptied if its tokens are unknown, or
    if a layer cannot remove the remaining tokens (a window that has moved on, a recurrent state).
    If the cache never received token ids, it is assumed to hold the beginning of `batch`.

    Returns:
        The number of tokens that each sequence keeps.

    Raises:
        ConfigError: The cache never received token ids, and is not shorter than `batch`, or has
            images of `batch` that it cannot keep.
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
    if cached_batch is None and length and cache.is_restored:
        raise ConfigError(
            "expected a cache with the ids of its tokens, got a file or a pickle of a cache that "
            "generate() of an enabled model did not fill. Save a cache of an enabled model, or "
            "call enable(model, reuse_prefix=False), which assumes that the prompt begins with the "
            "tokens of the cache"
        )
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
    cached_rows = cached_batch.select(torch.tensor(rows, device="cpu"))
    while num_shared != (boundary := batch.find_boundary(cached_rows.find_boundary(num_shared))):
        num_shared = boundary
    if (
        not num_shared
        or changes_rope(cache.config, (cached_batch.length, batch.length, num_shared))
        or cached_batch.length > length  # layers were changed individually
        or (num_undone and cache.stock_layers)  # a recurrent state may include the last step
        or not _can_crop_layers(cache, length - num_shared)
        # transformers' masks of preallocated caches only mark images in a whole prompt.
        or (cache.options.is_preallocated and media.has_images_after(num_shared))
    ):
        _require_media(cache, media, 0)
        cache.reset()
        cache.has_assumed_prefix = False
        return 0
    _require_media(cache, media, num_shared)
    if rows != list(range(len(cached_batch.ids))):
        cache.batch_select_indices(torch.tensor(rows, device="cpu"))
    if num_shared < length:
        cache.crop(num_shared - length)
    return num_shared


def _record_kept_tokens(cache: FP8PagedCache, batch: Tokens | None, error: BaseException) -> None:
    """Record the tokens of `batch` that the cache holds after a call that raised `error`.

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
        cache.tokens = batch.crop(batch.length - lengths.pop())
        cache.step_tokens = 0


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
    """Return the tokens of a prompt, or None if its ids are not complete."""
    mask, positions = (model_kwargs.get(name) for name in ("attention_mask", "position_ids"))
    # As in transformers, the mask covers all tokens, so its width shows whether `ids` is complete.
    width = getattr(config, "_mask_length", -1) if mask is None else mask.shape[1]
    is_complete = width == ids.shape[1] and (positions is None or positions.shape[-1] == width)
    if ids.ndim != 2 or not is_complete or config.is_assistant:
        return None
    return Tokens(ids, mask, positions)


def _continue_media(cached_batch: Tokens, batch: Tokens) -> Tokens:
    """Return a prompt without images that continues a cache with images, with their features.

    Images change the positions of all later tokens in some models, so positions also continue.
    """
    if cached_batch.features is None:
        return batch
    cached_text = Tokens(cached_batch.ids, cached_batch.mask)
    rows, num_shared = cached_text.match(Tokens(batch.ids, batch.mask))
    if not num_shared:
        return batch
    cached_batch = cached_batch.select(torch.tensor(rows, device="cpu"))
    _, _, positions, features = cached_batch.expand(num_shared, batch.ids.device)
    batch = replace(batch, features=features)
    if not len(positions) or batch.positions is None:
        return batch
    positions = extend_positions(positions, batch.length)
    positions = positions.reshape(*batch.positions.shape[:-2], *positions.shape[-2:])
    return replace(batch, positions=positions)


def get_candidate_generator(method: ModelMethod, *args: Any, **kwargs: Any) -> Any:
    """Begin assisted decoding.

    Assisted decoding has no prefill. It computes the whole prompt even if the cache has tokens, so
    the cache is emptied. `method.arguments` holds `reuse_prefix`, as in `enable`.
    """
    model_kwargs = kwargs["model_kwargs"]
    generation_config = kwargs["generation_config"]
    cache = model_kwargs.get(CACHE)
    if isinstance(cache, FP8PagedCache) and method.arguments[0]:
        ids = kwargs["input_ids"]
        batch = _find_tokens(ids, generation_config, model_kwargs)
        if batch is None:
            cache.tokens = cache.tokens and UNKNOWN
        else:
            media = PromptMedia(method.model.config, ids, model_kwargs, generation_config)
            batch = replace(batch, features=media.image_digests)
            _record_model(method.model, cache, generation_config, can_empty=True)
            _require_media(cache, media, 0)
            cache.reset()
            cache.tokens = batch if media.is_comparable else UNKNOWN
    generator = method.original_method(*args, **kwargs)
    if isinstance(generator, EarlyExitCandidateGenerator):
        config = method.model.base_model.config
        get_candidates = generator.get_candidates
        num_layers = config.num_hidden_layers

        def get_candidates_and_restore(*args: Any, **kwargs: Any) -> Any:
            # transformers does not restore the number of layers after an error.
            try:
                return get_candidates(*args, **kwargs)
            finally:
                config.num_hidden_layers = num_layers

        vars(generator)["get_candidates"] = get_candidates_and_restore
    return generator


def prepare_inputs(method: ModelMethod, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Prepare the inputs of a step. The model's method receives all tokens in each step."""
    cache = kwargs.get(CACHE)
    # During a prefill, `tokens` is None or `UNKNOWN`, and does not change.
    if isinstance(cache, FP8PagedCache) and (batch := cache.tokens) is not None:
        # The first call of assisted decoding may only pass new tokens.
        is_unknown = batch is UNKNOWN or input_ids.shape[1] < batch.length
        cache.step_tokens = 0 if is_unknown else input_ids.shape[1] - batch.length
        cache.tokens = UNKNOWN if is_unknown else replace(batch, ids=input_ids)
    inputs: dict[str, Any] = method.original_method(input_ids, *args, **kwargs)
    is_dropped = inputs.get(CACHE, inputs.get("past_key_values")) is None
    if isinstance(cache, FP8PagedCache) and is_dropped:
        # Phi-3 drops its cache when the frequencies of RoPE change, to compute all tokens again
        # in a new one. Here, they are computed again in the same cache.
        old_tokens, old_prefix = cache.tokens, cache.known_prefix
        cache.reset()
        cache.tokens, cache.known_prefix = old_tokens, old_prefix
        cache.step_tokens = input_ids.shape[1]
        kwargs |= {"next_sequence_length": None, "is_first_iteration": True}
        inputs = method.original_method(input_ids, *args, **kwargs)
        inputs[find_cache_argument(type(method.model))] = cache
    return inputs
