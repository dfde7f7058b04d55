"""FP8 pages in transformers' continuous batching, with transformers' own engine and scheduler.

from hf_fp8kv import serving

serving.enable(model, scales="kv_cache_scales.json")
model.generate_batch(prompts)  # or generate(cache_implementation="paged")
"""

import inspect
import os
from typing import Any, TypeVar

from transformers import PreTrainedModel

from ..attention.switching import find_managers
from ..cache.plans import Plan
from ..calibration.plan_choice import resolve_plan
from ..errors import ConfigError
from ..modeling.exact_states import warn_of_rounding
from ..modeling.identity import identify_model
from ..modeling.model_support import find_base_model
from ..modeling.tensor_parallel import tensor_parallel
from ..ops import choose_backend, load_backend
from ..prefix.store import PrefixStore
from ..prefix.stored_pages import check_store, check_store_type
from ..reproducible.modules import install_deterministic, probe_deterministic, remove_deterministic
from ..scales.kv_scales import KVScales, warn_if_stale
from ..utils.text import suggest
from .config import ServingConfig
from .engines import StockManager, make_cache_class
from .engines.common import EngineCache
from .fp8_manager import ManagerFactory, find_factory
from .probe import check_packing, read_layer_windows
from .usage import Usage, read_usage

__all__ = ["Usage", "disable", "enable", "read_usage"]

_Model = TypeVar("_Model")


def enable(
    model: _Model,
    *,
    scales: KVScales | str | os.PathLike[str] | float | None = None,
    dtype: str | None = None,
    key_dtype: str | None = None,
    value_dtype: str | None = None,
    plan: Plan | str | os.PathLike[str] | tuple[str, str] | None = None,
    bits: float | None = None,
    backend: str = "auto",
    probe: bool = True,
    prefix_store: PrefixStore | None = None,
    deterministic: bool = False,
    **unknown: Any,
) -> _Model:
    """Make continuous batching of this model store FP8 pages, and attend to the stored bytes.

    This applies to `generate_batch`, `generate(cache_implementation="paged")`,
    `init_continuous_batching` and `continuous_batching_context_manager`. Attention reads the stored
    bytes even within a prompt. The answer to a request therefore does not depend on how the engine
    splits its prompt, or on whether the prefix is in the cache. The answer equals the answer of
    `generate()` with `FP8PagedCache(..., prefill="stored")`.

    Call `enable` again to change the keywords for later managers. `disable` restores the model.

    Args:
        model: A model with `generate_batch`, or a PEFT wrapper of such a model. It uses the
            attention "fp8_paged" while a manager runs, and its previous attention afterwards.
        scales: As for `FP8PagedCache`, of all heads if tensor parallelism is used. None means one
            scale per token and head, stored in the page.
        dtype: As for `FP8PagedCache(model)`. The default is "adaptive". As with
            `hf_fp8kv.enable`, the plan stays the same when the weights change.
        key_dtype: Overrides `dtype` for K.
        value_dtype: Overrides `dtype` for V.
        plan: As for `FP8PagedCache`.
        bits: As for `FP8PagedCache`.
        backend: As for `FP8PagedCache`.
        probe: Whether to run the model on two short sequences, packed as in an engine and each
            alone, and compare the logits. Models that count positions themselves, or do not pass
            the engine's cache to their attention, give wrong logits in any engine, even with
            transformers' own caches.
        prefix_store: Store from which the engine reads pages that it lacks, and to which it writes
            its pages. Other processes may share the store. The model must have no windows. All
            weights are read once to identify the model.
        deterministic: Whether pages and logits of a token have the same bits next to any other
            requests, as for `hf_fp8kv.enable`. Sampled tokens then depend on the request's id and
            the seed, not on other requests. The model must have no windows.
        unknown: Any other keyword raises ConfigError.

    Returns:
        The model.

    Raises:
        ConfigError: The model is not supported, the engine of this version of transformers is not
            known, or a keyword is invalid.
        ScaleError: The scales are invalid or do not fit the model.
        BackendError: The backend is not available.
    """
    for name in unknown:
        names = tuple(inspect.signature(enable).parameters)[1:-1]
        raise ConfigError(
            f"serving.enable: expected {', '.join(names)}, got {name}. Set pages and batches "
            f"of the engine in ContinuousBatchingConfig.{suggest(name, names)}"
        )
    base: PreTrainedModel = find_base_model(model, "generate_batch", "init_continuous_batching")
    reason = ""
    if base.config.is_encoder_decoder:
        reason = "it has an encoder, which continuous batching does not run"
    elif not base._can_set_attn_implementation():
        reason = "its attention code does not look up an attention function"
    elif getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        reason = "its adapter adds trained tokens, which continuous batching does not read"
    if reason:
        raise ConfigError(
            "expected a model that continuous batching can run over pages, got "
            f"{type(base).__name__}: {reason}. Use generate() with hf_fp8kv.enable()"
        )
    if any(type(manager) is StockManager for manager in find_managers(base)):
        raise ConfigError(
            "expected a model without a running engine of transformers, got one with a running "
            "ContinuousBatchingManager, whose attention would change in the middle of a step. "
            "Call its stop() first"
        )
    text_config = base.config.get_text_config()
    has_windows = any(read_layer_windows(text_config))
    for name, value in (("deterministic", deterministic), ("prefix_store", prefix_store)):
        if value and has_windows:
            raise ConfigError(
                f"{name}: expected a model whose layers all attend to all tokens, because an "
                f"engine overwrites the pages of windows, got {type(base).__name__}. Omit {name}, "
                "or use generate() with enable()"
            )
    check_store_type(prefix_store)
    keywords = resolve_plan(
        base,
        {
            "scales": scales,
            "dtype": dtype,
            "key_dtype": key_dtype,
            "value_dtype": value_dtype,
            "plan": plan,
            "bits": bits,
            "tensor_parallel": tensor_parallel(base),
        },
        prefix_store=prefix_store,
    )
    config = ServingConfig.parse(backend=backend, prefix_store=prefix_store, **keywords)
    make_cache_class(config)  # raises an error if this version of transformers is not supported
    EngineCache().prepare(config, text_config, page_size=64, dtype=base.dtype, device=base.device)
    if prefix_store is not None:
        check_store(prefix_store, config.options, base.config)
    if deterministic:
        probe_deterministic(base, config.options)
    if probe:
        check_packing(base, config)
    warn_of_rounding(base)
    if plan is not None or keywords["plan"] is None:  # a chosen plan is for these weights
        warn_if_stale(base, config.options.scales)
    if prefix_store is not None:
        # Both calls take time, so they run here instead of during the first request.
        identify_model(base)
        load_backend(choose_backend(config.options.backend, base.device))
    disable(base)
    ManagerFactory.install(base, config)
    if deterministic:
        install_deterministic(base, __name__)
    return model


def disable(model: _Model) -> _Model:
    """Undo `enable`, if it was called. Return the model.

    A running manager keeps its pages until it is stopped.

    Raises:
        ConfigError: The argument is not a model of transformers.
    """
    base = find_base_model(model)
    factory = find_factory(base)
    if factory is not None:
        factory.remove(base)
    remove_deterministic(base, __name__)
    return model
