"""`enable` and `disable`: an FP8 cache for every `generate()` of a model."""

import copy
import functools
import inspect
import weakref
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from .attention import capture as capturing
from .attention import latent
from .attention.check_model import ModelReport, check_model, find_stock_layers, probe_preallocated
from .attention.fp8_paged import ROUNDING
from .attention.switching import (
    check_no_manager,
    get_attn_implementations,
    set_attn_implementations,
)
from .cache.cache import NOT_KEPT, FP8PagedCache, MemoryFootprint
from .calibration.plan_choice import check_bits, freeze_plan, resolve_plan, unfreeze_plan
from .errors import ConfigError
from .formats import ADAPTIVE, DEFAULT_DTYPE, list_counts
from .modeling.exact_states import warn_of_rounding
from .modeling.methods import ModelAttribute, ModelMethod, remove_methods
from .modeling.model_support import (
    ATTENTION,
    CACHE,
    find_base_model,
    find_generating_model,
    find_refusal,
    without_replacement_note,
)
from .modeling.tensor_parallel import tensor_parallel
from .ops import choose_backend, load_backend
from .prefix.generate import get_candidate_generator, prefill, prepare_inputs, prepare_positions
from .prefix.media import keep_encoder_inputs
from .prefix.store import PrefixStore
from .prefix.stored_pages import check_store, check_store_type
from .reproducible.modules import install_deterministic, probe_deterministic, remove_deterministic
from .reproducible.training import prepare_rounding
from .scales.kv_scales import StoragePlan, warn_if_stale
from .utils.digests import digest_weights
from .utils.text import suggest

# The attention implementations that `disable` restores.
_SAVED_ATTENTION = ModelAttribute[dict[str, Any]]("_hf_fp8kv_saved_attention")
_PREPARE_METHOD = "_prepare_cache_for_generation"
_ENGINE_METHOD = "init_continuous_batching"
# Value of generate()'s `cache_implementation` for a growing cache in host memory.
OFFLOADED = "offloaded"
# Types of PEFT adapters that put trained keys and values into the cache, before the prompt.
_PREFIX_TUNING_TYPES = ("PREFIX_TUNING", "CARTRIDGE")
_CACHE_KEYWORDS = tuple(inspect.signature(FP8PagedCache).parameters)[1:]  # except the config
_KEYWORDS = (*_CACHE_KEYWORDS, "deterministic", "training", "reuse_prefix", "prefix_store")
_Model = TypeVar("_Model")
_Sizes = tuple[MemoryFootprint | None, float, float]
_NO_SIZES: _Sizes = (None, 0.0, 0.0)
# The cache of the last `generate()` of each enabled model, for `summary`.
_last_uses: "weakref.WeakKeyDictionary[Any, _LastUse]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Summary:
    """The tokens that the last `generate()` of an enabled model stored, and how. `str` formats it.

    Attributes:
        report: Use of the cache by each layer, with reasons.
        footprint: Memory and contents of the cache at the end. None before the first `generate()`,
            or if it used another cache.
        stored_bytes: Size of the tokens, without the unused slots of pages.
        bf16_bytes: Size of the same tokens in a cache of transformers in bfloat16.
        captured: Whether decode steps ran in CUDA graphs, or why not.
    """

    report: ModelReport
    footprint: MemoryFootprint | None
    stored_bytes: float
    bf16_bytes: float
    captured: str

    def __str__(self) -> str:
        lines = ["no generate() with 8-bit pages yet"]
        if (memory := self.footprint) is not None and not self.bf16_bytes:
            lines = ["no tokens in the cache of the last generate()"]
        elif memory is not None:
            plans = " + ".join(list_counts(memory.layers_by_plan))
            lines = [
                f"{memory.tokens:,} tokens in {self.stored_bytes:,.0f} bytes, "
                f"{self.bf16_bytes:,.0f} in bf16 ({self.stored_bytes / self.bf16_bytes:.2f} x)",
                f"pages of {memory.used_bytes + memory.other_bytes:,} bytes, with unused slots for "
                "the next tokens",
                f"stored as {plans}",
            ]
        return "\n".join((*lines, f"CUDA graphs: {self.captured}", str(self.report)))


@without_replacement_note
def enable(
    model: _Model,
    dtype: str | torch.dtype | None = None,
    *,
    bits: float = 8,
    deterministic: bool = False,
    training: str | None = None,
    capture: bool = False,
    reuse_prefix: bool = True,
    prefix_store: PrefixStore | None = None,
    **cache_keywords: Any,
) -> _Model:
    """Make `model.generate()`, and pipelines of this model, use an FP8 cache.

    Each call creates a new cache, unless it passes a cache, selects another type of cache, or
    uses no cache. The attention is set to "fp8_paged" if the model supports it. Call `enable` again
    to change the keywords, or `disable` to undo this call.

    With `training="stored"`, forward passes without a cache round K and V exactly as these caches
    and `serving` store them with the same keywords, in train and eval mode. Trainers need this if
    they recompute the probabilities of generated text. The rounding does not change gradients.

    With `deterministic=True`, the pages and logits of a token have the same bits in any batch, and
    for any split of the sequence into calls. These calls are slower. docs/limits.md lists the
    requirements. Both options need `prefill="stored"`, with which every call attends to stored K
    and V. It becomes the default.

    Args:
        model: A model with `generate`, or a PEFT wrapper of such a model.
        dtype: Format of K and V, as for `FP8PagedCache`. "adaptive" is the default: the plan of
            `choose_plan(model)`, which the model keeps until `disable`. `key_dtype`, `value_dtype`,
            `plan`, `scales` and any other `dtype` replace the plan.
        bits: Maximum average bits of a value in the plan, from 6 to 8, as for `choose_plan`.
        deterministic: Whether results are bitwise independent of the batch. The model is run on 64
            tokens, so add adapters before this call.
        training: None or "stored". With "stored", the model is run on three tokens, so call
            `enable` before the model is compiled, wrapped or sharded.
        capture: Whether `generate()` captures its decode step in a CUDA graph, without compiling,
            and replays it. Steps that a graph cannot repeat run eagerly, and one log line has the
            reason. On a CPU all steps run eagerly.
        reuse_prefix: Whether a prompt is compared with the tokens of a passed cache, so that only
            the tokens after the shared tokens are computed. False assumes that the tokens of the
            cache are the beginning of the prompt.
        prefix_store: Store from which each `generate()` restores pages of the prompt, and to which
            it writes new pages. New caches then have `prefill="stored"`, and passed caches need it.
        cache_keywords: Other keywords of `FP8PagedCache`. `tensor_parallel` is read from the model.
            With `max_cache_len` the model generates three tokens, so call `enable` before the model
            is wrapped or sharded.

    Returns:
        The model.

    Raises:
        ConfigError: The model cannot use the cache, or a keyword is invalid.
        ScaleError: `scales`, or the scales of `plan`, are invalid or do not fit the model.
        BackendError: `backend` cannot run here.
    """
    base = find_generating_model(find_base_model(model, "generate", _PREPARE_METHOD))
    _check_arguments(base, cache_keywords, reuse_prefix=reuse_prefix, prefix_store=prefix_store)
    check_bits(bits)  # raises an error for None, which only `resolve_plan` accepts
    passed_keywords = {"tensor_parallel": tensor_parallel(base), "dtype": dtype, **cache_keywords}
    cache_keywords = resolve_plan(
        base, {**passed_keywords, "bits": bits}, prefix_store=prefix_store
    )
    # By default, `resolve_plan` adds a plan, or a format if no plan can be chosen.
    is_default = any(
        cache_keywords.get(name) is not None and passed_keywords.get(name) in (None, ADAPTIVE)
        for name in ("dtype", "plan")
    )
    if training is not None or prefix_store is not None or deterministic:
        cache_keywords = {"prefill": "stored", **cache_keywords}
    warn_of_rounding(base)
    cache = FP8PagedCache(base.config, **cache_keywords)  # raises if a keyword is invalid
    roundings = prepare_rounding(base, training, cache, always_paged=deterministic)
    if not is_default:  # a chosen plan is for these weights, and the check reads all of them
        warn_if_stale(base, cache.options.scales)
    if cache.options.is_preallocated:
        exact = {"dtype": "model", "plan": None, "tensor_parallel": tensor_parallel(base)}
        probe_preallocated(
            base,
            lambda num_tokens: _make_generate_cache(base, {**exact, "max_cache_len": num_tokens}),
        )
    if deterministic:
        probe_deterministic(base, cache.options, find_stock_layers(cache))
    if prefix_store is not None:
        check_store(prefix_store, cache.options, base.config, cache)
        # These results are cached, so the first `generate()` does not wait for them.
        digest_weights(base)
        load_backend(choose_backend(cache.options.backend, base.device))
    if _SAVED_ATTENTION.is_set(base):
        disable(base)
    if is_default:
        freeze_plan(base, cache_keywords["plan"], bits)
    old_attention = get_attn_implementations(base)
    if base._can_set_attn_implementation():
        base.set_attn_implementation(ATTENTION)
        latent.install_all(base)
    _SAVED_ATTENTION.set(base, old_attention)
    methods = _choose_methods(base, cache_keywords, prefix_store, reuse_prefix, capture=capture)
    for name, (function, *arguments) in methods.items():
        ModelMethod(base, name, function, *arguments).install()
    for module, rounding in roundings.items():
        ROUNDING.set(module, rounding)
    if deterministic:
        install_deterministic(base, __name__)
    return model


def _check_arguments(
    base: PreTrainedModel,
    cache_keywords: dict[str, Any],
    *,
    reuse_prefix: bool,
    prefix_store: PrefixStore | None,
) -> None:
    """Raise ConfigError for arguments of `enable` that no model accepts, or for the model."""
    if unknown := [name for name in cache_keywords if name not in _CACHE_KEYWORDS]:
        raise ConfigError(
            f"enable: expected the keywords of FP8PagedCache ({', '.join(_CACHE_KEYWORDS)}), got "
            f"{', '.join(unknown)}. Correct or leave it out.{suggest(unknown[0], _KEYWORDS)}"
        )
    if reason := find_refusal(type(base)):
        raise ConfigError(
            f"expected a model that can use this cache, got {type(base).__name__}: {reason}. Use "
            "the model without enable()"
        )
    check_no_manager(base)
    check_store_type(prefix_store)
    if prefix_store is not None and not reuse_prefix:
        raise ConfigError(
            "prefix_store: expected a call that compares prompts with caches, got "
            "reuse_prefix=False. Leave reuse_prefix or prefix_store out"
        )


def _choose_methods(
    base: PreTrainedModel,
    keywords: dict[str, Any],
    prefix_store: PrefixStore | None,
    reuse_prefix: bool,
    *,
    capture: bool,
) -> dict[str, tuple[Any, ...]]:
    """Return the methods that `enable` replaces: by name, a function and its arguments."""
    num_layers = getattr(base.config, "num_hidden_layers", None)
    methods: dict[str, tuple[Any, ...]] = {
        _PREPARE_METHOD: (_prepare_cache, keywords, num_layers),
        "_get_candidate_generator": (get_candidate_generator, reuse_prefix),
        "_prefill": (prefill, reuse_prefix, prefix_store),
        "prepare_inputs_for_generation": (prepare_inputs,),
    }
    if reuse_prefix:
        methods["_prepare_position_ids_for_generation"] = (prepare_positions,)
        methods["_maybe_prepare_encoder_kwargs_for_generation"] = (keep_encoder_inputs,)
    if capture:
        methods["_valid_auto_compile_criteria"] = (capturing.choose_forward,)
        methods["get_compiled_call"] = (capturing.get_forward,)
        methods["_optimize_model_for_decode"] = (capturing.decode,)
        methods["prepare_inputs_for_generation"] = (capturing.prepare_inputs, prepare_inputs)
    if _ENGINE_METHOD not in vars(base):  # otherwise, hf_fp8kv.serving.enable was called
        methods[_ENGINE_METHOD] = (_refuse_engine,)
    return methods


def disable(model: _Model) -> _Model:
    """Undo `enable`, if it was called, and return the model.

    Raises:
        ConfigError: The argument is not a model of transformers, or an engine runs the model.
    """
    base = find_generating_model(find_base_model(model, "generate"))
    if _SAVED_ATTENTION.is_set(base):
        check_no_manager(base)
    old_attention = _SAVED_ATTENTION.remove(base)
    if old_attention is not None:
        unfreeze_plan(base)
        _last_uses.pop(base, None)
        remove_methods(base)
        for module in base.modules():
            ROUNDING.remove(module)
        remove_deterministic(base, __name__)
        latent.remove_all(base)
        if base._can_set_attn_implementation():
            set_attn_implementations(base, old_attention)
    return model


class _LastUse:
    """The memory of a cache, measured when it is deleted or when `measure` is called."""

    def __init__(self, cache: FP8PagedCache) -> None:
        self._cache = weakref.ref(cache)
        self._sizes = _NO_SIZES
        # The attributes exist until the pages are measured. They do not refer to the cache.
        weakref.finalize(cache, self._measure_last, vars(cache)).atexit = False

    def measure(self) -> _Sizes:
        """Return the footprint, the stored bytes of the tokens, and their bytes in bf16."""
        cache = self._cache()
        if cache is not None:
            footprint = cache.memory_footprint()
            num_tokens = cache.host_length()
            sizes = cache.count_bytes(num_tokens) or (0.0, 0.0)
            num_sequences = footprint.tokens // max(num_tokens, 1)
            bf16_bytes, stored_bytes = (
                size * num_sequences + footprint.other_bytes for size in sizes
            )
            self._sizes = footprint, stored_bytes, bf16_bytes
        return self._sizes

    def _measure_last(self, attributes: dict[str, Any]) -> None:
        cache = FP8PagedCache.__new__(FP8PagedCache)
        vars(cache).update(attributes)
        self._cache = weakref.ref(cache)
        self.measure()


def summary(model: Any) -> Summary:
    """Return the tokens, bytes and layers of the last `generate()` of an enabled model.

    The model is run on a few tokens, to observe its layers.

    Args:
        model: A model on which `enable` was called, or a PEFT wrapper of such a model.

    Raises:
        ConfigError: The model is not enabled.
    """
    base = find_generating_model(find_base_model(model, "generate"))
    if not _SAVED_ATTENTION.is_set(base):
        raise ConfigError(
            f"model: expected an enabled model, got {type(base).__name__}. Call enable(model) first"
        )
    sizes = _last_uses[base].measure() if base in _last_uses else _NO_SIZES
    report = check_model(base)
    captured = report.capture_obstacle or "after two steps of each call"
    if base.device.type != "cuda":
        captured = "not on this device"
    elif "get_compiled_call" not in vars(base):
        captured = "only with capture=True"
    return Summary(report, *sizes, captured)


def _prepare_cache(
    method: ModelMethod,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Prepare the cache of a `generate()`, and create an FP8 cache.

    `method.arguments` holds the cache's keywords, and the model's number of layers or None.

    This method is replaced instead of `generate`, because some models (Whisper, for long audio)
    generate several times in one call.
    """
    model = method.model
    keywords, num_layers = method.arguments
    if _uses_default_cache(generation_config, model_kwargs):
        if generation_config.cache_implementation == OFFLOADED:
            keywords = {**keywords, "offloading": keywords.get("offloading") or True}
            # transformers refuses this option if a cache is passed.
            generation_config = copy.copy(generation_config)
            generation_config.cache_implementation = None
        is_draft = getattr(generation_config, "is_assistant", False)
        cache = _make_generate_cache(model, keywords, num_layers if is_draft else None)
        model_kwargs[CACHE] = cache
        if not generation_config.return_dict_in_generate:
            _get_self_attention_cache(cache).model_sample = NOT_KEPT
        if is_draft:
            cache.activate_past_recording()
        _install_prefix_conversion(model, keywords)
    result = method.original_method(generation_config, model_kwargs, *args, **kwargs)
    used_cache = _get_self_attention_cache(model_kwargs.get(CACHE))
    if not getattr(generation_config, "is_assistant", False):
        _last_uses.pop(model, None)
        if isinstance(used_cache, FP8PagedCache):
            _last_uses[model] = _LastUse(used_cache)
    return result


def _install_prefix_conversion(model: PreTrainedModel, keywords: dict[str, Any]) -> None:
    """Replace a method of PEFT's prefix tuning, so that it stores the prefix in an FP8 cache.

    PEFT's method passes the prefix in a new cache, and exists only during a `generate()`.
    """
    prepare: Any = model.prepare_inputs_for_generation
    config = getattr(getattr(prepare, "__self__", None), "active_peft_config", None)
    if config is None or config.peft_type not in _PREFIX_TUNING_TYPES:
        return

    @functools.wraps(prepare)  # because `identify_model` checks the wrapped function
    def prepare_with_prefix(*args: Any, **kwargs: Any) -> Any:
        inputs = prepare(*args, **kwargs)
        prefix = _get_self_attention_cache(inputs.get(CACHE))
        if type(prefix) is DynamicCache:
            cache = inputs[CACHE] = _make_generate_cache(model, keywords)
            for index, layer in enumerate(prefix.layers):
                if getattr(layer, "keys", None) is not None:
                    _get_self_attention_cache(cache).update(*_pad_to_full_length(layer), index)
        return inputs

    vars(model)["prepare_inputs_for_generation"] = prepare_with_prefix


def _refuse_engine(method: ModelMethod, *args: Any, **kwargs: Any) -> Any:
    """Refuse to make an engine of transformers, which cannot read FP8 pages."""
    if method.model.config._attn_implementation == ATTENTION:
        raise ConfigError(
            "continuous batching: expected a call of hf_fp8kv.serving.enable(model) first, got "
            "only hf_fp8kv.enable(model), which is for generate(). Call serving.enable(model)"
        )
    return method.original_method(*args, **kwargs)


def _get_self_attention_cache(cache: Any) -> Any:
    """Return `cache`, or the decoder's self-attention cache of an encoder-decoder model."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def _pad_to_full_length(layer: Any) -> list[torch.Tensor]:
    """Return the keys and values of a layer, with padding for the tokens before its window.

    No query attends to these tokens.
    """
    num_tokens = layer.get_seq_length()
    return [
        torch.nn.functional.pad(dense, (0, 0, num_tokens - dense.shape[2], 0))
        for dense in (layer.keys, layer.values)
    ]


def _uses_default_cache(generation_config: Any, model_kwargs: dict[str, Any]) -> bool:
    # The generation configs of old checkpoints contain "hybrid", which transformers ignores.
    is_default = generation_config.cache_implementation in (None, "hybrid", OFFLOADED)
    uses_cache = generation_config.use_cache is not False
    return is_default and uses_cache and model_kwargs.get(CACHE) is None


@without_replacement_note
def _make_generate_cache(
    model: PreTrainedModel, keywords: dict[str, Any], num_layers: int | None = None
) -> Any:
    """Return a cache for `generate()`. For a draft, `num_layers` is the model's number of layers.

    While a draft exits early, the config has fewer layers. The keywords are for the whole model.
    """
    config = model.config
    if num_layers and not config.is_encoder_decoder and config.num_hidden_layers < num_layers:
        whole_config = copy.copy(config)
        whole_config.num_hidden_layers = num_layers
        cache = FP8PagedCache(whole_config, **keywords)
        first_layers = range(len(DynamicCache(config=config).layers))
        plans = {index: plan for index, plan in cache.plan.items() if index in first_layers}
        stock_layers = [index for index in find_stock_layers(cache) if index in first_layers]
        return FP8PagedCache.from_options(config, replace(cache.options, plan=plans), stock_layers)
    cache = FP8PagedCache(config, **keywords)
    if not config.is_encoder_decoder:
        return cache
    # The cross-attention cache is growing, because the length of the encoder's output is only known
    # at the first call. Scales, centers and skipped layers belong to the decoder's self-attention.
    plan = DEFAULT_DTYPE if isinstance(keywords["plan"], StoragePlan) else keywords["plan"]
    keywords = {**keywords, "max_cache_len": None, "scales": None, "skip_layers": (), "plan": plan}
    return EncoderDecoderCache(cache, FP8PagedCache(config, **keywords))
