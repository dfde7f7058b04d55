"""Training through the cache: whole texts whose K and V are rounded as a cache stores them."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from ..cache.cache import FP8PagedCache
from ..cache.options import CacheOptions
from ..cache.paged_tensor import PagedKV
from ..cache.stored_rounding import StoredRounding, check_stored
from ..errors import ConfigError, FP8KVError
from ..formats import AUTO
from ..modeling.exact_states import NOTE, rounding_note
from ..modeling.model_support import with_cache
from . import latent
from .deterministic import (
    check_deterministic,
    check_page_size,
    install_deterministic,
    remove_deterministic,
)
from .switching import Roundings, eval_mode, paged_attention, watched_attention


def prepare_rounding(
    model: PreTrainedModel, training: object, cache_keywords: Mapping[str, Any]
) -> Roundings:
    """Return for each attention module how it rounds K and V.

    Args:
        model: is run on three tokens, to see which keys and values reach which attention.
        training: None or "stored"; with None nothing is rounded.
        cache_keywords: of `FP8PagedCache`.

    Raises:
        ConfigError: the model or a keyword does not fit. ScaleError, BackendError: a keyword.
    """
    if training is None:
        return {}
    if training != "stored":
        raise ConfigError(f"training: expected None or 'stored', got {training!r}")
    cache = FP8PagedCache(model.config, **cache_keywords)
    options = cache.options
    check_stored(options, "training='stored'")
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
    found = _probe(model, _stock_indices(cache), cache_keywords)
    if all(side.is_auto for plan in cache.plan.values() for side in plan):
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


def _stock_indices(cache: FP8PagedCache) -> list[int]:
    """Return the layers of a cache that are not stored in pages."""
    return [i for i, layer in enumerate(cache.layers) if layer not in cache.paged_layers]


def probe_deterministic(
    model: PreTrainedModel, options: CacheOptions, cache: FP8PagedCache | None = None
) -> None:
    """Raise ConfigError for a model or options that are not deterministic.

    The model is run on 64 tokens at once, in chunks and in a batch, which must have the same bits.
    Chunks of 7 tokens fill no vector: a function of one number for each token has other bits there.
    `cache`: one with these options; None: of an engine.
    """
    check_stored(options, "deterministic")
    check_page_size(options.page_size)
    check_deterministic(model, [] if cache is None else _stock_indices(cache))
    tokens, known = 64, model.config.get_text_config(decoder=True).vocab_size
    ids = (torch.arange(3 * tokens, device=model.device) * 37 + 11).view(3, tokens) % known

    def read(rows: int, chunks: list[int]) -> torch.Tensor:
        cache = FP8PagedCache(model.config, prefill="stored")
        parts = ids[:rows].split(chunks, 1)
        return torch.cat([model(x, **with_cache(model, cache)).logits[0] for x in parts])

    name, training = type(model).__name__, [x for x in model.modules() if x.training]
    install_deterministic(model, __name__)
    try:
        with torch.no_grad(), paged_attention(model.eval()), latent.kept_as_is(model):
            latent.install_all(model)
            once = read(1, [tokens])
            same = all(torch.equal(once, read(*x)) for x in ((1, [7] * 9 + [1]), (3, [1, 63])))
    except FP8KVError:
        raise
    except Exception as error:
        raise ConfigError(
            f"deterministic: expected a model that can be run on {tokens} tokens, got {name}: "
            f"{type(error).__name__}: {error}; leave deterministic out"
        ) from error
    finally:
        remove_deterministic(model, __name__)
        for module in training:
            module.training = True
    if not same:
        raise ConfigError(
            "deterministic: expected a model whose numbers do not depend on the batch and the "
            f"chunks, got {name}, whose logits differ; leave deterministic out"
        )
