"""What a model can do with an FP8 cache, and switching it on for every `generate()` of a model."""

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    EncoderDecoderCache,
    PreTrainedModel,
)

from ..cache.cache import FP8PagedCache
from ..cache.layer import PagedLayerBase
from ..cache.paged_tensor import PagedKV
from ..errors import ConfigError, Fp8KVError
from ..modeling.model_support import config_field, refusal
from ..modeling.tensor_parallel import tensor_parallel
from .fp8_paged import NAME, fp8_paged_attention, fp8_paged_mask

__all__ = [
    "LayerReport",
    "ModelReport",
    "check_model",
    "disable",
    "enable",
    "implementations",
    "paged_attention",
    "restore",
    "watched_attention",
]

logger = logging.getLogger(__name__)

FUSED, DENSE, STOCK, REFUSED = "fused", "dense", "stock", "refused"


@dataclass(frozen=True)
class LayerReport:
    """How one layer of a model uses the cache.

    Attributes:
        index: the layer.
        kind: the layer's class in the cache.
        path: "fused": attention reads the stored bytes; "dense": it gets dense K and V made from
            them; "stock": transformers' own layer, in the model's dtype; "refused": not at all.
        why: a sentence, for every path but "fused".
    """

    index: int
    kind: str
    path: str
    why: str = ""


@dataclass(frozen=True)
class ModelReport:
    """What `check_model` found.

    Attributes:
        model: the class of the model.
        layers: one report per layer; empty when the model is refused.
        refused: why the model cannot use the cache at all; empty when it can.
        probed: whether the model was run to find out; else it was looked at.
    """

    model: str
    layers: tuple[LayerReport, ...]
    refused: str = ""
    probed: bool = False

    @property
    def counts(self) -> dict[str, int]:
        """How many layers take each path."""
        return dict(Counter(layer.path for layer in self.layers))

    @property
    def path(self) -> str:
        """The path in one word: of the paged layers the slower one, or "refused"."""
        if self.refused:
            return REFUSED
        paths = self.counts
        return next((path for path in (DENSE, FUSED, STOCK) if path in paths), STOCK)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as numbers and strings, for JSON."""
        return {
            "model": self.model,
            "path": self.path,
            "refused": self.refused,
            "probed": self.probed,
            "counts": self.counts,
            "layers": [vars(layer) for layer in self.layers],
        }

    def __str__(self) -> str:
        if self.refused:
            return f"{self.model}: refused: {self.refused}"
        counts = ", ".join(f"{count} {path}" for path, count in self.counts.items())
        lines = [f"{self.model}: {len(self.layers)} layers: {counts}"]
        told: set[tuple[str, str]] = set()
        for layer in self.layers:
            if layer.why and (layer.path, layer.why) not in told:
                told.add((layer.path, layer.why))
                lines.append(f"  {layer.path} (layer {layer.index}, {layer.kind}): {layer.why}")
        return "\n".join(lines)


def check_model(model: PreTrainedModel, *, probe: bool = True) -> ModelReport:
    """Returns which layers run fused, dense or not at all, and why.

    Args:
        model: any model of transformers; left as it was.
        probe: run the model on three tokens to see what its attention is handed. Only models that
            take `input_ids` alone are run; others, and all with False, are only looked at.

    Raises:
        ConfigError: not a model of transformers.
    """
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(f"model: expected a PreTrainedModel, got {type(model).__name__}")
    name = type(model).__name__
    if why := refusal(type(model)):
        return ModelReport(name, (), why)
    try:
        cache = FP8PagedCache(model.config, backend="torch")
    except Fp8KVError as error:
        return ModelReport(name, (), str(error))
    interface = model._can_set_attn_implementation()
    fed: dict[int, bool] | None = None
    if probe and interface and not model.config.is_encoder_decoder:
        fed = _probe(model, cache)
    layers = tuple(
        _report(index, layer, interface, fed, model.config)
        for index, layer in enumerate(cache.layers)
    )
    return ModelReport(name, layers, probed=fed is not None)


def _report(
    index: int, layer: Any, interface: bool, fed: dict[int, bool] | None, config: Any
) -> LayerReport:
    kind = type(layer).__name__
    if kind == "DummyLayer":
        why = "it holds nothing: it has no attention, or attends to another layer's keys and values"
        return LayerReport(index, kind, STOCK, why)
    if not isinstance(layer, PagedLayerBase):
        return LayerReport(
            index, kind, STOCK, "not plain attention: it stays transformers' own, unquantised"
        )
    if not interface:
        why = "the model has attention code of its own and looks up no attention function"
        return LayerReport(index, kind, DENSE, why)
    if fed is None:
        latent = config_field(config.get_text_config(decoder=True), "kv_lora_rank") is not None
        why = "the model expands what is cached before attention (MLA)"
        return LayerReport(index, kind, DENSE, why) if latent else LayerReport(index, kind, FUSED)
    if index not in fed:
        why = "the model does not call the attention function that it is told to use"
        return LayerReport(index, kind, DENSE, why)
    if fed[index]:
        return LayerReport(index, kind, FUSED)
    return LayerReport(
        index, kind, DENSE, "the model changes keys or values between the cache and attention"
    )


def _probe(model: PreTrainedModel, cache: FP8PagedCache) -> dict[int, bool] | None:
    """Runs two tokens and one more; returns for each layer whether attention was given handles."""
    fed: dict[int, bool] = {}

    def saw(index: int, query: Any, key: Any, value: Any, more: dict[str, Any]) -> None:
        fed[index] = (
            fed.get(index, True) and isinstance(key, PagedKV) and isinstance(value, PagedKV)
        )

    try:
        ids = torch.ones((1, 2), dtype=torch.long, device=model.device)
        with torch.no_grad(), in_eval_mode(model), watched_attention(model, saw):
            model(input_ids=ids, past_key_values=cache, use_cache=True)
            fed.clear()
            model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
    except Exception as error:
        logger.info("%s could not be probed: %s", type(model).__name__, error)
        return None
    return fed


@contextmanager
def watched_attention(
    model: PreTrainedModel, saw: Callable[[int, Any, Any, Any, dict[str, Any]], None]
) -> Iterator[None]:
    """Inside, the attention "fp8_paged" also shows what it is given.

    Args:
        model: one that looks its attention up.
        saw: called with a layer's number, query, key, value and the keyword arguments.
    """
    name = f"{NAME}_watched"

    def watch(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        index = getattr(module, "layer_idx", None)
        if index is not None:
            saw(index, query, key, value, kwargs)
        return fp8_paged_attention(module, query, key, value, *args, **kwargs)

    before = implementations(model)
    AttentionInterface.register(name, watch)
    AttentionMaskInterface.register(name, fp8_paged_mask)
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(name, None)
        restore(model, before)


def implementations(model: PreTrainedModel) -> dict[str, Any]:
    """Returns the attention of a model (under the name "") and of each of its parts."""
    found = {"": model.config._attn_implementation}
    for part in model.config.sub_configs:
        config = getattr(model.config, part, None)
        if config is not None:
            found[part] = config._attn_implementation
    return found


def restore(model: PreTrainedModel, before: dict[str, Any]) -> None:
    """Sets the attention of a model and of each of its parts to what it was."""
    model.set_attn_implementation({part: name for part, name in before.items() if name is not None})
    for part, name in before.items():
        if name is None:  # which is no name that can be set
            config = getattr(model.config, part) if part else model.config
            config._attn_implementation_internal = None


@contextmanager
def in_eval_mode(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model and all of its parts are in eval mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def paged_attention(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model uses the attention "fp8_paged", if it can use any but its own."""
    before = implementations(model)
    if model._can_set_attn_implementation():
        model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        if model._can_set_attn_implementation():
            restore(model, before)


# -- generate() without a keyword ----------------------------------------------------------------

_PLACE = "_hf_fp8kv_enabled"
_HOOK = "_prepare_cache_for_generation"


def enable(model: PreTrainedModel, **cache_keywords: Any) -> PreTrainedModel:
    """From now on `model.generate()`, and pipelines of this model, use an FP8 cache.

    Each call gets a new cache, unless it brings one itself, or asks for another kind of cache or
    for none. The attention is set to "fp8_paged" where the model can. Call again to change the
    keywords; `disable` puts everything back.

    Args:
        model: a model with `generate`.
        cache_keywords: those of `FP8PagedCache`; `tp_rank` and `tp_size` are the model's own.

    Returns:
        The model.

    Raises:
        ConfigError: the model cannot use the cache. ScaleError, BackendError: a keyword is wrong.
    """
    if not isinstance(model, PreTrainedModel) or not hasattr(model, _HOOK):
        raise ConfigError(f"model: expected a model with generate(), got {type(model).__name__}")
    if why := refusal(type(model)):
        raise ConfigError(
            f"expected a model that can use this cache, got {type(model).__name__}: {why}; use it "
            "without"
        )
    cache_keywords = {**tensor_parallel(model), **cache_keywords}
    FP8PagedCache(model.config, **cache_keywords)  # wrong keywords are an error now, not later
    if _PLACE in vars(model):
        disable(model)
    before = implementations(model)
    if model._can_set_attn_implementation():
        model.set_attn_implementation(NAME)
    vars(model)[_HOOK] = _PrepareCache(model, cache_keywords)
    vars(model)[_PLACE] = before
    return model


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Takes back what `enable` did; nothing if it did nothing. Returns the model."""
    before = vars(model).pop(_PLACE, None)
    if before is not None:
        del vars(model)[_HOOK]
        if model._can_set_attn_implementation():
            restore(model, before)
    return model


class _PrepareCache:
    """Makes an FP8 cache where `generate()` makes its cache; follows a model that is copied.

    That place, and not `generate` itself, since some models (Whisper, for long audio) generate
    several times in one call.
    """

    def __init__(self, model: PreTrainedModel, cache_keywords: dict[str, Any]) -> None:
        self._model = weakref.ref(model)  # weak, since the model holds this
        self._keywords = cache_keywords

    @property
    def _owner(self) -> Any:
        model = self._model()
        assert model is not None
        return model

    def __call__(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        model = self._owner
        if _wants_default_cache(generation_config, model_kwargs):
            cache = model_kwargs["past_key_values"] = _new_cache(model, self._keywords)
            if getattr(generation_config, "is_assistant", False):
                cache.activate_past_recording()
        stock = type(model)._prepare_cache_for_generation
        return stock(model, generation_config, model_kwargs, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_PrepareCache":
        return _PrepareCache(memo.get(id(self._owner), self._owner), dict(self._keywords))

    def __reduce__(self) -> tuple[Any, ...]:
        return _PrepareCache, (self._owner, self._keywords)


def _wants_default_cache(generation_config: Any, model_kwargs: dict[str, Any]) -> bool:
    if model_kwargs.get("past_key_values") is not None:
        return False
    kind = generation_config.cache_implementation
    # "hybrid" is what old checkpoints say of themselves; transformers ignores it there.
    if kind not in (None, "hybrid"):
        logger.info("generate() asks for a cache of kind %r: no FP8 cache is made", kind)
        return False
    return generation_config.use_cache is not False


def _new_cache(model: PreTrainedModel, keywords: dict[str, Any]) -> Any:
    cache = FP8PagedCache(model.config, **keywords)
    if not model.config.is_encoder_decoder:
        return cache
    # How long the encoder's output is shows only in the first call: the cross part grows. Scales
    # and a choice of layers are made for the decoder's own attention.
    cross = {**keywords, "max_cache_len": None, "scales": None, "skip_layers": ()}
    return EncoderDecoderCache(cache, FP8PagedCache(model.config, **cross))
