"""FP8 pages in transformers' continuous batching, on transformers' own engine and scheduler.

from hf_fp8kv import serving

serving.enable(model, scales="kv_cache_scales.json")
model.generate_batch(prompts)          # and generate(cache_implementation="paged"), managers
"""

import os
from typing import Any

from transformers import PreTrainedModel

from ..attention.check_model import probe_deterministic
from ..attention.deterministic import install_deterministic, remove_deterministic
from ..cache.plans import Plan
from ..calibration.plan_choice import resolve_plan
from ..errors import ConfigError
from ..modeling.exact_states import warn_of_rounding
from ..modeling.identity import identify_model
from ..modeling.tensor_parallel import tensor_parallel
from ..ops import choose_backend, load_backend
from ..prefix.pages import check_store
from ..prefix.store import PrefixStore
from ..scales.kv_scales import KVScales, warn_if_stale
from .config import ServingConfig
from .engines import StockManager, cache_class
from .engines.common import EngineCache
from .fp8_manager import Enabled, FP8Manager, enabled_state, require_enabled, running_managers
from .probe import check_kinds, check_packing
from .usage import Usage, usage

__all__ = ["Usage", "disable", "enable", "manager", "usage"]


def enable(
    model: PreTrainedModel,
    *,
    scales: KVScales | str | os.PathLike[str] | float | None = None,
    dtype: str | None = None,
    key_dtype: str | None = None,
    value_dtype: str | None = None,
    plan: Plan | str | os.PathLike[str] | tuple[str, str] | None = None,
    backend: str = "auto",
    probe: bool = True,
    prefix_store: PrefixStore | None = None,
    deterministic: bool = False,
) -> PreTrainedModel:
    """Make continuous batching of this model store FP8 pages, and read them as they are.

    That holds for `generate_batch`, `generate(cache_implementation="paged")`,
    `init_continuous_batching`, `continuous_batching_context_manager` and `manager`. Attention reads
    what is stored, also within a prompt, so that a request's answer does not depend on how the
    engine splits its prompt or whether it finds the prefix in the cache: it is what `generate()`
    gives with `FP8PagedCache(..., prefill="stored")`.

    Call again to change the keywords, for managers made afterwards; `disable` undoes it.

    Args:
        model: a model with `generate_batch`. It runs the attention "fp8_paged" while a manager is
            running, and whatever it ran before afterwards.
        scales: as `FP8PagedCache` takes them, of all heads under tensor parallelism. None: one per
            token and head, stored in the page.
        dtype: as `FP8PagedCache` takes it. None: "fp8_e3m4", or "fp8_e4m3" if scales are given.
            "adaptive": `choose_plan(model)`, which the model keeps.
        key_dtype: overrides one side.
        value_dtype: overrides one side.
        plan: as `FP8PagedCache` takes it; pages are shared between requests, so that a plan with
            "centered" K has to carry the centers, as a plan of `choose_plan` does.
        backend: as `FP8PagedCache` takes it.
        probe: run the model on seven tokens, packed as an engine packs them and one text after
            the other. Models that count positions by themselves, or do not hand the engine's cache
            to their attention, answer with nonsense there, also under transformers' own cache.
        prefix_store: where pages of prompts are found that this engine does not have, also those
            of other processes, and where it leaves its own; for models without windows. All
            weights are read once for it.
        deterministic: Whether pages and logits of a token have the same bits whatever else the
            engine computes, as `hf_fp8kv.enable` says; for models without windows.

    Returns:
        The model.

    Raises:
        ConfigError: the model cannot do it, or this version of transformers has an engine that is
            not known, or a keyword is wrong. ScaleError, BackendError: so is that keyword.
    """
    if not isinstance(model, PreTrainedModel) or not hasattr(model, "init_continuous_batching"):
        raise ConfigError(
            f"model: expected a model with generate_batch(), got {type(model).__name__}"
        )
    why = ""
    if model.config.is_encoder_decoder:
        why = "it has an encoder, and continuous batching only takes a text"
    elif not model._can_set_attn_implementation():
        why = "it has attention code of its own and looks up no attention function"
    if why:
        raise ConfigError(
            "expected a model whose attention can read pages, got "
            f"{type(model).__name__}: {why}; use it without"
        )
    if any(type(manager) is StockManager for manager in running_managers(model)):
        raise ConfigError(
            "expected a model that no engine of transformers' own runs, got one with a running "
            "ContinuousBatchingManager: it would meet another attention in the middle of a step; "
            "call its stop() first"
        )
    dtype, plan = resolve_plan(model, dtype, plan)
    config = ServingConfig.parse(
        scales=scales, dtype=dtype, key_dtype=key_dtype, value_dtype=value_dtype,
        plan=plan, backend=backend, prefix_store=prefix_store,
        tensor_parallel=tensor_parallel(model),
    )  # fmt: skip
    cache_class(config)  # which this version of transformers may not allow
    text = model.config.get_text_config()
    has_windows = any(check_kinds(text))
    asked = {"deterministic": deterministic, "prefix_store": prefix_store is not None}
    for name in asked:
        if asked[name] and has_windows:
            raise ConfigError(
                f"{name}: expected a model whose layers all attend to the whole text, since an "
                f"engine uses the pages of windows again, got {type(model).__name__}; leave it "
                "out, or use generate() with enable()"
            )
    EngineCache().prepare(config, text, 64, model.dtype, model.device)
    if prefix_store is not None:
        check_store(prefix_store, config.options, model.config)
    if deterministic:
        probe_deterministic(model, config.options)
    if probe:
        check_packing(model, config)
    warn_of_rounding(model)
    warn_if_stale(model, config.options.scales)
    if prefix_store is not None:
        # Once, here and not in the first answer.
        identify_model(model)
        load_backend(choose_backend(config.options.backend, model.device))
    disable(model)
    Enabled.install(model, config)
    if deterministic:
        install_deterministic(model, __name__)
    return model


def manager(model: PreTrainedModel, *args: Any, **kwargs: Any) -> FP8Manager:
    """Return a manager whose engine stores FP8 pages: a ContinuousBatchingManager, not started.

    It is what `model.init_continuous_batching` of an enabled model returns. Do not call
    `ContinuousBatchingManager(model, ...)` itself: that one would have stock pages, and its first
    step raises a ConfigError.

    Args:
        model: a model that `enable` was called on.
        args: as for transformers' `init_continuous_batching`: a GenerationConfig, a
            ContinuousBatchingConfig, hints on the workload; each may be left out.
        kwargs: the same.

    Raises:
        ConfigError: `enable` was not called, or the engine's config asks for what is not possible.
    """
    return require_enabled(model)(*args, **kwargs)


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `enable`; do nothing where it was not called. Return the model.

    A manager that still runs keeps its pages until it is stopped.

    Raises:
        ConfigError: not a model of transformers.
    """
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(f"model: expected a PreTrainedModel, got {type(model).__name__}")
    state = enabled_state(model)
    if state is not None:
        state.remove(model)
    remove_deterministic(model, __name__)
    return model
